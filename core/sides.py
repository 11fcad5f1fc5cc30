"""Maps on the two sides of a gradient: ``M_g G M_a^T = sum_t (M_g g_t)(M_a a_t)^T``, never building G where rows exist.

A side's map is a matrix, a selection of coordinates, or None for the identity.  Whatever supplies them (random
projections, masks, eigenvectors), a folded bias is the last column of side a, every stacked part has its own M_g, all
groups of a parameter share one map a side, an embedding's one-hot side is a lookup of columns, and the uses of a tied
weight meet the same maps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attrax.core.algebra import carries, concat_rows, wide
from attrax.core.leaves import Diagonal, Factorized, Grouped, Leaf, Lookup, Materialized, Part, Sum
from attrax.core.reduce import materialize_leaf
from attrax.core.terms import with_bias_column


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """A scaled selection of coordinates: ``(M x)_j = scale * x[index_j]``."""

    index: Int[Tensor, " k"]
    scale: float


Side: TypeAlias = Float[Tensor, "_ _"] | Selection | None
Sides: TypeAlias = Callable[[str, str, int], Side]
"""``(name, "a" | "g", width) -> map``; side a by the leaf's name, side g by the part's weight."""


def cached(sides: Sides) -> Sides:
    """The same maps, each made once."""
    made: dict[tuple[str, str, int], Side] = {}

    def get(name: str, side: str, width: int) -> Side:
        key = (name, side, width)
        if key not in made:
            made[key] = sides(*key)
        return made[key]

    return get


def _apply(x: Float[Tensor, "... width"], side: Side) -> Float[Tensor, "... k"]:
    x = x.to(wide(x.dtype))
    if isinstance(side, Selection):
        return x[..., side.index.to(x.device)] * side.scale
    return x if side is None else x @ side.to(x.device, x.dtype)


def _columns(ids: Int[Tensor, "B T"], rows: int, side: Side, like: Tensor) -> Float[Tensor, "B T k"]:
    """The map's columns at `ids`: it applied to one-hot vectors."""
    dtype = wide(like.dtype)
    if isinstance(side, Selection):
        return (ids.unsqueeze(-1) == side.index.to(ids.device)).to(dtype) * side.scale
    table = torch.eye(rows) if side is None else side
    return table.to(like.device, dtype)[ids]


def _width(side: Side, width: int) -> int:
    if isinstance(side, Selection):
        return len(side.index)
    return width if side is None else side.shape[1]


def on_sides(sides: Sides, basis: str, name: str, leaf: Leaf) -> Leaf:
    """Apply the maps to a leaf.

    Args:
        sides: Supplies the maps.
        basis: Label of the new coordinates.
        name: Name of the leaf.
        leaf: Gradients; vector parameters are built and left as they are.

    Returns:
        Factored rows where the leaf had them, without folded bias, else the mapped gradient.

    >>> from attrax.core.leaves import factorized
    >>> leaf = factorized("w", torch.ones(1, 2, 3), torch.ones(1, 2, 5), bias="b")
    >>> on_sides(lambda name, side, width: torch.ones(width, 2), "ones", "w", leaf).a[0, 0]
    tensor([4., 4.])
    """
    maps = [sides(part.weight, "g", part.width) for part in leaf.parts] if is_matrix(leaf) else []
    parts = [replace(p, width=_width(m, p.width)) for p, m in zip(leaf.parts, maps, strict=False)]
    match leaf:
        case Factorized():
            width = leaf.a.shape[-1] + leaf.bias
            a = _apply(with_bias_column(leaf.a, leaf.bias), sides(name, "a", width))
            g = _per_part(leaf.g, leaf.parts, maps)
            return Factorized(a, g, tuple(parts), False, leaf.calls, basis)
        case Lookup():
            a = _apply(leaf.g, sides(name, "a", leaf.g.shape[-1]))
            g = _columns(leaf.ids, leaf.rows, maps[0], leaf.g) * carries(leaf.g)
            return Factorized(a, g, tuple(parts), False, leaf.calls, basis)
        case Grouped():
            (part,), groups, No = leaf.parts, leaf.g.shape[1], leaf.g.shape[-1]
            map_g = sides(part.weight, "g", No)
            a, g = _apply(leaf.a, sides(name, "a", leaf.a.shape[-1])), _apply(leaf.g, map_g)
            part = replace(part, width=groups * g.shape[-1], shape=(), transposed=False)
            return replace(leaf, a=a, g=g, parts=(part,), basis=basis)
        case Sum():
            uses = [on_sides(sides, basis, name, use) for use in leaf.uses]
            factored = [use for use in uses if isinstance(use, Factorized)]
            return (
                concat_rows(factored)
                if len(factored) == len(uses)
                else Sum(tuple(uses), uses[0].parts, basis)
            )
        case Materialized() if maps:
            w = _apply(leaf.w, sides(name, "a", leaf.w.shape[-1]))
            return Materialized(_per_part(w.mT, leaf.parts, maps).mT, tuple(parts), False, basis)
        case Materialized() if leaf.w.ndim == 4:
            (part,), (groups, No, Ni) = leaf.parts, leaf.w.shape[1:]
            w = _apply(_apply(leaf.w, sides(name, "a", Ni)).mT, sides(part.weight, "g", No)).mT
            part = replace(part, width=groups * w.shape[2], shape=(), transposed=False)
            return Materialized(w, (part,), False, basis)
        case Materialized() | Diagonal():
            return replace(materialize_leaf(leaf), basis=basis)


def _per_part(
    g: Float[Tensor, "... No"], parts: tuple[Part, ...], maps: list[Side]
) -> Float[Tensor, "... k"]:
    pieces = g.split([part.width for part in parts], -1)
    return torch.cat([_apply(x, side) for x, side in zip(pieces, maps, strict=True)], -1)


def is_matrix(leaf: Leaf) -> bool:
    """Whether the gradient has two sides, outputs and inputs.

    >>> from attrax.core.leaves import diagonal
    >>> is_matrix(diagonal("ln.bias", torch.ones(1, 1, 1), torch.ones(1, 1, 3)))
    False
    """
    match leaf:
        case Sum():
            return is_matrix(leaf.uses[0])
        case Materialized():
            return leaf.w.ndim == 3
        case _:
            return isinstance(leaf, Factorized | Lookup)


def elementwise(leaf: Leaf, dim: int) -> Leaf:
    """Keep the diagonal of each part's k x k gradient, times sqrt(k): rows ``sqrt(k) (M_g g_t) * (M_a a_t)``.

    >>> leaf = Factorized(torch.ones(1, 2, 4), torch.ones(1, 2, 8), (Part("q", 4), Part("k", 4)))
    >>> elementwise(leaf, 4).g.shape
    torch.Size([1, 2, 8])
    """
    match leaf:
        case Factorized():
            x = leaf.a.repeat(1, 1, len(leaf.parts))
            return Diagonal(x, leaf.g * dim**0.5, leaf.parts, leaf.calls, leaf.basis)
        case Grouped():
            (part,), width = leaf.parts, leaf.g.shape[1] * dim
            a, g = (x.transpose(1, 2).flatten(2) for x in (leaf.a, leaf.g))
            return Diagonal(a, g * dim**0.5, (replace(part, width=width),), leaf.calls, leaf.basis)
        case Materialized() if leaf.w.ndim == 3:
            blocks = leaf.w.unflatten(1, (len(leaf.parts), dim))
            return replace(leaf, w=blocks.diagonal(dim1=2, dim2=3).flatten(1) * dim**0.5)
        case Materialized() if leaf.w.ndim == 4:
            part = replace(leaf.parts[0], width=leaf.w.shape[1] * dim)
            return replace(leaf, w=leaf.w.diagonal(dim1=2, dim2=3).flatten(1) * dim**0.5, parts=(part,))
        case Sum():
            return replace(leaf, uses=tuple(elementwise(use, dim) for use in leaf.uses))
        case _:
            return leaf
