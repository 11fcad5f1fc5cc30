"""Which parameters a live source captures, and that one whose layer does something else is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import GradTree, collect, stored
from attrax.core.factorization import RULES, Rule, linear
from attrax.frontends import classification, live

from .models import MLP, TinyLM, classes, seeded
from .oracle import assert_gradients, captured, one_by_one
from .test_live import Around
from .test_live_errors import classifier, refused

CLASSIFY = classification()


def exact_apart(model: nn.Module, batch: Any, names: str, refusal: str, loss: Any = CLASSIFY) -> None:
    """What the layers get wrong is differentiated example by example, with a warning; a strict source refuses it."""
    refused(model, batch, refusal, loss, strict=True)
    source = live(model, [batch], loss)
    with pytest.warns(RuntimeWarning, match=rf"{names}\) are differentiated one example at a time"):
        got = captured(source)
    assert_gradients(got, one_by_one(model, batch, loss))
    assert {c.parameter for c in source.coverage.captured if "each example" in c.rule} == set(
        names.split(", ")
    )


def past_its_hooks() -> nn.Module:
    return seeded(
        lambda: Around(lambda m, x: m.b(torch.tanh(m.a.forward(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    )


def test_a_layer_called_past_its_hooks(rng):
    refusal = "a.weight: has a gradient but its layer was never captured"
    exact_apart(past_its_hooks(), classes(rng), "a.bias, a.weight", refusal)
    collect(live(past_its_hooks(), [classes(rng)], CLASSIFY, exclude="a"))


def test_a_weight_used_functionally(rng):
    def functional_head(m: Any, ids: Tensor) -> Tensor:
        return F.linear(m.emb(ids).mean(1), m.emb.weight)

    model = seeded(lambda: Around(functional_head, emb=nn.Embedding(3, 4)))
    batch = {"x": torch.randint(3, (4, 5), generator=rng), "y": classes(rng)["y"]}
    exact_apart(model, batch, "emb.weight", r"emb.weight: differs from autograd.*(?s:.*)functional use")


def test_a_penalty_on_weights_in_the_loss(rng):
    def penalized(model: Any, batch: Any) -> Tensor:
        return CLASSIFY(model, batch) + model.first.weight.square().sum()

    refusal = r"first.weight: differs from autograd"
    exact_apart(seeded(MLP), classes(rng), "first.weight", refusal, penalized)


def test_a_layer_that_does_more_than_its_rule_says(rng):
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 1.5 * super().forward(input)

    model, batch = seeded(lambda: classifier(between=Scaled(6, 6))), classes(rng)
    exact_apart(model, batch, "between.bias, between.weight", "between.weight: differs from autograd")
    own = Rule("scaled", Scaled, lambda module, x, g: linear(module, x, 1.5 * g))
    rules = (own, *RULES)
    assert_gradients(
        captured(live(model, [batch], CLASSIFY, rules=rules)), one_by_one(model, batch, CLASSIFY)
    )


def test_a_first_example_without_gradient_hides_nothing(rng):
    """The comparison takes an example that has a gradient, in this batch or a later one."""
    weigh = lambda m, b: CLASSIFY(m, b) * b["w"]  # noqa: E731
    batch = classes(rng) | {"w": torch.tensor([0.0, 0.0, 1.0, 0.0])}
    exact_apart(past_its_hooks(), batch, "a.bias, a.weight", "a.weight: has a gradient", weigh)
    with pytest.raises(RuntimeError, match="a.weight: has a gradient"):
        collect(live(past_its_hooks(), [batch | {"w": torch.zeros(4)}, batch], weigh, strict=True))


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
    model, batch = seeded(MLP), classes(rng)
    source = live(model, [batch], CLASSIFY, exclude="last")
    assert {(g.parameter, g.entries) for g in source.coverage.gaps} == {("last.weight", 18), ("last.bias", 3)}
    assert source.coverage.share == 72 / 93
    with pytest.raises(ValueError, match=r"strict=True(?s:.*)last.weight: excluded"):
        live(model, [batch], CLASSIFY, strict=True, exclude="last")


def test_what_only_some_examples_do_is_noticed(rng):
    """The first two examples use a layer as its rule says, the third uses its weight as a function."""

    def sometimes(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        return m.out(torch.where(x[..., :1] > 0, m.b(h), h @ m.b.weight.T))

    model = seeded(lambda: Around(sometimes, a=nn.Linear(4, 4), b=nn.Linear(4, 4), out=nn.Linear(4, 3)))
    batch = classes(rng)
    batch["x"][:2, 0], batch["x"][2:, 0] = 1.0, -1.0
    exact_apart(model, batch, "b.weight", "b.weight: differs from autograd")


def test_a_layer_without_example_axis_in_a_later_batch(rng):
    """Rows picked by a mask: as many as examples, but not one of each."""
    model = seeded(lambda: Around(lambda m, x: m.out(m.a(x)), a=nn.Linear(4, 4), out=nn.Linear(4, 3)))

    def picked(model: Any, batch: Any) -> Tensor:
        h = model.a(batch["x"])
        rows = model.out(h[batch["mask"]])
        owner = batch["mask"].nonzero()[:, 0]
        return torch.zeros(len(h), dtype=h.dtype).index_add(0, owner, rows.square().sum(1))

    x = torch.randn(2, 4, 3, 4, generator=rng, dtype=torch.float64)
    even, uneven = torch.zeros(2, 4, 3, dtype=torch.bool)
    even[:, 0], uneven[0, :2], uneven[2:, 1] = True, True, True
    batches = [{"x": x[0], "mask": even}, {"x": x[1], "mask": uneven}]
    source = live(model, batches, picked)
    with pytest.warns(RuntimeWarning, match="out.bias, out.weight"):
        found = [leaves for _, leaves in source.map(lambda name, leaf, _: stored(GradTree({name: leaf})))]
    for got, batch in zip(found, batches, strict=True):
        assert_gradients(
            {n: g for leaf in got.values() for n, g in leaf.items()}, one_by_one(model, batch, picked)
        )
