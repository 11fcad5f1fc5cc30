"""Losses as a source wants them: ``loss(model, batch) -> Tensor[B]``, the *sum* of each example's loss terms.

A loss may offer two more things: ``tokens(batch) -> [B]``, the number of terms per example, and ``sampled(seed)``, the
same loss with labels drawn from the model (sampled Fisher).  Any plain function will do where they are not needed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from attrax.core.random import stream_key, uniform

IGNORE = -100


Loss: TypeAlias = Callable[[nn.Module, Mapping[str, Any]], Tensor]


def shifted(labels: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Targets of a causal model: position t predicts label t + 1; the last position predicts nothing.

    >>> shifted(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORE)], 1)


def token_losses(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Cross-entropy of every position, 0 where the target is -100, in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(targets.shape)


@dataclass(frozen=True)
class CausalLM:
    """Next-token loss of a causal language model, summed over an example's labeled tokens; made by `causal_lm`.

    Attributes:
        seed: None for the labels of the data; a seed for labels sampled from the model.
    """

    seed: int | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], /) -> Float[Tensor, " B"]:
        """Forward pass and per-example loss; `batch` holds input_ids, labels and optionally attention_mask."""
        inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
        output = model(**inputs, **left_padded_positions(model, inputs))
        logits = output if isinstance(output, Tensor) else output.logits
        targets = self._targets(batch)
        if self.seed is not None:
            targets = sample_targets(logits.detach(), targets, batch["example_ids"], self.seed)
        return token_losses(logits, targets).sum(1)

    def tokens(self, batch: Mapping[str, Any]) -> Int[Tensor, " B"]:
        """Number of predicted tokens per example."""
        return (self._targets(batch) != IGNORE).sum(1)

    def _targets(self, batch: Mapping[str, Any]) -> Int[Tensor, "B T"]:
        """Next tokens, predicted at real positions only: a pad on the left predicts nothing."""
        targets, mask = shifted(batch["labels"]), batch.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != targets.shape:
            return targets
        return targets.masked_fill(mask == 0, IGNORE)

    def sampled(self, seed: int) -> "CausalLM":
        """The same loss with every label replaced by a sample from the model."""
        return replace(self, seed=seed)


def left_padded_positions(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Position ids that start at each example's first real token, where padding on the left would shift them.

    Returns:
        ``{"position_ids": ...}``, or nothing if positions are given, not shifted, or not an argument of the model.
    """
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or "position_ids" in inputs:
        return {}
    known = "position_ids" in inspect.signature(model.forward).parameters
    if not known or not bool((mask[:, 1:] > mask[:, :-1]).any()):
        return {}
    return {"position_ids": (mask.long().cumsum(1) - 1).clamp_min(0)}


def causal_lm() -> CausalLM:
    """Next-token cross-entropy for batches of input_ids, labels (-100 = no loss, not shifted) and attention_mask."""
    return CausalLM()


@dataclass(frozen=True)
class Classification:
    """Cross-entropy of a classifier ``model(batch[x]) -> [B, C]``; made by `classification`."""

    x: str
    y: str
    seed: int | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], /) -> Float[Tensor, " B"]:
        """Forward pass and per-example loss."""
        output = model(batch[self.x])
        logits = output if isinstance(output, Tensor) else output.logits
        targets = batch[self.y].unsqueeze(1)
        if self.seed is not None:
            targets = sample_targets(logits.detach().unsqueeze(1), targets, batch["example_ids"], self.seed)
        return token_losses(logits.unsqueeze(1), targets).sum(1)

    def tokens(self, batch: Mapping[str, Any]) -> Int[Tensor, " B"]:
        """One loss term per example."""
        return torch.ones_like(batch[self.y])

    def sampled(self, seed: int) -> "Classification":
        """The same loss with every label replaced by a sample from the model."""
        return replace(self, seed=seed)


def classification(x: str = "x", y: str = "y") -> Classification:
    """Cross-entropy for batches with inputs under key `x` and class indices under key `y`."""
    return Classification(x, y)


def sample_targets(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], ids: Sequence[str], seed: int
) -> Int[Tensor, "B T"]:
    """Labels drawn from the model at every loss position, by inverse CDF.

    The draw of example i at its k-th loss position depends only on (seed, id, k): not on batch, order or padding.

    >>> logits = torch.tensor([[[0.0, 50.0], [50.0, 0.0]]])
    >>> sample_targets(logits, torch.tensor([[0, -100]]), ["x"], seed=0)
    tensor([[   1, -100]])
    """
    marked = targets != IGNORE
    draws = torch.zeros(targets.shape, dtype=torch.float64)
    for row, (name, mask) in enumerate(zip(ids, marked.cpu(), strict=True)):
        count = int(mask.sum())
        draws[row, mask] = torch.from_numpy(uniform(stream_key(seed, "labels", name), 0, count))
    cdf = logits[marked].double().softmax(-1).cumsum(-1)
    picked = torch.searchsorted(cdf, draws.to(logits.device)[marked].unsqueeze(-1) * cdf[:, -1:], right=True)
    out = targets.clone()
    out[marked] = picked.squeeze(-1).clamp_max(logits.shape[-1] - 1)
    return out
