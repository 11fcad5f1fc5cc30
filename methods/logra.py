"""LoGRA: influence with the full Fisher of two-sided projected gradients (Choe et al. 2024, arXiv:2405.13954).

Per layer, with projected gradients x_i = vec(P_g G_i P_a^T) in R^d, d = Ki Ko,

    F = (1/n) sum_i x_i x_i^T,   s[i, q] = sum_layers x_i^T (F + damping tr(F)/d I)^-1 x_q

The curvature is a d x d matrix per layer (dim=16: 256 x 256; dim=64: 4096 x 4096).  For Kronecker-factored curvature
on the same projection use `ekfac(..., projection=Projection(64))`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Hardware,
    Leaf,
    Projection,
    Scores,
    Source,
    Subspace,
    Target,
    Transform,
    chain,
    collect,
    fold,
    is_linear,
    materialize_leaf,
    projected,
    targeted,
    transformed,
)
from attrax.core.algebra import wide
from attrax.core.ranks import ALONE, Ranks
from attrax.core.scores import interleaved
from attrax.core.source import one_fingerprint, several_passes
from attrax.methods.kfac import Scope
from attrax.methods.pairwise import pairwise


@dataclass(frozen=True, eq=False)
class ProjectedFisher:
    """Empirical Fisher of projected gradients.

    Attributes:
        fisher: Per leaf, one F [d, d] for each stacked part.
        projection: The projection used.
        target: Loss convention.
        fingerprint: Parameters of the fit.
        examples: n.
    """

    fisher: Mapping[str, tuple[Tensor, ...]]
    projection: Projection | Subspace
    target: Target
    fingerprint: str
    examples: int


def _blocks(leaf: Leaf) -> list[Tensor]:
    """Projected gradients of each part, flattened: [B, d]."""
    w = materialize_leaf(leaf).w
    return [block.flatten(1) for block in w.split([part.width for part in leaf.parts], 1)]


def fit_logra(
    train: Source,
    *,
    projection: Projection | Subspace,
    target: Target = "sum",
    scope: Scope = is_linear,
    ranks: Ranks = ALONE,
) -> ProjectedFisher:
    """Accumulate F per layer in one pass.

    Args:
        train: Gradients of the fit set at fixed parameters (or already projected with `projection`).
        projection: Two-sided projection, random or to a fitted subspace (PCA-initialised LoGRA).
        target: Loss convention.
        scope: Which leaves take part.
        ranks: The processes that fit together (`attrax.processes()`), each on a share of the examples.

    Returns:
        The Fisher blocks.

    Raises:
        ValueError: If the source is empty, out of scope, or its parameters move.

    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.randn(8, 1, 5), torch.randn(8, 1, 6))})
    >>> source = Blocks([Block(grads, Examples(tuple("abcdefgh"), weight=torch.ones(8)))])
    >>> fit_logra(source, projection=Projection(2)).fisher["w"][0].shape
    torch.Size([4, 4])
    """

    def add(state: tuple[Tensor, ...] | None, leaf: Leaf) -> tuple[Tensor, ...]:
        new = tuple(x.T @ x for x in _blocks(leaf))
        return new if state is None else tuple(u + v for u, v in zip(state, new, strict=True))

    view = _view(projection, scope)
    rows = transformed(targeted(train, target), view)
    sums, fingerprint, count = fold(add, rows, operation="fit_logra", ranks=ranks)
    if not sums:
        raise ValueError("fit_logra: no leaf is in scope. Pass scope=, or capture linear-type layers.")
    fisher = {name: tuple(x / count for x in blocks) for name, blocks in sums.items()}
    return ProjectedFisher(fisher, projection, target, fingerprint, count)


def _view(projection: Projection | Subspace, scope: Scope) -> Transform:
    change = projected(projection)

    def run(name: str, leaf: Leaf) -> Leaf | None:
        return change(name, leaf) if scope(name, leaf) else None

    return run


def score_logra(
    fit: ProjectedFisher,
    train: Source,
    query: Source,
    *,
    damping: float = 0.1,
    scope: Scope = is_linear,
    hardware: Hardware = CPU,
) -> Scores:
    """Score with fitted Fisher blocks (Choe et al. 2024, eq. 6 with damping relative to the mean eigenvalue).

    Args:
        fit: Result of `fit_logra`.
        train: Train gradients.
        query: Query gradients.
        damping: Factor of tr(F)/d.
        scope: Which leaves take part; as in the fit.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [N, Q]; higher = more helpful.

    Raises:
        ValueError: If parameters or layers differ from the fit's.
    """
    view = _view(fit.projection, scope)
    solve = _solver(fit, damping)
    queries = collect(targeted(query, fit.target), chain(view, solve), operation="logra")
    one_fingerprint(fit.fingerprint, queries.examples, "logra")
    about = {
        "method": "logra",
        "projection": fit.projection.basis,
        "damping": f"{damping} x mean eigenvalue of each layer",
        "target": fit.target,
        "unit": "loss x examples",
    }
    rows = transformed(targeted(train, fit.target), view)
    return pairwise(rows, queries, about=about, hardware=hardware, operation="logra")


def _solver(fit: ProjectedFisher, damping: float) -> Transform:
    if damping < 0:
        raise ValueError(f"damping: got {damping}; expected a factor >= 0 of the mean eigenvalue.")
    factors = {name: [_factor(name, f, damping) for f in blocks] for name, blocks in fit.fisher.items()}

    def run(name: str, leaf: Leaf) -> Leaf | None:
        if name not in factors:
            return None
        built = materialize_leaf(leaf)
        widths = [part.width for part in leaf.parts]
        solved = [
            torch.cholesky_solve(x.flatten(1).double().T, f).T.reshape(x.shape).to(wide(x.dtype))
            for x, f in zip(built.w.split(widths, 1), factors[name], strict=True)
        ]
        return replace(built, w=torch.cat(solved, 1))

    return run


def _factor(name: str, fisher: Tensor, damping: float) -> Tensor:
    """Cholesky factor of the damped Fisher, in float64."""
    if not bool(torch.isfinite(fisher).all()):
        raise ValueError(
            f"logra: layer '{name}': the Fisher holds non-finite values. "
            "Find the examples with non-finite gradients (on_nonfinite='skip' drops them) before fitting."
        )
    f = fisher.double()
    damped = f + damping * f.diagonal().mean() * torch.eye(len(f), dtype=f.dtype, device=f.device)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed):
        raise ValueError(f"logra: layer '{name}': the Fisher is singular; use a positive damping.")
    return factor


def logra(
    train: Source,
    query: Source,
    *,
    dim: int = 16,
    seed: int = 0,
    damping: float = 0.1,
    target: Target = "sum",
    scope: Scope = is_linear,
    hardware: Hardware = CPU,
    ranks: Ranks = ALONE,
) -> Scores:
    """LoGRA influence in one call: Rademacher two-sided projection to `dim` x `dim`, `fit_logra`, `score_logra`.

    On several processes (`ranks`), each fits on its share of the examples and scores it, as in `ekfac`.

    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.randn(8, 1, 5), torch.randn(8, 1, 6))})
    >>> source = Blocks([Block(grads, Examples(tuple("abcdefgh"), weight=torch.ones(8)))])
    >>> logra(source, source, dim=4).values.shape
    torch.Size([8, 8])
    """
    several_passes(train, "logra")
    fit = fit_logra(train, projection=Projection(dim, seed=seed), target=target, scope=scope, ranks=ranks)
    return interleaved(
        ranks.listed(score_logra(fit, train, query, damping=damping, scope=scope, hardware=hardware))
    )
