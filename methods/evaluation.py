"""How well scores foretell what retraining does: correlations, their uncertainty, and whether effects are real.

Effects are ``f_q(trained without a set of examples) - f_q(trained)``, rows = removals, columns = queries: like scores,
positive = the examples helped.  Correlations are taken query by query and then averaged, never pooled over queries,
whose losses have their own scales.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from attrax.core import Scores
from attrax.methods.metrics import spearman


def agreement(scores: Scores, effects: Scores) -> Float[Tensor, " Q"]:
    """Spearman correlation of scores and effects over the removals, for every query.

    Args:
        scores: Predicted effects, rows by the removals' names: examples, or sets (see `attrax.methods.groups`).
        effects: Effects by retraining; queries may be in another order, scores of other examples are left out.

    Returns:
        Correlations [Q], float64; their mean is the fidelity of the scores.

    Raises:
        KeyError: If a removal or a query was not scored.

    >>> scores = Scores(torch.tensor([[1.0], [2.0], [3.0]]), ("a", "b", "c"), ("q",))
    >>> effects = Scores(torch.tensor([[0.1], [0.3]]), ("c", "b"), ("q",))
    >>> agreement(scores, effects).round(decimals=6)
    tensor([-1.], dtype=torch.float64)
    """
    pairs = _aligned(scores, effects)
    columns = [spearman(x, y) for x, y in zip(*(side.T for side in pairs), strict=True)]
    return torch.tensor(columns, dtype=torch.float64)


def bootstrap(
    scores: Scores, effects: Scores, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Interval of the mean agreement when both removals and queries are drawn anew.

    All queries share the same removals, so that an interval over queries alone is too narrow.

    Returns:
        (lower, upper) percentiles.

    Raises:
        ValueError: If `level` is not within (0, 1), or there are fewer than three removals.

    >>> values = torch.arange(10.0).unsqueeze(1)
    >>> same = Scores(values, tuple("abcdefghij"), ("q",))
    >>> [round(x, 6) for x in bootstrap(same, same, resamples=50)]
    [1.0, 1.0]
    """
    x, y = _aligned(scores, effects)
    if not 0 < level < 1 or len(x) < 3:
        raise ValueError(
            f"bootstrap: got level {level} and {len(x)} removals; expected (0, 1) and at least 3."
        )
    gen = Generator().manual_seed(seed)
    means: list[float] = []
    for _ in range(resamples):
        rows = torch.randint(len(x), (len(x),), generator=gen)
        columns = torch.randint(x.shape[1], (x.shape[1],), generator=gen).tolist()
        found = torch.tensor([spearman(x[rows, q], y[rows, q]) for q in columns]).double()
        means.append(float(found[found.isfinite()].mean()))
    sample = torch.tensor(means, dtype=torch.float64)
    sample = sample[sample.isfinite()]
    low, high = torch.quantile(sample, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64))
    return float(low), float(high)


def linearity(scores: Scores, effects: Mapping[float, Scores]) -> dict[float, float]:
    """How far effects of partial removals are from proportional: ``|effect(h) / h - score| / |score|`` for every h.

    Args:
        scores: Derivatives along the removal, such as those of `magic`.
        effects: Effects by h, the part of its weight that each example lost (0 < h <= 1).

    Returns:
        Relative distance by h.  It goes to zero with h for an exact derivative; the value at 1 is what any first-order
        method must miss.

    >>> scores = Scores(torch.tensor([[1.0], [2.0]]), ("a", "b"), ("q",))
    >>> linearity(scores, {0.5: Scores(torch.tensor([[0.5], [1.0]]), ("a", "b"), ("q",))})
    {0.5: 0.0}
    """
    out: dict[float, float] = {}
    for h, found in effects.items():
        x, y = _aligned(scores, found)
        out[h] = float((y / h - x).norm() / x.norm())
    return out


def above_floor(effects: Scores, floor: Scores) -> float:
    """Median size of effects over that of effects which are rounding only: a retraining is to be trusted from 10 up.

    Args:
        effects: Effects of removals.
        floor: What changes when nothing is removed, e.g. when the rows of the batches are permuted.

    Returns:
        The ratio; infinite if nothing changed.

    >>> above_floor(Scores(torch.tensor([[2.0]]), ("a",), ("q",)), Scores(torch.tensor([[0.5]]), ("again",), ("q",)))
    4.0
    """
    noise = float(floor.values.abs().median())
    return float(effects.values.abs().median()) / noise if noise else float("inf")


def _aligned(scores: Scores, effects: Scores) -> tuple[Tensor, Tensor]:
    """Both as [R, Q] in float64, uses of one example added up."""
    folded = scores.per_example()[0] if len(set(scores.ids)) < len(scores.ids) else scores
    x = folded.in_order(effects.ids).query(*effects.query_ids)
    return x.values.double(), effects.values.double()
