"""Per-example optimizer directions: what an example alone would have made the optimizer do, in place of its gradient.

    Gamma_i = D of direction(optimizer, gamma_i, state)           gamma_i on the scale that the optimizer sees

The moments are those before the coming step.  A direction is no linear function of the gradient: it is taken of the
whole gradient, before any projection.  An example without gradient still has a direction, that of the momentum, which
all examples share; "centered" directions Gamma(gamma_i) - Gamma(0) are without it.

References: Xia et al. 2024 (LESS, arXiv:2402.04333), section 3; Wang et al. 2024 (arXiv:2406.11011).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from attrax.core.arrange import arranged, by_parameter
from attrax.core.leaves import Leaf
from attrax.core.optimizers import Optimizer, State, direction
from attrax.core.source import Transform
from attrax.core.tree import GradTree

_AT_ONCE = 2**22


def directed(
    optimizers: Mapping[str, Optimizer], states: Mapping[str, State], *, centered: bool = False
) -> Transform:
    """Transform that turns gradients into update directions.

    Args:
        optimizers: Kind and hyperparameters by parameter name; weight and bias of a layer may differ.
        states: State before the step by parameter name, in the parameters' stored layout.
        centered: Give Gamma(gamma_i) - Gamma(0).

    Returns:
        ``(name, leaf) -> Materialized`` of the directions; `attrax.targeted` puts the gradients on a scale before.

    Raises:
        ValueError: If a leaf is in another basis (projected), or a parameter has no optimizer.

    >>> from attrax.core import factorized
    >>> adam = Optimizer("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.0})
    >>> leaf = factorized("w", torch.ones(2, 1, 2), torch.tensor([[[2.0]], [[-3.0]]]))
    >>> directed({"w": adam}, {})("w", leaf).w
    tensor([[[ 1.,  1.]],
            [[-1., -1.]]])
    """

    def moved(name: str, g: Tensor, state: State) -> Tensor:
        if name not in optimizers:
            raise ValueError(f"directed: no optimizer moves parameter '{name}'; leave its layer out.")
        rule = optimizers[name]
        origin = direction(rule, torch.zeros_like(g[0]), state)[0] if centered else None
        pieces = g.split(max(1, _AT_ONCE // max(1, g[0].numel()))) if len(g) else (g,)
        found = torch.cat([direction(rule, piece, state)[0] for piece in pieces])
        return found if origin is None else found - origin

    def run(name: str, leaf: Leaf) -> Leaf:
        if leaf.basis:
            raise ValueError(
                f"directed: leaf '{name}' is in basis '{leaf.basis}'. Directions are taken of whole gradients: project "
                "after, not before."
            )
        gradients = by_parameter(GradTree({name: leaf}))
        return arranged(leaf, {n: moved(n, g, states.get(n, {})) for n, g in gradients.items()})

    return run
