"""Scores in forward mode: equal to products of autograd's gradients for every kind of parameter and attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import (
    Block,
    Blocks,
    Examples,
    GradTree,
    Projection,
    collect,
    materialized,
    projected,
    transformed,
)
from attrax.frontends import causal_lm, classification, live
from attrax.frontends.data.packing import packed
from attrax.frontends.sources import forward as forward_module
from attrax.frontends.sources.forward import forward_scores
from attrax.methods import fit_ekfac, graddot, influence, preconditioned

from .llms import alone, llm
from .llms import in_float64 as in_float64
from .models import MLP, TinyLM, classes, documents, seeded
from .oracle import flat, gradients, one_by_one
from .test_packing import encoded, with_contrast

pytestmark = pytest.mark.usefixtures("unchecked")
ids = lambda *names: {"example_ids": names}  # noqa: E731


def directions(grads: dict[str, Tensor], names, mark) -> Blocks:
    """Given gradients as a source."""
    tree = GradTree({n: materialized(n, g) for n, g in grads.items()})
    return Blocks([Block(tree, Examples(tuple(names), weight=torch.ones(len(names)), fingerprint=mark))])


def random_queries(model, count, rng) -> tuple[Blocks, Tensor]:
    """Random directions over all parameters, and the same as a matrix."""
    drawn = {
        n: torch.randn(count, *p.shape, generator=rng, dtype=p.dtype) for n, p in model.named_parameters()
    }
    mark = forward_module.Fingerprints(model).now()
    return directions(drawn, [f"q{i}" for i in range(count)], mark), flat(drawn)


class Conv(nn.Module):
    """Convolutions, a batch norm with its running statistics, a group norm, and bare parameters used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2)
        self.norm, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.scale, self.shift = nn.Parameter(torch.ones(4, 1, 1)), nn.Parameter(torch.zeros(()))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.one(x))) * self.scale + self.shift
        return self.last(torch.relu(self.group(self.two(h)) * self.scale).mean((2, 3)))


def image_batch(rng):
    x = torch.randn(3, 1, 5, 5, generator=rng, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (3,), generator=rng)}


CASES = {
    "mlp": (MLP, lambda rng: classes(rng), classification()),
    "transformer": (TinyLM, lambda rng: documents(rng, [5, 2, 7]), causal_lm()),
    "tied": (lambda: TinyLM(tied=True, shared_norm=True), lambda rng: documents(rng, [5, 2, 7]), causal_lm()),
    "convolutions": (Conv, image_batch, classification()),
}


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("kind", CASES)
def test_every_kind_of_parameter(kind, at_once, rng, assert_close):
    build, draw, loss = CASES[kind]
    model, batch = seeded(build), draw(rng)
    query, directions_ = random_queries(model, 3, rng)
    found = forward_scores(model, [batch], query, loss, at_once=at_once)
    right = flat(one_by_one(model, batch, loss)) @ directions_.T
    assert (found.values - right).abs().max() <= 1e-10 * right.abs().max()
    assert found.query_ids == ("q0", "q1", "q2")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_language_models(family, attention, at_once, rng, in_float64):
    model = llm(family, attention)
    batch = documents(rng, [5, 3, 6])
    query, directions_ = random_queries(model, 2, rng)
    found = forward_scores(model, [batch], query, at_once=at_once)
    docs = [alone(row[:n]) for row, n in zip(batch["input_ids"], (5, 3, 6), strict=True)]
    right = flat(gradients(model, causal_lm(), docs)) @ directions_.T
    assert (found.values - right).abs().max() <= 1e-10 * right.abs().max()


def test_equal_to_graddot_and_to_influence(rng, assert_close):
    model = seeded(lambda: TinyLM(tied=True))
    train = [documents(rng, [5, 7]) | ids("a", "b"), documents(rng, [4]) | ids("c")]
    source, query = live(model, train), live(model, [documents(rng, [6, 3]) | ids("p", "q")])
    for target in ("sum", "mean"):
        right, found = (
            graddot(source, query, target=target),
            forward_scores(model, train, query, target=target),
        )
        assert_close(found.values, right.values)
        assert (found.ids, found.query_ids, found.about) == (right.ids, right.query_ids, right.about)
    fit = fit_ekfac(source)
    asked = transformed(query, preconditioned(fit))
    found = forward_scores(model, train, asked, about={"method": "ekfac"})
    assert_close(found.values, influence(fit, source, query).values)
    assert found.about["method"] == "ekfac" and "higher = more helpful" in found.about["sign"]


def test_only_the_parameters_that_the_query_covers(rng, assert_close):
    model, batch = seeded(TinyLM), documents(rng, [5, 3])
    some = live(model, [batch], include=r"blocks\.0")
    assert_close(forward_scores(model, [batch], some).values, graddot(some, some).values)


def test_left_padding_shifts_no_position(rng):
    model, batch = seeded(TinyLM), documents(rng, [5, 3])
    query, directions_ = random_queries(model, 1, rng)
    moved = {k: torch.stack([v[0], v[1].roll(2)]) for k, v in batch.items()}
    right = flat(
        gradients(model, causal_lm(), [alone(r[:n]) for r, n in zip(batch["input_ids"], (5, 3), strict=True)])
    )
    found = forward_scores(model, [moved], query)
    assert (found.values - right @ directions_.T).abs().max() <= 1e-10 * right.abs().max()


def test_packed_rows_and_contrasts(rng, in_float64):
    """Any loss of one number per example will do, however the examples lie in the rows."""
    model, data = llm("llama", "sdpa"), with_contrast(encoded(rng, 4, 3, 5), encoded(rng, 5))
    query, directions_ = random_queries(model, 2, rng)
    found = forward_scores(model, packed(data, 10, dtype=torch.float64), query)
    for name, values in zip(found.ids, found.values, strict=True):
        sides = [alone(t, y) for t, y in data.documents(data.ids.index(name))]
        grads = flat(gradients(model, causal_lm(), sides)) @ directions_.T
        right = grads[0] - grads[1:].sum(0)
        assert (values - right).abs().max() <= 1e-10 * grads.abs().max()


@pytest.mark.parametrize("shared", [False, True])
def test_the_model_is_left_as_it_was(shared, rng):
    model, batch = seeded(lambda: TinyLM(tied=shared, shared_norm=shared)), documents(rng, [5, 3])
    named = lambda: model.named_parameters(remove_duplicate=False)  # noqa: E731
    before = {n: (p, p.clone(), p.requires_grad) for n, p in named()}
    query = live(model, [batch])
    with torch.inference_mode():
        inside = forward_scores(model, [batch], query).values
    found = forward_scores(model, [batch], query).values
    assert torch.equal(inside, found) and not found.requires_grad
    for name, p in named():
        same, value, trainable = before[name]
        assert p is same and torch.equal(p, value) and p.requires_grad == trainable and p.grad is None


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Custom(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return NoForwardMode.apply(super().forward(input))


def test_operations_without_forward_mode_are_named(rng):
    model, batch = seeded(lambda: Custom(4, 3)), classes(rng)
    query, _ = random_queries(model, 1, rng)
    with pytest.raises(
        RuntimeError, match="forward_scores: an operation of the model has no forward mode: .*jvp"
    ):
        forward_scores(model, [batch], query, classification())


def test_errors_of_the_model_are_its_own(rng):
    model, batch = seeded(MLP), classes(rng) | {"x": torch.ones(4, 9, dtype=torch.float64)}
    query, _ = random_queries(model, 1, rng)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        forward_scores(model, [batch], query, classification())


def test_what_cannot_be_scored(rng):
    model, batch = seeded(MLP), classes(rng)
    query = live(model, [batch], classification())
    score = lambda **more: forward_scores(model, [batch], query, classification(), **more)  # noqa: E731
    with pytest.raises(ValueError, match="at_once: got 0"):
        score(at_once=0)
    with pytest.raises(ValueError, match="no examples"):
        forward_scores(model, [], query, classification())
    with pytest.raises(ValueError, match="returned .* for 4 examples"):
        forward_scores(model, [batch], query, lambda m, b: m(b["x"]).sum())
    small = transformed(query, projected(Projection(2, seed=0)))
    with pytest.raises(ValueError, match="not in the parameter's own layout"):
        forward_scores(model, [batch], small, classification())
    with pytest.raises(ValueError, match="different parameters"):
        forward_scores(seeded(MLP, seed=1), [batch], query, classification())
    foreign = directions({"other": torch.ones(1, 2)}, ["q"], collect(query).examples.fingerprint)
    with pytest.raises(ValueError, match=r"cover \['other'\], which the model does not have"):
        forward_scores(model, [batch], foreign, classification())
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        forward_scores(nn.Sequential(nn.Dropout(), model), [batch], query, classification())
