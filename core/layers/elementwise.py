"""Parameters that act entry by entry."""

from math import prod

import torch
from torch import Tensor, nn

from attrax.core.algebra import wide
from attrax.core.layers.rule import Rule
from attrax.core.leaves import Diagonal, Leaf, Part


def prelu(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = max(x, 0) + w min(x, 0), one w or one a channel [B, C, ...]:  dw = sum g min(x, 0).

    With one w, rows are the places of all axes but the last, whose entries are summed.
    """
    assert isinstance(module, nn.PReLU)
    part, low = (Part("weight", module.num_parameters),), x.clamp_max(0).to(wide(x.dtype))
    if module.num_parameters > 1:
        low, g = (v.reshape(*v.shape[:2], prod(v.shape[2:])).transpose(1, 2) for v in (low, g))
        return {"weight": Diagonal(low, g, part)}
    product = (g * low).reshape(x.shape[0], prod(x.shape[1:-1]), -1 if x.numel() else 0).sum(-1, keepdim=True)
    return {"weight": Diagonal(torch.ones_like(product), product, part)}


RULES = (Rule("PReLU", nn.PReLU, prelu, parameters=("weight",), rows=False),)
