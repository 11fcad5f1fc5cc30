"""What a method should beat: chance, properties of the train example alone, words in common, alike representations."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attrax.core import Scores, Source, sq_norms_leaf, targeted
from attrax.core.source import row_sums
from attrax.frontends.loop.probe import evaluating
from attrax.frontends.model.losses import Loss, causal_lm
from attrax.frontends.model.rows import for_loss, with_ids

Data = Iterable[Mapping[str, Any]]


def chance(ids: Sequence[str], query_ids: Sequence[str], *, seed: int = 0) -> Scores:
    """Normal random scores.

    >>> chance(["a", "b"], ["q"]).values.shape
    torch.Size([2, 1])
    """
    gen = torch.Generator().manual_seed(seed)
    values = torch.randn(len(ids), len(query_ids), generator=gen, dtype=torch.float64)
    return Scores(values, tuple(ids), tuple(query_ids), about={"method": "chance"})


def train_losses(model: nn.Module, data: Data, query_ids: Sequence[str], loss: Loss | None = None) -> Scores:
    """The summed loss of each train example, the same for every query."""
    values: list[Tensor] = []
    ids: list[str] = []
    with torch.no_grad(), evaluating(model):
        for batch in map(with_ids, data):
            values.append((loss or causal_lm())(model, for_loss(batch, loss)).double())
            ids += batch["example_ids"]
    return _alike(torch.cat(values), ids, query_ids, "train loss")


def gradient_norms(train: Source, query_ids: Sequence[str]) -> Scores:
    """The norm of each train example's gradient of its summed loss, the same for every query."""
    found = list(row_sums(lambda name, leaf, _: sq_norms_leaf(leaf, name=name), targeted(train, "sum")))
    values = torch.cat([total.sqrt() for _, total in found if total is not None])
    ids = [i for examples, total in found if total is not None for i in examples.ids]
    return _alike(values, ids, query_ids, "gradient norm")


def bm25(train: Mapping[str, str], query: Mapping[str, str]) -> Scores:
    """BM25 (Robertson et al. 1994) of the queries' words in the train texts.

    Args:
        train: Texts by example id.
        query: Texts by query id.

    Raises:
        ImportError: Without the package `rank_bm25` (``pip install "attrax[report]"``).

    >>> bm25({"a": "red fox", "b": "blue sea", "c": "old tree"}, {"q": "the fox"}).top(1, "q")[0][0]
    'a'
    """
    from rank_bm25 import BM25Okapi

    index = BM25Okapi([_words(text) for text in train.values()])
    columns = [index.get_scores(_words(text)) for text in query.values()]
    values = torch.stack([torch.as_tensor(column, dtype=torch.float64) for column in columns], 1)
    return Scores(values, tuple(train), tuple(query), about={"method": "bm25"})


def similarity(model: nn.Module, data: Data, queries: Data) -> Scores:
    """Cosine of mean last hidden states (Hugging Face models), over positions that are not padding."""
    (ids, x), (query_ids, y) = _embedded(model, data), _embedded(model, queries)
    return Scores(x @ y.T, ids, query_ids, about={"method": "embedding similarity"})


def _embedded(model: nn.Module, data: Data) -> tuple[tuple[str, ...], Tensor]:
    rows: list[Tensor] = []
    ids: list[str] = []
    with torch.no_grad(), evaluating(model):
        for batch in map(with_ids, data):
            tokens = batch["input_ids"]
            mask = batch.get("attention_mask", torch.ones_like(tokens))
            states = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
            mean = (states.double() * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
            rows.append(mean / mean.norm(dim=1, keepdim=True))
            ids += batch["example_ids"]
    return tuple(ids), torch.cat(rows)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _alike(values: Tensor, ids: Sequence[str], query_ids: Sequence[str], method: str) -> Scores:
    columns = values.unsqueeze(1).repeat(1, len(query_ids))
    return Scores(columns, tuple(ids), tuple(query_ids), about={"method": method})
