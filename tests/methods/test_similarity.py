"""GradDot, GradCos and the scoring loop, against built gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from attrax.core import (
    CPU,
    Blocks,
    GradTree,
    Materialized,
    Target,
    aggregate,
    collect,
    diagonal,
    factorized,
    materialize,
    scale_examples,
    sq_norms,
)
from attrax.methods import gradcos, graddot, pairwise

from ..core.dense import assert_same, vectors
from ..core.toys import FACTORED, LINEAR, SMALL, block, cut, generator, named, normal, refused, source


def test_graddot_is_the_inner_product_of_the_gradients():
    x, y = SMALL.trees()
    s = graddot(source(x), source(y))
    assert_same(s.values, vectors(x) @ vectors(y).T)
    assert (s.ids, s.query_ids, s.steps) == (named(3), named(2), (0, 0, 0))
    assert s.about["method"] == "graddot" and s.about["target"] == "sum" and "more helpful" in s.about["sign"]


def test_gradcos_divides_by_norms_over_all_leaves_once():
    x, y = SMALL.trees()
    X, Y = vectors(x), vectors(y)
    s = gradcos(source(x), source(y))
    assert_same(s.values, (X @ Y.T) / (X.norm(dim=1)[:, None] * Y.norm(dim=1)))
    assert s.about["method"] == "gradcos" and s.about["unit"] == "cosine"
    assert_same(gradcos(source(x), source(x)).values.diagonal(), torch.ones(3, dtype=torch.float64))


def test_examples_without_a_gradient_score_zero():
    x, y = SMALL.trees()
    silent = x.map(lambda _, leaf: scale_examples(leaf, torch.tensor([1.0, 0.0, 1.0])))
    for s in (gradcos(source(silent), source(y)).values, gradcos(source(y), source(silent)).values.T):
        assert (s[1] == 0).all() and s.isfinite().all()
        assert_same(s[[0, 2]], gradcos(source(x), source(y)).values[[0, 2]])


def test_cosines_do_not_depend_on_an_examples_scale():
    x, y = SMALL.trees()
    scaled = x.map(lambda _, leaf: scale_examples(leaf, torch.tensor([0.1, 3.0, 20.0])))
    assert_same(gradcos(source(scaled), source(y)).values, gradcos(source(x), source(y)).values, within=1e-7)


@pytest.mark.parametrize("target", ["sum", "mean", "as_trained"])
def test_targets_hold_for_both_sides(target: Target):
    x, y = SMALL.trees(LINEAR)
    c, n = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64), torch.tensor([4, 2, 1])
    factor = {"sum": torch.ones(3, dtype=torch.float64), "mean": 1 / n.double(), "as_trained": c}[target]
    train = Blocks([block(x.map(lambda _, leaf: scale_examples(leaf, c)), named(3), weight=c, tokens=n)])
    query = Blocks(
        [block(y.map(lambda _, leaf: scale_examples(leaf, c[:2])), named(2), weight=c[:2], tokens=n[:2])]
    )
    expected = (factor[:, None] * vectors(x)) @ (factor[:2, None] * vectors(y)).T
    assert_same(graddot(train, query, target=target).values, expected)


def test_summed_scores_are_the_score_of_the_summed_gradient_for_dots_only():
    """A mean of cosines is not the cosine of the mean."""
    g = normal(generator(74), 6, 7), normal(generator(75), 3, 7)
    train, query = (source(GradTree({"w": Materialized(x, ())})) for x in g)
    joined = source(aggregate(collect(query).grads))
    dots = graddot(train, query)
    assert_same(dots.aggregate("sum").values, graddot(train, joined).values)
    assert_same(dots.aggregate("mean").values, g[0] @ g[1].mean(0, keepdim=True).T)
    cosines = gradcos(train, query).aggregate("mean").values
    unit = [x / x.norm(dim=1, keepdim=True) for x in g]
    assert_same(cosines, (unit[0] @ unit[1].T).mean(1, keepdim=True))
    assert not torch.allclose(cosines, gradcos(train, joined).values)


def test_norms_and_products_from_activations_are_those_of_autograd():
    """A linear layer on sequences: the bias gradient's norm is that of the sum over tokens."""
    gen = generator(43)
    x, y = normal(gen, 2, 5, 4), normal(gen, 2, 5, 3)
    layer = nn.Linear(4, 3, dtype=torch.float64)
    rows = []
    for a, b in zip(x, y, strict=True):
        loss = 0.5 * (layer(a) - b).square().sum()
        weight, bias = torch.autograd.grad(loss, [layer.weight, layer.bias])
        rows.append((weight.flatten(), bias))
    weights, biases = (torch.stack(column) for column in zip(*rows, strict=True))
    g = (layer(x) - y).detach()
    apart = GradTree(
        {"weight": factorized("weight", x, g), "bias": diagonal("bias", torch.ones_like(g[..., :1]), g)}
    )
    folded = GradTree({"weight": factorized("weight", x, g, bias="bias")})
    assert_same(sq_norms(GradTree({"bias": apart["bias"]})), biases.square().sum(1))
    both = torch.cat([weights, biases], 1)
    for tree in (apart, folded):
        assert_same(sq_norms(tree), both.square().sum(1))
        assert_same(graddot(source(tree), source(tree)).values, both @ both.T)


@pytest.mark.parametrize("memory", [2**30, 2000, 100])
def test_scores_do_not_depend_on_whether_queries_are_built(memory):
    x, y = SMALL.trees()
    s = graddot(source(*cut(x, 1, 2)), source(y), hardware=replace(CPU, memory=memory))
    assert_same(s.values, vectors(x) @ vectors(y).T)
    assert_same(graddot(source(materialize(x)), source(y)).values, s.values)
    assert_same(graddot(source(x), source(materialize(y))).values, s.values)


def test_batches_without_examples_add_nothing():
    x, y = SMALL.trees()
    for method in (graddot, gradcos):
        s = method(source(*cut(x, 2, 0, 1, 0)), source(*cut(y, 0, 2)))
        assert_same(s.values, method(source(x), source(y)).values)
        assert s.ids == named(3)


def test_rows_carry_their_step_and_block():
    x, y = SMALL.trees(LINEAR)
    first, second = cut(x, 2, 1)
    blocks = [block(first, ("a", "b"), step=4, micro=0), block(second, ("a",), step=4, micro=1)]
    s = graddot(Blocks(blocks), source(y))
    assert (s.ids, s.steps, s.micros) == (("a", "b", "a"), (4, 4, 4), (0, 0, 1))


def test_a_train_source_may_be_read_once():
    x, y = SMALL.trees()
    assert_same(graddot(Blocks(iter(source(x).blocks)), source(y)).values, vectors(x) @ vectors(y).T)


@pytest.mark.parametrize("method", [graddot, gradcos])
def test_sources_must_match(method):
    x, y = SMALL.trees(FACTORED)
    name = method.__name__ if method is graddot else "graddot"
    fewer = GradTree({k: leaf for k, leaf in y.items() if k != "norm"})
    with refused(f"{name}: train leaf 'norm' has no query gradient", "same selection and transform"):
        method(source(x), source(fewer))
    with refused(f"{name}: ", "leaves that no train block has: ['norm']", "same selection and transform"):
        method(source(x.map(lambda k, leaf: leaf if k in fewer else None)), source(y))
    with refused(f"{name}: ", "different parameters", "'p0'", "'p1' at step 3"):
        method(source(x, fingerprint="p1", step=3), source(y))
    with refused(f"{name}: the source yielded no examples"):
        method(source(x), Blocks([]))
    with refused(f"{name}: the train source yielded no examples"):
        method(Blocks([]), source(y))
    with refused(f"{name}: no leaf of the train source matches"):
        method(Blocks([block(GradTree({}), ("a",))]), source(y))
    unknown: Any = "average"
    with refused("target: got 'average'"):
        method(source(x), source(y), target=unknown)
    with refused("target 'sum'", "unknown loss weight"):
        method(source(x, weight=None), source(y))


def test_cosines_need_two_passes():
    x, y = SMALL.trees(LINEAR)
    once = Blocks(iter(source(x).blocks))
    for sides in ((once, source(y)), (source(y), once)):
        with refused("gradcos: needs several passes", "can be read once", "Use a store"):
            gradcos(*sides)


def test_the_scoring_loop_describes_its_scores():
    x, y = SMALL.trees(LINEAR)
    s = pairwise(source(x), collect(source(y)), about={"method": "mine"}, operation="mine")
    assert s.about["method"] == "mine" and "sign" in s.about
    with refused("mine: the train source yielded no examples"):
        pairwise(Blocks([]), collect(source(y)), about={}, operation="mine")
