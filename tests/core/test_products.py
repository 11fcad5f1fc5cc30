"""Gram matrices, norms and token scores against built gradients, and the laws they obey."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from attrax.core import (
    GradTree,
    factorized,
    gram,
    gram_leaf,
    materialize,
    materialized,
    norms,
    pad_rows,
    plan_gram,
    scale_examples,
    self_gram,
    sq_norms,
    sq_norms_leaf,
    take,
    token_scores,
    tree_map,
)
from attrax.core.products import token_scores_leaf

from .dense import assert_same, gradient, token_shares, vectors
from .toys import FACTORED, KINDS, SMALL, SUMS, generator, law, metric_for, normal, refused, sizes, tree

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@law(20, size=sizes(empty=True))
def test_gram_leaf_is_the_inner_product_of_the_gradients(kind, size):
    x, y = size.pair(KINDS[kind])
    assert_same(gram_leaf(x, y), torch.einsum("boi,qoi->bq", gradient(x), gradient(y)))


@kinds
@law(20, size=sizes(empty=True))
def test_squared_norms_are_those_of_the_gradients(kind, size):
    x = size.one(KINDS[kind])
    assert_same(sq_norms_leaf(x), gradient(x).square().sum((1, 2)))


@kinds
def test_metric_weighs_every_entry(kind):
    x, y = SMALL.pair(KINDS[kind])
    m = metric_for(x)
    weighted = gradient(x) * m.reshape(gradient(x).shape[1:])
    assert_same(gram_leaf(x, y, metric=m), torch.einsum("boi,qoi->bq", weighted, gradient(y)))
    assert_same(sq_norms_leaf(x, metric=m), (weighted * gradient(x)).sum((1, 2)))
    assert_same(gram_leaf(x, x, metric=m), torch.einsum("boi,qoi->bq", weighted, gradient(x)))


@law(10, size=sizes(empty=True))
def test_trees_sum_over_their_leaves(size):
    x, y = size.trees()
    assert_same(gram(x, y), vectors(x) @ vectors(y).T)
    assert_same(self_gram(x), vectors(x) @ vectors(x).T)
    assert_same(sq_norms(x), vectors(x).square().sum(1))
    assert_same(norms(x), vectors(x).norm(dim=1))


def test_tree_metric_applies_to_the_leaf_it_names():
    x, y = SMALL.trees({name: KINDS[name] for name in ("linear", "norm", "tied")})
    metric = {name: metric_for(x[name], seed) for seed, name in enumerate(("linear", "tied"))}
    weighted = torch.cat(
        [(gradient(leaf) * metric.get(name, torch.ones(()))).flatten(1) for name, leaf in x.items()], 1
    )
    assert_same(gram(x, y, metric=metric), weighted @ vectors(y).T)
    assert_same(sq_norms(x, metric=metric), (weighted * vectors(x)).sum(1))


@kinds
@law(10, size=sizes())
def test_gram_is_bilinear(kind, size):
    x, y = size.pair(KINDS[kind])
    z = replace(size, seed=size.seed + 1).one(KINDS[kind])
    a, b = normal(generator(size.seed), size.B), normal(generator(size.seed + 1), size.B)
    both = gram_leaf(scale_examples(x, a), y) + gram_leaf(scale_examples(z, b), y)
    dense = a[:, None, None] * gradient(x) + b[:, None, None] * gradient(z)
    combined = materialized("w", dense)
    query = materialized("w", gradient(y))
    assert_same(both, gram_leaf(combined, query))
    assert_same(gram_leaf(y, x), gram_leaf(x, y).T)


@law(20, size=sizes())
def test_self_gram_is_symmetric_and_positive(size):
    x, _ = size.trees()
    K = self_gram(x)
    assert_same(K, K.T)
    assert torch.linalg.eigvalsh(K).min() >= -1e-10 * K.abs().max()
    assert_same(K.diagonal(), sq_norms(x))


@pytest.mark.parametrize("kind", FACTORED | SUMS)
@law(10, size=sizes())
def test_appended_zero_rows_change_nothing(kind, size):
    x, y = size.pair((FACTORED | SUMS)[kind])
    longer = pad_rows(x, 2 * size.T + 7)
    assert_same(gram_leaf(longer, y), gram_leaf(x, y))
    assert_same(gram_leaf(y, longer), gram_leaf(y, x))
    assert_same(sq_norms_leaf(longer), sq_norms_leaf(x))


@pytest.mark.parametrize("kind", FACTORED)
def test_inserted_zero_rows_change_nothing_whatever_their_inputs(kind):
    """Padding positions carry activations and ids, but no gradient."""
    x, y = SMALL.pair(FACTORED[kind])
    order = torch.tensor([0, 0, 1, 2, 3, 3] if x.calls == 1 else [0, 0, 1, 2, 3, 3, 4, 5, 6, 7])
    keep = torch.tensor([0, 1, 1, 1, 1, 0] if x.calls == 1 else [0, 1, 1, 1, 1, 0, 1, 1, 1, 1])
    spread = tree_map(lambda v: v[:, :, order] if v.ndim == 4 else v[:, order], x)
    spread = replace(spread, g=spread.g * keep[:, None])
    assert_same(gram_leaf(spread, y), gram_leaf(x, y))
    assert_same(sq_norms_leaf(spread), sq_norms_leaf(x))


@law(10, size=sizes())
def test_rows_of_a_gram_belong_to_their_examples(size):
    x, y = size.trees()
    turned = torch.arange(size.B).flip(0)
    assert_same(gram(x.map(lambda _, leaf: take(leaf, turned)), y), gram(x, y).flip(0))


@pytest.mark.parametrize("kind", FACTORED | {"tied": SUMS["tied"]})
@law(10, size=sizes())
def test_token_scores_are_the_shares_of_the_rows(kind, size):
    build = (FACTORED | SUMS)[kind]
    x, y = size.pair(build)
    if kind == "tied":
        x, y = (
            replace(leaf, uses=(pad_rows(leaf.uses[0], leaf.uses[1].g.shape[1]), leaf.uses[1]))
            for leaf in (x, y)
        )
    shares = token_scores_leaf(x, y)
    assert_same(shares, token_shares(x, y))
    assert_same(shares.sum(1), gram_leaf(x, y))
    assert_same(token_scores_leaf(x, x), token_shares(x, x))


def test_token_scores_of_a_tree_sum_over_leaves():
    x, y = SMALL.trees(FACTORED)
    expected = torch.stack([token_shares(leaf, y[name]) for name, leaf in x.items()]).sum(0)
    assert_same(token_scores(x, y), expected)


def test_token_scores_against_built_queries():
    x, y = SMALL.trees(FACTORED)
    assert_same(token_scores(x, materialize(y)), token_scores(x, y))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_factors_are_multiplied_in_float32(kind, narrow):
    x, y = (
        tree_map(lambda v: v.to(narrow) if v.is_floating_point() else v, leaf)
        for leaf in replace(SMALL, T=40, S=30).pair(KINDS[kind])
    )
    S = gram_leaf(x, y)
    assert S.dtype == torch.float32
    assert_same(S, torch.einsum("boi,qoi->bq", gradient(x), gradient(y)))
    assert_same(sq_norms_leaf(x), gradient(x).square().sum((1, 2)))


def test_sides_of_different_dtypes_meet_in_the_wider_one():
    x, y = SMALL.pair(KINDS["linear"])
    a = replace(x, a=x.a.bfloat16(), g=x.g.float())
    S = gram_leaf(a, y)
    assert S.dtype == torch.float64
    assert_same(S, torch.einsum("boi,qoi->bq", gradient(a), gradient(y)))


def test_arguments_are_not_written_to():
    x, y = SMALL.trees()
    before = [leaf.clone() for leaf in tree_leaves((x, y))]
    gram(x, y)
    self_gram(x)
    sq_norms(y)
    after = tree_leaves((x, y))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_trees_with_different_leaves_are_refused():
    x, y = SMALL.trees()
    fewer = GradTree({name: leaf for name, leaf in y.items() if name != "norm"})
    with refused("gram: ", "different leaves", "'norm'", "same layer selection"):
        gram(x, fewer)
    with refused("token_scores: ", "different leaves", "'norm'"):
        token_scores(x, fewer)
    with refused("plan_gram: ", "different leaves", "'norm'"):
        plan_gram(x, fewer)
    with refused("gram: the trees hold no leaves"):
        gram(GradTree({}), GradTree({}))


def test_bases_parts_and_widths_must_agree():
    x, y = SMALL.pair(KINDS["linear"])
    with refused(
        "gram: leaf 'fc'", "train is in basis ''", "query in basis 'k4'", "same transform to both sides"
    ):
        gram_leaf(x, replace(y, basis="k4"), name="fc")
    other = factorized("up.weight", y.a, y.g)
    with refused("gram: leaf 'fc'", "train covers ['fc.weight']", "query covers ['up.weight']", "same model"):
        gram_leaf(x, other, name="fc")
    wider = factorized("fc.weight", torch.cat([y.a, y.a], -1), y.g)
    with refused("gram: leaf 'fc'", "axis 'i' has size 3 on one side and 6 on the other", "same model"):
        gram_leaf(x, wider, name="fc")
    with refused("norms: leaf 'fc'", "axis 'o'"):
        sq_norms_leaf(x, name="fc", metric=torch.ones(5, 3, dtype=torch.float64))


def test_unknown_routes_are_refused():
    x, y = SMALL.pair(KINDS["linear"])
    unknown: Any = "fastest"
    with refused("route: got 'fastest'", "expected one of ['factor', 'materialize'"):
        gram_leaf(x, y, route=unknown)


def test_token_scores_need_rows_of_one_length():
    x, y = SMALL.trees({"built_matrix": KINDS["built_matrix"]})
    with refused(
        "token_scores: leaf 'built_matrix'", "materialized and has no rows", "Score factored gradients"
    ):
        token_scores(x, y)
    routed, other = (replace(leaf, positions=False) for leaf in SMALL.pair(KINDS["groups"]))
    with refused("token_scores: leaf 'experts'", "routed to each expert", "Leave it out"):
        token_scores(tree(experts=routed), tree(experts=other))
    a, b = SMALL.pair(KINDS["tied"])
    with refused("token_scores: leaf 'emb'", "its uses have different numbers of positions: [4, 5]"):
        token_scores(tree(emb=a), tree(emb=b))
    c, d = SMALL.pair(KINDS["linear"])
    e, f = replace(SMALL, T=2).pair(KINDS["linear_bias"])
    with refused("token_scores: leaves have different numbers of positions", "'c': 4, 'e': 2"):
        token_scores(tree(c=c, e=e), tree(c=d, e=f))
