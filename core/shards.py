"""Layers whose weight is cut over processes (tensor parallel training): what each process counts.

Column-parallel layers hold rows of G = sum_t g_t a_t^T (their own outputs), row-parallel ones columns (their own
inputs).  Inner products and squared norms are sums over the entries of G, so those of the shards add up to those of
the whole,

    <G_i, V_q> = sum_ranks <G_i, V_q>_rank,   |G_i|^2 = sum_ranks |G_i|^2_rank

if every entry is counted once: the bias of a row-parallel layer, and layers that are not cut, are the same everywhere.
Norms themselves, cosines and curvature of shards do not add up.
"""

from dataclasses import replace
from typing import Literal, TypeAlias

from attrax.core.leaves import Factorized, Leaf

Cut: TypeAlias = Literal["outputs", "inputs", "none"]


def counted_once(leaf: Leaf, cut: Cut, rank: int) -> Leaf | None:
    """What this process counts of a leaf made of the factors it has.

    Args:
        leaf: Gradients of the local shard, from the layer's local inputs and output gradients.
        cut: "outputs" (column-parallel: its own rows of the weight and bias), "inputs" (row-parallel: its own columns
            of the weight, the whole bias) or "none" (the whole layer).
        rank: Rank of this process among those that hold the shards.

    Returns:
        The leaf without what rank 0 counts; None if nothing is left.

    Raises:
        ValueError: If `cut` is unknown, or inputs are cut in a leaf that has none.

    >>> import torch
    >>> from attrax.core import factorized
    >>> leaf = factorized("down.weight", torch.ones(2, 3, 4), torch.ones(2, 3, 5), bias="down.bias")
    >>> [counted_once(leaf, "inputs", rank).bias for rank in (0, 1)], counted_once(leaf, "none", 1)
    ([True, False], None)
    """
    if cut not in ("outputs", "inputs", "none"):
        raise ValueError(f"counted_once: cut: got {cut!r}; expected 'outputs', 'inputs' or 'none'.")
    if rank == 0 or cut == "outputs":
        return leaf
    if cut == "none":
        return None
    if not isinstance(leaf, Factorized):
        raise ValueError(
            f"counted_once: a {type(leaf).__name__} leaf has no inputs to be cut; row-parallel layers are Factorized."
        )
    return replace(leaf, bias=False, parts=tuple(replace(part, bias=None) for part in leaf.parts))
