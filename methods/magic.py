"""MAGIC (Ilyas and Engstrom 2025, arXiv:2504.16430): the exact derivative of a query in the weight of every example.

    s(z, k, q) = -df_q / dw_{z,k},        step k minimizing sum_z w_z c_z l_z with all w = 1

by the sweep of `attrax.methods.sweep` with the exact Hessian: per step one backward through the optimizer's rule and
one double backward through the model.  States on the way are recorded, or trained again from the latest step before
that is: with one step in sqrt(T) recorded, memory is O(sqrt(T)) states and the price one more run of training.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

from attrax.core import Scores, Source
from attrax.core.adjoint import Vectors
from attrax.core.arrange import by_parameter
from attrax.core.optimizers import step
from attrax.core.trajectory import Step, Trajectory
from attrax.methods.sweep import Rows, at_the_end, collected, sweep, unbroken
from attrax.methods.weighing import Removal, removed


@runtime_checkable
class Replayable(Trajectory, Protocol):
    """A run that can be differentiated; `attrax.frontends.runs.replay` makes one of a model."""

    def gradient(self, number: int, parameters: Vectors) -> Vectors:
        """Gradient of a step's loss, as trained and before clipping."""
        ...

    def pull(self, number: int, parameters: Vectors, rho: Vectors) -> tuple[Rows, Vectors]:
        """``<rho_q, ghat_z>`` [B, Q] of every block, and rho times the Hessian of the step's loss."""
        ...


def magic(run: Replayable, query: Source, *, removal: Removal = "fixed") -> Scores:
    """Score every use of every example.

    Args:
        run: The run.  Optimizers and clipping of every step; parameters and states of the first and any others.
        query: Query gradients at the end of training.
        removal: "fixed" keeps the denominator of the batch; "example_mean" and "token_mean" renormalize it.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful: the derivative of f_q along the removal
        of the example at that step.

    Raises:
        TypeError: If the run cannot be differentiated.
        ValueError: If the first step has no parameters, clipping is unknown, or steps are missing.
    """
    if not isinstance(run, Replayable):
        raise TypeError(
            f"magic: got {run!r}, a run without a model; expected attrax.replay(model, batches, loss, run), which "
            "computes derivatives along it."
        )
    queries = at_the_end(query, "magic")
    products = sweep(
        replayed(run),
        by_parameter(queries.grads),
        lambda record, rho: run.pull(record.step, record.parameters, rho),
    )
    about = {"method": "magic", "target": "as_trained", "unit": "loss", "removal": removal}
    return collected((removed(rows, removal) for rows in products), queries.examples, about)


def replayed(run: Replayable) -> Iterator[Step]:
    """Complete steps, last one first; those that were not recorded are trained again, a segment at a time.

    Raises:
        ValueError: If the first step has no parameters, clipping is unknown, or steps are missing.
    """
    segments: list[list[int]] = []
    for number in unbroken(run.steps, "magic"):
        if run.step(number).parameters:
            segments.append([number])
        elif segments:
            segments[-1].append(number)
        else:
            raise ValueError(f"magic: step {number}, the first, holds no parameters to train again from.")
    for segment in reversed(segments):
        yield from reversed(list(_forward(run, segment)))


def _forward(run: Replayable, numbers: list[int]) -> Iterator[Step]:
    record = run.step(numbers[0])
    parameters, states = record.parameters, record.states
    for number in numbers:
        record = run.step(number)
        if record.clip is None:
            raise ValueError(
                f"magic: it is unknown whether the gradients of step {number} were clipped. Record clipping, or state "
                "Clip(1.0, norm) if there was none."
            )
        gradients = record.gradients
        if not gradients:
            c = record.clip.coefficient
            gradients = {n: c * g for n, g in run.gradient(number, parameters).items()}
        yield replace(record, parameters=parameters, states=states, gradients=gradients)
        moved = {
            n: step(o, parameters[n], gradients[n], states.get(n, {}), record.touched.get(n))
            for n, o in record.optimizers.items()
        }
        parameters = {**parameters, **{n: theta for n, (theta, _) in moved.items()}}
        states = {n: after for n, (_, after) in moved.items()}
