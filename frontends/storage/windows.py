"""Which slabs consecutive blocks need, and when they are read.

Blocks are taken in windows, whose files are open together.  A slab is read when a block needs it, or its window is read
whole: on the way to a device, into pinned memory if that is a GPU, and by a thread that reads ahead if one is asked
for.  A device gets its leaves in the order of the reader's stream.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
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
from attrax.frontends.storage.merge import Rows
from attrax.frontends.storage.shards import Loaded, Shard, open_shard, read_rows

WINDOW_BYTES = 80 * 2**20
_FILES = 128
"""Shards of one window, but for those that a block needs anyway and those of which it has a part."""

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
    def whole(self) -> bool:
        """Whether windows are read whole."""
        return self.prefetch > 0 or (self.device is not None and self.device.type != "cpu")

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
    """Windows of consecutive blocks, the files of each open while it is in use."""
    files: dict[int, Shard] = {}
    try:
        for start, stops in _planned(shards, rows, reading):
            here = rows.take(slice(start, stops[-1]))
            needed = shards_in(here)
            for s in files.keys() - needed:
                files.pop(s).close()
            for s in needed:
                files[s] = files[s] if s in files else open_shard(folder, shards[s])
            blocks = list(blocks_of(files, here, (stop - start for stop in stops)))
            yield Window(files, wanted_rows(files, here), blocks)
    finally:
        for shard in files.values():
            shard.close()


def _planned(shards: Sequence[ShardInfo], rows: Rows, reading: Reading) -> Iterator[tuple[int, list[int]]]:
    """First row of each window, and where its blocks end."""
    ends = _block_ends(rows, reading.block_examples)
    least = reading.window_bytes / _FILES
    per_row = np.array([max(info.size, least) / max(1, len(info.ids)) for info in shards])
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


def as_windows(windows: Generator[Window], reading: Reading) -> Generator[tuple[Read, Sequence[BlockRows]]]:
    """Every window is read whole, ahead if that is asked for, and put on the device."""

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
