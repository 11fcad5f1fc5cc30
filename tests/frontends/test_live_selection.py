"""Which parameters a live source captures, and that one whose layer does something else is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import collect
from attrax.core.factorization import RULES, Rule, linear
from attrax.frontends import classification, live

from .models import MLP, TinyLM, classes, seeded
from .oracle import assert_gradients, captured, one_by_one
from .test_live import Around
from .test_live_errors import classifier, refused

CLASSIFY = classification()


def test_a_layer_called_past_its_hooks(rng):
    model = seeded(
        lambda: Around(lambda m, x: m.b(torch.tanh(m.a.forward(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    )
    refused(model, classes(rng), r"a.weight: has a gradient but its layer was never captured")
    collect(live(model, [classes(rng)], CLASSIFY, exclude="a"))


def test_a_weight_used_functionally(rng):
    def functional_head(m: Any, ids: Tensor) -> Tensor:
        return F.linear(m.emb(ids).mean(1), m.emb.weight)

    model = seeded(lambda: Around(functional_head, emb=nn.Embedding(3, 4)))
    batch = {"x": torch.randint(3, (4, 5), generator=rng), "y": classes(rng)["y"]}
    refused(model, batch, r"emb.weight: differs from autograd.*(?s:.*)functional use")


def test_a_penalty_on_weights_in_the_loss(rng):
    def penalized(model: Any, batch: Any) -> Tensor:
        return CLASSIFY(model, batch) + model.first.weight.square().sum() / len(batch["y"])

    refused(seeded(MLP), classes(rng), r"first.weight: differs from autograd", penalized)


def test_a_layer_that_does_more_than_its_rule_says(rng):
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 1.5 * super().forward(input)

    model, batch = seeded(lambda: classifier(between=Scaled(6, 6))), classes(rng)
    refused(model, batch, "between.weight: differs from autograd")
    own = Rule("scaled", Scaled, lambda module, x, g: linear(module, x, 1.5 * g))
    rules = (own, *RULES)
    assert_gradients(
        captured(live(model, [batch], CLASSIFY, rules=rules)), one_by_one(model, batch, CLASSIFY)
    )


def test_a_first_example_without_gradient_hides_nothing(rng):
    """The comparison takes an example that has a gradient, in this batch or a later one."""
    model = seeded(
        lambda: Around(lambda m, x: m.b(torch.tanh(m.a.forward(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    )
    weigh = lambda m, b: CLASSIFY(m, b) * b["w"]  # noqa: E731
    batch = classes(rng) | {"w": torch.tensor([0.0, 0.0, 1.0, 0.0])}
    refused(model, batch, "a.weight: has a gradient", weigh)
    with pytest.raises(RuntimeError, match="a.weight: has a gradient"):
        collect(live(model, [batch | {"w": torch.zeros(4)}, batch], weigh))


def test_selection(rng):
    model = seeded(lambda: TinyLM(tied=True))
    with pytest.raises(ValueError, match=r"no layer is selected.*named_modules"):
        live(model, [], include="nothing_of_that_name")
    with pytest.raises(ValueError, match="requires_grad"):
        live(seeded(MLP).requires_grad_(False), [])
    with pytest.raises(ValueError, match=r"shared? .*both are selected"):
        live(model, [], include="head")
    partly = live(model, [], exclude=nn.Embedding).coverage
    assert {g.parameter for g in partly.gaps} == {"tok.weight", "pos.weight"}
    assert partly.share < 1 and "excluded ('tok.weight')" in str(partly)


def test_gaps_are_listed_or_refused(rng):
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, h: Tensor) -> Tensor:
            return self.scale * h

    model, batch = seeded(lambda: classifier(between=Scale())), classes(rng)
    source = live(model, [batch], CLASSIFY)
    assert [(g.parameter, g.entries) for g in source.coverage.gaps] == [("between.scale", 6)]
    assert source.coverage.share == 51 / 57
    assert set(captured(source)) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    with pytest.raises(ValueError, match=r"strict=True(?s:.*)between.scale: no rule for Scale"):
        live(model, [batch], CLASSIFY, strict=True)


def test_attributes_that_a_rule_does_not_cover(rng):
    model = seeded(lambda: classifier(between=nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))))
    source = live(model, [classes(rng)], CLASSIFY)
    assert {g.parameter.rpartition(".")[2] for g in source.coverage.gaps} == {"original0", "original1"}
    assert "between.bias" in captured(source)


def test_attention_modules_use_their_projection_without_calling_it(rng):
    encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    model = seeded(
        lambda: Around(
            lambda m, x: m.out(m.enc(m.first(x)[:, None]).mean(1)),
            first=nn.Linear(4, 6),
            enc=encoder,
            out=nn.Linear(6, 3),
        )
    )
    batch = classes(rng)
    source = live(model, [batch], CLASSIFY)
    gaps = {g.parameter.removeprefix("enc.self_attn.") for g in source.coverage.gaps}
    assert gaps == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    right = one_by_one(model, batch, CLASSIFY)
    assert_gradients(captured(source), {n: right[n] for n in captured(source)})


def test_embeddings_that_compute_their_own_ids(rng):
    class Offset(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input + 2)

    model = seeded(
        lambda: Around(lambda m, x: m.out(m.emb(x).mean(1)), emb=Offset(9, 4), out=nn.Linear(4, 3))
    )
    coverage = live(model, [], CLASSIFY).coverage
    assert [g.parameter for g in coverage.gaps] == ["emb.weight"] and "Offset computes the ids" in str(
        coverage
    )
