"""Blocks from the rows of shards: read the slabs that hold a block, cut the block from them, build one leaf at a time.

Blocks are read in windows: the files of the next one are opened, and the system told to read from the disk what it
needs, while one is in use.  On the way to a GPU a window goes through pinned memory, in the order of the reader's
stream, and a thread reads ahead.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from attrax.core import Examples, Leaf, concat, materialize_leaf, take
from attrax.core.packed import Memory, Packed, concat_packed, take_packed, uninitialized, unpack
from attrax.core.schema import Form, ShardInfo
from attrax.frontends.background import ahead
from attrax.frontends.buffers import Buffers
from attrax.frontends.merge import Rows
from attrax.frontends.shards import Loaded, Shard, open_shard, read_rows

WINDOW_BYTES = 80 * 2**20

Gathered: TypeAlias = tuple[Examples, Iterator[tuple[str, Leaf]]]
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


def stream(
    folder: Path, shards: Sequence[ShardInfo], rows: Rows, built: frozenset[str], reading: Reading
) -> Iterator[Gathered]:
    """All rows, block by block.

    Args:
        folder: The store.
        shards: Its shards.
        rows: What to read.
        built: Leaves to build.
        reading: How; a window holds one block at least.

    Yields:
        Examples and leaves of each block, the leaves to be used before the next block is asked for.
    """
    windows = _windows(folder, shards, rows, reading)
    with closing(_moved(windows, reading) if reading.moves else _as_needed(windows)) as sources:
        for read, blocks in sources:
            held: dict[Part, Loaded] = {}
            for block in blocks:
                held = {part: held[part] if part in held else read(part) for part in block.parts}
                yield _cut(shards, held, block, built)


def gather(
    folder: Path, shards: Sequence[ShardInfo], rows: Rows, built: frozenset[str], reading: Reading
) -> Gathered:
    """Some rows of one section as one block, in the order given."""
    with ExitStack() as files:
        opened = {s: files.enter_context(closing(open_shard(folder, shards[s]))) for s in _numbers(rows)}
        wanted = _wanted(opened, rows)
        loaded = {part: _read(opened, wanted, part, uninitialized) for part in wanted}
        if reading.device is not None:
            loaded = {part: _mapped(read, lambda x: x.to(reading.device)) for part, read in loaded.items()}
        return _cut(shards, loaded, _block(opened, rows), built)


@dataclass(frozen=True, eq=False, slots=True)
class _Block:
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
class _Window:
    """Consecutive blocks, the files that hold them, and what is needed of each slab."""

    files: Mapping[int, Shard]
    wanted: Mapping[Part, Int[np.ndarray, " _"]]
    blocks: Sequence[_Block]


def _numbers(rows: Rows) -> list[int]:
    return np.unique(rows.shard).tolist()


def _windows(folder: Path, shards: Sequence[ShardInfo], rows: Rows, reading: Reading) -> Generator[_Window]:
    """Windows of consecutive blocks; while one is in use the system is reading the following ones from the disk."""
    plan = list(_planned(shards, rows, reading))
    files: dict[int, Shard] = {}
    ready: dict[int, _Window] = {}
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
) -> _Window:
    """A window whose files are open, and which the system reads from the disk."""
    here = rows.take(slice(start, stops[-1]))
    for s in _numbers(here):
        files[s] = files[s] if s in files else open_shard(folder, shards[s])
    wanted = _wanted(files, here)
    _announce(files, wanted)
    pieces = zip([start, *stops[:-1]], stops, strict=True)
    blocks = [_block(files, rows.take(slice(a, b))) for a, b in pieces]
    return _Window({s: files[s] for s in _numbers(here)}, wanted, blocks)


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


def _block(files: Mapping[int, Shard], rows: Rows) -> _Block:
    slab = np.empty(len(rows), np.int64)
    for s in _numbers(rows):
        here = rows.shard == s
        slab[here] = _slabs(files, s, rows.row[here])
    return _Block(rows, slab)


def _wanted(files: Mapping[int, Shard], rows: Rows) -> dict[Part, Int[np.ndarray, " _"]]:
    """Positions in each shard that lie in one slab."""
    found: dict[Part, np.ndarray] = {}
    for s in _numbers(rows):
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


def _read(
    files: Mapping[int, Shard], wanted: Mapping[Part, Int[np.ndarray, " _"]], part: Part, memory: Memory
) -> Loaded:
    return read_rows(files[part[0]], part[1], wanted[part], memory)


def _as_needed(windows: Generator[_Window]) -> Generator[tuple[Read, Sequence[_Block]]]:
    """Every slab is read when a block needs it, into memory that an earlier one does not use any more."""
    memory = Buffers().array
    with closing(windows):
        for window in windows:
            yield (lambda part, w=window: _read(w.files, w.wanted, part, memory)), window.blocks


def _moved(windows: Generator[_Window], reading: Reading) -> Generator[tuple[Read, Sequence[_Block]]]:
    """Every window is read whole, into pinned memory, and moved to the GPU."""

    def memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        pinned = reading.device is not None and reading.device.type == "cuda"
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)

    def whole() -> Generator[tuple[dict[Part, Loaded], Sequence[_Block]]]:
        with closing(windows):
            for window in windows:
                parts = {part: _read(window.files, window.wanted, part, memory) for part in window.wanted}
                yield parts, window.blocks

    with closing(ahead(whole(), reading.prefetch) if reading.prefetch else whole()) as read:
        for loaded, blocks in read:
            moved = {
                part: _mapped(x, lambda x: x.to(reading.device, non_blocking=True))
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


def _mapped(read: Loaded, function: Callable[[Tensor], Tensor]) -> Loaded:
    """With a function of every array of a leaf."""

    def each(packed: Packed) -> Packed:
        return replace(packed, arrays=tuple(map(function, packed.arrays)), uses=tuple(map(each, packed.uses)))

    return replace(read, leaves={name: each(packed) for name, packed in read.leaves.items()})


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    """The rows of a block that one slab holds.

    Attributes:
        read: What was read of the slab.
        place: Their places in `read`; a slice if these are neighbors.
        here: Their places in the block.
        block: Their blocks in the shard.
    """

    read: Loaded
    place: Int[np.ndarray, " n"] | slice
    here: Int[np.ndarray, " n"]
    block: Int[np.ndarray, " n"]


def _piece(read: Loaded, block: _Block, part: Part) -> _Piece:
    rows = block.rows
    here = np.flatnonzero((rows.shard == part[0]) & (block.slab == part[1]))
    row = rows.row[here]
    place = np.searchsorted(read.rows, row)
    neighbors = bool((np.diff(place) == 1).all())
    where = slice(int(place[0]), int(place[-1]) + 1) if neighbors else place
    return _Piece(read, where, here, rows.block[here])


def _cut(
    shards: Sequence[ShardInfo], loaded: Mapping[Part, Loaded], block: _Block, built: frozenset[str]
) -> Gathered:
    rows = block.rows
    if (rows.section != rows.section[0]).any():
        _refuse_parts(shards, rows)
    first = shards[rows.shard[0]]
    names = [first.leaves[number][0] for number in first.signatures[first.kinds[rows.block[0]]]]
    pieces = [_piece(loaded[part], block, part) for part in block.parts]
    return _examples(shards, rows, pieces), ((name, _leaf(name, pieces, name in built)) for name in names)


def _refuse_parts(shards: Sequence[ShardInfo], rows: Rows) -> None:
    """Say in what the rows of a step differ that cannot be one block."""
    _, at = np.unique(rows.section, return_index=True)
    infos, blocks = [shards[s] for s in rows.shard[at[:2]]], rows.block[at[:2]]
    prints = {info.fingerprints[b] for info, b in zip(infos, blocks, strict=True)}
    rates = {info.rates[b] for info, b in zip(infos, blocks, strict=True)}
    one, two = (
        {info.leaves[n][0] for n in info.signatures[info.kinds[b]]}
        for info, b in zip(infos, blocks, strict=True)
    )
    what = (
        f"the fingerprints {sorted(prints)}"
        if len(prints) > 1
        else f"the learning rates {list(rates)}"
        if len(rates) > 1
        else f"the leaves, e.g. {sorted(one ^ two)[:5]} only in some"
    )
    raise ValueError(
        f"open_store: the blocks of step {rows.step[0]} of run '{infos[0].run}' differ in {what}, and cannot be read "
        "as one. Read the blocks as they were written (block_examples=None)."
    )


def _examples(shards: Sequence[ShardInfo], rows: Rows, pieces: Sequence[_Piece]) -> Examples:
    order = _order(pieces)
    weight = torch.cat([p.read.weight[p.place] for p in pieces])
    tokens = torch.cat([p.read.tokens[p.place] for p in pieces])
    if order is not None:
        weight, tokens = weight[order], tokens[order]
    bits = np.concatenate([p.read.weight_bits[p.block] for p in pieces])
    known = np.concatenate([p.read.has_tokens[p.block] for p in pieces])
    first, b = shards[rows.shard[0]], rows.block[0]
    return Examples(
        tuple(shards[s].ids[r] for s, r in zip(rows.shard.tolist(), rows.row.tolist(), strict=True)),
        first.steps[b],
        first.micros[b],
        weight.to(torch.float64 if (bits > 32).any() else torch.float32) if bits.all() else None,
        tokens if known.all() else None,
        first.fingerprints[b],
        first.rates[b],
    )


def _leaf(name: str, pieces: Sequence[_Piece], build: bool) -> Leaf:
    """One leaf of a block, from what its slabs hold in one form or another."""
    if len(pieces) == 1:
        leaf = unpack(take_packed(pieces[0].read.leaves[name], pieces[0].place))
        return materialize_leaf(leaf) if build else leaf
    found: dict[Form, list[tuple[_Piece, Packed]]] = {}
    for piece in pieces:
        packed = piece.read.leaves[name]
        found.setdefault(packed.form, []).append((piece, take_packed(packed, piece.place)))
    leaves = [unpack(concat_packed([packed for _, packed in same])) for same in found.values()]
    leaf = concat([materialize_leaf(leaf) for leaf in leaves] if build else leaves)
    order = _order([piece for same in found.values() for piece, _ in same])
    return leaf if order is None else take(leaf, order)


def _order(pieces: Sequence[_Piece]) -> Tensor | None:
    """Which of the rows of some pieces, one after another, is each row of the block; None if they are in order."""
    here = np.concatenate([piece.here for piece in pieces])
    return None if (here[1:] > here[:-1]).all() else torch.from_numpy(here.argsort())
