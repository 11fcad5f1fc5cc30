"""Listening at the loss and the logits that a model returns."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from attrax.frontends.loop.rowweight import row_weight
from attrax.frontends.tape.notes import Notes

_FAR = 512
_EXACT = (torch.float32, torch.float64)


class LossTap(torch.autograd.Function):
    """Identity that tells of the gradient arriving at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
        """The tensor itself."""
        ctx.set_materialize_grads(False)
        ctx.tell = tell
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient itself; DDP passes on that there is none."""
        g = grads[0]
        if g is not None:
            ctx.tell(g)
        return g, None


def tap_loss(output: Any, notes: Notes) -> Any:
    """Put a tap on the loss inside a model's output: a tensor, a mapping or a dataclass with `loss`, a tuple or a list.

    The logits beside it are watched as well, to see whether the loop uses them for a loss of its own; they stay the
    tensor that the loss was computed from.

    Returns:
        The output with the tapped loss, or unchanged if it holds no scalar loss.
    """
    if _is_loss(output):
        return _tapped(output, None, notes)
    if isinstance(output, MutableMapping) and _is_loss(output.get("loss")):
        output["loss"] = _tapped(output["loss"], output.get("logits"), notes)
        return output
    if isinstance(output, tuple | list) and output and _is_loss(output[0]):
        loss = _tapped(output[0], output[1] if len(output) > 1 else None, notes)
        values = (loss, *output[1:])
        return getattr(output, "_make", list if isinstance(output, list) else tuple)(values)
    loss = getattr(output, "loss", None)
    if is_dataclass(output) and _is_loss(loss):
        tapped = copy.copy(output)
        object.__setattr__(tapped, "loss", _tapped(loss, getattr(output, "logits", None), notes))
        return tapped
    return output


def look_at_rows(output: Any, notes: Notes) -> None:
    """Note what a row counts in a cross entropy of the logits that a model returns without a loss, if it is one."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", first)
    if not isinstance(logits, Tensor) or logits.ndim < 2 or not logits.requires_grad:
        return
    kept, version = logits.detach(), logits._version

    def look(g: Tensor) -> None:
        weight = row_weight(kept, g) if kept._version == version and kept.dtype in _EXACT else None
        notes.row_weight = None if weight is None else (weight, int(g.any(-1).sum()))

    logits.register_hook(look)


def _is_loss(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.ndim == 0 and x.requires_grad


def _tapped(loss: Tensor, logits: Any, notes: Notes) -> Tensor:
    def scaled(g: Tensor) -> None:
        notes.scale = g.detach().clone()

    notes.loss = loss.detach().clone()
    if isinstance(logits, Tensor) and logits.requires_grad:
        notes.logits, notes.version = logits.detach(), logits._version
        _watch(loss, logits, notes)
    return LossTap.apply(loss, scaled)


def _watch(loss: Tensor, logits: Tensor, notes: Notes) -> None:
    """Note a gradient that arrives at the logits and is not, or not only, that of the loss.

    The nodes of the loss's graph that use the logits tell its own; one that it does not reach within `_FAR` nodes
    counts as from outside.
    """
    own: list[Tensor] = []

    def keep(index: int, given: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]) -> None:
        g = given[index]
        own.extend([] if g is None else [g])

    def compare(g: Tensor) -> None:
        expected = sum(own[1:], own[0]) if own else None
        own.clear()
        if expected is None or (g.data_ptr() != expected.data_ptr() and not torch.equal(g, expected)):
            notes.outside = True

    for node, index in _users(loss, logits):
        node.register_hook(partial(keep, index))
    logits.register_hook(compare)


def _users(loss: Tensor, x: Tensor) -> list[tuple[Any, int]]:
    """The nodes of the loss's graph that a tensor goes into, and as which of their inputs."""
    goal = torch.autograd.graph.get_gradient_edge(x)
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    found: list[tuple[Any, int]] = []
    while waiting and len(seen) < _FAR:
        node = waiting.pop(0)
        if node in seen or node is goal.node:
            continue
        seen.add(node)
        for index, (parent, number) in enumerate(node.next_functions):
            if parent is goal.node and number == goal.output_nr:
                found.append((node, index))
            elif parent is not None:
                waiting.append(parent)
    return found
