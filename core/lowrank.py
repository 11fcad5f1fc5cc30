"""Low-rank gradients: ``G_b = sum_r g_br a_br^T`` with as few rows as the gradient's rank, or fewer at a known error.

A query kept this way costs ``2 r (Ni + No)`` operations per train row instead of T (Ni + No) (its own rows) or Ni No
(built).  Factored gradients are never built: with QR decompositions g^T = Q_g R_g and a^T = Q_a R_a,

    G = Q_g (R_g R_a^T) Q_a^T,   SVD of the small R_g R_a^T

The best rank-r approximation leaves an error e_b = (sum of dropped s^2)^(1/2) in the Frobenius norm, so an inner
product with a gradient of norm n changes by at most e_b n.  A folded bias stays exact: it takes one row more.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.algebra import wide
from attrax.core.leaves import Factorized, Leaf, Materialized, batch_size
from attrax.core.tree import GradTree


@dataclass(frozen=True, eq=False, slots=True)
class LowRank:
    """A gradient of few rows and what it misses.

    Attributes:
        leaf: r rows an example (and one for a folded bias), in the same coordinates and of the same parts.
        error: e [B], Frobenius norm of what was dropped.
    """

    leaf: Factorized
    error: Float[Tensor, " B"]


def low_rank(leaf: Leaf, rank: int | None = None, tolerance: float | None = None) -> LowRank:
    """The best approximation of a matrix gradient by rows; exact unless told otherwise.

    Stacked parts are one matrix (they share `a`) and are approximated together.

    Args:
        leaf: Factorized, or Materialized with w [B, No, Ni].
        rank: r; None for as many as the gradients have.
        tolerance: Drop what is below this share of each gradient's Frobenius norm; the largest rank that an example
            needs is used for all.  With `rank`, the smaller of both.

    Returns:
        The rows and the error of each example.

    Raises:
        TypeError: If the leaf is not a matrix with two dense sides.
        ValueError: If `rank` or `tolerance` has no meaning.

    >>> from attrax.core.leaves import factorized
    >>> found = low_rank(factorized("w", torch.ones(2, 9, 4), torch.ones(2, 9, 5)))
    >>> found.leaf.g.shape, bool((found.error < 1e-4).all())
    (torch.Size([2, 1, 5]), True)
    """
    if (rank is not None and rank < 1) or (tolerance is not None and not 0 <= tolerance < 1):
        raise ValueError(
            f"low_rank: got rank={rank}, tolerance={tolerance}; expected rank >= 1 and 0 <= tolerance < 1."
        )
    match leaf:
        case Factorized():
            u, s, v = _factored_svd(leaf)
            bias = leaf.g.to(s.dtype).sum(1) if leaf.bias else None
        case Materialized() if leaf.w.ndim == 3:
            w = leaf.w.to(wide(leaf.w.dtype))
            u, s, vt = torch.linalg.svd(w[..., :-1] if leaf.bias else w, full_matrices=False)
            v, bias = vt.mT, w[..., -1] if leaf.bias else None
        case _:
            raise TypeError(
                f"low_rank: leaf '{leaf.parts[0].weight}' is {type(leaf).__name__}; expected a matrix with two dense "
                "sides (Factorized, or Materialized [B, No, Ni]). Leave it as it is, or materialize it."
            )
    kept = _rank(s, u.shape[1] + v.shape[1], rank, tolerance)
    error = s[:, kept:].square().sum(1).sqrt()
    root = s[:, None, :kept].sqrt()
    a, g = (v[..., :kept] * root).mT, (u[..., :kept] * root).mT
    if bias is not None:
        a = torch.cat([a, a.new_zeros(len(a), 1, a.shape[2])], 1)
        g = torch.cat([g, (bias - g.sum(1)).unsqueeze(1)], 1)
    return LowRank(Factorized(a, g, leaf.parts, leaf.bias, 1, leaf.basis), error)


def _factored_svd(leaf: Factorized) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD U [B, No, r], s [B, r], V [B, Ni, r] of ``g^T a`` from decompositions of its sides."""
    dtype = wide(leaf.g.dtype)
    qg, rg = torch.linalg.qr(leaf.g.to(dtype).mT)
    qa, ra = torch.linalg.qr(leaf.a.to(dtype).mT)
    u, s, vt = torch.linalg.svd(rg @ ra.mT, full_matrices=False)
    return qg @ u, s, qa @ vt.mT


def _rank(s: Float[Tensor, "B r"], width: int, rank: int | None, tolerance: float | None) -> int:
    """Rows that every example gets; at least one where there is any."""
    full = s.shape[1]
    share = max(tolerance or 0.0, torch.finfo(s.dtype).eps * width)
    tails = s.square().flip(1).cumsum(1).flip(1)
    needed = int((tails > share**2 * tails[:, :1]).sum(1).max()) if s.numel() else 0
    return min(max(needed, min(full, 1)), rank or full)


def has_rank(leaf: Leaf) -> bool:
    """Whether `low_rank` applies: a matrix gradient with two dense sides."""
    return isinstance(leaf, Factorized) or isinstance(leaf, Materialized) and leaf.w.ndim == 3


def low_rank_tree(
    grads: GradTree, rank: int | None = None, tolerance: float | None = None
) -> tuple[GradTree, Float[Tensor, " B"]]:
    """`low_rank` of every matrix leaf where it has fewer rows than the leaf; other leaves stay.

    Returns:
        The tree, and the error [B] over all leaves: with a gradient of norm n, inner products change by at most e n.

    >>> from attrax.core import factorized
    >>> tree = GradTree({"w": factorized("w", torch.randn(2, 9, 4), torch.randn(2, 9, 5))})
    >>> small, error = low_rank_tree(tree, 2)
    >>> small["w"].a.shape, error.shape
    (torch.Size([2, 2, 4]), torch.Size([2]))
    """
    squares = [torch.zeros(batch_size(next(iter(grads.values()))))]

    def reduce(_: str, leaf: Leaf) -> Leaf:
        if not has_rank(leaf):
            return leaf
        found = low_rank(leaf, rank, tolerance)
        if isinstance(leaf, Factorized) and found.leaf.g.shape[1] >= leaf.g.shape[1]:
            return leaf
        squares.append(found.error.square())
        return found.leaf

    small = grads.map(reduce)
    return small, sum(squares[1:], squares[0].to(squares[-1])).sqrt()
