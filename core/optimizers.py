"""Optimizers as pure functions: from a gradient and a state to an update direction and the next state.

    theta' = (1 - lr * decay) theta - lr * D          D, state' = direction(optimizer, g, state)

The same function gives the step that training took (g: the batch's gradient), the direction that one example alone
would have asked for (g: the example's gradient, D is then the Gamma of Wang et al. 2024 and Xia et al. 2024), and,
differentiated, the sensitivity of a step.  Formulas are torch's, with epsilon outside of the root; states carry
torch's names (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ``step``, ...).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Mapping[str, Tensor]
Direction: TypeAlias = Callable[[Mapping[str, float], Tensor, State], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Optimizer:
    """How an optimizer moves one parameter at one step.

    Attributes:
        kind: Lower-case name of the torch class: "sgd", "adam", "adamw", ...
        hyper: Its hyperparameters for this parameter as numbers (flags are 0 or 1), named as in torch but for
            ``beta1``, ``beta2`` and the like; ``lr`` is the learning rate of this very step.
    """

    kind: str
    hyper: Mapping[str, float]

    @property
    def lr(self) -> float:
        """Learning rate of the step."""
        return self.hyper["lr"]

    @property
    def decay(self) -> float:
        """Decoupled weight decay: theta shrinks by lr * decay."""
        return self.hyper.get("weight_decay", 0.0) if self._decoupled else 0.0

    @property
    def coupled(self) -> float:
        """Coupled (L2) weight decay: coupled * theta is added to the gradient."""
        return 0.0 if self._decoupled else self.hyper.get("weight_decay", 0.0)

    @property
    def _decoupled(self) -> bool:
        return self.kind == "adamw" or bool(self.hyper.get("decoupled_weight_decay", 0.0))


def direction(optimizer: Optimizer, g: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
    """The update direction of a gradient, and the state after it.

    Args:
        optimizer: Kind and hyperparameters.
        g: Gradient, any shape; coupled weight decay is not added here (see `step`).
        state: State before the step, by torch's names; empty before the first step.

    Returns:
        ``(D, state')`` with D shaped as `g`.

    Raises:
        ValueError: If the optimizer is not coordinate-wise or not known.

    >>> adam = Optimizer("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.0})
    >>> D, state = direction(adam, torch.tensor([3.0, -0.5]), {})
    >>> D, state["step"]
    (tensor([ 1.0000, -1.0000]), tensor(1.))
    """
    if optimizer.kind not in DIRECTIONS:
        raise ValueError(
            f"direction: optimizer '{optimizer.kind}' is not one whose update acts coordinate by coordinate; "
            f"known: {sorted(DIRECTIONS)}."
        )
    sign = -1 if optimizer.hyper.get("maximize") else 1
    return DIRECTIONS[optimizer.kind](optimizer.hyper, sign * g, state)


def step(optimizer: Optimizer, theta: Tensor, g: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
    """One optimizer step: the parameter and the state after it.

    >>> sgd = Optimizer("sgd", {"lr": 0.5, "weight_decay": 0.1})
    >>> step(sgd, torch.tensor([2.0]), torch.tensor([1.0]), {})
    (tensor([1.4000]), {})
    """
    coupled = optimizer.coupled * (-1 if optimizer.hyper.get("maximize") else 1)
    D, after = direction(optimizer, g + coupled * theta if coupled else g, state)
    return (1 - optimizer.lr * optimizer.decay) * theta - optimizer.lr * D, after


def _sgd(h: Mapping[str, float], g: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
    mu = h.get("momentum", 0.0)
    if not mu:
        return g, {}
    first = "momentum_buffer" not in state
    buffer = g if first else mu * state["momentum_buffer"] + (1 - h.get("dampening", 0.0)) * g
    return g + mu * buffer if h.get("nesterov") else buffer, {"momentum_buffer": buffer}


def _adam(h: Mapping[str, float], g: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
    after, b1, b2 = _moments(h, g, state)
    v = after["exp_avg_sq"]
    if h.get("amsgrad"):
        v = torch.maximum(_from(state, "max_exp_avg_sq", g), v)
        after["max_exp_avg_sq"] = v
    return (after["exp_avg"] / b1) / (root(v) / b2.sqrt() + h["eps"]), after


def _moments(h: Mapping[str, float], g: Tensor, state: State) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Both moments and the step count after the step, and the bias corrections 1 - beta^count."""
    count = _count(state, g)
    m = h["beta1"] * _from(state, "exp_avg", g) + (1 - h["beta1"]) * g
    v = h["beta2"] * _from(state, "exp_avg_sq", g) + (1 - h["beta2"]) * g * g
    return {"step": count, "exp_avg": m, "exp_avg_sq": v}, 1 - h["beta1"] ** count, 1 - h["beta2"] ** count


def _from(state: State, name: str, like: Tensor) -> Tensor:
    return state[name] if name in state else torch.zeros_like(like)


def _count(state: State, g: Tensor) -> Tensor:
    """Number of this step, counted from 1."""
    return state["step"].to(g) + 1 if "step" in state else torch.ones((), dtype=g.dtype, device=g.device)


def root(x: Tensor) -> Tensor:
    """Square root whose derivative at zero is zero, not infinite: a coordinate that never moved has no sensitivity.

    >>> root(torch.tensor([0.0, 4.0]))
    tensor([0., 2.])
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))


DIRECTIONS: Mapping[str, Direction] = {"sgd": _sgd, "adam": _adam, "adamw": _adam}
"""Directions by optimizer, as functions of the hyperparameters, the gradient and the state."""
