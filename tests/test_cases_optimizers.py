"""Faults that users of such libraries have reported, and what attrax does instead: states of optimizers (K16)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attrax
from attrax.core import direction

from .case_models import seeded


class Three(nn.Module):
    """Square matrices without bias: they can be mixed up without any error of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([0, 1, 2, 3, 0])


def made(kind: str, order: str = "cab") -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer: a group for each matrix, in another order than the model's."""
    model = seeded(Three, 77)
    rates = {"a": 0.05, "b": 0.01, "c": 0.002}
    groups = [{"params": [getattr(model, n).weight], "lr": rates[n]} for n in order]
    options = {"momentum": 0.9} if kind == "SGD" else {}
    return model, getattr(torch.optim, kind)(groups, lr=0.1, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_k16_b77_optimizer_file_keyed_by_index(order: str) -> None:
    """Adam's moments from a file of numbers are those of the parameters with these names."""
    model, optimizer = made("Adam", order)
    train(model, optimizer, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    assert list(saved["state"]) == [0, 1, 2]
    rules, states = attrax.read_saved_optimizer(saved, model, "adam", [[f"{n}.weight"] for n in order])
    for i in range(5):
        loss = F.cross_entropy(model(X[i : i + 1]), Y[i : i + 1])
        for (name, p), g in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            m, v = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
            m, v = (0.9 * m + 0.1 * g) / (1 - 0.9**5), (0.999 * v + 0.001 * g * g) / (1 - 0.999**5)
            D, _ = direction(rules[name], g, states[name])
            torch.testing.assert_close(D, m / (v.sqrt() + 1e-8), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["Adam", "SGD", "NAdam"])
def test_k16_b79_resume_restores_weights_and_moments(kind: str, tmp_path: Path) -> None:
    """From a recorded step on, training is that of the run that was not interrupted, bit for bit."""
    model, optimizer = made(kind)
    with attrax.capture(model, loss="example_mean", trajectory=attrax.record(tmp_path)):
        train(model, optimizer, 4)
    again, later = made(kind)
    train(again, later, 1)
    attrax.restore(attrax.open_trajectory(tmp_path).step(2), again, later)
    train(again, later, 2)
    for name, p in model.named_parameters():
        assert torch.equal(again.get_parameter(name), p)
