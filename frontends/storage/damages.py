"""What is wrong with the files of a store: every shard read whole, every checksum compared."""

import os
from pathlib import Path

from attrax.core.schema import SUFFIX, ShardInfo
from attrax.frontends.storage.folder import shard_sizes
from attrax.frontends.storage.merge import gaps
from attrax.frontends.storage.shards import read_info, read_whole


def damages(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read all shards of a store whole, one at a time.

    Args:
        path: Directory of the store.

    Returns:
        By file name what is wrong: shards that are damaged, and shards that are missing although the same process
        wrote later ones.  ``open_store(path, without=damages(path))`` reads the others.

    Raises:
        ValueError: If there is no such directory, or no shard in it.

    >>> import tempfile, torch
    >>> from attrax.core import Block, Examples, GradTree, materialized
    >>> from attrax.frontends.storage.store import store
    >>> folder = tempfile.TemporaryDirectory()
    >>> with store(folder.name) as sink:
    ...     sink(Block(GradTree({"b": materialized("b", torch.ones(1, 3))}), Examples(("x",))))
    >>> damages(folder.name)
    {}
    >>> folder.cleanup()
    """
    folder = Path(path).absolute()
    found: dict[str, str] = {}
    whole: list[ShardInfo] = []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        if file.is_symlink() or not file.is_file():
            found[file.name] = "it is a link or directory, not a shard"
            continue
        try:
            info = read_info(file)
            for _ in read_whole(folder, info):
                pass
            whole.append(info)
        except ValueError as error:
            found[file.name] = str(error)
    if not found and not whole:
        shard_sizes(folder)
    for run, rank, number in gaps(whole):
        start = f"{run}-{rank:04d}-{number:06d}-"
        if not any(name.startswith(start) for name in found):
            found[f"{start}*{SUFFIX}"] = "it is missing: later shards of the same process exist"
    return found
