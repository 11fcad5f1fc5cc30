"""Models that draw random numbers, or remember their calls, are trained as without a capture: bit for bit."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attrax.core import Block
from attrax.frontends import capture, live

from .models import seeded
from .oracle import assert_gradients, block_gradients

pytestmark = pytest.mark.usefixtures("unchecked")
STEPS, BATCH = 20, 4


class Network(nn.Module):
    """Layers, one of them without a rule, and a factor that is drawn or remembered."""

    def __init__(self, factor: Callable[[Any], float], inside: bool) -> None:
        super().__init__()
        self.first, self.scaled, self.last = nn.Linear(3, 4), Scaled(), nn.Linear(4, 2)
        own = self.scaled if inside else self
        own.factor, self.inside = factor, inside
        own.calls, own.history, own.sums, own.seen = 0, [1.0], torch.zeros(1), {"last": torch.zeros(1)}
        own.torch_generator = torch.Generator().manual_seed(0)
        own.generators = {"numpy": np.random.default_rng(0), "python": random.Random(0)}

    @property
    def own(self) -> Any:
        """The module that draws and remembers."""
        return self.scaled if self.inside else self

    def forward(self, x: Tensor) -> Tensor:
        outside = 1.0 if self.inside else self.own.factor(self)
        return self.last(self.scaled(torch.tanh(self.first(x)))) * outside


class Scaled(nn.Module):
    """Captured by running it once more, unless it draws what all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.factor: Callable[[Any], float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (1.0 if self.factor is None else self.factor(self))


def counter(net: Any) -> float:
    net.calls += 1
    return 1 / net.calls


def history(net: Any) -> float:
    net.history.append(net.history[-1] / 2 + 1)
    return net.history[-1]


def in_place(net: Any) -> float:
    return float(net.sums.add_(1)) / STEPS


def nested(net: Any) -> float:
    net.seen["last"] += 1
    return float(net.seen["last"]) / STEPS


def made_late(net: Any) -> float:
    net.late = getattr(net, "late", 0) + 1
    return 1 / net.late


DRAWS: dict[str, Callable[[Any], float]] = {
    "torch": lambda net: float(torch.rand(())),
    "numpy": lambda net: float(np.random.rand()),  # noqa: NPY002
    "python": lambda net: random.random(),
    "torch generator": lambda net: float(torch.rand((), generator=net.torch_generator)),
    "numpy generator": lambda net: float(net.generators["numpy"].random()),
    "python generator": lambda net: net.generators["python"].random(),
}
MEMORIES = {
    "counter": counter,
    "history": history,
    "in place": in_place,
    "nested": nested,
    "made late": made_late,
}


def reseed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def trained(factor: Callable[[Any], float], inside: bool, *, watched: bool) -> list[Any]:
    """Parameters after some steps, and what is drawn next."""
    reseed()
    net = Network(factor, inside).double()
    x = torch.randn(STEPS, BATCH, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moving = torch.optim.SGD(net.parameters(), lr=0.05)
    with capture(net, loss="sum") if watched else contextlib.nullcontext():
        for batch in x:
            moving.zero_grad()
            net(batch).square().sum().backward()
            moving.step()
    after = [draw(net.own) for draw in DRAWS.values()]
    return [*(p.tolist() for p in net.parameters()), after, net.own.calls, net.own.history]


@pytest.mark.parametrize(
    ("inside", "how"), [*((i, how) for i in (0, 1) for how in DRAWS), *((0, m) for m in MEMORIES)]
)
def test_training_is_unchanged(inside, how):
    factor = (DRAWS | MEMORIES)[how]
    assert trained(factor, bool(inside), watched=True) == trained(factor, bool(inside), watched=False)


@pytest.mark.parametrize("how", DRAWS)
def test_a_live_source_leaves_the_generators_as_they_were(how):
    net, fresh = (Network(DRAWS[how], False).double().eval() for _ in range(2))
    batch = {"x": torch.ones(2, 3, dtype=torch.float64), "example_ids": ("a", "b")}
    source = live(net, [batch], lambda model, b: model(b["x"]).square().sum(1), verify=False)
    reseed()
    list(source.map(lambda *_: None))
    found = DRAWS[how](net)
    reseed()
    assert found == DRAWS[how](fresh)


class Noisy(nn.Module):
    """Draws numbers for every example: in a layer without rule, or before one with a rule."""

    def __init__(self, noise: Callable[[Any, Tensor], Tensor], always: bool) -> None:
        super().__init__()
        self.inner, self.noise, self.always = nn.Linear(3, 2), noise, always
        self.scale, self.rng = nn.Parameter(torch.ones(2)), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        noise = self.noise(self, x) if self.training or self.always else 0.0
        return self.inner(x + noise) * self.scale


NOISES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "torch": lambda net, x: torch.randn_like(x),
    "numpy": lambda net, x: torch.as_tensor(np.random.randn(*x.shape)),  # noqa: NPY002
    "generator": lambda net, x: torch.as_tensor(net.rng.normal(size=tuple(x.shape))),
    "python": lambda net, x: torch.full_like(x, random.random()),
}


@pytest.mark.parametrize("how", NOISES)
def test_a_layer_that_is_run_once_more_draws_the_same(how):
    """Against autograd of each example's loss in one forward pass with the same draws."""
    net, blocks = seeded(lambda: Noisy(NOISES[how], False)).train(), list[Block]()
    x = torch.randn(BATCH, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def losses() -> Tensor:
        reseed()
        net.rng = np.random.default_rng(5)
        return net(x).square().sum(1)

    names, parameters = zip(*net.named_parameters(), strict=True)
    each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses()]
    right = {n: torch.stack(g) for n, g in zip(names, zip(*each, strict=True), strict=True)}
    with capture(net, sinks=[blocks.append], loss="sum", recompute=Noisy):
        losses().sum().backward()
    assert_gradients(block_gradients(blocks[0]), right)


@pytest.mark.parametrize("how", ["torch", "numpy", "generator"])
def test_a_model_whose_draws_hide_its_examples_is_told_so(how):
    net = seeded(lambda: Noisy(NOISES[how], True))
    x = torch.ones(BATCH, 3, dtype=torch.float64).cumsum(0)
    told = pytest.raises(RuntimeError, match="draws random numbers in its forward")
    with told, capture(net, loss="sum", exclude="^$"):
        net(x).square().sum().backward()
