"""The right answers in plain torch: gradients built row by row in float64, definitions written out on them."""

import torch
from torch import Tensor

from attrax.core import Diagonal, Factorized, GradTree, Grouped, Leaf, Lookup, Materialized, Sum

WITHIN = {torch.float64: 1e-10, torch.float32: 1e-5}
"""What a result may differ by, relative to the largest entry of the right answer, by the dtype of the result."""


def rows(leaf: Leaf) -> Tensor:
    """Gradient of every row, [B, T, No, Ni]; a vector parameter has No = 1, groups lie one below the other."""
    match leaf:
        case Factorized():
            ones = torch.ones(*leaf.a.shape[:2], int(leaf.bias), dtype=torch.float64)
            a = torch.cat([leaf.a.double(), ones], -1)
            return leaf.g.double().unsqueeze(-1) * a.unsqueeze(-2)
        case Lookup():
            hot = (leaf.ids.unsqueeze(-1) == torch.arange(leaf.rows)).double()
            return hot.unsqueeze(-1) * leaf.g.double().unsqueeze(-2)
        case Diagonal():
            return (leaf.x.double() * leaf.g.double()).unsqueeze(-2)
        case Grouped():
            blocks = leaf.g.double().unsqueeze(-1) * leaf.a.double().unsqueeze(-2)
            return torch.cat(list(blocks.unbind(1)), 2)
        case _:
            raise TypeError(f"{type(leaf).__name__} has no rows")


def gradient(leaf: Leaf) -> Tensor:
    """Per-example gradients, [B, No, Ni]; a vector parameter has No = 1."""
    match leaf:
        case Sum():
            return torch.stack([gradient(use) for use in leaf.uses]).sum(0)
        case Materialized():
            w = leaf.w.double()
            return w.flatten(1, -2) if w.ndim > 2 else w.flatten(1).unsqueeze(1)
        case _:
            return rows(leaf).sum(1)


def vectors(tree: GradTree) -> Tensor:
    """Per-example gradients over all leaves, [B, P]."""
    return torch.cat([gradient(leaf).flatten(1) for leaf in tree.values()], 1)


def token_shares(leaf: Leaf, query: Leaf) -> Tensor:
    """Per-position shares of the inner products, [B, T, Q]; several calls of a layer add up per position."""
    if isinstance(leaf, Sum):
        return torch.stack([token_shares(use, query) for use in leaf.uses]).sum(0)
    assert not isinstance(leaf, Materialized)
    shares = torch.einsum("btoi,qoi->btq", rows(leaf), gradient(query))
    B, T, Q = shares.shape
    return shares.reshape(B, leaf.calls, T // leaf.calls, Q).sum(1)


def assert_same(actual: Tensor, expected: Tensor, within: float | None = None) -> None:
    """Equal up to `within` (by default `WITHIN` of the actual's dtype) times the largest expected entry."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    if not expected.numel():
        return
    scale = expected.double().abs().max().item()
    error = (actual.double() - expected.double()).abs().max().item()
    allowed = WITHIN[actual.dtype] if within is None else within
    assert error <= allowed * scale, (
        f"off by {error:.3g}, largest entry {scale:.3g}, allowed {allowed:.3g} of it"
    )
