"""Random maps are unbiased and vary as their formulas say, within 5 standard errors over seeds."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from attrax.core import Grass, Mask, Materialized, Part, Projection, coordinates, projected
from attrax.core.projection import projection_matrix

from .dense import gradient
from .maps import assert_mean, assert_variance, draws, matrix_of
from .toys import KINDS, Sizes, generator, normal, unchecked

WIDTH, DIM = 16, 4
X, Y = normal(generator(5), 2, WIDTH)
Y = Y + X / 2


def spread(x, y):
    """V1 = |x|^2 |y|^2 + <x,y>^2 - 2 sum x^2 y^2."""
    return float((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x * y).square().sum())


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

    def matrix(seed):
        found = projection_matrix(replace(spec, seed=seed), "w", "dense", WIDTH)
        assert found is not None
        return found

    matrices = draws(4000, matrix)
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
        out: Any = projected(Grass(dim, blowup=kept // dim, seed=seed))("w", pair)
        return out.w[0] @ out.w[1]

    products = draws(4000, product)
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

    def sides(seed):
        found = [
            projection_matrix(Projection(k, "gaussian", seed=seed), "w", s, w) for s, w in zip("ga", (No, Ni))
        ]
        Pg, Pa = (P.double() for P in found if P is not None)
        return ((Pg.T @ M @ Pa) * (Pg.T @ N @ Pa)).sum()

    products = draws(6000, sides)
    assert_mean(products, inner)
    assert_variance(products, variance)


@pytest.mark.parametrize(
    "spec",
    [
        Projection(3), Projection(3, "gaussian"), Projection(3, "sjlt"), Projection(3, "srht"),
        Projection(9, sides="elementwise"), Projection(9, "gaussian", "elementwise"), Grass(3, "two", blowup=3),
    ],
)  # fmt: skip
def test_maps_of_layers(spec: Any):
    """Inner products of gradients with two sides, a folded bias and stacked parts."""
    x, y = Sizes(1, 1, 4, 3, 6, 5, seed=2).pair(KINDS["stacked_bias"])
    G, H = gradient(x), gradient(y)
    both = Materialized(torch.cat([G, H + G]), x.parts, True)

    def product(seed):
        out = gradient(projected(replace(spec, seed=seed))("w", both))
        return (out[0] * out[1]).sum()

    assert_mean(draws(1500, product), float((G * (H + G)).sum()))


def test_unscaled_masks_weigh_by_their_share():
    chosen = draws(
        2000, lambda seed: (gradient(projected(Mask(4, seed, "none"))("w", UNIT))).flatten(1).sum(1)
    )
    assert_mean(chosen.mean(1), 4 / WIDTH)
    with unchecked():
        assert matrix_of(Mask(4), "w", UNIT).square().sum() == WIDTH


UNIT = Materialized(torch.eye(WIDTH, dtype=torch.float64), (Part("w", WIDTH),))
