"""Write gradients to disk: a sink that puts blocks into the files of a store.

A block goes to the system before the sink returns, so that the training loop may change its memory; small blocks are
copied and wait for others.  A thread flushes whole shards to the disk while training goes on, until too much waits for
it.  A shard has a temporary name until it is on the disk; then it is renamed, and the directory is flushed.  A process
that dies, at any moment and in any way, loses the blocks since its last shard and nothing else: `Sink.flush` whenever a
checkpoint is saved leaves nothing to lose.

Every opening of a store for writing begins a new run, unless it names one to continue.  A run has one writer per rank
at a time, guarded by a lock on a file that the system releases when the process ends.  Where the file system has no
locks the guard is missing; shard names are unique anyway, so no writer ever replaces another's rows.

    sink = attrax.store("grads/", run="job", steps_done=trainer.state.global_step)

goes on from a checkpoint: `capture` counts steps from 0 again, the store goes on at `steps_done`, and what earlier
attempts of the run have stored of the steps that are done again is superseded.
"""

import atexit
import math
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from attrax.core import Block
from attrax.core.tree import block_rows
from attrax.frontends.storage.background import Background
from attrax.frontends.storage.folder import clear, lock, publish, sequences, shard_name, unlock
from attrax.frontends.storage.h5types import TYPES
from attrax.frontends.storage.merge import last_step
from attrax.frontends.storage.newshard import NewShard
from attrax.frontends.storage.recording import Columns, KeepFactored, Record, record_of
from attrax.frontends.storage.shards import read_info
from attrax.frontends.storage.slabs import SLAB_BYTES
from attrax.frontends.storage.slabwriter import LostBytes

_SHARDS = 128
"""How many shards may wait for the disk, however small: each is an open file."""
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Options:
    """What a sink does with a block; see `store`."""

    shard_bytes: int
    shard_examples: int | float
    buffer_bytes: int
    steps_done: int | None
    dtype: torch.dtype | None
    keep_factored: KeepFactored
    columns: Columns | None


def store(
    path: str | os.PathLike[str],
    *,
    shard_bytes: int = 64 * 2**20,
    shard_examples: int | None = None,
    buffer_bytes: int = 256 * 2**20,
    dtype: torch.dtype | None = None,
    keep_factored: KeepFactored = False,
    columns: Columns | None = None,
    overwrite: bool = False,
    run: str | None = None,
    rank: int | None = None,
    steps_done: int | None = None,
) -> "Sink":
    """Open a store for writing: a sink of blocks.

    Args:
        path: Directory of the store; made if missing.
        shard_bytes: A shard is complete with this much.
        shard_examples: Or with this many examples.
        buffer_bytes: Complete shards that wait for the disk hold at most this much; beyond it, the call that ends a
            shard waits.  0 waits for every shard.
        dtype: Store gradients in this dtype; as they come if omitted.
        keep_factored: Store rows (a, g) even where the gradient itself is smaller: Kronecker statistics and token
            scores need them.  True, or a function of name and leaf.
        columns: Further columns of an example, computed from a block's `Examples`: texts, or numbers.
        overwrite: Delete what the store holds.  With several ranks only the first one may ask for it.
        run: Continue this run (or name a new one): the ranks of one job pass the same.  A new run by default.
        rank: Number of this process within the run; that of torch.distributed by default.
        steps_done: Optimizer steps that were done at the checkpoint from which `run` goes on.  Added to the step of
            every block; what the run's earlier attempts at this rank hold of steps from there on is superseded.
            Resume with as many ranks as before, or as a new run.

    Returns:
        The sink: call it with blocks; close it, or use it as a context manager.

    Raises:
        ValueError: If the path or an option cannot be used, or the run has a writer already.

    >>> import tempfile
    >>> from attrax.core import Examples, GradTree, materialized
    >>> from attrax.frontends.storage.store import open_store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with store(folder) as sink:
    ...         sink(Block(GradTree({"b": materialized("b", torch.ones(2, 3))}), Examples(("x", "y"))))
    ...     open_store(folder).ids
    ('x', 'y')
    """
    ranks, own = _place()
    rank = own if rank is None else rank
    if run is None and ranks > 1:
        raise ValueError(
            f"store: {ranks} processes write to {path} and need one name for their run. Pass the same run= in all of "
            "them, a name that is new for every training run."
        )
    name = run if run is not None else time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime()) + secrets.token_hex(4)
    if not _RUN.fullmatch(name) or rank < 0:
        raise ValueError(
            f"store: run {name!r}, rank {rank}: a run is named by up to 100 letters, digits, '.', '_' and '-', "
            "ranks count from 0."
        )
    if dtype is not None and not (dtype in TYPES and dtype.is_floating_point):
        raise ValueError(f"store: dtype {dtype} cannot be stored; use one of {_floating()}.")
    if shard_bytes < 1 or (shard_examples is not None and shard_examples < 1):
        raise ValueError(f"store: a shard of {shard_bytes} bytes, {shard_examples} examples is not possible.")
    if buffer_bytes < 0 or (steps_done is not None and (run is None or steps_done < 0)):
        raise ValueError(
            f"store: buffer_bytes={buffer_bytes}, steps_done={steps_done}, run={run!r}: both count from 0, and "
            "steps_done continues a run that must be named."
        )
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"store: '{folder}' is a file. A store is a directory: give another path."
        ) from error
    except OSError as error:
        raise OSError(
            f"store: '{folder}' cannot be made: {error}. Give a path that can be written."
        ) from error
    if overwrite:
        clear(folder)
    most = math.inf if shard_examples is None else shard_examples
    options = Options(shard_bytes, most, buffer_bytes, steps_done, dtype, keep_factored, columns)
    return Sink(folder, name, rank, options)


@dataclass(frozen=True, slots=True)
class _Job:
    """A shard that waits for the disk: its file, its name, and what its blocks do not tell."""

    shard: NewShard
    name: str
    header: Mapping[str, Any]


def _floating() -> str:
    return ", ".join(str(dtype) for dtype in TYPES if dtype.is_floating_point)


class Sink:
    """Writes blocks as shards; made by `store`.

    Attributes:
        path: Directory of the store.
        run: Run id.
        rank: Rank within the run.
        steps_done: Steps of the run before the capture's first one.
        continues: Whether the run had shards of this rank when the sink was made.
        says_where: Whether `steps_done` was given.
    """

    def __init__(self, path: Path, run: str, rank: int, options: Options) -> None:
        self.path, self.run, self.rank = path, run, rank
        self.steps_done = options.steps_done or 0
        self._options = options
        self._lock = lock(path, run, rank)
        self._writer = secrets.token_hex(8)
        self._sequence = max(sequences(path, run, rank), default=-1) + 1
        self.continues = self._sequence > 0
        self.says_where = options.steps_done is not None
        self._warn_of_lost_steps()
        self._waiting: list[Record] = []
        self._shard: NewShard | None = None
        self._columns: dict[str, str] | None = None
        self._bytes = self._examples = 0
        self._jobs = Background(self._write, options.buffer_bytes)
        self._process = os.getpid()
        self._open = True
        atexit.register(self.close)

    def __call__(self, block: Block) -> None:
        """Take a block; its memory may be changed afterwards.

        Raises:
            ValueError: If the sink is closed or the block cannot be stored.
            OSError: If it or an earlier one could not be written; they keep waiting.
        """
        if not self._open or os.getpid() != self._process:
            raise ValueError(
                f"store: the sink of '{self.path}' is closed or belongs to another process. Open the store again to "
                "append; every process opens it for itself."
            )
        if not block_rows(block):
            return
        options = self._options
        examples = replace(block.examples, step=block.examples.step + self.steps_done)
        record = record_of(
            replace(block, examples=examples), options.dtype, options.keep_factored, options.columns
        )
        kinds = {n: "text" if isinstance(x, tuple) else "number" for n, x in record.columns.items()}
        if self._columns not in (None, kinds):
            raise ValueError(
                f"store: columns {kinds} at step {examples.step} differ from {self._columns} before. Give every block "
                "the same ones, all texts or all numbers."
            )
        self._columns = kinds
        self._waiting.append(record)
        self._bytes += record.size
        self._examples += len(record.examples)
        full = self._bytes >= self._options.shard_bytes or self._examples >= self._options.shard_examples
        try:
            if full or sum(r.size for r in self._waiting) >= SLAB_BYTES:
                self._settle()
        finally:
            if self._waiting and self._waiting[-1] is record:
                self._waiting[-1] = record.kept()
        if full:
            size = max(self._bytes, self._options.buffer_bytes // _SHARDS)
            self._jobs.put(self._ended(), size)
        else:
            self._jobs.check()

    def flush(self) -> None:
        """Write what is waiting; returns when all of it is on the disk.

        Raises:
            OSError: If it cannot be written; it keeps waiting.
        """
        if os.getpid() == self._process:
            self._settle()
            self._jobs.finish(self._ended() if self._shard else None)

    def close(self) -> None:
        """Write what is waiting and release the run; further calls do nothing.

        Raises:
            OSError: If it cannot be written; the sink stays open.
        """
        if not self._open or os.getpid() != self._process:
            return
        self.flush()
        self._open = False
        atexit.unregister(self.close)
        unlock(self.path, self.run, self.rank, self._lock)

    def _settle(self) -> None:
        """Put the waiting blocks into the file of the shard."""
        while self._waiting:
            name = shard_name(self.run, self.rank, self._sequence, self._writer)
            with _explained(self.path, name, self._examples):
                self._shard = self._shard or NewShard(_temporary(self.path, name))
                del self._waiting[: self._shard.put(self._waiting)]

    def _ended(self) -> _Job:
        """The shard, which takes no more blocks."""
        assert self._shard is not None
        done = self._options.steps_done
        header = {
            "run": self.run,
            "rank": self.rank,
            "sequence": self._sequence,
            "first": self._sequence,
            "writer": self._writer,
            "created": time.time(),
            "steps_done": done,
            "replaces": (),
        }
        job = _Job(self._shard, shard_name(self.run, self.rank, self._sequence, self._writer), header)
        self._sequence += 1
        self._shard, self._bytes, self._examples = None, 0, 0
        return job

    def _write(self, job: _Job) -> None:
        with _explained(self.path, job.name, job.shard.examples):
            job.shard.finish(job.header)
            publish(job.shard.path, self.path / job.name)
        job.shard.close()

    def _warn_of_lost_steps(self) -> None:
        done = self._options.steps_done
        if not done:
            return
        found = sequences(self.path, self.run, self.rank)
        last = last_step([read_info(path) for number in sorted(found) for path in found[number]])
        if last < done - 1:
            warnings.warn(
                f"store: run '{self.run}', rank {self.rank}, goes on at step {done} but is stored up to step {last}: "
                f"steps {last + 1} to {done - 1} were lost with the process. Resume from an earlier checkpoint, or "
                "call flush() on the sink whenever one is saved.",
                stacklevel=4,
            )

    def __enter__(self) -> "Sink":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Sink('{self.path}', run '{self.run}', rank {self.rank}, {self._examples} examples waiting)"


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{name}.tmp"


@contextmanager
def _explained(folder: Path, name: str, examples: int) -> Iterator[None]:
    try:
        yield
    except LostBytes as error:
        raise OSError(
            f"store: shard '{name}' could not be written to '{folder}': {error}. Its {examples} examples are lost; "
            "capture them again."
        ) from error
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"store: shard '{name}' could not be written to '{folder}': {error}. Its {examples} examples are still "
            "waiting: make room and call flush()."
        ) from error


def _place() -> tuple[int, int]:
    """Number of processes of this job, and which of them this is."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1, 0
    return distributed.get_world_size(), distributed.get_rank()
