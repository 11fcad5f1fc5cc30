"""Rows of the model's inputs that are not examples, or depend on each other, are refused; others are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.frontends import capture

from .models import seeded
from .oracle import assert_gradients, block_gradients, gradients

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore:capture. layer")]


class Recurrent(nn.Module):
    """Tokens [T, B] or [B, T], a recurrent layer, the mean over time."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.tok, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=batch_first)
        self.head, self.time = nn.Linear(4, 3), int(batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tok(x))[0].mean(self.time))


class Bag(nn.Module):
    """The mean over time, which no order changes."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tok(x).mean(0))


class Attentive(nn.Module):
    """Attention along the first axis, with positions or without: then it moves with any order."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.tok, self.pos = (
            nn.Embedding(9, 4),
            torch.randn(5, 1, 4, dtype=torch.float64) if positions else None,
        )
        self.attend, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x) if self.pos is None else self.tok(x) + self.pos
        return self.head(h + self.attend(h, h, h)[0])


class Centered(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x)
        return self.head(h - h.mean(0))


class Loaded(nn.Module):
    """Batch first; returns similarities of the batch and its mean besides, as routers and towers do."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.tok(x).mean(1)
        return self.head(h), h @ h.T, h.mean(0)


def tokens(rng: Any, T: int, B: int) -> Tensor:
    return torch.randint(9, (T, B), generator=rng)


class Counting(nn.Module):
    """Batch first; its output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head, self.calls = nn.Embedding(9, 4), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.tok(x).mean(1)) / self.calls


REFUSED = {
    "recurrent": Recurrent,
    "bag": Bag,
    "attention": lambda: Attentive(False),
    "attention and positions": lambda: Attentive(True),
    "centered": Centered,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_rows_that_are_no_examples_are_refused(kind, rng):
    model = seeded(REFUSED[kind])
    with (
        capture(model, loss="sum"),
        pytest.raises(RuntimeError, match=r"examples \(sequence-first inputs\?\)"),
    ):
        model(tokens(rng, 5, 3))
    with capture(model, loss="sum", verify=False):
        model(tokens(rng, 5, 3))


@pytest.mark.parametrize("build", [lambda: Recurrent(True), Loaded], ids=["recurrent", "loaded"])
def test_examples_first_are_captured(build, rng):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        return (output if isinstance(output, Tensor) else output[0]).square().sum()

    model, x, blocks = seeded(build), tokens(rng, 4, 3), []
    right = gradients(model, loss, list(x.split(1)))
    with capture(model, loss="sum", sinks=[blocks.append]):
        loss(model, x).backward()
    assert_gradients(block_gradients(blocks[0]), right)


def test_outputs_that_differ_from_call_to_call_tell_nothing(rng):
    model, x, blocks = seeded(Counting), tokens(rng, 4, 3), []
    with capture(model, loss="sum", sinks=[blocks.append]):
        model(x).square().sum().backward()
    assert len(blocks[0].examples) == 4
