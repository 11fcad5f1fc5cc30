"""TracIn along a run and over checkpoints, as the sums that define it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attrax.core import Block, Blocks, Source, materialized, scale_examples
from attrax.frontends import functional, replay
from attrax.methods import Stepped, graddot, tracin, tracin_checkpoints

from ..core.dense import assert_same, vectors
from ..core.toys import SMALL, block, cut, generator, named, normal, refused, source, tree
from .runs import LOSS, QUERIES, at, batches, recipe, run

STEPS = (0, 1, 2)
RATES = {0: 0.1, 1: 0.2, 2: 0.4}
TRAIN = {step: replace(SMALL, seed=step).trees()[0] for step in STEPS}
QUERY = {step: replace(SMALL, seed=step).trees()[1] for step in STEPS}
SEEN = {0: ("a", "b", "c"), 1: ("b", "d", "a"), 2: ("c", "a", "b")}


@dataclass(frozen=True)
class Recorded:
    """Blocks of a run, by step."""

    blocks: tuple[Block, ...]

    @property
    def reiterable(self) -> bool:
        return True

    def map(self, visit: Any) -> Any:
        return Blocks(self.blocks).map(visit)

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({b.examples.step for b in self.blocks}))

    def at(self, step: int) -> Source:
        return Blocks([b for b in self.blocks if b.examples.step == step])


def train_run(c: Mapping[int, torch.Tensor] | None = None, **about: Any) -> Blocks:
    """Two micro-batches a step; leaves hold c G."""
    blocks: list[Block] = []
    for step in STEPS:
        weight = torch.ones(3, dtype=torch.float64) if c is None else c[step]
        parts = cut(TRAIN[step].map(lambda _, leaf, w=weight: scale_examples(leaf, w)), 2, 1)
        for micro, (grads, s) in enumerate(zip(parts, (slice(0, 2), slice(2, 3)), strict=True)):
            known = dict(
                step=step, micro=micro, fingerprint=f"p{step}", learning_rate=RATES[step], weight=weight[s]
            )
            blocks.append(block(grads, SEEN[step][s], **{**known, **about}))
    return Blocks(blocks)


def query_run(steps: tuple[int, ...] = STEPS, c: float = 1.0) -> Recorded:
    """Query gradients recorded with a loss that weighed each by c."""
    weight = torch.full((2,), c, dtype=torch.float64)
    captured = {k: QUERY[k].map(lambda _, leaf: scale_examples(leaf, weight)) for k in steps}
    about = dict(weight=weight)
    return Recorded(
        tuple(block(g, ("p", "q"), step=k, fingerprint=f"p{k}", **about) for k, g in captured.items())
    )


def expected_rows(
    c: Mapping[int, torch.Tensor] | None = None, rates: Mapping[int, float] = RATES
) -> torch.Tensor:
    weights = {k: torch.ones(3, dtype=torch.float64) for k in STEPS} if c is None else c
    return torch.cat(
        [rates[k] * weights[k][:, None] * (vectors(TRAIN[k]) @ vectors(QUERY[k]).T) for k in STEPS]
    )


def test_rows_are_learning_rate_times_inner_products_at_their_step():
    s = tracin(train_run(), query_run())
    assert_same(s.values, expected_rows())
    assert s.ids == SEEN[0] + SEEN[1] + SEEN[2] and s.query_ids == ("p", "q")
    assert (s.steps, s.micros) == ((0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 0, 1) * 3)
    assert s.about["method"] == "tracin" and s.about["target"] == "as_trained"


def test_examples_add_up_over_steps():
    folded, count = tracin(train_run(), query_run()).per_example()
    rows, ids = expected_rows(), SEEN[0] + SEEN[1] + SEEN[2]
    assert dict(zip(folded.ids, count.tolist(), strict=True)) == {"a": 3, "b": 3, "c": 2, "d": 1}
    for i, value in zip(folded.ids, folded.values, strict=True):
        assert_same(value, rows[[k for k, j in enumerate(ids) if j == i]].sum(0))


def test_examples_are_weighed_as_their_step_did_and_queries_are_not():
    c = {k: torch.linspace(0.1, 1.0, 3, dtype=torch.float64) * (k + 1) for k in STEPS}
    assert_same(tracin(train_run(c), query_run()).values, expected_rows(c))
    assert_same(tracin(train_run(c), query_run(c=0.25)).values, expected_rows(c))
    assert_same(tracin(train_run(c), query_run(), target="sum").values, expected_rows())


def test_given_learning_rates_replace_recorded_ones():
    rates = {0: 1.0, 1: 0.0, 2: -2.0}
    s = tracin(train_run(), query_run(), learning_rates=rates)
    assert_same(s.values, expected_rows(rates=rates))


def test_every_parameter_group_has_its_own_rate_along_a_trajectory():
    """The decrease of the query loss, to first order, is the inner product with the step that was taken."""

    def groups(model):
        weights, biases = (
            [p for n, p in model.named_parameters() if n.endswith(e)] for e in ("weight", "bias")
        )
        return torch.optim.SGD([{"params": weights, "lr": 0.3}, {"params": biases, "lr": 0.1}])

    r = run(replace(recipe(batches=batches(3, (3, 2))), optimizer=groups))
    along = replay(r.recipe.model, r.recipe.batches, LOSS, r.trajectory, source=functional)
    s = tracin(along, along.queries(QUERIES))
    for k, record in enumerate(r.trajectory.records[:-1]):
        moved = {n: p - record.parameters[n] for n, p in r.trajectory.records[k + 1].parameters.items()}
        model = at(r.model, record.parameters)
        for q, name in enumerate(s.query_ids):
            loss = LOSS(model, QUERIES[0])[q]
            v = dict(zip(moved, torch.autograd.grad(loss, list(model.parameters())), strict=True))
            change = torch.stack([(v[n] * moved[n]).sum() for n in moved]).sum()
            rows = torch.tensor([step == record.step for step in s.steps])
            assert_same(s.query(name).values[rows].sum(), -change)


def test_scores_add_up_to_the_decrease_of_the_query_loss():
    """Full-batch gradient descent with a small rate: the sum over examples and steps telescopes."""
    gen = generator(2)
    X, y, xq, yq = normal(gen, 5, 3), normal(gen, 5), normal(gen, 3), normal(gen, ())
    theta, rate = normal(gen, 3), 1e-3
    train, query, losses = [], [], []
    for step in range(50):
        residual = X @ theta - y
        losses.append(float(0.5 * (xq @ theta - yq) ** 2))
        about = dict(step=step, fingerprint=str(step), learning_rate=rate)
        sides = (X * residual[:, None], (xq * (xq @ theta - yq)).unsqueeze(0))
        grads = [tree(w=materialized("w", g)) for g in sides]
        train.append(block(grads[0], named(5), **about))
        query.append(block(grads[1], ("q",), **about))
        theta = theta - rate * (X * residual[:, None]).sum(0)
    s = tracin(Blocks(train), Recorded(tuple(query)))
    decrease = losses[0] - float(0.5 * (xq @ theta - yq) ** 2)
    assert float(s.values.sum()) == pytest.approx(decrease, rel=0.02)


def checkpoints() -> list[tuple[Source, Source, float]]:
    sides = ((source(TRAIN[k], fingerprint=f"p{k}"), source(QUERY[k], fingerprint=f"p{k}")) for k in STEPS)
    return [(train, query, RATES[k]) for k, (train, query) in zip(STEPS, sides, strict=True)]


def test_checkpoints_add_up_with_their_learning_rates():
    s = tracin_checkpoints(checkpoints())
    expected = sum(RATES[k] * (vectors(TRAIN[k]) @ vectors(QUERY[k]).T) for k in STEPS)
    assert isinstance(expected, torch.Tensor)
    assert_same(s.values, expected)
    assert (s.ids, s.steps) == (named(3), ())
    assert s.about["method"] == "tracin_checkpoints" and s.about["checkpoints"] == "3"
    one = tracin_checkpoints(checkpoints()[:1])
    assert_same(one.values, RATES[0] * graddot(source(TRAIN[0]), source(QUERY[0])).values)


def test_checkpoints_must_hold_the_same_examples_and_queries():
    other = source(TRAIN[1])
    renamed = Blocks([replace(b, examples=replace(b.examples, ids=("x0", "x1", "x9"))) for b in other.blocks])
    query = source(QUERY[1])
    for train, q in ((renamed, query), (other, source(cut(QUERY[1], 1)[0]))):
        with refused("tracin_checkpoints: examples or queries differ between checkpoints"):
            tracin_checkpoints([checkpoints()[0], (train, q, 0.1)])
    with refused("tracin_checkpoints: no checkpoints given"):
        tracin_checkpoints([])


def test_queries_must_know_their_steps():
    assert isinstance(query_run(), Stepped) and not isinstance(source(QUERY[0]), Stepped)
    with refused("tracin: the query source does not know its optimizer steps", "tracin_checkpoints"):
        tracin(train_run(), source(QUERY[0]))


def test_every_scored_step_needs_queries_at_its_parameters():
    with refused("tracin: no query gradients at step 1", "[0, 2]", "every step that is scored"):
        tracin(train_run(), query_run((0, 2)))
    with refused("tracin: at step 0", "different parameters", "'elsewhere'", "Record both in one run"):
        tracin(train_run(fingerprint="elsewhere"), query_run())


def test_queries_must_stay_the_same():
    first, *rest = query_run().blocks
    swapped = replace(first, examples=replace(first.examples, ids=("q", "p")))
    with refused("tracin: the queries at step 1 differ from those of earlier steps"):
        tracin(train_run(), Recorded((swapped, *rest)))


def test_learning_rates_must_be_known():
    with refused("tracin: no learning rate is known for step 0", "learning_rates={step: lr}"):
        tracin(train_run(learning_rate=None), query_run())
    with refused("tracin: no learning rate is known for step 2"):
        tracin(train_run(), query_run(), learning_rates={0: 0.1, 1: 0.1})


def without(run: Recorded | Blocks, name: str) -> list[Block]:
    return [replace(b, grads=b.grads.map(lambda k, leaf: leaf if k != name else None)) for b in run.blocks]


def test_leaves_must_match():
    with refused("tracin: train leaf 'norm' has no query gradient", "one selection"):
        tracin(train_run(), Recorded(tuple(without(query_run(), "norm"))))
    with refused("tracin: ", "no train block has: ['norm']", "one selection"):
        tracin(Blocks(without(train_run(), "norm")), query_run())


def test_an_empty_run_is_refused():
    with refused("tracin: the run yielded no examples"):
        tracin(Blocks([]), query_run())
