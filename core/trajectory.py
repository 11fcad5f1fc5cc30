"""Training as a sequence of values: what every optimizer step saw, and the gradients of its examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from attrax.core.algebra import scale_examples
from attrax.core.leaves import Leaf
from attrax.core.optimizers import Optimizer, State
from attrax.core.source import Blocks, Source, Visit
from attrax.core.tree import Block, Examples

T = TypeVar("T")


@dataclass(frozen=True)
class Clip:
    """Clipping by the global norm: g = coefficient * (gradient before clipping).

    Attributes:
        coefficient: 1 where the norm was within bounds.
        norm: Norm of the gradient before clipping, over all clipped parameters.
    """

    coefficient: float
    norm: float


@dataclass(frozen=True, eq=False)
class Step:
    """What an optimizer sees right before it moves the parameters; mappings go by canonical parameter name.

    Attributes:
        step: Number of the step, as in `Examples.step`.
        optimizers: Kind and hyperparameters for every parameter that moves.
        states: Optimizer state before the step.
        gradients: Gradients the optimizer consumes: unscaled, clipped, without coupled weight decay.  May be empty.
        parameters: Parameters before the step.  May be empty.
        clip: Clipping by norm, or None if it is unknown, or gradients were changed otherwise.
        share: What the examples' captured gradients are to be multiplied with so that their sum over the step is the
            gradient before clipping: 1 / (loss scale * processes).
        unused: Blocks of the step (`Examples.micro`) whose gradients were thrown away before any optimizer used them.
        touched: Rows that sparse gradients hold, Boolean [V] by parameter; SparseAdam moves no others.
    """

    step: int
    optimizers: Mapping[str, Optimizer]
    states: Mapping[str, State] = field(repr=False)
    gradients: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    clip: Clip | None = None
    share: float = 1.0
    unused: tuple[int, ...] = ()
    touched: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@runtime_checkable
class Trajectory(Protocol):
    """A training run: steps in order, and the gradients of the examples of each.

    Gradients are as trained: c_i G_i, so that their sum over the step's examples (all micro-batches, all processes)
    is the gradient before clipping.
    """

    @property
    def steps(self) -> Sequence[int]:
        """Numbers of the recorded steps, in order."""
        ...

    def step(self, number: int) -> Step:
        """What the optimizer saw at a step."""
        ...

    def gradients(self, number: int) -> Source:
        """Gradients of the examples of a step, as trained."""
        ...


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trajectory held in memory.

    >>> run = Recorded([Step(0, {}, {})], [])
    >>> run.steps, run.step(0).step
    ((0,), 0)
    """

    records: Sequence[Step]
    blocks: Sequence[Block] = field(repr=False)

    @property
    def steps(self) -> Sequence[int]:
        """See `Trajectory.steps`."""
        return tuple(record.step for record in self.records)

    def step(self, number: int) -> Step:
        """See `Trajectory.step`."""
        return self.records[self.steps.index(number)]

    def gradients(self, number: int) -> Source:
        """See `Trajectory.gradients`."""
        found = Blocks([block for block in self.blocks if block.examples.step == number])
        return used(found, self.step(number))


@dataclass(frozen=True, eq=False)
class Used:
    """Gradients of a step as the optimizer used them; made by `used`."""

    source: Source
    share: float
    unused: frozenset[int]

    @property
    def reiterable(self) -> bool:
        """As the underlying source."""
        return self.source.reiterable

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `Source.map`; blocks that were not used are not visited."""

        def weighed(examples: Examples) -> Examples:
            weight = examples.weight
            return replace(examples, weight=None if weight is None else weight * self.share)

        def run(name: str, leaf: Leaf, examples: Examples) -> T | None:
            if examples.micro in self.unused:
                return None
            share = None if self.share == 1 else torch.full((len(examples),), self.share, dtype=torch.float64)
            return visit(name, scale_examples(leaf, share), weighed(examples))

        for examples, values in self.source.map(run):
            if examples.micro not in self.unused:
                yield weighed(examples), values  # type: ignore[misc]


def used(source: Source, step: Step) -> Source:
    """Captured gradients of a step's examples as they entered the gradient before clipping.

    Args:
        source: The blocks of the step, as captured.
        step: The step.

    Returns:
        The blocks that the optimizer used, gradients and loss weights c_i multiplied by the step's share.
    """
    return Used(source, step.share, frozenset(step.unused))
