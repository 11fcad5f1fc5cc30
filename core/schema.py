"""The gradient file: how leaves become plain arrays, and what one shard of a store holds.

A store is a directory of HDF5 files ``*.shard.h5``, each complete in itself and never changed once it has its name.
K blocks of together N examples lie one after another.  All datasets are chunked, without filters, and have an
attribute xxh3 [chunks] uint64: the XXH3-64 of the bytes of every chunk of rows (as many as ``chunks[0]``, the last
one what remains).  A chunk is a contiguous piece of its array; leaves with the same offsets share them by a hard
link.  Metadata carries the checksums of the HDF5 1.10 format; text attributes are UTF-8 bytes of fixed length.

    /                     attributes format, schema, attrax, run, rank, sequence, writer, created, steps_done (-1 =
                          none); a compacted shard also has first and replaces/ (like /ids/: names of those it replaces)
    /ids/                 utf8 [bytes], offsets [N + 1]: id n is utf8[offsets[n] : offsets[n + 1]]
    /weight, /tokens      [N] float64 and int64 (NaN and -1 where unknown)
    /blocks/              step, micro, size, signature, weight_bits (0 = unknown), has_tokens, learning_rate (NaN =
                          none), each [K], and fingerprint/ like /ids/
    /signatures/          leaf [sum], offsets [S + 1]: the numbers of the leaves that a block of signature s has
    /leaves/<number>/     attributes name and form (JSON of a `Form`), and by kind
        Factorized        a [R, Ni], g [R, No], offsets [n + 1]: rows of example k are offsets[k] : offsets[k + 1]
        Lookup            ids [R], g [R, E], offsets
        Diagonal          x [R, d or 1], g [R, d], offsets
        Grouped           a [R, U, Ni], g [R, U, No], offsets
        Materialized      w [n, *shape]
        Sum               uses/<number>/, each as above
    /columns/<number>/    attribute name; values [N], or utf8 and offsets

The n examples of a leaf are those of the blocks whose signature lists it, in order.  Rows are packed: the trailing rows
in which an example's g is zero are not stored (with several calls: those of every call).  bfloat16 is a 16-bit HDF5
float, which plain h5py reads as float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from attrax.core.leaves import (
    Diagonal,
    Factorized,
    Grouped,
    Leaf,
    Lookup,
    Materialized,
    Part,
    Sum,
    batch_size,
)
from attrax.core.tree import Examples

FORMAT = "attrax gradient shard"
SCHEMA = 2
SUFFIX = ".shard.h5"

ARRAYS: Mapping[str, tuple[str, ...]] = {
    "Factorized": ("a", "g"),
    "Lookup": ("ids", "g"),
    "Diagonal": ("x", "g"),
    "Grouped": ("a", "g"),
    "Materialized": ("w",),
    "Sum": (),
}
"""Names of the arrays of each kind of leaf."""

Rows: TypeAlias = Factorized | Lookup | Diagonal | Grouped
"""Leaves that have rows."""


@dataclass(frozen=True, slots=True)
class Array:
    """One packed array: its name, dtype ("float32") and the shape of a row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.shape))}] {self.dtype}"


@dataclass(frozen=True, slots=True)
class Form:
    """What all records of a leaf in one group of a shard share; hashable.

    Attributes:
        kind: Name of the leaf type.
        parts: The leaf's parts.
        arrays: Its arrays.
        bias: See `Factorized`.
        calls: See `Factorized`.
        basis: See `Factorized`.
        rows: Vocabulary size of a `Lookup`.
        positions: See `Grouped`.
        uses: Forms of the uses of a `Sum`.
    """

    kind: str
    parts: tuple[Part, ...]
    arrays: tuple[Array, ...] = ()
    bias: bool = False
    calls: int = 1
    basis: str = ""
    rows: int = 0
    positions: bool = True
    uses: tuple["Form", ...] = ()

    def __str__(self) -> str:
        inner = " + ".join(map(str, self.uses)) or ", ".join(map(str, self.arrays))
        return f"{self.kind}({inner})" + (f" in {self.basis}" if self.basis else "")


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
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


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """A block as it is written: its examples, packed leaves and further columns (numbers, or a tuple of strings)."""

    examples: Examples
    leaves: tuple[tuple[str, Packed], ...]
    columns: Mapping[str, Tensor | tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """All of a shard but its arrays; the sequences over blocks have K entries.

    Attributes:
        name: File name.
        size: File size in bytes.
        run: Run id: one pass of a program over data.
        rank: Number of the process within the run.
        sequence: Number of the shard within (run, rank).
        first: Number of the first of the shards it was compacted from; `sequence` otherwise.
        writer: Identifies the sink that wrote it.
        created: Seconds since 1970.
        steps_done: Optimizer steps that were done at the checkpoint from which its writer went on, or None.
        replaces: Names of the shards it was compacted from: they do not count where this one is.
        ids: Example ids [N].
        steps: Optimizer step of each block.
        micros: Block number within its step.
        sizes: Examples of each block.
        fingerprints: Parameter fingerprint of each block.
        rates: Learning rate of each block, or None.
        kinds: Signature number of each block.
        signatures: Leaf numbers of each signature.
        leaves: (name, form) of each leaf number.
        columns: Names of further columns.
    """

    name: str
    size: int
    run: str
    rank: int
    sequence: int
    first: int
    writer: str
    created: float
    steps_done: int | None
    replaces: tuple[str, ...]
    ids: tuple[str, ...]
    steps: tuple[int, ...]
    micros: tuple[int, ...]
    sizes: tuple[int, ...]
    fingerprints: tuple[str, ...]
    rates: tuple[float | None, ...]
    kinds: tuple[int, ...]
    signatures: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[str, Form], ...]
    columns: tuple[str, ...] = ()


def form_of(leaf: Leaf) -> Form:
    """The form of a leaf.

    >>> from attrax.core import diagonal
    >>> print(form_of(diagonal("b", torch.ones(2, 3, 1), torch.ones(2, 3, 4))))
    Diagonal(x[1] float32, g[4] float32)
    """
    kind = type(leaf).__name__
    if isinstance(leaf, Sum):
        return Form(kind, leaf.parts, basis=leaf.basis, uses=tuple(form_of(use) for use in leaf.uses))
    lead = 1 if isinstance(leaf, Materialized) else 2
    arrays = tuple(_array(name, _rows_first(leaf, name), lead) for name in ARRAYS[kind])
    static = ("bias", "calls", "rows", "positions")
    extra = {name: getattr(leaf, name) for name in static if hasattr(leaf, name)}
    return Form(kind, leaf.parts, arrays, basis=leaf.basis, **extra)


def _rows_first(leaf: Leaf, name: str) -> Tensor:
    """An array of a leaf with the axis of rows, if it has one, right after that of examples."""
    x: Tensor = getattr(leaf, name)
    return x.transpose(1, 2) if isinstance(leaf, Grouped) else x


def _array(name: str, x: Tensor, lead: int) -> Array:
    return Array(name, str(x.dtype).removeprefix("torch."), tuple(x.shape[lead:]))


def uninitialized(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """CPU memory for an array.  It comes from numpy, which asks for huge pages: five times faster to touch first."""
    data = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(tuple(shape))


Memory: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes memory on the CPU for an array of a shape and dtype."""


def pack(leaf: Leaf, memory: Memory = uninitialized) -> Packed:
    """Drop each example's trailing rows of zero g and lay the rest end to end.

    Args:
        leaf: The leaf, on the CPU.
        memory: Makes the memory that the arrays are copied to.

    Returns:
        Its packed rows.

    >>> from attrax.core import diagonal
    >>> g = torch.tensor([[[1.0], [0.0], [2.0]], [[3.0], [0.0], [0.0]]])
    >>> packed = pack(diagonal("b", torch.ones(2, 3, 1), g))
    >>> packed.arrays[1].flatten(), packed.offsets
    (tensor([1., 0., 2., 3.]), array([0, 3, 4]))
    """
    form = form_of(leaf)
    single = np.arange(batch_size(leaf) + 1)
    match leaf:
        case Sum():
            return Packed(form, (), single, tuple(pack(use, memory) for use in leaf.uses))
        case Materialized():
            return Packed(form, (memory(leaf.w.shape, leaf.w.dtype).copy_(leaf.w.detach()),), single)
        case _:
            lengths = row_lengths(leaf)
            arrays = tuple(_kept(_by_call(leaf, x.name), lengths, memory) for x in form.arrays)
            return Packed(form, arrays, offsets_of(lengths * _calls(leaf)))


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
    x, calls = _rows_first(leaf, name).detach(), _calls(leaf)
    return x.unflatten(1, (calls, x.shape[1] // calls))


def row_lengths(leaf: Rows) -> Int[np.ndarray, " B"]:
    """Rows of every call of an example up to the last one in which g is not zero.

    Looks from the end, ever further back, until every example has such a row.

    >>> from attrax.core import diagonal
    >>> row_lengths(diagonal("b", torch.ones(2, 3, 1), torch.tensor([[[1.0], [2.0], [0.0]], [[0.0], [0.0], [0.0]]])))
    array([2, 0])
    """
    g = _by_call(leaf, "g")
    lengths, stop, many = np.zeros(len(g), np.int64), g.shape[2], 1
    while stop and not lengths.all():
        start = max(0, stop - many)
        used = (g[:, :, start:stop] != 0).flatten(3).any(-1).any(1).numpy()
        lengths = np.maximum(lengths, (used * np.arange(start + 1, stop + 1)).max(1))
        stop, many = start, 2 * many
    return lengths


def _kept(rows: Tensor, lengths: Int[np.ndarray, " B"], memory: Memory) -> Tensor:
    """The first rows of every call of each example, one after another."""
    calls, T = rows.shape[1:3]
    longest = int(lengths.max(initial=0))
    if (lengths == longest).all():
        kept = rows[:, :, :longest]
        return memory(kept.shape, kept.dtype).copy_(kept).flatten(0, 2)
    keep = (np.arange(T) < lengths[:, None])[:, None].repeat(calls, 1)
    index = torch.from_numpy(np.flatnonzero(keep))
    out = memory((len(index), *rows.shape[3:]), rows.dtype)
    return torch.index_select(rows.flatten(0, 2), 0, index, out=out)


def unpack(packed: Packed) -> Leaf:
    """The leaf of packed rows, shorter examples padded with zero rows.

    >>> from attrax.core import diagonal
    >>> leaf = diagonal("b", torch.ones(2, 3, 1), torch.tensor([[[1.0], [2.0], [0.0]], [[3.0], [0.0], [0.0]]]))
    >>> unpack(pack(leaf)).g.squeeze(-1)
    tensor([[1., 2.],
            [3., 0.]])
    """
    form, rows = packed.form, {}
    for array, x in zip(form.arrays, packed.arrays, strict=True):
        rows[array.name] = (
            x if form.kind == "Materialized" else _padded(x, np.diff(packed.offsets), form.calls)
        )
    match form.kind:
        case "Sum":
            return Sum(tuple(unpack(use) for use in packed.uses), form.parts, form.basis)
        case "Materialized":
            return Materialized(**rows, parts=form.parts, bias=form.bias, basis=form.basis)
        case "Lookup":
            return Lookup(**rows, parts=form.parts, rows=form.rows, calls=form.calls, basis=form.basis)
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
    out = x.new_zeros(shape)
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


def packed_bytes(packed: Packed) -> int:
    """Bytes of the arrays, offsets included."""
    own = packed.offsets.nbytes + sum(x.numel() * x.element_size() for x in packed.arrays)
    return own + sum(packed_bytes(use) for use in packed.uses)


def form_from_json(value: Mapping[str, Any]) -> Form:
    """Read a form from parsed JSON of ``dataclasses.asdict``; nothing in it is trusted.

    Raises:
        ValueError: If a field is missing, of the wrong type, or inconsistent with the others.

    >>> from dataclasses import asdict
    >>> form = Form("Materialized", (Part("b", 3),), (Array("w", "float32", (3,)),))
    >>> form_from_json(asdict(form)) == form
    True
    """
    try:
        form = Form(
            kind=str(value["kind"]),
            parts=tuple(map(_part, value["parts"])),
            arrays=tuple(Array(a["name"], a["dtype"], tuple(map(int, a["shape"]))) for a in value["arrays"]),
            bias=bool(value["bias"]),
            calls=int(value["calls"]),
            basis=str(value["basis"]),
            rows=int(value["rows"]),
            positions=bool(value.get("positions", True)),
            uses=tuple(form_from_json(use) for use in value["uses"]),
        )
        valid = _is_valid(form)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the form of a leaf is malformed: {error!r}") from error
    if not valid:
        raise ValueError(f"the form of a leaf is inconsistent: {form}")
    return form


def _part(value: Mapping[str, Any]) -> Part:
    fields: dict[str, Any] = {
        n: tuple(map(int, v)) if isinstance(v, list | tuple) else v for n, v in value.items()
    }
    part = Part(**fields)
    if not (
        isinstance(part.weight, str) and isinstance(part.bias, str | None) and isinstance(part.width, int)
    ):
        raise TypeError(f"parts of a leaf have names and widths, not {value}")
    return part


def _is_valid(form: Form) -> bool:
    names = tuple(array.name for array in form.arrays)
    shapes = [array.shape for array in form.arrays]
    right = {
        "Factorized": lambda: [len(s) for s in shapes] == [1, 1],
        "Lookup": lambda: [len(s) for s in shapes] == [0, 1],
        "Diagonal": lambda: [len(s) for s in shapes] == [1, 1] and shapes[0] in ((1,), shapes[1]),
        "Grouped": lambda: [len(s) for s in shapes] == [2, 2] and shapes[0][0] == shapes[1][0],
        "Materialized": lambda: True,
        "Sum": lambda: bool(form.uses),
    }
    bounded = 0 <= form.rows < 2**31 and 1 <= form.calls < 2**31 and math.prod(map(math.prod, shapes)) >= 0
    known = form.kind in right and names == ARRAYS[form.kind]
    return known and bounded and bool(form.parts) and right[form.kind]()
