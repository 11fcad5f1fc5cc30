"""Packing: several documents in each row, so that no row is padding; every document's gradient is what it is alone.

Attention is block-diagonal, positions begin anew with every document, and `segment_ids` say which example a token
belongs to.  This is exact for models in which tokens meet in attention only: a recurrent or convolutional layer would
carry one document into the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attrax.frontends.data.examples import Document, Encoded, Skipped
from attrax.frontends.data.tokens import IGNORE


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """Batches of packed rows, as often as asked, always the same; made by `packed`.

    Attributes:
        encoded: The examples.
        rows: For each row, which examples it holds.
        length: Tokens of a row.
        height: Most rows of a batch.
        dtype: Type of the attention mask.
        pad_id: Token id on padding.
        skipped: Examples left out, with the reason.
    """

    encoded: Encoded
    rows: tuple[tuple[int, ...], ...]
    length: int
    height: int
    dtype: torch.dtype
    pad_id: int = 0
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return -(-len(self.rows) // self.height)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self.rows), self.height):
            yield self._batch(self.rows[start : start + self.height])

    def _batch(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        owner = {i: e for e, i in enumerate(i for row in rows for i in row)}
        made = [self._row([(owner[i], self.encoded.documents(i)) for i in row]) for row in rows]
        batch: dict[str, Any] = {name: torch.stack([row[name] for row in made]) for name in made[0]}
        if not any(self.encoded.ids[i] in self.encoded.contrasts for i in owner):
            del batch["token_weights"]
        batch["attention_mask"] = block_diagonal(batch.pop("documents"), self.dtype)
        return batch | {"example_ids": tuple(self.encoded.ids[i] for i in owner)}

    def _row(self, examples: Sequence[tuple[int, Sequence[Document]]]) -> dict[str, Tensor]:
        """The documents of some examples one after the other, and padding."""
        row = {
            "input_ids": torch.full((self.length,), self.pad_id),
            "labels": torch.full((self.length,), IGNORE),
            "position_ids": torch.zeros(self.length, dtype=torch.long),
            "segment_ids": torch.full((self.length,), -1),
            "token_weights": torch.ones(self.length, dtype=torch.long),
            "documents": torch.full((self.length,), -1),
        }
        start = number = 0
        for owner, documents in examples:
            for sign, (tokens, labels) in zip((1, -1), documents, strict=False):
                place = slice(start, start + len(tokens))
                row["input_ids"][place], row["labels"][place] = tokens, labels
                row["labels"][start] = IGNORE
                row["position_ids"][place] = torch.arange(len(tokens))
                row["segment_ids"][place], row["token_weights"][place] = owner, sign
                row["documents"][place] = number
                start, number = place.stop, number + 1
        return row


def packed(
    encoded: Encoded,
    length: int,
    *,
    tokens: int = 4096,
    dtype: torch.dtype = torch.float32,
    pad_id: int = 0,
    overlong: Literal["error", "skip"] = "error",
) -> Packed:
    """Pack examples into rows of `length` tokens: each into the first row with room for it.

    Args:
        encoded: Tokenized examples.  An example and its contrast share a row.
        length: Tokens of a row.
        tokens: Most tokens of a batch; it has one row at least.
        dtype: The model's dtype, for an additive attention mask, which every attention takes; or torch.bool for a
            boolean one, smaller, for scaled-dot-product attention only.
        pad_id: Token id on padding; its label is -100.
        overlong: For examples that no row can hold: raise, or leave them out by name (`skipped`).

    Returns:
        Batches with `input_ids`, `labels`, `position_ids`, `segment_ids` [R, length], `attention_mask`
        [R, 1, length, length] and `example_ids`, and `token_weights` where there are contrasts; see `causal_lm`.

    Raises:
        ValueError: If an example is too long, none is left, or an option has no such value.

    >>> texts = [torch.tensor(x, dtype=torch.int32) for x in ([5, 6, 7], [8, 9], [3, 4])]
    >>> batch = next(iter(packed(Encoded(("a", "b", "c"), tuple(texts), tuple(texts)), 5)))
    >>> batch["input_ids"], batch["segment_ids"]
    (tensor([[5, 6, 7, 8, 9],
            [3, 4, 0, 0, 0]]), tensor([[ 0,  0,  0,  1,  1],
            [ 2,  2, -1, -1, -1]]))
    """
    if length < 1 or tokens < 1:
        raise ValueError(f"packed: got length={length}, tokens={tokens}; expected positive numbers.")
    if overlong not in ("error", "skip"):
        raise ValueError(f"packed: overlong: got {overlong!r}; expected 'error' or 'skip'.")
    if not dtype.is_floating_point and dtype != torch.bool:
        raise ValueError(f"packed: dtype: got {dtype}; expected the model's dtype, or torch.bool.")
    sizes = [sum(len(row) for row, _ in encoded.documents(i)) for i in range(len(encoded))]
    skipped = tuple(
        Skipped(name, "overlong", f"{size} tokens, rows of {length}")
        for name, size in zip(encoded.ids, sizes, strict=True)
        if size > length
    )
    if skipped and (overlong == "error" or len(skipped) == len(encoded)):
        names = ", ".join(f"'{skip.id}' ({skip.reason})" for skip in skipped[:5])
        raise ValueError(
            f"packed: {len(skipped)} of {len(encoded)} examples are overlong: {names}. Raise length, or pass "
            "overlong='skip'."
        )
    return Packed(encoded, first_fit(sizes, length), length, max(1, tokens // length), dtype, pad_id, skipped)


def first_fit(sizes: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """Put things into boxes of equal room, each into the first that can hold it; those larger than a box are left out.

    >>> first_fit([3, 4, 2, 9, 1], 5)
    ((0, 2), (1, 4))
    """
    boxes: list[list[int]] = []
    left = np.full(len(sizes), room)
    for i, size in enumerate(sizes):
        if size > room:
            continue
        box = int(np.argmax(left[: len(boxes) + 1] >= size))
        if box == len(boxes):
            boxes.append([])
        boxes[box].append(i)
        left[box] -= size
    return tuple(map(tuple, boxes))


def block_diagonal(documents: Int[Tensor, "R T"], dtype: torch.dtype) -> Tensor:
    """Causal attention within documents, for rows of document numbers.

    Returns:
        [R, 1, T, T]: boolean, True where the column's token is seen; or 0 there and the most negative number elsewhere.

    >>> block_diagonal(torch.tensor([[0, 0, 1]]), torch.bool).long()[0, 0]
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]])
    """
    T = documents.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    seen: Bool[Tensor, "R 1 T T"] = ((documents[:, :, None] == documents[:, None, :]) & causal).unsqueeze(1)
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
