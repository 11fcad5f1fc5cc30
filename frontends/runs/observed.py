"""What happened to the gradients between the last backward and the optimizer: clipping and unscaling, observed.

Nobody has to say how a loop clips: a gradient that was clipped by norm, or unscaled, is a multiple of what the backward
left in `.grad`, and the factor is a ratio of norms: those of positive and negative entries apart, which tell its sign.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attrax.core import Clip
from attrax.core.algebra import wide
from attrax.core.transfers import fetched
from attrax.frontends.model.averaging import several_processes
from attrax.frontends.model.sharding import Piece, added_up, gradients, named, pieces, whole
from attrax.frontends.model.sparse import filled, rows_of
from attrax.frontends.tape.tensor_parallel import parallel_mesh


def dense(g: Tensor, cut: Piece | None = None) -> Tensor:
    """A gradient as one dense tensor of this process."""
    return filled(whole(g.detach(), cut))


def norms(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norms [2] of the positive and of the negative entries of each gradient, in float32 or better, where it lies."""
    return {n: _norm(g.detach()) for n, g in grads.items()}


def _norm(g: Tensor, cut: Piece | None = None) -> Tensor:
    values = g.coalesce().values() if g.is_sparse else g
    signs = (values.clamp_min(0), values.clamp_max(0))
    norm = torch.stack([whole(torch.linalg.vector_norm(x, dtype=wide(g.dtype))) for x in signs])
    return norm if cut is None or not cut.groups else added_up(norm.square(), cut).sqrt()


def norms_left(model: nn.Module) -> dict[str, Tensor]:
    """Norms of what `.grad` holds now, by parameter."""
    cuts = _cuts(model)
    return {n: _norm(g.detach(), cuts.get(n)) for n, g in gradients(model).items()}


def consumed(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Gradients of an optimizer's parameters as it is about to use them; a fused one unscales them itself."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {n for n, p in named(model).items() if id(p) in held}
    cuts, scale = _cuts(model), getattr(optimizer, "grad_scale", None)
    found = {n: dense(g, cuts.get(n)) for n, g in gradients(model).items() if n in own}
    return found if scale is None else {n: g / scale.to(g.device) for n, g in found.items()}


def touched(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Rows that the sparse gradients of an optimizer's parameters hold, Boolean [V], by name; also those of zeros."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        n: rows_of(p.grad)
        for n, p in named(model).items()
        if id(p) in held and p.grad is not None and p.grad.is_sparse
    }


def _cuts(model: nn.Module) -> dict[str, Piece]:
    flat = pieces(model)
    return {n: flat[id(p)] for n, p in named(model).items() if id(p) in flat}


def overflows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer will leave this step out, because a GradScaler found gradients that are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.any())


def clip_of(before: Mapping[str, Tensor], after: Mapping[str, Tensor], scale: float) -> Clip | None:
    """Clipping that turned gradients of some norms into gradients of others.

    Args:
        before: What `norms` finds after the backward, by parameter.
        after: The same of the gradients that the optimizer uses.
        scale: Loss scale, which the first still have and the second have not.

    Returns:
        The clipping, or None if the gradients are not one multiple of what they were, or not finite.

    >>> ten, five, turned = torch.tensor([[6.0, 8.0], [3.0, 4.0], [4.0, 3.0]])
    >>> clip_of({"w": ten}, {"w": five}, 1.0), clip_of({"w": ten, "b": ten}, {"w": five, "b": ten}, 1.0)
    (Clip(coefficient=0.5, norm=10.0), None)
    >>> clip_of({"w": ten}, {"w": turned}, 1.0) is None
    True
    """
    if not after or not before.keys() >= after.keys():
        return None
    read = fetched([norms[n].double() for norms in (before, after) for n in after])
    first, second = read.unflatten(0, (2, -1)).flatten(1)
    total, left = float(first.norm()), float(second.norm())
    if total == 0:
        return Clip(1.0, 0.0) if left == 0 else None
    even = (second - first * (left / total)).abs().max() <= 1e-3 * left
    return Clip(left / total * scale, total / scale) if bool(even) else None


def processes(model: nn.Module) -> int:
    """Over how many processes gradients are averaged: not over those that share its layers."""
    mesh = parallel_mesh(model)
    world = torch.distributed.get_world_size() if several_processes() else 1
    return world if mesh is None else world // mesh.size()


def stepping_scaler() -> torch.amp.GradScaler | None:
    """The `GradScaler` whose ``step`` has called the optimizer that steps now, if any."""
    found = next((owner for owner in callers() if isinstance(owner, torch.amp.GradScaler)), None)
    return found if found is not None and found.is_enabled() else None


def accumulated_steps() -> int:
    """By how many steps ``Accelerator.backward`` divides the loss, if accelerate runs the optimizer that steps now."""
    owner = next((owner for owner in callers() if type(owner).__name__ == "AcceleratedOptimizer"), None)
    return 1 if owner is None else owner.gradient_state.num_steps


def callers() -> Iterator[Any]:
    """The objects whose methods have led here, the latest first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back
