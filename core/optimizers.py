"""Optimizers as pure functions: from a gradient and a state to an update direction and the next state.

    theta' = (1 - lr * decay) theta - lr * D          D, state' = direction(optimizer, g, state)

The same function gives the step that training took (g: the batch's gradient), the direction that one example alone
would have asked for (g: the example's gradient, D is then the Gamma of Wang et al. 2024 and Xia et al. 2024), and,
differentiated, the sensitivity of a step.  Rules are in `attrax.core.optimizer_rules`; states carry torch's names
(``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ``step``, ...).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attrax.core.optimizer_rules import REFUSED, RULES, Touched, still
from attrax.core.optimizer_rules import State as State


@dataclass(frozen=True)
class Optimizer:
    """How an optimizer moves one parameter at one step.

    Attributes:
        kind: Lower-case name of the torch class: "sgd", "adam", "adamw", ...
        hyper: Its hyperparameters for this parameter as numbers (flags are 0 or 1), named as in torch but for pairs:
            ``beta1``, ``beta2``, ``etaminus``, ``etaplus``, ``step_size_min``, ``step_size_max``.  ``lr`` is the
            learning rate of this very step.
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
    def sparse(self) -> bool:
        """Whether a step depends on which rows a sparse gradient touches, not on its values alone."""
        return self.kind == "sparseadam"

    @property
    def _decoupled(self) -> bool:
        return self.kind == "adamw" or bool(self.hyper.get("decoupled_weight_decay", 0.0))


def check_optimizer(kind: str, operation: str) -> None:
    """Refuse an optimizer without a rule.

    Raises:
        ValueError: If it does not act coordinate by coordinate, or is not known.
    """
    if kind not in RULES:
        why = REFUSED.get(kind, "its update rule is not known")
        raise ValueError(f"{operation}: optimizer '{kind}': {why}. Optimizers with a rule: {sorted(RULES)}.")


def direction(
    optimizer: Optimizer, g: Tensor, state: State, touched: Touched | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The update direction of a gradient, and the state after it.

    Args:
        optimizer: Kind and hyperparameters.
        g: Gradient, any shape; coupled weight decay is not added here (see `step`).  A leading axis of examples, which
            the state does not have, is broadcast over.
        state: State before the step, by torch's names; empty before the first step.
        touched: Rows that a sparse gradient touches [V], of examples [B, V]; needed by SparseAdam, ignored by others.

    Returns:
        ``(D, state')`` with D shaped as `g`.

    Raises:
        ValueError: If the optimizer is not coordinate-wise or not known, or rows that are needed are not.

    >>> adam = Optimizer("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.0})
    >>> D, state = direction(adam, torch.tensor([3.0, -0.5]), {})
    >>> D, state["step"]
    (tensor([ 1., -1.]), tensor(1.))
    """
    check_optimizer(optimizer.kind, "direction")
    D, after = RULES[optimizer.kind](optimizer.hyper, -g if optimizer.hyper.get("maximize") else g, state)
    if not optimizer.sparse:
        return D, after
    if touched is None:
        raise ValueError(
            "direction: SparseAdam moves only the rows that its sparse gradient touches, and it is unknown which these "
            "are. Record its steps with attrax.record, or give Step(..., touched={parameter: rows})."
        )
    return still(D, after, state, touched)


def step(
    optimizer: Optimizer, theta: Tensor, g: Tensor, state: State, touched: Touched | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One optimizer step: the parameter and the state after it.

    Args:
        optimizer: Kind and hyperparameters.
        theta: Parameter before the step.
        g: Gradient that the optimizer consumes, without coupled weight decay.
        state: State before the step.
        touched: See `direction`.

    Returns:
        ``(theta', state')``.

    Raises:
        ValueError: As `direction`.

    >>> sgd = Optimizer("sgd", {"lr": 0.5, "weight_decay": 0.1})
    >>> step(sgd, torch.tensor([2.0]), torch.tensor([1.0]), {})
    (tensor([1.4000]), {})
    """
    coupled = optimizer.coupled * (-1 if optimizer.hyper.get("maximize") else 1)
    D, after = direction(optimizer, g + coupled * theta if coupled else g, state, touched)
    return (shrinkage(optimizer, state) * theta - optimizer.lr * D).to(theta.dtype), after


def shrinkage(optimizer: Optimizer, state: State) -> float | Tensor:
    """The factor ``1 - lr * decay`` of the parameter itself in a step.

    >>> shrinkage(Optimizer("adamw", {"lr": 0.5, "weight_decay": 0.1}), {})
    0.95
    """
    if optimizer.kind == "asgd":
        eta = state.get("eta", optimizer.lr * torch.ones(()))
        return 1 - optimizer.hyper["lambd"] * eta.double()
    return 1 - optimizer.lr * optimizer.decay
