"""Gradients on disk as a source: `store` writes them, `open_store` reads them.

A store is a directory of HDF5 shards that any number of processes wrote; it is read as one list of examples in data
order (`merge`), without a model, as often as needed and in bounded memory.  Reading takes no locks: a
store that is being written shows its finished shards, and `Store.refresh` those finished since.

    >>> import h5py, json, tempfile, torch
    >>> from attrax.core import Block, Examples, GradTree, factorized
    >>> leaf = factorized("fc.weight", torch.ones(2, 5, 3), torch.ones(2, 5, 4))
    >>> folder = tempfile.TemporaryDirectory()
    >>> with store(folder.name, keep_factored=True) as sink:
    ...     sink(Block(GradTree({"fc.weight": leaf}), Examples(("x", "y"))))
    >>> open_store(folder.name).block(["y"]).grads
    GradTree(
      fc.weight: Factorized(a[1, 5, 3], g[1, 5, 4]) of fc.weight
    )

Plain h5py reads it too; the layout is in `attrax.core.schema`.

    >>> with h5py.File(next(sink.path.glob("*.shard.h5"))) as file:
    ...     table = json.loads(file["table"][:].tobytes())
    ...     a = file["data"][: 10 * 3 * 4].view("float32").reshape(10, 3)
    >>> table["leaves"][0][0], table["lengths"], a[9].tolist()
    ('fc.weight', [[5, 5]], [1.0, 1.0, 1.0])
    >>> folder.cleanup()
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attrax.core import Block, Examples, GradTree
from attrax.core.schema import Form, ShardInfo
from attrax.core.source import Visit
from attrax.frontends.storage.frames import arrays, frame
from attrax.frontends.storage.gather import gather, stream
from attrax.frontends.storage.index import shards_of
from attrax.frontends.storage.merge import Rows, gaps, merged, ordered, run_order
from attrax.frontends.storage.shards import read_column
from attrax.frontends.storage.sink import Sink as Sink
from attrax.frontends.storage.sink import store as store
from attrax.frontends.storage.windows import Reading, Shape

T = TypeVar("T")


def open_store(
    path: str | os.PathLike[str],
    *,
    run: str | None = None,
    block_examples: Shape = None,
    device: torch.device | str | None = None,
    prefetch: int = 0,
    without: Collection[str] = (),
) -> "Store":
    """Open a store for reading.

    Args:
        path: Directory of the store.
        run: Read this run only.  By default all runs are one set, which is refused later if two of them hold one
            example and step at different parameters.
        block_examples: Examples per block; "step" for the examples of an optimizer step, the micro-batches of
            gradient accumulation together and each example with its own weight; the blocks that were written if
            omitted.
        device: Where the leaves are put; the CPU if omitted.
        prefetch: How many windows (80 MiB, or one block if that is larger) a thread reads ahead; 0 reads slabs when
            they are needed.
        without: Names of shards to leave out: those that `damages` finds, which cannot be read.

    Returns:
        The store as it is now: a source of gradients.

    Raises:
        ValueError: If there is nothing to read, a shard is damaged or of another schema, or the run is unknown.
    """
    folder = Path(path).absolute()
    shards = ordered(shards_of(folder, without))
    runs = run_order(shards)
    if run is not None and run not in runs:
        raise ValueError(f"open_store: '{folder}' has no run '{run}'; it has {list(runs)}.")
    if block_examples not in (None, "step") and not (isinstance(block_examples, int) and block_examples > 0):
        raise ValueError(f"open_store: block_examples must be at least 1 or 'step', got {block_examples!r}.")
    if prefetch < 0:
        raise ValueError(f"open_store: prefetch must be at least 0, got {prefetch}.")
    to = None if device is None else torch.device(device)
    if to is not None and to.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"open_store: device: got '{to}', and no GPU is available here.")
    reading = Reading(block_examples, to, prefetch)
    shards = tuple(info for info in shards if run in (None, info.run))
    rows, duplicates = merged(shards)
    return Store(folder, shards, rows, duplicates, run, reading, frozenset(without))


@dataclass(frozen=True, eq=False, repr=False)
class Store:
    """Examples of a store, in data order; made by `open_store`, cut by `select` and `at`.

    Attributes:
        path: Directory of the store.
        shards: Descriptions of the shards read.
        rows: The examples and where they lie.
        duplicates: Rows that were left out: superseded by a later attempt, or held by another writer (same id, step).
        run: The run that was asked for, or None.
        reading: How blocks are made.
        without: Shards that are left out.
    """

    path: Path
    shards: tuple[ShardInfo, ...]
    rows: Rows
    duplicates: int
    run: str | None = None
    reading: Reading = Reading()
    without: frozenset[str] = frozenset()

    @property
    def reiterable(self) -> bool:
        """True: every pass reads the same blocks in the same order."""
        return True

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Example id of each row."""
        return tuple(self.shards[s].ids[r] for s, r in zip(self.rows.shard, self.rows.row, strict=True))

    @property
    def examples(self) -> int:
        """Number of rows: examples, each counted once per step."""
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def runs(self) -> tuple[str, ...]:
        """Run ids, the earliest first."""
        return run_order(self.shards)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Distinct parameter fingerprints, in data order."""
        places = dict.fromkeys(zip(self.rows.shard.tolist(), self.rows.block.tolist(), strict=True))
        return tuple(dict.fromkeys(self.shards[s].fingerprints[b] for s, b in places))

    @property
    def leaves(self) -> dict[str, tuple[Form, ...]]:
        """The forms in which each leaf is recorded: its kind, arrays and parameters."""
        found: dict[str, dict[Form, None]] = {}
        for info in self.shards:
            for name, form in info.leaves:
                found.setdefault(name, {})[form] = None
        return {name: tuple(forms) for name, forms in found.items()}

    def steps(self) -> tuple[int, ...]:
        """Steps present, ascending."""
        return self._steps

    def at(self, step: int) -> "Store":
        """The examples of one step.

        Raises:
            KeyError: If there is no such step.
        """
        return self.select(steps=[step])

    def select(self, ids: Iterable[str] | None = None, steps: Iterable[int] | None = None) -> "Store":
        """Some of the examples, in data order.

        Args:
            ids: Keep these examples.
            steps: Keep these steps.

        Returns:
            The store cut to them.

        Raises:
            KeyError: If an id or step is not in the store.
        """
        keep = np.ones(len(self), bool)
        if steps is not None:
            wanted = set(_iterated("steps", steps, "[1000]"))
            self._refuse_absent("steps", sorted(wanted - set(self.steps())))
            keep &= np.isin(self.rows.step, np.array(sorted(wanted), np.int64))
        if ids is not None:
            names = dict.fromkeys(_iterated("ids", ids, "['doc-17']"))
            self._refuse_absent("ids", self.missing(names))
            keep &= np.array([i in names for i in self.ids], bool)
        return replace(self, rows=self.rows.take(keep))

    def missing(self, expected_ids: Iterable[str]) -> tuple[str, ...]:
        """Those of the expected ids that have no row, in their order: nothing is ever filled in."""
        return tuple(i for i in expected_ids if i not in self._places)

    def refresh(self) -> "Store":
        """The store with the shards finished since; cuts by `select` and `at` are undone."""
        fresh = open_store(self.path, run=self.run, without=self.without)
        return replace(fresh, reading=self.reading)

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `Source.map`; holds the slabs of a block: about 1 MiB of each shard, or a block as it was written.

        On the way to a device, and where windows are read ahead (see `open_store`), it holds these.

        Raises:
            ValueError: If a shard is damaged, or runs contradict each other.
        """
        self._refuse_contested(self.rows)
        for examples, leaves in stream(self.path, self.shards, self.rows, self._built(), self.reading):
            yield examples, {name: visit(name, leaf, examples) for name, leaf in leaves}

    def block(self, ids: Sequence[str]) -> Block:
        """The examples of these ids, in this order, as one block.

        Args:
            ids: Example ids; an example with several rows comes with all of them.

        Returns:
            The block.

        Raises:
            KeyError: If an id is not in the store.
            ValueError: If the examples are of several steps, parameters or leaf selections, or a shard is damaged.
        """
        self._refuse_absent("ids", self.missing(ids))
        rows = self.rows.take(np.array([n for i in ids for n in self._places[i]], np.int64))
        self._refuse_contested(rows)
        if len(np.unique(rows.section)) != 1:
            raise ValueError(
                f"block: {len(rows)} rows of '{self.path}' at steps {np.unique(rows.step)[:5].tolist()} are no block: "
                "give ids of one step, one set of parameters and one selection of leaves; at(step) or run= cut a store."
            )
        examples, leaves = gather(self.path, self.shards, rows, self._built(), self.reading)
        return Block(GradTree(dict(leaves)), examples)

    def column(self, name: str) -> Tensor | tuple[str, ...]:
        """A further column, one value a row; see ``store(columns=...)``.

        Raises:
            KeyError: If a shard does not have it.
            ValueError: If it is text in some shards only.
        """
        values: dict[int, Tensor | tuple[str, ...]] = {}
        for s in np.unique(self.rows.shard).tolist():
            info = self.shards[s]
            if name not in info.columns:
                raise KeyError(f"column '{name}' is not in shard '{info.name}'; it has {list(info.columns)}.")
            values[s] = read_column(self.path, info, name)
        found = [values[s][r] for s, r in zip(self.rows.shard.tolist(), self.rows.row.tolist(), strict=True)]
        numbers = [x for x in found if isinstance(x, Tensor)]
        if numbers and len(numbers) < len(found):
            raise ValueError(
                f"column '{name}' of '{self.path}' holds numbers in some shards and texts in others. Cut the store "
                "with run= or select."
            )
        return torch.stack(numbers) if numbers else tuple(str(x) for x in found)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the further columns that every shard has."""
        used = [self.shards[s].columns for s in np.unique(self.rows.shard).tolist()]
        return tuple(name for name in used[0] if all(name in names for names in used)) if used else ()

    def to_numpy(self) -> dict[str, np.ndarray]:
        """All gradients, built: by parameter [N, *shape] in its stored layout, projected ones by leaf.

        bfloat16 becomes float32.

        Raises:
            ValueError: If a parameter is not recorded for all rows.
        """
        return arrays(self)

    def to_pandas(self) -> Any:
        """One row an example: id, step, micro, weight, tokens, further columns, and per parameter its gradient, flat.

        Raises:
            ImportError: If pandas is not installed.
            ValueError: As `to_numpy`.
        """
        return frame(self)

    def __repr__(self) -> str:
        return (
            f"Store('{self.path}', {len(self)} examples, {len(self.leaves)} leaves, "
            f"{len(self.runs)} runs, {len(self.shards)} shards)"
        )

    def summary(self) -> str:
        """What the store holds, in lines of text."""
        size = sum(info.size for info in self.shards)
        lines = [f"{self.path}: {len(self)} examples in {len(self.shards)} shards, {size / 2**20:.1f} MiB"]
        for run in self.runs:
            shards = [info for info in self.shards if info.run == run]
            steps = [step for info in shards for step in info.steps]
            ranks = len({info.rank for info in shards})
            examples = sum(len(info.ids) for info in shards)
            lines.append(f"run {run}: {examples} examples, steps {min(steps)} to {max(steps)}, {ranks} ranks")
        lines += [f"leaf {name}: {' or '.join(map(str, forms))}" for name, forms in self.leaves.items()]
        lines += [f"written twice, left out: {self.duplicates} rows"] if self.duplicates else []
        lines += [f"shard missing: run {run}, rank {rank}, number {n}" for run, rank, n in gaps(self.shards)]
        if self.rows.contested.any():
            lines.append("the runs hold the same examples at different parameters: open one with run=")
        return "\n".join(lines)

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        return tuple(np.unique(self.rows.step).tolist())

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """Rows of each id."""
        found: dict[str, list[int]] = {}
        for n, i in enumerate(self.ids):
            found.setdefault(i, []).append(n)
        return found

    def _built(self) -> frozenset[str]:
        """Leaves recorded both as rows and as gradients; they are always read as gradients, so that blocks agree."""
        kinds = {name: {form.kind for form in forms} for name, forms in self.leaves.items()}
        return frozenset(
            n
            for n, k in kinds.items()
            if len(k) > 1 and k <= {"Factorized", "Diagonal", "Grouped", "Materialized"}
        )

    def _refuse_absent(self, what: str, absent: Sequence[object]) -> None:
        if absent:
            steps = self.steps()
            has = f" of steps {steps[0]} to {steps[-1]}" if steps else ""
            raise KeyError(
                f"store '{self.path}' lacks {len(absent)} {what}, e.g. {list(absent[:5])}: it has {len(self)} examples"
                f"{has} here and fills nothing in. Capture them, or ask for those that exist."
            )

    def _refuse_contested(self, rows: Rows) -> None:
        if rows.contested.any():
            example = self.shards[rows.shard[rows.contested][0]].ids[rows.row[rows.contested][0]]
            raise ValueError(
                f"open_store: the runs of '{self.path}' hold {int(rows.contested.sum())} rows of the same examples and "
                f"steps at different parameters, e.g. of '{example}'. Read one run: open_store(path, run=...), one of "
                f"{list(self.runs)}."
            )


def _iterated(what: str, values: Iterable[T], such: str) -> Iterable[T]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"select: {what}: got {values!r}; expected several, such as {such}.")
    return values
