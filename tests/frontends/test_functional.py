"""The functional source against autograd and the live source: any parameter of any model that vmap can trace."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import collect
from attrax.frontends import causal_lm, classification, functional, live
from attrax.methods import graddot

from .models import MLP, TinyLM, classes, documents, seeded
from .oracle import assert_gradients, captured, one_by_one
from .test_live import Around, several_calls
from .traces import untouched

CLASSIFY = classification()
pytestmark = pytest.mark.usefixtures("unchecked")


class Anything(nn.Module):
    """Parameters without any rule: a convolution, a bare scale, a recurrence, a weight used functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv1d(1, 3, 2), nn.Parameter(torch.randn(3))
        self.cell, self.emb = nn.Linear(3, 3), nn.Embedding(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x[:, None]).mT * self.scale
        state = torch.zeros_like(h[:, 0])
        for t in range(h.shape[1]):
            state = torch.tanh(self.cell(state) + h[:, t])
        return F.linear(state, self.emb.weight)


@pytest.mark.parametrize("how", ["vmap", "loop"])
@pytest.mark.parametrize("build", [Anything, MLP, several_calls])
def test_classifiers(build, how, rng):
    model, batch = seeded(build), classes(rng)
    with untouched(model):
        got = captured(functional(model, [batch], CLASSIFY, how=how))
    assert_gradients(got, one_by_one(model, batch, CLASSIFY))


@pytest.mark.parametrize("tied", [False, True])
def test_language_models_agree_with_the_live_source(tied, rng):
    model, batch = seeded(lambda: TinyLM(layers=1, tied=tied)), documents(rng, [5, 3, 2])
    by_vmap, by_hooks = functional(model, [batch], causal_lm()), live(model, [batch])
    assert_gradients(captured(by_vmap), captured(by_hooks))
    first, second = collect(by_vmap).examples, collect(by_hooks).examples
    assert (first.ids, first.fingerprint) == (second.ids, second.fingerprint)
    assert first.tokens is not None and first.tokens.tolist() == [4, 2, 1]
    torch.testing.assert_close(graddot(by_vmap, by_vmap).values, graddot(by_hooks, by_hooks).values)


def test_frozen_parameters_are_left_out(rng):
    model, batch = seeded(MLP), classes(rng)
    model.second.requires_grad_(False)
    assert {name.split(".")[0] for name in captured(functional(model, [batch], CLASSIFY))} == {
        "first",
        "last",
    }


def test_a_loss_that_contains_a_gradient(rng):
    """What a live source refuses: the derivative of the output with respect to the input."""

    def force(model: nn.Module, batch: Any) -> Tensor:
        slope = torch.func.grad(lambda x: model(x).sum())(batch["x"])
        return slope.square().sum(1)

    def plainly(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(1)

    model, batch = seeded(MLP), {"x": classes(rng)["x"]}
    assert_gradients(captured(functional(model, [batch], force)), one_by_one(model, batch, plainly))


def test_refusals(rng):
    model, batch = seeded(MLP), classes(rng)
    with pytest.raises(ValueError, match="expected 'vmap' or 'loop'"):
        functional(model, [batch], CLASSIFY, how="hooks")  # pyright: ignore[reportArgumentType]
    dropping = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    with pytest.raises(ValueError, match=r"'1' \(Dropout\)"):
        collect(functional(dropping.train(), [batch], CLASSIFY))
    random = seeded(lambda: Around(lambda m, x: F.dropout(m.a(x), 0.5, training=True), a=nn.Linear(4, 3)))
    with pytest.raises(RuntimeError, match="random"):
        collect(functional(random, [batch], CLASSIFY))
    with pytest.raises(ValueError, match="yielded no examples"):
        collect(functional(model, [{k: v[:0] for k, v in batch.items()}], CLASSIFY))


def test_left_padding_and_modules_in_two_places(rng):
    """Positions start at each document's first token; a norm registered several times keeps its parameters."""
    model, batch = seeded(lambda: TinyLM(shared_norm=True)), documents(rng, [5, 3, 6])
    left = {k: torch.stack([v[i].roll(6 - n) for i, n in enumerate((5, 3, 6))]) for k, v in batch.items()}
    before = list(model.parameters())
    expected = captured(live(model, [left], causal_lm()))
    for how in ("vmap", "loop"):
        assert_gradients(captured(functional(model, [left], causal_lm(), how=how)), expected)
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    assert_gradients(expected, captured(live(model, [batch], causal_lm())))
