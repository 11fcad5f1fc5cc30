"""What methods that compare examples and queries along a run share: queries by step, learning rates, sums."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attrax.core import (
    Block,
    Examples,
    Hardware,
    Leaf,
    LinearMap,
    Scores,
    Source,
    collect,
    covers,
    gram_leaf,
    projected,
    targeted,
    transformed,
)
from attrax.core.algebra import wide
from attrax.core.leaves import batch_size, dtype_of
from attrax.core.scores import scores
from attrax.core.trajectory import Step


@runtime_checkable
class Stepped(Source, Protocol):
    """A source that knows its optimizer steps and can be cut to one."""

    def steps(self) -> tuple[int, ...]:
        """Steps present, ascending."""
        ...

    def at(self, step: int) -> Source:
        """The blocks of one step."""
        ...


def queries_along(
    query: Source, operation: str, projection: LinearMap | None = None
) -> Callable[[int], Block]:
    """Query gradients of the sum over each query's tokens, by step.

    Args:
        query: Query gradients at the steps of a run.
        operation: Name used in errors.
        projection: Applied to the queries.

    Returns:
        ``step -> queries`` in memory; those of the last step asked for are kept.

    Raises:
        ValueError: If the source does not know its steps.  The function: if a step is missing, or its queries are not
            those of the steps before.
    """
    if not isinstance(query, Stepped):
        saved = "" if operation == "shapley" else f"; saved checkpoints go to {operation}_checkpoints"
        raise ValueError(
            f"{operation}: the query source does not know its optimizer steps. Record query gradients during training "
            f"or recompute them along it (Replay.queries){saved}."
        )
    known = query.steps()
    first: list[tuple[str, ...]] = []

    @lru_cache(1)
    def at(step: int) -> Block:
        if step not in known:
            raise ValueError(
                f"{operation}: no query gradients at step {step}; there are some at {sorted(known)[:10]}. "
                "Record the queries at every step that is scored."
            )
        found = collect(seen(targeted(query.at(step), "sum"), projection), operation=operation)
        first.append(found.examples.ids)
        if found.examples.ids != first[0]:
            raise ValueError(f"{operation}: the queries at step {step} differ from those of earlier steps.")
        return found

    return at


def seen(source: Source, projection: LinearMap | None) -> Source:
    """A source in the coordinates of a projection."""
    return source if projection is None else transformed(source, projected(projection))


def same_parameters(queries: Block, examples: Examples, operation: str) -> None:
    """Check that queries and examples were taken at the same parameters.

    Raises:
        ValueError: If they were not.
    """
    if queries.examples.fingerprint != examples.fingerprint:
        raise ValueError(
            f"{operation}: at step {examples.step} train and query gradients were taken at different parameters "
            f"({examples.fingerprint!r} and {queries.examples.fingerprint!r}). Record both in one run."
        )


def products(leaf: Leaf, queries: Block, name: str, operation: str, hardware: Hardware) -> Tensor:
    """Inner products [B, Q] of a leaf with the queries' one; 0 for a layer that no query has called.

    Raises:
        ValueError: If the queries do not know the layer.
    """
    if name not in queries.grads and not set(covers(leaf)) - set(queries.examples.absent):
        return torch.zeros(batch_size(leaf), len(queries.examples), dtype=wide(dtype_of(leaf)))
    if name not in queries.grads:
        raise ValueError(
            f"{operation}: train leaf '{name}' has no query gradient; capture both with one selection."
        )
    return gram_leaf(leaf, queries.grads[name], name=name, hardware=hardware)


def rate_of(record: Step, name: str, leaf: Leaf, operation: str) -> float:
    """The learning rate of a leaf's parameters.

    Raises:
        ValueError: If they have none or several.
    """
    rates = {record.optimizers[n].lr for n in (name, *covers(leaf)) if n in record.optimizers}
    if len(rates) != 1:
        raise ValueError(
            f"{operation}: step {record.step}: leaf '{name}' has learning rates {sorted(rates)}; expected one. Leave "
            "it out of the selection, or use trajectory_influence."
        )
    return rates.pop()


def stacked(rows: Sequence[tuple[Examples, Tensor]], ids: tuple[str, ...], about: dict[str, str]) -> Scores:
    """Scores of blocks, one below the other.

    Raises:
        ValueError: If there are none.
    """
    if not rows:
        raise ValueError(f"{about['method']}: the run yielded no examples.")
    return scores(torch.cat([v for _, v in rows]), [e for e, _ in rows], ids, about)


def over_checkpoints(parts: Iterable[Scores], operation: str) -> Scores:
    """The sum of the scores of the same examples and queries at several checkpoints.

    Raises:
        ValueError: If there is none, or examples or queries differ.
    """
    total: Scores | None = None
    count = 0
    for one in parts:
        count += 1
        if total is None:
            total = replace(one, steps=(), micros=())
        elif (one.ids, one.query_ids) != (total.ids, total.query_ids):
            raise ValueError(f"{operation}: examples or queries differ between checkpoints.")
        else:
            total = replace(total, values=total.values + one.values)
    if total is None:
        raise ValueError(f"{operation}: no checkpoints given.")
    return replace(total, about={**total.about, "method": operation, "checkpoints": str(count)})
