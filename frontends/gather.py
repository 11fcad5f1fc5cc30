"""Blocks from the rows of shards: read a window of many blocks at once, cut blocks from it, build one leaf at a time.

Opening the arrays of a shard costs more than reading a few rows of them, so consecutive blocks share a read.  Windows
can be read ahead by a thread; on the way to a GPU they go through pinned memory, in the order of the reader's stream.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from attrax.core import Examples, Leaf, concat, materialize_leaf, take
from attrax.core.schema import Form, Packed, ShardInfo, concat_packed, take_packed, unpack
from attrax.frontends.background import ahead
from attrax.frontends.merge import Rows
from attrax.frontends.shards import Loaded, read_rows

WINDOW_BYTES = 80 * 2**20

Gathered: TypeAlias = tuple[Examples, Iterator[tuple[str, Leaf]]]
Shape: TypeAlias = int | Literal["step"] | None
"""Examples per block, "step" for one block an optimizer step, None for the blocks that were written."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a store is read; see `open_store`."""

    block_examples: Shape = None
    device: torch.device | None = None
    prefetch: int = 0
    window_bytes: int = WINDOW_BYTES


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
    with closing(ahead(windows, reading.prefetch) if reading.prefetch else windows) as read:
        for pinned, blocks in read:
            loaded = _moved(pinned, reading.device)
            for block in blocks:
                yield _cut(shards, loaded, block, built)
            del pinned, loaded


def gather(
    folder: Path, shards: Sequence[ShardInfo], rows: Rows, built: frozenset[str], reading: Reading
) -> Gathered:
    """Some rows of one section as one block, in the order given."""
    loaded = _moved(_load(folder, shards, rows, reading.device), reading.device)
    return _cut(shards, loaded, rows, built)


def _windows(
    folder: Path, shards: Sequence[ShardInfo], rows: Rows, reading: Reading
) -> Generator[tuple[dict[int, Loaded], list[Rows]]]:
    """Windows of consecutive blocks: what was read of each shard, and the rows of each block."""
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
        loaded = _load(folder, shards, rows.take(slice(start, stops[-1])), reading.device)
        pieces = zip([start, *stops[:-1]], stops, strict=True)
        yield loaded, [rows.take(slice(a, b)) for a, b in pieces]
        del loaded
        block, start = last, stops[-1]


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


def _load(
    folder: Path, shards: Sequence[ShardInfo], rows: Rows, device: torch.device | None
) -> dict[int, Loaded]:
    """What is needed of each shard, in pinned memory if it goes to a GPU."""
    numbers = np.unique(rows.shard).tolist()
    loaded = {s: read_rows(folder, shards[s], np.unique(rows.row[rows.shard == s])) for s in numbers}
    if device is None or device.type != "cuda":
        return loaded
    return {s: _mapped(read, lambda x: x.pin_memory()) for s, read in loaded.items()}


def _moved(loaded: dict[int, Loaded], device: torch.device | None) -> dict[int, Loaded]:
    if device is None or device.type == "cpu":
        return loaded
    return {s: _mapped(read, lambda x: x.to(device, non_blocking=True)) for s, read in loaded.items()}


def _mapped(read: Loaded, function: Callable[[Tensor], Tensor]) -> Loaded:
    """With a function of every array of a leaf."""

    def each(packed: Packed) -> Packed:
        return replace(packed, arrays=tuple(map(function, packed.arrays)), uses=tuple(map(each, packed.uses)))

    leaves = {n: [(rows, each(packed)) for rows, packed in forms] for n, forms in read.leaves.items()}
    return replace(read, leaves=leaves)


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    """The rows of a block that one shard holds.

    Attributes:
        read: What was read of the shard.
        row: Their positions in the shard.
        place: Their places in `read`; a slice if these are neighbors.
        here: Their places in the block.
        block: Their blocks in the shard.
    """

    read: Loaded
    row: Int[np.ndarray, " n"]
    place: Int[np.ndarray, " n"] | slice
    here: Int[np.ndarray, " n"]
    block: Int[np.ndarray, " n"]


def _piece(read: Loaded, rows: Rows, shard: int) -> _Piece:
    here = np.flatnonzero(rows.shard == shard)
    row = rows.row[here]
    place = np.searchsorted(read.rows, row)
    neighbors = bool((np.diff(place) == 1).all())
    where = slice(int(place[0]), int(place[-1]) + 1) if neighbors else place
    return _Piece(read, row, where, here, rows.block[here])


def _cut(
    shards: Sequence[ShardInfo], loaded: Mapping[int, Loaded], rows: Rows, built: frozenset[str]
) -> Gathered:
    if len(np.unique(rows.section)) > 1:
        _refuse_parts(shards, rows)
    first = shards[rows.shard[0]]
    names = [first.leaves[number][0] for number in first.signatures[first.kinds[rows.block[0]]]]
    pieces = [_piece(loaded[s], rows, s) for s in np.unique(rows.shard).tolist()]
    return _examples(shards, rows, pieces), (
        (name, _leaf(name, pieces, len(rows), name in built)) for name in names
    )


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
    order = torch.from_numpy(np.concatenate([p.here for p in pieces]).argsort())
    weight = torch.cat([p.read.weight[p.place] for p in pieces])[order]
    tokens = torch.cat([p.read.tokens[p.place] for p in pieces])[order]
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


def _leaf(name: str, pieces: Sequence[_Piece], rows: int, build: bool) -> Leaf:
    """One leaf of a block, from what its shards hold in one form or another."""
    found: dict[Form, list[Packed]] = {}
    targets: dict[Form, list[np.ndarray]] = {}
    for piece in pieces:
        for positions, packed in piece.read.leaves.get(name, ()):
            place, here = piece.place, piece.here
            if len(positions) != len(piece.read.rows):
                at = np.searchsorted(positions, piece.row).clip(max=len(positions) - 1)
                has = positions[at] == piece.row
                place, here = at[has], here[has]
            if not len(here):
                continue
            found.setdefault(packed.form, []).append(take_packed(packed, place))
            targets.setdefault(packed.form, []).append(here)
    order = [here for same in targets.values() for here in same]
    if sum(map(len, order)) != rows:
        raise ValueError(
            f"open_store: leaf '{name}' is recorded for {sum(map(len, order))} of {rows} examples."
        )
    leaves = [unpack(concat_packed(same)) for same in found.values()]
    leaf = concat([materialize_leaf(leaf) for leaf in leaves] if build else leaves)
    return leaf if len(order) == 1 else take(leaf, torch.from_numpy(np.concatenate(order).argsort()))
