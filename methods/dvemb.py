"""Data value embedding (Wang et al. 2024, arXiv:2412.09538): the effect of an example through the rest of an SGD run.

    s(z, k, q) = lr_k <v_q, (I - lr_T H_T) ... (I - lr_{k+1} H_{k+1}) ghat_z>     ghat_z = c_z g_z, z in step k
    H_k = phi sum_{z in step k} ghat_z ghat_z^T                                   v_q at the end of training

    w <- v_q; steps backwards:   s_z = lr <w, ghat_z>,   w <- w - phi sum_z s_z ghat_z

This query side holds the queries and never builds a train gradient; `dvemb_embeddings` is the train side.  A run of
another optimizer is treated as SGD with its learning rates; see `trajectory_influence` for the optimizer's own steps.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Block,
    Examples,
    GradTree,
    Hardware,
    Leaf,
    LinearMap,
    Materialized,
    Scores,
    Source,
    aggregate,
    covers,
    gram_leaf,
    materialize,
    materialize_leaf,
)
from attrax.core.algebra import zeros_like
from attrax.core.trajectory import Trajectory
from attrax.methods.along import seen
from attrax.methods.as_sgd import ABOUT, Coupling, Seen, backwards, is_diagonal
from attrax.methods.sweep import Rows, at_the_end, collected
from attrax.methods.weighing import FisherUnit


def dvemb(
    trajectory: Trajectory,
    query: Source,
    *,
    coupling: Coupling = "full",
    unit: FisherUnit = "examples",
    projection: LinearMap | None = None,
    hardware: Hardware = CPU,
) -> Scores:
    """Score every use of every example, from the query side.

    Args:
        trajectory: The run.
        query: Query gradients at the end of training.
        coupling: "full" curvature between all layers, or "diagonal": each layer's own only.
        unit: What a step's loss is a mean over, see `attrax.methods.weighing.fisher_factor`.
        projection: Score in fewer coordinates.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful: f_q if the example is removed at that
        step, the batch's denominator kept, minus f_q.

    Raises:
        ValueError: If the run or the queries are empty, steps are missing, leaves differ, or learning rates or weights
            are unknown.

    >>> from attrax.core import Blocks, Examples, Optimizer, Recorded, Step, materialized
    >>> grads = GradTree({"w": materialized("w", torch.tensor([[2.0]]))})
    >>> block = lambda step, name: Block(grads, Examples((name,), step, weight=torch.ones(1)))
    >>> sgd = {"w": Optimizer("sgd", {"lr": 0.1})}
    >>> run = Recorded([Step(0, sgd, {}), Step(1, sgd, {})], [block(0, "a"), block(1, "b")])
    >>> dvemb(run, Blocks([block(2, "q")])).values
    tensor([[0.2400],
            [0.4000]])
    """
    queries = at_the_end(seen(query, projection), "dvemb")
    about = {**ABOUT, "coupling": coupling, "fisher": unit}
    steps = backwards(trajectory, unit, projection)
    rows = _sweep(steps, queries, is_diagonal(coupling), hardware)
    return collected(rows, queries.examples, about)


def _sweep(steps: Iterator[Seen], queries: Block, diagonal: bool, hardware: Hardware) -> Iterator[Rows]:
    """Scores of the blocks of every step, last step first."""
    w, met = materialize(queries.grads, hardware=hardware), set[str]()
    for step in steps:
        for block in step.blocks:
            met |= set(block.grads)
            w = _with_absent(w, block, queries.examples)
        by_leaf = [
            {n: step.rates[n] * gram_leaf(x, w[n], name=n, hardware=hardware) for n, x in block.grads.items()}
            for block in step.blocks
        ]
        none = torch.zeros(len(queries.examples))
        totals = [
            torch.stack(list(shares.values())).sum(0) if shares else none.expand(len(block.examples), -1)
            for block, shares in zip(step.blocks, by_leaf, strict=True)
        ]
        yield [(block.examples, total) for block, total in zip(step.blocks, totals, strict=True)]
        for block, shares, total in zip(step.blocks, by_leaf, totals, strict=True):
            coupled = shares if diagonal else dict.fromkeys(shares, total)
            w = w.map(lambda n, x: _minus(x, block, n, step.phi * coupled[n]) if n in coupled else x)  # noqa: B023
    if met and (unmet := sorted(set(queries.grads) - met)):
        raise ValueError(
            f"dvemb: only the query gradients hold the leaves {unmet[:5]}. Capture both with one selection."
        )


def _with_absent(w: GradTree, block: Block, queries: Examples) -> GradTree:
    """Queries with a gradient of zero in the layers of a block that no query has called.

    Raises:
        ValueError: If the queries do not know a layer.
    """
    new = {n: leaf for n, leaf in block.grads.items() if n not in w}
    if unknown := [n for n, leaf in new.items() if set(covers(leaf)) - set(queries.absent)]:
        raise ValueError(
            f"dvemb: step {block.examples.step}: only the train gradients hold the leaves {unknown[:5]}. Capture both "
            "with one selection."
        )
    zeros = {n: materialize_leaf(zeros_like(leaf, len(queries))) for n, leaf in new.items()}
    return GradTree({**w, **zeros}) if zeros else w


def _minus(query: Leaf, block: Block, name: str, weights: Tensor) -> Leaf:
    """A query leaf minus weighted sums of a block's gradients."""
    (total,) = aggregate(GradTree({name: block.grads[name]}), weights).leaves
    assert isinstance(query, Materialized) and isinstance(total, Materialized)
    return replace(query, w=query.w - total.w.reshape(query.w.shape))
