"""Influence with Kronecker-factored curvature: K-FAC and EK-FAC, on full or projected factors.

    s[i, q] = sum_layers <G_i, (H + damping)^-1 V_q>       H from `attrax.core.kronecker`

A fit is a value (`Curvature`): scored again with another damping without refitting.  Conventions (each stated in the
scores): gradients of the summed loss; Fisher "empirical" (dataset labels) or "sampled" (labels drawn from the model,
needs a live source); damping = factor x mean eigenvalue of each layer; linear-type layers without the output head
unless `scope` says otherwise; leaves out of scope do not enter the score.

References: Martens and Grosse 2015; George et al. 2018; Grosse et al. 2023 (arXiv:2308.03296), eq. 20-21.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Eigenbasis,
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
    eigenbasis,
    ekfac_eigenvalues,
    fold,
    has_factors,
    kfac_eigenvalues,
    low_rank,
    merge_spectrum,
    precondition,
    projected,
    relative_damping,
    selected,
    spectrum,
    targeted,
    transformed,
)
from attrax.core.kronecker import MAX_DIM, Spectrum, eigen_cost, update
from attrax.core.lowrank import has_rank
from attrax.core.products import sq_norms_leaf
from attrax.core.pytree import register_value
from attrax.core.ranks import ALONE, Ranks
from attrax.core.scores import interleaved
from attrax.core.source import one_fingerprint, resampled, several_passes
from attrax.methods.pairwise import pairwise

Fisher: TypeAlias = Literal["empirical", "sampled"]
Scope: TypeAlias = Callable[[str, Leaf], bool]


@dataclass(frozen=True, eq=False)
class Curvature:
    """A fitted Kronecker-factored curvature.

    Attributes:
        bases: Eigenbasis per leaf.
        eigenvalues: L per leaf [No, Ni]: K-FAC products or EK-FAC second moments.
        method: "kfac" or "ekfac".
        fisher: "empirical" or "sampled".
        target: Loss convention of the gradients.
        fingerprint: Parameters of the fit; scoring at others is refused.
        examples: Number of examples in the fit.
        projection: The projection the factors were seen through, or None.
    """

    bases: Mapping[str, Eigenbasis]
    eigenvalues: Mapping[str, Tensor]
    method: str
    fisher: Fisher
    target: Target
    fingerprint: str
    examples: int
    projection: Projection | Subspace | None = None


register_value(
    Curvature,
    arrays=("bases", "eigenvalues"),
    static=("method", "fisher", "target", "fingerprint", "examples", "projection"),
)


def _view(scope: Scope, projection: Projection | Subspace | None, *, keep_rows: bool) -> Transform:
    keep = selected(scope)
    return keep if projection is None else chain(keep, projected(projection, keep_rows=keep_rows))


def _fit_source(train: Source, fisher: Fisher, target: Target, seed: int, operation: str) -> Source:
    if fisher not in ("empirical", "sampled"):
        raise ValueError(f"{operation}: fisher: got {fisher!r}; expected 'empirical' or 'sampled'.")
    return targeted(resampled(train, seed, operation) if fisher == "sampled" else train, target)


def fit_kfac(
    train: Source,
    *,
    fisher: Fisher = "empirical",
    target: Target = "sum",
    scope: Scope = has_factors,
    projection: Projection | Subspace | None = None,
    max_dim: int = MAX_DIM,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> Curvature:
    """Fit K-FAC: covariances of layer inputs and output gradients, decomposed.

    Args:
        train: Gradients of the fit set at fixed parameters, factored.
        fisher: "empirical" (labels of the data) or "sampled" (labels drawn from the model).
        target: Loss convention; "sum" makes the fit independent of batch size.
        scope: ``(name, leaf) -> bool``, which leaves take part; by default factored ones of linear-type layers
            (ungrouped convolutions among them) without embeddings and the output head.
        projection: Two-sided projection through which factors are seen (LoGRA-style curvature).
        max_dim: A side wider than this keeps only its diagonal.
        seed: Seed of the sampled labels.
        ranks: The processes that fit together (`attrax.processes()`), each on a share of the examples: their sums are
            added up, and each decomposes some of the layers.  All of them get the same curvature, bit for bit.

    Returns:
        The curvature.

    Raises:
        ValueError: If the source is empty, no leaf is in scope, parameters move, or labels cannot be sampled.

    >>> import torch
    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.randn(8, 1, 2), torch.randn(8, 1, 3))})
    >>> source = Blocks([Block(grads, Examples(tuple("abcdefgh"), weight=torch.ones(8)))])
    >>> fit_kfac(source).eigenvalues["w"].shape
    torch.Size([3, 2])
    """
    bases, fingerprint, count = _fit_bases(
        train, fisher, target, scope, projection, max_dim, seed, "fit_kfac", ranks
    )
    values = {name: kfac_eigenvalues(basis) for name, basis in bases.items()}
    return Curvature(bases, values, "kfac", fisher, target, fingerprint, count, projection)


def _fit_bases(
    train: Source,
    fisher: Fisher,
    target: Target,
    scope: Scope,
    projection: Projection | Subspace | None,
    max_dim: int,
    seed: int,
    operation: str,
    ranks: Ranks,
) -> tuple[dict[str, Eigenbasis], str, int]:
    source = _fit_source(train, fisher, target, seed, operation)
    rows = transformed(source, _view(scope, projection, keep_rows=True))
    sums, fingerprint, count = fold(
        lambda state, leaf: update(state, leaf, max_dim=max_dim), rows, operation=operation, ranks=ranks
    )
    if not sums:
        raise ValueError(
            f"{operation}: no leaf is in scope. Pass scope=, or capture linear-type layers factored (not compacted)."
        )
    whole = {n: replace(x, examples=torch.full_like(x.examples, count)) for n, x in sums.items()}
    return ranks.dealt(eigenbasis, whole, eigen_cost), fingerprint, count


def fit_ekfac(
    train: Source,
    *,
    fisher: Fisher = "empirical",
    target: Target = "sum",
    scope: Scope = has_factors,
    projection: Projection | Subspace | None = None,
    max_dim: int = MAX_DIM,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> Curvature:
    """Fit EK-FAC: the K-FAC eigenbasis, then the exact second moments of the gradients in it (a second pass).

    Arguments, result and errors as `fit_kfac`; the source must be re-iterable.  Sampled labels are the same in both
    passes.

    >>> import torch
    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.randn(8, 1, 2), torch.randn(8, 1, 3))})
    >>> source = Blocks([Block(grads, Examples(tuple("abcdefgh"), weight=torch.ones(8)))])
    >>> fit_ekfac(source).method
    'ekfac'
    """
    several_passes(train, "fit_ekfac")
    bases, fingerprint, count = _fit_bases(
        train, fisher, target, scope, projection, max_dim, seed, "fit_ekfac", ranks
    )
    source = _fit_source(train, fisher, target, seed, "fit_ekfac")

    def second_moments(name: str, leaf: Leaf) -> Spectrum:
        return spectrum(leaf, bases[name])

    view = transformed(source, _view(scope, projection, keep_rows=True))
    totals: dict[str, Spectrum] = {}

    def visit(name: str, leaf: Leaf, _: object) -> None:
        new = second_moments(name, leaf)
        totals[name] = merge_spectrum(totals[name], new) if name in totals else new

    for examples, _ in view.map(visit):
        one_fingerprint(fingerprint, examples, "fit_ekfac")
    values = {
        name: ekfac_eigenvalues(replace(total, examples=torch.full_like(total.examples, count)))
        for name, total in ranks.total(totals).items()
    }
    return Curvature(bases, values, "ekfac", fisher, target, fingerprint, count, projection)


def preconditioned(curvature: Curvature, *, damping: float = 0.1) -> Transform:
    """The damped inverse curvature as a transform; leaves outside the fit are dropped.

    Args:
        curvature: A fit.
        damping: Factor of each layer's mean eigenvalue; must be positive unless the spectrum has full rank.

    Raises:
        ValueError: If `damping` is negative.
    """
    amounts = damping_amounts(curvature, damping)

    def run(name: str, leaf: Leaf) -> Leaf | None:
        if name not in curvature.bases:
            return None
        return precondition(leaf, curvature.bases[name], curvature.eigenvalues[name], damping=amounts[name])

    return run


def damping_amounts(curvature: Curvature, factor: float) -> dict[str, Tensor]:
    """`factor` times the mean eigenvalue of each layer, [No, 1] per leaf.

    Raises:
        ValueError: If `factor` is negative.
    """
    if factor < 0:
        raise ValueError(f"damping: got {factor}; expected a factor >= 0 of the mean eigenvalue.")
    return {
        name: relative_damping(values, curvature.bases[name].parts, factor)
        for name, values in curvature.eigenvalues.items()
    }


def influence(
    curvature: Curvature,
    train: Source,
    query: Source,
    *,
    damping: float = 0.1,
    query_rank: int | None = None,
    hardware: Hardware = CPU,
) -> Scores:
    """Score with a fitted curvature, ``s = <G_i, (H + damping)^-1 V_q>`` (Grosse et al. 2023, eq. 21).

    Args:
        curvature: A fit by `fit_kfac` or `fit_ekfac`, reusable with any damping.
        train: Train gradients at the parameters of the fit.
        query: Query gradients at the same parameters.
        damping: Factor of each layer's mean eigenvalue.
        query_rank: Keep each preconditioned query of a layer as its best approximation of this rank (Grosse et al.
            2023, section 3.2.2): r (Ni + No) numbers instead of Ni No.  The largest error of a query, relative to its
            norm, is stated in the scores; no score changes by more than that times both norms.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [N, Q]; higher = more helpful.  The factor 1/n of a removal estimate is not applied.

    Raises:
        ValueError: If parameters or layers differ from the fit's.

    >>> import torch
    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.randn(8, 1, 2), torch.randn(8, 1, 3))})
    >>> source = Blocks([Block(grads, Examples(tuple("abcdefgh"), weight=torch.ones(8)))])
    >>> influence(fit_ekfac(source), source, source).values.shape
    torch.Size([8, 8])
    """
    name = curvature.method
    in_fit = selected(lambda leaf_name, _: leaf_name in curvature.bases)
    project = () if curvature.projection is None else (projected(curvature.projection),)
    view = chain(in_fit, *project)
    solve = chain(view, preconditioned(curvature, damping=damping))
    shrink, missed = _shrunk(query_rank)
    queries = collect(targeted(query, curvature.target), chain(solve, shrink), operation=name)
    one_fingerprint(curvature.fingerprint, queries.examples, name)
    about = {
        "method": name,
        "fisher": curvature.fisher,
        "damping": f"{damping} x mean eigenvalue of each layer",
        "target": curvature.target,
        "projection": curvature.projection.basis if curvature.projection else "none",
        "unit": "loss x examples",
    } | missed()
    rows = transformed(targeted(train, curvature.target), view)
    return pairwise(rows, queries, about=about, hardware=hardware, operation=name)


def _shrunk(rank: int | None) -> tuple[Transform, Callable[[], dict[str, str]]]:
    """The best approximation of this rank as a transform, and a description of what it has missed so far."""
    dropped: list[Tensor] = []
    norms: list[Tensor] = []

    def shrink(_: str, leaf: Leaf) -> Leaf:
        if rank is None or not has_rank(leaf):
            return leaf
        found = low_rank(leaf, rank)
        dropped.append(found.error.square())
        norms.append(sq_norms_leaf(leaf))
        return found.leaf

    def describe() -> dict[str, str]:
        if rank is None or not dropped:
            return {}
        worst = max(
            float((e / n.clamp_min(torch.finfo(n.dtype).tiny)).max())
            for e, n in zip(dropped, norms, strict=True)
        )
        return {
            "query_rank": f"{rank}, largest error of a query in a layer {worst**0.5:.2g} of its norm there"
        }

    return shrink, describe


def kfac(
    train: Source,
    query: Source,
    *,
    damping: float = 0.1,
    fisher: Fisher = "empirical",
    target: Target = "sum",
    scope: Scope = has_factors,
    projection: Projection | Subspace | None = None,
    query_rank: int | None = None,
    seed: int = 0,
    hardware: Hardware = CPU,
    ranks: Ranks = ALONE,
) -> Scores:
    """K-FAC influence in one call: `fit_kfac`, then `influence`; arguments as there, `ranks` as in `ekfac`."""
    several_passes(train, "kfac")
    curvature = fit_kfac(
        train, fisher=fisher, target=target, scope=scope, projection=projection, seed=seed, ranks=ranks
    )
    own = influence(curvature, train, query, damping=damping, query_rank=query_rank, hardware=hardware)
    return interleaved(ranks.listed(own))


def ekfac(
    train: Source,
    query: Source,
    *,
    damping: float = 0.1,
    fisher: Fisher = "empirical",
    target: Target = "sum",
    scope: Scope = has_factors,
    projection: Projection | Subspace | None = None,
    query_rank: int | None = None,
    seed: int = 0,
    hardware: Hardware = CPU,
    ranks: Ranks = ALONE,
) -> Scores:
    """EK-FAC influence in one call: `fit_ekfac`, then `influence`; arguments as there.

    On several processes, ``ekfac(train, query, ranks=attrax.processes())``: `train` is the process's share, e.g. of
    rows[rank::ranks], `query` the same everywhere.  Each process fits on its share and scores it, and all of them
    return the scores of all examples, in the order of the data.

    >>> import torch
    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.randn(8, 1, 2), torch.randn(8, 1, 3))})
    >>> source = Blocks([Block(grads, Examples(tuple("abcdefgh"), weight=torch.ones(8)))])
    >>> ekfac(source, source).about["method"]
    'ekfac'
    """
    curvature = fit_ekfac(
        train, fisher=fisher, target=target, scope=scope, projection=projection, seed=seed, ranks=ranks
    )
    own = influence(curvature, train, query, damping=damping, query_rank=query_rank, hardware=hardware)
    return interleaved(ranks.listed(own))
