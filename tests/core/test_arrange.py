"""Layouts of parameters and of leaves, there and back; several weighted sums at once."""

import pytest
import torch

from attrax.core import GradTree, Mask, aggregate, gram_leaf, materialize_leaf, projected, stored
from attrax.core.arrange import arranged, by_parameter

from .dense import assert_same, gradient
from .toys import KINDS, SMALL, generator, normal, refused


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_go_back_to_their_place_in_the_leaf(kind):
    leaf = SMALL.one(KINDS[kind])
    back = arranged(leaf, stored(GradTree({"x": leaf})))
    assert_same(gradient(back).flatten(1), gradient(leaf).flatten(1))
    assert_same(gram_leaf(leaf, back), gram_leaf(leaf, materialize_leaf(leaf)))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_parameters_go_back_to_their_place_in_the_leaf(kind):
    leaf = projected(Mask(3, scale="none"))("x", SMALL.one(KINDS[kind]))
    values = by_parameter(GradTree({"x": leaf}))
    assert set(values) == {part.weight for part in leaf.parts}
    assert_same(gradient(arranged(leaf, values)), gradient(leaf))


@pytest.mark.parametrize("kind", KINDS)
def test_several_weighted_sums(kind):
    leaf = SMALL.one(KINDS[kind])
    weights = normal(generator(1), 3, 2)
    both = aggregate(GradTree({"x": leaf}), weights)
    expected = torch.einsum("bq,boi->qoi", weights, gradient(leaf))
    assert_same(gradient(both["x"]).flatten(1), expected.flatten(1))


def test_projected_leaves_hold_no_parameters():
    leaf = projected(Mask(3))("x", SMALL.one(KINDS["linear"]))
    with refused("arranged", "fc.weight", "mask-unbiased", "scale='none'"):
        arranged(leaf, {})
