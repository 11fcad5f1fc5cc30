"""Per-example optimizer directions: what an example alone would have made the optimizer do, in place of its gradient.

    Gamma_i = D of direction(optimizer, gamma_i, state)           gamma_i on the scale that the optimizer sees

The moments are those before the coming step.  A direction is no linear function of the gradient: it is taken of the
whole gradient, before any projection.  An example without gradient still has a direction, that of the momentum, which
all examples share; "centered" directions Gamma(gamma_i) - Gamma(0) are without it.  With SparseAdam an example moves
the rows that it looks up itself, and Gamma(0) is that of zeros in these rows.

References: Xia et al. 2024 (LESS, arXiv:2402.04333), section 3; Wang et al. 2024 (arXiv:2406.11011).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attrax.core.arrange import arranged, by_parameter
from attrax.core.leaves import Leaf, Lookup, Sum
from attrax.core.optimizer_rules import Touched
from attrax.core.optimizers import Optimizer, State, direction
from attrax.core.source import Transform
from attrax.core.tree import GradTree, Target

_AT_ONCE = 2**22


@dataclass(frozen=True)
class Directions:
    """What ``capture(directions=...)`` records: what each example alone would have made the optimizer do.

    Directions carry no loss weight: methods take them with ``target="as_trained"``, whichever target they were made
    of.  They are not clipped, but for "as_trained".

    Attributes:
        target: Scale of an example's gradient: "mean", its own loss averaged over its tokens, as if it were alone in
            the batch; "sum"; or "as_trained", its share in the gradient that the optimizer uses, clipped and averaged
            over processes.
        centered: Leave out the direction of a zero gradient, which all examples share.
        variant: "torch", or "official" for Adam as in the code released with LESS (see `attrax.methods.Less`).
    """

    target: Target = "mean"
    centered: bool = False
    variant: Literal["torch", "official"] = "torch"


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
        ValueError: If a leaf is in another basis (projected), a parameter has no optimizer, or the rows that an example
            touches are unknown, of a parameter that SparseAdam moves.

    >>> from attrax.core import factorized
    >>> adam = Optimizer("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.0})
    >>> leaf = factorized("w", torch.ones(2, 1, 2), torch.tensor([[[2.0]], [[-3.0]]]))
    >>> directed({"w": adam}, {})("w", leaf).w
    tensor([[[ 1.,  1.]],
            [[-1., -1.]]])
    """

    def moved(name: str, g: Tensor, state: State, leaf: Leaf) -> Tensor:
        if name not in optimizers:
            raise ValueError(f"directed: no optimizer moves parameter '{name}'; leave its layer out.")
        rule = optimizers[name]
        rows = _known_rows(leaf) if rule.sparse else None
        at_once = max(1, _AT_ONCE // max(1, g[:1].numel()))
        pieces = g.split(at_once)
        own = [None] * len(pieces) if rows is None else rows.split(at_once)
        found = torch.cat(
            [direction(rule, piece, state, at)[0] for piece, at in zip(pieces, own, strict=True)]
        )
        if not centered:
            return found
        every = None if rows is None else rows.new_ones(rows.shape[1])
        origin, _ = direction(rule, g.new_zeros(g.shape[1:]), state, every)
        return found - (origin if rows is None else origin * rows.unsqueeze(-1))

    def run(name: str, leaf: Leaf) -> Leaf:
        if leaf.basis:
            raise ValueError(
                f"directed: leaf '{name}' is in basis '{leaf.basis}'. Directions are taken of whole gradients: project "
                "after, not before."
            )
        gradients = by_parameter(GradTree({name: leaf}))
        return arranged(leaf, {n: moved(n, g, states.get(n, {}), leaf) for n, g in gradients.items()})

    return run


def touched(leaf: Leaf) -> Touched | None:
    """Which rows of a sparse embedding each example looks up [B, V]; None if the leaf does not tell.

    >>> from attrax.core.leaves import Lookup, Part
    >>> ids = torch.tensor([[1, 1], [2, -1]])
    >>> touched(Lookup(ids, torch.zeros(2, 2, 3), (Part("w", 3),), 3, sparse=True)).int()
    tensor([[0, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    uses = leaf.uses if isinstance(leaf, Sum) else (leaf,)
    lookups = [use for use in uses if isinstance(use, Lookup) and use.sparse and not use.basis]
    if len(lookups) < len(uses):
        return None
    found = [use.ids.new_zeros(len(use.ids), use.rows + 1, dtype=torch.bool) for use in lookups]
    for rows, use in zip(found, lookups, strict=True):
        rows.scatter_(1, use.ids.where(use.ids >= 0, use.rows).long(), True)
    return torch.stack(found).any(0)[:, :-1]


def _known_rows(leaf: Leaf) -> Touched:
    rows = touched(leaf)
    if rows is None:
        raise ValueError(
            f"directed: leaf '{leaf.parts[0].weight}': SparseAdam moves only the rows that an example looks up, which "
            f"a {type(leaf).__name__} leaf does not tell. Take directions of the gradients of an embedding with "
            "sparse=True as they were captured (factored), before any mask or projection."
        )
    return rows
