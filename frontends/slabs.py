"""Slabs: the arrays of neighboring blocks in one piece of a file, laid out as `attrax.core.schema` says.

They go to the file from the memory of the blocks, and come back in one piece, of which the arrays are views.  Every
256 KiB have a checksum, taken while they are in the processor's cache.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from attrax.core.leaves import Leaf
from attrax.core.packed import Memory, Packed, pack, take_packed
from attrax.core.schema import Form, groups
from attrax.frontends.h5types import TYPES, bytes_of, read_bytes

SLAB_BYTES = 2**20
PIECE = 2**18
ALIGNED = 64
_AT_ONCE = 500  # pieces that the system takes in one call
_ZEROS = memoryview(bytes(ALIGNED))

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
"""What a store can hold, by name."""


@dataclass(frozen=True, eq=False, slots=True)
class Lying:
    """Where an array lies in a slab.

    Attributes:
        at: Its first byte.
        row: Bytes of a row.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides, in elements.
    """

    at: int
    row: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.at + self.shape[0] * self.row


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where the arrays of a leaf, or of a use of it, lie in a slab.

    Attributes:
        form: Its form.
        offsets: Rows of example n are ``offsets[n] : offsets[n + 1]``.
        arrays: Its arrays.
    """

    form: Form
    offsets: Int[np.ndarray, " ends"]
    arrays: tuple[Lying, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Slab:
    """A slab of a shard.

    Attributes:
        at: First byte in the shard's data.
        size: Bytes.
        blocks: Blocks.
        examples: Examples.
        checksums: XXH3 of every 256 KiB, the last for what remains.
        places: Where its arrays lie; slabs may share them.
    """

    at: int
    size: int
    blocks: int
    examples: int
    checksums: UInt[np.ndarray, " pieces"]
    places: Sequence[Place]


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def all_groups(forms: Iterable[Form]) -> Iterator[Form]:
    """The forms of all groups of arrays of some leaves, in the order of the groups."""
    return chain.from_iterable(map(groups, forms))


def places_of(forms: Sequence[Form], offsets: Sequence[Int[np.ndarray, " ends"]]) -> tuple[list[Place], int]:
    """Where arrays lie, from the offsets of the rows of each group; and where the last one ends.

    Raises:
        ValueError: If a dtype is unknown, or there are too many or too few groups.
    """
    found: list[Place] = []
    end = 0
    for form, rows in zip(all_groups(forms), offsets, strict=True):
        arrays: list[Lying] = []
        for array in form.arrays:
            if array.dtype not in DTYPES:
                raise ValueError(f"its array {array} is of no known dtype")
            arrays.append(_lying(_aligned(end), DTYPES[array.dtype], (int(rows[-1]), *array.shape)))
            end = arrays[-1].end
        found.append(Place(form, rows, tuple(arrays)))
    return found, end


def _lying(at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Lying:
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Lying(at, steps[0] * dtype.itemsize, dtype, shape, tuple(steps))


class _Stream:
    """Bytes that go to a file one after another, with a checksum for every 256 KiB."""

    def __init__(self, descriptor: int, at: int) -> None:
        self._descriptor, self._at, self._room = descriptor, at, PIECE
        self._waiting: list[memoryview] = []
        self.size = 0
        self.checksums: list[int] = []

    def put(self, data: memoryview) -> None:
        """Add bytes, whose memory must stay as it is until they are written."""
        self.size += len(data)
        while len(data):
            part, data = data[: self._room], data[self._room :]
            self._waiting.append(part)
            self._room -= len(part)
            if not self._room:
                self.write()
            elif len(self._waiting) == _AT_ONCE:
                self._waiting = [memoryview(b"".join(self._waiting))]

    def align(self) -> None:
        """Add zeros up to a place where an array may begin."""
        if missing := -self.size % ALIGNED:
            self.put(_ZEROS[:missing])

    def write(self) -> None:
        """Write what is waiting as the next piece."""
        rest, self._waiting, self._room = self._waiting, [], PIECE
        if not rest:
            return
        self.checksums.append(_checksum(rest))
        while rest:
            done = os.pwritev(self._descriptor, rest, self._at)
            self._at += done
            while rest and done >= len(rest[0]):
                done -= len(rest.pop(0))
            rest[:1] = [data[done:] for data in rest[:1]]


def _checksum(pieces: Sequence[memoryview]) -> int:
    if len(pieces) == 1:
        return xxh3_64_intdigest(pieces[0])
    digest = xxh3_64()
    for data in pieces:
        digest.update(data)
    return digest.intdigest()


def _groups(packed: Packed) -> Iterator[Packed]:
    for use in packed.uses:
        yield from _groups(use)
    if not packed.uses:
        yield packed


def _runs(x: Tensor) -> list[memoryview]:
    """The bytes of a tensor, in pieces without gaps."""
    return [bytes_of(x)] if x.is_contiguous() else [run for part in x for run in _runs(part)]


def write_slab(
    descriptor: int, at: int, leaves: Sequence[tuple[Form, Sequence[Leaf]]]
) -> tuple[int, list[int], list[list[Int[np.ndarray, " ends"]]]]:
    """Write blocks as a slab.

    Args:
        descriptor: The file.
        at: Where the slab begins in it.
        leaves: Form and blocks of each leaf, on the CPU.

    Returns:
        Its size, checksums, and for each group of arrays the offsets of every block.

    Raises:
        OSError: If it cannot be written.
    """
    stream = _Stream(descriptor, at)
    offsets: list[list[np.ndarray]] = []
    for form, same in leaves:
        packed = [list(_groups(pack(leaf, None, form))) for leaf in same]
        for number, first in enumerate(packed[0]):
            for array in range(len(first.form.arrays)):
                stream.align()
                for block in packed:
                    for run in _runs(block[number].arrays[array]):
                        stream.put(run)
            offsets.append([block[number].offsets for block in packed])
    stream.write()
    return stream.size, stream.checksums, offsets


class LostBytes(OSError):
    """What was written is gone, and nobody has it any more."""


def rewrite_slab(descriptor: int, at: int, size: int, checksums: Sequence[int]) -> None:
    """Write a slab once more from what the system still has of it.

    Raises:
        OSError: If it cannot be written.
        LostBytes: If the system has lost some of it.
    """
    for start, checksum in zip(range(at, at + size, PIECE), checksums, strict=True):
        data = os.pread(descriptor, min(PIECE, at + size - start), start)
        if xxh3_64_intdigest(data) != checksum:
            raise LostBytes("the system has lost bytes that it had taken")
        os.pwrite(descriptor, data, start)


def read_slab(
    descriptor: int,
    at: int,
    slab: Slab,
    names: Sequence[tuple[str, Form]],
    rows: Int[np.ndarray, " n"],
    memory: Memory,
) -> dict[str, Packed]:
    """Read examples of a slab, and no more than the pieces that they lie in.

    Args:
        descriptor: The file.
        at: Where its slabs begin.
        slab: The slab.
        names: Its leaves.
        rows: Positions in the slab, ascending and distinct.
        memory: Makes memory for the slab.

    Returns:
        Packed leaves of the examples.

    Raises:
        ValueError: If a checksum does not fit, or ids are not in the vocabulary; names the leaf.
    """
    some = len(rows) < slab.examples
    needed = _needed(slab, rows) if some else np.ones(len(slab.checksums), bool)
    out = memory((_aligned(slab.size),), torch.uint8)
    data = bytes_of(out)
    for number in np.flatnonzero(needed).tolist():
        begin = number * PIECE
        piece = data[begin : min(begin + PIECE, slab.size)]
        read_bytes(descriptor, at + slab.at + begin, piece)
        if xxh3_64_intdigest(piece) != slab.checksums[number]:
            leaf = _leaf_at(slab, names, begin)
            raise ValueError(
                f"{leaf}the checksum of the bytes from {slab.at + begin} of the data on does not fit"
            )
    views = {
        dtype: out.view(dtype) for dtype in {DTYPES[a.dtype] for p in slab.places for a in p.form.arrays}
    }
    places = iter(slab.places)
    leaves = {name: _packed(form, places, views, slab.examples) for name, form in names}
    leaves = {name: take_packed(packed, rows) for name, packed in leaves.items()} if some else leaves
    for name, packed in leaves.items():
        _check_ids(name, packed)
    return leaves


def _needed(slab: Slab, rows: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " pieces"]:
    """Which pieces hold rows of some examples."""
    opened = np.zeros(len(slab.checksums) + 1, np.int64)
    for place in slab.places:
        begins, ends = place.offsets[rows], place.offsets[rows + 1]
        begins, ends = begins[ends > begins], ends[ends > begins]
        for array in place.arrays:
            if array.row:
                np.add.at(opened, (array.at + begins * array.row) // PIECE, 1)
                np.add.at(opened, (array.at + ends * array.row - 1) // PIECE + 1, -1)
    return opened.cumsum()[:-1] > 0


def _leaf_at(slab: Slab, names: Sequence[tuple[str, Form]], begin: int) -> str:
    """The leaves whose arrays reach into a piece, as the begin of a message."""
    places, touched = iter(slab.places), list[str]()
    for name, form in names:
        for place in [next(places) for _ in groups(form)]:
            if any(array.at < begin + PIECE and array.end > begin for array in place.arrays):
                touched += [name] if name not in touched else []
    return f"leaf {' or '.join(map(repr, touched[:5]))}: " if touched else ""


def _packed(
    form: Form, places: Iterator[Place], views: Mapping[torch.dtype, Tensor], examples: int
) -> Packed:
    if form.uses:
        uses = tuple(_packed(use, places, views, examples) for use in form.uses)
        return Packed(form, (), np.arange(examples + 1), uses)
    place = next(places)
    arrays = tuple(
        views[x.dtype].as_strided(x.shape, x.stride, x.at // x.dtype.itemsize) for x in place.arrays
    )
    return Packed(form, arrays, place.offsets)


def _check_ids(name: str, packed: Packed) -> None:
    for use in packed.uses:
        _check_ids(name, use)
    if packed.form.kind == "Lookup" and packed.arrays[0].numel():
        low, high = (int(x) for x in packed.arrays[0].aminmax())
        if low < 0 or high >= packed.form.rows:
            raise ValueError(
                f"leaf '{name}': its ids reach from {low} to {high}, its vocabulary has {packed.form.rows} entries"
            )
