"""Random maps are unbiased and vary as their formulas say, within 5 standard errors over seeds."""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch

from attrax.core import Grass, Mask, Materialized, Part, Projection, coordinates
from attrax.core.grass import grass, grass_side
from attrax.core.masks import mask_positions, masked
from attrax.core.projection import projection_matrix
from attrax.core.sides import on_sides

from .dense import gradient
from .maps import assert_mean, assert_variance, draws
from .toys import KINDS, Sizes, generator, normal

WIDTH, DIM = 16, 4
X, Y = normal(generator(5), 2, WIDTH)
Y = Y + X / 2


def no_sides(name: str, side: str, width: int) -> None:
    raise AssertionError("dense maps have no sides")


def spread(x, y):
    """V1 = |x|^2 |y|^2 + <x,y>^2 - 2 sum x^2 y^2."""
    return float((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x * y).square().sum())


def transposed(spec, side, width):
    """P^T [width, k]."""
    found = projection_matrix(spec, "w", side, width)
    assert found is not None
    return found


def masked_variance(x, y, kept):
    d = len(x)
    return d * (d - kept) / (kept * (d - 1)) * float((x * y).square().sum() - (x @ y) ** 2 / d)


VARIANCES: dict[str, tuple[Projection, float]] = {
    "gaussian": (Projection(DIM, "gaussian"), (spread(X, Y) + 2 * float((X * Y).square().sum())) / DIM),
    "rademacher": (Projection(DIM), spread(X, Y) / DIM),
    "sjlt": (Projection(DIM, "sjlt"), spread(X, Y) / DIM),
    "sjlt_of_two": (Projection(DIM, "sjlt", nonzeros=2), spread(X, Y) / DIM),
    "srht": (Projection(DIM, "srht"), spread(X, Y) / DIM * (WIDTH - DIM) / (WIDTH - 1)),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_random_matrices(name):
    spec, variance = VARIANCES[name]

    matrices = draws(4000, lambda seed: transposed(replace(spec, seed=seed), "dense", WIDTH))
    assert_mean(matrices @ matrices.mT, torch.eye(WIDTH, dtype=torch.float64))
    products = ((X @ matrices) * (Y @ matrices)).sum(1)
    assert_mean(products, float(X @ Y))
    assert_variance(products, variance)


@pytest.mark.parametrize("kept", [1, 4, 15])
def test_masks(kept):
    chosen = draws(4000, lambda seed: coordinates(Mask(kept, seed), "w", (WIDTH,))).long()
    products = WIDTH / kept * (X[chosen] * Y[chosen]).sum(1)
    assert_mean(products, float(X @ Y))
    assert_variance(products, masked_variance(X, Y, kept))


def test_grass():
    """The variance of the mask plus the mean variance of the projection of what it keeps."""
    d, kept, dim = 8, 4, 2
    x, y = X[:d], Y[:d]
    pair = Materialized(torch.stack([x, y]), (Part("w", d),))
    subsets = [list(s) for s in combinations(range(d), kept)]
    within = sum(spread(x[s], y[s]) for s in subsets) / len(subsets) * (d / kept) ** 2 / dim

    def product(seed):
        spec = Grass(dim, blowup=kept // dim, seed=seed)
        out = grass(spec, "w", pair, at=partial(mask_positions, spec.mask), sides=no_sides)
        return out.w[0] @ out.w[1]

    products = draws(2000, product)
    assert_mean(products, float(x @ y))
    assert_variance(products, masked_variance(x, y, kept) + within)


def test_gaussian_matrices_on_both_sides():
    """Formula (3.1) of the variance of <P_g M P_a^T, P_g N P_a^T>."""
    k, No, Ni = 3, 5, 4
    M, N = normal(generator(9), 2, No, Ni)
    N = N + M
    cross, inner = M.T @ N, float((M * N).sum())
    outer = M @ N.T
    size = float(M.square().sum() * N.square().sum())

    def trace(A):
        return float((A @ A).trace())

    variance = (
        (1 + 1 / k) * float(cross.square().sum()) + size / k + trace(N.T @ M)
        + (float(outer.square().sum()) + inner**2) / k
    ) / k + (float(outer.square().sum()) + trace(outer)) / k  # fmt: skip

    Pg, Pa = (
        draws(6000, lambda seed, s=s, n=n: transposed(Projection(k, "gaussian", seed=seed), s, n))
        for s, n in (("g", No), ("a", Ni))
    )
    products = ((Pg.mT @ M @ Pa) * (Pg.mT @ N @ Pa)).sum((1, 2))
    assert_mean(products, inner)
    assert_variance(products, variance)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_elementwise_projections(kind):
    """E sum_r k (P_g G P_a^T)_rr (P_g H P_a^T)_rr = <G, H>."""
    k, (G, H) = 9, normal(generator(9), 2, 5, 4)
    H = G + H
    Pg, Pa = (
        draws(2000, lambda seed, s=s, n=n: transposed(Projection(k, kind, "elementwise", seed), s, n))
        for s, n in (("g", 5), ("a", 4))
    )
    x, y = (k**0.5 * (Pg.mT @ W @ Pa).diagonal(dim1=1, dim2=2) for W in (G, H))
    assert_mean((x * y).sum(1), float((G * H).sum()))


@pytest.mark.parametrize("spec", [Projection(3), Projection(3, "srht"), Grass(3, "two", blowup=3)])
def test_maps_of_layers(spec: Any):
    """Inner products of gradients with two sides, a folded bias and stacked parts."""
    x, y = Sizes(1, 1, 4, 3, 6, 5, seed=2).pair(KINDS["stacked_bias"])
    G, H = gradient(x), gradient(y)
    both = Materialized(torch.cat([G, H + G]), x.parts, True)

    side = grass_side if isinstance(spec, Grass) else projection_matrix

    def product(seed):
        out = gradient(on_sides(partial(side, replace(spec, seed=seed)), "seen", "w", both))
        return (out[0] * out[1]).sum()

    assert_mean(draws(1000, product), float((G * (H + G)).sum()))


def test_unscaled_masks_weigh_by_their_share():
    pair = Materialized(torch.stack([X, Y]), (Part("w", WIDTH),))

    def product(seed):
        spec = Mask(4, seed, "none")
        out: Any = masked(spec, pair, mask_positions(spec, pair), keep_rows=False)
        return out.w[0] @ out.w[1]

    assert_mean(draws(1000, product), 4 / WIDTH * float(X @ Y))
