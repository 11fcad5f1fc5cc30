"""What live sources give to methods: scores that do not depend on batches or on a store, and sampled labels."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Projection, Scores, Source, collect
from attrax.frontends import causal_lm, classification, live, open_store, store
from attrax.frontends.model.losses import token_losses
from attrax.frontends.model.rows import pick, with_ids
from attrax.frontends.sources.live import Live
from attrax.methods import ekfac, fit_ekfac, fit_kfac, graddot, influence, kfac, logra

from .models import MLP, TinyLM, classes, documents, seeded
from .oracle import captured
from .traces import Operations

pytestmark = pytest.mark.usefixtures("unchecked")
LENGTHS = [5, 3, 7, 2, 4, 6]


def cut(batch: dict[str, Tensor], *sizes: int) -> list[dict[str, Any]]:
    """A batch in consecutive pieces, each padded no further than it needs."""
    whole, pieces, start = dict(with_ids(batch)), [], 0
    for size in sizes:
        piece = dict(pick(whole, torch.arange(start, start + size)))
        length = int(piece["attention_mask"].sum(1).max())
        pieces.append({k: v[:, :length] if isinstance(v, Tensor) else v for k, v in piece.items()})
        start += size
    return pieces


@pytest.fixture
def lm() -> nn.Module:
    return seeded(lambda: TinyLM(layers=1, tied=True))


METHODS: dict[str, Callable[[Source, Source], Scores]] = {
    "graddot": lambda train, query: graddot(train, query, target="mean"),
    "kfac": kfac,
    "ekfac": lambda train, query: ekfac(train, query, fisher="sampled", seed=3),
    "ekfac_projected": lambda train, query: ekfac(train, query, projection=Projection(3)),
    "logra": lambda train, query: logra(train, query, dim=3),
}


@pytest.mark.parametrize("method", METHODS)
def test_scores_do_not_depend_on_the_cut(method, lm, rng):
    train, query = documents(rng, LENGTHS), documents(rng, [4, 5])
    whole = METHODS[method](live(lm, [train], verify=False), live(lm, [query], verify=False))
    alone, some, wide = cut(train, 1, 3, 2)
    parts = live(lm, [alone, some, padded(wide, 12)], verify=False)
    scores = METHODS[method](parts, live(lm, cut(query, 1, 1), verify=False))
    assert (scores.ids, scores.query_ids) == (whole.ids, whole.query_ids)
    assert (scores.values - whole.values).abs().max() <= 1e-10 * whole.values.abs().max()


def padded(batch: dict[str, Any], width: int) -> dict[str, Any]:
    """More padding on the right."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    more = width - batch["input_ids"].shape[1]
    return batch | {k: torch.nn.functional.pad(batch[k], (0, more), value=v) for k, v in fill.items()}


def test_order_does_not_matter_where_ids_are_matched(lm, rng):
    train, query = dict(with_ids(documents(rng, LENGTHS))), documents(rng, [4, 5])
    shuffled = pick(train, torch.tensor([4, 2, 0, 5, 1, 3]))
    first = ekfac(live(lm, [train]), live(lm, [query]))
    second = ekfac(live(lm, [shuffled]), live(lm, [query])).in_order(first.ids)
    torch.testing.assert_close(first.values, second.values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["graddot", "kfac", "logra"])
def test_a_store_without_the_model_gives_the_same_numbers(method, lm, rng, tmp_path):
    train, query = live(lm, cut(documents(rng, LENGTHS), 2, 4)), live(lm, [documents(rng, [4, 5])])
    stored = {side: written(tmp_path / side, source) for side, source in (("train", train), ("query", query))}
    right = METHODS[method](train, query)
    lm.requires_grad_(False).to("meta")
    got = METHODS[method](stored["train"], stored["query"])
    assert (got.ids, got.query_ids) == (right.ids, right.query_ids)
    assert (got.values - right.values).abs().max() <= 1e-10 * right.values.abs().max()


def written(path: Path, source: Live) -> Source:
    """The gradients of a source, written block by block and opened again."""
    with store(path, keep_factored=True) as sink:
        for batch in source.data:
            sink(collect(live(source.model, [batch], source.loss)))
    return open_store(path)


def test_the_factor_of_a_shared_input_is_made_once(lm, rng):
    """q, k, v and gate, up: one second moment of the input and one decomposition, one of each output."""
    source = live(
        seeded(lambda: TinyLM(layers=1, d=5, bias=False)), [documents(rng, [4, 3])] * 3, verify=False
    )
    with Operations() as operations:
        fit = fit_kfac(source)
    groups = {name: len(basis.parts) for name, basis in fit.bases.items()}
    assert sorted(groups.values()) == [1, 1, 1, 2, 3]
    assert operations.named("linalg_eigh", "_linalg_eigh") == 2 * (len(groups) + sum(groups.values()))
    inputs_of_width_5 = [name for name in groups if "down" not in name]
    outputs_of_width_5 = [f"blocks.0.{n}.weight" for n in ("q", "k", "v", "o", "down")]
    made = operations.shaped({(5, 5)}, "mm")
    assert made == 3 * (len(inputs_of_width_5) + len(outputs_of_width_5))


def test_sampled_labels_do_not_depend_on_the_batch(lm, rng):
    """The sampled losses of an example are the same in any batch, order and padding, and change with the seed."""
    batch = documents(rng, LENGTHS)
    whole = sampled_losses(live(lm, [batch]), 0)
    pieces = sampled_losses(live(lm, cut(batch, 1, 3, 2)), 0)
    wide = sampled_losses(live(lm, [padded(batch, 15)]), 0)
    shuffled = sampled_losses(live(lm, [pick(with_ids(batch), torch.tensor([3, 1, 5, 0, 2, 4]))]), 0)
    for other in (pieces, wide, shuffled):
        assert other.keys() == whole.keys()
        assert all(abs(other[i] - whole[i]) < 1e-9 for i in whole)
    other = sampled_losses(live(lm, [batch]), 1)
    assert any(abs(other[i] - whole[i]) > 1e-3 for i in whole)
    own = causal_lm()(lm, batch)
    assert any(abs(own[k].item() - whole[i]) > 1e-3 for k, i in enumerate(whole))


def sampled_losses(source: Live, seed: int) -> dict[str, float]:
    sampled = source.resample(seed)
    found: dict[str, float] = {}
    for batch in sampled.data:
        batch = with_ids(batch)
        found |= dict(zip(batch["example_ids"], sampled.loss(sampled.model, batch).tolist(), strict=True))
    return found


def test_both_passes_of_ekfac_see_the_same_labels(lm, rng):
    batch, seen = documents(rng, LENGTHS), []

    class Watching(type(causal_lm())):
        def __call__(self, model: nn.Module, batch: Any, /) -> Tensor:
            losses = super().__call__(model, batch)
            if self.seed is not None:
                seen.append(losses.detach())
            return losses

    fit_ekfac(live(lm, [batch], Watching(), verify=False), fisher="sampled", seed=7)
    assert len(seen) == 5 + 2, "five forwards that try the shared positions, and the passes"
    assert torch.equal(*seen[-2:])


def test_the_sampled_fisher_approaches_the_exact_one(rng):
    """E over labels of g g^T of a softmax model, against the sum over all labels weighted by their probability."""
    model = seeded(lambda: nn.Linear(2, 3, bias=False), seed=5)
    x = torch.randn(3, 2, generator=rng, dtype=torch.float64)
    probabilities = model(x).softmax(-1).detach()
    exact = torch.zeros(6, 6, dtype=torch.float64)
    for i, c in itertools.product(range(3), range(3)):
        loss = token_losses(model(x[i : i + 1]).unsqueeze(1), torch.tensor([[c]])).sum()
        g = torch.autograd.grad(loss, model.weight)[0].flatten()
        exact += probabilities[i, c] * torch.outer(g, g)
    ids = [f"x{i}" for i in range(6000)]
    batch = {"x": x.repeat(2000, 1), "y": torch.zeros(6000, dtype=torch.long), "example_ids": ids}
    g = captured(live(model, [batch], classification()).resample(0))["weight"].flatten(1)
    draws = torch.einsum("nk,nl->nkl", g, g).unflatten(0, (2000, 3)).sum(1)
    error = draws.std(0) / 2000**0.5
    assert ((draws.mean(0) - exact).abs() <= 5 * error + 1e-12).all()
    assert (exact.abs() > 20 * error).any()


def test_the_empirical_fisher_is_not_the_sampled_one(lm, rng):
    source, query = live(lm, [documents(rng, LENGTHS)]), live(lm, [documents(rng, [4])])
    empirical, sampled = ekfac(source, query), ekfac(source, query, fisher="sampled")
    assert (empirical.values - sampled.values).abs().max() > 0.01 * empirical.values.abs().max()
    assert (empirical.about["fisher"], sampled.about["fisher"]) == ("empirical", "sampled")


def test_a_fit_refuses_gradients_of_another_model(lm, rng):
    train, query = [documents(rng, LENGTHS)], [documents(rng, [4])]
    other = seeded(lambda: TinyLM(layers=1, tied=True), seed=1)
    fit = fit_ekfac(live(lm, train))
    with pytest.raises(ValueError, match="different parameters"):
        influence(fit, live(other, train), live(lm, query))
    with pytest.raises(ValueError, match="different parameters"):
        influence(fit, live(lm, train), live(other, query))
    with pytest.raises(ValueError, match="different parameters"):
        graddot(live(other, train), live(lm, query))


def test_parameters_that_move_during_a_pass_are_noticed(rng):
    model, batches = seeded(MLP), [classes(rng), classes(rng)]
    marks = []
    for examples, _ in live(model, batches, classification()).map(lambda name, leaf, examples: None):
        marks.append(examples.fingerprint)
        with torch.no_grad():
            model.first.bias[0] += 1e-12
    assert marks[0] != marks[1]


def test_ids_are_the_content_of_the_example(lm, rng):
    batch = documents(rng, LENGTHS)
    ids = collect(live(lm, [batch])).examples.ids
    assert len(set(ids)) == len(LENGTHS)
    assert ids == collect(live(lm, cut(batch, 1, 3, 2))).examples.ids
    assert ids == collect(live(lm, [padded(batch, 14)])).examples.ids
    shared = [batch | {k: v[i:j] for k, v in batch.items()} for i, j in ((0, 1), (1, 6))]
    positions = {"position_ids": torch.arange(7)[None]}
    assert ids == collect(live(lm, [piece | positions for piece in shared])).examples.ids


def test_equal_examples_have_equal_ids_and_rows_of_their_own(rng):
    model, batch = seeded(MLP), classes(rng)
    twice = {k: torch.cat([v, v[:1]]) for k, v in batch.items()}
    block = collect(live(model, [twice], classification()))
    assert len(block.examples) == 5 and block.examples.ids[0] == block.examples.ids[4]
    named = collect(live(model, [batch | {"example_ids": ["a", "b", "c", "d"]}], classification()))
    assert named.examples.ids == ("a", "b", "c", "d")
