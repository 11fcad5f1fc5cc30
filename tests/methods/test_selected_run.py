"""Methods along a run that trained on the examples that a selection kept: they see the run as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Recorded, take_block
from attrax.frontends import capture, classification, live, open_trajectory, record, select, store
from attrax.frontends.loop.selection import Decision
from attrax.frontends.runs.replay import replay
from attrax.methods import drop_fraction, dvemb, less, magic, trajectory_influence

from ..core.dense import assert_same
from ..core.toys import generator, normal, unchecked

LOSS = classification()
GEN = generator(7)
STEPS = 3


def batch(rows: int) -> dict[str, Any]:
    x, y = normal(GEN, rows, 4), torch.randint(0, 3, (rows,), generator=GEN)
    return {"x": x, "y": y, "example_ids": tuple(f"{float(v):.12f}" for v in x[:, 0])}


BATCHES = {step: [batch(4), batch(3)] for step in range(STEPS)}
TARGET, QUERIES = batch(2), [batch(2)]


@pytest.fixture(autouse=True)
def quick():
    with unchecked():
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def trained(model: nn.Module, weights: dict[tuple[int, int], Tensor] | None = None) -> nn.Module:
    """Two micro-batches a step, the mean of each divided by two; clipped by norm; or with the weights given."""
    moving = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4)
    for step, data in BATCHES.items():
        for micro, each in enumerate(data):
            losses = nn.functional.cross_entropy(model(each["x"]), each["y"], reduction="none")
            c = (
                torch.full_like(losses, 0.5 / len(losses)).detach()
                if weights is None
                else weights[step, micro]
            )
            (losses * c).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        moving.step()
        moving.zero_grad()
    return model


def half(inputs: Any, rows: int) -> Any:
    return torch.full((rows,), 0.5 / rows, dtype=torch.float64), torch.ones(rows, dtype=torch.int64)


def names(inputs: Any) -> list[str]:
    return [f"{float(v):.12f}" for v in inputs["input"][:, 0]]


def selected(path: Any, **options: Any) -> tuple[nn.Module, Any, list[Decision]]:
    model, decisions = net(), list[Decision]()
    keep = select(TARGET, drop_fraction(0.5), loss=LOSS, sink=decisions.append, **options)
    sink, steps = store(path, keep_factored=True), record(path)
    with sink, capture(model, sinks=[sink], trajectory=steps, after_backward=[keep], loss=half, ids=names):
        trained(model)
    return model.eval(), open_trajectory(path), decisions


def kept_weights(decisions: list[Decision], renormalized: bool) -> dict[tuple[int, int], Tensor]:
    keep = {(d.step, d.micro): torch.tensor(d.keep, dtype=torch.float64) for d in decisions}
    return {key: k / 2 / (k.sum() if renormalized else len(k)) for key, k in keep.items()}


@pytest.mark.parametrize("denominator", ["fixed", "examples"])
def test_a_selected_run_is_the_run_on_the_kept_examples(denominator, tmp_path):
    """Scores of all methods equal those of a run whose loss has the decisions as weights; the exact one is a slope."""
    model, run, decisions = selected(tmp_path / "run", denominator=denominator)
    weights = kept_weights(decisions, denominator == "examples")
    steps, blocks, alone = [], [], net()
    weigh = iter([w for _, w in sorted(weights.items())])
    how = {"loss": lambda inputs, rows: (next(weigh), torch.ones(rows, dtype=torch.int64))}
    with capture(alone, sinks=[blocks.append], trajectory=record(steps.append), ids=names, **how):  # type: ignore
        trained(alone, weights)
    assert all(
        (p - q).abs().max() < 1e-12 for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )
    query = live(model, QUERIES, LOSS)
    again = replay(model, BATCHES, LOSS, run, reduction="recorded")
    exact = magic(again, query)
    kept = [(i, d.step, d.micro) for d in decisions for i in d.kept]
    assert list(zip(exact.ids, exact.steps, exact.micros, strict=True)) == kept
    fisher = trajectory_influence(run, query)
    assert fisher.ids == exact.ids
    assert_same(trajectory_influence(run, query, curvature=again.hvp).values, exact.values)
    assert_same(trajectory_influence(again, query).values, fisher.values)
    assert_same(dvemb(run, query).values, dvemb(again, query).values)
    whole = Recorded(steps, [take_block(block, block.examples.weight != 0) for block in blocks])
    assert_same(trajectory_influence(whole, query).values, fisher.values, 1e-8)
    assert_same(dvemb(whole, query).values, dvemb(run, query).values, 1e-8)
    parallel = replay(model, BATCHES, LOSS, whole, reduction="recorded")
    found, right = (less(r, q.queries(QUERIES)) for r, q in ((run, again), (whole, parallel)))
    assert_same(found.values, right.values, 1e-8)

    def losses(change: float) -> Tensor:
        other = {key: w.clone() for key, w in weights.items()}
        row = decisions[1].keep.index(True)
        other[0, 1][row] *= 1 + change
        return LOSS(trained(net(), other), QUERIES[0]).detach()

    slope = (losses(1e-5) - losses(-1e-5)) / 2e-5
    assert_same(exact.values[kept.index((decisions[1].kept[0], 0, 1))], -slope, 1e-6)


def test_layers_that_decide_apart_leave_no_loss_to_replay(tmp_path):
    """Scores that need no loss are those of the dense sums; curvature and replays are refused."""
    model, run, decisions = selected(tmp_path, scope="layer")
    query = live(model, QUERIES, LOSS)
    with pytest.raises(ValueError, match="every layer selected examples of its own"):
        magic(replay(model, BATCHES, LOSS, run, reduction="recorded"), query)
    for method in (dvemb, trajectory_influence):
        with pytest.raises(ValueError, match="every layer selected examples of its own"):
            method(run, query)
    assert len({d.keep for d in decisions}) > 1


def test_a_step_that_keeps_nothing_has_no_examples(tmp_path):
    """Nothing is used in the second step: no rows, and the steps before have their effect through it."""
    model, decisions = net(), list[Decision]()

    def rule(scores: Tensor, interactions: Any) -> Tensor:
        return torch.full_like(scores, len(decisions) not in (2, 3), dtype=torch.bool)

    keep = select(TARGET, rule, loss=LOSS, sink=decisions.append)
    sink, steps = store(tmp_path, keep_factored=True), record(tmp_path)
    with sink, capture(model, sinks=[sink], trajectory=steps, after_backward=[keep], loss=half, ids=names):
        trained(model)
    run, query = open_trajectory(tmp_path), live(model.eval(), QUERIES, LOSS)
    again = replay(model, BATCHES, LOSS, run, reduction="recorded")
    assert set(trajectory_influence(run, query).steps) == {0, 2} == set(dvemb(run, query).steps)
    exact = magic(again, query)
    assert_same(trajectory_influence(run, query, curvature=again.hvp).values, exact.values)


def test_batches_of_another_run_are_refused(tmp_path):
    model, run, _ = selected(tmp_path)
    other = {**BATCHES, 1: BATCHES[0]}
    with pytest.raises(ValueError, match="step 1 was trained on examples that its batches do not have"):
        list(replay(model, other, LOSS, run, reduction="recorded").gradients(1).map(lambda n, x, e: None))
