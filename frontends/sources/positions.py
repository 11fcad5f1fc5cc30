"""Positions as examples: a source seen through `by_position` yields one example for every position of every example.

A gradient is a sum over positions, and every method but self-influence is linear in the train gradient.  So the scores
of positions add up to the score of their example: they say which tokens carry it, for any such method, without the
method knowing.  A position is where the gradient enters a layer: the model has read that token and predicts the next.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from attrax.core import Examples, Leaf, Source
from attrax.core.algebra import nothing
from attrax.core.leaves import Diagonal, Factorized, Grouped, Lookup, Materialized, Sum
from attrax.core.source import Visit

T = TypeVar("T")


class NoPositions(ValueError):
    """Gradients that have no rows, or rows that are no positions."""


@dataclass(frozen=True, eq=False)
class ByPosition:
    """A source whose examples are positions; made by `by_position`."""

    source: Source
    lengths: Mapping[str, int]

    @property
    def reiterable(self) -> bool:
        """As the underlying source."""
        return self.source.reiterable

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `attrax.core.source.Source.map`."""

        def each(name: str, leaf: Leaf, examples: Examples) -> T:
            return visit(name, _split(name, leaf, self._width(examples)), self._positions(examples))

        for examples, values in self.source.map(each):
            yield self._positions(examples), values

    def _width(self, examples: Examples) -> int:
        return max(self.lengths[name] for name in examples.ids)

    def _positions(self, examples: Examples) -> Examples:
        width = self._width(examples)
        ids = tuple(name for name in examples.ids for _ in range(width))

        def repeat(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.repeat_interleave(width)

        return replace(examples, ids=ids, weight=repeat(examples.weight), tokens=repeat(examples.tokens))


def by_position(source: Source, lengths: Mapping[str, int]) -> ByPosition:
    """The source whose examples are the positions of its examples.

    Args:
        source: Gradients with rows (factored, not projected to dense ones).
        lengths: Number of positions of every example; a block is as wide as its longest.

    Returns:
        A source with ``width`` examples for each example of a block, all under that example's id, in order; positions
        beyond an example's length have no gradient.

    >>> from attrax.core import Block, Blocks, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.ones(1, 3, 2), torch.ones(1, 3, 2))})
    >>> source = by_position(Blocks([Block(grads, Examples(("x",)))]), {"x": 3})
    >>> [(examples.ids, leaves) for examples, leaves in source.map(lambda name, leaf, _: tuple(leaf.a.shape))]
    [(('x', 'x', 'x'), {'w': (3, 1, 2)})]
    """
    return ByPosition(source, lengths)


def _split(name: str, leaf: Leaf, width: int) -> Leaf:
    """The leaf with B x width examples of one row (and one for each further call of the layer)."""

    def rows(x: Tensor, calls: int) -> Tensor:
        B, length = x.shape[0], x.shape[1] // calls
        x = x.unflatten(1, (calls, length))[:, :, :width]
        padding = x.new_full((B, calls, width - x.shape[2], *x.shape[3:]), nothing(x))
        return torch.cat([x, padding], 2).transpose(1, 2).flatten(0, 1)

    _check_positions(name, leaf, width)
    match leaf:
        case Sum():
            return replace(leaf, uses=tuple(_split(name, use, width) for use in leaf.uses))
        case Factorized():
            return replace(leaf, a=rows(leaf.a, leaf.calls), g=rows(leaf.g, leaf.calls))
        case Lookup():
            return replace(leaf, ids=rows(leaf.ids, leaf.calls), g=rows(leaf.g, leaf.calls))
        case Diagonal():
            return replace(leaf, x=rows(leaf.x, leaf.calls), g=rows(leaf.g, leaf.calls))
        case Grouped():
            if not leaf.positions:
                raise NoPositions(
                    f"by_position: leaf '{name}': its rows are those routed to each expert, not positions of the "
                    "example. Leave it out of the selection."
                )
            a, g = (rows(x.transpose(1, 2), leaf.calls).transpose(1, 2) for x in (leaf.a, leaf.g))
            return replace(leaf, a=a, g=g)
        case Materialized():
            raise NoPositions(
                f"by_position: leaf '{name}' is materialized and has no positions. Use factored gradients."
            )


def _check_positions(name: str, leaf: Leaf, width: int) -> None:
    """Refuse rows that are no positions: a convolution's, those of every head of a norm."""
    if isinstance(leaf, Sum | Materialized):
        return
    axis = 3 if isinstance(leaf, Grouped) else 2
    g = leaf.g.unflatten(axis - 1, (leaf.calls, -1))
    length = g.shape[axis]
    if length > width and bool(g.narrow(axis, width, length - width).any()):
        raise NoPositions(
            f"by_position: leaf '{name}' has {length} rows an example, and the longest example has {width} positions: "
            "its rows are not positions. Leave it out of the selection, or correct `lengths`."
        )
