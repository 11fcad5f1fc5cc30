"""Projection to the leading eigenvectors of each side's covariance."""

from dataclasses import replace

import pytest
import torch

from attrax.core import (
    Sum,
    fit_subspace,
    gram,
    kronecker_sums,
    materialize_leaf,
    merge,
    project,
    projected,
)

from .dense import assert_same, gradient
from .toys import KINDS, LINEAR, Sizes, refused, tree

SIZE = Sizes(6, 2, 9, 4, 7, 6, seed=4)


def leading(X, k):
    """Projector V V^T on the top k eigenvectors of X^T X."""
    vectors = torch.linalg.eigh(X.T @ X).eigenvectors[:, -k:]
    return vectors @ vectors.T


def restricted(leaf, other, k):
    """Gradients of `other` restricted to the subspaces of `leaf`, in the layer's own coordinates."""
    a = torch.cat([leaf.a, torch.ones(*leaf.a.shape[:2], int(leaf.bias))], -1).flatten(0, 1)
    gs = leaf.g.flatten(0, 1).split([p.width for p in leaf.parts], 1)
    Qa = leading(a, min(k, a.shape[1]))
    Qg = torch.block_diag(*[leading(g, min(k, g.shape[1])) for g in gs])
    return Qg @ gradient(other) @ Qa


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("k", [1, 3])
def test_scores_are_those_of_the_restricted_gradients(kind, k):
    """Signs of eigenvectors are arbitrary, scores are not; a folded bias is the last of Ni + 1 inputs."""
    x, y = SIZE.pair(LINEAR[kind])
    fit = fit_subspace({"w": kronecker_sums(x)}, k)
    found = gram(project(tree(w=x), fit), project(tree(w=y), fit))
    expected = restricted(x, x, k).flatten(1) @ restricted(x, y, k).flatten(1).T
    assert_same(found, expected)
    built = gram(project(tree(w=materialize_leaf(x)), fit), project(tree(w=y), fit))
    assert_same(built, expected)


@pytest.mark.parametrize("kind", LINEAR)
def test_matrices_have_orthonormal_rows(kind):
    fit = fit_subspace({"w": kronecker_sums(SIZE.one(LINEAR[kind]))}, 3)
    for matrix in [*fit.a.values(), *fit.g.values()]:
        if matrix is not None:
            assert_same(matrix.T @ matrix, torch.eye(3, dtype=torch.float64))
    assert any(matrix is not None for matrix in fit.a.values())


def test_the_full_width_is_exact():
    x, y = SIZE.pair(LINEAR["stacked_bias"])
    fit = fit_subspace({"w": kronecker_sums(x)}, 100)
    assert_same(gram(project(tree(w=x), fit), project(tree(w=y), fit)), gram(tree(w=x), tree(w=y)))


def test_merged_statistics_give_the_subspace_of_all():
    x, y = SIZE.pair(LINEAR["linear_bias"])
    fit = fit_subspace({"w": merge(kronecker_sums(x), kronecker_sums(y))}, 2)
    both = torch.cat(
        [torch.cat([leaf.a, torch.ones(*leaf.a.shape[:2], 1)], -1).flatten(0, 1) for leaf in (x, y)]
    )
    V = fit.a["w"]
    assert V is not None
    assert_same(V @ V.T, leading(both, 2))


def test_two_fits_never_mix():
    x, y = SIZE.pair(LINEAR["linear"])
    one, two = (fit_subspace({"w": kronecker_sums(leaf)}, 3) for leaf in (x, y))
    assert one.basis != two.basis and one.basis == fit_subspace({"w": kronecker_sums(x)}, 3).basis
    with refused("gram: leaf 'w'", one.basis, two.basis, "same transform"):
        gram(project(tree(w=x), one), project(tree(w=y), two))


def test_sides_kept_diagonal_keep_their_largest_coordinates():
    x = SIZE.one(LINEAR["linear"])
    fit = fit_subspace({"w": kronecker_sums(x, max_dim=6)}, 2)
    largest = x.a.flatten(0, 1).square().sum(0).topk(2).indices
    V = fit.a["w"]
    assert V is not None
    assert_same(V, torch.eye(7, dtype=torch.float64)[:, largest])


def test_layers_and_widths_outside_the_fit_are_refused():
    x = SIZE.one(LINEAR["linear"])
    run = projected(fit_subspace({"w": kronecker_sums(x)}, 3))
    with refused("subspace: side a of 'v'", "not in the fit", "leave it out"):
        run("v", x)
    with refused("subspace: side a of 'w' has width 8, the fit has 7", "as in the fit"):
        run("w", replace(x, bias=True))
    with refused("subspace: got dim=0"):
        fit_subspace({}, 0)
    with refused("subspace: layer 'w'", "zero or holds non-finite"):
        fit_subspace({"w": kronecker_sums(replace(x, g=x.g * 0))}, 3)


def test_vector_parameters_are_kept():
    x = SIZE.one(LINEAR["linear"])
    run = projected(fit_subspace({"w": kronecker_sums(x)}, 3))
    norm = SIZE.one(KINDS["norm"])
    assert_same(gradient(run("ln", norm)), gradient(norm))


def test_uses_of_one_weight_meet_one_subspace():
    x = SIZE.one(KINDS["mixed"])
    run = projected(fit_subspace({"w": kronecker_sums(x.uses[0])}, 3))
    out = run("w", x)
    assert isinstance(out, Sum)
    assert_same(gradient(out), gradient(run("w", materialize_leaf(x))))
