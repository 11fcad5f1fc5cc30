"""Check captured gradients against autograd: the safeguard against layers that do not do what their rule says.

A rule is matched by class, but a model may use a weight functionally as well, call ``layer.forward`` past the hooks,
scale an output, or couple examples.  Comparing one example's captured gradients with `torch.autograd.grad` of the same
loss finds all of these before any number is produced.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attrax.core import GradTree, Leaf, stored

if TYPE_CHECKING:
    from attrax.frontends.live import Live

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 1e-1, torch.float16: 5e-2}


def verify_gradients(source: "Live", batch: Mapping[str, Any]) -> None:
    """Compare the captured gradient of one example with autograd.

    Args:
        source: The live source.
        batch: A batch of one example.

    Raises:
        RuntimeError: Naming the parameters that differ.
    """
    reference = autograd_gradients(source, batch)
    errors: dict[str, str] = {}
    largest = largest_entry(reference.values())

    def compare(name: str, leaf: Leaf, _: object) -> None:
        for parameter, captured in stored(GradTree({name: leaf})).items():
            expected = reference.pop(parameter, None)
            errors.update(mismatch(parameter, captured[0], expected, largest=largest))

    source.run(batch, compare, "")
    for parameter, value in reference.items():
        if value is not None and bool(value.any()):
            errors[parameter] = "has a gradient but its layer was never captured"
    raise_on(errors)


def largest_entry(grads: Iterable[Tensor | None]) -> float:
    """Largest absolute entry of all gradients."""
    return max((float(g.abs().max()) for g in grads if g is not None and g.numel()), default=0.0)


def autograd_gradients(source: "Live", batch: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Gradients of the summed loss for the captured parameters, by plain autograd."""
    named = {n: p for n, p in source.model.named_parameters() if n in source.wanted}
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        loss = source.loss(source.model, batch).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, grads, strict=True))


def mismatch(
    parameter: str,
    captured: Tensor,
    reference: Tensor | None,
    *,
    largest: float,
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """How a captured gradient differs from the reference, if it does.

    Args:
        parameter: Its name.
        captured: What was captured.
        reference: What autograd says.
        largest: Largest gradient entry of all parameters: a gradient that is zero but for rounding (a key's bias) is
            not held to its own size.
        dtype: Precision to expect.
    """
    expected = torch.zeros_like(captured) if reference is None else reference.reshape(captured.shape)
    if not bool(torch.isfinite(expected).all()):
        return {}
    scale = float(expected.abs().max())
    error = float((captured - expected).abs().max())
    dtype = dtype or (expected.dtype if reference is not None else captured.dtype)
    tolerance = TOLERANCE.get(dtype, 1e-1)
    if error <= tolerance * scale + 100 * torch.finfo(dtype).eps * largest:
        return {}
    return {parameter: f"differs from autograd by {error:.2e} (largest entry {scale:.2e})"}


def raise_on(errors: Mapping[str, str]) -> None:
    """Raise if any parameter was wrong."""
    if not errors:
        return
    lines = "\n".join(f"  {parameter}: {text}" for parameter, text in list(errors.items())[:8])
    raise RuntimeError(
        f"capture: the captured gradients of {len(errors)} parameters are not those of autograd:\n{lines}\n"
        "The layer does more than its rule says, its weight is used outside the layer's call (functional use, "
        "layer.forward), or examples depend on each other. Exclude these layers (exclude=) or pass a rule (rules=)."
    )
