"""A recorded run replayed: gradients, Hessian products and exact step derivatives at the recorded parameters.

The loss of a step is ``sum_z w_z c_z l_z(theta)`` with all weights w at 1.  One double backward of <its gradient, rho>
gives, for every query, the products <rho, ghat_z> (the derivative in w) and rho H (the derivative in theta).
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attrax.core import Block, Examples, GradTree, Leaf, Source, scale_examples, take, take_block
from attrax.core.source import Visit
from attrax.core.trajectory import Step, Trajectory
from attrax.frontends.model.losses import Loss
from attrax.frontends.model.modes import check_mode
from attrax.frontends.model.parameters import replaced, slots
from attrax.frontends.model.rows import Batch, for_loss, with_ids
from attrax.frontends.model.sharding import named
from attrax.frontends.runs.observed import dense
from attrax.frontends.runs.retraining import Reduction, loss_terms, step_weights
from attrax.frontends.sources.live import live
from attrax.frontends.tape.recompute import slow_attention
from attrax.frontends.tape.tensor_parallel import refuse_parallel

T = TypeVar("T")
Vectors = Mapping[str, Tensor]
Weighing = Reduction | Literal["recorded"]


@dataclass(frozen=True, eq=False)
class Replay:
    """A trajectory whose gradients are computed again; made by `replay`."""

    model: nn.Module
    batches: Mapping[int, Sequence[Batch]]
    loss: Loss
    trajectory: Trajectory
    reduction: Weighing
    source: Callable[[nn.Module, Iterable[Batch], Loss], Source]

    @property
    def steps(self) -> Sequence[int]:
        """See `Trajectory.steps`."""
        return self.trajectory.steps

    def step(self, number: int) -> Step:
        """See `Trajectory.step`."""
        return self.trajectory.step(number)

    def gradients(self, number: int) -> Source:
        """See `Trajectory.gradients`; needs the recorded parameters of the step."""
        return _Placed(self, number, self._parts(number))

    def gradient(self, number: int, parameters: Vectors) -> dict[str, Tensor]:
        """Gradient of a step's loss as trained, at any parameters, before clipping."""
        total: dict[str, Tensor] = {}
        for batch, examples in self._parts(number):
            leaves = _leaves(parameters)
            with self._at(leaves):
                loss = self._losses(batch, examples.weight).sum()
                grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            for name, g in zip(leaves, grads, strict=True):
                total[name] = total[name] + dense(g) if name in total else dense(g)
        return total

    def pull(
        self, number: int, parameters: Vectors, rho: Vectors
    ) -> tuple[list[tuple[Examples, Tensor]], dict[str, Tensor]]:
        """Products of cotangents with a step's examples and with the Hessian of its loss.

        Args:
            number: The step.
            parameters: Parameters before the step.
            rho: Cotangents [Q, *shape] of the step's gradient.

        Returns:
            ``<rho_q, ghat_z>`` [B, Q] of every micro-batch, and ``rho H`` [Q, *shape] by parameter.
        """
        rows: list[tuple[Examples, Tensor]] = []
        curved = {name: torch.zeros_like(r) for name, r in rho.items()}
        for batch, examples in self._parts(number):
            leaves = _leaves(parameters)
            w = torch.ones(len(examples), dtype=torch.float64, requires_grad=True)
            moving = [leaves[name] for name in rho]
            assert examples.weight is not None
            columns: list[Tensor] = []
            with self._at(leaves):
                loss = self._losses(batch, examples.weight * w).sum()
                g = torch.autograd.grad(loss, moving, create_graph=True, materialize_grads=True)
                for q in range(len(next(iter(rho.values())))):
                    along = [r[q].to(x) for r, x in zip(rho.values(), g, strict=True)]
                    *changes, in_w = torch.autograd.grad(
                        g, [*moving, w], along, retain_graph=True, materialize_grads=True
                    )
                    columns.append(in_w)
                    for name, change in zip(rho, changes, strict=True):
                        curved[name][q] += change
            products = torch.stack(columns, 1).to(next(iter(rho.values())).dtype)
            rows.append((_of(examples, used := self._used(examples)), products[used.to(products.device)]))
        return rows, curved

    def hvp(self, number: int, vectors: Vectors) -> dict[str, Tensor]:
        """Hessian of a step's loss as trained, at its recorded parameters, times vectors [Q, *shape]."""
        return self.pull(number, self._recorded(number), vectors)[1]

    def queries(self, batches: Sequence[Batch]) -> "Queries":
        """Query gradients along the run, at the recorded parameters of every step."""
        return Queries(self, [with_ids(batch) for batch in batches])

    def _recorded(self, number: int) -> Vectors:
        parameters = self.step(number).parameters
        if not parameters:
            raise ValueError(
                f"replay: step {number} holds no parameters. Record them at every step, or use magic, which trains "
                "again from the steps that have them."
            )
        return parameters

    def _weights(self, number: int, batches: Sequence[Batch]) -> list[Tensor]:
        """The factor that the loss of a step puts on every example's summed loss, by micro-batch."""
        if self.reduction != "recorded":
            return step_weights(batches, self.loss, self.reduction)
        found: dict[tuple[int, str], list[float]] = defaultdict(list)
        for examples, _ in self.trajectory.gradients(number).map(lambda name, leaf, about: None):
            if examples.weight is None:
                raise ValueError(
                    f"replay: step {number} was recorded without loss weights: they were not declared at capture, or "
                    "every layer selected examples of its own, which is no loss that could be trained again."
                )
            for name, c in zip(examples.ids, examples.weight.tolist(), strict=True):
                found[examples.micro, name].append(c)
        weights = [
            torch.tensor(
                [(found[micro, i] or [0.0]).pop() for i in batch["example_ids"]], dtype=torch.float64
            )
            for micro, batch in enumerate(batches)
        ]
        if left := sorted(key for key, values in found.items() if values):
            raise ValueError(
                f"replay: step {number} was trained on examples that its batches do not have, e.g. "
                f"'{left[0][1]}' of micro-batch {left[0][0]}. Give the batches of the run, their ids as captured."
            )
        return weights

    def _parts(self, number: int) -> list[tuple[Batch, Examples]]:
        """Micro-batches of a step with what is known about their examples."""
        if number not in self.batches:
            raise ValueError(
                f"replay: no batches are given for step {number}; there are {list(self.batches)[:5]} …."
            )
        batches = [with_ids(batch) for batch in self.batches[number]]
        weights = self._weights(number, batches)
        rates = {rule.lr for rule in self.step(number).optimizers.values()}
        rate = rates.pop() if len(rates) == 1 else None
        return [
            (
                batch,
                Examples(
                    tuple(batch["example_ids"]),
                    number,
                    micro,
                    c,
                    loss_terms(batch, self.loss).long(),
                    learning_rate=rate,
                ),
            )
            for micro, (batch, c) in enumerate(zip(batches, weights, strict=True))
        ]

    def _used(self, examples: Examples) -> Tensor:
        """Which examples of a micro-batch the step was trained on [B]."""
        everything = torch.ones(len(examples), dtype=torch.bool)
        recorded = examples.weight if self.reduction == "recorded" else None
        return everything if recorded is None else recorded != 0

    @contextlib.contextmanager
    def _at(self, parameters: Vectors) -> Iterator[None]:
        """The model at other parameters, also where activation checkpointing runs parts of it again in backward."""
        own = named(self.model)
        with (
            slow_attention(),
            sdpa_kernel(SDPBackend.MATH),
            replaced(slots(self.model, {own[n]: p for n, p in parameters.items()})),
        ):
            yield

    def _losses(self, batch: Batch, scale: Tensor | None = None) -> Tensor:
        losses = self.loss(self.model, for_loss(batch, self.loss))
        return losses if scale is None else losses * scale.to(losses)


@dataclass(frozen=True, eq=False)
class _Placed:
    """The examples of one step at its parameters, as trained."""

    replay: Replay
    number: int
    parts: list[tuple[Batch, Examples]]

    @property
    def reiterable(self) -> bool:
        return True

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `attrax.core.source.Source.map`."""
        parameters = self.replay._recorded(self.number)
        for batch, examples in self.parts:
            source = self.replay.source(self.replay.model, [batch], self.replay.loss)
            used = self.replay._used(examples)

            def scaled(
                name: str, leaf: Leaf, about: Examples, examples: Examples = examples, used: Tensor = used
            ) -> T:
                seen = take(scale_examples(leaf, examples.weight), used)
                return visit(name, seen, _of(_joined(about, examples), used))

            with placed(self.replay.model, parameters):
                found = list(source.map(scaled))
            yield from ((_of(_joined(about, examples), used), values) for about, values in found)


@dataclass(frozen=True, eq=False)
class Queries:
    """Gradients of queries along a run; made by `Replay.queries`."""

    replay: Replay
    batches: list[Batch]

    @property
    def reiterable(self) -> bool:
        """True: they are computed again."""
        return True

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `attrax.core.source.Source.map`; all steps in order."""
        for number in self.steps():
            yield from self.at(number).map(visit)

    def steps(self) -> tuple[int, ...]:
        """Steps of the run."""
        return tuple(self.replay.steps)

    def at(self, step: int) -> Source:
        """The queries at the parameters of one step."""
        loss = self.replay.loss
        parts = [
            (b, Examples(tuple(b["example_ids"]), step, micro, torch.ones_like(n), n.long()))
            for micro, (b, n) in enumerate((b, loss_terms(b, loss)) for b in self.batches)
        ]
        return _Placed(self.replay, step, parts)

    def hvp(self, step: int, direction: Vectors) -> dict[str, Tensor]:
        """Hessian of every query's loss at a step's parameters, times one direction: [Q, *shape] by parameter."""
        leaves = _leaves(self.replay._recorded(step))
        moving = [leaves[name] for name in direction]
        rows: list[tuple[Tensor, ...]] = []
        with self.replay._at(leaves):
            for batch in self.batches:
                for loss in self.replay._losses(batch):
                    g = torch.autograd.grad(loss, moving, create_graph=True, materialize_grads=True)
                    along = [d.to(x) for d, x in zip(direction.values(), g, strict=True)]
                    rows.append(
                        torch.autograd.grad(g, moving, along, retain_graph=True, materialize_grads=True)
                    )
        return {
            name: torch.stack(column) for name, column in zip(direction, zip(*rows, strict=True), strict=True)
        }


def _of(examples: Examples, used: Tensor) -> Examples:
    return take_block(Block(GradTree({}), examples), used).examples


def _joined(about: Examples, examples: Examples) -> Examples:
    return replace(examples, fingerprint=about.fingerprint, absent=about.absent)


def _leaves(parameters: Vectors) -> dict[str, Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}


@contextlib.contextmanager
def placed(model: nn.Module, values: Vectors) -> Iterator[None]:
    """A model with other values in its parameters, inside the context.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> before = layer.weight.detach().clone()
    >>> with placed(layer, {"weight": torch.zeros(1, 1)}):
    ...     layer(torch.ones(1)).item()
    0.0
    >>> bool((layer.weight == before).all())
    True
    """
    own = {n: p for n, p in named(model).items() if n in values}
    kept = {n: p.detach().clone() for n, p in own.items()}
    try:
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(values[name])
        yield
    finally:
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(kept[name])


def replay(
    model: nn.Module,
    batches: Mapping[int, Sequence[Mapping[str, Any]]],
    loss: Loss,
    trajectory: Trajectory,
    *,
    reduction: Weighing = "example_mean",
    source: Callable[[nn.Module, Iterable[Batch], Loss], Source] = live,
) -> Replay:
    """Replay a recorded run on its own batches.

    Args:
        model: The model, without dropout or batch statistics; its own values do not matter and do not change.
        batches: The micro-batches of every step; ``example_ids`` name their examples, else content hashes do.
        loss: ``(model, batch) -> [B]`` summed loss per example.
        trajectory: The recorded steps.  `magic` needs optimizers and clipping of all, parameters and states of some.
        reduction: How a step's loss weighs its examples, see `attrax.Recipe`; or "recorded": with
            the weights that were recorded beside its gradients, which know what `attrax.select` left out.
        source: Makes the per-example gradients: `live` or `functional`.

    Returns:
        A trajectory, with ``pull`` and ``gradient`` for `magic` and ``hvp`` for `trajectory_influence`.

    Raises:
        ValueError: If the model's examples depend on chance or on each other.
    """
    refuse_parallel(model, "replay")
    check_mode(model)
    return Replay(model, batches, loss, trajectory, reduction, source)
