"""How a model's own loss weighs its loss terms, told from its value: ``loss = sum_i c_i (sum of row i's terms)``.

Means of several kinds agree on many batches (rows with as many tokens each, or a single row), so that a batch rules out
what its value contradicts, and the next ones go on until one kind is left or no batch can tell.  Weights that only a
guess decides are taken back with an error, should a later batch contradict them.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attrax.frontends.loop.owners import count, counted
from attrax.frontends.model.losses import IGNORE, shifted, token_losses
from attrax.frontends.tape.notes import Notes

Labels: TypeAlias = Literal["causal", "aligned"]
Over: TypeAlias = Literal["tokens", "rows", "sums", "sum"]
Terms: TypeAlias = dict[Labels, Tensor]
_SAID = {
    "tokens": "the mean over its loss terms",
    "rows": "the mean over its rows of the mean over each one's loss terms",
    "sums": "the mean over its rows of the sum over each one's loss terms",
    "sum": "the sum over its loss terms",
}
_PATTERNS = 2


@dataclass(frozen=True)
class Kind:
    """A way to sum up loss terms.

    Attributes:
        labels: "causal" for next-token labels, "aligned" for one label per position or per row.
        over: What the loss is a mean over; see `_SAID`.
    """

    labels: Labels
    over: Over

    def targets(self, labels: Tensor) -> Tensor:
        """What every position predicts, [R, T] (or [R, 1] for one label a row)."""
        return labels.unsqueeze(1) if labels.ndim == 1 else targets(labels, self.labels)

    def rows(self, terms: Tensor, items: float | None) -> Tensor:
        """The coefficients [R] of the rows, for their numbers of loss terms."""
        n, R = terms.double(), max(1, len(terms))
        if self.over == "rows":
            return torch.where(n > 0, 1 / (R * n.clamp_min(1)), 0.0)
        total = float(n.sum()) if items is None else items
        divisor = {"tokens": max(1.0, total), "sums": R, "sum": 1}[self.over]
        return torch.full_like(n, 1 / divisor)


class OwnLoss:
    """The kinds of loss that the batches of one training loop have not ruled out.

    Args:
        declared: What the loop says that the loss is a mean over, if it does.

    Attributes:
        kinds: These kinds, the likeliest first; none if the loss is none of them, or nothing was seen.
        labels: Which labels the loss is of, as far as was seen.
    """

    def __init__(self, declared: Collection[Over] = ()) -> None:
        self.kinds: list[Kind] = []
        self.labels: Labels = "causal"
        self._declared = declared
        self._seen = self._guessed = False
        self._patterns: set[object] = set()

    def look(self, notes: Notes, inputs: Mapping[str, Any]) -> None:
        """Compare the loss of a batch with its labels and logits, if it can tell anything new.

        Raises:
            ValueError: If the weights of an earlier batch were a guess that this one contradicts, or the loop declared
                another kind.
        """
        labels, logits, loss = inputs.get("labels"), notes.logits, notes.loss
        if not isinstance(labels, Tensor) or logits is None or loss is None:
            return
        if labels.dtype.is_floating_point or labels.ndim not in (1, 2) or logits.ndim != labels.ndim + 1:
            return
        if self._seen and not self.kinds:
            return
        kinds = self.kinds or _kinds(labels)
        terms: Terms = {kind.labels: (kind.targets(labels) != IGNORE).sum(1).cpu() for kind in kinds}
        known = _pattern(kinds, terms, inputs) in self._patterns or len(self._patterns) >= _PATTERNS
        if self._seen and known and _alike(kinds, terms, inputs):
            return
        left = _fitting(kinds, labels, logits, loss, terms, inputs)
        self._take(self._as_declared(left) if notes.scale is not None else left)
        self._patterns.add(_pattern(self.kinds, terms, inputs))
        if not _alike(self.kinds, terms, inputs):
            self._guess(loss)

    def _as_declared(self, left: list[Kind]) -> list[Kind]:
        named = [kind for kind in left if kind.over in self._declared]
        if self._declared and left and not named:
            raise ValueError(
                f"capture: the loss that the model returned is {_SAID[left[0].over]}, and loss= declares another one. "
                "Leave loss= out: weights are then read off the model's own loss."
            )
        return named if self._declared else left

    def _take(self, left: list[Kind]) -> None:
        first, self._seen = not self._seen, True
        before, self.kinds = self.kinds, left
        self.labels = left[0].labels if left else self.labels
        if first or left == before:
            return
        if self._guessed and (not left or left[0] != before[0]):
            raise ValueError(
                f"capture: the model's own loss was taken for {_SAID[before[0].over]}, which fits its values in the "
                f"batches before, but not in this one: it is {_SAID[left[0].over] if left else 'none of those known'}. "
                "Pass loss= a function (inputs, examples) -> (c, n)."
            )
        if not left and self._declared:
            raise ValueError(
                f"capture: the loss that the model returned was {_SAID[before[0].over]} so far, as declared, and "
                "is not in this batch. Leave loss= out, or pass a function (inputs, examples) -> (c, n)."
            )
        if not left:
            warnings.warn(
                f"capture: the model's own loss was {_SAID[before[0].over]} so far and is not in this batch. Its "
                "weights are unknown from here on: only the target 'as_trained' can be scored. Pass loss= a function "
                "(inputs, examples) -> (c, n).",
                RuntimeWarning,
                stacklevel=2,
            )

    def _guess(self, loss: Tensor) -> None:
        """Kinds that weigh the batch differently have given the same value: go on with the first, or with none."""
        self._guessed = True
        if torch.finfo(loss.dtype).bits > 16:
            return
        self.kinds = [kind for kind in self.kinds if self._declared and kind.labels == self.labels]
        if not self.kinds:
            warnings.warn(
                f"capture: the model's own loss is a {loss.dtype}, too coarse to tell how it weighs its loss terms: "
                "only the target 'as_trained' can be scored. Pass loss='token_mean' (or what it is).",
                RuntimeWarning,
                stacklevel=2,
            )

    def weights(
        self, scale: Tensor, inputs: Mapping[str, Any], owners: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Weights c and counts n of the examples of a batch, for the gradient that arrived at its loss.

        The weights are None where rows that are not one example weigh differently.
        """
        kind, labels = self.kinds[0], inputs["labels"]
        terms = kind.targets(labels) != IGNORE
        c = kind.rows(terms.sum(1).cpu(), _items(inputs)) * scale.double().cpu()
        n = counted(terms if labels.ndim == 2 else terms[:, 0], owners)
        if owners is None:
            return c, n
        return (c[0].repeat(count(owners)) if len(c) and bool((c == c[0]).all()) else None), n


def _kinds(labels: Tensor) -> list[Kind]:
    shapes: tuple[Labels, ...] = ("causal", "aligned") if labels.ndim == 2 else ("aligned",)
    ways: tuple[Over, ...] = ("tokens", "rows", "sums", "sum")
    return [Kind(how, over) for over in ways for how in shapes]


def targets(labels: Tensor, kind: Labels) -> Tensor:
    """What the positions of labels [R, T] or [R] predict."""
    return shifted(labels) if kind == "causal" and labels.ndim == 2 else labels


def _items(inputs: Mapping[str, Any]) -> float | None:
    given = inputs.get("num_items_in_batch")
    return None if given is None else float(given)


def _pattern(kinds: Sequence[Kind], terms: Terms, inputs: Mapping[str, Any]) -> object:
    """Numbers of loss terms, as far as kinds depend on them."""
    labels = {kind.labels for kind in kinds}
    return tuple((how, *n.tolist()) for how, n in terms.items() if how in labels), _items(inputs)


def _alike(kinds: Sequence[Kind], terms: Terms, inputs: Mapping[str, Any]) -> bool:
    """Whether kinds weigh a batch, and count its terms, in the same way."""
    each = [(kind.rows(terms[kind.labels], _items(inputs)), terms[kind.labels]) for kind in kinds]
    return all(
        torch.equal(n, each[0][1]) and torch.allclose(c, each[0][0], rtol=1e-9, atol=0.0) for c, n in each
    )


def _fitting(
    kinds: Sequence[Kind],
    labels: Tensor,
    logits: Tensor,
    loss: Tensor,
    terms: Terms,
    inputs: Mapping[str, Any],
) -> list[Kind]:
    """The kinds whose value is that of the loss."""
    logits = logits.unsqueeze(1) if labels.ndim == 1 else logits
    rows = [token_losses(logits, Kind(how, "sum").targets(labels)).sum(1).double() for how in terms]
    allowed = 1e-2 if torch.finfo(loss.dtype).bits == 16 else 1e-4
    *found, right = torch.stack([*rows, loss.double().expand(len(labels))]).cpu()
    sums, loss = dict(zip(terms, found, strict=True)), right[:1].sum()
    values = [kind.rows(terms[kind.labels], _items(inputs)) @ sums[kind.labels] for kind in kinds]
    return [
        kind
        for kind, value in zip(kinds, values, strict=True)
        if torch.isclose(value, loss, rtol=allowed, atol=0.0)
    ]
