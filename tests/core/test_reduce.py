"""Building, summing and handing back gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from attrax.core import (
    CPU,
    Factorized,
    GradTree,
    Grouped,
    Lookup,
    Materialized,
    Part,
    Sum,
    aggregate,
    compact,
    factorized,
    gram,
    materialize,
    materialize_leaf,
    materialized,
    stored,
    tree_map,
)

from .dense import assert_same, gradient, vectors
from .toys import KINDS, SMALL, generator, law, normal, refused, sizes, tree

kinds = pytest.mark.parametrize("kind", KINDS)
budgets = st.sampled_from((2**30, 500, 40))


@kinds
@law(20, size=sizes(empty=True), memory=budgets)
def test_built_gradients_are_the_gradients(kind, size, memory):
    leaf = size.one(KINDS[kind])
    built = materialize_leaf(leaf, hardware=replace(CPU, memory=memory))
    assert isinstance(built, Materialized) and built.parts == leaf.parts and built.basis == leaf.basis
    assert_same(gradient(built), gradient(leaf))


def test_built_gradients_know_whether_they_hold_a_bias():
    assert materialize_leaf(SMALL.one(KINDS["stacked_bias"])).bias
    assert not materialize_leaf(SMALL.one(KINDS["stacked"])).bias


@kinds
@law(20, size=sizes(empty=True), memory=budgets)
def test_aggregates_are_weighted_sums_of_the_gradients(kind, size, memory):
    leaf = size.one(KINDS[kind])
    w = normal(generator(size.seed), size.B)
    hardware = replace(CPU, memory=memory)
    total = aggregate(tree(x=leaf), w, hardware=hardware)["x"]
    assert_same(gradient(total), torch.einsum("b,boi->oi", w, gradient(leaf)).unsqueeze(0))
    plain = aggregate(tree(x=leaf), hardware=hardware)["x"]
    assert_same(gradient(plain), gradient(leaf).sum(0, keepdim=True))


def test_scoring_an_aggregate_sums_the_scores():
    x, y = SMALL.trees()
    assert_same(gram(x, aggregate(y)), gram(x, y).sum(1, keepdim=True))


def test_aggregates_keep_the_shape_of_the_parameter():
    kernel = SMALL.one(KINDS["built_tensor"])
    scalar = materialized("s", torch.ones(4))
    total: Any = aggregate(tree(kernel=kernel, scalar=scalar))
    assert total["kernel"].w.shape == (1, *kernel.w.shape[1:])
    assert total["scalar"].w.tolist() == [4.0]


@law(10, size=sizes())
def test_trees_are_built_leaf_by_leaf(size):
    x, _ = size.trees()
    assert_same(vectors(materialize(x)), vectors(x))


@kinds
@law(20, size=sizes(empty=True))
def test_compaction_is_exact_and_never_larger(kind, size):
    leaf = size.one(KINDS[kind])
    small = compact(leaf)
    assert_same(gradient(small), gradient(leaf))
    if isinstance(leaf, Factorized | Grouped):
        T, No, Ni = *leaf.g.shape[-2:], leaf.a.shape[-1]
        assert (small is leaf) == (T * (Ni + No) < Ni * No)


def test_compaction_keeps_selections_and_builds_norms():
    assert isinstance(compact(SMALL.one(KINDS["embedding"])), Lookup)
    assert isinstance(compact(SMALL.one(KINDS["tied"])), Sum)
    assert isinstance(compact(SMALL.one(KINDS["norm"])), Materialized)
    leaf = factorized("w", torch.ones(2, 1, 9), torch.ones(2, 1, 9))
    assert compact(leaf) is leaf


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@kinds
def test_low_precision_factors_are_summed_in_float32(kind, narrow):
    leaf = replace(SMALL, T=60).one(KINDS[kind])
    leaf = tree_map(lambda v: v.to(narrow) if v.is_floating_point() else v, leaf)
    if isinstance(leaf, Materialized):
        return
    built = materialize_leaf(leaf)
    assert built.w.dtype == torch.float32
    assert_same(gradient(built).float(), gradient(leaf))
    assert_same(gradient(aggregate(tree(x=leaf))["x"]).float(), gradient(leaf).sum(0, keepdim=True))


def test_half_precision_inputs_meet_float32_gradients():
    """Under autocast a layer's input is bfloat16 and its output gradient float32."""
    gen = generator(51)
    a, g = normal(gen, 3, 5, 4, dtype=torch.bfloat16), normal(gen, 3, 5, 2, dtype=torch.float32)
    built = materialize_leaf(factorized("w", a, g))
    assert built.w.dtype == torch.float32
    assert_same(built.w, torch.einsum("bto,bti->boi", g.double(), a.double()))


def test_stored_gradients_are_in_the_parameters_layout():
    x, _ = SMALL.trees({k: KINDS[k] for k in ("stacked_bias", "conv1d", "norm", "embedding", "built_tensor")})
    G = {name: gradient(leaf) for name, leaf in x.items()}
    No = SMALL.No
    expected = {
        "q.weight": G["stacked_bias"][:, :No, :-1],
        "q.bias": G["stacked_bias"][:, :No, -1],
        "k.weight": G["stacked_bias"][:, No:, :-1].transpose(1, 2),
        "k.bias": G["stacked_bias"][:, No:, -1],
        "c_fc.weight": G["conv1d"][..., :-1].transpose(1, 2),
        "c_fc.bias": G["conv1d"][..., -1],
        "ln.weight": G["norm"].squeeze(1),
        "emb.weight": G["embedding"],
        "kernel": G["built_tensor"].reshape(3, No, 2, SMALL.Ni),
    }
    out = stored(x)
    assert set(out) == set(expected)
    for name, value in expected.items():
        assert_same(out[name], value)


def test_stored_gradients_split_stacked_layers():
    leaf = SMALL.one(KINDS["stacked"])
    out = stored(tree(qkv=leaf))
    assert {name: x.shape[1] for name, x in out.items()} == {"q.weight": 4, "k.weight": 1, "v.weight": 5}
    assert_same(torch.cat(list(out.values()), 1), gradient(leaf))


def test_stored_gradients_of_a_tied_weight_add_its_uses():
    leaf = SMALL.one(KINDS["tied"])
    assert_same(stored(tree(emb=leaf))["emb.weight"], gradient(leaf))


def test_a_flat_parameter_is_stored_in_its_own_shape():
    leaf = replace(SMALL.one(KINDS["norm"]), parts=(Part("ln.weight", 3, shape=(3, 1)),))
    assert stored(tree(ln=leaf))["ln.weight"].shape == (3, 3, 1)


def test_projected_gradients_have_no_stored_layout():
    leaf = replace(SMALL.one(KINDS["linear"]), basis="two-rademacher-4-seed0")
    with refused("stored: leaf 'fc'", "basis 'two-rademacher-4-seed0'", "not in the parameter's own layout"):
        stored(tree(fc=leaf))


def test_the_empty_tree_reduces_to_itself():
    assert not materialize(GradTree({})) and not aggregate(GradTree({})) and not stored(GradTree({}))
