"""Query tokens as queries: each loss token of an example becomes an example of its own.

A query's gradient is the sum of the gradients of its tokens' losses, so that the scores of its tokens add up to its
score under every method that is linear in the query, and say which part of the answer an example supports.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attrax.frontends.data.tokens import IGNORE
from attrax.frontends.model.losses import causal_targets
from attrax.frontends.model.rows import Batch, as_ids, with_ids


@dataclass(frozen=True, eq=False)
class PerToken:
    """Batches of loss tokens; made by `per_token`."""

    batches: Iterable[Batch]
    rows: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            yield from _split(batch, self.rows)


def per_token(batches: Iterable[Batch], *, rows: int | None = None) -> PerToken:
    """The same data with one example for each loss token, for `live` with `causal_lm`.

    Args:
        batches: Batches for `causal_lm`, re-iterable; packed rows and contrasts too.
        rows: Most rows of a batch; by default as many as the batch that is split.

    Returns:
        Batches in which every row repeats the row of one loss token, with that label only.  Token 17 of example "q3"
        has the id "q3@17", that of its contrast "q3@2:17" (the second document), with its negative weight.

    Raises:
        ValueError: If `batches` can be read once only, or `rows` is not positive.

    >>> ids = torch.tensor([[5, 6, 7]])
    >>> data = [{"input_ids": ids, "labels": ids, "example_ids": ("q3",)}]
    >>> [(batch["example_ids"], batch["labels"].tolist()) for batch in per_token(data, rows=2)]
    [(('q3@1', 'q3@2'), [[-100, 6, -100], [-100, -100, 7]])]
    """
    if isinstance(batches, Iterator):
        raise ValueError(
            "per_token: the batches can be read only once. Give a list, or an object of `batches`."
        )
    if rows is not None and rows < 1:
        raise ValueError(f"per_token: rows: got {rows}; expected a positive number.")
    return PerToken(batches, rows)


def _split(batch: Batch, most: int | None) -> Iterator[dict[str, Any]]:
    labels = batch["labels"]
    row, column = (causal_targets(batch) != IGNORE).nonzero(as_tuple=True)
    names = _names(batch, row, column + 1)
    for some in torch.arange(len(row)).split(most or len(labels)):
        rows, columns = row[some], column[some] + 1
        out = {
            k: v[rows] if isinstance(v, Tensor) and v.ndim and len(v) == len(labels) else v
            for k, v in batch.items()
            if k != "segment_ids"
        }
        out["labels"] = torch.full_like(labels[rows], IGNORE)
        out["labels"][torch.arange(len(some)), columns] = labels[rows, columns]
        yield out | {"example_ids": tuple(names[i] for i in some.tolist())}


def _names(batch: Batch, row: Tensor, column: Tensor) -> list[str]:
    """Example, document if it is not the first of its example, and place in the document, of every loss token."""
    ids = as_ids(batch["example_ids"]) if "example_ids" in batch else with_ids(batch)["example_ids"]
    segments, places = batch.get("segment_ids"), _places(batch)[row, column].tolist()
    examples = (row if segments is None else segments[row, column]).tolist()
    starts: dict[int, list[tuple[int, int]]] = {}
    names: list[str] = []
    for example, r, c, place in zip(examples, row.tolist(), column.tolist(), places, strict=True):
        known = starts.setdefault(example, [])
        document = (r, c - place)
        if document not in known:
            known.append(document)
        number = known.index(document) + 1
        names.append(f"{ids[example]}@{place}" if number == 1 else f"{ids[example]}@{number}:{place}")
    return names


def _places(batch: Batch) -> Tensor:
    """Place of every token in its document, [R, T]."""
    labels, mask, given = batch["labels"], batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(given, Tensor):
        return given.expand(labels.shape)
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        return mask.long().cumsum(1) - 1
    return torch.arange(labels.shape[1], device=labels.device).expand(labels.shape)
