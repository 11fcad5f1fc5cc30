"""Record what the optimizer sees at every step of a training loop, and read it again.

    with attrax.capture(model, sinks=[attrax.store("run/")], trajectory=attrax.record("run/")):
        trainer.train()
    run = attrax.open_trajectory("run/")
    run.step(7).clip, run.gradients(7)

Layout of the files: `attrax.frontends.runs.stepfiles`.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from attrax.core import Blocks, Optimizer, Source, State, Step
from attrax.core.trajectory import used
from attrax.frontends.model.sharding import named, pieces, whole
from attrax.frontends.runs.observed import clip_of, consumed, norms, processes, touched
from attrax.frontends.runs.optimizers import read_optimizer
from attrax.frontends.runs.stepfiles import read_step, recorded_steps, write_step
from attrax.frontends.storage.store import Store, open_store

StepSink: TypeAlias = Callable[[Step], object]


def record(
    to: str | os.PathLike[str] | StepSink,
    *,
    parameters: bool = True,
    gradients: bool = True,
    when: Callable[[int], bool] = lambda step: True,
    overwrite: bool = False,
    steps_done: int | None = None,
) -> "Recorder":
    """What ``capture(trajectory=...)`` is to record of optimizer steps.

    A step holds hyperparameters, states and clipping of all parameters of the model that the optimizer of a captured
    one moves.  Copies go to the host right before the step: with Adam, four times the size of the model.  Buffers are
    not recorded.

    Args:
        to: Directory, one file a step (that of the gradients' store will do), or a function of a `Step`: a list's
            `append`.  In data parallel training the first process writes.
        parameters: Record the parameters before the step.
        gradients: Record the gradients that the optimizer uses.
        when: ``step -> bool``, which steps to record; all of them by default.
        overwrite: Delete the steps that the directory holds.
        steps_done: Optimizer steps that were done at the checkpoint from which the run goes on, as for `store`.  Added
            to the number of every step; what the directory holds of steps from there on is deleted.

    Returns:
        The recorder, to be passed to one `capture`.

    Raises:
        ValueError: If the directory holds steps already, and is neither overwritten nor continued; if steps_done is
            negative.

    >>> from attrax.frontends import capture, record
    >>> net, steps = nn.Linear(2, 1), []
    >>> moving = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> with capture(net, loss="sum", trajectory=record(steps.append)):
    ...     net(torch.ones(3, 2)).sum().backward()
    ...     moving.step()
    >>> steps[0].optimizers["bias"].lr, steps[0].gradients["bias"]
    (0.1, tensor([3.]))
    """
    done = steps_done or 0
    if done < 0:
        raise ValueError(f"record: steps_done={done}; it counts from 0.")
    if callable(to):
        return Recorder(to, parameters, gradients, when, done)
    folder = Path(to).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"record: '{folder}' cannot be made: {error}. Give a directory that can be written."
        ) from error
    old = recorded_steps(folder) if _first() else {}
    if old and not overwrite and steps_done is None:
        raise ValueError(
            f"record: '{folder}' holds {len(old)} steps of another run. Give another directory, overwrite=True, or "
            "steps_done= to continue that run from a checkpoint."
        )
    for number, path in old.items():
        if overwrite or number >= done:
            path.unlink()
    last = max((number for number in old if not overwrite and number < done), default=-1)
    missing = [number for number in range(last + 1, done if last >= 0 else 0) if when(number)]
    if missing:
        warnings.warn(
            f"record: the run in '{folder}' goes on at step {done} but is recorded up to step {last}: steps "
            f"{missing[:5]} are missing, which methods that follow the run refuse. Resume from an earlier checkpoint.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Recorder(lambda step: write_step(folder, step), parameters, gradients, when, done)


def _first() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


@dataclass(eq=False)
class _Seen:
    """One optimizer's part of a step; gradients by name, and norms of all of them."""

    optimizers: Mapping[str, Optimizer]
    states: Mapping[str, State]
    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    touched: Mapping[str, Tensor]


class Recorder:
    """Assembles steps; made by `record`, driven by a capture.

    Attributes:
        steps_done: Steps of the training before the capture's first one.
    """

    def __init__(
        self,
        sink: StepSink,
        parameters: bool,
        gradients: bool,
        when: Callable[[int], bool],
        steps_done: int = 0,
    ) -> None:
        self._sink, self._when, self.steps_done = sink, when, steps_done
        self._parameters, self._gradients = parameters, gradients
        self._seen: list[_Seen] = []
        self._used, self._processes = False, 1

    def begin(self) -> None:
        """A capture, which counts its steps from 0, will drive it.

        Raises:
            ValueError: If it has recorded steps of another one.
        """
        if self._used:
            raise ValueError(
                "capture: trajectory= has recorded steps of another capture, which would be recorded over. Make one "
                "for each: record(..., steps_done=n) goes on at step n."
            )

    def wants(self, number: int) -> bool:
        """Whether a step is to be recorded."""
        return self._when(number + self.steps_done)

    def before(self, number: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """An optimizer is about to step."""
        if not self.wants(number):
            return
        rules, states = read_optimizer(optimizer, model)
        self._processes = processes(model)
        flat, own = pieces(model), named(model) if self._parameters else {}
        held = {n: whole(p.detach(), flat.get(id(p))) for n, p in own.items() if n in rules}
        copies = {n: {key: _copy(x) for key, x in state.items()} for n, state in states.items()}
        self._seen.append(_Seen(rules, copies, {n: _copy(p) for n, p in held.items()}, {}, {}, {}))
        self.read_gradients(optimizer, model)

    def read_gradients(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Read the gradients of an optimizer that steps; once more if a closure made them within the step."""
        if self._seen:
            grads = consumed(optimizer, model)
            self._seen[-1].norms = norms(grads)
            self._seen[-1].touched = {n: _copy(rows) for n, rows in touched(optimizer, model).items()}
            self._seen[-1].gradients = {n: _copy(g) for n, g in grads.items()} if self._gradients else {}

    def flush(self, number: int, unused: tuple[int, ...], before: Mapping[str, Tensor], scale: float) -> None:
        """The step is over: hand it on.

        Args:
            number: Its number.
            unused: Blocks of it whose gradients were thrown away.
            before: Norms of the gradients after its last backward.
            scale: Loss scale.
        """
        seen, self._seen = self._seen, []
        after = {n: norm for part in seen for n, norm in part.norms.items()}
        if not after:
            return
        clip = clip_of(before, after, scale)
        self._used = True
        step = Step(
            number + self.steps_done,
            {n: rule for part in seen for n, rule in part.optimizers.items() if n in after},
            {n: state for part in seen for n, state in part.states.items() if n in after},
            {n: g for part in seen for n, g in part.gradients.items()},
            {n: p for part in seen for n, p in part.parameters.items()},
            clip,
            1 / (scale * self._processes),
            unused,
            {n: rows for part in seen for n, rows in part.touched.items()},
        )
        if _first():
            self._sink(step)


def _copy(x: Tensor) -> Tensor:
    """A copy on the host; the first process keeps it."""
    return x.detach().to("cpu", copy=True) if _first() else x


def open_trajectory(path: str | os.PathLike[str], gradients: Store | None = None) -> "StoredTrajectory":
    """Open a recorded run for reading.

    Args:
        path: Directory of the steps.
        gradients: Store of the examples' gradients (not directions); by default the one in the same directory.

    Returns:
        The run: a `Trajectory`, whose steps are read when they are asked for.

    Raises:
        ValueError: If the directory holds no steps.
    """
    folder = Path(path).absolute()
    files = recorded_steps(folder)
    if not files:
        raise ValueError(
            f"open_trajectory: '{folder}' holds no recorded steps; record them with attrax.record."
        )
    return StoredTrajectory(folder, files, gradients)


@dataclass(frozen=True, eq=False, repr=False)
class StoredTrajectory:
    """A run on disk, a `Trajectory`; made by `open_trajectory`.

    Attributes:
        path: Directory of the steps.
        files: Their files by number.
        store: The gradients, or None for those in the same directory.
    """

    path: Path
    files: Mapping[int, Path]
    store: Store | None = None

    @property
    def steps(self) -> Sequence[int]:
        """See `Trajectory.steps`."""
        return tuple(self.files)

    def step(self, number: int) -> Step:
        """See `Trajectory.step`.

        Raises:
            KeyError: If the step was not recorded.
            ValueError: If its file is damaged.
        """
        if number not in self.files:
            raise KeyError(f"trajectory '{self.path}' has no step {number}; it has {list(self.files)[:10]}.")
        return read_step(self.files[number])

    def gradients(self, number: int) -> Source:
        """See `Trajectory.gradients`; the blocks of all micro-batches and processes.

        A step whose gradient is zero has none if the store has none: a selection has left out all of its examples.

        Raises:
            KeyError: If the store has no gradients of the step.
            ValueError: If there is no store.
        """
        store = self.store or open_store(self.path)
        record = self.step(number)
        if record.clip is not None and record.clip.norm == 0 and number not in store.steps():
            return Blocks([])
        return used(store.at(number), record)

    def __repr__(self) -> str:
        return f"StoredTrajectory('{self.path}', {len(self.files)} steps)"
