"""Blocks from the rows of shards: read a window of many blocks at once, cut blocks from it, build one leaf at a time.

Opening the arrays of a shard costs more than reading a few rows of them, so consecutive blocks share a read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int

from attrax.core import Examples, Leaf, concat, materialize_leaf, take
from attrax.core.schema import Form, Packed, ShardInfo, concat_packed, take_packed, unpack
from attrax.frontends.merge import Rows
from attrax.frontends.shards import Loaded, read_rows

WINDOW_BYTES = 64 * 2**20

Gathered: TypeAlias = tuple[Examples, Iterator[tuple[str, Leaf]]]


def stream(
    folder: Path,
    shards: Sequence[ShardInfo],
    rows: Rows,
    block_examples: int | None,
    built: frozenset[str],
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[Gathered]:
    """All rows, block by block.

    Args:
        folder: The store.
        shards: Its shards.
        rows: What to read.
        block_examples: Rows per block; blocks as written if None.
        built: Leaves to build.
        window_bytes: How much to read at once; a block is always read at once.

    Yields:
        Examples and leaves of each block, the leaves to be used before the next block is asked for.
    """
    ends = _block_ends(rows, block_examples)
    per_row = np.array([info.size / max(1, len(info.ids)) for info in shards])
    read_until = np.cumsum(per_row[rows.shard])[ends - 1] if len(ends) else np.zeros(0)
    block, start = 0, 0
    while block < len(ends):
        done = read_until[block - 1] if block else 0.0
        last = max(block + 1, int(np.searchsorted(read_until, done + window_bytes, "right")))
        loaded = _load(folder, shards, rows.take(slice(start, int(ends[last - 1]))))
        for end in ends[block:last].tolist():
            yield _cut(shards, loaded, rows.take(slice(start, end)), built)
            start = end
        block = last
        del loaded


def gather(folder: Path, shards: Sequence[ShardInfo], rows: Rows, built: frozenset[str]) -> Gathered:
    """Some rows of one section as one block, in the order given."""
    return _cut(shards, _load(folder, shards, rows), rows, built)


def _block_ends(rows: Rows, block_examples: int | None) -> np.ndarray:
    """Where each block ends: with its group, or after `block_examples` rows and with its section."""
    unit = rows.group if block_examples is None else rows.section
    ends = (
        np.append(np.flatnonzero(unit[1:] != unit[:-1]) + 1, len(rows))
        if len(rows)
        else np.zeros(0, np.int64)
    )
    if block_examples is None:
        return ends
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    cuts = [
        np.append(np.arange(a + block_examples, b, block_examples), b)
        for a, b in zip(starts, ends, strict=True)
    ]
    return np.concatenate(cuts) if cuts else ends


def _load(folder: Path, shards: Sequence[ShardInfo], rows: Rows) -> dict[int, Loaded]:
    numbers = np.unique(rows.shard).tolist()
    return {s: read_rows(folder, shards[s], np.unique(rows.row[rows.shard == s])) for s in numbers}


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
    first = shards[rows.shard[0]]
    names = [first.leaves[number][0] for number in first.signatures[first.kinds[rows.block[0]]]]
    pieces = [_piece(loaded[s], rows, s) for s in np.unique(rows.shard).tolist()]
    return _examples(shards, rows, pieces), (
        (name, _leaf(name, pieces, len(rows), name in built)) for name in names
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
