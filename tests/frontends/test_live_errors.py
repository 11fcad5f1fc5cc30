"""What a live source refuses, and that each refusal says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import collect
from attrax.frontends import capture, causal_lm, classification, live
from attrax.methods import graddot

from .models import MLP, TinyLM, classes, documents, seeded
from .oracle import assert_gradients, captured, one_by_one
from .test_live import Around
from .traces import untouched

CLASSIFY = classification()


def classifier(**modules: nn.Module) -> nn.Module:
    """Two linear layers with modules between them."""
    order = list(modules)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.get_submodule("first")(x)
        for name in order:
            h = m.get_submodule(name)(h)
        return m.get_submodule("last")(h)

    return Around(forward, first=nn.Linear(4, 6), **modules, last=nn.Linear(6, 3))


def refused(model: nn.Module, batch: Any, match: str, loss: Any = CLASSIFY, **options: Any) -> None:
    """A pass raises, and the model is as before."""
    with pytest.raises((ValueError, RuntimeError), match=match), untouched(model):
        collect(live(model, [batch], loss, **options))


IN_TRAINING_MODE: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.1),
    "Dropout1d": lambda: nn.Dropout1d(0.1),
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
}


@pytest.mark.parametrize("kind", IN_TRAINING_MODE)
def test_training_mode(kind, rng):
    model, batch = seeded(lambda: classifier(between=IN_TRAINING_MODE[kind]())), classes(rng)
    collect(live(model, [batch], CLASSIFY))
    model.get_submodule("between").train()
    refused(model, batch, rf"'between' \({kind}\).*model.eval\(\)")


def test_a_batch_norm_without_statistics_of_its_own(rng):
    model = seeded(lambda: classifier(between=nn.BatchNorm1d(6, track_running_stats=False)))
    refused(model, classes(rng), r"'between' \(BatchNorm1d\).*those of the batch in eval mode too")


def test_dropout_that_is_not_a_module(rng):
    model = seeded(lambda: classifier(between=Around(lambda m, x: F.dropout(x, 0.5, training=True))))
    refused(model, classes(rng), "draws random numbers")


def test_examples_that_depend_on_each_other(rng):
    model = seeded(lambda: classifier(between=Around(lambda m, h: h - 0.1 * h.mean(0))))
    refused(model, classes(rng), "depends on the other examples of its batch")

    def contrastive(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch["x"])
        return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")

    refused(seeded(MLP), classes(rng), "depends on the other examples of its batch", contrastive)


def test_an_input_without_a_batch_axis(rng):
    """A square layer, so that the shapes of a single vector look like those of a batch."""
    model, x = seeded(lambda: nn.Linear(4, 4)), classes(rng)["x"][0]
    with pytest.raises(RuntimeError, match=r"shape \(4,\)"), capture(model, loss="sum"):
        model(x).sum().backward()
    with capture(model, loss="sum"):
        model(x[None]).sum().backward()


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), r"shape \(\)"),
        (lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none")[:, None], r"shape \(1, 1\)"),
        (lambda m, b: torch.ones(3) * m(b["x"]).sum(), r"shape \(3,\)"),
    ],
)
def test_a_loss_of_the_wrong_shape(loss, got, rng):
    refused(seeded(MLP), classes(rng), rf"the loss returned {got} for 1 examples.*\[B\]", loss)
    refused(seeded(MLP), classes(rng), "the loss returned .* for 4 examples", loss, verify=False)


def test_a_loss_that_does_not_depend_on_the_layers(rng):
    def detached(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            return CLASSIFY(model, batch)

    refused(
        seeded(MLP), classes(rng), r"does not depend on any selected layer \(3 of them.*no_grad", detached
    )
    refused(seeded(MLP), classes(rng), "none of them was called", lambda m, b: b["x"].sum(1), verify=False)


def test_a_loss_that_contains_a_gradient(rng):
    def force(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(1)

    for verify in (True, False):
        refused(
            seeded(MLP),
            classes(rng),
            r"contains a gradient of layer.*attrax.functional",
            force,
            verify=verify,
        )


def test_a_gradient_inside_the_loss_that_is_not_differentiated(rng):
    def adversarial(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        step = torch.autograd.grad(CLASSIFY(model, batch | {"x": x}).sum(), x)[0].sign()
        return CLASSIFY(model, batch | {"x": batch["x"] + 0.1 * step})

    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, adversarial)
    assert_gradients(captured(live(model, [batch], adversarial)), right)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_example_that_is_not_finite_is_named(value, rng):
    model, batch = seeded(MLP), classes(rng)
    batch["x"][2, 1] = value
    refused(
        model,
        batch | {"example_ids": list("abcd")},
        r"non-finite gradients of examples \['c'\] in layers.*'first.weight'",
    )


def test_an_example_with_a_non_finite_loss_can_be_skipped(rng):
    model, tensors = seeded(MLP), classes(rng)
    right = one_by_one(model, tensors, CLASSIFY)
    tensors["x"][1] = float("nan")
    batch = {**tensors, "example_ids": list("abcd"), "text": list("ABCD")}
    source = live(model, [batch], CLASSIFY, on_nonfinite="skip")
    block = collect(source)
    assert block.examples.ids == ("a", "c", "d")
    assert source.skipped == [("b", "non-finite loss")]
    assert_gradients(captured(source), {n: g[[0, 2, 3]] for n, g in right.items()})
    everything = batch | {"x": torch.full_like(tensors["x"], float("nan"))}
    with pytest.raises(ValueError, match="yielded no examples"):
        collect(live(model, [everything], CLASSIFY, on_nonfinite="skip"))


def test_an_infinite_activation_with_a_finite_loss_is_noticed(rng):
    """tanh saturates: the loss and the output gradients are finite, the weight gradient is not a number."""
    model, batch = seeded(MLP), classes(rng)
    batch["x"][2] = torch.tensor([float("inf"), 0.0, 0.0, 0.0])
    assert CLASSIFY(model, batch).isfinite().all()
    refused(model, batch, "non-finite gradients of examples", on_nonfinite="skip")


def test_data(rng):
    model, batch = seeded(MLP), classes(rng)
    with pytest.raises(ValueError, match="yielded no examples"):
        collect(live(model, [], CLASSIFY))
    with pytest.raises(ValueError, match="yielded no examples"):
        graddot(live(model, [batch], CLASSIFY), live(model, [], CLASSIFY))
    with pytest.raises(ValueError, match=r"2 ids for 4 rows"):
        collect(live(model, [batch | {"example_ids": ["a", "b"]}], CLASSIFY))
    with pytest.raises(ValueError, match="no tensor with a batch axis"):
        collect(live(model, [{"x": 3.0}], CLASSIFY))


def test_arguments_of_the_wrong_kind(unchecked, rng):
    model, batch = seeded(MLP), classes(rng)
    untyped: Any = live
    with pytest.raises(ValueError, match=r"a batch is a list.*for x, y in loader"):
        collect(untyped(model, [[batch["x"], batch["y"]]], CLASSIFY))
    with pytest.raises(ValueError, match="on_nonfinite"):
        untyped(model, [batch], CLASSIFY, on_nonfinite="ignore")


def test_an_empty_batch_adds_nothing(rng):
    model, batch = seeded(MLP), classes(rng)
    empty = {k: v[:0] for k, v in batch.items()}
    assert_gradients(
        captured(live(model, [empty, batch, empty], CLASSIFY)), captured(live(model, [batch], CLASSIFY))
    )


def test_one_shot_data_says_so(rng):
    model, batch = seeded(MLP), classes(rng)
    assert live(model, [batch], CLASSIFY).reiterable and not live(model, iter([batch]), CLASSIFY).reiterable


def test_an_input_changed_in_place_after_its_layer_is_an_error(rng):
    def overwritten(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x)) * 1.0
        y = m.b(h)
        return y + h.mul_(2)[:, :3]

    model = seeded(lambda: Around(overwritten, a=nn.Linear(4, 4), b=nn.Linear(4, 3)))
    refused(model, classes(rng), r"input of layer 'b' was changed in place", verify=False)


def test_language_model_loss_needs_labels(rng):
    batch = documents(rng, [3, 4])
    with pytest.raises(KeyError, match="labels"):
        collect(live(seeded(TinyLM), [{k: batch[k] for k in ("input_ids", "attention_mask")}], causal_lm()))
