"""Check captured gradients against autograd: the safeguard against layers that do not do what their rule says.

A rule is matched by class, but a model may use a weight functionally as well, call ``layer.forward`` past the hooks,
scale an output, or couple examples.  Comparing one example's captured gradients, taken in a batch of two, with
autograd's gradients of that example alone finds all of these before any number is produced.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attrax.core import Examples, GradTree, Leaf, aggregate, stored, take
from attrax.core.leaves import dtype_of
from attrax.frontends.model.randomness import draws, undrawn
from attrax.frontends.model.rows import for_loss, pick
from attrax.frontends.model.sharding import canonical
from attrax.frontends.model.sparse import filled

if TYPE_CHECKING:
    from attrax.frontends.sources.live import Live


class Misread(RuntimeError):
    """Captured gradients of one example that are not those of autograd.

    Attributes:
        parameters: What is wrong, by parameter.
    """

    def __init__(self, message: str, parameters: Mapping[str, str]) -> None:
        super().__init__(message)
        self.parameters = dict(parameters)


TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 1e-1, torch.float16: 5e-2}
_TRIES, _SEVERAL = 4, 16


def verify_gradients(source: "Live", batch: Mapping[str, Any]) -> bool:
    """Compare the captured gradient of one example with autograd.

    Args:
        source: The live source.
        batch: A batch; its first example with a gradient is compared, then the sum over up to sixteen examples.

    Returns:
        Whether an example with a gradient was found.

    Raises:
        Misread: Naming the parameters that differ.
        RuntimeError: If an example's gradients depend on the other examples.
        ValueError: If the loss draws random numbers.
    """
    B = len(batch["example_ids"])
    for row in range(min(B, _TRIES)):
        single = pick(batch, torch.tensor([row]))
        reference = autograd_gradients(source, single)
        conclusive = any(bool(g.any() & g.isfinite().all()) for g in reference.values())
        if conclusive:
            raise_on(_compared(source, single, reference)[0])
        if B > 1:
            pair = pick(batch, torch.tensor([row, (row + 1) % B]))
            errors, dtype = _compared(source, pair, reference)
            errors = {} if dtype in (torch.bfloat16, torch.float16) else errors
            raise_on(errors, coupled=bool(errors) and _coupled(source, pair, errors, dtype))
        if conclusive and B > 2:
            several = pick(batch, torch.arange(min(B, _SEVERAL)))
            raise_on(_compared(source, several, autograd_gradients(source, several), whole=True)[0])
        if conclusive:
            return True
    return False


def _coupled(source: "Live", pair: Mapping[str, Any], names: Collection[str], dtype: torch.dtype) -> bool:
    """Whether the gradient of two examples together is not the sum of their gradients."""
    both = autograd_gradients(source, pair, names)
    one, two = (autograd_gradients(source, pick(pair, torch.tensor([i])), names) for i in (0, 1))
    sums = {n: one.get(n, 0) + two.get(n, 0) for n in names}
    found = {n: distance(s, both.get(n)) for n, s in sums.items() if isinstance(s, Tensor)}
    return bool(mismatches(found, dtype, torch.finfo(torch.float32).eps))


def _compared(
    source: "Live", batch: Mapping[str, Any], reference: Mapping[str, Tensor], *, whole: bool = False
) -> tuple[dict[str, str], torch.dtype]:
    """How a batch's first example (or the sum of all) differs from its reference, and its coarsest dtype."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    dtypes: set[torch.dtype] = set()

    def compare(name: str, leaf: Leaf, _: Examples) -> None:
        dtypes.add(dtype_of(leaf))
        tree = GradTree({name: leaf if whole else take(leaf, slice(0, 1))})
        for parameter, captured in stored(aggregate(tree) if whole else tree).items():
            found[parameter] = distance(captured[0], reference.get(parameter))

    source.run(batch, compare, "", apart=False)
    coarsest = max(dtypes, key=lambda d: torch.finfo(d).eps)
    errors = mismatches(found, coarsest, torch.finfo(torch.float32).eps if whole else 0.0)
    if errors and not mismatches(found, coarsest, torch.finfo(torch.float32).eps):
        errors = _beyond_noise(source, batch, reference, found, errors)
    for parameter in reference.keys() - found.keys() - source.apart.keys():
        if bool(reference[parameter].any()):
            errors[parameter] = "has a gradient but its layer was never captured"
    return errors, coarsest


def _beyond_noise(
    source: "Live",
    batch: Mapping[str, Any],
    reference: Mapping[str, Tensor],
    found: Mapping[str, tuple[Tensor, Tensor]],
    errors: Mapping[str, str],
) -> dict[str, str]:
    """The errors that are larger than what autograd itself makes of the example in a batch of two.

    Models of float64 that compute parts in float32 have gradients of pure rounding (of the bias of attention keys).
    """
    twice = pick(batch, torch.tensor([0, 0]))
    again = autograd_gradients(source, twice)
    noise = {n: distance(again[n] / 2, reference.get(n))[0] for n in errors if n in again}
    return {
        n: text for n, text in errors.items() if n not in noise or not float(found[n][0]) <= 64 * noise[n]
    }


def autograd_gradients(
    source: "Live", batch: Mapping[str, Any], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Gradients of the summed loss by plain autograd; unused parameters are left out.

    Args:
        source: The source.
        batch: A batch.
        names: The parameters; all that the source is to capture if None.

    Raises:
        ValueError: If the loss draws random numbers.
    """
    wanted = source.wanted if names is None else names
    own = {canonical(n): p for n, p in source.model.named_parameters() if canonical(n) in wanted}

    with _borrowed(source.model, set(source.wanted)), torch.compiler.set_stance("force_eager"):
        before = draws(source.model)
        loss = source.loss(source.model, for_loss(batch, source.loss)).sum()
        if before.went_on:
            raise ValueError(
                "live: the loss draws random numbers, so an example has no gradient of its own. Call model.eval(), put "
                "the draws into the batch, or pass verify=False to take one draw as it comes."
            )
        if not loss.requires_grad:
            return {}
        try:
            grads = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
            hidden = any(g is None for g in grads)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            hidden = True
        if hidden:
            source.loss(source.model, for_loss(batch, source.loss)).sum().backward()
            grads = [p.grad for p in own.values()]
    return {n: filled(g) for n, g in zip(own, grads, strict=True) if g is not None}


@contextlib.contextmanager
def _borrowed(model: nn.Module, wanted: set[str]) -> Iterator[None]:
    """Captured parameters that require gradients, and no `.grad`, inside the context; all as it was after it."""
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    with undrawn(model), torch.inference_mode(False), torch.enable_grad():
        try:
            for name, p in model.named_parameters():
                p.requires_grad_(p.requires_grad or canonical(name) in wanted)
                p.grad = None
            yield
        finally:
            for p, trainable, grad in before:
                p.requires_grad_(trainable)
                p.grad = grad


def distance(captured: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Largest difference of two gradients, and the largest entry of the reference; 0 if this is not finite."""
    if reference is None:
        return captured.abs().max(), captured.new_zeros(())
    expected = filled(reference)
    expected = expected.reshape(captured.shape)
    difference = (captured - expected).abs().max()
    finite = expected.isfinite().all()
    return torch.where(finite, difference, 0.0), torch.where(finite, expected.abs().max(), 0.0)


def mismatches(
    found: Mapping[str, tuple[Tensor, Tensor] | tuple[float, float]],
    dtype: torch.dtype,
    at_least: float = 0.0,
) -> dict[str, str]:
    """Parameters whose distance is more than rounding in `dtype`, or to a relative precision of `at_least`.

    A gradient that is zero up to rounding (the bias of attention keys) is judged by the size of the others.
    """
    sizes = {parameter: float(scale) for parameter, (_, scale) in found.items()}
    eps = max(torch.finfo(dtype).eps, at_least)
    rounding = 16 * eps * max(sizes.values(), default=0.0) + torch.finfo(dtype).tiny
    errors: dict[str, str] = {}
    for parameter, (difference, _) in found.items():
        error, size = float(difference), sizes[parameter]
        if not error <= TOLERANCE.get(dtype, 1e-1) * size + rounding:
            errors[parameter] = f"differs from autograd by {error:.2e} (largest entry {size:.2e})"
    return errors


def raise_on(errors: Mapping[str, str], *, coupled: bool = False) -> None:
    """Raise if any parameter was wrong; `coupled` if an example alone was right.

    Raises:
        Misread: Naming parameters and causes.
        RuntimeError: Likewise, if `coupled`.
    """
    if not errors:
        return
    lines = "\n".join(f"  {parameter}: {text}" for parameter, text in list(errors.items())[:8])
    causes = (
        "An example's gradient depends on the other examples of its batch: batch statistics, negatives from the batch, "
        "or a layer whose first axis is not the example axis. Exclude these layers (exclude=) or change the loss."
        if coupled
        else "The layer does more than its rule says, its weight is used outside the layer's call (functional use, "
        "layer.forward, functional_call, a penalty on weights in the loss), a hook changes the parameter's gradient "
        "(register_hook), a block under reentrant checkpointing has an input without "
        "gradient, or code compiled before the capture runs (torch._dynamo.reset()). Recompute the module around them "
        "(recompute=), exclude these layers (exclude=), pass a rule (rules=), or verify=False if you know better."
    )
    text = f"capture: the captured gradients of {len(errors)} parameters are not those of autograd:\n{lines}\n{causes}"
    raise RuntimeError(text) if coupled else Misread(text, errors)
