"""TracIn (Pruthi et al. 2020, arXiv:2002.08484): gradient similarity along training.

    along a run    s[(i, step), q] = lr_step <c_i g_i, v_q>        all at the parameters before the step (eq. 1)
    checkpoints    s[i, q] = sum_k lr_k <g_i(theta_k), v_q(theta_k)>                                     (eq. 3)

The first form needs the query gradients at the steps of the train blocks: record both during training (see
`attrax.capture(..., queries=...)`), or recompute both along a recorded run (see `attrax.replay`).  Its rows keep
(example, step); `Scores.per_example` adds them up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from torch import Tensor

from attrax.core import CPU, Block, Examples, Hardware, Leaf, Scores, Source, Target, targeted
from attrax.core.source import row_sums
from attrax.core.trajectory import Trajectory
from attrax.methods.along import over_checkpoints, products, queries_along, rate_of, same_parameters, stacked
from attrax.methods.graddot import graddot

Rate: TypeAlias = Callable[[str, Leaf, Examples], float]


def tracin(
    train: Trajectory | Source,
    query: Source,
    *,
    learning_rates: Mapping[int, float] | None = None,
    target: Target = "as_trained",
    hardware: Hardware = CPU,
) -> Scores:
    """TracIn along a recorded run.

    Args:
        train: The run: a `Trajectory`, which knows the learning rate of every parameter group, or gradients alone,
            blocks with steps.
        query: Query gradients at the same steps and parameters: a store, or `Replay.queries`.
        learning_rates: Learning rate by step; those recorded with the run or with its blocks if omitted.
        target: "as_trained" weighs each example as its step did.  Queries always use the sum over their tokens.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful.

    Raises:
        ValueError: If a train step has no query gradients, its parameters differ, or no learning rate is known.
    """
    at = queries_along(query, "tracin")
    sources, rate = _parts(train, learning_rates, at)
    rows: list[tuple[Examples, Tensor]] = []
    wanted: set[str] = set()
    met: set[str] = set()
    ids: tuple[str, ...] = ()

    def measure(name: str, leaf: Leaf, examples: Examples) -> Tensor:
        queries = at(examples.step)
        same_parameters(queries, examples, "tracin")
        wanted.update(queries.grads)
        met.add(name)
        return rate(name, leaf, examples) * products(leaf, queries, name, "tracin", hardware)

    for source in sources:
        for examples, value in row_sums(measure, targeted(source, target)):
            if value is not None and len(examples):
                ids = at(examples.step).examples.ids
                rows.append((examples, value))
    if unmet := sorted(wanted - met):
        raise ValueError(
            f"tracin: the queries hold leaves that no train block has: {unmet[:5]}; capture both with one selection."
        )
    return stacked(rows, ids, {"method": "tracin", "target": target, "unit": "loss"})


def _parts(
    train: Trajectory | Source, given: Mapping[int, float] | None, at: Callable[[int], Block]
) -> tuple[Iterable[Source], Rate]:
    """The gradients of a run, and the learning rates of its leaves.

    The queries of a step come before its gradients: one model may have to compute both.
    """

    def by_block(name: str, leaf: Leaf, examples: Examples) -> float:
        rate = examples.learning_rate if given is None else given.get(examples.step)
        if rate is None:
            raise ValueError(
                f"tracin: no learning rate is known for step {examples.step}. Pass learning_rates={{step: lr}}."
            )
        return rate

    if not isinstance(train, Trajectory):
        return [train], by_block
    step = lru_cache(1)(train.step)

    def by_parameter(name: str, leaf: Leaf, examples: Examples) -> float:
        return rate_of(step(examples.step), name, leaf, "tracin")

    def sources() -> Iterator[Source]:
        for number in train.steps:
            at(number)
            yield train.gradients(number)

    return sources(), by_parameter if given is None else by_block


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

    >>> import torch
    >>> from attrax.core import Block, Blocks, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2))})
    >>> source = Blocks([Block(grads, Examples(("x",), weight=torch.ones(1)))])
    >>> tracin_checkpoints([(source, source, 0.5), (source, source, 0.25)]).values
    tensor([[3.]])
    """
    parts = (
        (graddot(train, query, target=target, hardware=hardware), rate) for train, query, rate in checkpoints
    )
    return over_checkpoints(
        (replace(one, values=rate * one.values) for one, rate in parts), "tracin_checkpoints"
    )
