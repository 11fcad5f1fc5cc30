"""Methods along a run that `capture` recorded from a training loop: accumulation, clipping, groups, a schedule."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from attrax.core import Recorded
from attrax.frontends import (
    capture,
    causal_lm,
    classification,
    functional,
    live,
    open_trajectory,
    record,
    store,
)
from attrax.frontends.runs.replay import replay
from attrax.frontends.runs.retraining import Recipe, query_losses, train
from attrax.methods import magic, shapley, trajectory_influence

from ..core.dense import assert_same
from ..core.toys import generator, normal, unchecked
from ..frontends.llms import llm
from .runs import recorded_step, thinned

LOSS = classification()
GEN = generator(5)
DATA = [{"x": normal(GEN, 3, 4), "y": torch.randint(0, 3, (3,), generator=GEN)} for _ in range(10)]
QUERIES = [{"x": normal(GEN, 2, 4), "y": torch.tensor([0, 2]), "example_ids": ("p", "q")}]
BATCHES = {step: DATA[2 * step : 2 * step + 2] for step in range(5)}


@pytest.fixture(autouse=True)
def quick():
    with unchecked():
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def trained(
    model: nn.Module, weigh: Mapping[tuple[int, int], torch.Tensor] = MappingProxyType({})
) -> nn.Module:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is m] for m in (True, False))
    groups = [{"params": vectors, "weight_decay": 0.0, "lr": 0.01}, {"params": matrices}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    for step, data in BATCHES.items():
        for micro, batch in enumerate(data):
            losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
            (losses * weigh.get((step, micro), 1)).mean().div(2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def weights(inputs: Any, rows: int) -> Any:
    return torch.full((rows,), 0.5 / rows, dtype=torch.float64), torch.ones(rows, dtype=torch.int64)


def test_a_recorded_loop(tmp_path):
    model = net()
    with (
        store(tmp_path, keep_factored=True) as sink,
        capture(model, sinks=[sink], trajectory=record(tmp_path), loss=weights),
    ):
        trained(model)
    run, query = open_trajectory(tmp_path), live(model.eval(), QUERIES, LOSS)
    again = replay(model, BATCHES, LOSS, run)
    exact = magic(again, query)
    same_hessian = trajectory_influence(run, query, curvature=again.hvp)
    assert_same(same_hessian.values, exact.values)
    assert (exact.steps, exact.micros) == (same_hessian.steps, same_hessian.micros)

    def losses(w: float) -> torch.Tensor:
        part = torch.tensor([1, w, 1], dtype=torch.float64)
        weigh = {(1, 1): part}
        return LOSS(trained(net(), weigh), QUERIES[0]).detach()

    slope = (losses(1 + 1e-4) - losses(1 - 1e-4)) / 2e-4
    assert_same(exact.values[10], -slope, 1e-6)
    assert all(run.step(k).clip.coefficient < 1 for k in run.steps)
    few = thinned(Recorded([run.step(k) for k in run.steps], []), 2)
    assert_same(magic(replay(model, BATCHES, LOSS, few), query).values, exact.values)
    queries = again.queries(QUERIES)
    for scores in (trajectory_influence(run, query), shapley(run, queries, hvp=queries.hvp)):
        assert (scores.ids, scores.steps) == (
            same_hessian.ids,
            exact.steps,
        ) and scores.values.isfinite().all()
    assert_same(shapley(run, queries).values, shapley(again, queries).values)


def documents(lengths: list[int], first: int = 0) -> dict[str, Any]:
    width = max(lengths)
    ids = torch.randint(3, 17, (len(lengths), width), generator=GEN)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    names = tuple(f"d{first + k}" for k in range(len(lengths)))
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "example_ids": names}


def test_a_language_model():
    """Attention, norms, a tied embedding; ragged documents in a mean over tokens."""
    loss, data = causal_lm(), {0: [documents([5, 3])], 1: [documents([4, 6], 2), documents([3], 4)]}
    queries = [documents([4, 5], 90)]
    plan = Recipe(
        llm("gpt2", "sdpa"),
        data,
        loss,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.1),
        reduction="token_mean",
        max_norm=1.0,
    )
    records: list[Any] = []
    model = train(plan, before_step=lambda n, m, o, c: records.append(recorded_step(n, m, o, c))).eval()
    run = replay(model, data, loss, Recorded(records, []), reduction="token_mean")
    query = live(model, queries, loss)
    exact = magic(run, query)
    assert exact.ids == ("d0", "d1", "d2", "d3", "d4") and exact.micros == (0, 0, 0, 0, 1)
    assert_same(trajectory_influence(run, query, curvature=run.hvp).values, exact.values)

    def losses(w: float) -> torch.Tensor:
        return query_losses(train(plan, lambda i, step: w if i == "d3" else 1.0).eval(), queries, loss)

    slope = (8 * (losses(1 + 1e-3) - losses(1 - 1e-3)) - (losses(1 + 2e-3) - losses(1 - 2e-3))) / 12e-3
    assert_same(exact.values[3], -slope, 1e-6)
    fisher = trajectory_influence(run, query, unit="tokens")
    built = replay(
        model, data, loss, run.trajectory, reduction="token_mean", source=partial(functional, how="loop")
    )
    assert_same(
        fisher.values,
        trajectory_influence(built, functional(model, queries, loss, how="loop"), unit="tokens").values,
    )
