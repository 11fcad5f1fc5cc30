"""Blocks whose examples a callback has weighed anew in `.grad`: what is recorded is what the optimizer uses.

Selection multiplies each example's share in the gradient of a parameter by a factor: 0 where it was dropped, and what
renormalizes the loss where it was kept.  An example that no parameter was trained on is left out of the block.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attrax.core import Block, Factorized, Leaf, Materialized, covers, scale_examples, take_block
from attrax.core.algebra import on_gradient, wide
from attrax.core.leaves import batch_size

Factors = Mapping[str, Tensor]
"""Factor of each example [B], float64, by weight parameter; 1 for those that are not named."""


def reweighed(block: Block, factors: Factors) -> tuple[Block, Tensor]:
    """The block as its examples entered `.grad`, and which of them it still holds [B].

    Loss weights are multiplied by an example's factor where that is the same for all parameters; else they are unknown.

    >>> from attrax.core import Examples, GradTree, materialized
    >>> grads = GradTree({"w": materialized("w", torch.ones(2, 3))})
    >>> left, used = reweighed(Block(grads, Examples(("a", "b"))), {"w": torch.tensor([0.0, 2.0])})
    >>> left.examples.ids, left.grads["w"].w
    (('b',), tensor([[2., 2., 2.]]))
    """
    if not factors:
        return block, torch.ones(len(block.examples), dtype=torch.bool)
    each = torch.stack(list(factors.values())).double()
    used = (each != 0).any(0)
    left, each = block if bool(used.all()) else take_block(block, used), each[:, used]
    alike, known = bool((each == each[0]).all()), left.examples.weight
    weight = known.cpu() * each[0] if known is not None and alike else None
    own = dict(zip(factors, each, strict=True))
    grads = left.grads.map(lambda _, leaf: _weighed(leaf, own))
    return Block(grads, replace(left.examples, weight=weight)), used


def rescaled(block: Block, scale: Mapping[str, float]) -> Block:
    """The block of an earlier backward whose share in `.grad` was multiplied by a number, by weight parameter."""
    ones = torch.ones(len(block.examples), dtype=torch.float64)
    return reweighed(block, {n: r * ones for n, r in scale.items()})[0]


def _weighed(leaf: Leaf, factors: Factors) -> Leaf:
    ones = torch.ones(batch_size(leaf), dtype=torch.float64)
    parts = [factors.get(part.weight, ones) for part in leaf.parts]
    if all(torch.equal(x, ones) for x in parts):
        return leaf
    if all(torch.equal(x, parts[0]) for x in parts):
        return scale_examples(leaf, parts[0])
    assert isinstance(leaf, Factorized | Materialized), f"{covers(leaf)} in one {type(leaf).__name__}"
    stacked = torch.cat([x[:, None].expand(-1, p.width) for x, p in zip(parts, leaf.parts, strict=True)], 1)
    axis = 1 if isinstance(leaf, Factorized) else 2
    return on_gradient(leaf, lambda g: g * stacked.unsqueeze(axis).to(g.device, wide(g.dtype)))
