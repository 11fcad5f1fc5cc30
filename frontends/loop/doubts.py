"""What a capture says right before an optimizer steps on gradients that its blocks may not explain."""

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor


def refuse_uncaptured(never_called: Sequence[str]) -> None:
    """No gradient was seen: the hooks do not fire.

    Raises:
        RuntimeError: Naming layers.
    """
    raise RuntimeError(
        f"capture: an optimizer steps on gradients that were not captured. Layers never called: {never_called[:5]}. "
        "Did their forward pass run before the capture was entered, was the model compiled before, is another copy of "
        "it trained, does a parent call layer.forward(), or were the gradients made by torch.autograd.grad?"
    )


def warn_of_nothing() -> None:
    """The context is over, and no backward has passed through the model."""
    _warn(
        "nothing was captured: no backward passed through the model inside the context. Does the loop train another "
        "copy of it, or had training ended before?"
    )


def warn_of_early(blocks: int) -> None:
    """Blocks have not waited for the first optimizer."""
    _warn(
        f"{blocks} blocks went to the sinks before any optimizer was seen to step: they do not know the learning rate "
        "of step 0."
    )


def warn_of_moves(steps: int) -> None:
    """Parameters moved before the first optimizer stepped, which has ended steps."""
    _warn(
        f"parameters moved before any optimizer stepped, counted as {steps} steps of a loop that moves them by hand. "
        "If they were a part of this optimizer's step (the ascent of SAM), later steps are numbered too high: put such "
        "a part inside paused()."
    )


def warn_of_leftovers(step: int, parameters: Sequence[str]) -> None:
    """Gradients of a step hold more than its blocks."""
    _warn(
        f"step {step} uses gradients that were in .grad before its first backward, e.g. of {parameters[:3]}: its "
        "blocks do not add up to what moves the parameters, and the clipping of such steps is unknown. Zero the "
        "gradients after every step, and step once for each of them."
    )


def warn_of_changes(step: int, parameters: Sequence[str]) -> None:
    """The gradients of some backwards of a step are not what they were when the next one adds to them."""
    _warn(
        f"gradients of step {step}, e.g. of {parameters[:3]}, were changed between its backwards (clipped, scaled, "
        "zeroed in part): its earlier blocks do not add up to what moves the parameters, and the clipping of such "
        "steps is unknown. Change gradients after the last backward of a step, or scale the loss."
    )


def warn_of_hooks(step: int, parameters: Sequence[str]) -> None:
    """Gradients of parameters go through functions of the loop, after the layers of a capture have seen them."""
    _warn(
        f"parameters have hooks (register_hook, register_post_accumulate_grad_hook), e.g. {parameters[:3]} at step "
        f"{step}. Captured gradients are those before them: if they change gradients (clip, add noise), blocks do not "
        "add up to what moves the parameters, and recorded clipping leaves them out. Change .grad after the backward "
        "instead, or ignore this if they only read."
    )


def warn_of_writes(step: int, leaves: Sequence[str]) -> None:
    """What blocks hold is not what was captured any more."""
    _warn(
        f"blocks of step {step} hold memory that was written to after their backward, e.g. in {leaves[:3]}: their "
        "gradients may be wrong. Do not change hidden states of the model, nor the gradient given to backward(), in "
        "place before the optimizer has stepped: make new tensors, or give the model a copy."
    )


def hooked(parameters: Mapping[str, Tensor]) -> list[str]:
    """Parameters with hooks on their gradient that still is there: it was not used within the backward."""
    return [
        n
        for n, p in parameters.items()
        if p.grad is not None and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
    ]


def _warn(text: str) -> None:
    warnings.warn(f"capture: {text}", RuntimeWarning, stacklevel=3)
