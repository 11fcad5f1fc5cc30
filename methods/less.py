"""LESS (Xia et al. 2024, arXiv:2402.04333): cosines of query gradients with what an example makes the optimizer do.

    s(z, q) = sum_k w_k cos(v_q(theta_k), Gamma(g_z(theta_k); optimizer state at k))

g_z is the gradient of the example's mean loss over tokens, Gamma the update direction that it alone would give
(`attrax.core.directed`), cosines run over all layers, and w_k is the learning rate.  Gamma is taken of whole gradients;
a projection comes after it.  Along a run k are the steps in which z was used; else saved checkpoints, for all z.

Variants: "torch" takes the optimizer's own rule; "official" that of the released code, m' / sqrt(v' + eps) without bias
correction, and weights that add up to one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Examples,
    Hardware,
    Leaf,
    LinearMap,
    Scores,
    Source,
    Target,
    collect,
    covers,
    directed,
    gram_leaf,
    norms,
    projected,
    sq_norms_leaf,
    targeted,
    transformed,
)
from attrax.core.optimizers import Optimizer
from attrax.core.scores import scores
from attrax.core.source import one_fingerprint, row_sums
from attrax.core.trajectory import Step, Trajectory
from attrax.methods.tracin import Stepped

Variant: TypeAlias = Literal["torch", "official"]


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

    variant: Variant = "torch"
    target: Target = "mean"
    centered: bool = False
    projection: LinearMap | None = None
    hardware: Hardware = CPU


def less(trajectory: Trajectory, query: Stepped, how: Less = Less()) -> Scores:
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
    if missing := sorted(set(trajectory.steps) - set(query.steps())):
        raise ValueError(f"less: no query gradients at steps {missing[:5]}; record them at every step.")
    records = [trajectory.step(number) for number in trajectory.steps]
    parts = [
        _cosines(trajectory.gradients(record.step), query.at(record.step), record, rate, how)
        for record, rate in zip(records, _rates(records, None, how.variant), strict=True)
    ]
    rows = [row for part, _ in parts for row in part]
    if not rows:
        raise ValueError("less: the run yielded no examples.")
    if len({ids for _, ids in parts}) > 1:
        raise ValueError("less: the queries differ between steps.")
    return scores(torch.cat([v for _, v in rows]), [e for e, _ in rows], parts[0][1], _about(how))


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
    total: Scores | None = None
    for (train, query, record), rate in zip(given, rates, strict=True):
        rows, ids = _cosines(train, query, record, rate, how)
        one = scores(torch.cat([v for _, v in rows]), [e for e, _ in rows], ids, _about(how))
        if total is None:
            total = replace(one, steps=(), micros=())
        elif (one.ids, one.query_ids) != (total.ids, total.query_ids):
            raise ValueError("less_checkpoints: examples or queries differ between checkpoints.")
        else:
            total = replace(total, values=total.values + one.values)
    if total is None:
        raise ValueError("less_checkpoints: no checkpoints given.")
    return total


def _cosines(
    train: Source, query: Source, record: Step, rate: float, how: Less
) -> tuple[list[tuple[Examples, Tensor]], tuple[str, ...]]:
    """w_k cos(...) of every block, and the ids of the queries."""

    def seen(source: Source) -> Source:
        return source if how.projection is None else transformed(source, projected(how.projection))

    def measure(name: str, leaf: Leaf, _: Examples) -> Tensor:
        norm = sq_norms_leaf(leaf, name=name, hardware=how.hardware).unsqueeze(1)
        if name not in queries.grads and not set(covers(leaf)) - set(queries.examples.absent):
            return torch.cat([norm.new_zeros(len(norm), len(lengths)), norm], 1)
        if name not in queries.grads:
            raise ValueError(
                f"less: train leaf '{name}' has no query gradient; capture both with one selection."
            )
        dots = gram_leaf(leaf, queries.grads[name], name=name, hardware=how.hardware)
        return torch.cat([dots, norm], 1)

    queries = collect(seen(query), operation="less")
    rules = {name: _rule(o, how.variant) for name, o in record.optimizers.items()}
    moves = transformed(targeted(train, how.target), directed(rules, record.states, centered=how.centered))
    lengths = norms(queries.grads, hardware=how.hardware)
    rows: list[tuple[Examples, Tensor]] = []
    for examples, value in row_sums(measure, seen(moves)):
        one_fingerprint(queries.examples.fingerprint, examples, "less")
        if value is not None and len(examples):
            scale = value[:, -1:].clamp_min(0).sqrt() * lengths
            cosines = torch.where(
                scale > 0, value[:, :-1] / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0
            )
            rows.append((examples, rate * cosines))
    return rows, queries.examples.ids


def _rule(optimizer: Optimizer, variant: Variant) -> Optimizer:
    if variant == "official" and optimizer.kind in ("adam", "adamw"):
        return replace(optimizer, kind="less")
    return optimizer


def _rates(records: Sequence[Step], given: Sequence[float] | None, variant: Variant) -> list[float]:
    if variant not in ("torch", "official"):
        raise ValueError(f"less: variant: got {variant!r}; expected 'torch' or 'official'.")
    found: list[float] = list(given or ())
    for record in records if given is None else ():
        rates = {o.lr for o in record.optimizers.values()}
        if len(rates) != 1:
            raise ValueError(
                f"less: step {record.step} has learning rates {sorted(rates)}; expected one. Use less_checkpoints with "
                "learning_rates=."
            )
        found += rates
    return found if variant == "torch" else [rate / sum(found) for rate in found]


def _about(how: Less) -> dict[str, str]:
    return {"method": "less", "variant": how.variant, "target": how.target, "unit": "learning rate x cosine"}
