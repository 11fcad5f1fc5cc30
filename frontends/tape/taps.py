"""Identities in the autograd graph through which a tape listens.

`Tap` sees the gradient of a layer's output whatever the model does with that output (in-place activations, views,
compiled regions), and keeps the layer's input the way autograd does: it is recomputed under activation checkpointing,
freed with the graph, and an in-place change of it is an error instead of a wrong number.  `Mark` tells that the
backward of a pass begins.  `Twice` finds losses that contain a gradient.
"""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from attrax.core import tree_map
from attrax.frontends.tape.passes import Call, Pass

if TYPE_CHECKING:
    from attrax.frontends.tape.tape import Tape


class Tap(torch.autograd.Function):
    """Identity on a layer's outputs whose backward hands their gradients and the saved inputs to the tape."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, run: Pass, tape: "Tape", anchor: Tensor | None, saved: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs themselves, which follow the inputs to save; `anchor` makes them require gradients."""
        ctx.save_for_backward(*tensors[:saved])
        ctx.call, ctx.run, ctx.tape, ctx.saved = call, run, tape, saved
        return tuple(x.detach() for x in tensors[saved:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients themselves."""
        ctx.tape.arrive(ctx.run, ctx.call, ctx, tuple(g.detach() for g in grads))
        if torch.is_grad_enabled():
            anchor = torch.zeros((), device=grads[0].device, requires_grad=True)
            grads = tuple(Twice.apply(g, anchor, ctx.call, ctx.run, ctx.tape) for g in grads)
        return (None,) * (5 + ctx.saved) + grads


class Mark(torch.autograd.Function):
    """Identity on a pass's output whose backward comes before that of every layer of the pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, run: Pass, tape: "Tape") -> Tensor:
        """The output itself."""
        ctx.run, ctx.tape = run, tape
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient itself."""
        ctx.tape.begin(ctx.run)
        return grads[0], None, None


class Twice(torch.autograd.Function):
    """Identity on a gradient; its own backward runs if the loss depends on that gradient (``create_graph=True``)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, anchor: Tensor, call: Call, run: Pass, tape: "Tape") -> Tensor:
        """The gradient itself; `anchor` makes it part of every graph built on it."""
        ctx.call, ctx.run, ctx.tape = call, run, tape
        return g.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the gradient itself."""
        ctx.tape.refuse_twice(ctx.run, ctx.call)
        return grads[0], None, None, None, None


def saved_inputs(ctx: FunctionCtx, path: str) -> tuple[Tensor, ...]:
    """The layer inputs that a tap saved.

    Raises:
        RuntimeError: If it was changed in place since.
    """
    try:
        return ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            f"capture: the input of layer '{path}' was changed in place after the layer ran, so its gradient "
            "cannot be formed. Use an out-of-place operation after this layer, or exclude the layer."
        ) from error


def origins(inputs: list[Tensor], tape: "Tape") -> list[Pass]:
    """The passes these tensors were computed in, found in their autograd graph."""
    pending = [x.grad_fn for x in inputs if x.grad_fn is not None]
    seen: set[Any] = set()
    found: list[Pass] = []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "tape", None) is tape:
            run: Pass = node.run  # pyright: ignore[reportAttributeAccessIssue]
            found += [run] if run not in found else []
            continue
        pending += [parent for parent, _ in node.next_functions if parent is not None]
    return found


def marked(output: Any, run: Pass, tape: "Tape") -> Any:
    """The output of a pass with a mark on every tensor, so that its backward is seen to begin."""

    def mark(x: Any) -> Any:
        return Mark.apply(x, run, tape) if isinstance(x, Tensor) and x.requires_grad else x

    if not is_dataclass(output) or isinstance(output, Mapping):
        return tree_map(mark, output)
    output = copy.copy(output)
    for each in fields(output):
        object.__setattr__(output, each.name, tree_map(mark, getattr(output, each.name)))
    return output


def refuse_transforms(path: str) -> None:
    """Refuse a call of a layer under `torch.func` or forward-mode differentiation, which taps are not made for.

    Raises:
        RuntimeError: Saying what to do.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"capture: layer '{path}' was called under a transform of torch.func (vmap, grad, jacrev, jvp) or forward "
            "mode differentiation, where a capture cannot follow its examples. Put calls that only measure into "
            "paused() of the capture, and train with a plain call of the model."
        )


def in_backward() -> bool:
    """Whether a backward runs now."""
    return torch._C._current_graph_task_id() != -1


def accumulates(node: torch.autograd.graph.Node) -> bool:
    """Whether the running backward adds to the parameter's `.grad`; `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return False
