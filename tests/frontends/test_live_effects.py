"""A live source computes no weight gradient and leaves no trace, however a pass over it ends."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Examples, Leaf, collect
from attrax.frontends import causal_lm, classification, live

from .models import MLP, TinyLM, classes, documents, seeded
from .oracle import assert_gradients, captured, one_by_one
from .traces import Operations, snapshot, untouched, watched_inputs, weight_gradient_ops

CLASSIFY = classification()
pytestmark = pytest.mark.usefixtures("unchecked")


def nothing(name: str, leaf: Leaf, examples: Examples) -> None:
    """Visit a leaf and look at nothing."""


def busy() -> Any:
    """A model in the middle of training: mixed modes, a frozen parameter, old gradients."""
    model = seeded(lambda: TinyLM(d=7, tied=True))
    model.train()
    model.blocks[0].eval()
    model.blocks[1].o.bias.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    return model


def test_no_weight_gradient_is_computed(rng):
    """Rows and widths are such that nothing else has the shape of a weight."""
    model = seeded(lambda: TinyLM(d=7))
    batch = documents(rng, [5, 4, 3])
    with Operations() as trained:
        causal_lm()(model, batch).sum().backward()
    model.zero_grad()
    with Operations() as passed:
        list(live(model, [batch], verify=False).map(nothing))
    assert weight_gradient_ops(model, trained) >= 16
    assert weight_gradient_ops(model, passed) == 0
    norm_weights = passed.shaped({(7,)}, "native_layer_norm_backward")
    assert trained.shaped({(7,)}, "native_layer_norm_backward") > norm_weights == 0


def test_no_accumulation_node_runs(rng):
    model = seeded(MLP)
    fired: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    list(live(model, [classes(rng)], CLASSIFY).map(nothing))
    assert fired == []


@pytest.mark.parametrize("how", [None, "reentrant", "nonreentrant"])
def test_a_pass_leaves_the_model_as_it_was(how, rng):
    model = busy()
    model.how = how
    with untouched(model):
        collect(live(model, [documents(rng, [4, 3]), documents(rng, [2])]))


def test_a_loss_that_raises_leaves_the_model_as_it_was(rng):
    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = causal_lm()(model, batch)
        if len(batch["labels"]) == 3:
            raise KeyError("in the middle")
        return losses

    model = busy()
    data = [documents(rng, [4, 3]), documents(rng, [4, 3, 2])]
    with pytest.raises(KeyError, match="in the middle"), untouched(model):
        collect(live(model, data, loss))
    with untouched(model):
        collect(live(model, data[:1], loss))


def test_a_layer_that_raises_leaves_the_model_as_it_was(rng):
    model = busy()
    model.blocks[1].up = nn.Linear(99, 2).double()
    with pytest.raises(RuntimeError, match="shape"), untouched(model):
        collect(live(model, [documents(rng, [4, 3])]))


def test_a_visit_that_raises_leaves_the_model_as_it_was(rng):
    def visit(name: str, leaf: Leaf, examples: Examples) -> None:
        raise KeyError(name)

    model = busy()
    source = live(model, [documents(rng, [4, 3])], verify=False)
    with pytest.raises(KeyError), untouched(model):
        list(source.map(visit))
    with untouched(model):
        assert len(list(source.map(nothing))) == 1


def test_a_consumer_that_stops_leaves_the_model_as_it_was(rng):
    model = busy()
    with untouched(model):
        passing = live(model, [documents(rng, [4, 3])] * 3).map(nothing)
        next(passing)
        del passing
    with untouched(model):
        for _ in live(model, [documents(rng, [4, 3])] * 3).map(nothing):
            break


def test_nothing_is_on_the_model_between_batches(rng):
    model = busy()
    before = snapshot(model)["hooks"]
    for _ in live(model, [documents(rng, [4, 3])] * 2).map(nothing):
        assert snapshot(model)["hooks"] == before
        assert any(p.requires_grad for p in model.parameters())


def test_random_numbers_of_the_loop_are_its_own(rng):
    """Losses may draw numbers if the caller says so; the loop's stream does not move."""

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"] + torch.randn_like(batch["x"]))).square().sum(1)

    model, batch = seeded(MLP), classes(rng)
    with untouched(model):
        collect(live(model, [batch], noisy, verify=False))
    with untouched(model), pytest.raises(ValueError, match="random numbers"):
        collect(live(model, [batch], noisy))


def test_gradients_of_other_modules_and_of_the_data_are_not_touched(rng):
    head = nn.Linear(3, 2).double()
    batch = classes(rng)
    batch["x"].requires_grad_()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return head(model(batch["x"])).square().sum(1)

    collect(live(seeded(MLP), [batch], loss, verify=False))
    assert head.weight.grad is None and batch["x"].grad is None


def test_factors_are_freed_layer_by_layer(rng):
    model = seeded(lambda: TinyLM(d=7))
    with watched_inputs(model.blocks[0].down):
        for _ in live(model, [documents(rng, [5, 4])]).map(nothing):
            pass


def test_a_layer_is_delivered_before_the_next_one_runs_backward(rng):
    """Leaves come one at a time, last layer first: a reducer never has to hold two."""
    order: list[str] = []
    model = seeded(lambda: MLP())
    model.act.register_full_backward_hook(lambda *_: order.append("act"))

    def visit(name: str, leaf: Leaf, examples: Examples) -> None:
        order.append(name)

    list(live(model, [classes(rng)], CLASSIFY, verify=False).map(visit))
    assert order == ["last.weight", "act", "second.weight", "act", "first.weight"]


LEFT_ALONE: dict[str, Callable[[nn.Module], Any]] = {
    "frozen later": lambda model: model.requires_grad_(False),
    "cast": lambda model: model.float().double(),
    "new tensors": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
}


@pytest.mark.parametrize("change", LEFT_ALONE)
def test_the_model_may_change_after_the_source_was_made(change, rng):
    """A source holds names, not tensors."""
    model, batch = seeded(TinyLM), documents(rng, [4, 3])
    right = one_by_one(model, batch, causal_lm())
    source = live(model, [batch])
    LEFT_ALONE[change](model)
    assert_gradients(captured(source), right, within=1e-5 if change == "cast" else 1e-10)


def test_parameters_that_come_later_are_not_left_out(rng):
    model, batch = seeded(lambda: TinyLM(tied=True)), documents(rng, [4, 3])
    model.ln.bias.requires_grad_(False)
    source = live(model, [batch])
    model.ln.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"became trainable.*'ln.bias'"):
        collect(source)
    source = live(model, [batch])
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"part of the model.*'head.weight'"):
        collect(source)


def test_a_parameter_replaced_by_another_is_captured(rng):
    model, batch = seeded(MLP), classes(rng)
    source = live(model, [batch], CLASSIFY)
    model.first.weight = nn.Parameter(2 * model.first.weight.detach())
    logits = model(batch["x"])
    right = torch.autograd.grad(F.cross_entropy(logits, batch["y"], reduction="sum"), model.first.weight)[0]
    torch.testing.assert_close(captured(source)["first.weight"].sum(0), right)
