"""The backward sweep over a training run that influence along it and exact metagradients share.

    U_T = df_q / dtheta_T;   at every step, last one first:
    rho = clip^T (step^T U)                            cotangent [Q, P] of the batch's gradient sum_z ghat_z
    score(z, q) = -<rho_q, ghat_z>                     = f_q without z - f_q, to first order
    U  <- (what the step's own rule hands back) + rho H                       H = d(sum_z ghat_z) / dtheta

Methods differ in how they get the products <rho, ghat_z> and rho H: that is the `respond` they hand in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

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
    gram,
    targeted,
)
from attrax.core.adjoint import Moments, Vectors, through_clip, through_step
from attrax.core.arrange import arranged
from attrax.core.scores import scores
from attrax.core.trajectory import Step

FisherUnit: TypeAlias = Literal["examples", "tokens"]
Removal: TypeAlias = Literal["fixed", "example_mean", "token_mean"]
Rows: TypeAlias = Sequence[tuple[Examples, Tensor]]
Respond: TypeAlias = Callable[[Step, Vectors], tuple[Rows, Vectors]]
"""``(step, rho) -> (<rho, ghat_z> [B, Q] of every block, rho H)``; both zero for parameters left out."""


def sweep(records: Iterable[Step], query: Vectors, respond: Respond) -> Iterator[Rows]:
    """Products <rho, ghat_z> of every step, last step first.

    Args:
        records: Complete steps, last one first.
        query: Gradients [Q, *shape] of the queries at the final parameters.
        respond: Products with the examples and the curvature of a step.

    Returns:
        Per step, the products of every block.

    Raises:
        ValueError: If a step was clipped by an unknown amount, or lacks what `through_step` needs.
    """
    cotangents: Vectors = query
    moments: Moments = {}
    for record in records:
        if record.clip is None:
            raise ValueError(
                f"sweep: it is unknown whether the gradients of step {record.step} were clipped. Record clipping, or "
                "state Clip(1.0, norm) if there was none."
            )
        rho, cotangents, moments = through_step(record, cotangents, moments)
        rows, curved = respond(record, through_clip(record.clip, record.gradients, rho))
        cotangents = {n: u + curved[n] if n in curved else u for n, u in cotangents.items()}
        yield rows


def removed(rows: Rows, removal: Removal) -> Rows:
    """Scores of a step from its products: the gradient changes by -ghat_z, or by -(ghat_z - share_z G) if the loss is
    divided by what is left of the batch.

    Raises:
        ValueError: If `removal` is unknown.
    """
    if removal not in ("fixed", "example_mean", "token_mean"):
        raise ValueError(f"removal: got {removal!r}; expected 'fixed', 'example_mean' or 'token_mean'.")
    if removal == "fixed" or not rows:
        return [(examples, -x) for examples, x in rows]
    whole = torch.stack([x.sum(0) for _, x in rows]).sum(0)
    if removal == "example_mean":
        counts = [torch.ones(len(examples)) for examples, _ in rows]
    else:
        counts = [_tokens(examples) for examples, _ in rows]
    total = float(sum(n.sum() for n in counts))
    shares = [(n / total).to(whole) for n in counts]
    return [(examples, w[:, None] * whole - x) for (examples, x), w in zip(rows, shares, strict=True)]


def collected(rows: Iterable[Rows], queries: Examples, about: Mapping[str, str]) -> Scores:
    """Scores of all steps in the order of training, from rows that come last step first.

    Raises:
        ValueError: If there are none, or the queries were taken before the end of training.
    """
    found: list[Rows] = []
    for step in rows:
        for examples, _ in step:
            if queries.fingerprint and examples.fingerprint == queries.fingerprint:
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
        ValueError: If the block holds a parameter that `rho` does not.
    """
    try:
        dense = block.grads.map(lambda _, leaf: arranged(leaf, rho))
    except KeyError as error:
        raise ValueError(
            f"trajectory_influence: step {block.examples.step} holds gradients of {error}, the queries hold none. "
            "Capture both with one selection."
        ) from None
    return gram(block.grads, dense, hardware=hardware)


def fisher_factor(blocks: Sequence[Block], unit: FisherUnit) -> float:
    """Phi in H ~ phi sum_z ghat_z ghat_z^T: the number of units in the step by the total weight of their losses.

    A step's loss is sum_z c_z l_z, and ghat_z = c_z g_z.  With l_z a sum over tokens whose labels are the model's own,
    E ghat_z ghat_z^T = c_z^2 GGN_z, so that "tokens" is exact on average for a mean over tokens (phi = their number)
    and for a sum (phi = 1).  "examples" takes an example's token mean for one unit (phi = number of examples for
    any mean); this is what the papers do.

    Args:
        blocks: All blocks of a step.
        unit: "examples" or "tokens"; an example counts as one token where counts are unknown.

    Raises:
        ValueError: If loss weights are unknown.

    >>> about = Examples(("a", "b"), weight=torch.full((2,), 0.1), tokens=torch.tensor([4, 6]))
    >>> [round(fisher_factor([Block(GradTree({}), about)], unit), 3) for unit in ("examples", "tokens")]
    [2.0, 10.0]
    """
    if unit not in ("examples", "tokens"):
        raise ValueError(f"unit: got {unit!r}; expected 'examples' or 'tokens'.")
    total = sum(float(loss_shares(block.examples).sum()) for block in blocks)
    counted = [len(b.examples) if unit == "examples" else float(_tokens(b.examples).sum()) for b in blocks]
    return sum(counted) / total if total else 0.0


def loss_shares(examples: Examples) -> Tensor:
    """c_z n_z [B]: how much of the step's loss is the mean loss of each example; they add up to 1 for a mean.

    Raises:
        ValueError: If loss weights are unknown.
    """
    if examples.weight is None:
        raise ValueError(
            f"step {examples.step}: the weights that the loss put on its examples are unknown, and the scale of the "
            "curvature (or of renormalized removal) depends on them. Declare the loss at capture."
        )
    return examples.weight.double() * _tokens(examples).to(examples.weight.device)


def _tokens(examples: Examples) -> Tensor:
    return torch.ones(len(examples)) if examples.tokens is None else examples.tokens
