"""The index of a store: descriptions of its shards in one file, so that opening it need not open them all.

The index is only a cache.  An entry counts if a shard of that name and size exists; what is missing, torn or out of
date is read from the shards, which are complete in themselves, and the index is written again.
"""

import json
import zlib
from collections.abc import Collection
from pathlib import Path

from attrax.core.schema import SCHEMA, ShardInfo, info_from_json, info_to_json, json_of
from attrax.frontends.storage.folder import INDEX, shard_sizes, write_index
from attrax.frontends.storage.shards import read_info


def shards_of(folder: Path, without: Collection[str] = ()) -> tuple[ShardInfo, ...]:
    """Descriptions of the finished shards of a store, by name; compacted ones stand for those they were made of.

    Args:
        folder: The store.
        without: Names of shards to leave out.

    Raises:
        ValueError: If there is no store, or a shard cannot be read.
    """
    sizes = shard_sizes(folder, without)
    known = _load(folder / INDEX)
    fresh = {name: info for name, info in known.items() if sizes.get(name) == info.size}
    shards = tuple(fresh[name] if name in fresh else read_info(folder / name) for name in sorted(sizes))
    if len(fresh) != len(shards) or (len(known) != len(shards) and not without):
        write_index(folder, _dumped(shards))
    replaced = {name for info in shards for name in info.replaces}
    return tuple(info for info in shards if info.name not in replaced)


def _dumped(shards: tuple[ShardInfo, ...]) -> str:
    return enclosed(json_of([info_to_json(info) for info in shards], sort_keys=True))


def enclosed(shards: str) -> str:
    """The text of an index around the JSON of its shards."""
    return f'{{"schema":{SCHEMA},"crc32":{zlib.crc32(shards.encode())},"shards":{shards}}}'


def _load(path: Path) -> dict[str, ShardInfo]:
    """The usable index; nothing in it is trusted."""
    try:
        text = path.read_text(encoding="utf-8")
        shards = text.partition('"shards":')[2][:-1]
        if text != enclosed(shards):
            return {}
        return {info.name: info for info in map(info_from_json, json.loads(shards))}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
