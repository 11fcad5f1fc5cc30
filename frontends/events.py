"""What functions that a capture calls get to see of training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from attrax.core import Block

if TYPE_CHECKING:
    from attrax.frontends.capture import Capture


@dataclass(frozen=True, eq=False)
class BackwardEvent:
    """A backward is over: its gradients have been added to `.grad`, and nothing has used them yet.

    Attributes:
        step: Number of steps completed so far.
        blocks: Per-example gradients of this backward, before the capture's transform, scaled as in `.grad`.
        model: The model.
        capture: The running capture (selection, transform, `paused()`).
    """

    step: int
    blocks: tuple[Block, ...]
    model: nn.Module
    capture: "Capture"


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
