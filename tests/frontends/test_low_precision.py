"""Models in bfloat16 and float16, and under autocast: gradients of the float64 model at the same parameters, within
what rounding does; and loss scales, which no score may see.

A forward and backward pass rounds every activation and every gradient once, to a relative u (2^-8 or 2^-11).  These
roundings are independent, so a gradient that came through n of them is off by about sqrt(n) u: with the n <= 60 of a
block and its loss in these models that is 8 u, for a gradient as a whole.  What attrax adds must not show.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Block, Blocks, collect
from attrax.core.source import targeted
from attrax.frontends import capture, causal_lm, live
from attrax.frontends.model.losses import shifted, token_losses
from attrax.methods import graddot

from .loops import known, own_loss
from .models import MLP, LossLM, TinyLM, classes, documents, seeded
from .oracle import block_gradients, captured, flat, one_by_one

pytestmark = pytest.mark.usefixtures("unchecked")
NARROW = [torch.bfloat16, torch.float16]
HOW = ["whole", "autocast"]


def classify(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Cross-entropy in the precision of the loss functions of attrax: float32 or better."""
    logits = model(batch["x"])
    return token_losses(logits[:, None], batch["y"][:, None])[:, 0]


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (MLP, classify),
    "lm": (lambda: TinyLM(d=16, layers=1), causal_lm()),
    "tied": (lambda: TinyLM(d=16, layers=1, tied=True), causal_lm()),
    "rms": (lambda: TinyLM(d=16, layers=1, norm=nn.RMSNorm, bias=False), causal_lm()),
}


def round_to(dtype: torch.dtype, model: nn.Module) -> None:
    """Parameters that a narrower type holds exactly."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype))


class Setting:
    """A float64 model and its twin in low precision, with the same parameters, inputs and right answers."""

    def __init__(self, kind: str, how: str, dtype: torch.dtype, rng: torch.Generator) -> None:
        build, self.loss = CASES[kind]
        exact = seeded(build)
        round_to(dtype, exact)
        self.how, self.dtype = how, dtype
        self.model = copy.deepcopy(exact).to(dtype if how == "whole" else torch.float32)
        batch = classes(rng) if kind == "mlp" else documents(rng, [7, 4, 6])
        if kind == "mlp":
            batch["x"] = batch["x"].to(dtype)
        wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        self.batch = {
            k: v.to(next(self.model.parameters()).dtype) if v.is_floating_point() else v
            for k, v in batch.items()
        }
        self.right = one_by_one(exact, wide, self.loss)

    def low(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The loss, under autocast where that is what is asked for."""
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.how == "autocast"):
            return self.loss(model, {k: v for k, v in batch.items() if k != "example_ids"})

    def error(self, got: Mapping[str, Tensor]) -> Tensor:
        """Distance from the right answer in units of u, relative to the norm, for every example."""
        found, right = (flat({n: g.double() for n, g in side.items()}) for side in (got, self.right))
        return (found - right).norm(dim=1) / right.norm(dim=1) / (torch.finfo(self.dtype).eps / 2)

    def live(self) -> dict[str, Tensor]:
        return captured(live(self.model, [self.batch], self.low, strict=True))

    def capture(self) -> dict[str, Tensor]:
        blocks: list[Any] = []
        with capture(self.model, sinks=[blocks.append], loss="sum", strict=True):
            self.low(self.model, self.batch).sum().backward()
        return block_gradients(blocks[0])

    def autograd(self) -> dict[str, Tensor]:
        return one_by_one(self.model, self.batch, self.low)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", CASES)
def test_gradients_are_off_by_rounding_only(kind, how, dtype, rng):
    setting = Setting(kind, how, dtype, rng)
    own = setting.error(setting.autograd())
    for got in (setting.live(), setting.capture()):
        error = setting.error(got)
        assert (error <= 8).all()
        assert (error <= 1.1 * own + 0.1).all(), "worse than autograd in the same precision"


def mean_of_tokens(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The loss that a training loop computes itself, from logits."""
    logits = model.lm(batch["input_ids"], batch["attention_mask"])
    targets = shifted(batch["labels"])
    return token_losses(logits, targets).sum() / (targets != -100).sum()


def by_hand(scaler: torch.amp.GradScaler) -> Callable[[Mapping[str, Any], int], tuple[Tensor, Tensor]]:
    """What a loop whose loss lies outside of the model tells a capture: the scale is part of c."""

    def weigh(inputs: Mapping[str, Any], rows: int) -> tuple[Tensor, Tensor]:
        n = inputs["attention_mask"].sum(1) - 1
        return torch.full((rows,), scaler.get_scale() / float(n.sum()), dtype=torch.float64), n

    return weigh


class Inner:
    """The loss of the model that a model with a loss of its own holds."""

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        return causal_lm()(model.lm, batch)

    def tokens(self, batch: Mapping[str, Any]) -> Tensor:
        return causal_lm().tokens(batch)


def rounded_lm(dtype: torch.dtype) -> nn.Module:
    model = seeded(lambda: LossLM(d=16, layers=1))
    round_to(dtype, model)
    return model


def scaled_steps(
    loop: str, dtype: torch.dtype, batch: Mapping[str, Any], scale: float, count: int = 1
) -> list[Block]:
    """Steps of mixed-precision training under a capture; a scale that overflows shrinks to 2^-14 of itself."""
    model, blocks = rounded_lm(dtype).float(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-14)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, sinks=[blocks.append], loss=None if loop == "own" else by_hand(scaler)):
        for _ in range(count):
            moving.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = own_loss(model, batch) if loop == "own" else mean_of_tokens(model, batch)
            scaler.scale(loss).backward()
            scaler.step(moving)
            scaler.update()
    return blocks


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("loop", ["own", "by_hand"])
def test_a_loss_scale_is_divided_out_of_gradients_and_scores(loop, dtype, rng):
    """The model's own loss shows its scale to the capture; a loss outside of it is declared with its scale."""
    batch, asked, model = documents(rng, [7, 4, 6]), documents(rng, [5, 3]), rounded_lm(dtype)
    query = collect(live(rounded_lm(dtype).float(), [asked], Inner()))
    G, Q = flat(one_by_one(model, batch, Inner())), flat(captured(Blocks([query]))).double()
    n, m = torch.tensor([6, 3, 5]), torch.tensor([4, 2])
    exact = {"sum": G @ Q.T, "mean": (G / n[:, None]) @ (Q / m[:, None]).T}
    size = {"sum": G.norm(dim=1).outer(Q.norm(dim=1))}
    size["mean"] = size["sum"] / n.outer(m)
    allowed = 8 * torch.finfo(dtype).eps / 2
    for scale in (1.0, 2.0**8, 2.0**14):
        (block,) = scaled_steps(loop, dtype, batch, scale)
        weight, tokens = known(block)
        assert weight.tolist() == pytest.approx([scale / 14] * 3, rel=1e-12) and torch.equal(tokens, n)
        got = flat(captured(targeted(Blocks([block]), "sum"))).double()
        assert ((got - G).norm(dim=1) <= allowed * G.norm(dim=1)).all()
        for target in ("sum", "mean"):
            found = graddot(Blocks([block]), Blocks([query]), target=target).values.double()
            assert ((found - exact[target]).abs() <= allowed * size[target]).all(), (target, scale)


@pytest.mark.parametrize("loop", ["own", "by_hand"])
def test_a_scale_that_overflows_at_first_stops_nothing(loop, rng):
    """As every scaler's does: the step is skipped and has no block, the next is captured and checked."""
    with pytest.warns(RuntimeWarning, match="non-finite gradients"):
        (second,) = scaled_steps(loop, torch.float16, documents(rng, [7, 4, 6]), 2.0**24, 2)
    assert known(second)[0].tolist() == [2.0**10 / 14] * 3 and second.examples.learning_rate == 0.1
