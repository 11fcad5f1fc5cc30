"""Packed rows: the arrays of a leaf without padding, as a store keeps them."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from attrax.core.algebra import nothing
from attrax.core.leaves import Diagonal, Factorized, Grouped, Leaf, Lookup, Materialized, Sum, batch_size
from attrax.core.schema import Form, form_of, rows_first

Rows: TypeAlias = Factorized | Lookup | Diagonal | Grouped
"""Leaves that have rows."""


class Packed(NamedTuple):
    """A leaf with the rows of its B examples one after another, without padding.

    Attributes:
        form: What is not an array.
        arrays: In the order of ``form.arrays``, [R, ...] each.
        offsets: Rows of example b are ``offsets[b] : offsets[b + 1]`` [B + 1]; one a row for Materialized and Sum.
        uses: The packed uses of a Sum.
    """

    form: Form
    arrays: tuple[Tensor, ...]
    offsets: Int[np.ndarray, " ends"]
    uses: tuple["Packed", ...] = ()


def uninitialized(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """CPU memory for an array.  It comes from numpy, which asks for huge pages: five times faster to touch first."""
    data = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(tuple(shape))


Memory: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes memory on the CPU for an array of a shape and dtype."""


_LONG = 2**15  # bytes from which on a piece of its own costs less than a copy


def pack(leaf: Leaf, memory: Memory | None = uninitialized, form: Form | None = None) -> Packed:
    """Drop each example's trailing rows of zero g (and no id, where ids count) and lay the rest end to end.

    Args:
        leaf: The leaf, on the CPU.
        memory: Makes the memory of arrays whose rows do not lie end to end already.  None leaves long rows where they
            are: an array [B, calls, T, ...] then stands for its rows end to end.
        form: The leaf's form, if it is known.

    Returns:
        Its packed rows; arrays whose rows do lie so share the leaf's memory.

    >>> from attrax.core import diagonal
    >>> g = torch.tensor([[[1.0], [0.0], [2.0]], [[3.0], [0.0], [0.0]]])
    >>> packed = pack(diagonal("b", torch.ones(2, 3, 1), g))
    >>> packed.arrays[1].flatten(), packed.offsets
    (tensor([1., 0., 2., 3.]), array([0, 3, 4]))
    """
    form = form_of(leaf) if form is None else form
    match leaf:
        case Sum():
            uses = tuple(pack(use, memory, f) for use, f in zip(leaf.uses, form.uses, strict=True))
            return Packed(form, (), np.arange(batch_size(leaf) + 1), uses)
        case Materialized():
            return Packed(form, (_end_to_end(leaf.w.detach(), memory),), np.arange(batch_size(leaf) + 1))
        case _:
            lengths = row_lengths(leaf)
            arrays = tuple(_kept(_by_call(leaf, x.name), lengths, memory) for x in form.arrays)
            return Packed(form, arrays, offsets_of(lengths * _calls(leaf)))


def _end_to_end(x: Tensor, memory: Memory | None) -> Tensor:
    return x if x.is_contiguous() else (memory or uninitialized)(x.shape, x.dtype).copy_(x)


def offsets_of(counts: Int[np.ndarray, " n"]) -> Int[np.ndarray, " ends"]:
    """Where consecutive ranges begin, and where the last one ends.

    >>> offsets_of(np.array([2, 0, 3]))
    array([0, 2, 2, 5])
    """
    return np.concatenate([np.zeros(1, np.int64), counts.cumsum()])


def _calls(leaf: Rows) -> int:
    """Calls into which the rows of an example fall; 1 if they have been cut."""
    return leaf.calls if leaf.g.shape[-2] % leaf.calls == 0 else 1


def _by_call(leaf: Rows, name: str) -> Shaped[Tensor, "B calls T *_"]:
    """An array of a leaf by example, call and row."""
    x, calls = rows_first(leaf, name).detach(), _calls(leaf)
    return x.unflatten(1, (calls, x.shape[1] // calls))


def row_lengths(leaf: Rows) -> Int[np.ndarray, " B"]:
    """Rows of every call of an example up to the last one in which g is not zero (or that has an id, where ids count).

    Looks from the end, ever further back, until every example has such a row.

    >>> from attrax.core import diagonal
    >>> row_lengths(diagonal("b", torch.ones(2, 3, 1), torch.tensor([[[1.0], [2.0], [0.0]], [[0.0], [0.0], [0.0]]])))
    array([2, 0])
    """
    g = _by_call(leaf, "g")
    if isinstance(leaf, Lookup) and leaf.sparse:
        g = (_by_call(leaf, "ids") >= 0).unsqueeze(-1)
    lengths, stop, many = np.zeros(len(g), np.int64), g.shape[2], 1
    while stop and not lengths.all():
        start = max(0, stop - many)
        used = g[:, :, start:stop].bool().flatten(3).numpy().any((1, 3))
        lengths = np.maximum(lengths, (used * np.arange(start + 1, stop + 1)).max(1))
        stop, many = start, 2 * many
    return lengths


def _kept(rows: Tensor, lengths: Int[np.ndarray, " B"], memory: Memory | None) -> Tensor:
    """The first rows of every call of each example, one after another."""
    calls, T = rows.shape[1:3]
    longest = int(lengths.max(initial=0))
    if (lengths == longest).all():
        kept = rows[:, :, :longest]
        if memory is None and kept[:1, :1].is_contiguous() and kept[:1, :1].nbytes >= _LONG:
            return kept
        return _end_to_end(kept, memory).flatten(0, 2)
    keep = (np.arange(T) < lengths[:, None])[:, None].repeat(calls, 1)
    index = torch.from_numpy(np.flatnonzero(keep))
    out = (memory or uninitialized)((len(index), *rows.shape[3:]), rows.dtype)
    return torch.index_select(rows.flatten(0, 2), 0, index, out=out)


def unpack(packed: Packed) -> Leaf:
    """The leaf of packed rows, shorter examples padded with zero rows.

    >>> from attrax.core import diagonal
    >>> leaf = diagonal("b", torch.ones(2, 3, 1), torch.tensor([[[1.0], [2.0], [0.0]], [[3.0], [0.0], [0.0]]]))
    >>> unpack(pack(leaf)).g.squeeze(-1)
    tensor([[1., 2.],
            [3., 0.]])
    """
    form = packed.form
    if form.kind == "Materialized":
        return Materialized(packed.arrays[0], form.parts, form.bias, form.basis)
    counts = np.diff(packed.offsets)
    rows = {
        array.name: _padded(x, counts, form.calls)
        for array, x in zip(form.arrays, packed.arrays, strict=True)
    }
    match form.kind:
        case "Sum":
            return Sum(tuple(unpack(use) for use in packed.uses), form.parts, form.basis)
        case "Lookup":
            return Lookup(
                **rows,
                parts=form.parts,
                rows=form.rows,
                calls=form.calls,
                basis=form.basis,
                sparse=form.sparse,
            )
        case "Diagonal":
            return Diagonal(**rows, parts=form.parts, calls=form.calls, basis=form.basis)
        case "Grouped":
            groups = {name: x.transpose(1, 2) for name, x in rows.items()}
            return Grouped(
                **groups, parts=form.parts, calls=form.calls, basis=form.basis, positions=form.positions
            )
        case _:
            return Factorized(**rows, parts=form.parts, bias=form.bias, calls=form.calls, basis=form.basis)


def _padded(x: Tensor, counts: np.ndarray, calls: int) -> Tensor:
    calls = calls if (counts % calls == 0).all() else 1
    longest = max(1, int(counts.max(initial=0)) // calls)
    shape = (len(counts), calls * longest, *x.shape[1:])
    if x.shape[0] == shape[0] * shape[1]:
        return x.reshape(shape)
    keep = (np.arange(longest) < (counts // calls)[:, None])[:, None].repeat(calls, 1)
    out = x.new_full(shape, nothing(x))
    out[torch.from_numpy(keep.reshape(shape[:2]))] = x
    return out


def take_packed(packed: Packed, index: Int[np.ndarray, " n"] | slice) -> Packed:
    """Some examples of packed rows; a slice with both ends is taken without a copy.

    >>> from attrax.core import materialized
    >>> take_packed(pack(materialized("b", torch.arange(4.0))), np.array([2, 0])).arrays[0]
    tensor([2., 0.])
    """
    uses = tuple(take_packed(use, index) for use in packed.uses)
    if isinstance(index, slice):
        offsets = packed.offsets[index.start : index.stop + 1]
        rows = slice(int(offsets[0]), int(offsets[-1]))
        return Packed(packed.form, tuple(x[rows] for x in packed.arrays), offsets - offsets[0], uses)
    counts = np.diff(packed.offsets)[index]
    places = torch.from_numpy(ranges(packed.offsets[index], counts))
    return Packed(packed.form, tuple(x[places] for x in packed.arrays), offsets_of(counts), uses)


def ranges(starts: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]) -> Int[np.ndarray, " total"]:
    """The numbers of all ranges ``[start, start + count)``, one range after another.

    >>> ranges(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    return np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    if pieces[0].device.type != "cpu":
        return torch.cat(list(pieces))
    shape = (sum(map(len, pieces)), *pieces[0].shape[1:])
    return torch.cat(list(pieces), out=uninitialized(shape, pieces[0].dtype))


def concat_packed(pieces: Sequence[Packed]) -> Packed:
    """Examples of several packed leaves of one form, one piece after another."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    arrays = tuple(_joined(same) for same in zip(*(p.arrays for p in pieces), strict=True))
    uses = tuple(concat_packed(same) for same in zip(*(p.uses for p in pieces), strict=True))
    return Packed(first.form, arrays, offsets_of(np.concatenate([np.diff(p.offsets) for p in pieces])), uses)
