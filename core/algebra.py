"""Structural operations on leaves: slice, scale, pad, join, split.  None of them changes what a leaf means."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from attrax.core.leaves import Diagonal, Factorized, Grouped, Leaf, Lookup, Materialized, Sum
from attrax.core.pytree import tree_map

T = TypeVar("T", bound=Leaf)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in for inputs of `dtype`: float32 at least.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def take(leaf: T, examples: Tensor | slice) -> T:
    """The leaf of some of its examples, by index, boolean mask or slice.

    >>> from attrax.core import diagonal
    >>> take(diagonal("b", torch.ones(4, 1, 1), torch.ones(4, 1, 3)), slice(0, 2)).g.shape
    torch.Size([2, 1, 3])
    """
    return tree_map(lambda x: x[examples], leaf)


def on_gradient(leaf: Leaf, function: Callable[[Tensor], Tensor]) -> Leaf:
    """Apply a function that is linear in G: to `g` of a factored leaf, to `w` of a materialized one, to every use."""
    match leaf:
        case Sum():
            return replace(leaf, uses=tuple(on_gradient(use, function) for use in leaf.uses))
        case Materialized():
            return replace(leaf, w=function(leaf.w))
        case _:
            return replace(leaf, g=function(leaf.g))


def scale_examples(leaf: Leaf, scale: Float[Tensor, " B"] | None) -> Leaf:
    """Multiply each example's gradient by a number, in float32 or better; None leaves it as it is.

    >>> from attrax.core import diagonal
    >>> leaf = diagonal("b", torch.ones(2, 1, 1), torch.ones(2, 1, 1))
    >>> scale_examples(leaf, torch.tensor([2.0, 3.0])).g.flatten()
    tensor([2., 3.])
    """
    if scale is None:
        return leaf

    def scaled(g: Tensor) -> Tensor:
        factor = scale.to(g.device, wide(g.dtype)).reshape(-1, *[1] * (g.ndim - 1))
        return g * factor

    return on_gradient(leaf, scaled)


def zeros_like(leaf: T, examples: int) -> T:
    """A leaf of some examples whose gradients are zero: what a block without this leaf says of it.

    >>> from attrax.core import diagonal
    >>> zeros_like(diagonal("b", torch.ones(4, 2, 1), torch.ones(4, 2, 3)), 1).g.sum()
    tensor(0.)
    """
    return tree_map(lambda x: x.new_full((examples, *x.shape[1:]), nothing(x)), leaf)


def nothing(x: Tensor) -> int:
    """What an array of a leaf holds in rows that an example does not have: zeros, and no ids.

    >>> nothing(torch.ones(1)), nothing(torch.ones(1, dtype=torch.long))
    (0, -1)
    """
    return 0 if x.is_floating_point() else -1


def carries(g: Float[Tensor, "... No"]) -> Bool[Tensor, "... 1"]:
    """Which rows carry a gradient.

    >>> carries(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])).flatten()
    tensor([ True, False])
    """
    return (g != 0).any(-1, keepdim=True)


def pad_rows(leaf: T, rows: int) -> T:
    """Append zero rows to every call of a factored leaf until T >= `rows`; gradients stay the same."""
    if isinstance(leaf, Materialized):
        return leaf
    if isinstance(leaf, Sum):
        return replace(leaf, uses=tuple(pad_rows(use, rows) for use in leaf.uses))
    return _lay_out(leaf, leaf.calls, max(ceil(rows / leaf.calls), _positions(leaf)))


def _axis(leaf: Factorized | Lookup | Diagonal | Grouped) -> int:
    """The axis of rows in every array of a factored leaf."""
    return 2 if isinstance(leaf, Grouped) else 1


def _positions(leaf: Factorized | Lookup | Diagonal | Grouped) -> int:
    return leaf.g.shape[_axis(leaf)] // leaf.calls


def _lay_out(leaf: T, calls: int, positions: int) -> T:
    """Rows as `calls` calls of `positions` rows each, the missing ones zero."""
    if isinstance(leaf, Materialized | Sum) or (leaf.calls, _positions(leaf)) == (calls, positions):
        return leaf
    now, axis = (leaf.calls, _positions(leaf)), _axis(leaf)
    missing = [0, positions - now[1], 0, calls - now[0]]

    def pad(x: Tensor) -> Tensor:
        padding = [0] * 2 * (x.ndim - axis - 1) + missing
        laid_out = functional.pad(x.unflatten(axis, now), padding, value=nothing(x))
        return laid_out.flatten(axis, axis + 1)

    return replace(tree_map(pad, leaf), calls=calls)


def first_rows(leaf: T, length: int) -> T:
    """The leaf of its first rows only.

    >>> from attrax.core import diagonal
    >>> first_rows(diagonal("b", torch.ones(2, 5, 1), torch.ones(2, 5, 3)), 2).g.shape
    torch.Size([2, 2, 3])
    """
    if isinstance(leaf, Materialized | Sum):
        return leaf
    axis = _axis(leaf)
    return tree_map(lambda x: x.narrow(axis, 0, min(length, x.shape[axis])), leaf)


def trim_rows(leaf: T) -> T:
    """Drop the trailing rows that are nothing for every example.  Reads the data (one host sync a leaf)."""
    if isinstance(leaf, Materialized):
        return leaf
    if isinstance(leaf, Sum):
        return replace(leaf, uses=tuple(trim_rows(use) for use in leaf.uses))
    if leaf.calls != 1:
        return leaf
    there = leaf.ids >= 0 if isinstance(leaf, Lookup) and leaf.sparse else (leaf.g != 0).any(-1)
    used = there.flatten(0, -2).any(0).nonzero()
    return first_rows(leaf, int(used[-1]) + 1 if len(used) else 1)


def concat(leaves: Sequence[T]) -> T:
    """Join leaves of the same parameters along the examples, padding shorter ones with zero rows.

    Raises:
        ValueError: If the leaves differ in kind or parts.

    >>> from attrax.core import diagonal
    >>> a, b = (diagonal("b", torch.ones(1, t, 1), torch.ones(1, t, 3)) for t in (2, 5))
    >>> concat([a, b]).g.shape
    torch.Size([2, 5, 3])
    """
    first = leaves[0]
    if len(leaves) == 1:
        return first
    if any(
        type(leaf) is not type(first) or leaf.parts != first.parts or leaf.basis != first.basis
        for leaf in leaves
    ):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise ValueError(
            f"concat: leaf '{first.parts[0].weight}': cannot join {kinds} or different parts or bases. "
            "Capture all blocks with the same layer selection and transform."
        )
    if isinstance(first, Sum):
        columns = zip(*(leaf.uses for leaf in leaves if isinstance(leaf, Sum)), strict=True)
        return replace(first, uses=tuple(concat(column) for column in columns))
    rows = [leaf for leaf in leaves if not isinstance(leaf, Materialized | Sum)]
    if rows:
        calls, positions = max(leaf.calls for leaf in rows), max(_positions(leaf) for leaf in rows)
        leaves = [_lay_out(leaf, calls, positions) for leaf in leaves]
    names = [n for n in ("a", "x", "ids", "g", "w") if hasattr(first, n)]
    return replace(leaves[0], **{n: torch.cat([getattr(leaf, n) for leaf in leaves]) for n in names})


def concat_rows(leaves: Sequence[T]) -> T:
    """Join several calls of one parameter (same examples) along the rows: G adds up, cross terms included.

    >>> from attrax.core import diagonal
    >>> a = diagonal("b", torch.ones(1, 2, 1), torch.ones(1, 2, 3))
    >>> concat_rows([a, a]).calls
    2
    """
    first = leaves[0]
    if len(leaves) == 1:
        return first
    if isinstance(first, Materialized):
        built = [leaf.w for leaf in leaves if isinstance(leaf, Materialized)]
        return replace(first, w=torch.stack(built).sum(0, dtype=wide(first.w.dtype)))
    if isinstance(first, Sum):
        return replace(
            first, uses=tuple(use for leaf in leaves if isinstance(leaf, Sum) for use in leaf.uses)
        )
    rows = [leaf for leaf in leaves if not isinstance(leaf, Materialized | Sum)]
    positions = max(_positions(leaf) for leaf in rows)
    rows = [_lay_out(leaf, leaf.calls, positions) for leaf in rows]
    names = [n for n in ("a", "x", "ids", "g") if hasattr(first, n)]
    fields = {n: torch.cat([getattr(leaf, n) for leaf in rows], _axis(rows[0])) for n in names}
    return replace(first, calls=sum(leaf.calls for leaf in rows), **fields)


def unstack(leaf: Factorized) -> dict[str, Factorized]:
    """One leaf per stacked part; all share `a`."""
    pieces = leaf.g.split([part.width for part in leaf.parts], dim=-1)
    return {p.weight: replace(leaf, g=g, parts=(p,)) for p, g in zip(leaf.parts, pieces, strict=True)}


def swap_roles(leaf: Factorized) -> Factorized:
    """The same gradient transposed: `a` and `g` exchanged (a weight used both as W x and as x W).

    Rows without a gradient are zero in the new `g`, too.
    """
    part = leaf.parts[0]
    flipped = replace(part, width=leaf.a.shape[-1], bias=None, transposed=not part.transposed)
    return replace(leaf, a=leaf.g, g=leaf.a * carries(leaf.g), parts=(flipped,))


def split_groups(leaf: Grouped) -> dict[str, Factorized]:
    """One linear-type leaf per group, named ``"conv.weight[0]"`` and so on; stored shapes are those of the slices.

    >>> from attrax.core.leaves import grouped
    >>> leaf = grouped("conv.weight", torch.ones(2, 3, 5, 4), torch.ones(2, 3, 5, 1), shape=(3, 1, 2, 2))
    >>> {name: block.parts[0].shape for name, block in split_groups(leaf).items()}
    {'conv.weight[0]': (1, 1, 2, 2), 'conv.weight[1]': (1, 1, 2, 2), 'conv.weight[2]': (1, 1, 2, 2)}
    """
    (part,), groups = leaf.parts, leaf.g.shape[1]
    shape = (part.shape[0] // groups, *part.shape[1:]) if part.shape else ()
    blocks: dict[str, Factorized] = {}
    for u in range(groups):
        name = f"{part.weight}[{u}]"
        block = replace(part, weight=name, width=part.width // groups, shape=shape)
        blocks[name] = Factorized(leaf.a[:, u], leaf.g[:, u], (block,), False, leaf.calls, leaf.basis)
    return blocks
