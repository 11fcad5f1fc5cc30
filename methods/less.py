"""LESS (Xia et al. 2024, arXiv:2402.04333): cosines of query gradients with what an example makes the optimizer do.

    s(z, q) = sum_k w_k cos(v_q(theta_k), Gamma(g_z(theta_k); optimizer state at k))

g_z is the gradient of the example's mean loss over tokens, Gamma the update direction that it alone would give
(`attrax.core.directed`), cosines run over all layers, and w_k is the learning rate.  Gamma is taken of whole gradients;
a projection comes after it.  Along a run k are the steps in which z was used; else saved checkpoints, for all z.

Variants: "torch" takes the optimizer's own rule; "official" m' / sqrt(v' + eps) without bias correction, and weights
that add up to one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Block,
    Examples,
    Hardware,
    Leaf,
    LinearMap,
    Scores,
    Source,
    Target,
    collect,
    directed,
    norms,
    sq_norms_leaf,
    targeted,
    transformed,
)
from attrax.core.source import row_sums
from attrax.core.trajectory import Step, Trajectory
from attrax.methods.along import over_checkpoints, products, queries_along, same_parameters, seen, stacked
from attrax.methods.pairwise import cosines


@dataclass(frozen=True)
class Less:
    """What is compared.

    Attributes:
        variant: See the module.
        target: Scale of the train gradients, on which directions depend.
        centered: Leave out the direction of the momentum, which all examples share.
        projection: Applied to directions and query gradients.
        hardware: Roofline figures and memory budget.
    """

    variant: Literal["torch", "official"] = "torch"
    target: Target = "mean"
    centered: bool = False
    projection: LinearMap | None = None
    hardware: Hardware = CPU


def less(trajectory: Trajectory, query: Source, how: Less = Less()) -> Scores:
    """LESS along a run: every use of an example at the parameters and optimizer state before that step.

    Args:
        trajectory: The run, with optimizer states.
        query: Query gradients at the steps of the run, before each step.
        how: Variant and options.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful.

    Raises:
        ValueError: If a step has no query gradients, its parameters differ, or there are several learning rates.
    """
    at = queries_along(query, "less", how.projection)
    records = [trajectory.step(number) for number in trajectory.steps]
    rows: list[tuple[Examples, Tensor]] = []
    ids: tuple[str, ...] = ()
    for record, rate in zip(records, _rates(records, None, how.variant), strict=True):
        queries = at(record.step)
        ids = queries.examples.ids
        rows += _cosines(trajectory.gradients(record.step), queries, record, rate, how)
    return stacked(rows, ids, _about(how))


def less_checkpoints(
    checkpoints: Iterable[tuple[Source, Source, Step]],
    how: Less = Less(),
    *,
    learning_rates: Sequence[float] | None = None,
) -> Scores:
    """LESS over saved checkpoints.

    Args:
        checkpoints: (train source, query source, optimizer kind and state there) per checkpoint.
        how: Variant and options.
        learning_rates: w_k, the mean learning rate of each checkpoint's epoch; those of the steps if omitted.

    Returns:
        Scores [N, Q], summed over checkpoints; higher = more helpful.

    Raises:
        ValueError: If there is no checkpoint, or examples or queries differ between checkpoints.
    """
    given = list(checkpoints)
    rates = _rates([record for *_, record in given], learning_rates, how.variant)
    parts: list[Scores] = []
    for (train, query, record), rate in zip(given, rates, strict=True):
        queries = collect(seen(query, how.projection), operation="less")
        parts.append(stacked(_cosines(train, queries, record, rate, how), queries.examples.ids, _about(how)))
    return over_checkpoints(parts, "less_checkpoints")


def _cosines(
    train: Source, queries: Block, record: Step, rate: float, how: Less
) -> list[tuple[Examples, Tensor]]:
    """w_k cos(...) of every block."""

    def measure(name: str, leaf: Leaf, _: Examples) -> Tensor:
        dots = products(leaf, queries, name, "less", how.hardware)
        return torch.cat([dots, sq_norms_leaf(leaf, name=name, hardware=how.hardware).unsqueeze(1)], 1)

    renamed = ("adam", "adamw") if how.variant == "official" else ()
    rules = {n: replace(o, kind="less") if o.kind in renamed else o for n, o in record.optimizers.items()}
    moves = transformed(targeted(train, how.target), directed(rules, record.states, centered=how.centered))
    lengths = norms(queries.grads, hardware=how.hardware)
    rows: list[tuple[Examples, Tensor]] = []
    for examples, value in row_sums(measure, seen(moves, how.projection)):
        same_parameters(queries, examples, "less")
        if value is not None and len(examples):
            rows.append((examples, rate * cosines(value[:, :-1], value[:, -1].clamp_min(0).sqrt(), lengths)))
    return rows


def _rates(records: Sequence[Step], given: Sequence[float] | None, variant: str) -> list[float]:
    if variant not in ("torch", "official"):
        raise ValueError(f"less: variant: got {variant!r}; expected 'torch' or 'official'.")
    found = list(given or ())
    for record in records if given is None else ():
        rates = {o.lr for o in record.optimizers.values()}
        if len(rates) != 1:
            what = f"less: step {record.step} has learning rates {sorted(rates)}; expected one."
            raise ValueError(f"{what} Use less_checkpoints with learning_rates=.")
        found += rates
    return found if variant == "torch" else [rate / sum(found) for rate in found]


def _about(how: Less) -> dict[str, str]:
    return {"method": "less", "variant": how.variant, "target": how.target, "unit": "learning rate x cosine"}
