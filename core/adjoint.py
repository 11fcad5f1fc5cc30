"""One optimizer step backwards: from the sensitivity to what a step leaves behind to that to what it found.

A **cotangent** is the derivative of some f of the final parameters, for Q of them at once [Q, *shape].  With U those of
a step's results (parameters and moments), its vector-Jacobian product gives

    rho'  = dL step / dg ^T U         of the gradient that the optimizer consumed
    U     <- dL step / d(theta, state) ^T U       with weight decay, moments and bias correction as they were

and global-norm clipping g = c G, c = bound / (|G| + 1e-6), turns rho' into the cotangent of the batch's own gradient G:

    rho = c (rho' - <rho', G> G / (|G| (|G| + 1e-6)))

This holds for every coordinate-wise optimizer, since `step` is differentiated as it is; its Jacobian is a diagonal for
every pair of a result and an operand, found once for all Q.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vjp

from attrax.core.algebra import wide
from attrax.core.optimizers import step
from attrax.core.trajectory import Clip, Step

Vectors: TypeAlias = Mapping[str, Float[Tensor, "..."]]
"""Tensors by parameter name; cotangents have an axis of Q before the parameter's own."""
Moments: TypeAlias = Mapping[str, Vectors]
"""Cotangents of optimizer states, by parameter and name of the state."""

_DELTA = 1e-6
_THETA, _GRADIENT = "theta", "gradient"


def through_step(
    record: Step, parameters: Vectors, states: Moments
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Pull cotangents of the parameters and states after a step back through it.

    Args:
        record: The step, with its gradients; parameters too where weight decay is coupled.
        parameters: Cotangents of the parameters after the step; parameters that are not among them count as fixed.
        states: Cotangents of the states after the step; those that are missing are zero.

    Returns:
        Cotangents of the gradients consumed, of the parameters before the step, and of the states before it.

    Raises:
        ValueError: If the record lacks an optimizer, gradient or parameter that is needed.

    >>> from attrax.core.optimizers import Optimizer
    >>> sgd = {"w": Optimizer("sgd", {"lr": 0.5, "momentum": 0.5})}
    >>> record = Step(1, sgd, {"w": {"momentum_buffer": torch.ones(2)}}, {"w": torch.ones(2)})
    >>> rho, before, moments = through_step(record, {"w": torch.ones(1, 2)}, {})
    >>> rho["w"], before["w"], moments["w"]["momentum_buffer"]
    (tensor([[-0.5000, -0.5000]]), tensor([[1., 1.]]), tensor([[-0.2500, -0.2500]]))
    """
    rho: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, U in parameters.items():
        derivatives = _derivatives(record, name, U.device)
        given = {_THETA: U, **states.get(name, {})}
        pulled: dict[str, Tensor] = {}
        for result, by_operand in derivatives.items():
            for operand, d in by_operand.items():
                if result in given:
                    old = pulled.get(operand)
                    pulled[operand] = given[result] * d if old is None else old.addcmul_(given[result], d)
        rho[name], before[name] = (pulled.pop(k, torch.zeros_like(U)) for k in (_GRADIENT, _THETA))
        moments[name] = pulled
    return rho, before, moments


def through_clip(clip: Clip, gradients: Vectors, rho: Vectors) -> dict[str, Tensor]:
    """Pull cotangents of clipped gradients back to those before clipping.

    Args:
        clip: Coefficient and norm.
        gradients: Clipped gradients; the share of parameters that are missing is left out of <rho, G>.
        rho: Cotangents [Q, *shape] of the clipped gradients.

    >>> gradients, rho = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([[0.0, 1.0]])}
    >>> through_clip(Clip(0.5, 2.0), gradients, rho)
    {'w': tensor([[0.0000, 0.5000]])}
    """
    if clip.coefficient >= 1:
        return dict(rho)
    c = clip.coefficient
    unclipped = {name: gradients[name].to(r) / c for name, r in rho.items()}
    along = torch.stack([r.flatten(1) @ unclipped[name].flatten() for name, r in rho.items()]).sum(0)
    along = along / (clip.norm * (clip.norm + _DELTA))
    return {n: c * (r - along.reshape(-1, *[1] * (r.ndim - 1)) * unclipped[n]) for n, r in rho.items()}


def _operands(record: Step, name: str) -> tuple[Tensor, Tensor]:
    """Gradient and parameter, in float32 or better; a parameter that does not matter may be missing."""
    if name not in record.optimizers or name not in record.gradients:
        what = "optimizer" if name not in record.optimizers else "gradient"
        raise ValueError(
            f"through_step: step {record.step} knows no {what} of parameter '{name}'; it has "
            f"{sorted(record.optimizers)[:5]} …. Take query gradients of the parameters that were trained and recorded."
        )
    g = record.gradients[name]
    g = g.to(wide(g.dtype))
    if name in record.parameters:
        return g, record.parameters[name].to(g.dtype)
    if record.optimizers[name].coupled:
        raise ValueError(
            f"through_step: step {record.step}: weight decay of '{name}' is part of its gradient, so that its value is "
            "needed. Record the parameters of every step."
        )
    return g, torch.zeros_like(g)


def _derivatives(record: Step, name: str, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The derivative of every result in every operand, coordinate by coordinate, where it is not zero."""
    g, theta = (x.to(device) for x in _operands(record, name))
    recorded = record.states.get(name, {})
    moving = {k: x.to(g) for k, x in recorded.items() if _is_moment(k, x, g)}
    fixed = {k: x for k, x in recorded.items() if k not in moving}
    rows = record.touched.get(name)

    def move(operands: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {k: operands[k] for k in moving} | fixed
        moved, after = step(record.optimizers[name], operands[_THETA], operands[_GRADIENT], state, rows)
        return {_THETA: moved, **{k: x for k, x in after.items() if _is_moment(k, x, g)}}

    results, back, *_ = vjp(move, {_THETA: theta, _GRADIENT: g, **moving})
    zeros = {k: torch.zeros_like(x) for k, x in results.items()}
    found: dict[str, dict[str, Tensor]] = {}
    for k in results:
        (by_operand,) = back(zeros | {k: torch.ones_like(g)})
        found[k] = {operand: d for operand, d in by_operand.items() if bool(d.any())}
    return found


def _is_moment(name: str, x: Tensor, g: Tensor) -> bool:
    """Whether a state follows the gradients: it has an entry for each of the parameter's; counts have not."""
    return x.shape == g.shape and x.is_floating_point() and name != "step"
