"""Many small shards as few large ones.

A compacted shard names the shards it was made of, and readers leave those out where it is.  It appears whole or not at
all and was read back before they are deleted, so that a kill at any moment loses nothing and doubles nothing; what it
leaves behind is deleted by the next compaction.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrax.core.schema import ShardInfo
from attrax.frontends.storage.folder import lock, publish, shard_name, shard_sizes, unlock
from attrax.frontends.storage.index import shards_of
from attrax.frontends.storage.merge import ordered
from attrax.frontends.storage.newshard import NewShard
from attrax.frontends.storage.recording import Record
from attrax.frontends.storage.shards import read_info, read_whole


def compact_store(path: str | os.PathLike[str], *, shard_bytes: int = 64 * 2**20) -> tuple[int, int]:
    """Merge neighboring small shards of each writer; examples, blocks and their order stay as they are.

    Args:
        path: Directory of the store.
        shard_bytes: Shards are merged up to this size.

    Returns:
        The number of shards before and after.

    Raises:
        ValueError: If there is no store, a run is being written, or a shard is damaged; shards already merged stay.

    >>> import tempfile, torch
    >>> from attrax.core import Block, Examples, GradTree, materialized
    >>> from attrax.frontends.storage.store import open_store, store
    >>> folder = tempfile.TemporaryDirectory()
    >>> with store(folder.name, shard_examples=1) as sink:
    ...     for name in "xyz":
    ...         sink(Block(GradTree({"b": materialized("b", torch.ones(1, 3))}), Examples((name,))))
    >>> compact_store(folder.name), open_store(folder.name).ids
    ((3, 1), ('x', 'y', 'z'))
    >>> folder.cleanup()
    """
    folder = Path(path).absolute()
    before = len(shard_sizes(folder))
    for run, rank in sorted({(info.run, info.rank) for info in shards_of(folder)}):
        held = lock(folder, run, rank)
        try:
            shards = ordered([info for info in shards_of(folder) if (info.run, info.rank) == (run, rank)])
            for info in shards:
                _delete(folder, info.replaces)
            for group in _groups(shards, shard_bytes):
                _merge(folder, group)
        finally:
            unlock(folder, run, rank, held)
    return before, len(shards_of(folder))


def _groups(shards: Sequence[ShardInfo], most: int) -> Iterator[list[ShardInfo]]:
    """Neighbors that one writer wrote, with the same columns, of together at most so many bytes."""
    group: list[ShardInfo] = []
    for info in shards:
        fits = group and info.writer == group[0].writer and info.columns == group[0].columns
        if not fits or sum(other.size for other in group) + info.size > most:
            yield from [group] if len(group) > 1 else []
            group = []
        group.append(info)
    yield from [group] if len(group) > 1 else []


def _merge(folder: Path, group: Sequence[ShardInfo]) -> None:
    first, last, names = group[0], group[-1], tuple(info.name for info in group)
    name = shard_name(last.run, last.rank, last.sequence, secrets.token_hex(8))
    header = {
        "run": last.run,
        "rank": last.rank,
        "sequence": last.sequence,
        "first": first.first,
        "writer": last.writer,
        "created": first.created,
        "steps_done": last.steps_done,
        "replaces": names,
    }
    shard = NewShard(folder / f".{name}.tmp")
    try:
        records: list[Record] = []
        for info in group:
            records += read_whole(folder, info)
        while records:
            del records[: shard.put(records)]
        shard.finish(header)
        for _ in read_whole(folder, read_info(shard.path)):
            pass
        publish(shard.path, folder / name)
    finally:
        shard.close()
        shard.path.unlink(missing_ok=True)
    _delete(folder, names)


def _delete(folder: Path, names: Sequence[str]) -> None:
    """Delete replaced shards; nothing outside of the store, whatever the names are."""
    for name in set(names) & set(shard_sizes(folder)):
        (folder / name).unlink()
