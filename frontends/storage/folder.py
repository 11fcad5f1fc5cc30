"""The directory of a store: the names in it, locks, and files that appear whole or not at all."""

import fcntl
import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from attrax.core.schema import SUFFIX

INDEX = "index.json"
_OURS = re.compile(
    rf"index\.json|\.index\.json\.\w+\.tmp|\..+-\d{{4,}}\.lock|.+{re.escape(SUFFIX)}|\..+{re.escape(SUFFIX)}\.tmp"
)


def shard_name(run: str, rank: int, sequence: int, writer: str) -> str:
    """File name of a shard; no two writers use the same.

    >>> shard_name("r1", 0, 12, "ab")
    'r1-0000-000012-ab.shard.h5'
    """
    return f"{run}-{rank:04d}-{sequence:06d}-{writer}{SUFFIX}"


def sequences(folder: Path, run: str, rank: int) -> dict[int, list[Path]]:
    """The shards of (run, rank) by their number; without file locks two writers may have used the same."""
    name = re.compile(rf"{re.escape(run)}-{rank:04d}-(\d+)-[0-9a-f]+{re.escape(SUFFIX)}")
    found: dict[int, list[Path]] = {}
    for path in folder.iterdir():
        if match := name.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return found


def publish(temporary: Path, final: Path) -> None:
    """Give a finished file its name: others see all of it or nothing, also after a power failure."""
    _sync(temporary)
    os.rename(temporary, final)
    with suppress(OSError):  # some network file systems cannot flush a directory
        _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_index(folder: Path, text: str) -> None:
    """Replace the index; without effect where the directory cannot be written."""
    temporary = folder / f".{INDEX}.{secrets.token_hex(8)}.tmp"
    with suppress(OSError):
        try:
            temporary.write_text(text, encoding="utf-8")
            publish(temporary, folder / INDEX)
        finally:
            temporary.unlink(missing_ok=True)


def forget_index(folder: Path) -> None:
    """Delete the index, which the next reader makes anew; without effect where the directory cannot be written."""
    with suppress(OSError):
        (folder / INDEX).unlink()


def shard_sizes(folder: Path, without: Collection[str] = ()) -> dict[str, int]:
    """Size of each shard by name, some left out.

    Raises:
        ValueError: If there is no such directory, it has no shard, or one is not a file of the directory itself.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(
            f"open_store: there is no store at '{folder}': it {what}. Give the directory of a store."
        )
    sizes = _shards(folder, without)
    while sizes != (again := _shards(folder, without)):  # files may come and go while a directory is listed
        sizes = again
    if not sizes:
        unfinished = sum(path.name.endswith(f"{SUFFIX}.tmp") for path in folder.iterdir())
        half = f" {unfinished} were never finished (a writer is busy, or was killed before its first flush)."
        steps = (
            " attrax.open_trajectory reads the optimizer steps in it."
            if any(folder.glob("*.step.h5"))
            else ""
        )
        raise ValueError(
            f"open_store: '{folder}' holds no shards.{half if unfinished else ''} Nothing can be read yet: "
            f"capture(sinks=[attrax.store(path)]) writes gradients.{steps}"
        )
    return sizes


def _shards(folder: Path, without: Collection[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.name not in without:
                if not entry.is_file(follow_symlinks=False):
                    raise ValueError(
                        f"open_store: '{entry.name}' in '{folder}' is a link or directory, not a shard."
                    )
                with suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def _lock_path(folder: Path, run: str, rank: int) -> Path:
    return folder / f".{run}-{rank:04d}.lock"


def lock(folder: Path, run: str, rank: int) -> int:
    """Become the writer of (run, rank), until `unlock` or the end of the process; what was left unfinished is removed.

    Returns:
        What `unlock` wants.

    Raises:
        ValueError: If there is another writer.
    """
    descriptor = _acquire(_lock_path(folder, run, rank))
    if descriptor is None:
        raise ValueError(
            f"store: run '{run}', rank {rank}, of '{folder}' is being written by another sink. Close that one if it is "
            "yours; give each process its own rank=, or leave run= out to begin a new run; compact a store when its "
            "runs are over."
        )
    for unfinished in (
        *folder.glob(f".{run}-{rank:04d}-*{SUFFIX}.tmp"),
        *folder.glob(f".{INDEX}.*.tmp"),
    ):
        unfinished.unlink(missing_ok=True)
    return descriptor


def unlock(folder: Path, run: str, rank: int, descriptor: int) -> None:
    """Let others write (run, rank)."""
    with suppress(OSError):
        _lock_path(folder, run, rank).unlink()
    os.close(descriptor)


def _acquire(path: Path) -> int | None:
    """Lock a file, made if missing; None if another holds it.  Where there are no locks it counts as free."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise OSError(
            f"store: '{path.parent}' cannot be written: {error}. Give a path that can be."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor


def clear(folder: Path) -> None:
    """Delete the files of a store that nobody writes; other files stay.

    Raises:
        ValueError: If a run is being written.
    """
    held: list[int] = []
    try:
        for path in folder.glob(".*.lock"):
            descriptor = _acquire(path)
            if descriptor is None:
                raise ValueError(
                    f"store: '{folder}' is being written ({path.name}); overwrite it afterwards."
                )
            held.append(descriptor)
        for path in sorted(folder.iterdir(), key=lambda path: path.name != INDEX):
            if _OURS.fullmatch(path.name):
                path.unlink()
    finally:
        for descriptor in held:
            os.close(descriptor)
