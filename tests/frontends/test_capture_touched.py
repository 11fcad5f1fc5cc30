"""Loops that change gradients, or use them in an unusual way, between a backward and the optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from attrax.core import Directions, fingerprint
from attrax.frontends import capture, record

from .loops import sum_ce
from .models import MLP, classes, seeded

pytestmark = pytest.mark.usefixtures("unchecked")


def scale(model: nn.Module, factor: float) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(factor)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_thrown_away_right_before_the_step(to_none, rng):
    """A loop that skips a batch by zeroing: no optimizer uses its block."""
    model, blocks, steps = seeded(MLP), [], []
    moving = SGD(model.parameters(), lr=0.1)
    with capture(model, sinks=[blocks.append], loss="sum", trajectory=record(steps.append)):
        for k in range(3):
            sum_ce(model, classes(rng)).backward()
            if k == 1:
                moving.zero_grad(set_to_none=to_none)
            moving.step()
            moving.zero_grad()
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [(0, 0.1), (1, 0.0), (2, 0.1)]
    assert all(step.unused == ((0,) if step.step == 1 else ()) for step in steps)


def twice(model: nn.Module, moving: SGD) -> None:
    moving.step()
    moving.step()


def by_another(model: nn.Module, moving: SGD) -> None:
    moving.step()
    SGD(model.parameters(), lr=0.5).step()


@pytest.mark.parametrize("use", [twice, by_another])
def test_gradients_used_twice_are_told(use, rng):
    model, steps, blocks = seeded(MLP), [], []
    moving = SGD(model.parameters(), lr=0.1)
    with capture(model, sinks=[blocks.append], loss="sum", trajectory=record(steps.append)):
        sum_ce(model, classes(rng)).backward()
        with pytest.warns(RuntimeWarning, match="step 1 uses gradients that were in .grad before"):
            use(model, moving)
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [(0, 0.1)]
    assert [(step.step, step.clip is None) for step in steps] == [(0, False), (1, True)]


def test_gradients_changed_between_backwards_are_told(rng):
    model, steps = seeded(MLP), []
    moving = SGD(model.parameters(), lr=0.1)
    with capture(model, loss="sum", trajectory=record(steps.append)):
        for window in range(2):
            for _ in range(2):
                sum_ce(model, classes(rng)).backward()
                if window == 0:
                    scale(model, 0.5)
            if window == 0:
                with pytest.warns(RuntimeWarning, match="step 0, .* were changed between its backwards"):
                    moving.step()
            else:
                moving.step()
            moving.zero_grad()
    assert [step.clip is None for step in steps] == [True, False]


def between(model: nn.Module, batch: Any) -> None:
    sum_ce(model, batch).backward()
    scale(model, 0.5)
    sum_ce(model, batch).backward()


def turned(model: nn.Module, batch: Any) -> None:
    """Ascent: norms stay, signs do not."""
    sum_ce(model, batch).backward()
    scale(model, -1.0)


@pytest.mark.filterwarnings("ignore:.*were changed between its backwards:RuntimeWarning")
@pytest.mark.parametrize("change", [between, turned])
def test_shares_are_refused_where_no_positive_factor_explains_the_gradients(change, rng):
    model = seeded(MLP)
    moving = SGD(model.parameters(), lr=0.1)
    with capture(model, loss="sum", directions=Directions(target="as_trained")):
        change(model, classes(rng))
        with pytest.raises(ValueError, match="not one multiple of the backward's"):
            moving.step()


def by_hook(p: nn.Parameter) -> None:
    p.register_hook(lambda g: g)


def after_accumulation(p: nn.Parameter) -> None:
    p.register_post_accumulate_grad_hook(lambda p: None)


@pytest.mark.parametrize("attach", [by_hook, after_accumulation])
def test_hooks_on_parameters_are_told_once(attach: Callable[[nn.Parameter], None], rng):
    model: Any = seeded(MLP)
    moving = SGD(model.parameters(), lr=0.1)
    attach(model.second.weight)
    with capture(model, loss="sum"):
        sum_ce(model, classes(rng)).backward()
        with pytest.warns(RuntimeWarning, match=r"parameters have hooks .*\['second.weight'\] at step 0"):
            moving.step()
        moving.zero_grad()
        sum_ce(model, classes(rng)).backward()
        moving.step()


class Own(torch.optim.Optimizer):
    """An optimizer that makes its own rates, as Hugging Face's Adafactor does."""

    def __init__(self, parameters: Any, defaults: dict[str, Any]) -> None:
        super().__init__(parameters, defaults)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.01)


@pytest.mark.parametrize("defaults", [{"lr": None}, {"eta": 0.1}])
def test_optimizers_without_a_learning_rate(defaults, rng):
    model, blocks = seeded(MLP), []
    moving = Own(model.parameters(), defaults)
    with capture(model, sinks=[blocks.append], loss="sum"):
        for _ in range(2):
            sum_ce(model, classes(rng)).backward()
            moving.step()
            moving.zero_grad()
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [(0, None), (1, None)]


def test_a_step_that_raises_is_over(rng):
    model, batch, found = seeded(MLP), classes(rng), []

    def closure() -> Tensor:
        raise KeyError("no data")

    for fails in (False, True):
        moving = SGD(model.parameters(), lr=0.0)
        blocks = []
        with capture(model, sinks=[blocks.append], loss="sum", directions=Directions(target="as_trained")):
            if fails:
                sum_ce(model, batch).backward()
                with pytest.raises(KeyError):
                    moving.step(closure)
                moving.zero_grad()
            sum_ce(model, batch).backward()
            moving.step()
            moving.zero_grad()
        found.append([(b.examples.step, b.examples.ids) for b in blocks])
    assert found[0] == found[1]


def test_parameters_moved_past_the_counter_between_backwards(rng):
    """SAM with `.data`: gradients are thrown away at the place that the ascent has reached."""
    model, blocks, marks = seeded(MLP), [], []
    moving = SGD(model.parameters(), lr=0.1)

    def mark() -> None:
        marks.append(fingerprint(dict(model.named_parameters())))

    with capture(model, sinks=[blocks.append], loss="sum"):
        for _ in range(3):
            batch = classes(rng)
            mark()
            sum_ce(model, batch).backward()
            if len(marks) > 1:
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.data.add_(g, alpha=0.1)
                moving.zero_grad()
                mark()
                sum_ce(model, batch).backward()
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.data.sub_(g, alpha=0.1)
            moving.step()
            moving.zero_grad()
    assert [b.examples.fingerprint for b in blocks] == marks
