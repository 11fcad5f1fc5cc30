"""What a row counts in a cross entropy that a loop computes of logits, told from the gradient that arrives at them.

The gradient of ``c CE(z, y)`` is ``c (softmax(z) - onehot(y))``: whether a row's has this form, and with which c, can
be seen without knowing y.  This is no guess at how a loss weighs examples; it finds declarations that contradict it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_ROWS = 64
_NEAR = 1e-3


def row_weight(logits: Float[Tensor, "*rows V"], g: Float[Tensor, "*rows V"]) -> float | None:
    """The weight of every row in a cross entropy of logits.

    Args:
        logits: The logits.
        g: Their gradient; rows of zeros have no part in the loss.

    Returns:
        The weight; None if the gradient is not that of a cross entropy, if rows differ, or fewer than two have one.

    >>> z = torch.randn(5, 4, requires_grad=True)
    >>> torch.nn.functional.cross_entropy(z, torch.arange(5) % 4).backward()
    >>> round(row_weight(z.detach(), z.grad), 6)
    0.2
    """
    found = g.detach().flatten(0, -2)
    used = found.any(-1).nonzero()[:_ROWS, 0]
    if len(used) < 2:
        return None
    arrived, chances = found[used].double(), logits.flatten(0, -2)[used].double().softmax(-1)
    form = chances.scatter_add(-1, arrived.argmin(-1, keepdim=True), -torch.ones_like(chances[:, :1]))
    c = (arrived * form).sum(-1) / form.square().sum(-1)
    left = (arrived - c[:, None] * form).abs().amax(-1)
    alike = bool(
        (left <= _NEAR * arrived.abs().amax(-1)).all() and ((c - c[0]).abs() <= _NEAR * c[0].abs()).all()
    )
    return float(c[0]) if alike else None
