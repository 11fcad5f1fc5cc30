"""Chosen coordinates of a gradient, ``G[o_j, c_j] = sum_t g[t, o_j] a[t, c_j]``; G is not built where that is cheaper.

A coordinate is (parameter name, flat index in the layout the parameter is *stored* in), so it does not depend on how
layers are stacked, biases folded or weights transposed in a leaf.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attrax.core.algebra import concat_rows, wide
from attrax.core.leaves import Diagonal, Factorized, Grouped, Leaf, Lookup, Materialized, Part, Sum
from attrax.core.reduce import materialize_leaf
from attrax.core.sides import is_matrix
from attrax.core.terms import with_bias_column

_SPARSE = 256
_CHUNK = 2**24


@dataclass(frozen=True, eq=False, slots=True)
class Positions:
    """Where chosen coordinates lie in a leaf's gradient [No, Ni (+1)] (or [d], then `o` is 0).

    Attributes:
        o: Output index of each.
        c: Input index of each.
        parts: One per parameter, in the leaf's order (weights, then biases): its name and number of coordinates.
        sizes: Number of entries of each parameter.
    """

    o: Int[Tensor, " k"]
    c: Int[Tensor, " k"]
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]


def gradient_shape(leaf: Leaf) -> tuple[int, int]:
    """[No, Ni (+1 with bias)] of a matrix gradient, [U No, Ni] of a grouped one, [1, d] of a vector.

    >>> from attrax.core.leaves import factorized
    >>> gradient_shape(factorized("w", torch.ones(1, 2, 3), torch.ones(1, 2, 5), bias="b"))
    (5, 4)
    """
    match leaf:
        case Factorized():
            return leaf.g.shape[-1], leaf.a.shape[-1] + leaf.bias
        case Lookup():
            return leaf.rows, leaf.g.shape[-1]
        case Diagonal():
            return 1, leaf.g.shape[-1]
        case Grouped():
            return leaf.parts[0].width, leaf.a.shape[-1]
        case Materialized():
            shape = leaf.w.shape[1:]
            return (prod(shape[:-1]), shape[-1]) if len(shape) in (2, 3) else (1, prod(shape))
        case Sum():
            return gradient_shape(leaf.uses[0])


def positions(leaf: Leaf, choose: Callable[[str, tuple[int, ...]], Int[Tensor, " k"]]) -> Positions:
    """Choose coordinates of every parameter of a leaf.

    Args:
        leaf: The leaf, in its own basis.
        choose: ``(parameter, stored shape) -> flat indices``.

    >>> from attrax.core.leaves import factorized
    >>> leaf = factorized("w", torch.ones(1, 2, 3), torch.ones(1, 2, 5), transposed=True)
    >>> at = positions(leaf, lambda name, shape: torch.tensor([1]))
    >>> at.o, at.c
    (tensor([1]), tensor([0]))
    """
    _, Ni = gradient_shape(leaf)
    groups = _groups(leaf)
    if groups is not None:
        return _in_groups(leaf.parts[0], *groups, choose)
    if not is_matrix(leaf):
        c = choose(leaf.parts[0].weight, leaf.parts[0].shape or (Ni,))
        return Positions(torch.zeros_like(c), c, (Part(leaf.parts[0].weight, len(c)),), (Ni,))
    first_use = leaf.uses[0] if isinstance(leaf, Sum) else leaf
    folded = isinstance(first_use, Factorized | Materialized) and first_use.bias
    weights: list[_Found] = []
    biases: list[_Found] = []
    first = 0
    for part in leaf.parts:
        No, width = part.width, Ni - folded
        flat = choose(part.weight, (width, No) if part.transposed else (No, width))
        o, c = (flat % No, flat // No) if part.transposed else (flat // width, flat % width)
        weights.append(_Found(part.weight, No * width, o + first, c))
        if folded and part.bias is not None:
            flat = choose(part.bias, (No,))
            biases.append(_Found(part.bias, No, flat + first, torch.full_like(flat, width)))
        first += No
    found = weights + biases
    parts = tuple(Part(each.name, len(each.o)) for each in found)
    o, c = torch.cat([each.o for each in found]), torch.cat([each.c for each in found])
    return Positions(o, c, parts, tuple(each.size for each in found))


def _groups(leaf: Leaf) -> tuple[int, int, int] | None:
    """(U, No, Ni) of a grouped gradient."""
    match leaf:
        case Grouped():
            return leaf.g.shape[1], leaf.g.shape[3], leaf.a.shape[3]
        case Materialized() if leaf.w.ndim == 4:
            return leaf.w.shape[1], leaf.w.shape[2], leaf.w.shape[3]
        case Sum():
            return _groups(leaf.uses[0])
        case _:
            return None


def _in_groups(
    part: Part, U: int, No: int, Ni: int, choose: Callable[[str, tuple[int, ...]], Int[Tensor, " k"]]
) -> Positions:
    flat = choose(part.weight, part.shape or ((U, Ni, No) if part.transposed else (U, No, Ni)))
    within = flat % (No * Ni)
    o, c = (within % No, within // No) if part.transposed else (within // Ni, within % Ni)
    return Positions(flat // (No * Ni) * No + o, c, (Part(part.weight, len(flat)),), (U * No * Ni,))


class _Found(NamedTuple):
    """Chosen entries of one parameter."""

    name: str
    size: int
    o: Tensor
    c: Tensor


def gathered_rows(leaf: Leaf, at: Positions) -> Leaf:
    """The coordinates with their rows: a Diagonal leaf of ``x = a[.., c]`` and ``g = g[.., o]``, 2 T k numbers.

    >>> from attrax.core.leaves import factorized
    >>> leaf = factorized("w", torch.ones(1, 2, 3), torch.ones(1, 2, 5))
    >>> gathered_rows(leaf, positions(leaf, lambda name, shape: torch.tensor([1, 7]))).g.shape
    torch.Size([1, 2, 2])
    """
    match leaf:
        case Factorized():
            a = with_bias_column(leaf.a, leaf.bias)
            return Diagonal(_pick(a, at.c), _pick(leaf.g, at.o), at.parts, leaf.calls)
        case Lookup():
            hot = (leaf.ids.unsqueeze(-1) == at.o.to(leaf.ids.device)).to(wide(leaf.g.dtype))
            return Diagonal(hot, _pick(leaf.g, at.c), at.parts, leaf.calls)
        case Grouped() if leaf.positions:
            place = at.o // leaf.g.shape[3] * leaf.a.shape[3] + at.c
            a, g = (x.transpose(1, 2).flatten(2) for x in (leaf.a, leaf.g))
            return Diagonal(_pick(a, place), _pick(g, at.o), at.parts, leaf.calls)
        case Grouped():
            return Materialized(_entries(materialize_leaf(leaf), at), at.parts)
        case Diagonal():
            x = leaf.x if leaf.x.shape[-1] == 1 else _pick(leaf.x, at.c)
            return replace(leaf, x=x, g=_pick(leaf.g, at.c), parts=at.parts)
        case Materialized():
            return Materialized(_entries(leaf, at), at.parts)
        case Sum():
            uses = [gathered_rows(use, at) for use in leaf.uses]
            rows = [use for use in uses if isinstance(use, Diagonal)]
            return concat_rows(rows) if len(rows) == len(uses) else Sum(tuple(uses), at.parts)


def is_sparse(leaf: Leaf, count: int) -> bool:
    """Whether so many coordinates are cheaper to gather than to read off the built gradient.

    Reading 2 T operands a coordinate is slower than the whole gradient's GEMM beyond one coordinate in a few hundred:
    on one CPU core and 768 x 768 both take the same at one in 200; GPUs' rates put it near one in 400.
    """
    return count * _SPARSE < prod(gradient_shape(leaf))


def gathered(leaf: Leaf, at: Positions) -> Float[Tensor, "B k"]:
    """The coordinates summed over rows, in bounded memory: gathered where sparse, else read off the built gradient."""
    if isinstance(leaf, Sum):
        return torch.stack([gathered(use, at) for use in leaf.uses]).sum(0)
    if isinstance(leaf, Materialized | Diagonal) or not is_sparse(leaf, len(at.o)):
        return _entries(materialize_leaf(leaf), at)
    step = max(1, _CHUNK // max(1, leaf.g.shape[0] * leaf.g.shape[-2]))
    chunks = zip(at.o.split(step), at.c.split(step), strict=True)
    pieces = [replace(at, o=o, c=c, parts=(Part("", len(o)),)) for o, c in chunks]
    return torch.cat([materialize_leaf(gathered_rows(leaf, piece)).w for piece in pieces], 1)


def _pick(x: Float[Tensor, "B T N"], index: Int[Tensor, " k"]) -> Float[Tensor, "B T k"]:
    return x.to(wide(x.dtype))[..., index.to(x.device)]


def _entries(leaf: Materialized, at: Positions) -> Float[Tensor, "B k"]:
    w = leaf.w.to(wide(leaf.w.dtype))
    flat = w.reshape(w.shape[0], *gradient_shape(leaf))
    return flat[:, at.o.to(w.device), at.c.to(w.device)]
