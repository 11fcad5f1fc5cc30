"""`attrax evaluate` against scipy on made-up files."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from typer.testing import CliRunner

from attrax.cli import app
from attrax.core import Scores
from attrax.evaluate import judge
from attrax.frontends.data.tables import write_scores

from .test_cli import good, refused

EXAMPLES = tuple(f"e{n:02}" for n in range(12))
QUERIES = ("q0", "q1", "q2", "q3")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """`table(name, values, …)` writes a scores file in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def write(name, values, ids=EXAMPLES, queries=QUERIES, method="made up"):
        values = torch.as_tensor(np.asarray(values), dtype=torch.float64)
        return write_scores(
            Scores(values, tuple(ids), tuple(queries), about={"method": method}), tmp_path / name
        )

    return write


@pytest.fixture
def numbers(rng):
    """Small integers, so that there are ties: scores and effects that go along with them."""
    scores = torch.randint(0, 5, (len(EXAMPLES), len(QUERIES)), generator=rng)
    return scores.numpy(), (scores + torch.randint(0, 4, scores.shape, generator=rng)).numpy()


def call(*words):
    return CliRunner().invoke(app, ["evaluate", *map(str, words), "--resamples", "100"])


def results(*words):
    """What --json says, by file."""
    good(call(*words, "--json", "out.json"))
    with open("out.json", encoding="utf-8") as file:
        return {one["scores"]: one for one in json.load(file)["results"]}


def by_hand(x, y):
    return [spearmanr(x[:, q], y[:, q]).statistic for q in range(x.shape[1])]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "h5"])
def test_correlations_are_scipys_ties_included(table, numbers, suffix):
    scores, effects = numbers
    table(f"s.{suffix}", scores)
    rows, columns = [7, 0, 3, 11, 4, 9, 1], [2, 0, 3]
    there = effects[rows][:, columns]
    table(
        f"effects.{suffix}", there, [EXAMPLES[i] for i in rows], [QUERIES[q] for q in columns], "retraining"
    )
    found = results(f"s.{suffix}", "--effects", f"effects.{suffix}")[f"s.{suffix}"]
    expected = by_hand(scores[rows][:, columns], there)
    assert list(found["by_query"]) == ["q2", "q0", "q3"]
    assert np.allclose(list(found["by_query"].values()), expected, rtol=0, atol=1e-12)
    assert abs(found["spearman"] - np.mean(expected)) < 1e-12
    assert (found["removals"], found["queries"], found["constant"]) == (7, 3, {})
    assert found["method"] == "made up"


def test_a_helpful_example_is_one_without_which_the_loss_rises(table, rng):
    loss, without = torch.rand(1, 4, generator=rng), torch.rand(12, 4, generator=rng)
    table("effects.csv", without - loss)
    table("same.csv", without - loss)
    table("opposite.csv", loss - without)
    found = results("opposite.csv", "same.csv", "-e", "effects.csv")
    for name, expected in (("same.csv", 1.0), ("opposite.csv", -1.0)):
        assert [found[name]["spearman"], *found[name]["interval"]] == pytest.approx([expected] * 3)
    assert list(found) == ["same.csv", "opposite.csv"]


def test_a_result_folder_and_uses_at_several_steps(table, numbers, tmp_path):
    scores, effects = numbers
    (tmp_path / "result").mkdir()
    table("result/scores.parquet", np.concatenate([scores - 1.0, np.ones_like(scores)]), EXAMPLES * 2)
    table("effects.parquet", effects)
    found = results("result", "-e", "effects.parquet")["result"]
    assert abs(found["spearman"] - np.mean(by_hand(scores, effects))) < 1e-12


def test_interval_is_that_of_a_bootstrap_over_removals_and_queries(rng):
    x, noise = torch.randn(2, 12, 4, generator=rng, dtype=torch.float64)
    y = x + noise * torch.tensor([0.1, 0.5, 1.0, 3.0])
    gen, means = np.random.default_rng(0), []
    for _ in range(800):
        rows, columns = gen.integers(0, 12, 12), gen.integers(0, 4, 4)
        means.append(np.mean(by_hand(x[rows][:, columns], y[rows][:, columns])))
    scores, effects = (Scores(values, EXAMPLES, QUERIES) for values in (x, y))
    interval = judge({"s": scores}, effects, resamples=800)[0].interval
    assert np.allclose(interval, np.quantile(means, [0.025, 0.975]), rtol=0, atol=0.05)


def test_scores_of_a_named_set_are_the_sum_of_its_members(table, numbers, tmp_path):
    scores, effects = numbers
    groups = {"left": ["e00", "e01", "e02"], "right": ["e05", "e03"], "other": ["e02", "e11"]}
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    table("s.csv", scores)
    table("effects.csv", effects[:4], ["left", "e07", "right", "other"])
    found = results("s.csv", "-e", "effects.csv", "-g", "groups.json")["s.csv"]
    sums = np.stack([scores[:3].sum(0), scores[7], scores[5] + scores[3], scores[2] + scores[11]])
    expected = by_hand(sums, effects[:4])
    assert np.allclose(list(found["by_query"].values()), expected, atol=1e-12)


def test_lds_asks_for_low_losses_of_models_trained_on_helpful_sets(table, rng, tmp_path):
    scores = torch.rand(12, 4, generator=rng).numpy()
    subsets = {f"m{k}": torch.randperm(12, generator=rng)[:6].tolist() for k in range(5)}
    (tmp_path / "groups.json").write_text(
        json.dumps({m: [f"e{i:02}" for i in s] for m, s in subsets.items()})
    )
    losses = torch.rand(5, 4, generator=rng).numpy()
    table("s.csv", scores)
    table("losses.csv", losses, list(subsets))
    found = results("s.csv", "-e", "losses.csv", "-g", "groups.json", "--lds")["s.csv"]
    sums = np.stack([scores[rows].sum(0) for rows in subsets.values()])
    assert np.allclose(list(found["by_query"].values()), by_hand(sums, -losses), atol=1e-12)


def test_constant_columns_are_counted_and_named(table, numbers):
    scores, effects = (x.astype(float) for x in numbers)
    scores[:, 1], effects[:, [1, 2]] = 3.0, 0.0
    table("s.csv", scores)
    table("flat.csv", np.ones_like(scores))
    table("effects.csv", effects)
    found = results("s.csv", "flat.csv", "-e", "effects.csv")
    one = found["s.csv"]
    assert one["constant"] == {"q1": "scores and effects", "q2": "effects"}
    assert one["by_query"]["q1"] is None and one["queries"] == 4
    expected = by_hand(scores[:, [0, 3]], effects[:, [0, 3]])
    assert abs(one["spearman"] - np.mean(expected)) < 1e-12
    flat = found["flat.csv"]
    assert flat["spearman"] is None and flat["interval"] is None and len(flat["constant"]) == 4
    said = good(call("s.csv", "flat.csv", "-e", "effects.csv")).output
    assert "s.csv: constant, so without correlation: q1 (scores and effects), q2 (effects)" in said


def test_the_table_has_the_best_first(table, numbers):
    scores, effects = numbers
    table("worse.csv", scores, method="GradDot")
    table("better.csv", effects, method="[EK-FAC]")
    table("effects.csv", effects)
    said = good(call("worse.csv", "better.csv", "-e", "effects.csv")).output
    rows = [line.split() for line in said.splitlines() if ".csv" in line]
    assert rows[0] == ["better.csv", "[EK-FAC]", "+1.000", "+1.000", "to", "+1.000", "12", "4", "0"]
    assert rows[1][:3] == ["worse.csv", "GradDot", f"{np.mean(by_hand(scores, effects)):+.3f}"]


def test_missing_ids_and_other_mistakes_are_named(table, numbers, tmp_path):
    scores, effects = (x.astype(float) for x in numbers)
    table("s.csv", scores)
    table("effects.csv", effects)
    table("some.csv", scores[2:], EXAMPLES[2:])
    said = refused(call("some.csv", "-e", "effects.csv"))
    assert "some.csv has no scores of 2 examples" in said and "'e00', 'e01'" in said
    table("narrow.csv", scores[:, :3], queries=QUERIES[:3])
    assert "1 queries that effects are about, e.g. ['q3']" in refused(call("narrow.csv", "-e", "effects.csv"))
    scores[4, 2] = np.nan
    table("nan.csv", scores)
    assert "nan.csv: 1 numbers are not finite, e.g. 'e04' for query 'q2'" in refused(
        call("nan.csv", "-e", "effects.csv")
    )
    assert "effects: 1 numbers are not finite" in refused(call("s.csv", "-e", "nan.csv"))
    table("two.csv", effects[:2], EXAMPLES[:2])
    assert "at least 3" in refused(call("s.csv", "-e", "two.csv"))
    table("twice.csv", effects, [*EXAMPLES[:11], "e00"])
    assert "several rows of ['e00']" in refused(call("s.csv", "-e", "twice.csv"))
    assert "groups do not say" in refused(call("s.csv", "-e", "effects.csv", "--lds"))
    assert "no such file" in refused(call("s.csv", "-e", "effects.csv", "-g", "none.json"))
    (tmp_path / "groups.json").write_text('{"left": "e00"}')
    assert "a list of example ids" in refused(call("s.csv", "-e", "effects.csv", "-g", "groups.json"))
    (tmp_path / "groups.json").write_text("{")
    assert "not a JSON file" in refused(call("s.csv", "-e", "effects.csv", "-g", "groups.json"))


def test_help_has_an_example():
    assert "Example:  attrax evaluate" in good(CliRunner().invoke(app, ["evaluate", "--help"])).output
