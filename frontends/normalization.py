"""How a training loop's loss weighs its examples: the c_i and n_i recorded with every captured block.

A loop back-propagates ``sum_i c_i l_i`` with l_i the sum of example i's loss terms.  Where the model returns its own
loss, the gradient that arrives at that loss carries gradient accumulation and loss scaling, and labels or
``num_items_in_batch`` give the counts; that the loss really is the mean over those terms is checked on its value.
Elsewhere the loop says which loss it uses, and nothing is guessed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attrax.frontends.losses import IGNORE, shifted, token_losses

Declared: TypeAlias = (
    Literal["sum", "token_mean", "example_mean"]
    | Callable[[Mapping[str, Any], int], tuple[Tensor, Tensor | None]]
)
Weights: TypeAlias = tuple[Tensor | None, Tensor | None]
NAMES = ("sum", "token_mean", "example_mean")


class LossTap(torch.autograd.Function):
    """Identity on a loss that records the gradient arriving at it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, notes: dict[str, Any]) -> Tensor:  # noqa: D102
        ctx.notes = notes
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        ctx.notes["scale"] = grads[0].detach().clone()
        return grads[0], None


def tap_loss(output: Any, notes: dict[str, Any]) -> Any:
    """Put a tap on the loss inside a model's output (a tensor, a mapping or model output with `loss`, or a tuple).

    Returns:
        The output with the tapped loss, or unchanged if it holds no scalar loss.
    """

    def is_loss(x: Any) -> bool:
        return isinstance(x, Tensor) and x.ndim == 0 and x.requires_grad

    if is_loss(output):
        notes["loss"] = output.detach()
        return LossTap.apply(output, notes)
    if isinstance(output, Mapping) and is_loss(output.get("loss")):
        notes["loss"], notes["logits"] = output["loss"].detach(), output.get("logits")
        output["loss"] = LossTap.apply(output["loss"], notes)  # type: ignore[index]
        return output
    if isinstance(output, tuple) and output and is_loss(output[0]):
        notes["loss"] = output[0].detach()
        notes["logits"] = output[1] if len(output) > 1 and isinstance(output[1], Tensor) else None
        return (LossTap.apply(output[0], notes), *output[1:])
    return output


def detect(notes: Mapping[str, Any], inputs: Mapping[str, Any]) -> Literal["causal", "aligned"] | None:
    """Which labels the model's own loss averages over, judged by its value; None if it is no plain mean.

    "causal": next-token labels, "aligned": one label per position or per example.
    """
    labels, logits, loss = inputs.get("labels"), notes.get("logits"), notes.get("loss")
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or loss is None:
        return None
    if labels.dtype.is_floating_point or logits.ndim != labels.ndim + 1:
        return None
    for kind in ("causal", "aligned"):
        targets = _targets(labels, kind)
        with torch.no_grad():
            per_token = token_losses(logits.detach(), targets) if logits.ndim == 3 else None
            total = per_token.sum() if per_token is not None else token_losses(logits[:, None].detach(), targets[:, None]).sum()
        count = _denominator(inputs, (targets != IGNORE).sum())
        if torch.isclose(total.double() / count, loss.double(), rtol=1e-2):
            return kind
        if labels.ndim == 1:
            break
    return None


def _targets(labels: Tensor, kind: str) -> Tensor:
    return shifted(labels) if kind == "causal" and labels.ndim == 2 else labels


def _denominator(inputs: Mapping[str, Any], own: Tensor) -> Tensor:
    given = inputs.get("num_items_in_batch")
    count = own if given is None else torch.as_tensor(given)
    return count.double().cpu().clamp_min(1)


def own_weights(notes: Mapping[str, Any], inputs: Mapping[str, Any], kind: str) -> Weights:
    """c and n where the model returned its own mean loss: ``c_i = arriving gradient / number of loss terms``."""
    targets = _targets(inputs["labels"], kind)
    tokens = (targets != IGNORE).reshape(targets.shape[0], -1).sum(1).cpu()
    c = notes["scale"].double().cpu() / _denominator(inputs, tokens.sum())
    return c.expand(len(tokens)).clone(), tokens


def declared_weights(
    declared: Declared | None, notes: Mapping[str, Any], inputs: Mapping[str, Any], rows: int
) -> Weights:
    """c and n for a declared loss; (None, None) if nothing was declared.

    Raises:
        ValueError: If a token mean is declared but no labels were seen.
    """
    if declared is None:
        return None, None
    if callable(declared):
        return declared(inputs, rows)
    scale = notes["scale"].double().cpu() if "scale" in notes else torch.ones((), dtype=torch.float64)
    ones = torch.ones(rows, dtype=torch.float64) * scale
    labels = inputs.get("labels")
    tokens = (shifted(labels) != IGNORE).sum(1).cpu() if isinstance(labels, Tensor) and labels.ndim == 2 else None
    if declared == "sum":
        return ones, tokens
    if declared == "example_mean":
        return ones / max(1, rows), tokens
    if tokens is None:
        raise ValueError(
            "capture: loss='token_mean' needs the labels, but the model was not called with labels=. "
            "Pass loss= a function (inputs, rows) -> (c, n)."
        )
    return ones / tokens.sum().clamp_min(1), tokens


def check_declared(declared: object) -> None:
    """Refuse an unknown loss name before anything runs.

    Raises:
        ValueError: Listing the valid ones.
    """
    if declared is not None and not callable(declared) and declared not in NAMES:
        raise ValueError(f"capture: loss: got {declared!r}; expected one of {list(NAMES)} or a function.")
