"""Blocks keep their numbers while training writes to the memory that they were captured from."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.frontends import BackwardEvent, capture

from .models import MLP, VOCAB, seeded
from .oracle import assert_gradients, block_gradients, one_by_one

pytestmark = pytest.mark.usefixtures("unchecked")


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().sum()


class Prompted(nn.Module):
    """Tokens at positions, whose gradient is that of the embedding but for an axis, behind a mapped prompt."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4, sparse=sparse)
        self.positions = nn.Parameter(torch.ones(5, 4))
        self.prompt = nn.Parameter(torch.ones(2, 4))
        self.map, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.map(self.prompt[None].expand(len(x), -1, -1))
        return self.last(torch.cat([self.embed(x) + self.positions[None], prompt], 1))


class Buffered(nn.Module):
    """A layer that reads from a buffer of the module's."""

    held: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("held", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.held = self.held.new_zeros(x.shape) if self.held.shape != x.shape else self.held
        with torch.no_grad():
            self.held.copy_(x)
        return self.last(self.held)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "inputs": (MLP, 3),
    "positions of one example": (Prompted, 1),
    "sparse gradients": (lambda: Prompted(sparse=True), 3),
    "buffers": (Buffered, 3),
}


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_stay(kind, rng):
    """The batch lies in one place, gradients are accumulated, clipped and used, and a block is looked at afterwards."""
    make, size = MODELS[kind]
    model, blocks, right = seeded(make), [], []
    tokens = isinstance(model, Prompted)
    x = torch.zeros(size, 5, dtype=torch.long) if tokens else torch.zeros(size, 4, dtype=torch.float64)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, sinks=[blocks.append], loss="sum"):
        for k in range(4):
            made = (
                torch.randint(0, VOCAB, x.shape, generator=rng)
                if tokens
                else torch.randn(x.shape, generator=rng)
            )
            x.copy_(made)
            alone = one_by_one(copy.deepcopy(model), {"x": x.clone()}, squares)
            right.append({n: g.to_dense() for n, g in alone.items()})
            squares(model, {"x": x}).backward()
            if k % 2:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.mul_(0.01)
                moving.step()
                moving.zero_grad()
    for block, expected in zip(blocks, right, strict=True):
        assert_gradients(block_gradients(block), expected)


def hidden_states(model: Any, x: Tensor) -> None:
    kept: list[Tensor] = []
    handle = model.last.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    model(x).square().sum().backward()
    handle.remove()
    kept[0].detach().zero_()


def given_gradient(model: Any, x: Tensor) -> None:
    given = torch.ones(len(x), 3, dtype=x.dtype)
    model(x).backward(given)
    given.zero_()


@pytest.mark.parametrize("write", [hidden_states, given_gradient])
def test_writes_to_what_blocks_hold_are_told(write: Callable[[nn.Module, Tensor], None], rng):
    model = seeded(MLP)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, loss="sum", sinks=[lambda block: None]):
        write(model, torch.randn(3, 4, generator=rng, dtype=torch.float64))
        with pytest.warns(RuntimeWarning, match=r"step 0 hold memory that was written to .*'last.weight'"):
            moving.step()


@pytest.mark.parametrize("received", ["", "sinks", "before_step"])
def test_gradients_that_nobody_receives_are_not_held_until_the_step(rng, received):
    model, seen = seeded(MLP), list[Any]()

    def look(event: BackwardEvent) -> None:
        seen.extend(weakref.ref(leaf.g) for _, leaf in event.blocks[0].grads.items())

    to: Any = {received: [lambda block: None]} if received else {}
    with capture(model, **to, after_backward=[look], loss="sum"):
        squares(model, {"x": torch.randn(3, 4, generator=rng, dtype=torch.float64)}).backward()
        assert seen and [x() is not None for x in seen] == [bool(received)] * len(seen)


def test_a_transform_sees_what_callbacks_have_left_without_a_sink(rng):
    """It may keep what it needs, such as statistics."""
    model, seen = seeded(MLP), set[str]()
    with capture(model, transform=lambda name, _: seen.add(name), after_backward=[print], loss="sum"):
        squares(model, {"x": torch.randn(3, 4, generator=rng, dtype=torch.float64)}).backward()
    assert seen == {"first.weight", "second.weight", "last.weight"}
