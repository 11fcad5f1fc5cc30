"""Blocks from the rows of shards: cut a block from the slabs that hold it, build one leaf at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from attrax.core import Examples, Leaf, concat, materialize_leaf, take
from attrax.core.packed import Packed, concat_packed, take_packed, uninitialized, unpack
from attrax.core.schema import Form, ShardInfo
from attrax.frontends.storage.blockrows import BlockRows, Part, blocks_of, shards_in, wanted_rows
from attrax.frontends.storage.merge import Rows
from attrax.frontends.storage.shards import Loaded, Shard, open_shard, read_rows
from attrax.frontends.storage.windows import Reading, as_needed, as_windows, mapped, windows_of

Gathered: TypeAlias = tuple[Examples, Iterator[tuple[str, Leaf]]]


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
    windows = windows_of(folder, shards, rows, reading)
    with closing(as_windows(windows, reading) if reading.whole else as_needed(windows)) as sources:
        for read, blocks in sources:
            held: dict[Part, Loaded] = {}
            for block in blocks:
                held = {part: held[part] if part in held else read(part) for part in block.parts}
                yield _cut(shards, held, block, built)


def gather(
    folder: Path, shards: Sequence[ShardInfo], rows: Rows, built: frozenset[str], reading: Reading
) -> Gathered:
    """Some rows of one section as one block, in the order given."""
    files: dict[int, Shard] = {}
    loaded: dict[Part, Loaded] = {}
    for s in shards_in(rows):
        with closing(open_shard(folder, shards[s])) as files[s]:
            for part, row in wanted_rows(files, rows.take(rows.shard == s)).items():
                loaded[part] = mapped(read_rows(files[s], part[1], row, uninitialized), reading.placed)
    (block,) = blocks_of(files, rows, [len(rows)])
    return _cut(shards, loaded, block, built)


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    """The rows of a block that one slab holds.

    Attributes:
        read: What was read of the slab.
        place: Their places in `read`; a slice if these are neighbors, None if they are all of them in order.
        here: Their places in the block.
    """

    read: Loaded
    place: Int[np.ndarray, " n"] | slice | None
    here: Int[np.ndarray, " n"]

    def leaf(self, name: str) -> Packed:
        """The rows of a leaf."""
        packed = self.read.leaf(name)
        return packed if self.place is None else take_packed(packed, self.place)


def _piece(read: Loaded, block: BlockRows, part: Part) -> _Piece:
    rows = block.rows
    here = np.flatnonzero((rows.shard == part[0]) & (block.slab == part[1]))
    place = read.rows.searchsorted(rows.row[here])
    first, stop = int(place[0]), int(place[0]) + len(place)
    if (place[1:] - place[:-1] != 1).any():
        return _Piece(read, place, here)
    return _Piece(read, None if len(place) == len(read.rows) else slice(first, stop), here)


def _cut(
    shards: Sequence[ShardInfo], loaded: Mapping[Part, Loaded], block: BlockRows, built: frozenset[str]
) -> Gathered:
    rows = block.rows
    if (rows.section != rows.section[0]).any():
        _refuse_parts(shards, rows)
    first = shards[rows.shard[0]]
    names = [first.leaves[number][0] for number in first.signatures[first.kinds[rows.block[0]]]]
    pieces = [_piece(loaded[part], block, part) for part in block.parts]
    return block.examples, _leaves(names, pieces, built)


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


def _leaves(
    names: Sequence[str], pieces: Sequence[_Piece], built: frozenset[str]
) -> Iterator[tuple[str, Leaf]]:
    """The leaves of a block."""
    for name in names:
        if len(pieces) == 1:
            leaf = unpack(pieces[0].leaf(name))
            yield name, materialize_leaf(leaf) if name in built else leaf
        else:
            yield name, _joined(name, pieces, name in built)


def _joined(name: str, pieces: Sequence[_Piece], build: bool) -> Leaf:
    """One leaf of a block, from what its slabs hold in one form or another."""
    found: dict[Form, list[tuple[_Piece, Packed]]] = {}
    for piece in pieces:
        packed = piece.leaf(name)
        found.setdefault(packed.form, []).append((piece, packed))
    leaves = [unpack(concat_packed([packed for _, packed in same])) for same in found.values()]
    leaf = concat([materialize_leaf(leaf) for leaf in leaves] if build else leaves)
    order = _order([piece for same in found.values() for piece, _ in same])
    return leaf if order is None else take(leaf, order)


def _order(pieces: Sequence[_Piece]) -> Tensor | None:
    """Which of the rows of some pieces, one after another, is each row of the block; None if they are in order."""
    here = np.concatenate([piece.here for piece in pieces])
    return None if (here[1:] > here[:-1]).all() else torch.from_numpy(here.argsort())
