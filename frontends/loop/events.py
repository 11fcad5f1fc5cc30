"""What functions that a capture calls get to see of training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attrax.core import Block
from attrax.frontends.model.averaging import Averaging

if TYPE_CHECKING:
    from attrax.frontends.loop.capture import Capture


@dataclass(frozen=True, eq=False)
class BackwardEvent:
    """A backward is over: its gradients have been added to `.grad`, and nothing has used them yet.

    Data parallel training has exchanged its gradients by then.

    Attributes:
        step: Number of steps completed so far.
        blocks: Per-example gradients of this backward, before the capture's transform, scaled as in `.grad`.
        model: The model.
        capture: The running capture (selection, transform, `paused()`).
        first: Whether it is the first one whose gradients this step will use (gradient accumulation).
        spanning: Whether the loss is a mean over all of the step's backwards (Hugging Face's `num_items_in_batch`).
        averaging: How `.grad` is averaged over processes that hold all of each parameter; None where it is not.
        weighed: To be called by a function that changes what examples contribute to `.grad`, so that blocks are
            recorded as the optimizer uses them: for each block, factors of its examples [B] by weight parameter, and
            factors of the step's earlier backwards by parameter.
    """

    step: int
    blocks: tuple[Block, ...]
    model: nn.Module
    capture: "Capture"
    first: bool = True
    spanning: bool = False
    averaging: Averaging | None = None
    weighed: Callable[[Sequence[Mapping[str, Tensor]], Mapping[str, float]], None] = lambda now, earlier: None


@dataclass(frozen=True, eq=False)
class StepEvent:
    """The state of training right before an optimizer moves the parameters.

    Attributes:
        step: Number of steps completed so far.
        blocks: Blocks captured for this step (whole gradients, where directions are recorded); none yet where the loop
            runs inside ``optimizer.step(closure)``.
        learning_rate: Learning rate of the optimizer, None if the captured parameters have several.
        model: The model.
        optimizer: The optimizer about to step.
        capture: The running capture (selection, transform, `paused()`).
    """

    step: int
    blocks: tuple[Block, ...]
    learning_rate: float | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    capture: "Capture"
