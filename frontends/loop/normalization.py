"""How a training loop's loss weighs its examples: the c_i and n_i recorded with every captured block.

A loop back-propagates ``sum_i c_i l_i`` with l_i the sum of example i's loss terms.  Where the model returns its own
loss, the gradient that arrives at that loss carries gradient accumulation and loss scaling, and labels or
``num_items_in_batch`` give the counts; which mean over those terms the loss is, is told from its value (`ownloss`).
Elsewhere the loop says which loss it uses, and nothing is guessed; a name that a cross entropy of the model's logits
contradicts is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isclose
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attrax.frontends.loop.owners import counted
from attrax.frontends.loop.ownloss import Labels, Over, OwnLoss, targets
from attrax.frontends.model.losses import IGNORE
from attrax.frontends.runs.observed import accumulated_steps, stepping_scaler
from attrax.frontends.tape.fused import in_rows
from attrax.frontends.tape.notes import Notes

Declared: TypeAlias = (
    Literal["sum", "token_mean", "example_mean"]
    | Callable[[Mapping[str, Any], int], tuple[Tensor, Tensor | None]]
)
Weights: TypeAlias = tuple[Tensor | None, Tensor | None]
NAMES: dict[str, tuple[Over, ...]] = {
    "sum": ("sum",),
    "token_mean": ("tokens",),
    "example_mean": ("rows", "sums"),
}


class Normalization:
    """Loss weights of the blocks of one training loop.

    Attributes:
        outside: Whether weights were named for a loss outside of the model, so that its factors are not seen.
        scaler: What scales that loss.
        unsure: Whether the name of a loss is still to be compared with what arrives at the logits.

    Args:
        declared: How the loop's loss weighs examples; None to rely on the model's own loss.
        scaler: What scales the loop's loss, where that is computed outside of the model.

    Raises:
        ValueError: If a name is unknown.
    """

    def __init__(self, declared: Declared | None, scaler: torch.amp.GradScaler | None = None) -> None:
        if declared is not None and not callable(declared) and declared not in NAMES:
            raise ValueError(f"capture: loss: got {declared!r}; expected one of {list(NAMES)} or a function.")
        self._declared: Declared | None = declared
        self._own = OwnLoss(NAMES[declared] if isinstance(declared, str) else ())
        self.scaler, self.outside = scaler, False
        self.unsure = isinstance(declared, str)

    def weights(
        self, notes: Notes, inputs: Mapping[str, Any], examples: int, owners: Tensor | None = None
    ) -> Weights:
        """Loss weights c [B] and counts n [B] of a pass whose backward has begun; None where unknown.

        Args:
            notes: What the taps of the pass have seen.
            inputs: Inputs of the model by name.
            examples: Number of examples B.
            owners: The example of every row or position, where a row is not one example.
        """
        scale, declared = None if notes.outside else notes.scale, self._declared
        unchanged = notes.logits is not None and notes.logits._version == notes.version
        seen = replace(notes, scale=scale, logits=notes.logits if unchanged else None)
        notes.logits = None
        if scale is not None or not (declared is None or callable(declared)):
            self._own.look(seen, inputs)
        if scale is not None and self._own.kinds and not callable(declared):
            return self._own.weights(scale, inputs, owners)
        if declared is None:
            return None, None
        c, n = declared_weights(declared, seen, inputs, examples, self._own.labels, owners)
        if callable(declared) or scale is not None or notes.log_probs is not None:
            return c, n
        self.outside = True
        c = c if c is None or self.scaler is None else c * self.scaler.get_scale()
        if self.unsure and c is not None and examples > 1:
            self.unsure = False
            _compare(str(declared), notes.row_weight, float(c[0]), examples, n)
        return c, n

    def check_scale(self) -> None:
        """See to it that what multiplies a loss outside of the model is known, right before an optimizer steps.

        Raises:
            RuntimeError: If accelerate or a GradScaler does that unseen.
        """
        if not self.outside:
            return
        if (steps := accumulated_steps()) > 1:
            raise RuntimeError(
                f"capture: accelerate divides the loss by the {steps} steps that it accumulates, and with it every "
                "captured gradient, but the loss is computed outside of the model and the capture was not told. Pass "
                "**attrax.trainer_options(accelerator, loss=...) in place of loss=."
            )
        scaler = stepping_scaler() if self.scaler is None else None
        if scaler is not None and scaler.get_scale() != 1:
            raise RuntimeError(
                f"capture: a GradScaler multiplies the loss by {scaler.get_scale():g}, and with it every captured "
                "gradient, but the loss is computed outside of the model and the capture was not told. Pass scaler=."
            )


def _compare(
    declared: str, found: tuple[float, int] | None, expected: float, examples: int, tokens: Tensor | None
) -> None:
    """Compare a name with the cross entropy that was seen at the logits: one of the other names may fit it.

    Raises:
        ValueError: If it does, and the declared one does not.
    """
    if found is None:
        return
    weight, rows = found
    count = {"sum": 1, "example_mean": examples, "token_mean": rows if tokens is None else int(tokens.sum())}
    total = expected * count[declared]
    fits = [
        name for name, n in {**count, "token_mean": rows}.items() if isclose(weight, total / n, rel_tol=1e-2)
    ]
    if fits and not isclose(weight, expected, rel_tol=1e-2):
        raise ValueError(
            f"capture: loss={declared!r} was declared, in which each row counts {expected:.3g}, but what arrives at "
            f"the logits is the gradient of a cross entropy in which each of {rows} rows counts {weight:.3g}: that of "
            f"loss={fits[0]!r}. Declare this, or pass a function (inputs, examples) -> (c, n)."
        )


def declared_weights(
    declared: Declared,
    notes: Notes,
    inputs: Mapping[str, Any],
    examples: int,
    kind: Labels,
    owners: Tensor | None = None,
) -> Weights:
    """Weights c and counts n for a declared loss.

    Raises:
        ValueError: If a token mean is declared but no labels were seen, if a mean over examples is and theirs may be
            sums or means, or a function returns other than B weights.
    """
    if callable(declared):
        found: Any = declared(inputs, examples)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
            raise ValueError(
                f"capture: loss= returned a {type(found).__name__}; expected (c, n), tensors of the weight and the "
                "number of loss terms of each example, n None where unknown."
            )
        c, n = found
        if c.shape != (examples,) or (n is not None and n.shape != (examples,)):
            raise ValueError(
                f"capture: loss= returned weights of shape {tuple(c.shape)} for {examples} examples; expected (c, n), "
                "the weight and the number of loss terms of each example, n None where unknown."
            )
        return c, n
    if declared == "token_mean" and notes.log_probs is not None:
        return _fused_weights(*notes.log_probs, owners)
    ones = torch.ones(examples, dtype=torch.float64)
    ones = ones if notes.scale is None else ones * notes.scale.double().cpu()
    labels = inputs.get("labels")
    tokens: Tensor | None = None
    if isinstance(labels, Tensor) and labels.ndim in (1, 2) and not labels.is_floating_point():
        tokens = counted(targets(labels, kind) != IGNORE, owners)
    if declared == "sum":
        return ones, tokens
    if declared == "example_mean":
        if tokens is not None and bool((tokens > 1).any()):
            raise ValueError(
                "capture: loss='example_mean' was declared, and examples have up to "
                f"{int(tokens.max())} loss terms: it may be a mean of their sums or of their means. Pass loss= a "
                "function (inputs, examples) -> (c, n): c = 1 / examples for sums, 1 / (examples n) for means."
            )
        return ones / max(1, examples), tokens
    if tokens is None:
        raise ValueError(
            "capture: loss='token_mean' needs the labels, but the model was not called with labels=. "
            "Pass loss= a function (inputs, examples) -> (c, n)."
        )
    return ones / _denominator(inputs, tokens), tokens


def _denominator(inputs: Mapping[str, Any], tokens: Tensor) -> float:
    given = inputs.get("num_items_in_batch")
    return max(1.0, float(tokens.sum() if given is None else given))


def _fused_weights(g: Tensor, mask: Tensor, owners: Tensor | None) -> Weights:
    """Weights read off the gradient that arrives at the log-probabilities of labels: each token's is -c."""
    labeled = torch.cat([mask, torch.zeros_like(mask[:, :1])], 1)
    arrived = -in_rows(g.detach(), mask)[labeled].double()
    c = arrived[0].cpu() if len(arrived) else torch.zeros((), dtype=torch.float64)
    if len(arrived) and not bool(torch.isclose(arrived, arrived[0], rtol=1e-4, atol=0.0).all()):
        raise ValueError(
            "capture: loss='token_mean' was declared, but tokens of one batch carry different weights "
            f"({float(arrived.min()):.3g} to {float(arrived.max()):.3g}). Leave loss= out, or pass a function "
            "(inputs, examples) -> (c, n)."
        )
    tokens = counted(labeled, owners)
    return c.expand(len(tokens)).clone(), tokens
