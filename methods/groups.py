"""Sets of examples: what scores say of them, held against models that were trained on some or without some."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from attrax.core import Scores
from attrax.methods.evaluation import agreement


def group_scores(scores: Scores, groups: Mapping[str, Sequence[str]]) -> Scores:
    """Scores of sets of examples: the sums of their members', over all steps.

    Args:
        scores: Scores of examples.
        groups: Example ids by the name of the set.

    Raises:
        KeyError: If an example has no score.

    >>> scores = Scores(torch.tensor([[1.0], [2.0], [4.0]]), ("a", "b", "c"), ("q",))
    >>> group_scores(scores, {"left": ["a", "b"]}).values
    tensor([[3.]])
    """
    folded, _ = scores.per_example()
    rows = {name: folded.in_order(ids).values.sum(0) for name, ids in groups.items()}
    return Scores(torch.stack(list(rows.values())), tuple(rows), scores.query_ids, about=scores.about)


def lds(scores: Scores, subsets: Mapping[str, Sequence[str]], losses: Scores) -> Float[Tensor, " Q"]:
    """Linear datamodeling score (Park et al. 2023, arXiv:2303.14186): sums of scores against models of random subsets.

    Args:
        scores: Scores of examples.
        subsets: The examples that each model was trained **on**, by name.
        losses: Losses of the queries under each of these models (means over seeds).

    Returns:
        Spearman correlation [Q] of the sums with minus the losses.

    Raises:
        KeyError: If an example, a model or a query is missing.

    >>> scores = Scores(torch.tensor([[1.0], [2.0], [4.0]]), ("a", "b", "c"), ("q",))
    >>> losses = Scores(torch.tensor([[0.9], [0.5]]), ("m", "n"), ("q",))
    >>> lds(scores, {"m": ["a", "b"], "n": ["b", "c"]}, losses).round(decimals=6)
    tensor([1.], dtype=torch.float64)
    """
    better = Scores(-losses.values, losses.ids, losses.query_ids)
    return agreement(group_scores(scores, subsets), better)


def random_subsets(
    ids: Sequence[str], fraction: float, count: int, *, seed: int = 0
) -> dict[str, tuple[str, ...]]:
    """Random subsets of examples, in the order of the data, for `lds` or for the removal of groups.

    Raises:
        ValueError: If the fraction leaves nothing or is more than everything.

    >>> {name: len(subset) for name, subset in random_subsets(["a", "b", "c", "d"], 0.5, 2).items()}
    {'subset-0': 2, 'subset-1': 2}
    """
    size = round(fraction * len(ids))
    if not 0 < size <= len(ids):
        raise ValueError(
            f"random_subsets: a fraction of {fraction} of {len(ids)} examples is {size} of them."
        )
    gen = Generator().manual_seed(seed)
    names = tuple(ids)
    draws = [torch.randperm(len(ids), generator=gen)[:size].sort().values.tolist() for _ in range(count)]
    return {f"subset-{k}": tuple(names[i] for i in draw) for k, draw in enumerate(draws)}
