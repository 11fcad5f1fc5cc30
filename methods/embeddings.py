"""Data value embeddings (Wang et al. 2024, arXiv:2412.09538), one a train example and step: s = <e_z, v_q>.

    M <- 0; steps backwards:   e_z = lr (ghat_z - M ghat_z),   M <- M + phi sum_z e_z ghat_z^T

The train side of `attrax.methods.dvemb`: it knows no queries, and holds a matrix of all coordinates.  Project first.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Block,
    Blocks,
    GradTree,
    Hardware,
    Leaf,
    LinearMap,
    Materialized,
    Scores,
    Source,
    materialize,
)
from attrax.core.dense import flattened
from attrax.core.trajectory import Trajectory
from attrax.methods.along import seen
from attrax.methods.as_sgd import ABOUT, Coupling, backwards, is_diagonal
from attrax.methods.pairwise import pairwise
from attrax.methods.sweep import at_the_end
from attrax.methods.weighing import FisherUnit


def dvemb_embeddings(
    trajectory: Trajectory,
    *,
    coupling: Coupling = "full",
    unit: FisherUnit = "examples",
    projection: LinearMap | None = None,
    hardware: Hardware = CPU,
) -> Blocks:
    """Embeddings e_z of every use of every example, in place of gradients: for `score_dvemb`, against any queries.

    Args:
        trajectory: The run.
        coupling: See `dvemb`; M is one matrix over all leaves, or one a leaf.
        unit: See `dvemb`.
        projection: Embed in fewer coordinates.
        hardware: Its memory bounds M.

    Returns:
        Blocks of embeddings, in the order of training.

    Raises:
        ValueError: As `dvemb`, or if M does not fit.
    """
    M: dict[str, Tensor] = {}
    found: list[list[Block]] = []
    for step in backwards(trajectory, unit, projection):
        names = list(step.blocks[0].grads)
        embedded: dict[str, Tensor] = {}
        for group in [[name] for name in names] if is_diagonal(coupling) else [names]:
            pieces = [torch.cat([flattened(block.grads[n]) for block in step.blocks]) for n in group]
            g, widths = torch.cat(pieces, 1), [x.shape[1] for x in pieces]
            scaled = torch.cat([step.rates[n] * x for n, x in zip(group, pieces, strict=True)], 1)
            _check_size(g, hardware)
            old = M.get(group[0], g.new_zeros(g.shape[1], g.shape[1]))
            e = scaled - scaled @ old.T
            M[group[0]] = old + step.phi * e.T @ g
            embedded |= dict(zip(group, e.split(widths, 1), strict=True))
        parts = {n: e.split([len(b.examples) for b in step.blocks]) for n, e in embedded.items()}
        found.append([_embedding(b, {n: e[i] for n, e in parts.items()}) for i, b in enumerate(step.blocks)])
    return Blocks([block for step in reversed(found) for block in step])


def score_dvemb(
    embeddings: Source, query: Source, *, projection: LinearMap | None = None, hardware: Hardware = CPU
) -> Scores:
    """Score embeddings against queries.

    Args:
        embeddings: From `dvemb_embeddings`.
        query: Query gradients at the end of training.
        projection: That of the embeddings.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores as those of `dvemb`.
    """
    queries = at_the_end(seen(query, projection), "score_dvemb")
    anywhere = Block(queries.grads, replace(queries.examples, fingerprint=""))
    return pairwise(embeddings, anywhere, about=ABOUT, hardware=hardware, operation="score_dvemb")


def _embedding(block: Block, values: dict[str, Tensor]) -> Block:
    """Rows [B, d] by leaf in place of a block's gradients."""

    def placed(name: str, leaf: Leaf) -> Leaf:
        (form,) = materialize(GradTree({name: leaf})).leaves
        assert isinstance(form, Materialized)
        return replace(form, w=values[name].reshape(form.w.shape))

    return Block(block.grads.map(placed), replace(block.examples, fingerprint=""))


def _check_size(g: Tensor, hardware: Hardware) -> None:
    if g.shape[1] ** 2 * g.element_size() > hardware.memory:
        raise ValueError(
            f"dvemb_embeddings: {g.shape[1]} coordinates need a matrix of {g.shape[1] ** 2} numbers. Give a smaller "
            "projection=, use coupling='diagonal', or score from the query side with dvemb."
        )
