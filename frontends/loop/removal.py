"""Examples are taken out of gradients that have been summed into `.grad` already, exactly.

A step that keeps examples ``k_i`` of a batch and normalizes by what it keeps wants ``phi sum_i k_i G_i`` where `.grad`
holds ``sum_i G_i`` and whatever else adds to it: earlier backwards of the step, other losses, regularizers.  So

    .grad  <-  r .grad + sum_i (phi k_i - r) G_i          phi = N / (N - N_R),  N_R the part of N that is dropped

with r = 1: what is not of these examples stays as it is.  Only a mean over several backwards has another r: the ratio
of its phi to the one that earlier backwards of the step were given.  The sum runs over the examples whose weight is not
zero: half of the cost of a weight gradient where half of a batch is dropped and nothing is normalized again.

A sparse gradient (an embedding's) also tells the optimizer which rows it may move: those that only dropped examples
look up are taken out of it, and those that kept ones do stay, whatever their gradient is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from attrax.core import GradTree, Leaf, Materialized, aggregate, stored, take
from attrax.core.algebra import wide
from attrax.frontends.loop.events import BackwardEvent
from attrax.frontends.model.averaging import Averaging
from attrax.frontends.model.sharding import (
    Piece,
    flat_units,
    gathered_units,
    gradients,
    is_sharded,
    part,
    pieces,
    unreduced,
)
from attrax.frontends.model.sparse import rows_of


def factor(total: float, dropped: float) -> float:
    """What a mean over `total` is multiplied by once `dropped` of it are gone; 1 where nothing is left.

    >>> factor(8.0, 2.0), factor(8.0, 8.0)
    (1.3333333333333333, 1.0)
    """
    return total / (total - dropped) if total > dropped else 1.0


def weighted(leaf: Leaf, weights: Tensor) -> dict[str, Tensor]:
    """``sum_i w_i G_i`` by parameter, in its stored layout, float32 or better; empty if all weights are zero."""
    rows = weights.nonzero().flatten()
    if not len(rows):
        return {}
    if isinstance(leaf, Materialized):
        total = weights.to(leaf.w) @ leaf.w.flatten(1)
        one = GradTree({"": replace(leaf, w=total.reshape(1, *leaf.w.shape[1:]))})
    else:
        one = aggregate(GradTree({"": take(leaf, rows)}), weights[rows])
    return {n: total[0] for n, total in stored(one).items()}


def check_reduction(model: nn.Module) -> None:
    """Refuse sharded training whose gradients do not become means over processes.

    Raises:
        RuntimeError: Saying what to do.
    """
    if why := no_mean(model):
        raise RuntimeError(f"select: {why}")


def no_mean(model: nn.Module) -> str:
    """Why the gradients of a sharded model do not become means over processes, and what to do; empty if they do."""
    if len(set(_reductions(model))) > 1:
        return (
            "this backward of a sharded model reduced the gradients of some of its parts and not of others. "
            "Call no_sync() or set_requires_gradient_sync() of the whole model."
        )
    units = gathered_units(model)
    if any(unit._is_hsdp and unit.reduce_grads and not unit.all_reduce_grads for unit in units):
        return (
            "this backward of a sharded model (fully_shard) added its gradients up over shards but not over "
            "replicas, where nothing can be taken out of them. Use set_requires_gradient_sync(False) in the place of "
            "set_requires_all_reduce(False)."
        )
    hooked = any(unit._comm_hook is not None for unit in flat_units(model))
    if hooked or any(unit.gradient_divide_factor or unit._all_reduce_hook for unit in units):
        return (
            "gradients of this sharded model do not become means over processes (set_gradient_divide_factor, "
            "set_all_reduce_hook or register_comm_hook), so that the examples' share in them is unknown. Scale the "
            "loss instead."
        )
    return ""


def _reductions(model: nn.Module) -> list[bool]:
    """Whether the backward that ends now reduced its gradients, for each part that is sharded."""
    flat = [unit._sync_gradients for unit in flat_units(model)]
    return flat + [unit.reduce_grads for unit in gathered_units(model)]


def is_pending(event: BackwardEvent) -> bool:
    """Whether gradients are this process's own until a later backward of the step averages them (``no_sync``)."""
    if event.averaging is not None:
        return not event.averaging.done
    return not is_reduced(event.model)


def is_reduced(model: nn.Module) -> bool:
    """Whether the backward that ends now made gradients of a sharded model means over processes (not so: `no_sync`)."""
    return all(_reductions(model))


def groups(event: BackwardEvent, parameters: Mapping[str, Tensor]) -> list[Any]:
    """The process groups whose gradients are averaged together: sums over each in turn are sums over all."""
    if event.averaging is not None:
        return [event.averaging.group]
    cut = next(iter(pieces(event.model).values()), None)
    if cut is not None:
        return list(cut.averaged)
    sharded = next((p for p in parameters.values() if isinstance(p, DTensor)), None)
    return [] if sharded is None else list(sharded.device_mesh.get_all_groups())


def summed(x: Tensor, over: Sequence[Any]) -> Tensor:
    """The sum over the processes of some groups; memory is exchanged as it lies, so that it must lie alike."""
    x = x.contiguous()
    for group in over:
        dist.all_reduce(x, group=group)
    return x


def change(
    event: BackwardEvent,
    parameters: Mapping[str, Tensor],
    added: Mapping[str, Tensor],
    scale: Mapping[str, float],
    gone: Mapping[str, Tensor],
) -> None:
    """``.grad <- scale * .grad + mean over processes of added``, computed in float32 or better.

    While gradients are pending, what this process adds goes to its own.  Every process of replicated or sharded
    training must call it, with the same parameters in the same order.

    Args:
        event: The backward.
        parameters: The parameters that are changed.
        added: What is added, by parameter.
        scale: What `.grad` is multiplied by before, by parameter.
        gone: Rows [V] that sparse gradients lose, by parameter.

    Raises:
        RuntimeError: If `.grad` has another shape than its parameter's gradient.
    """
    mean = event.averaging if event.averaging is not None and event.averaging.done else None
    pending = is_pending(event) and is_sharded(event.model)
    flat = {} if pending else pieces(event.model)
    for name, grad in (unreduced if pending else gradients)(event.model).items():
        if name not in parameters:
            continue
        p, own, r = parameters[name], added.get(name), scale.get(name, 1.0)
        if id(p) in flat:
            _change_piece(grad, own, r, flat[id(p)])
            continue
        if own is not None and own.shape != grad.shape:
            raise RuntimeError(
                f"select: parameter '{name}': its gradient is {tuple(own.shape)}, its `.grad` {tuple(grad.shape)}. "
                "Gradients that are split within a layer cannot be changed; use fully_shard or "
                "DistributedDataParallel alone."
            )
        if isinstance(grad, DTensor) or mean is not None:
            if own is None:
                own = torch.zeros(grad.shape, dtype=wide(grad.dtype), device=grad.device)
            own = mean_slice(own, grad) if isinstance(grad, DTensor) else _mean(own, mean)
            grad = grad.to_local() if isinstance(grad, DTensor) else grad
        if own is not None and grad.is_sparse:
            p.grad = _sparse(grad, own, r, gone.get(name))
        elif own is not None:
            _write(grad, own, r)
        elif r != 1:
            grad.mul_(r)


def _change_piece(grad: Tensor, own: Tensor | None, r: float, cut: Piece) -> None:
    """The same for this process's piece of a flat parameter (FSDP1)."""
    if own is None:
        own = torch.zeros(cut.shape, dtype=wide(grad.dtype), device=grad.device)
    mean = part(summed(own, cut.averaged), cut) / prod(group.size() for group in cut.averaged)
    grad.copy_(grad.to(mean.dtype) * r + mean)


def _mean(own: Tensor, over: Averaging | None) -> Tensor:
    return own if over is None else summed(own, [over.group]) / over.group.size()


def mean_slice(own: Tensor, grad: DTensor) -> Tensor:
    """This process's slice of the mean over processes."""
    mesh = grad.device_mesh
    total = DTensor.from_local(own.contiguous(), mesh, [Partial()] * mesh.ndim, run_check=False)
    return total.redistribute(placements=grad.placements).to_local() / mesh.size()


def _sparse(grad: Tensor, own: Tensor, r: float, gone: Tensor | None) -> Tensor:
    rows = rows_of(grad) if gone is None else rows_of(grad) & ~gone
    index = rows.nonzero().flatten()
    values = (grad.to_dense() * r + own)[index].to(grad.dtype)
    return torch.sparse_coo_tensor(index.unsqueeze(0), values, grad.shape, check_invariants=False)


def _write(grad: Tensor, own: Tensor, r: float) -> None:
    if grad.dtype == own.dtype:
        grad.mul_(r).add_(own) if r != 1 else grad.add_(own)
    else:
        grad.copy_(grad.to(own.dtype) * r + own)
