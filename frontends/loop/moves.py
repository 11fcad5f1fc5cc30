"""A capture's view of the optimizers at work: what to turn into directions, what to record, and when."""

import torch
from torch import Tensor, nn

from attrax.core import Block, Transform
from attrax.frontends.loop.directions import Waiting
from attrax.frontends.runs.observed import (
    callers,
    clip_of,
    consumed,
    norms,
    norms_left,
    processes,
    stepping_scaler,
)
from attrax.frontends.runs.trajectory import Recorder


class Moves:
    """Follows the optimizers of one training loop.

    Attributes:
        waiting: Blocks that wait for their directions.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder | None, scaler: torch.amp.GradScaler | None
    ) -> None:
        if recorder is not None:
            recorder.begin()
        self.waiting = Waiting()
        self._model, self._recorder, self._scaler = model, recorder, scaler
        self._norms: dict[str, Tensor] = {}
        self._scale = 1.0
        self._inside: torch.optim.Optimizer | None = None
        self._again = False

    def look(self) -> None:
        """A forward pass begins: an optimizer whose step was left by an exception is not at work any more."""
        if self._inside is not None and not any(x is self._inside for x in callers()):
            self._inside = None

    def left_behind(self, step: int, transform: Transform | None) -> None:
        """A backward is over; its gradients lie in `.grad`, or will once processes have averaged them."""
        if self.waiting.needs_factor or (self._recorder is not None and self._recorder.wants(step)):
            if processes(self._model) > 1:
                torch.autograd.Variable._execution_engine.queue_callback(self._observe)
            else:
                self._observe()
        if self._inside is not None:
            self._again = True
            self._turn(self._inside, transform)

    def _observe(self) -> None:
        self._norms = norms_left(self._model)

    def before(self, step: int, optimizer: torch.optim.Optimizer, transform: Transform | None) -> None:
        """An optimizer is about to step."""
        scaler = self._scaler or stepping_scaler()
        self._scale = 1.0 if scaler is None else scaler.get_scale()
        self._inside, self._again = optimizer, False
        self._turn(optimizer, transform)
        if self._recorder is not None:
            self._recorder.before(step, optimizer, self._model)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        if self._again and self._recorder is not None:
            self._recorder.read_gradients(optimizer, self._model)
        self._inside = None

    def begin(self) -> None:
        """A step begins, of whose gradients nothing has been seen."""
        self._norms = {}

    def unexplained(self) -> None:
        """What the optimizer is about to use are not the gradients of this step's backwards alone."""
        self._norms = {}

    def flush(self, step: int, discarded: list[Block]) -> tuple[list[Block], list[Block]]:
        """A step is over: record it; returns the blocks of directions and those that no optimizer used."""
        if self._recorder is not None:
            unused = tuple(block.examples.micro for block in discarded)
            self._recorder.flush(step, unused, self._norms, self._scale)
        return self.waiting.take()

    def _turn(self, optimizer: torch.optim.Optimizer, transform: Transform | None) -> None:
        factor = self._factor(optimizer) if self.waiting.needs_factor else 1.0
        self.waiting.turn(optimizer, self._model, factor, transform)

    def _factor(self, optimizer: torch.optim.Optimizer) -> float:
        """What turns captured gradients into shares of those that an optimizer uses."""
        after = norms(consumed(optimizer, self._model))
        clip = None if self._again else clip_of(self._norms, after, self._scale)
        if clip is None:
            why = (
                "they are made within its step"
                if self._again
                else "they are not one multiple of the backward's"
            )
            raise ValueError(
                f"capture: directions of target 'as_trained' need the gradients that the optimizer uses, but {why}. "
                "Use target='mean' or 'sum'."
            )
        return clip.coefficient / (self._scale * processes(self._model))
