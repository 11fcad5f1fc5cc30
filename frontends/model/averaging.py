"""Whether processes that train together average their gradients."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Averaging:
    """Replicated training: `.grad` becomes the mean over processes, in this backward or a later one (``no_sync``).

    Attributes:
        group: The processes.
        done: Whether this backward did it; until then `.grad` is this process's own.
    """

    group: Any
    done: bool


def averaging() -> Averaging | None:
    """How the forward pass that runs now is averaged; None outside of DistributedDataParallel."""
    wrapper = DistributedDataParallel._active_ddp_module
    return None if wrapper is None else Averaging(wrapper.process_group, wrapper.require_backward_grad_sync)


def several_processes() -> bool:
    """Whether `.grad` may not be this process's alone: data parallel training averages it over processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
