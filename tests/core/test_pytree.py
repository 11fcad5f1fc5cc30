"""Values are pytrees: transforms of torch see through them and keep what is static."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from attrax.core import (
    Block,
    Examples,
    GradTree,
    eigenbasis,
    gram,
    gram_leaf,
    kronecker_sums,
    materialize_leaf,
    norms,
    spectrum,
    tree_map,
)

from .dense import assert_same, gradient
from .toys import KINDS, LINEAR, SMALL, block, named, unchecked

kinds = pytest.mark.parametrize("kind", KINDS)
FLOATING = [kind for kind in KINDS if kind not in ("embedding", "tied")]


def static_fields(leaf):
    return pytree.tree_structure(leaf)


@kinds
def test_mapping_keeps_the_type_and_the_static_fields(kind):
    leaf = replace(SMALL.one(KINDS[kind]), basis="k4")
    doubled = tree_map(lambda x: 2 * x, leaf)
    assert type(doubled) is type(leaf)
    assert static_fields(doubled) == static_fields(leaf)
    assert (doubled.parts, doubled.basis) == (leaf.parts, leaf.basis)
    assert all(torch.equal(a, 2 * b) for a, b in zip(*map(pytree.tree_leaves, (doubled, leaf)), strict=True))


@kinds
def test_flattening_and_rebuilding_is_the_identity(kind):
    leaf = SMALL.one(KINDS[kind])
    tensors, structure = pytree.tree_flatten(leaf)
    again = pytree.tree_unflatten(tensors, structure)
    assert all(a is b for a, b in zip(tensors, pytree.tree_leaves(again), strict=True))
    assert pytree.tree_structure(again) == structure
    assert pytree.tree_map(lambda x: x.shape, leaf).parts == leaf.parts


def test_structures_differ_where_static_fields_do():
    leaf = SMALL.one(KINDS["linear"])
    others = [
        replace(leaf, bias=True),
        replace(leaf, calls=2),
        replace(leaf, basis="k4"),
        replace(leaf, parts=()),
    ]
    assert all(static_fields(other) != static_fields(leaf) for other in others)


def test_trees_and_blocks_keep_their_names_and_examples():
    grads, _ = SMALL.trees()
    whole = block(grads, named(3), step=4, micro=1, tokens=torch.tensor([1, 2, 3]), learning_rate=0.1)
    halved = pytree.tree_map(lambda x: x[:2], whole)
    assert (type(halved), type(halved.grads), list(halved.grads)) == (Block, GradTree, list(grads))
    about = halved.examples
    assert (about.ids, about.step, about.micro, about.learning_rate) == (named(3), 4, 1, 0.1)
    assert about.weight is not None and about.weight.tolist() == [1.0, 1.0]
    assert about.tokens is not None and about.tokens.tolist() == [1, 2]


def test_an_unknown_weight_is_no_tensor():
    assert pytree.tree_leaves(Examples(("a",))) == [None, None]


def test_paths_name_the_fields():
    grads, _ = SMALL.trees({"linear": KINDS["linear"]})
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(grads)[0]]
    assert paths == [".leaves[0].a", ".leaves[0].g"]


def test_curvature_states_are_pytrees():
    leaf = SMALL.one(LINEAR["stacked_bias"])
    sums = kronecker_sums(leaf)
    basis = eigenbasis(sums)
    for value in (sums, basis, spectrum(leaf, basis)):
        narrow = tree_map(lambda x: x.float() if x.is_floating_point() else x, value)
        assert type(narrow) is type(value)
        assert getattr(narrow, "parts", None) == getattr(value, "parts", None)


@kinds
def test_vmap_maps_over_stacked_leaves(kind):
    x, y = SMALL.pair(KINDS[kind])
    other = replace(SMALL, seed=11).one(KINDS[kind])
    both = pytree.tree_map(lambda *members: torch.stack(members), x, other)
    S = torch.func.vmap(lambda leaf: gram_leaf(leaf, y))(both)
    assert_same(S, torch.stack([gram_leaf(x, y), gram_leaf(other, y)]))
    built = torch.func.vmap(materialize_leaf)(both)
    assert built.parts == x.parts and built.w.shape[0] == 2
    assert_same(built.w[1], materialize_leaf(other).w)


def test_vmap_maps_over_stacked_trees():
    """An ensemble of models, one tree each."""
    trees = [replace(SMALL, seed=seed).trees()[0] for seed in range(3)]
    ensemble = pytree.tree_map(lambda *members: torch.stack(members), *trees)
    assert isinstance(ensemble, GradTree) and list(ensemble) == list(KINDS)
    assert_same(torch.func.vmap(norms)(ensemble), torch.stack([norms(grads) for grads in trees]))


@pytest.mark.parametrize("kind", FLOATING)
def test_jvp_differentiates_through_leaves(kind):
    """A factored gradient is a product of two factors: moving both along themselves doubles it."""
    x, y = SMALL.pair(KINDS[kind])
    value, change = torch.func.jvp(lambda leaf: gram_leaf(leaf, y), (x,), (x,))[:2]
    assert_same(value, gram_leaf(x, y))
    moved = (1 if kind.startswith("built") else 2) * gradient(x)
    if getattr(x, "bias", False):
        moved[..., -1] /= 2  # the constant column does not move
    if kind == "mixed":
        moved -= gradient(x.uses[1])
    assert_same(change, torch.einsum("boi,qoi->bq", moved, gradient(y)))


def test_grad_differentiates_through_trees():
    grads, _ = SMALL.trees({kind: KINDS[kind] for kind in FLOATING})
    slope: Any = torch.func.grad(lambda tree: (norms(tree) ** 2).sum())(grads)
    assert isinstance(slope, GradTree) and list(slope) == list(grads)
    assert_same(gradient(slope["built_matrix"]), 2 * gradient(grads["built_matrix"]))


@pytest.mark.parametrize("kind", ["linear_bias", "embedding", "norm", "built_matrix", "tied"])
def test_compiled_functions_take_and_return_leaves(kind):
    x, y = SMALL.pair(KINDS[kind])

    def double(leaf):
        return tree_map(lambda v: 2 * v, leaf)

    with unchecked():
        out = torch.compile(double, backend="eager", fullgraph=True)(y)
    assert type(out) is type(y) and static_fields(out) == static_fields(y)
    assert all(
        torch.equal(a, 2 * b) for a, b in zip(pytree.tree_leaves(out), pytree.tree_leaves(y), strict=True)
    )


@pytest.mark.slow
def test_compiled_functions_take_trees():
    x, y = SMALL.trees({kind: KINDS[kind] for kind in ("linear_bias", "embedding", "norm")})
    with unchecked():
        S = torch.compile(gram, backend="eager")(x, y)
    assert_same(S, gram(x, y))


@kinds
def test_values_are_immutable(kind):
    grads, _ = SMALL.trees({kind: KINDS[kind]})
    assert not hasattr(grads, "__setitem__")
    for value, field in ((grads, "leaves"), (grads[kind], "parts"), (Examples(("a",)), "ids")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, ())
