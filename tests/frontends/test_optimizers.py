"""Optimizers read by parameter name: groups, wrappers, state dicts, files of a Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attrax.core.optimizers import step
from attrax.frontends import (
    decay_groups,
    open_trajectory,
    read_optimizer,
    read_saved_optimizer,
    record,
    restore,
)
from attrax.frontends.loop.capture import capture


class Three(nn.Module):
    """Square matrices without bias: names can be mixed up without any error of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def three() -> Three:
    torch.manual_seed(77)
    return Three().double()


BATCH = {
    "x": torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "y": torch.tensor([0, 1, 2, 3, 0]),
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, BATCH).backward()
        optimizer.step()


def groups(model: Three, order: str = "cab") -> list[dict[str, Any]]:
    """A group for each matrix, in another order than the model's, each with hyperparameters of its own."""
    rates = {"a": 0.05, "b": 0.01, "c": 0.002}
    return [{"params": [getattr(model, n).weight], "lr": rates[n], "weight_decay": rates[n]} for n in order]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_states_and_hyperparameters_go_by_name(kind: Any) -> None:
    model = three()
    optimizer = kind(groups(model))
    train(model, optimizer, 4)
    rules, states = read_optimizer(optimizer, model)
    assert list(rules) == list(states) == ["a.weight", "b.weight", "c.weight"]
    assert [rule.lr for rule in rules.values()] == [0.05, 0.01, 0.002]
    decays = [rule.decay if kind is torch.optim.AdamW else rule.coupled for rule in rules.values()]
    assert decays == [0.05, 0.01, 0.002]
    for name, p in model.named_parameters():
        assert torch.equal(states[name]["exp_avg"], optimizer.state[p]["exp_avg"])


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.05)}])
def test_variants_of_one_optimizer_are_alike(options: dict[str, Any]) -> None:
    model, plain = three(), three()
    optimizer = torch.optim.AdamW(model.parameters(), **({"lr": 0.05} | options))
    other = torch.optim.AdamW(plain.parameters(), lr=0.05, foreach=False)
    train(model, optimizer, 3)
    train(plain, other, 3)
    (rules, states), (right, expected) = read_optimizer(optimizer, model), read_optimizer(other, plain)
    assert {n: r.hyper["lr"] for n, r in rules.items()} == pytest.approx(
        {n: r.hyper["lr"] for n, r in right.items()}
    )
    for name in rules:
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(states[name][key], expected[name][key])


def test_accelerates_wrapper_is_looked_through() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    wrapped = Accelerator(cpu=True).prepare_optimizer(optimizer)
    AcceleratorState._reset_state(True)
    assert wrapped is not optimizer
    rules, states = read_optimizer(wrapped, model)
    assert rules["b.weight"].kind == "sgd" and torch.equal(
        states["b.weight"]["momentum_buffer"], optimizer.state[model.b.weight]["momentum_buffer"]
    )


class Slower(torch.optim.AdamW):
    """Inherits its step."""


class Other(torch.optim.AdamW):
    """Has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_subclasses_are_known_by_their_step() -> None:
    model = three()
    assert read_optimizer(Slower(model.parameters()), model)[0]["a.weight"].kind == "adamw"
    with pytest.raises(ValueError, match=r"optimizer '.*\.Other': its update rule is not known"):
        read_optimizer(Other(model.parameters()), model)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_optimizers_of_whole_matrices_are_refused(name: str) -> None:
    model = three()
    with pytest.raises(ValueError, match=f"optimizer '{name.lower()}'"):
        read_optimizer(getattr(torch.optim, name)(model.parameters()), model)


def test_parameters_of_other_models_are_left_out() -> None:
    model, other = three(), three()
    optimizer = torch.optim.SGD([*other.parameters(), model.b.weight], lr=0.1)
    assert list(read_optimizer(optimizer, model)[0]) == ["b.weight"]


# Saved optimizers.


def test_names_in_the_file_are_used() -> None:
    model = three()
    optimizer = torch.optim.Adam(reversed(list(model.named_parameters())), lr=0.05)
    train(model, optimizer, 2)
    _, states = read_saved_optimizer(optimizer.state_dict(), model, "adam")
    assert torch.equal(states["a.weight"]["exp_avg"], optimizer.state[model.a.weight]["exp_avg"])


def test_groups_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam([{"params": [model.bias]}, {"params": [model.weight]}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"groups of \[1, 1\] parameters, got names for \[2\]"):
        read_saved_optimizer(saved, model, "adam")
    with pytest.raises(ValueError, match=r"parameter 'weight' of shape \(2, 3\) would get states of shapes"):
        read_saved_optimizer(saved, model, "adam", [["weight"], ["bias"]])
    assert set(read_saved_optimizer(saved, model, "adam", [["bias"], ["weight"]])[0]) == {"weight", "bias"}


def test_restoring_into_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = three()
    with capture(model, loss="example_mean", trajectory=record(tmp_path, gradients=False)):
        train(model, torch.optim.Adam(model.parameters()), 1)
    found = open_trajectory(tmp_path).step(0)
    assert not found.gradients and step(found.optimizers["a.weight"], torch.ones(4), torch.ones(4), {})
    with pytest.raises(ValueError, match="the optimizer is 'sgd'"):
        restore(found, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("unchecked")
def test_optimizer_file_of_a_trainer(tmp_path: Path) -> None:
    from .test_trainer import llama, trainer

    model = llama()
    running = trainer(model, tmp_path, 1, weight_decay=0.1)
    running.train()
    assert running.optimizer is not None
    path = tmp_path / "optimizer.pt"
    torch.save(running.optimizer.state_dict(), path)
    saved = torch.load(path, weights_only=True)
    rules, states = read_saved_optimizer(saved, model, "adamw", decay_groups(model))
    right, expected = read_optimizer(running.optimizer, model)
    assert rules == right and {rule.decay for rule in rules.values()} == {0.0, 0.1}
    for name in right:
        assert all(torch.equal(states[name][key], x) for key, x in expected[name].items())
