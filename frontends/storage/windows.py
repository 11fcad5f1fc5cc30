"""Which slabs consecutive blocks need, and when they are read.

Blocks are taken in windows: the files of the next one are opened, and the system told to read from the disk what it
needs, while one is in use.  On the way to a device a window is read whole, into pinned memory if it is a GPU, by a
thread that reads ahead; it moves in the order of the reader's stream.
"""

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from attrax.core.packed import Packed
from attrax.core.schema import ShardInfo
from attrax.frontends.buffers import Buffers
from attrax.frontends.storage.background import ahead
from attrax.frontends.storage.blockrows import BlockRows, Part, blocks_of, shards_in, wanted_rows
from attrax.frontends.storage.envelope import PAGE
from attrax.frontends.storage.merge import Rows
from attrax.frontends.storage.shards import Loaded, Shard, open_shard, read_rows

WINDOW_BYTES = 80 * 2**20
_TOLD = 2**20
"""Bytes that the system is told to read in one call: of more it reads as much as it reads ahead by itself."""
_TABLES = 4
"""Windows by which tables are read ahead of their data: a small read waits for all that was asked for before it."""

Shape: TypeAlias = int | Literal["step"] | None
"""Examples per block, "step" for one block an optimizer step, None for the blocks that were written."""


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

    def placed(self, x: Tensor) -> Tensor:
        """An array where it is asked for."""
        return x if self.device is None else x.to(self.device, non_blocking=True)


@dataclass(frozen=True, eq=False, slots=True)
class Window:
    """Consecutive blocks, the files that hold them, and what is needed of each slab."""

    files: Mapping[int, Shard]
    wanted: Mapping[Part, Int[np.ndarray, " _"]]
    blocks: Sequence[BlockRows]


def windows_of(folder: Path, shards: Sequence[ShardInfo], rows: Rows, reading: Reading) -> Generator[Window]:
    """Windows of consecutive blocks; while one is in use the system is reading the following ones from the disk."""
    plan = list(_planned(shards, rows, reading))
    files: dict[int, Shard] = {}
    ready: dict[int, Window] = {}
    try:
        for number in range(len(plan)):
            for start, stops in plan[number + _TABLES if number else 0 : number + _TABLES + 1]:
                _announce_tables(folder, [shards[s] for s in shards_in(rows.take(slice(start, stops[-1])))])
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
    blocks = list(blocks_of(files, here, (stop - start for stop in stops)))
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


def _announce(files: Mapping[int, Shard], wanted: Mapping[Part, Int[np.ndarray, " _"]]) -> None:
    """Let the system read the slabs that are needed whole, neighbors in one go."""
    ranges: list[tuple[int, int, int]] = []
    for (s, number), row in wanted.items():
        slab, at = files[s].table.slabs[number], files[s].info.places.data
        if len(row) < slab.examples:
            continue
        begin, end = at + slab.at, at + slab.at + slab.size
        if ranges and ranges[-1][0] == files[s].descriptor and 0 <= begin - ranges[-1][2] < PAGE:
            begin = ranges.pop()[1]
        ranges.append((files[s].descriptor, begin, end))
    for descriptor, begin, end in ranges:
        _tell(descriptor, begin, end)


def _announce_tables(folder: Path, shards: Sequence[ShardInfo]) -> None:
    """Let the system read what it takes to open shards: their tables."""
    for info in shards:
        with suppress(OSError):  # raised again when their turn comes
            descriptor = os.open(folder / info.name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                end = min(info.places.table + info.places.length, info.size)
                _tell(descriptor, info.places.table, end)
            finally:
                os.close(descriptor)


def _tell(descriptor: int, begin: int, end: int) -> None:
    if hasattr(os, "posix_fadvise"):
        for at in range(begin, end, _TOLD):
            size = min(_TOLD, end - at)
            if not _is_there(descriptor, at + size - 1):
                os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)


def _is_there(descriptor: int, at: int) -> bool:
    """Whether the system has a byte in memory; asking costs less than telling."""
    try:
        return os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


def as_needed(windows: Generator[Window]) -> Generator[tuple[Read, Sequence[BlockRows]]]:
    """Every stretch is read when a block needs it, into memory that an earlier one does not use any more."""
    memory = Buffers().array
    with closing(windows):
        for window in windows:
            needed = Counter(part for block in window.blocks for part in block.parts)

            def read(part: Part, window: Window = window, needed: Counter[Part] = needed) -> Loaded:
                keep = needed[part] > 1
                return read_rows(window.files[part[0]], part[1], window.wanted[part], memory, keep=keep)

            yield read, window.blocks


def moved(windows: Generator[Window], reading: Reading) -> Generator[tuple[Read, Sequence[BlockRows]]]:
    """Every window is read whole, into pinned memory, and moved to the GPU."""

    def memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        pinned = reading.device is not None and reading.device.type == "cuda"
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)

    def whole() -> Generator[tuple[dict[Part, Loaded], Sequence[BlockRows]]]:
        with closing(windows):
            for window in windows:
                parts = {
                    (s, number): mapped(read_rows(window.files[s], number, rows, memory), lambda x: x)
                    for (s, number), rows in window.wanted.items()
                }
                yield parts, window.blocks

    with closing(ahead(whole(), reading.prefetch) if reading.prefetch else whole()) as read:
        for loaded, blocks in read:
            yield {part: mapped(x, reading.placed) for part, x in loaded.items()}.__getitem__, blocks


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
    """With all leaves read, and a function of every array."""

    def each(packed: Packed) -> Packed:
        return packed._replace(arrays=tuple(map(function, packed.arrays)), uses=tuple(map(each, packed.uses)))

    return replace(read, leaf={name: each(read.leaf(name)) for name in read.names}.__getitem__)
