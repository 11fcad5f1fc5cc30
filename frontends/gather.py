"""Blocks from the rows of shards: read a window of many blocks at once, cut blocks from it, build one leaf at a time.

Opening the arrays of a shard costs more than reading a few rows of them, so consecutive blocks share a read.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

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
    def positions(shard: int) -> Tensor:
        return torch.from_numpy(np.unique(rows.row[rows.shard == shard]))

    return {s: read_rows(folder, shards[s], positions(s)) for s in np.unique(rows.shard).tolist()}


def _cut(
    shards: Sequence[ShardInfo], loaded: Mapping[int, Loaded], rows: Rows, built: frozenset[str]
) -> Gathered:
    first = shards[rows.shard[0]]
    names = [first.leaves[number][0] for number in first.signatures[first.kinds[rows.block[0]]]]
    places = [
        (loaded[s], torch.from_numpy(np.flatnonzero(rows.shard == s))) for s in np.unique(rows.shard).tolist()
    ]
    row, block = torch.from_numpy(rows.row), torch.from_numpy(rows.block)
    leaves = ((name, _leaf(name, places, row, name in built)) for name in names)
    return _examples(shards, rows, places, row, block), leaves


def _examples(
    shards: Sequence[ShardInfo],
    rows: Rows,
    places: Sequence[tuple[Loaded, Tensor]],
    row: Tensor,
    block: Tensor,
) -> Examples:
    N = len(rows)
    weight, tokens = torch.empty(N, dtype=torch.float64), torch.empty(N, dtype=torch.int64)
    bits, known = torch.empty(N, dtype=torch.int64), torch.empty(N, dtype=torch.int64)
    for read, here in places:
        place = torch.searchsorted(read.rows, row[here])
        weight[here], tokens[here] = read.weight[place], read.tokens[place]
        bits[here], known[here] = read.weight_bits[block[here]], read.has_tokens[block[here]]
    first, b = shards[rows.shard[0]], rows.block[0]
    return Examples(
        tuple(shards[s].ids[r] for s, r in zip(rows.shard, rows.row, strict=True)),
        first.steps[b],
        first.micros[b],
        weight.to(torch.float64 if bool((bits > 32).any()) else torch.float32) if bool(bits.all()) else None,
        tokens if bool(known.all()) else None,
        first.fingerprints[b],
        first.rates[b],
    )


def _leaf(name: str, places: Sequence[tuple[Loaded, Tensor]], row: Tensor, build: bool) -> Leaf:
    """One leaf of a block, from the pieces that its shards hold in one form or another."""
    pieces: dict[Form, list[Packed]] = {}
    targets: dict[Form, list[Tensor]] = {}
    for read, here in places:
        for positions, packed in read.leaves.get(name, ()):
            place = torch.searchsorted(positions, row[here]).clamp_max(len(positions) - 1)
            has = positions[place] == row[here]
            pieces.setdefault(packed.form, []).append(take_packed(packed, place[has]))
            targets.setdefault(packed.form, []).append(here[has])
    leaves = [unpack(concat_packed(same)) for same in pieces.values()]
    leaf = concat([materialize_leaf(leaf) for leaf in leaves] if build else leaves)
    order = torch.cat([here for same in targets.values() for here in same])
    in_order = bool((order == torch.arange(len(order))).all())
    return leaf if in_order else take(leaf, order.argsort())
