"""Models that are called with other parameters, or under transforms, within a training step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import parametrize

from attrax.frontends import capture

from .loops import known, sum_ce
from .models import MLP, VOCAB, classes, seeded
from .oracle import assert_gradients, block_gradients, one_by_one

pytestmark = pytest.mark.usefixtures("unchecked")


def put_in(model: nn.Module, factor: float, x: Tensor) -> Tensor:
    return functional_call(model, {n: p * factor for n, p in model.named_parameters()}, (x,)).square().sum()


def test_gradients_of_what_stands_in_for_parameters_are_checked_at_every_call(rng):
    model, batch = seeded(MLP), classes(rng)
    with capture(model, loss="sum"):
        sum_ce(model, batch).backward()
        model.zero_grad()
        put_in(model, 1.0, batch["x"]).backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match="functional_call"):
            put_in(model, 2.0, batch["x"]).backward()


def test_asking_for_a_gradient_through_stand_ins_is_no_backward(rng):
    """First-order meta learning: an inner step by `torch.autograd.grad`, and a backward from where it leads."""
    model, blocks, batch = seeded(MLP), [], classes(rng)
    parameters = dict(model.named_parameters())
    with capture(model, sinks=[blocks.append], loss="sum"):
        for _ in range(2):
            values = {n: p * 1.0 for n, p in parameters.items()}
            for _ in range(2):
                inner = functional_call(model, values, (batch["x"],)).square().sum()
                grads = torch.autograd.grad(inner, list(values.values()))
                values = {n: parameters[n] - 0.01 * g for n, g in zip(values, grads, strict=True)}
            functional_call(model, values, (batch["x"],)).square().sum().backward()
            model.zero_grad()
    assert len(blocks) == 2


def per_example(model: nn.Module, x: Tensor) -> Any:
    values = {n: p.detach() for n, p in model.named_parameters()}
    return vmap(grad(lambda v, one: functional_call(model, v, (one[None],)).sum()), (None, 0))(values, x)


CALLS: dict[str, Any] = {
    "grad": per_example,
    "jacrev": lambda model, x: jacrev(model)(x),
    "vmap": lambda model, x: vmap(model)(x[None]),
}


@pytest.mark.parametrize("kind", CALLS)
def test_transforms_are_refused_unless_paused(kind, rng):
    model, batch, blocks = seeded(MLP), classes(rng), []
    with capture(model, sinks=[blocks.append], loss="sum") as running:
        with pytest.raises(RuntimeError, match="layer 'first' was called under a transform of torch.func"):
            CALLS[kind](model, batch["x"])
        with running.paused():
            CALLS[kind](model, batch["x"])
        right = one_by_one(model, batch, sum_ce)
        sum_ce(model, batch).backward()
    (block,) = blocks
    assert_gradients(block_gradients(block), right)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


def test_weights_that_are_cached_for_a_step(rng):
    model: Any = seeded(MLP)
    parametrize.register_parametrization(model.second, "weight", Doubled())
    blocks, right = [], []
    with capture(model, sinks=[blocks.append], loss="sum"):
        for _ in range(2):
            batch = classes(rng)
            right.append(one_by_one(model, batch, sum_ce))
            with parametrize.cached():
                sum_ce(model, batch).backward()
            model.zero_grad()
    for block, expected in zip(blocks, right, strict=True):
        assert_gradients(block_gradients(block), expected)


class WithStates(nn.Module):
    """Returns its own loss and the states behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        states = self.embed(x).tanh()
        logits = self.last(states)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "states": states}


def test_the_weight_of_one_backward_of_a_pass_is_not_that_of_the_next(rng):
    """The model's own loss, and then another one of something else that the model has returned."""
    model, blocks = seeded(WithStates).train(), []
    x = torch.randint(0, VOCAB, (2, 5), generator=rng)
    with capture(model, sinks=[blocks.append]):
        output = model(x=x, labels=x)
        output["loss"].backward(retain_graph=True)
        output["states"].sum().backward()
    assert known(blocks[0])[0] is not None and blocks[1].examples.weight is None
