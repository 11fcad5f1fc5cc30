"""Inner-product scores of a train source against queries held in memory: the loop every gradient method ends in.

    s[i, q] = sum_leaves <G_i, V_q>

with V the queries' gradients, plain or preconditioned.  Train leaves are scored the moment they exist and freed.
A query that a route would build anyway is built once and kept while it fits the memory budget.  A layer that no example
of a side has called has a gradient of zero there and adds nothing; one that a side does not know is an error.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Block,
    Diagonal,
    Examples,
    Factorized,
    Grouped,
    Hardware,
    Leaf,
    Lookup,
    Materialized,
    Scores,
    Source,
    Sum,
    covers,
    gram_leaf,
    materialize_leaf,
)
from attrax.core.algebra import wide
from attrax.core.leaves import batch_size, dtype_of
from attrax.core.products import plan_leaf
from attrax.core.scores import scores
from attrax.core.source import one_fingerprint, row_sums

_MANY = 1_000


def pairwise(
    train: Source,
    queries: Block,
    *,
    about: Mapping[str, str],
    hardware: Hardware = CPU,
    operation: str = "score",
) -> Scores:
    """Score every train example against every query.

    Args:
        train: Train gradients, at the parameters of the queries.
        queries: Query gradients as one block (`attrax.core.collect`).
        about: Description stored with the scores.
        hardware: Roofline figures and memory budget.
        operation: Name used in errors.

    Returns:
        Scores [N, Q]; higher = more helpful (first-order decrease of the query's loss).

    Raises:
        ValueError: If parameters differ, leaves do not match, or the train source is empty.

    >>> import torch
    >>> from attrax.core import Blocks, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2))})
    >>> block = Block(grads, Examples(("x",)))
    >>> pairwise(Blocks([block]), block, about={}).values
    tensor([[4.]])
    """
    met: dict[str, Leaf] = {}
    measure = _scorer(queries, met, hardware, operation)
    rows: list[Examples] = []
    values: list[Tensor] = []
    for examples, value in row_sums(measure, train):
        one_fingerprint(queries.examples.fingerprint, examples, operation)
        if len(examples) == 0:
            continue
        if value is None and examples.absent:
            value = torch.zeros(len(examples), len(queries.examples))
        if value is None:
            raise ValueError(f"{operation}: no leaf of the train source matches the queries' leaves.")
        rows.append(examples)
        values.append(value)
    if not rows:
        raise ValueError(f"{operation}: the train source yielded no examples.")
    zero = {n for n in rows[0].absent if all(n in examples.absent for examples in rows)}
    unmet = [n for n, leaf in queries.grads.items() if n not in met and set(covers(leaf)) - zero]
    if unmet:
        raise ValueError(
            f"{operation}: the queries hold leaves that no train block has: {unmet[:5]}. "
            "Capture both sides with the same selection and transform."
        )
    return scores(torch.cat(values), rows, queries.examples.ids, about)


def _scorer(
    queries: Block, prepared: dict[str, Leaf], hardware: Hardware, operation: str
) -> Callable[[str, Leaf, Examples], Tensor]:
    """The measure of one leaf; `prepared` receives the query leaves it has met, built where that pays."""
    spent = 0

    def prepare(name: str, leaf: Leaf) -> Leaf:
        nonlocal spent
        query = queries.grads[name]
        if isinstance(query, Materialized | Lookup):
            return query  # a vocabulary is longer than what a block holds of it
        routes = {plan.route for plan in plan_leaf(name, leaf, query, hardware=hardware, reuse=_MANY)}
        if routes & {"materialize", "mixed"}:
            size = _dense_bytes(query)
            if spent + size <= hardware.memory:
                spent += size
                return materialize_leaf(query)
        return query

    def measure(name: str, leaf: Leaf, examples: Examples) -> Tensor:
        if name not in queries.grads and not set(covers(leaf)) - set(queries.examples.absent):
            return torch.zeros(len(examples), len(queries.examples), dtype=wide(dtype_of(leaf)))
        if name not in queries.grads:
            raise ValueError(
                f"{operation}: train leaf '{name}' has no query gradient; the queries hold "
                f"{list(queries.grads)[:5]} …. Capture both sides with the same selection and transform."
            )
        if name not in prepared:
            prepared[name] = prepare(name, leaf)
        return gram_leaf(leaf, prepared[name], name=name, hardware=hardware, reuse=_MANY)

    return measure


def _dense_bytes(leaf: Leaf) -> int:
    match leaf:
        case Sum():
            return _dense_bytes(leaf.uses[0])
        case Materialized():
            return leaf.w.numel() * leaf.w.element_size()
        case Factorized():
            columns = leaf.a.shape[-1] + leaf.bias
        case Grouped():
            columns = leaf.a.shape[-1]
        case Lookup():
            columns = leaf.g.shape[-1]
        case Diagonal():
            columns = 1
    numbers = batch_size(leaf) * sum(part.width for part in leaf.parts) * columns
    return numbers * wide(leaf.g.dtype).itemsize


def cosines(products: Tensor, train: Tensor, query: Tensor) -> Tensor:
    """Inner products [B, Q] by the norms [B] and [Q] of what was multiplied; 0 where one of them is zero.

    >>> cosines(torch.tensor([[3.0, 0.0]]), torch.tensor([3.0]), torch.tensor([2.0, 0.0]))
    tensor([[0.5000, 0.0000]])
    """
    scale = train.unsqueeze(1) * query
    return torch.where(scale > 0, products / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0)
