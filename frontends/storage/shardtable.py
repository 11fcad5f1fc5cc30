"""The table of a shard, as `attrax.core.schema` writes it down: which examples it holds, and where."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from attrax.core.packed import offsets_of
from attrax.core.schema import Form, ShardInfo, info_from_json
from attrax.frontends.storage.slabs import ALIGNED, Layout, Slab, all_groups, layout_of

_MOST_ROWS = 2**40


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """What the table of a shard says.

    Attributes:
        info: Its description, but for name, size and places of the file.
        weight: Loss weights [N], NaN where unknown.
        tokens: Token counts [N], -1 where unknown.
        weight_bits: Per block, the precision its weights had; 0 if they are unknown.
        has_tokens: Per block, whether token counts are known.
        slabs: The slabs.
        starts: First example of each slab.
        values: Of each further column, its dtype and values.
    """

    info: ShardInfo
    weight: Float[np.ndarray, " N"]
    tokens: Int[np.ndarray, " N"]
    weight_bits: Int[np.ndarray, " K"]
    has_tokens: Int[np.ndarray, " K"]
    slabs: Sequence[Slab]
    starts: Int[np.ndarray, " S"]
    values: Sequence[Mapping[str, Any]]


@lru_cache(8)
def parsed(text: bytes) -> Table:
    """Read a table; a reader that comes back to a shard finds it read.

    Raises:
        ValueError: If it contradicts itself; a TypeError, LookupError or the like if it is no table at all.
    """
    table: dict[str, Any] = json.loads(text)
    info = info_from_json({**table, "name": "", "size": 0, "places": ()})
    weight = np.array([math.nan if w is None else float(w) for w in table["weight"]], np.float64)
    tokens = np.array([-1 if n is None else n for n in table["tokens"]], np.int64)
    if not len(weight) == len(tokens) == len(info.ids) or len(table["weight_bits"]) != len(info.sizes):
        raise ValueError("its lists of examples have different lengths")
    slabs = _slabs(info, table)
    first = np.cumsum([0, *info.sizes])
    starts = first[np.cumsum([0, *(slab.blocks for slab in slabs)])][:-1]
    known = np.array([n is not None for n in table["tokens"]], np.int64)
    has_tokens = np.array([known[a:b].all() for a, b in pairwise(first.tolist())], np.int64)
    bits = np.array(table["weight_bits"], np.int64)
    return Table(info, weight, tokens, bits, has_tokens, slabs, starts, table["values"])


def _slabs(info: ShardInfo, table: Mapping[str, Any]) -> list[Slab]:
    lengths = [_offsets(rows) for rows in table["lengths"]]
    known: dict[tuple[int, int, int], Layout] = {}
    slabs: list[Slab] = []
    block = 0
    for entry in table["slabs"]:
        at, size, blocks, layout = (index(entry[name]) for name in ("at", "size", "blocks", "layout"))
        kinds, sizes = info.kinds[block : block + blocks], info.sizes[block : block + blocks]
        if not len(kinds) == blocks > 0 or len(set(kinds)) > 1 or at < 0 or at % ALIGNED:
            raise ValueError("its slabs are not those of its blocks")
        key = (kinds[0], sum(sizes), layout)
        if key not in known:
            leaves = [info.leaves[n] for n in info.signatures[kinds[0]]]
            rows = _rows([form for _, form in leaves], sum(sizes), table["layouts"][layout], lengths)
            known[key] = layout_of(leaves, rows)
        sums = np.frombuffer(bytes.fromhex(entry["xxh3"]), ">u8").tolist()
        if (size, len(sums)) != (known[key].size, known[key].pieces):
            raise ValueError(
                f"a slab of {size} bytes and {len(sums)} checksums has arrays of {known[key].size} bytes"
            )
        slabs.append(Slab(at, blocks, sum(sizes), sums, known[key]))
        block += blocks
    if block != len(info.sizes):
        raise ValueError(f"its slabs hold {block} blocks, it has {len(info.sizes)}")
    return slabs


def _offsets(lengths: Sequence[int]) -> Int[np.ndarray, " ends"]:
    counts = np.array(lengths, np.int64)
    offsets = offsets_of(counts)
    if counts.ndim != 1 or (counts < 0).any() or (offsets < 0).any() or offsets[-1] > _MOST_ROWS:
        raise ValueError("its numbers of rows make no sense")
    return offsets


def _rows(
    forms: Sequence[Form],
    examples: int,
    layout: Sequence[int | None],
    lengths: Sequence[Int[np.ndarray, " _"]],
) -> list[Int[np.ndarray, " ends"]]:
    """The offsets of each group of arrays."""
    found: list[np.ndarray] = []
    for form, number in zip(all_groups(forms), layout, strict=True):
        single = form.kind == "Materialized"
        rows = np.arange(examples + 1) if single else lengths[_number(number)]
        if len(rows) != examples + 1:
            raise ValueError(f"it has {len(rows) - 1} examples, its blocks have {examples}")
        found.append(rows)
    return found


def _number(value: int | None) -> int:
    if value is None:
        raise ValueError("rows without lengths, where an integer was expected")
    return index(value)
