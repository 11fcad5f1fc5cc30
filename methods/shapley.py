"""In-Run Data Shapley (Wang et al. 2024, arXiv:2406.11011): the Shapley value of an example within each step of a run.

The game of step k is played by the examples S of its batch, whose gradients alone make the step:

    U(S) = f_q(theta_k) - f_q(theta_k - lr sum_{z in S} ghat_z)                        decrease of the query's loss
    first order     phi_z = lr <v_q, ghat_z>                                           v_q, H_q of f_q at theta_k
    second order    phi_z = lr <v_q, ghat_z> - lr^2 / 2 ghat_z^T H_q b                 b = sum of all ghat_z

Either is the exact Shapley value of the Taylor expansion of U to its order, so that a step's values add up to U of its
batch.  The game is one of SGD; a run of another optimizer is treated as SGD with its learning rates.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from attrax.core import CPU, Block, Examples, Hardware, Scores, Source, aggregate
from attrax.core.adjoint import Vectors
from attrax.core.arrange import by_parameter
from attrax.core.trajectory import Step, Trajectory
from attrax.methods.along import queries_along, same_parameters, stacked
from attrax.methods.sweep import contracted, held

QueryHvp: TypeAlias = Callable[[int, Vectors], Vectors]
"""``(step, direction [*shape] by parameter) -> H_q times it``, [Q, *shape] by parameter."""


def shapley(
    trajectory: Trajectory, query: Source, *, hvp: QueryHvp | None = None, hardware: Hardware = CPU
) -> Scores:
    """Shapley values of every use of every example.

    Args:
        trajectory: The run.
        query: Query gradients at the steps of the run, before each step.
        hvp: Product of the Hessian of each query's loss at a step with a direction, for the second order.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful.  `Scores.per_example` adds up the games
        that an example played.

    Raises:
        ValueError: If a step has no query gradients, its parameters differ, or a learning rate is unknown.
    """
    at = queries_along(query, "shapley")
    rows: list[tuple[Examples, Tensor]] = []
    ids: tuple[str, ...] = ()
    for number in trajectory.steps:
        blocks = held(trajectory.gradients(number))
        if not blocks:
            continue
        queries = at(number)
        ids = queries.examples.ids
        along = _direction(trajectory.step(number), blocks, queries, hvp)
        for block in blocks:
            same_parameters(queries, block.examples, "shapley")
            rows.append((block.examples, contracted(block, along, hardware)))
    about = {
        "method": "shapley",
        "order": "1" if hvp is None else "2",
        "target": "as_trained",
        "unit": "loss",
    }
    return stacked(rows, ids, about)


def _direction(record: Step, blocks: list[Block], queries: Block, hvp: QueryHvp | None) -> Vectors:
    """By parameter, lr (v_q - H_q (lr b) / 2): values are inner products with it."""
    v = by_parameter(queries.grads)
    if unknown := [name for name in v if name not in record.optimizers]:
        raise ValueError(f"shapley: step {record.step} knows no learning rate of {unknown[:5]}.")
    rates = {name: record.optimizers[name].lr for name in v}
    if hvp is not None:
        parts = [by_parameter(aggregate(block.grads)) for block in blocks]
        moved = {n: rates[n] * torch.stack([part[n][0] for part in parts]).sum(0) for n in v}
        curved = hvp(record.step, moved)
        v = {n: x - curved[n] / 2 for n, x in v.items()}
    return {n: rates[n] * x for n, x in v.items()}
