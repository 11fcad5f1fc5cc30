"""Which slabs consecutive blocks need, and when they are read.

Blocks are taken in windows: the files of the next one are opened, and the system told to read from the disk what it
needs, while one is in use.  On the way to a device a window is read whole, into pinned memory if it is a GPU, by a
thread that reads ahead; it moves in the order of the reader's stream.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from attrax.core.packed import Memory, Packed
from attrax.core.schema import ShardInfo
from attrax.frontends.background import ahead
from attrax.frontends.buffers import Buffers
from attrax.frontends.merge import Rows
from attrax.frontends.shards import Loaded, Shard, open_shard, read_rows

WINDOW_BYTES = 80 * 2**20

Shape: TypeAlias = int | Literal["step"] | None
"""Examples per block, "step" for one block an optimizer step, None for the blocks that were written."""


Part: TypeAlias = tuple[int, int]
"""A slab: the number of its shard, and its own."""
Read: TypeAlias = Callable[[Part], Loaded]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a store is read; see `open_store`."""

    block_examples: Shape = None
    device: torch.device | None = None
    prefetch: int = 0
    window_bytes: int = WINDOW_BYTES

    @property
    def moves(self) -> bool:
        """Whether leaves go to a device."""
        return self.device is not None and self.device.type != "cpu"


@dataclass(frozen=True, eq=False, slots=True)
class BlockRows:
    """Rows of a block, and the slab of each."""

    rows: Rows
    slab: Int[np.ndarray, " n"]

    @property
    def parts(self) -> list[Part]:
        """The slabs that hold its rows."""
        pairs = np.stack([self.rows.shard, self.slab], 1)
        if (pairs == pairs[0]).all():
            return [(int(pairs[0, 0]), int(pairs[0, 1]))]
        return [(s, n) for s, n in np.unique(pairs, axis=0).tolist()]


@dataclass(frozen=True, eq=False, slots=True)
class Window:
    """Consecutive blocks, the files that hold them, and what is needed of each slab."""

    files: Mapping[int, Shard]
    wanted: Mapping[Part, Int[np.ndarray, " _"]]
    blocks: Sequence[BlockRows]


def shards_in(rows: Rows) -> list[int]:
    """Numbers of the shards that hold some rows."""
    return np.unique(rows.shard).tolist()


def windows_of(folder: Path, shards: Sequence[ShardInfo], rows: Rows, reading: Reading) -> Generator[Window]:
    """Windows of consecutive blocks; while one is in use the system is reading the following ones from the disk."""
    plan = list(_planned(shards, rows, reading))
    files: dict[int, Shard] = {}
    ready: dict[int, Window] = {}
    try:
        for number in range(len(plan)):
            for n in range(number, min(number + 1 + max(1, reading.prefetch), len(plan))):
                try:
                    ready[n] = ready[n] if n in ready else _ready(folder, shards, rows, files, *plan[n])
                except ValueError:  # raised again when its turn comes
                    if n == number:
                        raise
                    break
            yield ready.pop(number)
            used = {s for window in ready.values() for s in window.files}
            for s in files.keys() - used:
                files.pop(s).close()
    finally:
        for shard in files.values():
            shard.close()


def _ready(
    folder: Path,
    shards: Sequence[ShardInfo],
    rows: Rows,
    files: dict[int, Shard],
    start: int,
    stops: Sequence[int],
) -> Window:
    """A window whose files are open, and which the system reads from the disk."""
    here = rows.take(slice(start, stops[-1]))
    for s in shards_in(here):
        files[s] = files[s] if s in files else open_shard(folder, shards[s])
    wanted = wanted_rows(files, here)
    _announce(files, wanted)
    pieces = zip([start, *stops[:-1]], stops, strict=True)
    blocks = [block_rows(files, rows.take(slice(a, b))) for a, b in pieces]
    return Window({s: files[s] for s in shards_in(here)}, wanted, blocks)


def _planned(shards: Sequence[ShardInfo], rows: Rows, reading: Reading) -> Iterator[tuple[int, list[int]]]:
    """First row of each window, and where its blocks end."""
    ends = _block_ends(rows, reading.block_examples)
    per_row = np.array([info.size / max(1, len(info.ids)) for info in shards])
    read_until = np.cumsum(per_row[rows.shard])[ends - 1] if len(ends) else np.zeros(0)
    block, start = 0, 0
    while block < len(ends):
        done = read_until[block - 1] if block else 0.0
        last = max(block + 1, int(np.searchsorted(read_until, done + reading.window_bytes, "right")))
        between = np.flatnonzero(rows.shard[ends[block:last] - 1] != rows.shard[ends[block:last] % len(rows)])
        last = block + 1 + int(between[-1]) if len(between) and last < len(ends) else last
        stops = ends[block:last].tolist()
        yield start, stops
        block, start = last, stops[-1]


def _slabs(files: Mapping[int, Shard], shard: int, row: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Which slab of a shard holds each of some positions."""
    return np.searchsorted(files[shard].table.starts, row, "right") - 1


def block_rows(files: Mapping[int, Shard], rows: Rows) -> BlockRows:
    """Rows of open shards, with their slabs."""
    slab = np.empty(len(rows), np.int64)
    for s in shards_in(rows):
        here = rows.shard == s
        slab[here] = _slabs(files, s, rows.row[here])
    return BlockRows(rows, slab)


def wanted_rows(files: Mapping[int, Shard], rows: Rows) -> dict[Part, Int[np.ndarray, " _"]]:
    """Positions in each shard that lie in one slab."""
    found: dict[Part, np.ndarray] = {}
    for s in shards_in(rows):
        row = np.unique(rows.row[rows.shard == s])
        slab = _slabs(files, s, row)
        for these in np.split(np.arange(len(row)), np.flatnonzero(np.diff(slab)) + 1):
            found[s, int(slab[these[0]])] = row[these]
    return found


def _announce(files: Mapping[int, Shard], wanted: Mapping[Part, Int[np.ndarray, " _"]]) -> None:
    """Let the system read the slabs that are needed whole."""
    if not hasattr(os, "posix_fadvise"):
        return
    for (s, number), row in wanted.items():
        slab, envelope = files[s].table.slabs[number], files[s].envelope
        if len(row) == slab.examples:
            os.posix_fadvise(envelope.descriptor, envelope.at + slab.at, slab.size, os.POSIX_FADV_WILLNEED)


def read_part(
    files: Mapping[int, Shard], wanted: Mapping[Part, Int[np.ndarray, " _"]], part: Part, memory: Memory
) -> Loaded:
    """What is needed of a slab."""
    return read_rows(files[part[0]], part[1], wanted[part], memory)


def as_needed(windows: Generator[Window]) -> Generator[tuple[Read, Sequence[BlockRows]]]:
    """Every slab is read when a block needs it, into memory that an earlier one does not use any more."""
    memory = Buffers().array
    with closing(windows):
        for window in windows:
            yield (lambda part, w=window: read_part(w.files, w.wanted, part, memory)), window.blocks


def moved(windows: Generator[Window], reading: Reading) -> Generator[tuple[Read, Sequence[BlockRows]]]:
    """Every window is read whole, into pinned memory, and moved to the GPU."""

    def memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        pinned = reading.device is not None and reading.device.type == "cuda"
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)

    def whole() -> Generator[tuple[dict[Part, Loaded], Sequence[BlockRows]]]:
        with closing(windows):
            for window in windows:
                parts = {part: read_part(window.files, window.wanted, part, memory) for part in window.wanted}
                yield parts, window.blocks

    with closing(ahead(whole(), reading.prefetch) if reading.prefetch else whole()) as read:
        for loaded, blocks in read:
            moved = {
                part: mapped(x, lambda x: x.to(reading.device, non_blocking=True))
                for part, x in loaded.items()
            }
            yield moved.__getitem__, blocks


def _block_ends(rows: Rows, shape: Shape) -> np.ndarray:
    """Where each block ends: with its group or step, or after so many rows and with its section."""
    unit = rows.group if shape is None else rows.window if shape == "step" else rows.section
    if not len(rows):
        return np.zeros(0, np.int64)
    ends = np.append(np.flatnonzero(unit[1:] != unit[:-1]) + 1, len(rows))
    if shape is None or shape == "step":
        return ends
    starts = np.concatenate([[0], ends[:-1]])
    return np.concatenate(
        [np.append(np.arange(a + shape, b, shape), b) for a, b in zip(starts, ends, strict=True)]
    )


def mapped(read: Loaded, function: Callable[[Tensor], Tensor]) -> Loaded:
    """With a function of every array of a leaf."""

    def each(packed: Packed) -> Packed:
        return replace(packed, arrays=tuple(map(function, packed.arrays)), uses=tuple(map(each, packed.uses)))

    return replace(read, leaves={name: each(packed) for name, packed in read.leaves.items()})
