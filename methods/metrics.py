"""Pure evaluation metrics on scores.  Ties share their average rank everywhere."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attrax.core import Scores


def average_ranks(values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Ascending ranks 1 … N, tied values sharing the average of theirs.

    >>> average_ranks(torch.tensor([1.0, 2.0, 2.0, 3.0]))
    tensor([1.0000, 2.5000, 2.5000, 4.0000], dtype=torch.float64)
    """
    distinct, inverse, count = torch.unique(values, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count.double() - 1) / 2)[inverse] if distinct.numel() else values.double()


def spearman(x: Float[Tensor, " N"], y: Float[Tensor, " N"]) -> float:
    """Spearman correlation: Pearson correlation of average ranks; NaN if either side is constant.

    Raises:
        ValueError: If lengths differ or there are fewer than two values.

    >>> round(spearman(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 3, 2])), 3)
    0.5
    """
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ValueError(
            f"spearman: expected two vectors of one length >= 2, got {tuple(x.shape)}, {tuple(y.shape)}."
        )
    a, b = average_ranks(x), average_ranks(y)
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def auroc(values: Float[Tensor, " N"], positive: Bool[Tensor, " N"]) -> float:
    """Chance that a positive example has the higher value, ties counting half: mislabeled examples by self-influence.

    Raises:
        ValueError: If one of the classes is empty.

    >>> auroc(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([True, False, True, False]))
    0.875
    """
    many, rest = int(positive.sum()), int((~positive).sum())
    if not many or not rest:
        raise ValueError(f"auroc: got {many} positive and {rest} negative examples; expected some of both.")
    return float((average_ranks(values)[positive].sum() - many * (many + 1) / 2) / (many * rest))


def descending_rank(scores: Scores, query: str, example: str) -> float:
    """Rank of an example among all examples for a query, 1 = best; ties share their average rank.

    Rows of the example at several steps are summed first.

    Raises:
        KeyError: If the query or the example is unknown.

    >>> s = Scores(torch.tensor([[1.0], [3.0], [3.0]]), ("a", "b", "c"), ("q",))
    >>> descending_rank(s, "q", "b")
    1.5
    """
    folded = scores if len(set(scores.ids)) == len(scores.ids) else scores.per_example()[0]
    column = folded.query(query).values[:, 0]
    if example not in folded.ids:
        raise KeyError(
            f"descending_rank: example '{example}' is not among the {len(folded)} that were scored."
        )
    return float(average_ranks(-column)[folded.ids.index(example)])


def recall_at(scores: Scores, truth: Mapping[str, str], ks: Sequence[int] = (1, 5, 10)) -> dict[int, float]:
    """Share of queries whose true source is among the best k examples.

    Args:
        scores: Scores of all queries in `truth`.
        truth: Query id -> example id that should be found.
        ks: Cut-offs.

    Returns:
        Share per cut-off.

    Raises:
        ValueError: If `truth` is empty.
        KeyError: If a query is not among the columns, or a source not among the rows.

    >>> s = Scores(torch.tensor([[1.0], [3.0]]), ("a", "b"), ("q",))
    >>> recall_at(s, {"q": "a"}, (1, 2))
    {1: 0.0, 2: 1.0}
    """
    if not truth:
        raise ValueError("recall_at: no query has a known source.")
    ranks = [descending_rank(scores, query, example) for query, example in truth.items()]
    return {k: sum(rank <= k for rank in ranks) / len(ranks) for k in ks}
