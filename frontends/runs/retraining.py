"""Training again, literally: the ground truth that scores of training examples are judged by.

A `Recipe` says how a model was trained; `train` runs it with a torch optimizer and any weights of the examples.  An
example is removed by the **weight zero**: tensor shapes, batches, schedule and random numbers stay what they were, so
that rounding does not drown effects of 1e-6 of the loss.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attrax.core import Scores
from attrax.core.trajectory import Clip
from attrax.frontends.model.losses import Loss
from attrax.frontends.model.randomness import undrawn
from attrax.frontends.model.rows import Batch, for_loss, with_ids

Reduction: TypeAlias = Literal["sum", "token_mean", "example_mean"]
Weight: TypeAlias = Callable[[str, int], float]
"""``(example id, step) -> w``."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """A training run that can be repeated.

    Attributes:
        model: The model at its initial parameters; copied, never changed.
        batches: Micro-batches of every step, in order.
        loss: ``(model, batch) -> [B]`` summed loss per example.
        optimizer: Makes the optimizer of a copy of the model.
        reduction: The loss of a step: the "sum" of its examples' losses, divided by the number of loss terms in the
            step ("token_mean"), or the mean over its examples of their token means ("example_mean").
        renormalized: Whether denominators count examples by their weight, so that a removed example shrinks the batch.
        max_norm: Bound of the gradient norm over all parameters, or None.
        scheduler: Makes a learning rate schedule, stepped after every step, or None.
        seed: Seed of torch's random numbers during training.
    """

    model: nn.Module
    batches: Mapping[int, Sequence[Batch]]
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizer]
    reduction: Reduction = "example_mean"
    renormalized: bool = False
    max_norm: float | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    seed: int = 0


def train(
    recipe: Recipe,
    weight: Weight = lambda name, step: 1.0,
    *,
    before_step: Callable[[int, nn.Module, Optimizer, Clip], None] = lambda *_: None,
) -> nn.Module:
    """Run a recipe.

    Args:
        recipe: What to run.
        weight: Weight w of an example at a step: 0 removes it.
        before_step: Called before every optimizer step, gradients in place and clipped.

    Returns:
        The trained copy of the model.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> batch = {"x": torch.ones(2, 1), "example_ids": ("a", "b")}
    >>> sgd = lambda model: torch.optim.SGD(model.parameters(), lr=1.0)
    >>> recipe = Recipe(layer, {0: [batch]}, lambda model, batch: model(batch["x"])[:, 0], sgd)
    >>> after = train(recipe, lambda name, step: float(name != "a"))
    >>> round(float(layer.weight.detach() - after.weight.detach()), 3)
    0.5
    """
    with undrawn(recipe.model):
        torch.manual_seed(recipe.seed)
        model = copy.deepcopy(recipe.model)
        optimizer = recipe.optimizer(model)
        scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
        for number, given in recipe.batches.items():
            batches = [with_ids(batch) for batch in given]
            optimizer.zero_grad()
            chosen = [_chosen(batch, weight, number) for batch in batches]
            counted = chosen if recipe.renormalized else None
            for batch, c, w in zip(
                batches, step_weights(batches, recipe.loss, recipe.reduction, counted), chosen, strict=True
            ):
                losses = recipe.loss(model, for_loss(batch, recipe.loss))
                (losses * (c * w).to(losses)).sum().backward()
            before_step(number, model, optimizer, clipped(model, recipe.max_norm))
            optimizer.step()
            if scheduler:
                scheduler.step()
    return model


def step_weights(
    batches: Sequence[Batch], loss: Loss, reduction: Reduction, counted: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The factor c that the loss of a step puts on every example's summed loss, by micro-batch, float64.

    Args:
        batches: Micro-batches, with ids.
        loss: Has ``tokens(batch)`` where examples have more than one loss term.
        reduction: See `Recipe`.
        counted: How much of each example the denominator counts; all if omitted.

    Raises:
        ValueError: If `reduction` is unknown.
    """
    if reduction not in ("sum", "token_mean", "example_mean"):
        raise ValueError(
            f"reduction: got {reduction!r}; expected 'sum', 'token_mean' or 'example_mean' (see Recipe)."
        )
    tokens = [loss_terms(batch, loss) for batch in batches]
    parts = [torch.ones_like(n) for n in tokens] if counted is None else counted
    if reduction == "sum":
        return [torch.ones_like(n) for n in tokens]
    if reduction == "token_mean":
        total = sum(float(n @ w) for n, w in zip(tokens, parts, strict=True))
        return [torch.full_like(n, 1 / max(total, 1e-300)) for n in tokens]
    total = sum(float(w.sum()) for w in parts)
    return [1 / n.clamp_min(1) / max(total, 1e-300) for n in tokens]


def loss_terms(batch: Batch, loss: Loss) -> Tensor:
    """Number of loss terms of every example, float64; one where the loss does not say."""
    tokens = getattr(loss, "tokens", None)
    if tokens is None:
        return torch.ones(len(batch["example_ids"]), dtype=torch.float64)
    return tokens(batch).cpu().double()


def clipped(model: nn.Module, max_norm: float | None) -> Clip:
    """Clip the gradients of a model in place, as `torch.nn.utils.clip_grad_norm_`, and say by how much."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in grads]))
    if max_norm is None:
        return Clip(1.0, norm)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return Clip(min(1.0, max_norm / (norm + 1e-6)), norm)


def query_losses(model: nn.Module, queries: Sequence[Batch], loss: Loss) -> Tensor:
    """Losses [Q] of the queries, by a float64 copy of the model: effects are small differences of large sums."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        return torch.cat(
            [loss(exact, _doubled(for_loss(with_ids(batch), loss))).double() for batch in queries]
        )


def _doubled(batch: Batch) -> dict[str, object]:
    return {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in batch.items()}


def removal_effects(
    recipe: Recipe, removals: Mapping[str, Weight | Sequence[str]], queries: Sequence[Batch]
) -> Scores:
    """What removing examples really does to the queries: ``f_q(trained without) - f_q(trained)``.

    Args:
        recipe: The run; it is repeated once a removal.
        removals: By name, the ids to remove from all steps, or a weight of every (id, step).  The weight
            ``lambda name, step: 0.0 if (name, step) == ("a", 3) else 1.0`` removes one use of one example.
        queries: Batches of queries.

    Returns:
        Effects [R, Q], one row a removal; positive = the examples helped.
    """
    before = query_losses(train(recipe), queries, recipe.loss)
    rows = [
        query_losses(train(recipe, w if callable(w) else without(w)), queries, recipe.loss) - before
        for w in removals.values()
    ]
    ids = tuple(i for batch in queries for i in with_ids(batch)["example_ids"])
    about = {
        "method": "retraining",
        "unit": "loss",
        "removal": "renormalized" if recipe.renormalized else "fixed",
    }
    return Scores(torch.stack(rows), tuple(removals), ids, about=about)


def without(ids: Sequence[str]) -> Weight:
    """The weight that removes some examples from every step.

    >>> without(["a"])("a", 0), without(["a"])("b", 0)
    (0.0, 1.0)
    """
    gone = frozenset(ids)
    return lambda name, step: 0.0 if name in gone else 1.0


def _chosen(batch: Batch, weight: Weight, step: int) -> Tensor:
    return torch.tensor([weight(i, step) for i in batch["example_ids"]], dtype=torch.float64)
