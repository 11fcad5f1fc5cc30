"""Losses as a source wants them: ``loss(model, batch) -> Tensor[B]``, the *sum* of each example's loss terms.

A loss may offer two more things: ``tokens(batch) -> [B]``, the number of terms per example, and ``sampled(seed)``, the
same loss with labels drawn from the model (sampled Fisher).  Any plain function will do where they are not needed.

Rows and examples are the same unless a batch says otherwise: ``segment_ids`` [R, T] give the index of the example that
each token belongs to, -1 for none.  Then one row may hold several examples, and one example may own several rows.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from attrax.core.random import stream_key, uniform

IGNORE = -100
_INPUTS = ("input_ids", "attention_mask", "position_ids")

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


def causal_targets(batch: Mapping[str, Any]) -> Int[Tensor, "R T"]:
    """What every position predicts, -100 for nothing.

    Padding on the left predicts nothing, and no token predicts the next where another example begins.

    >>> batch = {"labels": torch.tensor([[5, 6, 7, 8]]), "segment_ids": torch.tensor([[0, 0, 1, 1]])}
    >>> causal_targets(batch)
    tensor([[   6, -100,    8, -100]])
    """
    targets, mask, segments = shifted(batch["labels"]), batch.get("attention_mask"), batch.get("segment_ids")
    if isinstance(mask, Tensor) and mask.shape == targets.shape:
        targets = targets.masked_fill(mask == 0, IGNORE)
    if segments is not None:
        alone = (segments < 0) | (segments != segments.roll(-1, 1))
        targets = targets.masked_fill(alone, IGNORE)
    return targets


def by_example(values: Shaped[Tensor, "R T"], batch: Mapping[str, Any]) -> Shaped[Tensor, " E"]:
    """Sum over the tokens of each example: over each row, or over each segment if the batch has `segment_ids`.

    >>> batch = {"segment_ids": torch.tensor([[0, 1, 1], [1, -1, -1]]), "example_ids": ("a", "b")}
    >>> by_example(torch.tensor([[1, 2, 3], [4, 5, 6]]), batch)
    tensor([1, 9])
    """
    if "segment_ids" not in batch:
        return values.sum(1)
    E, segments = len(batch["example_ids"]), batch["segment_ids"]
    place = segments.where(segments >= 0, E).flatten()
    return values.new_zeros(E + 1).index_add(0, place, values.flatten())[:E]


@dataclass(frozen=True)
class CausalLM:
    """Next-token loss of a causal language model, summed over an example's labeled tokens; made by `causal_lm`.

    Attributes:
        seed: None for the labels of the data; a seed for labels sampled from the model.
    """

    seed: int | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], /) -> Float[Tensor, " E"]:
        """Forward pass and per-example loss; see `causal_lm` for what `batch` holds."""
        inputs = {k: batch[k] for k in _INPUTS if k in batch}
        output = model(**inputs, **left_padded_positions(model, inputs))
        logits = output if isinstance(output, Tensor) else output.logits
        targets = causal_targets(batch)
        if self.seed is not None:
            ids, segments = batch["example_ids"], batch.get("segment_ids")
            targets = sample_targets(logits.detach(), targets, ids, self.seed, segments)
        losses = token_losses(logits, targets)
        if "token_weights" in batch:
            losses = losses * batch["token_weights"].to(losses.dtype).roll(-1, 1)
        return by_example(losses, batch)

    def tokens(self, batch: Mapping[str, Any]) -> Int[Tensor, " E"]:
        """Number of predicted tokens per example."""
        return by_example((causal_targets(batch) != IGNORE).long(), batch)

    def sampled(self, seed: int) -> "CausalLM":
        """The same loss with every label replaced by a sample from the model."""
        return replace(self, seed=seed)


def left_padded_positions(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Position ids that start at each example's first real token, where padding on the left would shift them.

    Returns:
        ``{"position_ids": ...}``, or nothing if positions are given or not shifted.

    Raises:
        ValueError: If positions are shifted and not an argument of the model.
    """
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or "position_ids" in inputs:
        return {}
    starts = _starts_late(mask)
    if starts is False:
        return {}
    arguments = inspect.signature(model.forward).parameters
    if "position_ids" not in arguments and not any(a.kind is a.VAR_KEYWORD for a in arguments.values()):
        if starts is None:
            return {}
        raise ValueError(
            f"causal_lm: examples are padded on the left, and {type(model).__name__}.forward takes no position_ids, so "
            "they may not be read as they are alone. Pad on the right."
        )
    late = (mask[:, 1:] > mask[:, :-1]).any(1, keepdim=True)
    counted = (mask.long().cumsum(1) - 1).clamp_min(0)
    return {"position_ids": torch.where(late, counted, torch.arange(mask.shape[1], device=mask.device))}


def _starts_late(mask: Int[Tensor, "B T"]) -> bool | None:
    """Whether some row starts with padding; None under `torch.func.vmap`, where nothing can be read."""
    try:
        return bool((mask[:, 1:] > mask[:, :-1]).any())
    except RuntimeError:
        return None


def causal_lm() -> CausalLM:
    """Next-token cross-entropy, summed over each example's labeled tokens.

    A batch holds `input_ids` and `labels` [R, T] (-100 = no loss, not shifted), and may hold:

        attention_mask   [R, T], or [R, 1, T, T] for rows with several documents, passed to the model as it is
        position_ids     [R, T]
        segment_ids      [R, T], for every token the index of its example in `example_ids`, -1 for none
        token_weights    [R, T], factor of each label's loss, e.g. -1 for a continuation to be subtracted

    Returns:
        The loss: ``loss(model, batch) -> [E]``, E the number of rows, or of `example_ids` if there are `segment_ids`.

    >>> batch = {"input_ids": torch.tensor([[0, 1, 0, 1]]), "labels": torch.tensor([[0, 1, 0, 1]]),
    ...          "segment_ids": torch.tensor([[0, 0, 1, 1]]), "example_ids": ("a", "b")}
    >>> causal_lm().tokens(batch)
    tensor([1, 1])
    """
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
    logits: Float[Tensor, "R T V"],
    targets: Int[Tensor, "R T"],
    ids: Sequence[str],
    seed: int,
    segments: Int[Tensor, "R T"] | None = None,
) -> Int[Tensor, "R T"]:
    """Labels drawn from the model at every loss position, by inverse CDF.

    The draw of an example at its k-th loss position depends only on (seed, id, k): not on batch, order or padding, nor
    on the documents it shares a row with.

    >>> logits = torch.tensor([[[0.0, 50.0], [50.0, 0.0]]])
    >>> sample_targets(logits, torch.tensor([[0, -100]]), ["x"], seed=0)
    tensor([[   1, -100]])
    """
    marked = targets != IGNORE
    owners = torch.arange(len(targets)).unsqueeze(1).expand(targets.shape) if segments is None else segments
    owner = owners.to(marked.device)[marked].cpu()
    draws = torch.empty(len(owner), dtype=torch.float64)
    for example, name in enumerate(ids):
        mine = owner == example
        draws[mine] = torch.from_numpy(uniform(stream_key(seed, "labels", name), 0, int(mine.sum())))
    cdf = logits[marked].double().softmax(-1).cumsum(-1)
    picked = torch.searchsorted(cdf, draws.to(logits.device).unsqueeze(-1) * cdf[:, -1:], right=True)
    out = targets.clone()
    out[marked] = picked.squeeze(-1).clamp_max(logits.shape[-1] - 1)
    return out
