"""Slabs: the arrays of neighboring blocks in one piece of a file, laid out as `attrax.core.schema` says."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby

import numpy as np
import torch
from jaxtyping import Int

from attrax.core.schema import Form, groups
from attrax.frontends.storage.h5types import TYPES

SLAB_BYTES = 2**20
STRETCH_BYTES = 2**22
PIECE = 2**18
PIECES = 4
"""How many the system reads or writes in one call."""
ALIGNED = 64

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
"""What a store can hold, by name."""


@dataclass(frozen=True, eq=False, slots=True)
class Lying:
    """Where an array lies in a stretch.

    Attributes:
        at: Its first byte.
        row: Bytes of a row.
        dtype: Its dtype.
        shape: Its shape.
    """

    at: int
    row: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.at + self.shape[0] * self.row


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where the arrays of a leaf, or of a use of it, lie in a stretch.

    Attributes:
        form: Its form.
        offsets: Rows of example n are ``offsets[n] : offsets[n + 1]``.
        arrays: Its arrays.
    """

    form: Form
    offsets: Int[np.ndarray, " ends"]
    arrays: tuple[Lying, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Alike:
    """Neighboring arrays of one dtype and shape at equal distances, which are cut out of a stretch in one go.

    Attributes:
        dtype: Their dtype.
        shape: How many they are, and the shape of each.
        stride: Their distance and strides, in elements.
        first: The first element, if the stretch is taken for an array of their dtype.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


@dataclass(frozen=True, eq=False, slots=True)
class Stretch:
    """Neighboring leaves of a slab that are read together.

    Attributes:
        at: Its first byte in the slab.
        size: Bytes.
        first: Number of its first checksum; it has one for every 256 KiB, the last for what remains.
        leaves: By name, the form, and for each of its groups where the arrays lie.
        arrays: All of its arrays in their order, those that are alike together.
    """

    at: int
    size: int
    first: int
    leaves: Mapping[str, tuple[Form, tuple[Place, ...]]]
    arrays: tuple[Alike, ...]

    @property
    def pieces(self) -> int:
        """How many checksums it has."""
        return -(-self.size // PIECE)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything lies in a slab; slabs may share it."""

    stretches: tuple[Stretch, ...]

    @cached_property
    def size(self) -> int:
        """Bytes of the slab."""
        return sum(stretch.size for stretch in self.stretches)

    @cached_property
    def pieces(self) -> int:
        """How many checksums the slab has."""
        return sum(stretch.pieces for stretch in self.stretches)

    @cached_property
    def stretch_of(self) -> Mapping[str, int]:
        """In which stretch each leaf lies."""
        return {name: n for n, stretch in enumerate(self.stretches) for name in stretch.leaves}


@dataclass(frozen=True, eq=False, slots=True)
class Slab:
    """A slab of a shard.

    Attributes:
        at: First byte in the shard's data.
        blocks: Blocks.
        examples: Examples.
        checksums: XXH3 of the pieces of its stretches.
        layout: Where its arrays lie.
    """

    at: int
    blocks: int
    examples: int
    checksums: Sequence[int]
    layout: Layout

    @property
    def size(self) -> int:
        """Bytes."""
        return self.layout.size


def aligned(size: int) -> int:
    """The next place where an array may begin."""
    return -(-size // ALIGNED) * ALIGNED


def is_whole(stretch: int) -> bool:
    """Whether a stretch of so many bytes ends with the leaf that it has last."""
    return stretch >= STRETCH_BYTES


def all_groups(forms: Iterable[Form]) -> Iterator[Form]:
    """The forms of all groups of arrays of some leaves, in the order of the groups."""
    return chain.from_iterable(map(groups, forms))


def layout_of(leaves: Sequence[tuple[str, Form]], offsets: Sequence[Int[np.ndarray, " ends"]]) -> Layout:
    """Where the arrays of a slab lie, from the offsets of the rows of each group.

    Raises:
        ValueError: If a dtype is unknown, or there are too many or too few groups.
    """
    rows = iter(offsets)
    stretches: list[Stretch] = []
    here: dict[str, tuple[Form, tuple[Place, ...]]] = {}
    at = first = end = 0
    for number, (name, form) in enumerate(leaves, 1):
        places: list[Place] = []
        for group in groups(form):
            places.append(_place(group, _next(rows), end))
            end = places[-1].arrays[-1].end if places[-1].arrays else end
        here[name] = form, tuple(places)
        if number == len(leaves) or is_whole(aligned(end)):
            arrays = tuple(_alike([x for _, places in here.values() for p in places for x in p.arrays]))
            stretches.append(Stretch(at, aligned(end), first, here, arrays))
            at, first = at + stretches[-1].size, first + stretches[-1].pieces
            here, end = {}, 0
    if next(rows, None) is not None:
        raise ValueError("it has more groups of arrays than its leaves")
    return Layout(tuple(stretches))


def _next(rows: Iterator[Int[np.ndarray, " ends"]]) -> Int[np.ndarray, " ends"]:
    found = next(rows, None)
    if found is None:
        raise ValueError("it has fewer groups of arrays than its leaves")
    return found


def _place(form: Form, rows: Int[np.ndarray, " ends"], end: int) -> Place:
    arrays: list[Lying] = []
    for array in form.arrays:
        if array.dtype not in DTYPES:
            raise ValueError(f"its array {array} is of no known dtype")
        arrays.append(_lying(aligned(end), DTYPES[array.dtype], (int(rows[-1]), *array.shape)))
        end = arrays[-1].end
    return Place(form, rows, tuple(arrays))


def _lying(at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Lying:
    return Lying(at, math.prod(shape[1:]) * dtype.itemsize, dtype, shape)


def _alike(arrays: Sequence[Lying]) -> Iterator[Alike]:
    """Runs of arrays of one dtype and shape; as each begins at the next aligned place, their distances are equal."""
    for (dtype, shape), same in groupby(arrays, key=lambda x: (x.dtype, x.shape)):
        first, *others = (x.at // dtype.itemsize for x in same)
        apart = others[0] - first if others else 0
        steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        yield Alike(dtype, (1 + len(others), *shape), (apart, *steps), first)
