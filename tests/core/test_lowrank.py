"""Low-rank gradients: the same gradient in fewer rows, the best approximation, and its error."""

from typing import Any

import pytest
import torch

from attrax.core import (
    Factorized,
    aggregate,
    covers,
    gram,
    low_rank,
    low_rank_tree,
    materialize_leaf,
    norms,
    sq_norms,
    stored,
    tree_map,
)

from .dense import assert_same, gradient, vectors
from .toys import KINDS, LINEAR, SMALL, Sizes, cut, refused, tree

BIG = Sizes(3, 2, 5, 9, 7, 6, seed=4)
MATRICES = {**LINEAR, "built_matrix": KINDS["built_matrix"]}
matrices = pytest.mark.parametrize("kind", MATRICES)


def truncated(W, rank):
    """Best approximation of each matrix, and the norm of what it drops."""
    U, s, Vt = torch.linalg.svd(W, full_matrices=False)
    return (U[..., :rank] * s[:, None, :rank]) @ Vt[:, :rank], s[:, rank:].square().sum(1).sqrt()


def weight(leaf):
    """Gradients of the weight alone, and of the folded bias."""
    G = gradient(leaf)
    return (G[..., :-1], G[..., -1:]) if leaf.bias else (G, G[..., :0])


@matrices
@pytest.mark.parametrize("size", [SMALL, BIG, Sizes(0, 1, 2, 1, 3, 4), Sizes(2, 1, 0, 1, 3, 4)])
@pytest.mark.parametrize("built", [False, True])
def test_without_a_limit_the_gradient_stays(kind, size, built):
    leaf = size.one(MATRICES[kind])
    found = low_rank(materialize_leaf(leaf) if built else leaf)
    assert_same(gradient(found.leaf), gradient(leaf))
    assert found.error.shape == (size.B,)
    assert (found.error <= 1e-10 * gradient(leaf).flatten(1).norm(dim=1)).all()
    assert (found.leaf.parts, covers(found.leaf), found.leaf.bias) == (leaf.parts, covers(leaf), leaf.bias)


@matrices
@pytest.mark.parametrize("rank", [1, 2, 3, 50])
@pytest.mark.parametrize("built", [False, True])
def test_a_rank_gives_the_best_approximation_and_its_error(kind, rank, built):
    leaf = BIG.one(MATRICES[kind])
    found = low_rank(materialize_leaf(leaf) if built else leaf, rank)
    W, b = weight(leaf)
    best, error = truncated(W, rank)
    assert_same(gradient(found.leaf), torch.cat([best, b], -1))
    assert_same(found.error + 1, error + 1)
    assert found.leaf.g.shape[1] <= min(rank, 6 * 3) + leaf.bias


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.3, 0.9])
def test_a_tolerance_is_kept_with_the_fewest_rows(tolerance):
    leaf = BIG.one(LINEAR["linear"])
    found = low_rank(leaf, tolerance=tolerance)
    norm = gradient(leaf).flatten(1).norm(dim=1)
    assert (found.error <= tolerance * norm + 1e-12).all()
    rank = found.leaf.g.shape[1]
    if rank > 1:
        assert (truncated(gradient(leaf), rank - 1)[1] > tolerance * norm).any()


def test_the_smaller_of_rank_and_tolerance_is_taken():
    leaf = BIG.one(LINEAR["linear"])
    assert low_rank(leaf, 2, 0.0).leaf.g.shape[1] == 2
    assert low_rank(leaf, 5, 0.9).leaf.g.shape[1] == low_rank(leaf, tolerance=0.9).leaf.g.shape[1] < 5


def test_repeated_rows_are_found_to_be_few():
    leaf = Sizes(3, 1, 2, 1, 7, 6).one(LINEAR["stacked_bias"])
    long = tree_map(lambda v: v.repeat(1, 10, 1), leaf)
    assert isinstance(long, Factorized)
    found = low_rank(long)
    assert found.leaf.g.shape[1] == 3
    assert_same(gradient(found.leaf), gradient(long))


@matrices
def test_errors_bound_inner_products(kind):
    x, y = BIG.pair(MATRICES[kind])
    found = low_rank(y, 1)
    off = (gram(tree(w=x), tree(w=found.leaf)) - gram(tree(w=x), tree(w=y))).abs()
    assert (off <= norms(tree(w=x)).unsqueeze(1) * found.error * (1 + 1e-9)).all()
    assert off.max() > 0


@matrices
def test_low_rank_leaves_serve_every_operation(kind):
    x, y = BIG.pair(MATRICES[kind])
    small = tree(w=low_rank(y).leaf)
    assert_same(gram(tree(w=x), small), gram(tree(w=x), tree(w=y)))
    assert_same(sq_norms(small), sq_norms(tree(w=y)))
    assert_same(gradient(aggregate(small)["w"]), gradient(y).sum(0, keepdim=True))
    whole = stored(tree(w=y))
    assert {n: w.shape for n, w in stored(small).items()} == {n: w.shape for n, w in whole.items()}
    for name, w in stored(small).items():
        assert_same(w, whole[name])


def test_examples_are_reduced_one_by_one():
    """Up to the number of rows, which the neediest example decides."""
    whole = BIG.one(LINEAR["linear"])
    together = low_rank(whole, 2)
    pieces = [low_rank(part["w"], 2) for part in cut(tree(w=whole), 2, 1)]
    assert_same(torch.cat([gradient(p.leaf) for p in pieces]), gradient(together.leaf))
    assert_same(torch.cat([p.error for p in pieces]), together.error)


def test_factored_gradients_are_never_built():
    """10^8 entries an example, from 3 rows."""
    leaf = Sizes(1, 1, 3, 1, 10**4, 10**4).one(LINEAR["linear"])
    found = low_rank(leaf)
    assert found.leaf.g.shape == (1, 3, 10**4)
    assert_same(sq_norms(tree(w=found.leaf)), sq_norms(tree(w=leaf)))


def test_trees_keep_what_has_no_rank_and_add_up_errors():
    x, y = BIG.trees()
    small, error = low_rank_tree(y, 2)
    assert list(small) == list(y)
    for name in ("embedding", "norm", "bias", "built_vector", "built_tensor", "tied", "mixed"):
        assert small[name] is y[name]
    assert_same(error, (vectors(small) - vectors(y)).norm(dim=1))
    off = (gram(x, small) - gram(x, y)).abs()
    assert (off <= norms(x).unsqueeze(1) * error).all()
    short = Sizes(2, 1, 1, 1, 7, 6).trees()[0]
    assert low_rank_tree(short)[0]["linear"] is short["linear"]


def test_trees_without_matrices_have_no_error():
    x = Sizes(2, 1, 1, 1, 7, 6).one(KINDS["norm"])
    small, error = low_rank_tree(tree(w=x))
    assert small["w"] is x and error.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["embedding", "norm", "built_vector", "tied"])
def test_other_leaves_are_refused(kind):
    with refused("low_rank: leaf", "two dense", "Leave it as it is", error=TypeError):
        low_rank(SMALL.one(KINDS[kind]))


@pytest.mark.parametrize("wrong", [dict(rank=0), dict(tolerance=-0.1), dict(tolerance=1.0)])
def test_limits_without_meaning_are_refused(wrong: dict[str, Any]):
    with refused("low_rank: got", "rank >= 1", "0 <= tolerance < 1"):
        low_rank(SMALL.one(LINEAR["linear"]), **wrong)


def test_narrow_gradients_are_decomposed_in_float32():
    leaf = tree_map(lambda v: v.bfloat16(), BIG.one(LINEAR["linear_bias"]))
    found = low_rank(leaf)
    assert found.leaf.g.dtype == torch.float32
    assert_same(gradient(found.leaf).float(), gradient(leaf))
