"""Maps that keep rows: shares of training positions add up to the score in the map's own coordinates."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attrax.core import (
    Diagonal,
    Factorized,
    GradTree,
    Mask,
    Materialized,
    Projection,
    fit_subspace,
    gram,
    kronecker_sums,
    low_rank,
    projected,
    token_scores,
)
from attrax.core.algebra import pad_rows
from attrax.core.projection import projection_matrix

from .dense import assert_same, gradient, rows, token_shares
from .maps import matrix_of
from .toys import FACTORED, LINEAR, Sizes, refused, tree

SIZE = Sizes(3, 2, 5, 4, 7, 6, seed=4)
ROWS: dict[str, Any] = {
    "two": Projection(2),
    "two_sjlt": Projection(2, "sjlt"),
    "elementwise": Projection(4, sides="elementwise"),
    "mask": Mask(9),
    "mask_exact": Mask(10**6),
}


@pytest.mark.parametrize("kind", FACTORED)
@pytest.mark.parametrize("which", ROWS)
def test_token_scores_in_a_map_sum_to_its_gram(which, kind):
    if not which.startswith("mask") and kind in ("norm", "bias"):
        return  # maps on two sides build vector parameters
    x, y = SIZE.pair(FACTORED[kind])
    spec = ROWS[which]
    train = tree(w=projected(spec, keep_rows=True)("w", x))
    query = tree(w=projected(spec)("w", y))
    shares = token_scores(train, query)
    assert shares.shape == (3, 5, 2)
    assert_same(shares.sum(1), gram(train, query))
    P = matrix_of(spec, "w", x)
    expected = torch.einsum("btp,qp->btq", rows(x).flatten(2) @ P.T, gradient(y).flatten(1) @ P.T)
    assert_same(shares, expected.unflatten(1, (x.calls, -1)).sum(1))


def test_token_scores_of_a_mask_of_everything_are_exact():
    x, y = SIZE.pair(LINEAR["stacked_bias"])
    spec = ROWS["mask_exact"]
    train, query = (tree(w=projected(spec, keep_rows=True)("w", leaf)) for leaf in (x, y))
    assert_same(token_scores(train, query), token_shares(x, y))


@pytest.mark.parametrize("kind", LINEAR)
def test_token_scores_against_low_rank_queries(kind):
    x, y = SIZE.pair(LINEAR[kind])
    for query in (low_rank(y).leaf, low_rank(y, 2).leaf):
        shares = token_scores(tree(w=x), tree(w=query))
        assert_same(shares, token_shares(x, query))
        assert_same(shares.sum(1), gram(tree(w=x), tree(w=query)))


def test_token_scores_in_the_subspace_of_a_fit():
    x, y = SIZE.pair(LINEAR["linear_bias"])
    fit = fit_subspace({"w": kronecker_sums(x)}, 3)
    train, query = (tree(w=projected(fit, keep_rows=True)("w", leaf)) for leaf in (x, y))
    assert_same(token_scores(train, query).sum(1), gram(train, query))


def test_elementwise_rows_are_products_of_projected_factors():
    x = SIZE.one(LINEAR["stacked_bias"])
    spec = Projection(4, "gaussian", "elementwise", seed=3)
    out: Any = projected(spec, keep_rows=True)("w", x)
    a = torch.cat([x.a, torch.ones(3, 5, 1)], -1)
    Pa = projection_matrix(spec, "w", "a", 8)
    assert Pa is not None
    expected = []
    for part, g in zip(x.parts, x.g.split([p.width for p in x.parts], -1), strict=True):
        Pg = projection_matrix(spec, part.weight, "g", part.width)
        assert Pg is not None
        expected.append(4**0.5 * (a @ Pa.double()) * (g @ Pg.double()))
    assert isinstance(out, Diagonal)
    assert_same(out.x * out.g, torch.cat(expected, -1))


def test_kept_rows_stay_factored_even_where_they_are_larger():
    x = SIZE.one(LINEAR["linear_bias"])
    kinds = {"two": Factorized, "elementwise": Diagonal, "mask": Diagonal}
    for which, kind in kinds.items():
        assert isinstance(projected(ROWS[which], keep_rows=True)("w", x), kind)
        assert isinstance(projected(ROWS[which])("w", x), Materialized)


@pytest.mark.parametrize("which", ["two", "two_sjlt", "two_wide"])
def test_rows_of_an_embedding_without_a_gradient_count_nowhere(which):
    """Neither padding, whose id is none, nor a position that no loss sees."""
    leaf = SIZE.one(FACTORED["embedding"])
    leaf = replace(leaf, g=leaf.g * (torch.arange(5) != 2).unsqueeze(1))
    view = projected(ROWS.get(which, Projection(100)), keep_rows=True)
    found, padded = (kronecker_sums(view("w", x)) for x in (leaf, pad_rows(leaf, 9)))
    assert int(found.rows) == int(padded.rows) == 3 * 4
    assert_same(padded.g[0], found.g[0])
    assert_same(padded.a, found.a)


def test_maps_without_rows_are_refused_as_the_train_side():
    x, y = SIZE.pair(LINEAR["linear"])
    dense = projected(Projection(4, sides="dense"), keep_rows=True)
    train, query = (GradTree({"w": dense("w", leaf)}) for leaf in (x, y))
    with refused("token_scores: leaf 'w'", "no rows"):
        token_scores(train, query)
