"""Training loops as they are written, to be run with and without a capture."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Block, aggregate, stored
from attrax.frontends import capture, causal_lm
from attrax.frontends.loop.capture import Capture

Loss = Callable[[nn.Module, Any], Tensor]


def mean_ce(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def sum_ce(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model returns."""
    return model(**batch)["loss"]


def summed(block: Block) -> dict[str, Tensor]:
    """sum_i c_i G_i of a block by parameter; the leaves hold c_i G_i."""
    return {n: g[0] for n, g in stored(aggregate(block.grads)).items()}


def known(block: Block) -> tuple[Tensor, Tensor]:
    """Loss weights c and counts n of a block, which has them."""
    weight, tokens = block.examples.weight, block.examples.tokens
    assert weight is not None and tokens is not None
    return weight, tokens


def lm_loss(model: Any, batch: Any) -> Tensor:
    """Per-document loss of a model that returns its own mean loss."""
    return causal_lm()(model.lm, batch)


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    accumulate: int = 1,
    rate: float = 0.1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> list[dict[str, Tensor]]:
    """A plain loop; returns what `.grad` held at each step."""
    moving = optimizer(model.parameters(), lr=rate)  # pyright: ignore[reportCallIssue]
    seen: list[dict[str, Tensor]] = []
    for k, batch in enumerate(batches, 1):
        (loss(model, batch) / accumulate).backward()
        if k % accumulate == 0:
            seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            moving.step()
            moving.zero_grad()
    return seen


def recorded(
    model: nn.Module, batches: Iterable[Any], loss: Loss, how: dict[str, Any], **options: Any
) -> tuple[list[Block], list[dict[str, Tensor]], Capture]:
    """Blocks and gradients of a loop under a capture; training is as without it, bit for bit."""
    batches, alone, blocks = list(batches), copy.deepcopy(model), []
    train(alone, batches, loss, **options)
    random = torch.get_rng_state()
    with capture(model, sinks=[blocks.append], **how) as running:
        seen = train(model, batches, loss, **options)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q), f"{name}: trained otherwise"
    assert torch.equal(random, torch.get_rng_state())
    return blocks, seen, running
