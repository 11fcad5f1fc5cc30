"""Parameters that are spread over processes: their names, and which piece of each one this process holds.

FSDP2 keeps parameters as `DTensor`s.  FSDP1 (``use_orig_params=True``) puts wrappers between modules, whose names are
left out here, and cuts one flat parameter: between passes a process's parameters are flat pieces, some of them empty,
and inside a pass the modules hold views of the flat parameter instead.

A backward that is not reduced (``no_sync``, ``set_requires_gradient_sync(False)``) leaves whole gradients of this
process alone where no optimizer sees them: in a flat one (FSDP1), with the gathered parameters (FSDP2).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


_WRAPPERS = (FullyShardedDataParallel, ActivationWrapper)


@dataclass(frozen=True, eq=False)
class Piece:
    """What this process holds of a tensor.

    Attributes:
        local: The values here.
        shape: Shape of the whole tensor.
        place: Flat positions in the whole tensor, of flat positions in the piece.
        groups: Groups of processes over which the pieces add up to the whole, one after the other.
        averaged: Groups of processes over which FSDP1 averages gradients, one after the other.
        run: How many entries of the piece that follow each other do so in the whole tensor, too; all if None.
    """

    local: Tensor
    shape: tuple[int, ...]
    place: Callable[[Tensor], Tensor] = lambda index: index
    groups: tuple[ProcessGroup, ...] = ()
    averaged: tuple[ProcessGroup, ...] = ()
    run: int | None = None


def canonical(name: str) -> str:
    """A name of a module or parameter without the wrappers of FSDP1, activation checkpointing and compilation.

    >>> canonical("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def named(model: nn.Module, cut: Mapping[int, nn.Parameter] | None = None) -> dict[str, nn.Parameter]:
    """Parameters by canonical name, as optimizers have them: FSDP2 may leave gathered ones in the modules.

    Args:
        model: The model.
        cut: What `cut_of` finds, where it was asked already.
    """
    cut = cut_of(model) if cut is None else cut
    return {canonical(name): cut.get(id(p), p) for name, p in model.named_parameters()}


def cut_of(model: nn.Module) -> dict[int, nn.Parameter]:
    """The parameters that optimizers have, by the `id` of those that FSDP2 has gathered for them."""
    return {id(p._unsharded_param): p.sharded_param for p in _gathered(model)}


def flat_units(model: nn.Module) -> list[Any]:
    """The parts of a model with a flat parameter each (FSDP1)."""
    units = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
    return [m for m in units if getattr(m, "_handle", None) is not None]


def gathered_units(model: nn.Module) -> list[Any]:
    """The groups of parameters that are gathered together (FSDP2)."""
    states: list[Any] = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    several = [getattr(s, "_fsdp_param_groups", None) for s in states]
    groups = [[s._fsdp_param_group] if g is None else g for s, g in zip(states, several, strict=True)]
    return [group for found in groups for group in found if group is not None]


def _gathered(model: nn.Module) -> list[Any]:
    """FSDP2's own records of the parameters that have been gathered so far."""
    found = [p for group in gathered_units(model) for p in group.fsdp_params]
    return [p for p in found if hasattr(p, "_unsharded_param")]


def submodules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical path, without wrappers."""
    found = model.named_modules()
    return {canonical(path): m for path, m in found if not isinstance(m, _WRAPPERS)}


def sizes(model: nn.Module) -> dict[str, int]:
    """Numbers of entries of whole parameters, by canonical name."""
    flat = pieces(model)
    return {n: math.prod(flat[id(p)].shape) if id(p) in flat else p.numel() for n, p in named(model).items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside of wrappers."""
    if isinstance(model, ActivationWrapper):
        return unwrapped(model._checkpoint_wrapped_module)
    return unwrapped(model.module) if isinstance(model, FullyShardedDataParallel) else model


def is_flat(model: nn.Module) -> bool:
    """Whether some parameters are pieces of flat ones (FSDP1)."""
    return any(isinstance(m, FullyShardedDataParallel) for m in model.modules())


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward pass of the model waits for other processes: its parameters are spread over them."""
    return is_flat(model) or any(isinstance(p, DTensor) for p in named(model).values())


def pieces(model: nn.Module) -> dict[int, Piece]:
    """Pieces of the parameters of FSDP1, by the parameter's `id`; taken between passes."""
    found: dict[int, Piece] = {}
    for unit in flat_units(model):
        handle = unit._handle
        flat, cut = handle.flat_param, handle.uses_sharded_strategy
        groups = (handle.process_group,) if cut else ()
        replicas = getattr(unit, "_inter_node_pg", None)
        averaged = (handle.process_group,) if replicas is None else (handle.process_group, replicas)
        for p, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            start = (info.intra_param_start_idx or 0) if cut else 0
            found[id(p)] = Piece(p, tuple(shape), lambda index, start=start: index + start, groups, averaged)
    return found


def piece(x: Tensor) -> Piece:
    """The piece of a tensor that is a `DTensor`, or all of it."""
    if not isinstance(x, DTensor):
        return Piece(x, tuple(x.shape))
    if any(type(p) not in (Shard, Replicate) for p in x.placements):
        return piece(x.full_tensor())
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    cut = [dim for dim, p in enumerate(x.placements) if isinstance(p, Shard)]

    def place(index: Tensor) -> Tensor:
        found = torch.zeros_like(index)
        for axis in reversed(range(len(shape))):
            found += (index % shape[axis] + offset[axis]) * math.prod(x.shape[axis + 1 :])
            index = index // shape[axis]
        return found

    groups = tuple(x.device_mesh.get_group(dim) for dim in cut)
    innermost = max((axis for axis in range(len(shape)) if shape[axis] != x.shape[axis]), default=0)
    run = math.prod(shape[innermost:]) if innermost else None
    return Piece(x.to_local(), tuple(x.shape), place, groups, run=run)


def whole(x: Tensor, cut: Piece | None = None) -> Tensor:
    """All values of a tensor that is spread over processes, which must ask for it together.

    Args:
        x: A `DTensor`, or what this process holds of a parameter of FSDP1, its gradient or its state.
        cut: The parameter's piece under FSDP1.
    """
    if isinstance(x, DTensor):
        return x.full_tensor()
    if cut is None or not cut.groups or x.ndim == 0:
        return x
    full = x.new_zeros(math.prod(cut.shape))
    full[cut.place(torch.arange(x.numel(), device=x.device))] = x.flatten()
    return added_up(full, cut).view(cut.shape)


def added_up(x: Tensor, cut: Piece) -> Tensor:
    """The sum over the processes that hold pieces of a parameter, in place."""
    for group in cut.groups:
        dist.all_reduce(x, group=group)
    return x


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """What this process holds of the gradients that there are, by canonical name.

    FSDP1 leaves None where a process holds nothing of a parameter, so that processes have to agree on what there is.
    """
    parameters, flat = named(model), pieces(model)
    spread = [n for n, p in parameters.items() if id(p) in flat and flat[id(p)].groups]
    there = {n for n, p in parameters.items() if p.grad is not None and n not in spread}
    if spread:
        cut = flat[id(parameters[spread[0]])]
        flags = torch.tensor([int(parameters[n].grad is not None) for n in spread], device=cut.local.device)
        added_up(flags, cut)
        there |= {n for n, flag in zip(spread, flags.tolist(), strict=True) if flag}
    grads = {n: p.grad for n, p in parameters.items() if n in there}
    low = {id(p): dtype for handle, dtype in _low_gradients(model) for p in handle.flat_param._params}
    empty = {
        n: torch.zeros_like(p, dtype=low.get(id(p))) for n, p in parameters.items() if grads.get(n, p) is None
    }
    return {n: empty[n] if g is None else g for n, g in grads.items()}


def _low_gradients(model: nn.Module) -> list[tuple[Any, torch.dtype]]:
    """The flat parameters whose gradients FSDP1 keeps in the type of the passes, and that type."""
    handles = [unit._handle for unit in flat_units(model)]
    return [(handle, handle._fwd_bwd_param_dtype) for handle in handles if handle._keep_low_precision_grads]


def unreduced(model: nn.Module) -> dict[str, Tensor]:
    """Gradients that the backward which ends now has left whole and this process's alone, by canonical name."""
    names = {id(p): name for name, p in named(model).items()}
    flat = [
        p for unit in flat_units(model) if not unit._sync_gradients for p in unit._handle.flat_param._params
    ]
    found = {names[id(p)]: p.grad for p in flat if p.grad is not None}
    whole = {names[id(p.sharded_param)]: _whole_gradient(p) for p in _gathered(model)}
    return found | {name: grad for name, grad in whole.items() if grad is not None}


def _whole_gradient(p: Any) -> Tensor | None:
    """What FSDP2 holds of a parameter's gradient that was not reduced: apart where it is reduced in another type."""
    return p._unsharded_param.grad if p.unsharded_accumulated_grad is None else p.unsharded_accumulated_grad


@contextlib.contextmanager
def spared(model: nn.Module) -> Iterator[None]:
    """No gradients inside the context, reduced or not, and those from before after it."""
    handles = [unit._handle for unit in flat_units(model)]
    waiting = [handle for handle in handles if _waits(handle)]
    flat = {p for handle in waiting for p in handle.flat_param._params}
    grads = [(p, p.grad) for p in model.parameters() if p not in flat]
    apart = [(p, p._unsharded_param.grad, p.unsharded_accumulated_grad) for p in _gathered(model)]
    with contextlib.ExitStack() as stack:
        for handle in waiting:
            stack.enter_context(_spared_flat(handle))
        try:
            for p, _ in grads:
                p.grad = None
            for p, *_ in apart:
                p._unsharded_param.grad = p.unsharded_accumulated_grad = None
            yield
        finally:
            for p, grad in grads:
                _give(p, grad)
            for p, grad, accumulated in apart:
                p._unsharded_param.grad, p.unsharded_accumulated_grad = grad, accumulated


def _waits(handle: Any) -> bool:
    """Whether the gradient of a flat parameter that is cut is whole, and so waits to be reduced."""
    flat, grad = handle.flat_param, handle.flat_param.grad
    return handle.uses_sharded_strategy and grad is not None and grad.size() == flat._unpadded_unsharded_size


@contextlib.contextmanager
def _spared_flat(handle: Any) -> Iterator[None]:
    """Neither a flat gradient that waits, nor what was reduced before it, inside the context."""
    flat = handle.flat_param
    grad, reduced = flat.grad, vars(flat).pop("_saved_grad_shard", None)
    try:
        for p in (flat, *flat._params):
            p.grad = None
        yield
    finally:
        _give(flat, grad)
        handle._use_unsharded_grad_views()
        if reduced is not None:
            flat._saved_grad_shard = reduced


def _give(p: Tensor, grad: Tensor | None) -> None:
    """Set a gradient, which FSDP1 may keep in another shape or type than its parameter has."""
    if grad is None or (grad.shape == p.shape and grad.dtype == p.dtype):
        p.grad = grad
    else:
        p.grad = torch.empty_like(p)
        p.grad.data = grad


def part(full: Tensor, cut: Piece) -> Tensor:
    """What this process holds of a whole tensor, shaped as its piece."""
    index = torch.arange(cut.local.numel(), device=full.device)
    return full.flatten()[cut.place(index)].view(cut.local.shape)
