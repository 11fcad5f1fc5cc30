"""Where the examples of blocks lie: in which slabs, and what the tables of open shards say of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int

from attrax.core.schema import ShardInfo
from attrax.core.tree import Examples
from attrax.frontends.storage.merge import Rows
from attrax.frontends.storage.shards import Shard

Part: TypeAlias = tuple[int, int]
"""A slab: the number of its shard, and its own."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockRows:
    """A block.

    Attributes:
        rows: Its rows.
        slab: The number of the slab of each.
        parts: The slabs that hold them.
        examples: Its examples.
    """

    rows: Rows
    slab: Int[np.ndarray, " n"]
    parts: tuple[Part, ...]
    examples: Examples


def shards_in(rows: Rows) -> list[int]:
    """Numbers of the shards that hold some rows."""
    return np.unique(rows.shard).tolist()


def _slabs(files: Mapping[int, Shard], rows: Rows) -> Int[np.ndarray, " n"]:
    """The slab of each row."""
    found = np.empty(len(rows), np.int64)
    for s in shards_in(rows):
        here = rows.shard == s
        found[here] = np.searchsorted(files[s].table.starts, rows.row[here], "right") - 1
    return found


def blocks_of(files: Mapping[int, Shard], rows: Rows, ends: Iterable[int]) -> Iterator[BlockRows]:
    """Cut rows of open shards into blocks that end at `ends`."""
    slab = _slabs(files, rows)
    for start, stop in pairwise([0, *ends]):
        here, its = rows.take(slice(start, stop)), slab[start:stop]
        parts = tuple(dict.fromkeys(zip(here.shard.tolist(), its.tolist(), strict=True)))
        yield BlockRows(here, its, parts, _examples(files, here))


def wanted_rows(files: Mapping[int, Shard], rows: Rows) -> dict[Part, Int[np.ndarray, " _"]]:
    """Positions in each shard that lie in one slab, ascending."""
    found: dict[Part, np.ndarray] = {}
    slab = _slabs(files, rows)
    for s in shards_in(rows):
        here = rows.shard == s
        row, first = np.unique(rows.row[here], return_index=True)
        number = slab[here][first]
        cuts = np.flatnonzero(np.diff(number)) + 1
        for a, b in pairwise([0, *cuts.tolist(), len(row)]):
            found[s, int(number[a])] = row[a:b]
    return found


def _examples(files: Mapping[int, Shard], rows: Rows) -> Examples:
    shard, row, block = rows.shard.tolist(), rows.row.tolist(), rows.block.tolist()
    tables = {s: files[s].table for s in dict.fromkeys(shard)}
    blocks = set(zip(shard, block, strict=True))
    bits = [int(tables[s].weight_bits[b]) for s, b in blocks]
    counted = all(tables[s].has_tokens[b] for s, b in blocks)
    info = tables[shard[0]].info
    at = block[0]
    weight = torch.from_numpy(_values({s: t.weight for s, t in tables.items()}, rows)) if all(bits) else None
    return Examples(
        tuple([tables[s].info.ids[r] for s, r in zip(shard, row, strict=True)]),
        info.steps[at],
        info.micros[at],
        None if weight is None else weight.to(torch.float64 if max(bits) > 32 else torch.float32),
        torch.from_numpy(_values({s: t.tokens for s, t in tables.items()}, rows)) if counted else None,
        info.fingerprints[at],
        info.rates[at],
        _absent([tables[s].info for s, _ in blocks], [b for _, b in blocks]),
    )


def _absent(infos: Sequence[ShardInfo], blocks: Sequence[int]) -> tuple[str, ...]:
    """The parameters that none of some blocks has reached."""
    first, *others = dict.fromkeys(
        info.absences[info.absent[b]] for info, b in zip(infos, blocks, strict=True)
    )
    return tuple(name for name in first if all(name in other for other in others))


def _values(columns: Mapping[int, np.ndarray], rows: Rows) -> np.ndarray:
    """The entries of a column of each shard that belong to some rows."""
    if len(columns) == 1:
        return next(iter(columns.values()))[rows.row]
    found = np.empty(len(rows), next(iter(columns.values())).dtype)
    for s, values in columns.items():
        here = rows.shard == s
        found[here] = values[rows.row[here]]
    return found
