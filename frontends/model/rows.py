"""Rows of a batch: their ids, and some of them."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attrax.core import content_ids

Batch: TypeAlias = Mapping[str, Any]
POSITIONAL = ("attention_mask", "position_ids", "cache_position")
"""Inputs that say where tokens stand, not what the example is; some are shared by the whole batch."""


class ContentIds(tuple[str, ...]):
    """Ids that the front-end made of the content of a batch."""


def with_ids(batch: Batch) -> Batch:
    """The batch with example ids: its own, or content hashes without padding.

    Raises:
        ValueError: If the batch has no tensor, or ids and rows disagree.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"live: a batch is a {type(batch).__name__}; expected a mapping that the loss understands, such as "
            "{'x': x, 'y': y}. Wrap the loader: [{'x': x, 'y': y} for x, y in loader]."
        )
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim > 0 and k not in POSITIONAL}
    if not tensors:
        raise ValueError(f"live: a batch holds no tensor with a batch axis; it has {sorted(batch)}.")
    own = batch.get("example_ids")
    if isinstance(batch.get("segment_ids"), Tensor):
        return {**batch, "example_ids": _packed_ids(batch["segment_ids"], own)}
    rows = next(iter(tensors.values())).shape[0]
    ids = ContentIds(content_ids(tensors, mask=batch.get("attention_mask"))) if own is None else as_ids(own)
    if len(ids) != rows:
        raise ValueError(f"live: a batch has {len(ids)} ids for {rows} rows.")
    return {**batch, "example_ids": ids}


def _packed_ids(segments: Tensor, own: Iterable[object] | None) -> tuple[str, ...]:
    """Ids of a batch whose rows hold several examples, or parts of them."""
    highest = int(segments.max()) if segments.numel() else -1
    ids = () if own is None else as_ids(own)
    if highest >= len(ids):
        raise ValueError(
            f"live: segment_ids speak of example {highest}, and the batch has {len(ids)} ids. A packed batch needs "
            "example_ids, one for each example its segment_ids count."
        )
    return ids


def for_loss(batch: Batch, loss: object) -> dict[str, Any]:
    """A copy of the batch for a loss, which may take things out of it.

    Ids that the user did not put there are left out, so that ``model(**batch)`` works, but for losses that draw labels.
    """
    made = isinstance(batch["example_ids"], ContentIds) and not hasattr(loss, "sampled")
    kept = {k: v for k, v in batch.items() if not (made and k == "example_ids")}
    return {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in kept.items()}


def as_ids(values: Iterable[object]) -> tuple[str, ...]:
    """Example ids as strings; a loader may have made a tensor of them.

    >>> as_ids(torch.tensor([3, 14])), as_ids(["doc-1", 2])
    (('3', '14'), ('doc-1', '2'))
    """
    return tuple(map(str, values.tolist() if isinstance(values, Tensor) else values))


def pick(batch: Batch, rows: Tensor) -> Batch:
    """Some examples of a batch, by index or mask: rows of every tensor and list as long as the batch, and the ids.

    Of a packed batch, the sequences that hold any of the examples; positions of the others belong to none then.
    """
    B = len(batch["example_ids"])
    index = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
    ids = tuple(batch["example_ids"][i] for i in index.tolist())
    segments = batch.get("segment_ids")
    if isinstance(segments, Tensor):
        place = torch.full((B + 1,), -1, dtype=segments.dtype, device=segments.device)
        place[index.to(segments.device)] = torch.arange(
            len(index), dtype=segments.dtype, device=segments.device
        )
        moved = place[segments]
        kept = (moved >= 0).any(1)
        return _taken({**batch, "segment_ids": moved}, len(segments), kept.nonzero().flatten()) | {
            "example_ids": ids
        }
    return _taken(batch, B, index) | {"example_ids": type(batch["example_ids"])(ids)}


def _taken(batch: Batch, length: int, index: Tensor) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in batch.items():
        if isinstance(v, Tensor) and v.ndim and v.shape[0] == length:
            out[k] = v[index.to(v.device)]
        elif isinstance(v, list | tuple) and len(v) == length and k != "example_ids":
            out[k] = type(v)([v[i] for i in index.tolist()])
        else:
            out[k] = v
    return out
