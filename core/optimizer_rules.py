"""Update rules of the optimizers of `torch.optim` that act coordinate by coordinate, as pure functions.

Each maps ``(hyperparameters, g, state)`` to ``(D, state')`` with ``lr * D`` what the parameter loses.  Formulas are
torch's, epsilon outside of the root; arithmetic follows the dtype of `g`, scalars that depend on the step count alone
are computed in float64.  Nothing branches on the value of a tensor, so that rules can be vmapped and differentiated;
where torch's own expression has an infinite derivative (a root at zero), it is taken as zero.

    sgd       b' = mu b + (1 - dampening) g (first step: g)        D = b', Nesterov g + mu b'
    adam      m', v' moments, b1, b2 = 1 - beta^count              D = (m' / b1) / (sqrt(v') / sqrt(b2) + eps)
    amsgrad   as adam with max(v_max, v')
    adamax    u' = max(beta2 u, |g| + eps)                         D = m' / (b1 u')
    nadam     mu_t = beta1 (1 - 0.96^(t psi) / 2)                  Dozat 2016, as in torch
    radam     rho = rho_inf - 2 t beta2^t / b2                     m' / b1, rectified once rho > 5 (Liu et al. 2020)
    rmsprop   s' = alpha s + (1 - alpha) g^2 (centered: - a'^2)    D = mu buf + g / (sqrt(s') + eps)
    adagrad   s' = s + g^2                                         D = g / (sqrt(s') + eps) / (1 + (t - 1) lr_decay)
    adadelta  s' = rho s + (1 - rho) g^2                           D = g sqrt(acc + eps) / sqrt(s' + eps)
    rprop     step sizes grow while signs agree                    D = sign(g) step' / lr
    asgd                                                           D = g eta / lr
    sparseadam  as adam, at touched rows only (`Touched`)          D = sqrt(b2) / b1 * m' / (sqrt(v') + eps)

"less" is the Adam variant of the code released with LESS (Xia et al. 2024): m' / sqrt(v' + eps), no bias correction.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from attrax.core.algebra import wide

Hyper: TypeAlias = Mapping[str, float]
State: TypeAlias = Mapping[str, Tensor]
After: TypeAlias = tuple[Tensor, dict[str, Tensor]]
Touched: TypeAlias = Tensor
"""Which rows of a parameter a sparse gradient holds, Boolean [V], or [B, V] of examples; also those that are zero."""
Rule: TypeAlias = Callable[[Hyper, Tensor, State], After]


def sgd(h: Hyper, g: Tensor, state: State) -> After:
    """SGD with momentum, dampening and Nesterov momentum; the first step takes the gradient undampened."""
    mu = h.get("momentum", 0.0)
    if not mu:
        return g, {}
    first = "momentum_buffer" not in state
    buffer = g if first else mu * state["momentum_buffer"] + (1 - h.get("dampening", 0.0)) * g
    return g + mu * buffer if h.get("nesterov") else buffer, {"momentum_buffer": buffer}


def adam(h: Hyper, g: Tensor, state: State) -> After:
    """Adam, AdamW and AMSGrad; maxima are of second moments before bias correction."""
    after = _moments(h, g, state)
    v = after["exp_avg_sq"]
    if h.get("amsgrad"):
        v = torch.maximum(_from(state, "max_exp_avg_sq", g), v)
        after["max_exp_avg_sq"] = v
    b1, b2 = _corrections(h, after["step"], g)
    return (after["exp_avg"] / b1) / (root(v) / b2.sqrt() + h["eps"]), after


def less(h: Hyper, g: Tensor, state: State) -> After:
    """Adam as in the code released with LESS."""
    after = _moments(h, g, state)
    return after["exp_avg"] / root(after["exp_avg_sq"] + h["eps"]), after


def adamax(h: Hyper, g: Tensor, state: State) -> After:
    """Adam with the largest gradient in the place of the root."""
    count = _count(state)
    m = h["beta1"] * _from(state, "exp_avg", g) + (1 - h["beta1"]) * g
    u = torch.maximum(h["beta2"] * _from(state, "exp_inf", g), g.abs() + h["eps"])
    b1 = _scalar(1 - h["beta1"] ** count.double(), g)
    return m / (b1 * u), {"step": count, "exp_avg": m, "exp_inf": u}


def nadam(h: Hyper, g: Tensor, state: State) -> After:
    """Adam with Nesterov momentum."""
    after = _moments(h, g, state)
    count = after["step"].double()
    mu, following = (h["beta1"] * (1 - 0.5 * 0.96 ** ((count + k) * h["momentum_decay"])) for k in (0, 1))
    before = state.get("mu_product", torch.ones(()))
    after["mu_product"] = before * mu.to(before.dtype)
    product = after["mu_product"].double()
    own, shared = _scalar((1 - mu) / (1 - product), g), _scalar(following / (1 - product * following), g)
    _, b2 = _corrections(h, after["step"], g)
    return (own * g + shared * after["exp_avg"]) / (root(after["exp_avg_sq"]) / b2.sqrt() + h["eps"]), after


def radam(h: Hyper, g: Tensor, state: State) -> After:
    """Adam whose denominator waits until the second moment can be trusted."""
    after = _moments(h, g, state)
    count = after["step"].double()
    longest, power = 2 / (1 - h["beta2"]) - 1, h["beta2"] ** count
    length = longest - 2 * count * power / (1 - power)
    enough = length > 5
    n = torch.where(enough, length, torch.full_like(length, 6.0))
    rectified = ((n - 4) * (n - 2) * longest / ((longest - 4) * (longest - 2) * n) * (1 - power)).sqrt()
    denominator = (root(after["exp_avg_sq"]) + h["eps"]) / _scalar(rectified, g)
    b1, _ = _corrections(h, after["step"], g)
    return after["exp_avg"] / b1 / torch.where(enough, denominator, torch.ones_like(denominator)), after


def rmsprop(h: Hyper, g: Tensor, state: State) -> After:
    """RMSprop, centered or not, with or without momentum."""
    s = h["alpha"] * _from(state, "square_avg", g) + (1 - h["alpha"]) * g * g
    after = {"step": _count(state), "square_avg": s}
    if h.get("centered"):
        after["grad_avg"] = h["alpha"] * _from(state, "grad_avg", g) + (1 - h["alpha"]) * g
        s = s - after["grad_avg"] ** 2
    scaled = g / (root(s) + h["eps"])
    if not h.get("momentum"):
        return scaled, after
    after["momentum_buffer"] = h["momentum"] * _from(state, "momentum_buffer", g) + scaled
    return after["momentum_buffer"], after


def adagrad(h: Hyper, g: Tensor, state: State) -> After:
    """Adagrad."""
    count = _count(state)
    s = _from(state, "sum", g, h.get("initial_accumulator_value", 0.0)) + g * g
    slower = _scalar(1 + (count.double() - 1) * h.get("lr_decay", 0.0), g)
    return g / (root(s) + h["eps"]) / slower, {"step": count, "sum": s}


def adadelta(h: Hyper, g: Tensor, state: State) -> After:
    """Adadelta."""
    s = h["rho"] * _from(state, "square_avg", g) + (1 - h["rho"]) * g * g
    acc = _from(state, "acc_delta", g)
    D = g * root(acc + h["eps"]) / root(s + h["eps"])
    moved = h["rho"] * acc + (1 - h["rho"]) * D * D
    return D, {"step": _count(state), "square_avg": s, "acc_delta": moved}


def rprop(h: Hyper, g: Tensor, state: State) -> After:
    """Resilient backpropagation; constant in g but for its signs."""
    agree = (g * _from(state, "prev", g)).sign()
    grown, shrunk = torch.full_like(g, h["etaplus"]), torch.full_like(g, h["etaminus"])
    factor = torch.where(agree > 0, grown, torch.where(agree < 0, shrunk, torch.ones_like(g)))
    size = _from(state, "step_size", g, h["lr"]) * factor
    size = size.clamp(h["step_size_min"], h["step_size_max"])
    kept = torch.where(agree < 0, torch.zeros_like(g), g)
    return kept.sign() * size / _rate(h, "rprop"), {"step": _count(state), "prev": kept, "step_size": size}


def asgd(h: Hyper, g: Tensor, state: State) -> After:
    """Averaged SGD; the averages, on which the parameters do not depend, are left out of the state."""
    count = _count(state)
    eta = state.get("eta", h["lr"] * torch.ones(()))
    after = h["lr"] / (1 + h["lambd"] * h["lr"] * count.double()) ** h["alpha"]
    D = g * _scalar(eta.double() / _rate(h, "asgd"), g)
    return D, {"step": count, "eta": after.to(eta.dtype)}


def sparse_adam(h: Hyper, g: Tensor, state: State) -> After:
    """SparseAdam at the rows that its gradient touches; see `still` for the others."""
    after = _moments(h, g, state)
    b1, b2 = _corrections(h, after["step"], g)
    return b2.sqrt() / b1 * after["exp_avg"] / (root(after["exp_avg_sq"]) + h["eps"]), after


def still(D: Tensor, after: State, state: State, touched: Touched) -> After:
    """A step that leaves rows which its gradient does not touch as they were, moments included.

    Args:
        D: Update direction, as if all rows were touched.
        after: State after it, likewise.
        state: State before the step.
        touched: The rows that the gradient touches.

    >>> D, after = still(torch.ones(2, 1), {"m": torch.ones(2, 1)}, {}, torch.tensor([True, False]))
    >>> D.flatten(), after["m"].flatten()
    (tensor([1., 0.]), tensor([1., 0.]))
    """
    at = touched.to(D.device).reshape(*touched.shape, *[1] * (D.ndim - touched.ndim))
    kept = {k: torch.where(at, x, _from(state, k, D)) if x.ndim else x for k, x in after.items()}
    return torch.where(at, D, torch.zeros_like(D)), kept


def _moments(h: Hyper, g: Tensor, state: State) -> dict[str, Tensor]:
    """Both moments and the step count after the step."""
    m = h["beta1"] * _from(state, "exp_avg", g) + (1 - h["beta1"]) * g
    v = h["beta2"] * _from(state, "exp_avg_sq", g) + (1 - h["beta2"]) * g * g
    return {"step": _count(state), "exp_avg": m, "exp_avg_sq": v}


def _corrections(h: Hyper, count: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Bias corrections 1 - beta^count of both moments."""
    return _scalar(1 - h["beta1"] ** count.double(), g), _scalar(1 - h["beta2"] ** count.double(), g)


def _from(state: State, name: str, like: Tensor, start: float = 0.0) -> Tensor:
    return state[name] if name in state else torch.full_like(like, start)


def _count(state: State) -> Tensor:
    """Number of this step, counted from 1; it stays where the state has it (often on the host)."""
    return state["step"] + 1 if "step" in state else torch.ones(())


def _scalar(x: Tensor, g: Tensor) -> Tensor:
    """A number computed in float64, in the precision that `g` is worked on in."""
    return x.to(wide(g.dtype))


def _rate(h: Hyper, kind: str) -> float:
    if not h["lr"]:
        raise ValueError(
            f"direction: {kind} moves parameters by step sizes of its own, which a direction gives in units of the "
            "learning rate; at a learning rate of 0 there is none."
        )
    return h["lr"]


def root(x: Tensor) -> Tensor:
    """Square root whose derivative at zero is zero, not infinite: a coordinate that never moved has no sensitivity.

    >>> root(torch.tensor([0.0, 4.0]))
    tensor([0., 2.])
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))


RULES: Mapping[str, Rule] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adam,
    "adamax": adamax,
    "nadam": nadam,
    "radam": radam,
    "rmsprop": rmsprop,
    "adagrad": adagrad,
    "adadelta": adadelta,
    "rprop": rprop,
    "asgd": asgd,
    "less": less,
    "sparseadam": sparse_adam,
}
"""Update rules by optimizer."""

REFUSED: Mapping[str, str] = {
    "adafactor": "it divides by row and column means of whole matrices",
    "muon": "it orthogonalizes whole matrices",
    "lbfgs": "it moves along directions built from all parameters at once",
}
"""Optimizers of `torch.optim` that do not act coordinate by coordinate, and why."""
