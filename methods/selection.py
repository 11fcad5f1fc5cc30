"""Rules of online selection: which examples of a batch a training step keeps.

A rule is a function ``(scores [B], interactions) -> keep [B]`` of booleans.  The scores ``s_i = <G_i, v>`` say by how
much a step on example i decreases the target's loss, to first order; ``interactions()`` computes
``h_ij = <G_i, G_j>``, for the rules that look at pairs.  A rule of one's own is such a function:

    attrax.select(target, lambda scores, interactions: scores > scores.median())

Sources: GREATS (Wang et al. 2024); layer-wise subsets (Hu et al. 2026), which apply a rule to each layer's own scores.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Interactions: TypeAlias = Callable[[], Tensor]
Rule: TypeAlias = Callable[[Tensor, Interactions], Tensor]


def drop_fraction(fraction: float) -> Rule:
    """Drop the ``round(fraction * B)`` lowest scores.

    Halves are rounded to even, as Python does: of 5 examples half are 2.  Of equal scores those that come first in the
    batch are dropped first.  An example whose score is not a number counts as the lowest.

    Args:
        fraction: Share of the batch to drop, from 0 to 1.

    Raises:
        ValueError: If it is not.

    >>> drop_fraction(0.5)(torch.tensor([3.0, 1.0, 2.0, 1.0]), lambda: torch.empty(0))
    tensor([ True, False,  True, False])
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"drop_fraction: got {fraction}; expected a share from 0 to 1.")
    return lambda scores, interactions: _highest(scores, len(scores) - round(fraction * len(scores)))


def keep_top(count: int) -> Rule:
    """Keep the `count` highest scores (all of a smaller batch); ties as in `drop_fraction`.

    Raises:
        ValueError: If `count` is negative.

    >>> keep_top(1)(torch.tensor([3.0, 1.0, 2.0]), lambda: torch.empty(0))
    tensor([ True, False, False])
    """
    if count < 0:
        raise ValueError(f"keep_top: got {count}; expected a number of examples.")
    return lambda scores, interactions: _highest(scores, min(count, len(scores)))


def drop_negative(scores: Float[Tensor, " B"], interactions: Interactions) -> Bool[Tensor, " B"]:
    """Drop the examples whose step would increase the target's loss: scores below zero, or not a number.

    >>> drop_negative(torch.tensor([3.0, -1.0, 0.0]), lambda: torch.empty(0))
    tensor([ True, False,  True])
    """
    return scores >= 0


def greats(fraction: float, rate: float | Callable[[], float]) -> Rule:
    """GREATS: pick examples one by one, each for what it adds to those picked before it.

    The next pick is the argmax of ``rate * s_i - rate^2 * sum_{picked j} h_ij`` (Wang et al. 2024, with the identity
    for the Hessian of the target's loss): alike examples are worth less together.  Ties go to the first in the batch.

    Args:
        fraction: Share of the batch to drop; ``round(fraction * B)`` as in `drop_fraction`.
        rate: The learning rate, or a function that returns the present one.  Under a `GradScaler` gradients are
            scaled when they are selected: ``lambda: lr / scaler.get_scale()``.

    Raises:
        ValueError: If `fraction` is not from 0 to 1.

    >>> twins = torch.tensor([[4.0, 4.0, 0.0], [4.0, 4.0, 0.0], [0.0, 0.0, 1.0]])
    >>> greats(1 / 3, rate=0.5)(torch.tensor([3.0, 2.9, 2.0]), lambda: twins)
    tensor([ True, False,  True])
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"greats: fraction: got {fraction}; expected a share from 0 to 1.")

    def rule(scores: Tensor, interactions: Interactions) -> Tensor:
        lr = rate() if callable(rate) else rate
        return greedy(scores, interactions(), len(scores) - round(fraction * len(scores)), lr)

    return rule


def greedy(
    scores: Float[Tensor, " B"], interactions: Float[Tensor, "B B"], count: int, rate: float
) -> Bool[Tensor, " B"]:
    """Which `count` examples the greedy maximization of `greats` picks.

    >>> greedy(torch.tensor([1.0, 2.0]), torch.eye(2), 1, 0.1)
    tensor([False,  True])
    """
    gain = torch.nan_to_num(rate * scores, nan=float("-inf"))
    keep = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(count):
        pick = gain.masked_fill(keep, float("-inf")).argmax()
        if keep[pick]:  # only examples without a score are left
            break
        keep[pick] = True
        gain = gain - rate**2 * torch.nan_to_num(interactions[pick])
    return keep


def _highest(scores: Tensor, count: int) -> Tensor:
    order = torch.nan_to_num(scores, nan=float("-inf")).argsort(stable=True)
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[order[len(scores) - count :]] = True
    return keep
