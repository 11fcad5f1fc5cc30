"""The backward sweep over a training run that influence along it and exact metagradients share.

    U_T = df_q / dtheta_T;   at every step, last one first:
    rho = clip^T (step^T U)                            cotangent [Q, P] of the batch's gradient sum_z ghat_z
    score(z, q) = -<rho_q, ghat_z>                     = f_q without z - f_q, to first order
    U  <- (what the step's own rule hands back) + rho H                       H = d(sum_z ghat_z) / dtheta

Methods differ in how they get the products <rho, ghat_z> and rho H: that is the `respond` they hand in.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from attrax.core import (
    Block,
    Examples,
    GradTree,
    Hardware,
    Scores,
    Source,
    collect,
    covers,
    gram,
    targeted,
)
from attrax.core.adjoint import Moments, Vectors, through_clip, through_step
from attrax.core.arrange import arranged
from attrax.core.scores import scores
from attrax.core.trajectory import Step

Rows: TypeAlias = Sequence[tuple[Examples, Tensor]]
Respond: TypeAlias = Callable[[Step, Vectors], tuple[Rows, Vectors]]
"""``(step, rho) -> (<rho, ghat_z> [B, Q] of every block, rho H)``; both zero for parameters left out."""


def unbroken(steps: Sequence[int], operation: str) -> Sequence[int]:
    """The steps of a run that effects are followed through.

    Raises:
        ValueError: If some between the first and the last are missing.

    >>> unbroken((3, 4, 5), "dvemb")
    (3, 4, 5)
    """
    for before, after in pairwise(steps):
        if after != before + 1:
            raise ValueError(
                f"{operation}: the run has no steps between {before} and {after}, and the effects of examples pass "
                "through every step. Record all of them; what a record holds of each may differ."
            )
    return steps


def sweep(
    records: Iterable[Step], query: Vectors, respond: Respond, absent: Collection[str] = ()
) -> Iterator[Rows]:
    """Products <rho, ghat_z> of every step, last step first.

    A parameter that had no gradient in a step did not move: what is known about its effect passes through.

    Args:
        records: Complete steps, last one first.
        query: Gradients [Q, *shape] of the queries at the final parameters.
        respond: Products with the examples and the curvature of a step.
        absent: Parameters that no query has reached: their gradients are zero.

    Returns:
        Per step, the products of every block.

    Raises:
        ValueError: If a step was clipped by an unknown amount, or lacks what `through_step` needs.
    """
    cotangents: Vectors = query
    moments: Moments = {}
    met: set[str] = set()
    count = len(next(iter(query.values())))
    for record in records:
        if record.clip is None:
            raise ValueError(
                f"sweep: it is unknown whether the gradients of step {record.step} were clipped by norm, or they were "
                "changed otherwise (clip_grad_value_, noise), and effects pass through that change. Clip by norm, or "
                "state Clip(1.0, norm) if there was none."
            )
        new = {n: g.new_zeros(count, *g.shape) for n, g in record.gradients.items() if n in absent}
        cotangents = new | dict(cotangents)
        still = {n: u for n, u in cotangents.items() if n not in record.optimizers}
        waiting = {n: m for n, m in moments.items() if n in still}
        moving = {n: u for n, u in cotangents.items() if n not in still}
        if not moving:
            raise ValueError(
                f"sweep: step {record.step} knows no optimizer of parameters {sorted(still)[:5]}, of which the queries "
                "hold gradients."
            )
        rho, moved, changed = through_step(record, moving, {n: moments[n] for n in moving if n in moments})
        met |= set(moving)
        rows, curved = respond(record, through_clip(record.clip, record.gradients, rho))
        cotangents = {n: u + curved[n] if n in curved else u for n, u in {**still, **moved}.items()}
        moments = {**waiting, **changed}
        yield rows
    if met and (unmet := sorted(set(query) - met)):
        raise ValueError(
            f"sweep: no step knows an optimizer of parameters {unmet[:5]}, of which the queries hold "
            "gradients. Take query gradients of the parameters that were trained and recorded."
        )


def collected(rows: Iterable[Rows], queries: Examples, about: Mapping[str, str]) -> Scores:
    """Scores of all steps in the order of training, from rows that come last step first.

    Raises:
        ValueError: If there are none, or the queries were taken before the end of training (a step whose learning rate
            was 0 ends where it began).
    """
    found: list[Rows] = []
    for step in rows:
        for examples, _ in step:
            moved = examples.learning_rate != 0
            if moved and queries.fingerprint and examples.fingerprint == queries.fingerprint:
                raise ValueError(
                    f"{about['method']}: the query gradients were taken at the parameters before step {examples.step}. "
                    "Take them at the end of training."
                )
        found.append(step)
    ordered = [row for step in reversed(found) for row in step]
    if not ordered:
        raise ValueError(f"{about['method']}: the run yielded no examples.")
    return scores(torch.cat([v for _, v in ordered]), [e for e, _ in ordered], queries.ids, about)


def at_the_end(query: Source, operation: str) -> Block:
    """Queries at the end of training as one block, of the sum over each query's loss terms."""
    return collect(targeted(query, "sum"), operation=operation)


def held(source: Source) -> list[Block]:
    """The blocks of a step, in memory."""
    found = source.map(lambda name, leaf, examples: leaf)
    return [Block(GradTree(leaves), examples) for examples, leaves in found if len(examples)]


def contracted(block: Block, rho: Vectors, hardware: Hardware) -> Tensor:
    """<rho_q, ghat_z> for every example of a block [B, Q]: one routed contraction a leaf.

    Raises:
        ValueError: If the block holds parameters that `rho` lacks.
    """
    if differing := sorted({n for leaf in block.grads.values() for n in covers(leaf)} - set(rho)):
        raise ValueError(
            f"step {block.examples.step}: only the train gradients hold {differing[:5]}. Capture both with one "
            "selection."
        )
    if not block.grads:
        return torch.zeros(len(block.examples), len(next(iter(rho.values()))))
    dense = block.grads.map(lambda _, leaf: arranged(leaf, rho))
    return gram(block.grads, dense, hardware=hardware)
