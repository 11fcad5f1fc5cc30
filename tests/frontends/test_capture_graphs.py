"""Which autograd graph is which: several passes in one backward, checkpointing, parts of a model, other gradients."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from attrax.core import Block, collect, content_ids
from attrax.frontends import capture, classification, live
from attrax.methods import graddot

from .loops import sum_ce
from .models import MLP, TinyLM, classes, seeded
from .oracle import assert_gradients, block_gradients, one_by_one
from .test_live import Around

CLASSIFY = classification()
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def blocks() -> list[Block]:
    return []


def classes_ids(batch: Any) -> tuple[str, ...]:
    return content_ids({"x": batch["x"]})


def test_two_forwards_before_one_backward(blocks, rng):
    model, first, second = seeded(MLP), classes(rng), classes(rng, 3)
    rights = [one_by_one(model, batch, CLASSIFY) for batch in (first, second)]
    with capture(model, sinks=[blocks.append], loss="sum"):
        a, b = sum_ce(model, first), sum_ce(model, second)
        (a + 2 * b).backward()
    found = sorted(blocks, key=lambda block: -len(block.examples))
    assert_gradients(block_gradients(found[0]), rights[0])
    assert_gradients(block_gradients(found[1]), {n: 2 * g for n, g in rights[1].items()})


def test_two_forwards_and_two_backwards_in_any_order(blocks, rng):
    model, batches = seeded(MLP), [classes(rng), classes(rng, 3)]
    rights = [one_by_one(model, batch, CLASSIFY) for batch in batches]
    with capture(model, sinks=[blocks.append], loss="sum"):
        losses = [sum_ce(model, batch) for batch in batches]
        for k in (0, 1):
            losses[k].backward()
        losses = [sum_ce(model, batch) for batch in batches]
        for k in (1, 0):
            losses[k].backward()
    for block, k in zip(blocks, (0, 1, 1, 0), strict=True):
        assert_gradients(block_gradients(block), rights[k])


def test_a_repeated_backward_is_captured_again(blocks, rng):
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    with capture(model, sinks=[blocks.append], loss="sum"):
        loss = sum_ce(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
    assert [b.examples.micro for b in blocks] == [0, 1]
    for block in blocks:
        assert_gradients(block_gradients(block), right)


def test_gradients_of_inputs_are_not_steps(blocks, rng):
    """Adversarial examples, influence of inputs, Hessian products: nothing is added to `.grad`, nothing is captured."""
    model, batch = seeded(MLP), classes(rng)
    with capture(model, sinks=[blocks.append], loss="sum"):
        x = batch["x"].clone().requires_grad_()
        step = torch.autograd.grad(sum_ce(model, {**batch, "x": x}), x)[0].sign()
        sum_ce(model, {**batch, "x": x}).backward(inputs=[x])
        grads = torch.autograd.grad(sum_ce(model, batch), list(model.parameters()), create_graph=True)
        torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), list(model.parameters()))
        attacked = {**batch, "x": batch["x"] + 0.1 * step}
        right = one_by_one(model, attacked, CLASSIFY)
        sum_ce(model, attacked).backward()
    assert len(blocks) == 1
    assert_gradients(block_gradients(blocks[0]), right)


def test_only_the_parameters_of_a_backward_are_captured(blocks, rng):
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    with capture(model, sinks=[blocks.append], loss="sum"):
        sum_ce(model, batch).backward(inputs=[model.second.weight, model.last.bias])
        model.zero_grad()
        model.first.requires_grad_(False)
        sum_ce(model, batch).backward()
    assert_gradients(block_gradients(blocks[0]), {n: right[n] for n in ("second.weight", "last.bias")})
    rest = {n: g for n, g in right.items() if not n.startswith("first")}
    assert_gradients(block_gradients(blocks[1]), rest)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_first_order_backward_that_keeps_its_graph(blocks, rng):
    """AdaHessian and its kin: the gradient is captured, products with it are not; a penalty on it is refused."""
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    with capture(model, sinks=[blocks.append], loss="sum"):
        sum_ce(model, batch).backward(create_graph=True)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), list(model.parameters()))
        model.zero_grad()
        x = batch["x"].clone().requires_grad_()
        loss = sum_ce(model, {**batch, "x": x})
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=r"contains a gradient of layer.*paused\(\)"):
            (loss + slope.square().sum()).backward()
    assert_gradients(block_gradients(blocks[0]), right)


def test_a_penalty_on_a_gradient_that_is_constant_is_refused(rng):
    """The gradient of a linear model does not depend on its output gradient, but on its weight."""
    model, batch = seeded(lambda: nn.Linear(4, 1, bias=False)), classes(rng)
    with capture(model, loss="sum", verify=False):
        x = batch["x"].clone().requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="contains a gradient"):
            slope.square().sum().backward()


def test_parts_of_a_model_called_by_the_loop_are_one_pass(blocks, rng):
    """An encoder and a decoder without a forward of their own: one block, ids from the data."""
    parts = seeded(lambda: nn.ModuleDict({"enc": MLP(), "dec": nn.Linear(3, 4)}))
    batch = classes(rng)

    def loss(model: Any, batch: Any) -> Tensor:
        return (model["dec"](torch.tanh(model["enc"](batch["x"]))) - batch["x"]).square().sum(1)

    right = one_by_one(parts, batch, loss)
    whole = classes_ids(batch)
    with capture(parts, sinks=[blocks.append], loss="sum"):
        codes = [parts["enc"](batch["x"]), parts["enc"](batch["x"][:2])]
        for z, x in zip(codes, (batch["x"], batch["x"][:2]), strict=True):
            (parts["dec"](torch.tanh(z)) - x).square().sum().backward()
    assert [b.examples.ids for b in blocks] == [whole, whole[:2]]
    assert_gradients(block_gradients(blocks[0]), right)
    assert_gradients(block_gradients(blocks[1]), {n: g[:2] for n, g in right.items()})


def test_a_model_called_on_its_own_output_is_one_pass(blocks, rng):
    """Unrolled in time: one row an example, all steps."""
    model, x = seeded(lambda: nn.Linear(4, 4)), classes(rng)["x"]

    def unrolled(model: nn.Module, batch: Any) -> Tensor:
        return torch.tanh(model(torch.tanh(model(batch["x"])))).square().sum(1)

    right = one_by_one(model, {"x": x}, unrolled)
    with capture(model, sinks=[blocks.append], loss="sum"):
        unrolled(model, {"x": x}).sum().backward()
    assert len(blocks) == 1 and blocks[0].grads["weight"].calls == 2
    assert_gradients(block_gradients(blocks[0]), right)


def test_activations_do_not_identify_examples(blocks, rng):
    """A captured part is fed by a trainable one outside the capture: content ids would change at every step."""
    below, above, x = nn.Linear(4, 4).double(), seeded(lambda: nn.Linear(4, 3)), classes(rng)["x"]
    with (
        pytest.raises(ValueError, match=r"depend on parameters outside.*Pass ids="),
        capture(above, loss="sum"),
    ):
        above(below(x)).sum().backward()
    with capture(above, sinks=[blocks.append], loss="sum", ids=lambda inputs: list("abcd")):
        above(below(x)).sum().backward()
    assert blocks[0].examples.ids == tuple("abcd")


@pytest.mark.parametrize("include", [None, r"second"])
@pytest.mark.parametrize("how", ["reentrant", "nonreentrant"])
def test_checkpointing_and_selections_inside_it(how, include, blocks, rng):
    model, batch = seeded(lambda: MLP(how=how)), classes(rng)
    right = one_by_one(seeded(MLP), batch, CLASSIFY)
    right = {n: g for n, g in right.items() if include is None or include in n}
    with capture(model, sinks=[blocks.append], loss="sum", include=include):
        for _ in range(2):
            sum_ce(model, batch).backward()
            model.zero_grad()
    assert [b.examples.ids for b in blocks] == [classes_ids(batch)] * 2
    for block in blocks:
        assert all(leaf.g.shape[0] == 4 for leaf in block.grads.values())
        assert_gradients(block_gradients(block), right)


@pytest.mark.parametrize(
    ("around", "how"),
    [
        ("a part", "REENTRANT"),
        ("a part", "NO_REENTRANT"),
        ("a part", "offload"),
        ("the model", "NO_REENTRANT"),
        ("the model", "offload"),
    ],
)
def test_wrappers_of_checkpointing_change_no_name(around, how, blocks, rng):
    """What accelerate's and OLMo-core's options put around modules."""
    plain, batch = seeded(MLP), classes(rng)
    right = one_by_one(plain, batch, CLASSIFY)
    wrapped: Any = offload_wrapper
    if how != "offload":
        wrapped = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl[how])
    model = seeded(MLP) if around == "a part" else wrapped(seeded(MLP))
    if around == "a part":
        model.second = wrapped(model.second)
    with capture(model, sinks=[blocks.append], loss="sum", include=r"^[^_]*$"):
        sum_ce(model, batch).backward()
    assert_gradients(block_gradients(blocks[0]), right)
    assert blocks[0].examples.ids == classes_ids(batch)
    source, queries = live(model, [batch], CLASSIFY), live(plain, [batch], CLASSIFY)
    torch.testing.assert_close(graddot(source, queries).values, graddot(queries, queries).values)


def test_layers_that_share_an_input_are_stacked_in_the_order_of_the_forward_pass(blocks, rng):
    """Reentrant checkpointing of each runs them again last one first."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up, self.gate = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.gate(h).sigmoid() * self.up(h)

    plain, model, batch = seeded(Gated), seeded(Gated), classes(rng)
    for name in ("up", "gate"):
        wrapped = checkpoint_wrapper(getattr(model, name), checkpoint_impl=CheckpointImpl.REENTRANT)
        setattr(model, name, wrapped)
    with capture(model, sinks=[blocks.append], loss="sum"):
        sum_ce(model, batch).backward()
    source = live(plain, [batch], CLASSIFY)
    assert set(blocks[0].grads) == set(collect(source).grads) == {"first.weight", "gate.weight"}
    assert_gradients(block_gradients(blocks[0]), one_by_one(plain, batch, CLASSIFY))


def test_a_forward_pass_on_what_a_backward_has_freed(blocks, rng):
    """For a log, with gradients enabled: nothing will be differentiated through the rows that were picked."""
    model, batch = seeded(MLP), classes(rng)
    picked = batch["x"].clone().requires_grad_()[torch.arange(4)]
    with capture(model, sinks=[blocks.append], loss="sum", ids=lambda inputs: list("abcd")):
        model(picked).sum().backward()
        model(picked)
    assert len(blocks) == 1


def test_two_checkpointed_passes_in_one_backward(blocks, rng):
    model, first, second = seeded(lambda: MLP(how="reentrant")), classes(rng), classes(rng, 3)
    rights = [one_by_one(seeded(MLP), batch, CLASSIFY) for batch in (first, second)]
    with capture(model, sinks=[blocks.append], loss="sum", include="second"):
        (sum_ce(model, first) + sum_ce(model, second)).backward()
    found = sorted(blocks, key=lambda block: -len(block.examples))
    for block, right, batch in zip(found, rights, (first, second), strict=True):
        assert block.examples.ids == classes_ids(batch)
        assert_gradients(block_gradients(block), {n: g for n, g in right.items() if "second" in n})


def test_checkpointing_around_and_between_calls_of_the_model(blocks, rng):
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    model, batch = seeded(lambda: nn.Sequential(*layers)), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    x = batch["x"].clone().requires_grad_()
    ce = lambda logits: F.cross_entropy(logits, batch["y"], reduction="sum")  # noqa: E731
    with capture(model, sinks=[blocks.append], loss="sum"):
        ce(checkpoint(model, x, use_reentrant=True)).backward()
        ce(checkpoint(model, x, use_reentrant=False)).backward()
        ce(checkpoint_sequential(model, 2, x, use_reentrant=False)).backward()
        with pytest.raises(RuntimeError, match="recomputed in backward"):
            ce(checkpoint_sequential(model, 2, x, use_reentrant=True)).backward()
    assert [b.examples.ids for b in blocks] == [content_ids({"input": x})] * 3
    for block in blocks:
        assert_gradients(block_gradients(block), right)


def test_parts_that_are_joined_outside_a_module_are_refused(rng):
    """As with ``model.forward(...)``: nothing says that the rows of the parts belong together."""
    parts = seeded(lambda: nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3), "c": nn.Linear(3, 2)}))
    x = classes(rng)["x"]
    with capture(parts, loss="sum"), pytest.raises(RuntimeError, match="outputs of 2 parts.*as a whole"):
        parts["c"](parts["a"](x) + parts["b"](x))
    model = seeded(lambda: TinyLM(layers=1))
    ids = torch.randint(1, 11, (2, 5), generator=rng)
    with capture(model, loss="sum"), pytest.raises(RuntimeError, match=r"not model.forward\(...\)"):
        model.forward(ids)


def test_every_parameter_is_checked_once_it_has_a_gradient(blocks, rng):
    """A layer that is called past its hooks later on is noticed then."""

    def late(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        return m.b(h) if m.steps < 2 else m.b(h) + m.c.forward(h)

    model, batch = seeded(lambda: Around(late, **{n: nn.Linear(4, 4) for n in "abc"})), classes(rng)
    with capture(model, sinks=[blocks.append], loss="sum"):
        for model.steps in range(2):
            sum_ce(model, batch).backward()
            model.zero_grad()
        model.steps = 2
        with pytest.raises(RuntimeError, match=r"c.weight: has a gradient but its layer was never captured"):
            sum_ce(model, batch).backward()
