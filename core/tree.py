"""Gradient trees and blocks: the values that flow from front-ends to methods.

A `GradTree` is an immutable mapping *parameter name -> leaf*.  A `Block` is a GradTree of some examples together with
what is known about them (`Examples`).  Both are pytrees.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attrax.core.leaves import Leaf, Sum, batch_size, covers
from attrax.core.pytree import register_value, tree_map
from attrax.core.transfers import near

Target: TypeAlias = Literal["sum", "mean", "as_trained"]


@dataclass(frozen=True, eq=False, init=False, repr=False)
class GradTree(Mapping[str, Leaf]):
    """Immutable mapping from canonical parameter name to leaf, in layer order.

    >>> from attrax.core import diagonal
    >>> tree = GradTree({"ln.weight": diagonal("ln.weight", torch.ones(2, 3, 4), torch.ones(2, 3, 4))})
    >>> list(tree), len(tree)
    (['ln.weight'], 1)
    """

    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        object.__setattr__(self, "leaves", tuple(leaves.values()))
        object.__setattr__(self, "names", tuple(leaves))

    def __getitem__(self, name: str) -> Leaf:
        if name not in self.names:
            raise KeyError(f"'{name}' is not a leaf of this tree; it has {list(self.names)}")
        return self.leaves[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        lines = [f"  {name}: {describe(leaf)}" for name, leaf in self.items()]
        return "\n".join(["GradTree(", *lines, ")"])

    def map(self, function: Callable[[str, Leaf], Leaf | None]) -> "GradTree":
        """A new tree of ``function(name, leaf)``; leaves mapped to None are dropped."""
        mapped = {name: function(name, leaf) for name, leaf in self.items()}
        return GradTree({name: leaf for name, leaf in mapped.items() if leaf is not None})


register_value(GradTree, arrays=("leaves",), static=("names",))


@dataclass(frozen=True, eq=False)
class Examples:
    """What is known about the examples of a block.

    Attributes:
        ids: Example ids, one a row.
        step: Optimizer step at which the gradients were taken (0 for a fixed model).
        micro: Index of the block within its step (gradient accumulation).
        weight: c [B], the factor that the loss put on each example's summed loss; the leaves hold c_b * G_b.
            None if unknown: then only the target "as_trained" exists.
        tokens: n [B], loss terms (predicted tokens) of each example, or None if unknown.
        fingerprint: Identifies the parameter values; equal fingerprints mean equal parameters.
        learning_rate: Learning rate of the step, or None outside training.
        absent: Selected parameters that were not reached: their gradients are zero, and there is no leaf.
    """

    ids: tuple[str, ...]
    step: int = 0
    micro: int = 0
    weight: Float[Tensor, " B"] | None = None
    tokens: Int[Tensor, " B"] | None = None
    fingerprint: str = ""
    learning_rate: float | None = None
    absent: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Block:
    """Per-example gradients of some examples: a GradTree and its Examples."""

    grads: GradTree
    examples: Examples


register_value(
    Examples,
    arrays=("weight", "tokens"),
    static=("ids", "step", "micro", "fingerprint", "learning_rate", "absent"),
)
# `register_value` stores arrays before static fields; unflatten sets them by name, so field order is free.
register_value(Block, arrays=("grads", "examples"))


def describe(leaf: Leaf) -> str:
    """One line for a leaf: its type, shapes and the parameters it covers.

    >>> from attrax.core import diagonal
    >>> describe(diagonal("ln.weight", torch.ones(2, 3, 4), torch.ones(2, 3, 4)))
    'Diagonal(x[2, 3, 4], g[2, 3, 4]) of ln.weight'
    """
    kind = type(leaf).__name__
    if isinstance(leaf, Sum):
        inner = " + ".join(describe(use).split(" of ")[0] for use in leaf.uses)
        return f"Sum({inner}) of {', '.join(covers(leaf))}"
    fields = [name for name in ("ids", "a", "x", "g", "w") if hasattr(leaf, name)]
    shapes = ", ".join(f"{name}{list(getattr(leaf, name).shape)}" for name in fields)
    return f"{kind}({shapes}) of {', '.join(covers(leaf))}"


def target_scale(examples: Examples, target: Target) -> Float[Tensor, " B"] | None:
    """Factor per example that turns captured gradients c_b G_b into the declared target.

    "as_trained": c_b G_b (factor 1) · "sum": G_b (1 / c_b) · "mean": G_b / n_b.  None means a factor of 1.

    Raises:
        ValueError: If the block does not know the numbers that the target needs.

    >>> target_scale(Examples(("a", "b"), weight=torch.tensor([0.5, 0.25])), "sum")
    tensor([2., 4.])
    """
    if target not in ("sum", "mean", "as_trained"):
        raise ValueError(f"target: got {target!r}; expected 'sum', 'mean' or 'as_trained'.")
    if target == "as_trained":
        return None
    if examples.weight is None:
        raise ValueError(
            f"target '{target}': these gradients carry an unknown loss weight. "
            "Declare the loss at capture (loss='sum', 'token_mean', 'example_mean'), or use target='as_trained'."
        )
    scale = torch.where(examples.weight != 0, 1 / examples.weight, torch.zeros_like(examples.weight))
    if target == "sum":
        return None if bool((examples.weight == 1).all()) else scale
    if examples.tokens is None:
        raise ValueError(
            "target 'mean': the number of loss tokens per example is unknown. Declare the loss at capture as a "
            "function (inputs, examples) -> (c, n), or use target='sum'."
        )
    return scale / examples.tokens.clamp_min(1)


def concat_examples(parts: Sequence[Examples]) -> Examples:
    """Join the examples of several blocks of one step; the fields they share must agree.

    Absent is what all parts lack.

    Raises:
        ValueError: If fingerprints differ.
    """
    if len({part.fingerprint for part in parts}) > 1:
        raise ValueError("concat_examples: blocks were taken at different parameters.")

    def join(values: list[Any]) -> Any:
        return None if any(value is None for value in values) else torch.cat(values)

    return Examples(
        tuple(i for part in parts for i in part.ids),
        parts[0].step,
        parts[0].micro,
        join([part.weight for part in parts]),
        join([part.tokens for part in parts]),
        parts[0].fingerprint,
        parts[0].learning_rate,
        tuple(n for n in parts[0].absent if all(n in part.absent for part in parts)),
    )


def take_block(block: Block, keep: Bool[Tensor, " B"]) -> Block:
    """The block of some of its examples.

    Args:
        block: A block of B examples.
        keep: Which of them, on the host.

    >>> take_block(Block(GradTree({}), Examples(("a", "b"))), torch.tensor([False, True])).examples.ids
    ('b',)
    """
    examples, rows = block.examples, near(keep.nonzero().flatten())
    kept = replace(
        examples,
        ids=tuple(i for i, k in zip(examples.ids, keep.tolist(), strict=True) if k),
        weight=None if examples.weight is None else examples.weight[keep],
        tokens=None if examples.tokens is None else examples.tokens[keep],
    )
    return Block(block.grads.map(lambda _, leaf: tree_map(lambda x: x[rows(x.device)], leaf)), kept)


def block_rows(block: Block) -> int:
    """Number of examples in a block, checked against every leaf.

    Raises:
        ValueError: If a leaf holds another number of examples than the block has ids.
    """
    for name, leaf in block.grads.items():
        if batch_size(leaf) != len(block.examples):
            raise ValueError(
                f"block: leaf '{name}' holds {batch_size(leaf)} examples, the block has {len(block.examples)} ids."
            )
    return len(block.examples)
