"""Leaves: what their constructors refuse, and the structural operations, which never change what a leaf means."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from attrax.core import (
    Diagonal,
    Factorized,
    GradTree,
    Lookup,
    Part,
    Sum,
    concat,
    concat_rows,
    covers,
    diagonal,
    factorized,
    grouped,
    kronecker_sums,
    lookup,
    materialized,
    pad_rows,
    scale_examples,
    split_groups,
    sq_norms_leaf,
    stored,
    take,
    trim_rows,
    unstack,
)
from attrax.core.algebra import swap_roles
from attrax.core.leaves import batch_size, dtype_of
from attrax.core.products import token_scores_leaf

from .dense import assert_same, gradient, rows, token_shares
from .toys import FACTORED, KINDS, LINEAR, SMALL, SUMS, Rows, generator, law, normal, refused, sizes

kinds = pytest.mark.parametrize("kind", KINDS)
factored = pytest.mark.parametrize("kind", FACTORED)


@kinds
@law(10, size=sizes(empty=True))
def test_size_and_dtype_are_those_of_the_gradients(kind, size):
    leaf = size.one(KINDS[kind])
    assert batch_size(leaf) == size.B
    assert dtype_of(leaf) == torch.float64


@kinds
def test_fields_cannot_be_replaced(kind):
    leaf = SMALL.one(KINDS[kind])
    with pytest.raises((FrozenInstanceError, AttributeError)):
        leaf.parts = ()
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        leaf.extra = 1


def test_covered_parameters_are_weights_then_folded_biases():
    names = {kind: covers(SMALL.one(build)) for kind, build in KINDS.items()}
    assert names["linear"] == ("fc.weight",)
    assert names["stacked_bias"] == ("q.weight", "k.weight", "q.bias", "k.bias")
    assert names["tied"] == ("emb.weight",)


@kinds
@pytest.mark.parametrize("which", [slice(1, 3), torch.tensor([2, 0, 0]), torch.tensor([True, False, True])])
def test_taking_examples_takes_their_gradients(kind, which):
    leaf = SMALL.one(KINDS[kind])
    assert_same(gradient(take(leaf, which)), gradient(leaf)[which])


@kinds
@law(10, size=sizes(empty=True))
def test_scaling_examples_scales_their_gradients(kind, size):
    leaf = size.one(KINDS[kind])
    c = normal(generator(size.seed), size.B)
    assert_same(gradient(scale_examples(leaf, c)), c[:, None, None] * gradient(leaf))
    assert scale_examples(leaf, None) is leaf


def test_scaling_narrow_gradients_happens_in_float32():
    leaf = diagonal("b", torch.ones(1, 1, 1), torch.ones(1, 1, 3).bfloat16())
    scaled = scale_examples(leaf, torch.tensor([1 + 2.0**-12]))
    assert isinstance(scaled, Diagonal)
    assert scaled.g.dtype == torch.float32 and scaled.g[0, 0, 0] == 1 + 2.0**-12


@factored
@law(10, size=sizes())
def test_padding_keeps_the_gradients_and_the_positions(kind, size):
    leaf, query = size.pair(FACTORED[kind])
    longer = pad_rows(leaf, leaf.g.shape[-2] + 3)
    assert isinstance(longer, Rows) and longer.g.shape[-2] >= leaf.g.shape[-2] + 3
    assert_same(gradient(longer), gradient(leaf))
    assert_same(token_scores_leaf(longer, query)[:, : size.T], token_shares(leaf, query))
    assert pad_rows(leaf, 0) is leaf


def test_padding_reaches_every_use():
    leaf = pad_rows(SMALL.one(SUMS["mixed"]), 9)
    assert leaf.uses[0].g.shape[1] == 9
    assert_same(gradient(leaf), gradient(SMALL.one(SUMS["mixed"])))


@factored
@law(10, size=sizes())
def test_trimming_undoes_padding(kind, size):
    leaf = size.one(FACTORED[kind])
    trimmed = trim_rows(pad_rows(leaf, leaf.g.shape[-2] + 4))
    assert_same(gradient(trimmed), gradient(leaf))
    assert isinstance(trimmed, Rows) and (leaf.calls > 1 or trimmed.g.shape == leaf.g.shape)


def test_trimming_looks_at_all_examples_and_keeps_a_row():
    g = torch.zeros(2, 5, 3)
    g[1, 2] = 1
    leaf = factorized("w", torch.ones(2, 5, 4), g)
    assert trim_rows(leaf).g.shape == (2, 3, 3)
    assert trim_rows(replace(leaf, g=torch.zeros(2, 5, 3))).g.shape == (2, 1, 3)
    tied = trim_rows(Sum((leaf, leaf), leaf.parts))
    assert [use.g.shape[1] for use in tied.uses if isinstance(use, Rows)] == [3, 3]
    built = materialized("w", torch.zeros(2, 3, 4))
    assert trim_rows(built) is built


@kinds
@law(10, size=sizes(empty=True))
def test_joining_examples_joins_their_gradients(kind, size):
    x, y = size.pair(KINDS[kind])
    assert_same(gradient(concat([x, y])), torch.cat([gradient(x), gradient(y)]))
    assert concat([x]) is x


@factored
@law(10, size=sizes())
def test_joined_examples_keep_their_positions(kind, size):
    x, y = size.pair(FACTORED[kind])
    joined = token_scores_leaf(concat([x, y]), y)
    assert_same(joined[: size.B, : size.T], token_shares(x, y))
    assert_same(joined[size.B :, : size.S], token_shares(y, y))
    assert_same(joined[: size.B].sum(1), token_shares(x, y).sum(1))


def test_joined_examples_may_have_different_numbers_of_calls():
    once, query = SMALL.pair(FACTORED["linear"])
    twice = SMALL.one(FACTORED["called_twice"])
    joined = concat([once, twice])
    assert joined.calls == 2
    shares = token_scores_leaf(joined, query)
    assert_same(shares, torch.cat([token_shares(once, query), token_shares(twice, query)]))


def test_leaves_that_differ_in_kind_parts_or_basis_are_not_joined():
    x, y = SMALL.pair(FACTORED["linear"])
    for other in (
        replace(SMALL.one(KINDS["built_matrix"]), parts=x.parts),
        replace(y, parts=(Part("other.weight", 4),)),
        replace(y, basis="k4"),
    ):
        with refused("concat: leaf 'fc.weight'", "cannot join", "same layer selection and transform"):
            concat([x, other])


@kinds
@law(10, size=sizes())
def test_joining_calls_adds_their_gradients_cross_terms_included(kind, size):
    x, y = replace(size, Q=size.B).pair(KINDS[kind])
    joined = concat_rows([x, y])
    assert_same(gradient(joined), gradient(x) + gradient(y))
    assert_same(sq_norms_leaf(joined), (gradient(x) + gradient(y)).square().sum((1, 2)))
    assert not isinstance(joined, Rows) or joined.calls == x.calls + y.calls
    assert concat_rows([x]) is x


def test_calls_of_different_lengths_keep_their_positions():
    x, query = SMALL.pair(FACTORED["linear"])
    short = take(query, torch.tensor([0, 1, 0]))
    shares = token_scores_leaf(concat_rows([x, short, x]), query)
    expected = 2 * token_shares(x, query)
    expected[:, : short.g.shape[1]] += token_shares(short, query)
    assert_same(shares, expected)


@pytest.mark.parametrize("kind", ["stacked", "stacked_bias"])
def test_unstacked_layers_share_the_input_and_split_the_rows(kind):
    leaf = SMALL.one(FACTORED[kind])
    pieces = unstack(leaf)
    assert list(pieces) == [part.weight for part in leaf.parts]
    assert all(piece.a is leaf.a for piece in pieces.values())
    assert_same(torch.cat([gradient(piece) for piece in pieces.values()], 1), gradient(leaf))


@pytest.mark.parametrize("transposed", [False, True])
def test_split_groups_are_the_slices_of_the_parameter(transposed):
    gen = generator(2)
    a, g = normal(gen, 2, 3, 4, 6), normal(gen, 2, 3, 4, 8)
    shape = (18, 4, 2) if transposed else (24, 3, 2)
    leaf = replace(grouped("conv", a, g, shape=shape, transposed=transposed), calls=2)
    blocks = split_groups(leaf)
    assert list(blocks) == ["conv[0]", "conv[1]", "conv[2]"] and {b.calls for b in blocks.values()} == {2}
    whole, slices = stored(GradTree({"conv": leaf})), stored(GradTree(blocks))
    assert_same(torch.cat(list(slices.values()), 1), whole["conv"])
    assert kronecker_sums(blocks["conv[1]"]).g[0].shape == (8, 8)


def test_swapped_roles_keep_the_stored_shape():
    leaf = SMALL.one(FACTORED["linear"])
    kernel = replace(leaf, parts=(replace(leaf.parts[0], shape=(4, 1, 3)),))
    assert_same(stored(GradTree({"w": swap_roles(kernel)}))["fc.weight"], gradient(leaf).unsqueeze(2))


def test_swapped_roles_transpose_the_gradient():
    leaf = SMALL.one(FACTORED["linear"])
    swapped = swap_roles(leaf)
    assert_same(gradient(swapped), gradient(leaf).transpose(1, 2))
    assert swapped.parts == (Part("fc.weight", leaf.a.shape[-1], transposed=True),)
    assert swap_roles(swapped).parts == leaf.parts
    longer = swap_roles(pad_rows(replace(leaf, a=leaf.a + 7, g=0 * leaf.g), leaf.g.shape[1] + 1))
    assert not longer.g.any()


def test_factors_must_agree_in_examples_and_rows():
    with refused("factorized: leaf 'w'", "(2, 3, 4)", "(2, 5, 4)", "[B, T]"):
        factorized("w", torch.ones(2, 3, 4), torch.ones(2, 5, 4))
    with refused("factorized: leaf 'w'", "(2, 4)", "T axis of length 1"):
        factorized("w", torch.ones(2, 4), torch.ones(2, 4))
    with refused("lookup: leaf 'e'", "(2, 3)", "(2, 4, 5)"):
        lookup("e", torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4, 5), rows=7)
    with refused("grouped: leaf 'conv'", "(2, 3, 5, 4)", "(2, 3, 4, 4)", "[B, U, T]"):
        grouped("conv", torch.ones(2, 3, 5, 4), torch.ones(2, 3, 4, 4))
    with refused("diagonal: leaf 'ln'", "(2, 3, 5)", "(2, 4, 5)"):
        diagonal("ln", torch.ones(2, 3, 5), torch.ones(2, 4, 5))
    with refused("diagonal: leaf 'ln'", "x has width 2, g has 5"):
        diagonal("ln", torch.ones(2, 3, 2), torch.ones(2, 3, 5))


def test_part_widths_must_fill_the_output():
    with refused("factorized: leaf 'q'", "[2, 1]", "No=4"):
        factorized([Part("q", 2), Part("k", 1)], torch.ones(1, 1, 3), torch.ones(1, 1, 4))


def test_constructors_fill_in_the_parts():
    x, g = torch.ones(2, 5, 3), torch.ones(2, 5, 4)
    assert factorized("w", x, g, transposed=True).parts == (Part("w", 4, transposed=True),)
    assert factorized("w", x, g, bias="b").parts == (Part("w", 4, bias="b"),)
    assert lookup("e", torch.zeros(2, 5, dtype=torch.long), x, rows=11).parts == (Part("e", 11, head=True),)
    assert diagonal("ln", x, x).parts == (Part("ln", 3),)
    assert materialized("s", torch.ones(2)).parts == (Part("s", 1),)


@pytest.mark.parametrize("kind", LINEAR)
def test_rows_add_up_to_the_gradient(kind):
    """The oracle of these tests agrees with the definition G = g^T a written as a matrix product."""
    leaf = SMALL.one(LINEAR[kind])
    a = torch.cat([leaf.a, torch.ones(*leaf.a.shape[:2], int(leaf.bias), dtype=torch.float64)], -1)
    assert_same(rows(leaf).sum(1), leaf.g.transpose(1, 2) @ a)
    assert isinstance(leaf, Factorized) and not isinstance(leaf, Lookup)
