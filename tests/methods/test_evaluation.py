"""Evaluation of scores against retraining: definitions, known answers, and a whole round on a small run."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats

from attrax.core import Scores
from attrax.frontends.runs.replay import replay
from attrax.frontends.runs.retraining import query_losses, removal_effects, train, without
from attrax.methods.evaluation import above_floor, agreement, bootstrap, linearity
from attrax.methods.groups import group_scores, lds, random_subsets
from attrax.methods.magic import magic
from attrax.methods.metrics import auroc

from ..core.dense import assert_same
from ..core.toys import generator, named, normal, refused
from .runs import LOSS, QUERIES, batches, recipe, run


def table(rows: int, columns: int, seed: int = 0) -> Scores:
    queries = tuple(f"q{k}" for k in range(columns))
    return Scores(normal(generator(seed), rows, columns), named(rows), queries)


def test_agreement_is_a_correlation_for_each_query():
    scores, effects = table(8, 3), table(8, 3, 1)
    expected = [
        stats.spearmanr(x, y).statistic for x, y in zip(scores.values.T, effects.values.T, strict=True)
    ]
    assert_same(agreement(scores, effects), torch.tensor(expected))
    order = list(reversed(effects.ids))
    turned = effects.in_order(order).query("q2", "q0")
    assert_same(agreement(scores, turned), torch.tensor(expected)[[2, 0]])
    scaled = replace(
        effects, values=effects.values * torch.tensor([1.0, 1e3, 1e-3]) + torch.tensor([0.0, 5, 1])
    )
    assert_same(agreement(scores, scaled), torch.tensor(expected))


def test_uses_of_an_example_add_up():
    scores = Scores(torch.tensor([[1.0], [2.0], [3.0], [-9.0]]), ("a", "b", "c", "b"), ("q",), (0, 0, 1, 1))
    effects = Scores(torch.tensor([[2.0], [1.0], [3.0]]), ("a", "b", "c"), ("q",))
    assert agreement(scores, effects).tolist() == pytest.approx([1.0])
    assert group_scores(scores, {"ab": ["a", "b"], "c": ["c"]}).values.flatten().tolist() == [-6.0, 3.0]


def test_subsets_with_higher_sums_have_lower_losses():
    scores, gen = table(10, 2), generator(3)
    subsets = random_subsets(scores.ids, 0.5, 30, seed=4)
    assert {len(x) for x in subsets.values()} == {5} and len(set(subsets.values())) > 20
    assert all(tuple(sorted(x, key=scores.ids.index)) == x for x in subsets.values())
    sums = torch.stack([scores.in_order(x).values.sum(0) for x in subsets.values()])
    losses = Scores(2 - 3 * sums, tuple(subsets), scores.query_ids)
    assert lds(scores, subsets, losses).tolist() == pytest.approx([1.0, 1.0])
    noisy = replace(losses, values=losses.values + 3 * normal(gen, *losses.values.shape))
    expected = [stats.spearmanr(x, -y).statistic for x, y in zip(sums.T, noisy.values.T, strict=True)]
    assert_same(lds(scores, subsets, noisy), torch.tensor(expected))
    counts = Counter(i for x in random_subsets(scores.ids, 0.5, 400).values() for i in x)
    assert set(counts) == set(scores.ids) and min(counts.values()) > 150


def test_bootstrap_intervals_cover():
    """Of a known correlation; wider than over queries alone, which share their removals."""
    rho, inside = 0.6, 0
    spearman_of = 6 / torch.pi * torch.asin(torch.tensor(rho / 2))
    for seed in range(12):
        gen = generator(seed)
        x = normal(gen, 40, 3)
        y = rho * x + (1 - rho**2) ** 0.5 * normal(gen, 40, 3)
        names = (named(40), ("p", "q", "r"))
        low, high = bootstrap(Scores(x, *names), Scores(y, *names), resamples=100, seed=seed)
        inside += low <= spearman_of <= high
        assert 0 < high - low < 0.8
    assert inside >= 9
    with refused("bootstrap", "2 removals"):
        bootstrap(table(2, 1), table(2, 1, 1))


def test_the_linear_datamodeling_score_is_that_of_dattri():
    dattri = pytest.importorskip("dattri.metric", reason="extra 'dattri'")
    scores, better = table(12, 3), table(9, 3, 1)
    subsets = random_subsets(scores.ids, 0.5, 9, seed=2)
    better = replace(better, ids=tuple(subsets), values=better.values.round())
    index = torch.tensor([[scores.ids.index(i) for i in subset] for subset in subsets.values()])
    expected, _ = dattri.lds(scores.values.float(), (better.values.float(), index))
    assert_same(lds(scores, subsets, replace(better, values=-better.values)), expected.double(), 1e-6)


def test_auroc_is_that_of_dattri_where_no_values_are_tied():
    """With ties dattri 0.3 depends on the order of the tied examples: it is not used."""
    dattri = pytest.importorskip("dattri.metric", reason="extra 'dattri'")
    values, positive = table(12, 1).values[:, 0], torch.arange(12) < 4
    found, _ = dattri.mislabel_detection_auc(values.float(), positive.long())
    assert auroc(values, positive) == pytest.approx(float(found), abs=1e-6)
    same, _ = dattri.mislabel_detection_auc(torch.ones(12), positive.long())
    assert auroc(torch.ones(12), positive) == 0.5 != float(same)


def test_auroc_with_ties():
    values = torch.tensor([0.0, 1, 1, 2, 2, 2, 5])
    positive = torch.tensor([0, 1, 0, 1, 0, 1, 0]).bool()
    pairs = [(v > w) + 0.5 * (v == w) for v in values[positive] for w in values[~positive]]
    assert auroc(values, positive) == pytest.approx(float(torch.stack(pairs).mean()))
    with refused("auroc", "0 positive"):
        auroc(values, torch.zeros(7, dtype=torch.bool))


RUN = run(recipe(torch.optim.SGD, lr=0.1, momentum=0.5, batches=batches(4, (6,), repeated=True)))
UNITS = tuple(i for step in (0, 1) for b in RUN.recipe.batches[step] for i in b["example_ids"])


def exact() -> Scores:
    return magic(replay(RUN.recipe.model, RUN.recipe.batches, LOSS, RUN.trajectory), RUN.query)


def test_metagradients_foretell_retraining():
    """Examples used twice are removed twice; effects grow in proportion for small parts of a weight."""
    scores = exact()
    effects = removal_effects(RUN.recipe, {i: [i] for i in UNITS}, QUERIES)
    assert effects.ids == UNITS and effects.query_ids == ("p", "q", "r")
    assert agreement(scores, effects).min() > 0.9

    def part(h: float) -> Scores:
        weights = {i: lambda name, step, i=i: 1.0 - h * (name == i) for i in UNITS}
        return removal_effects(RUN.recipe, weights, QUERIES)

    gaps = linearity(scores, {1.0: effects, 0.1: part(0.1), 0.001: part(0.001)})
    assert gaps[1.0] > 3 * gaps[0.1] > 30 * gaps[0.001] and gaps[0.001] < 1e-3
    one = removal_effects(RUN.recipe, {"once": lambda n, s: float((n, s) != ("x0", 0))}, QUERIES)
    assert (one.values[0] - effects.values[0]).abs().max() > 0.1 * one.values.abs().max()


def test_groups_add_up_to_first_order():
    scores = exact()
    groups = random_subsets(UNITS, 0.25, 10)
    effects = removal_effects(RUN.recipe, groups, QUERIES)
    assert agreement(group_scores(scores, groups), effects).mean() > 0.9


def test_effects_are_far_above_the_floor():
    effects = removal_effects(RUN.recipe, {i: [i] for i in UNITS[:4]}, QUERIES)
    nothing = removal_effects(RUN.recipe, {"none": []}, QUERIES)
    assert not nothing.values.any(), "a run repeats bit by bit"
    turned = {
        k: [
            {n: tuple(reversed(v)) if isinstance(v, tuple) else v.flip(0) for n, v in b.items()} for b in data
        ]
        for k, data in RUN.recipe.batches.items()
    }
    other = query_losses(train(replace(RUN.recipe, batches=turned)), QUERIES, LOSS)
    floor = replace(nothing, values=(other - query_losses(train(RUN.recipe), QUERIES, LOSS))[None])
    assert above_floor(effects, floor) > 1e6 and above_floor(effects, nothing) == float("inf")


@pytest.mark.parametrize("renormalized", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_weight_of_zero_is_training_without_the_row(optimizer, renormalized):
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    whole = recipe(make, lr=0.05, batches=batches(3, (3, 2)), renormalized=renormalized, max_norm=0.5)
    gone = train(whole, without(["x1", "x7"]))

    def cut(batch):
        keep = [k for k, i in enumerate(batch["example_ids"]) if i not in ("x1", "x7")]
        rest = {n: v[keep] for n, v in batch.items() if isinstance(v, torch.Tensor)}
        return {**rest, "example_ids": tuple(batch["example_ids"][k] for k in keep)}

    short = {k: [cut(b) for b in data] for k, data in whole.batches.items()}
    by_hand = literal(whole, short, dict.fromkeys(short, 5) if not renormalized else None)
    for a, b in zip(gone.parameters(), by_hand.parameters(), strict=True):
        assert_same(a.detach(), b.detach())


def literal(whole, data, denominators):
    """The loop written out: mean losses over what is left, or sums over fixed denominators."""
    model = copy.deepcopy(whole.model)
    optimizer = whole.optimizer(model)
    for step, micro in data.items():
        optimizer.zero_grad()
        B = sum(len(b["y"]) for b in micro) if denominators is None else denominators[step]
        for b in micro:
            (torch.nn.functional.cross_entropy(model(b["x"]), b["y"], reduction="sum") / B).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), whole.max_norm)
        optimizer.step()
    return model


def test_losses_of_queries_are_computed_in_float64():
    """A float32 model: differences far below the rounding of its own losses are seen."""
    model = copy.deepcopy(run(recipe(batches=batches(1))).model)
    exact = query_losses(model, QUERIES, LOSS)
    single = [
        {k: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for k, x in QUERIES[0].items()}
    ]
    found = query_losses(copy.deepcopy(model).float(), single, LOSS)
    rounded = copy.deepcopy(model).float().double()
    assert_same(found, query_losses(rounded, [{**single[0], "x": single[0]["x"].double()}], LOSS), 1e-14)
    assert found.dtype == torch.float64 and float((found - exact).abs().max()) > 0
