"""Many shards, one list of examples: in data order, each example once.

A *run* is one pass of a program over data; its processes (ranks) write shards of their own.  Samplers deal examples to
ranks in turn, so the blocks that the ranks wrote for one (step, micro) are one block, its rows dealt in turn again.

An example that was written twice is one row: a sampler repeats examples to even out the ranks, a resumed run repeats
those after its last checkpoint.  So a row whose (id, step) another writer (rank, resumed run, other run) already
holds is dropped and counted.  What one writer wrote twice are two rows, because data may hold a document twice.  If two
runs hold one (id, step) at different parameters, neither is a repetition: these rows are contested, and
reading them without naming the run is refused.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Bool, Int

from attrax.core.schema import ShardInfo


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """N examples of several shards, in data order.

    Attributes:
        shard: Number of the shard.
        row: Position in the shard.
        block: Block within the shard.
        group: Number of the block in data order; ascending.
        section: Number of the section: rows of equal step, fingerprint, learning rate and leaves can share a block.
        step: Optimizer step.
        contested: Whether another run holds the example at other parameters.
    """

    shard: Int[np.ndarray, " N"]
    row: Int[np.ndarray, " N"]
    block: Int[np.ndarray, " N"]
    group: Int[np.ndarray, " N"]
    section: Int[np.ndarray, " N"]
    step: Int[np.ndarray, " N"]
    contested: Bool[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: np.ndarray | slice) -> "Rows":
        """Some of the rows, by index, mask or slice."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


def run_order(shards: Sequence[ShardInfo]) -> tuple[str, ...]:
    """Run ids, the earliest run first."""
    begun: dict[str, float] = {}
    for info in shards:
        begun[info.run] = min(info.created, begun.get(info.run, info.created))
    return tuple(sorted(begun, key=lambda run: (begun[run], run)))


def ordered(shards: Sequence[ShardInfo]) -> tuple[ShardInfo, ...]:
    """Shards by run, rank and sequence: the order in which each process wrote them."""
    place = {run: n for n, run in enumerate(run_order(shards))}
    return tuple(sorted(shards, key=lambda s: (place[s.run], s.rank, s.sequence, s.writer)))


def gaps(shards: Sequence[ShardInfo]) -> list[tuple[str, int, int]]:
    """(run, rank, number) of shards that must have existed: later ones of the same process do."""
    numbers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for info in shards:
        numbers[info.run, info.rank].add(info.sequence)
    return [(*key, n) for key, found in numbers.items() for n in sorted(set(range(max(found))) - found)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block of one rank: where it is, and its place in the run."""

    shard: int
    block: int
    first: int
    size: int
    rank: int


def merged(shards: Sequence[ShardInfo]) -> tuple[Rows, int]:
    """Rows of all shards in data order without repetitions.

    Args:
        shards: As `ordered` returns them.

    Returns:
        The rows, and how many repetitions were dropped.
    """
    blocks, sections = _joint_blocks(shards)
    pieces: list[np.ndarray] = []
    for group, (members, section) in enumerate(zip(blocks, sections, strict=True)):
        pieces.append(_dealt(members, group, section))
    table = np.concatenate(pieces, 1) if pieces else np.zeros((5, 0), np.int64)
    first = np.cumsum([0, *(len(info.steps) for info in shards)])
    step = np.array([step for info in shards for step in info.steps], np.int64)[first[table[0]] + table[2]]
    shard, row, block, group, section = table
    rows = Rows(shard, row, block, group, section, step, np.zeros(len(step), bool))
    return _without_repetitions(rows, shards)


def _joint_blocks(shards: Sequence[ShardInfo]) -> tuple[list[list[_Piece]], list[int]]:
    """The blocks in data order, each as the pieces its ranks wrote, and their sections."""
    place = {run: n for n, run in enumerate(run_order(shards))}
    written: Counter[tuple[int, int]] = Counter()
    repeated: Counter[tuple[int, int, int, int]] = Counter()
    members: dict[tuple[int, ...], list[_Piece]] = defaultdict(list)
    anchor: dict[tuple[int, ...], int] = {}
    section_of: dict[tuple[int, ...], int] = {}
    numbers: dict[object, int] = {}
    for s, info in enumerate(shards):
        run, first = place[info.run], 0
        names = [frozenset(info.leaves[n][0] for n in signature) for signature in info.signatures]
        for b, (step, micro, size) in enumerate(zip(info.steps, info.micros, info.sizes, strict=True)):
            kind = (step, info.fingerprints[b], info.rates[b], names[info.kinds[b]])
            section = numbers.setdefault(kind, len(numbers))
            key = (run, step, micro, repeated[run, info.rank, step, micro], section)
            members[key].append(_Piece(s, b, first, size, info.rank))
            section_of[key] = section
            position = written[run, info.rank]
            anchor[key] = min(position, anchor.get(key, position))
            written[run, info.rank] += 1
            repeated[run, info.rank, step, micro] += 1
            first += size
    order = sorted(members, key=lambda key: (key[0], anchor[key], key))
    return [members[key] for key in order], [section_of[key] for key in order]


def _dealt(pieces: Sequence[_Piece], group: int, section: int) -> np.ndarray:
    """Columns (shard, row, block, group, section) of one block, its pieces' rows dealt in turn."""
    columns = [
        np.stack([np.full(p.size, p.shard), p.first + np.arange(p.size), np.full(p.size, p.block)])
        for p in pieces
    ]
    table = np.concatenate(columns, 1)
    if len(pieces) > 1:
        turn = np.concatenate([np.arange(p.size) for p in pieces])
        rank = np.repeat([p.rank for p in pieces], [p.size for p in pieces])
        table = table[:, np.lexsort((rank, turn))]
    return np.concatenate([table, np.full((1, table.shape[1]), group), np.full((1, table.shape[1]), section)])


def _without_repetitions(rows: Rows, shards: Sequence[ShardInfo]) -> tuple[Rows, int]:
    if len({info.writer for info in shards}) < 2:
        return rows, 0
    seen: dict[tuple[str, int, int], int] = {}
    times: Counter[tuple[str, str, int]] = Counter()
    keep = np.ones(len(rows), bool)
    contested = np.zeros(len(rows), bool)
    for n, (s, r, b, step) in enumerate(zip(rows.shard, rows.row, rows.block, rows.step, strict=True)):
        info, i, at = shards[s], shards[s].ids[r], int(step)
        key = (i, at, times[info.writer, i, at])
        times[info.writer, i, at] += 1
        first = seen.setdefault(key, n)
        if first == n:
            continue
        other = shards[rows.shard[first]]
        same = info.fingerprints[b] == other.fingerprints[rows.block[first]]
        if other.run == info.run or same:
            keep[n] = False
        else:
            contested[[n, first]] = True
    return replace(rows, contested=contested).take(keep), int((~keep).sum())
