"""TracIn (Pruthi et al. 2020, arXiv:2002.08484): gradient similarity along training.

    along a run    s[(i, step), q] = lr_step <c_i g_i, v_q>        all at the parameters before the step (eq. 1)
    checkpoints    s[i, q] = sum_k lr_k <g_i(theta_k), v_q(theta_k)>                                     (eq. 3)

The first form needs the query gradients at the steps of the train blocks: record both during training (see
`attrax.capture(..., queries=...)`).  Its rows keep (example, step); `Scores.per_example` adds them up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Block,
    Examples,
    Hardware,
    Leaf,
    Scores,
    Source,
    Target,
    collect,
    gram_leaf,
    targeted,
)
from attrax.core.scores import scores
from attrax.core.source import row_sums
from attrax.methods.graddot import graddot


@runtime_checkable
class Stepped(Source, Protocol):
    """A source that knows its optimizer steps and can be cut to one."""

    def steps(self) -> tuple[int, ...]:
        """Steps present, ascending."""
        ...

    def at(self, step: int) -> Source:
        """The blocks of one step."""
        ...


def tracin(
    train: Source,
    query: Source,
    *,
    learning_rates: Mapping[int, float] | None = None,
    target: Target = "as_trained",
    hardware: Hardware = CPU,
) -> Scores:
    """TracIn along a recorded run.

    Args:
        train: Gradients of a training run, blocks with steps.
        query: Query gradients at the same steps and parameters.
        learning_rates: Learning rate by step; those recorded with the train blocks if omitted.
        target: "as_trained" weighs each example as its step did.  Queries always use the sum over their tokens.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful.

    Raises:
        ValueError: If a train step has no query gradients, its parameters differ, or no learning rate is known.
    """
    by_step = _query_steps(query)
    rows: list[Examples] = []
    values: list[Tensor] = []
    current: dict[int, Block] = {}
    wanted: set[str] = set()
    met: set[str] = set()
    ids: tuple[str, ...] | None = None

    def measure(name: str, leaf: Leaf, examples: Examples) -> Tensor:
        if examples.step not in current:
            current.clear()
            current[examples.step] = _queries_at(by_step, examples)
            wanted.update(current[examples.step].grads)
        queries = current[examples.step]
        met.add(name)
        if name not in queries.grads:
            raise ValueError(
                f"tracin: train leaf '{name}' has no query gradient; capture both with one selection."
            )
        return gram_leaf(leaf, queries.grads[name], name=name, hardware=hardware)

    for examples, value in row_sums(measure, targeted(train, target)):
        if value is None or not len(examples):
            continue
        queries = current[examples.step].examples.ids
        ids = ids or queries
        if queries != ids:
            raise ValueError(
                f"tracin: the queries at step {examples.step} differ from those of earlier steps."
            )
        rows.append(examples)
        values.append(value * _learning_rate(examples, learning_rates))
    if not rows or ids is None:
        raise ValueError("tracin: the train source yielded no examples.")
    if unmet := sorted(wanted - met):
        raise ValueError(
            f"tracin: the queries hold leaves that no train block has: {unmet[:5]}; capture both with one selection."
        )
    about = {"method": "tracin", "target": target, "unit": "loss"}
    return scores(torch.cat(values), rows, ids, about)


def _query_steps(query: Source) -> Mapping[int, Source]:
    if not isinstance(query, Stepped):
        raise ValueError(
            "tracin: the query source does not know its optimizer steps. Record query gradients during training, or "
            "use tracin_checkpoints with one live source per checkpoint."
        )
    return {step: query.at(step) for step in query.steps()}


def _queries_at(by_step: Mapping[int, Source], examples: Examples) -> Block:
    if examples.step not in by_step:
        raise ValueError(
            f"tracin: no query gradients at step {examples.step}; there are some at {sorted(by_step)[:10]}. "
            "Record the queries at every step that is scored."
        )
    queries = collect(targeted(by_step[examples.step], "sum"), operation="tracin")
    if queries.examples.fingerprint != examples.fingerprint:
        raise ValueError(
            f"tracin: at step {examples.step} train and query gradients were taken at different parameters "
            f"({examples.fingerprint!r} and {queries.examples.fingerprint!r}). Record both in one run."
        )
    return queries


def _learning_rate(examples: Examples, given: Mapping[int, float] | None) -> float:
    rate = examples.learning_rate if given is None else given.get(examples.step)
    if rate is None:
        raise ValueError(
            f"tracin: no learning rate is known for step {examples.step}. Pass learning_rates={{step: lr}}."
        )
    return rate


def tracin_checkpoints(
    checkpoints: Iterable[tuple[Source, Source, float]], *, target: Target = "sum", hardware: Hardware = CPU
) -> Scores:
    """TracInCP over saved checkpoints.

    Args:
        checkpoints: (train source, query source, learning rate) per checkpoint.
        target: Loss convention of both sides.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [N, Q], summed over checkpoints; higher = more helpful.

    Raises:
        ValueError: If there is no checkpoint, or examples or queries differ between checkpoints.

    >>> from attrax.core import Blocks, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2))})
    >>> source = Blocks([Block(grads, Examples(("x",), weight=torch.ones(1)))])
    >>> tracin_checkpoints([(source, source, 0.5), (source, source, 0.25)]).values
    tensor([[3.]])
    """
    total: Scores | None = None
    count = 0
    for train, query, rate in checkpoints:
        one = graddot(train, query, target=target, hardware=hardware)
        count += 1
        if total is None:
            total = replace(one, values=rate * one.values, steps=(), micros=())
            continue
        if (one.ids, one.query_ids) != (total.ids, total.query_ids):
            raise ValueError("tracin_checkpoints: examples or queries differ between checkpoints.")
        total = replace(total, values=total.values + rate * one.values)
    if total is None:
        raise ValueError("tracin_checkpoints: no checkpoints given.")
    return replace(total, about={**total.about, "method": "tracin_checkpoints", "checkpoints": str(count)})
