"""Many shards, one list of examples: in data order, each example once.

A *run* is one pass of a program over data; its processes (ranks) write shards of their own.  Samplers deal examples to
ranks in turn, so the blocks that the ranks wrote for one (step, micro) are one block, its rows dealt in turn again.

An *attempt* is one life of a process of a run.  An attempt that says at which step it goes on (``steps_done``)
supersedes the rows that earlier attempts of its rank wrote of that step and later ones: training went another way then.

An example that was written twice is one row: a sampler repeats examples to even out the ranks, a resumed run repeats
those after its last checkpoint.  So of the rows with one (id, step) by different writers (ranks, attempts, runs) one
stays, and the others are dropped and counted: of two attempts of a rank the later one's stays, otherwise the first in
data order.  What one writer wrote twice are two rows, because data may hold a document twice.  If two runs hold one
(id, step) at different parameters, neither is a repetition: these rows are contested, and reading them without naming
the run is refused.
"""

import math
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
        window: Number of the optimizer step of a run, whose blocks lie side by side.
        section: Number of the section: rows of equal step, fingerprint, learning rate and leaves can share a block.
        step: Optimizer step.
        contested: Whether another run holds the example at other parameters.
    """

    shard: Int[np.ndarray, " N"]
    row: Int[np.ndarray, " N"]
    block: Int[np.ndarray, " N"]
    group: Int[np.ndarray, " N"]
    window: Int[np.ndarray, " N"]
    section: Int[np.ndarray, " N"]
    step: Int[np.ndarray, " N"]
    contested: Bool[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: np.ndarray | slice) -> "Rows":
        """Some of the rows, by index, mask or slice."""
        return Rows(*(getattr(self, f.name)[index] for f in fields(self)))


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
        numbers[info.run, info.rank] |= set(range(info.first, info.sequence + 1))
    return [(*key, n) for key, found in numbers.items() for n in sorted(set(range(max(found))) - found)]


def _limits(shards: Sequence[ShardInfo]) -> list[float]:
    """For each shard the step from which on a later attempt of its run and rank supersedes it."""
    limits = [math.inf] * len(shards)
    known: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for s in reversed(range(len(shards))):
        info = shards[s]
        later = known[info.run, info.rank]
        limits[s] = min((done for writer, done in later.items() if writer != info.writer), default=math.inf)
        later[info.writer] = math.inf if info.steps_done is None else float(info.steps_done)
    return limits


def last_step(shards: Sequence[ShardInfo]) -> int:
    """The last step that some shards of a rank hold, in the order of their numbers; -1 if none."""
    kept = zip(shards, _limits(shards), strict=True)
    return max((step for info, limit in kept for step in info.steps if step < limit), default=-1)


def merged(shards: Sequence[ShardInfo]) -> tuple[Rows, int]:
    """Rows of all shards in data order without repetitions.

    Args:
        shards: As `ordered` returns them.

    Returns:
        The rows, and how many superseded ones and repetitions were dropped.
    """
    pieces, superseded = _pieces(shards)
    shard, block, first, size, rank, step, group, window, section = pieces.T
    piece = np.repeat(np.arange(len(pieces)), size)
    turn = np.arange(len(piece)) - np.repeat(size.cumsum() - size, size)
    dealt = np.lexsort((rank[piece], turn, group[piece]))
    piece, turn = piece[dealt], turn[dealt]
    contested = np.zeros(len(piece), bool)
    row = first[piece] + turn
    group, window, section, step = (x[piece] for x in (group, window, section, step))
    rows = Rows(shard[piece], row, block[piece], group, window, section, step, contested)
    rows, repeated = _without_repetitions(rows, shards)
    return rows, superseded + repeated


def _pieces(shards: Sequence[ShardInfo]) -> tuple[Int[np.ndarray, "P 9"], int]:
    """A row for each block of a rank: (shard, block, first row, rows, rank, step, group, window, section).

    Blocks of different ranks are in one group if they are the k-th that their rank wrote for one (step, micro).
    Superseded blocks are left out; their rows are counted.
    """
    limits, superseded = _limits(shards), 0
    place = {run: n for n, run in enumerate(run_order(shards))}
    written: Counter[tuple[int, int]] = Counter()
    repeated: Counter[tuple[int, int, int, int]] = Counter()
    sections: dict[object, int] = {}
    anchor: dict[tuple[int, ...], int] = {}
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for s, info in enumerate(shards):
        run, rank, first = place[info.run], info.rank, 0
        names = [frozenset(info.leaves[n][0] for n in signature) for signature in info.signatures]
        for b, (step, micro, size) in enumerate(zip(info.steps, info.micros, info.sizes, strict=True)):
            if step >= limits[s]:
                superseded, first = superseded + size, first + size
                continue
            kind = (step, info.fingerprints[b], info.rates[b], names[info.kinds[b]])
            section = sections.setdefault(kind, len(sections))
            key = (run, step, micro, repeated[run, rank, step, micro], section)
            anchor[key] = min(written[run, rank], anchor.get(key, written[run, rank]))
            found.append((key, (s, b, first, size, rank, step)))
            written[run, rank] += 1
            repeated[run, rank, step, micro] += 1
            first += size
    begun: dict[tuple[int, ...], int] = {}
    for key, at in anchor.items():
        begun[key[:2]] = min(at, begun.get(key[:2], at))
    order = sorted(anchor, key=lambda key: (key[0], begun[key[:2]], key[1], anchor[key], key))
    group = {key: n for n, key in enumerate(order)}
    windows = {at: n for n, at in enumerate(dict.fromkeys(key[:2] for key in order))}
    rows = [(*piece, group[key], windows[key[:2]], key[-1]) for key, piece in found]
    return np.array(rows, np.int64).reshape(-1, 9), superseded


def _without_repetitions(rows: Rows, shards: Sequence[ShardInfo]) -> tuple[Rows, int]:
    ids = [i for info in shards for i in info.ids]
    if len({info.writer for info in shards}) < 2 or len(set(ids)) == len(ids):
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
        if (other.run, other.rank) == (info.run, info.rank) and s > rows.shard[first]:
            keep[first], seen[key] = False, n
        elif other.run == info.run or info.fingerprints[b] == other.fingerprints[rows.block[first]]:
            keep[n] = False
        else:
            contested[[n, first]] = True
    return replace(rows, contested=contested).take(keep), int((~keep).sum())
