"""Influence along a training run, through the optimizer's own steps (AdamW-influence, arXiv:2605.18814, and its kin).

What removing example z from step k does to the queries at the end of training, to first order:

    s(z, k, q) = f_q(without) - f_q = -<rho_q, ghat_z>,     rho_q the derivative of f_q in the gradient of step k

from one sweep backwards (`attrax.methods.sweep`) over moments, bias correction, weight decay, schedule and clipping of
whatever optimizer was used.  Only the curvature H of a step's loss is approximated, where the effect of earlier steps
passes through the gradients of later ones:

    rho H ~ phi sum_{z in step k} <rho, ghat_z> ghat_z            Fisher: the products are the scores already
    rho H   from a Hessian-vector product                         exact: the result is the metagradient (see `magic`)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from attrax.core import CPU, Hardware, Mask, Scores, Source, aggregate, covers
from attrax.core.adjoint import Vectors
from attrax.core.arrange import by_parameter
from attrax.core.trajectory import Step, Trajectory
from attrax.methods.masked import masked_runs, masked_sources
from attrax.methods.sweep import Respond, Rows, at_the_end, collected, contracted, held, sweep, unbroken
from attrax.methods.weighing import FisherUnit, Removal, fisher_factor, removed

Hvp: TypeAlias = Callable[[int, Vectors], Vectors]
"""``(step, vectors [Q, *shape] by parameter) -> H times them``, H the Hessian of the step's loss as trained."""


def trajectory_influence(
    trajectory: Trajectory,
    query: Source,
    *,
    curvature: Literal["fisher"] | Hvp = "fisher",
    unit: FisherUnit = "examples",
    removal: Removal = "fixed",
    masks: Sequence[Mask] = (),
    hardware: Hardware = CPU,
) -> Scores:
    """Score every use of every example.

    Args:
        trajectory: The run, with optimizer states and clipping; steps without gradients get theirs from the examples.
        query: Query gradients at the end of training, of parameters that every step holds.
        curvature: "fisher", or a function that multiplies with the Hessian of a step's loss.
        unit: What a step's loss is a mean over, see `attrax.methods.weighing.fisher_factor`.
        removal: "fixed" keeps the denominator of the batch; "example_mean" and "token_mean" renormalize it.
        masks: Score in these coordinates only, with scale "none"; the mean over masks (see `disjoint_masks`).
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful: f_q if the example is removed at that
        step, minus f_q.  `Scores.per_example` adds the uses of an example up.

    Raises:
        ValueError: If the run or the queries are empty, steps are missing, parameters differ, or something that is
            needed was not recorded: moments and hyperparameters, clipping, loss weights (for the Fisher matrix).

    >>> from attrax.core import Block, Blocks, Clip, Examples, GradTree, Optimizer, Recorded, Step, materialized
    >>> grads = GradTree({"w": materialized("w", torch.tensor([[3.0, -1.0]]))})
    >>> adam = Optimizer("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1.0})
    >>> record = Step(0, {"w": adam}, {}, {"w": torch.tensor([3.0, -1.0])}, clip=Clip(1.0, 3.2))
    >>> run = Recorded([record], [Block(grads, Examples(("a",), weight=torch.ones(1)))])
    >>> query = Blocks([Block(grads, Examples(("q",), fingerprint="end", weight=torch.ones(1)))])
    >>> trajectory_influence(run, query).values
    tensor([[0.0812]])
    """
    if masks and curvature != "fisher":
        raise ValueError("trajectory_influence: masks= go with curvature='fisher'; a Hessian is not masked.")
    runs = masked_runs(trajectory, masks) if masks else [trajectory]
    sides = masked_sources(query, masks) if masks else [query]
    queries = [at_the_end(side, "trajectory_influence") for side in sides]
    met: set[str] = set()
    products = [
        sweep(
            _complete(run),
            by_parameter(asked.grads),
            _responding(run, curvature, unit, hardware, met),
            asked.examples.absent,
        )
        for run, asked in zip(runs, queries, strict=True)
    ]
    about = {"method": "trajectory_influence", "target": "as_trained", "unit": "loss", "removal": removal}
    about |= {"curvature": f"fisher of {unit}" if curvature == "fisher" else "hessian"}
    about |= {f"mask {k}": mask.basis for k, mask in enumerate(masks)}
    found = collected((removed(rows, removal) for rows in _means(products)), queries[0].examples, about)
    if unmet := sorted(set(by_parameter(queries[0].grads)) - met):
        raise ValueError(
            f"trajectory_influence: only the query gradients hold {unmet[:5]}. Capture both with one selection."
        )
    return found


def _means(products: Sequence[Iterator[Rows]]) -> Iterator[Rows]:
    """The mean over sweeps that go through the steps side by side."""
    for parts in zip(*products, strict=True):
        yield [(rows[0][0], torch.stack([x for _, x in rows]).mean(0)) for rows in zip(*parts, strict=True)]


def _responding(
    trajectory: Trajectory,
    curvature: Literal["fisher"] | Hvp,
    unit: FisherUnit,
    hardware: Hardware,
    met: set[str],
) -> Respond:
    """Products with the examples of recorded blocks; `met` receives the parameters that these hold."""

    def respond(record: Step, rho: Vectors) -> tuple[Rows, Vectors]:
        blocks = held(trajectory.gradients(record.step))
        met.update(n for block in blocks for leaf in block.grads.values() for n in covers(leaf))
        found = [contracted(block, rho, hardware) for block in blocks]
        rows = [(block.examples, x) for block, x in zip(blocks, found, strict=True)]
        if curvature != "fisher":
            return rows, curvature(record.step, rho)
        curved: dict[str, Tensor] = {}
        phi = fisher_factor(blocks, unit)
        for block, x in zip(blocks, found, strict=True):
            for name, total in by_parameter(aggregate(block.grads, phi * x, hardware=hardware)).items():
                curved[name] = curved[name] + total if name in curved else total
        return rows, curved

    return respond


def _complete(trajectory: Trajectory) -> Iterator[Step]:
    """Steps, last one first; gradients that were not recorded are the clipped sums of the examples'."""
    for number in reversed(unbroken(trajectory.steps, "trajectory_influence")):
        record = trajectory.step(number)
        if record.gradients or record.clip is None:
            yield record
            continue
        total: dict[str, Tensor] = {}
        for block in held(trajectory.gradients(number)):
            for name, g in by_parameter(aggregate(block.grads)).items():
                total[name] = total[name] + g[0] if name in total else g[0]
        yield replace(record, gradients={n: record.clip.coefficient * g for n, g in total.items()})
