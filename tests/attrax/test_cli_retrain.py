"""`attrax retrain` on a tiny model: effects against a loop by hand, and going on where a call stopped."""

# ruff: noqa: F811

import json

import pytest
import torch
import torch.nn.functional as F

import attrax.retrain
from attrax.config import configured
from attrax.frontends.data.tables import read_scores
from attrax.pipeline import load
from attrax.retrain import Training, retrain

from .test_cli import QUERY, TRAIN, call, files, good, quiet, refused  # noqa: F401

TRAINING = Training(lr=1e-2, batch_size=4, epochs=2, warmup=0.3, weight_decay=0.1, clip=0.5)


def settings(files, out):
    words = {
        "model": files / "model",
        "train": files / "train.jsonl",
        "query": files / "query.jsonl",
        "out": out,
    }
    return configured({k: str(v) for k, v in words.items()} | {"dtype": "float64", "tokens": 64})


def loss(model, tokens, labels):
    """Summed loss of one example, and its number of terms."""
    logits = model(input_ids=tokens.long().unsqueeze(0)).logits[0, :-1]
    targets = labels.long()[1:]
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), int((targets != -100).sum())


def by_hand(config, order, gone, part=1.0):
    """Losses of the queries after AdamW in an order of ids, one example at a time, less a part of one of them."""
    inputs, peak = load(config), TRAINING.lr
    model, data = inputs.model, dict(zip(inputs.train.ids, range(len(TRAIN)), strict=True))
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak)
    rates = [0.0, peak / 2, peak, peak / 2]
    for rate, ids in zip(rates, order, strict=True):
        found = [
            (name, *loss(model, inputs.train.tokens[data[name]], inputs.train.labels[data[name]]))
            for name in ids
        ]
        optimizer.zero_grad()
        kept = sum(value * (1.0 - part * (name == gone)) for name, value, _ in found)
        (kept / sum(count for *_, count in found)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    with torch.no_grad():
        asked = zip(inputs.query.tokens, inputs.query.labels, strict=True)
        return torch.stack([loss(model, *row)[0] for row in asked])


def test_effects_are_those_of_a_loop_by_hand(files, tmp_path):
    config = settings(files, tmp_path / "out")
    precision = retrain(config, TRAINING, 3, quiet)
    effects = read_scores(tmp_path / "out" / "effects.parquet")
    recipe = attrax.retrain._recipe(config, TRAINING, load(config))
    order = [[i for batch in step for i in batch["example_ids"]] for step in recipe.batches.values()]
    assert [len(ids) for ids in order] == [4, 2, 4, 2] and order[:2] != order[2:]
    assert sorted(order[0] + order[1]) == sorted(order[2] + order[3]) == [row["id"] for row in TRAIN]
    everything = by_hand(config, order, None)
    expected = torch.stack([by_hand(config, order, name) - everything for name in effects.ids])
    assert len(set(effects.ids)) == 3 and effects.query_ids == tuple(row["id"] for row in QUERY)
    assert (effects.values - expected).abs().max() < 1e-10 * expected.abs().max()
    assert precision["median_effect"] == effects.values.abs().median() > 1e6 * precision["noise_floor"]
    for part in (0.5, 0.1):
        less = torch.stack([by_hand(config, order, name, part) - everything for name in effects.ids])
        distance = float((less / part - expected).norm() / expected.norm())
        assert precision["linearity"][str(part)] == pytest.approx(distance, rel=1e-9)
    assert json.loads((tmp_path / "out" / "precision.json").read_text()) == precision


def test_a_second_call_goes_on_where_the_first_stopped(files, tmp_path, monkeypatch):
    trainings, train = [], attrax.retrain.train

    def interrupted(recipe, weight):
        if len(trainings) == 4:
            raise OSError
        trainings.append(weight)
        return train(recipe, weight)

    monkeypatch.setattr(attrax.retrain, "train", interrupted)
    with pytest.raises(OSError):
        retrain(settings(files, tmp_path / "out"), TRAINING, 2, quiet)
    trainings.clear()
    retrain(settings(files, tmp_path / "out"), TRAINING, 2, quiet)
    assert len(trainings) == 4
    monkeypatch.undo()
    retrain(settings(files, tmp_path / "fresh"), TRAINING, 2, quiet)
    one, two = (read_scores(tmp_path / name / "effects.parquet") for name in ("out", "fresh"))
    assert torch.equal(one.values, two.values) and one.ids == two.ids


def test_from_retraining_to_judgement(call):
    words = ("-t", "{f}/train.jsonl", "-q", "{f}/query.jsonl", "--quiet")
    again = ("retrain", "-m", "{f}/model", *words, "-o", "made", "--batch-size", "4")
    good(call(*again, "--lr", "1e-2", "--removals", "4"))
    good(call("score", "-m", "made/model", *words, "-o", "result", "--method", "graddot", "--no-html"))
    said = good(call("evaluate", "result", "-e", "made/effects.parquet", "--resamples", "100")).output
    assert "graddot" in said and " 4 " in said
    assert "retrained.json has another lr" in refused(call(*again, "--lr", "1e-3", "--removals", "4"))
    assert "expected 1 to 6" in refused(call(*again, "--lr", "1e-2", "--removals", "7"))
    assert "expected lr, batch_size" in refused(call(*again, "--lr", "0", "--removals", "4"))
    assert "diverged" in refused(call(*again, "--lr", "1e30", "--removals", "4", "-o", "far"))


def test_help_has_an_example(call):
    assert "Example:  attrax retrain" in good(call("retrain", "--help")).output
