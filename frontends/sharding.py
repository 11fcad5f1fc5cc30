"""Parameters that are spread over processes: their names, and which piece of each one this process holds.

FSDP2 keeps parameters as `DTensor`s.  FSDP1 (``use_orig_params=True``) puts wrappers between modules, whose names are
left out here, and cuts one flat parameter: between passes a process's parameters are flat pieces, some of them empty,
and inside a pass the modules hold views of the flat parameter instead.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WRAPPED = "_fsdp_wrapped_module"


@dataclass(frozen=True, eq=False)
class Piece:
    """What this process holds of a tensor.

    Attributes:
        local: The values here.
        shape: Shape of the whole tensor.
        place: Flat positions in the whole tensor, of flat positions in the piece.
        groups: Groups of processes over which the pieces add up to the whole, one after the other.
    """

    local: Tensor
    shape: tuple[int, ...]
    place: Callable[[Tensor], Tensor] = lambda index: index
    groups: tuple[ProcessGroup, ...] = ()


def canonical(name: str) -> str:
    """A name of a module or parameter without the wrappers of FSDP1.

    >>> canonical("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by canonical name."""
    return {canonical(name): p for name, p in model.named_parameters()}


def submodules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical path, without wrappers."""
    found = model.named_modules()
    return {canonical(path): m for path, m in found if not isinstance(m, FullyShardedDataParallel)}


def sizes(model: nn.Module) -> dict[str, int]:
    """Numbers of entries of whole parameters, by canonical name."""
    flat = pieces(model)
    return {n: math.prod(flat[id(p)].shape) if id(p) in flat else p.numel() for n, p in named(model).items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrapper of FSDP1."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def is_flat(model: nn.Module) -> bool:
    """Whether some parameters are pieces of flat ones (FSDP1)."""
    return any(isinstance(m, FullyShardedDataParallel) for m in model.modules())


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward pass of the model waits for other processes: its parameters are spread over them."""
    return is_flat(model) or any(isinstance(p, DTensor) for p in model.parameters())


def pieces(model: nn.Module) -> dict[int, Piece]:
    """Pieces of the parameters of FSDP1, by the parameter's `id`; taken between passes."""
    found: dict[int, Piece] = {}
    for module in model.modules():
        handle: Any = (
            getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        )
        if handle is None:
            continue
        flat, cut = handle.flat_param, handle.uses_sharded_strategy
        groups = (handle.process_group,) if cut else ()
        for p, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            start = (info.intra_param_start_idx or 0) if cut else 0
            found[id(p)] = Piece(p, tuple(shape), lambda index, start=start: index + start, groups)
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
    return Piece(x.to_local(), tuple(x.shape), place, groups)


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
    return {n: torch.zeros_like(parameters[n]) if g is None else g for n, g in grads.items()}


def part(full: Tensor, cut: Piece) -> Tensor:
    """What this process holds of a whole tensor, shaped as its piece."""
    index = torch.arange(cut.local.numel(), device=full.device)
    return full.flatten()[cut.place(index)].view(cut.local.shape)
