"""Coordinate masks: which entries of which stored parameter, read off any leaf; and GraSS on top of them."""

from math import prod

import pytest
import torch

from attrax.core import (
    Diagonal,
    GradTree,
    Grass,
    Mask,
    Part,
    Projection,
    coordinates,
    disjoint_masks,
    gather,
    gram,
    grass,
    materialize_leaf,
    project,
    projected,
    stored,
    unstack,
)
from attrax.core.grass import grass_side
from attrax.core.random import stream_key
from attrax.core.sides import Selection
from attrax.core.sketch import sparse_targets

from .dense import assert_same, gradient, vectors
from .maps import matrix_of
from .toys import FACTORED, KINDS, LINEAR, SMALL, Sizes, generator, normal, refused, tree, unchecked

BIG = Sizes(3, 2, 5, 4, 7, 6, seed=3)


def by_parameter(leaf):
    """Gradients of each stored parameter, flattened [B, d]."""
    return {name: w.flatten(1) for name, w in stored(GradTree({"w": leaf})).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [Mask(4), Mask(5, seed=3, scale="none"), Mask(2, masks=2, index=1)])
def test_masked_gradients_are_entries_of_the_stored_gradient(kind, spec):
    """Whatever the leaf's orientation, stacking and folded biases; for a part's own index, read the coordinates."""
    leaf = BIG.one(KINDS[kind])
    out = projected(spec)("layer", leaf)
    grads = by_parameter(leaf)
    assert {part.weight for part in out.parts} == set(grads)
    for part, found in zip(out.parts, out.w.split([p.width for p in out.parts], 1), strict=True):
        whole = grads[part.weight]
        at = coordinates(spec, part.weight, (whole.shape[1],))
        assert part.width == len(at) == min(spec.count, whole.shape[1] // spec.masks)
        scale = (whole.shape[1] / len(at)) ** 0.5 if spec.scale == "unbiased" else 1.0
        assert_same(found, whole[:, at] * scale)


@pytest.mark.parametrize("kind", FACTORED)
@pytest.mark.parametrize(("sparse", "chunk"), [(0, 2**24), (0, 40), (10**9, 2**24)])
def test_gathering_and_building_read_the_same_entries(kind, sparse, chunk, monkeypatch):
    leaf, spec = BIG.one(FACTORED[kind]), Mask(20)
    expected = projected(spec)("layer", leaf).w
    monkeypatch.setattr(gather, "_SPARSE", sparse)
    monkeypatch.setattr(gather, "_CHUNK", chunk)
    assert_same(projected(spec)("layer", leaf).w, expected)


def test_sparse_masks_never_build_a_gradient(monkeypatch):
    """A vocabulary of a hundred million entries would not fit."""
    huge = Sizes(2, 1, 3, 1, 64, 10**8).one(KINDS["embedding"])
    assert projected(Mask(1000))("emb", huge).w.shape == (2, 1000)


def test_masks_of_every_coordinate_are_exact():
    x, y = SMALL.trees()
    everything = Mask(1000)
    assert_same(gram(project(x, everything), project(y, everything)), gram(x, y))
    assert coordinates(everything, "w", (2, 3)).tolist() == list(range(6))


def test_masks_never_change():
    """Masked gradients on disk are only usable with masked queries while these numbers stay."""
    assert coordinates(Mask(5, seed=2), "fc.weight", (40, 50)).tolist() == [30, 510, 827, 918, 1841]
    third = coordinates(Mask(5, seed=2, masks=3, index=2), "fc.weight", (400, 500))
    assert third.tolist() == [41035, 61473, 135974, 157552, 162741]


def test_disjoint_masks_share_no_coordinate_and_fill_one_larger_mask():
    masks = disjoint_masks(Mask(7), 4)
    pieces = [coordinates(mask, "w", (10, 3)) for mask in masks]
    joined = torch.cat(pieces)
    assert all(len(piece) == 7 for piece in pieces) and len(joined.unique()) == 28
    assert joined.sort().values.tolist() == coordinates(Mask(28), "w", (30,)).tolist()


def test_the_mean_of_disjoint_masks_is_the_score_of_their_union():
    x, y = (tree(w=leaf) for leaf in SMALL.pair(LINEAR["linear"]))
    scores = [gram(project(x, mask), project(y, mask)) for mask in disjoint_masks(Mask(3), 4)]
    union = gram(project(x, Mask(12)), project(y, Mask(12)))
    assert_same(torch.stack(scores).mean(0), union)


def test_small_parameters_divide_into_smaller_masks_or_are_refused():
    masks = disjoint_masks(Mask(100), 3)
    assert [len(coordinates(mask, "b", (10,))) for mask in masks] == [3, 3, 3]
    with refused("mask: parameter 'b' of 2 entries has no 3 disjoint masks", "fewer masks"):
        coordinates(masks[0], "b", (2,))


def test_coordinates_do_not_depend_on_stacking():
    leaf = BIG.one(LINEAR["stacked_bias"])
    run = projected(Mask(4))
    together = run("qkv", leaf)
    found = dict(
        zip(
            [p.weight for p in together.parts],
            together.w.split([p.width for p in together.parts], 1),
            strict=True,
        )
    )
    for part in unstack(leaf).values():
        alone = run("other", part)
        for p, w in zip(alone.parts, alone.w.split([p.width for p in alone.parts], 1), strict=True):
            assert_same(w, found[p.weight])


@pytest.mark.parametrize("kind", KINDS)
def test_coordinates_are_asked_for_in_the_stored_shape(kind):
    leaf = BIG.one(KINDS[kind])
    asked = {}
    gather.positions(
        leaf, lambda name, shape: asked.setdefault(name, shape) and torch.zeros(1, dtype=torch.long)
    )
    expected = {name: tuple(w.shape[1:]) for name, w in stored(GradTree({"w": leaf})).items()}
    assert {n: prod(s) for n, s in asked.items()} == {n: prod(s) for n, s in expected.items()}
    if kind != "built_tensor":
        assert asked == expected


def test_a_parameter_of_several_axes_is_one_list_of_entries():
    gen = generator(0)
    x, g = normal(gen, 2, 3, 6), normal(gen, 2, 3, 6)
    leaf = Diagonal(x, g, (Part("ln.weight", 6, shape=(2, 3)),))
    out = projected(Mask(4, scale="none"))("ln", leaf)
    assert_same(out.w, materialize_leaf(leaf).w[:, coordinates(Mask(4), "ln.weight", (2, 3))])


def sparse(spec, parameter, width):
    """S [k, width] of the second stage, the identity where nothing is to be reduced."""
    if width <= spec.dim:
        return torch.eye(width, dtype=torch.float64)
    key = stream_key(spec.seed, parameter, "grass", width, spec.dim, spec.nonzeros)
    rows, signs = sparse_targets(key, slice(0, width), spec.dim, spec.nonzeros)
    S = torch.zeros(spec.dim, width, dtype=torch.float64)
    for c in range(width):
        for b in range(spec.nonzeros):
            S[rows[c, b], c] = float(signs[c, b]) / spec.nonzeros**0.5
    return S


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [Grass(2, blowup=3), Grass(4, nonzeros=2, seed=1, scale="none")])
def test_grass_is_a_sparse_projection_of_a_mask(kind, spec):
    leaf = BIG.one(KINDS[kind])
    masked = projected(Mask(spec.blowup * spec.dim, spec.seed, spec.scale))("layer", leaf)
    pieces = masked.w.split([p.width for p in masked.parts], 1)
    expected = [w @ sparse(spec, p.weight, w.shape[1]).T for p, w in zip(masked.parts, pieces, strict=True)]
    out = projected(spec)("layer", leaf)
    assert [p.weight for p in out.parts] == [p.weight for p in masked.parts]
    assert_same(out.w, torch.cat(expected, 1))


def selection(spec, name, side, width):
    """The mask of one side as a matrix [k', width]."""
    chosen = grass_side(spec, name, side, width)
    if chosen is None:
        return torch.eye(width, dtype=torch.float64)
    assert isinstance(chosen, Selection) and len(chosen.index.unique()) == spec.kept
    scale = (width / spec.kept) ** 0.5 if spec.scale == "unbiased" else 1.0
    return scale * torch.eye(width, dtype=torch.float64)[chosen.index]


@pytest.mark.parametrize("kind", [*LINEAR, "embedding", "tied", "mixed", "built_matrix"])
@pytest.mark.parametrize(
    "spec", [Grass(2, "two", blowup=2), Grass(4, "two", nonzeros=2, scale="none"), Grass(50, "two")]
)
def test_factorized_grass_masks_both_sides_first(kind, spec):
    leaf = BIG.one(KINDS[kind])
    G = gradient(leaf)
    Ma = selection(spec, "layer", "a", G.shape[2])
    expected = []
    for part, rows in zip(leaf.parts, G.split([p.width for p in leaf.parts], 1), strict=True):
        kept = selection(spec, part.weight, "g", part.width) @ rows @ Ma.T
        flat = kept.flatten(1)
        expected.append(flat @ sparse(spec, part.weight, flat.shape[1]).T)
    assert_same(projected(spec)("layer", leaf).w, torch.cat(expected, 1))


def test_grass_touches_only_what_the_mask_keeps(monkeypatch):
    """The sparse projection sees k' numbers, not the gradient."""
    seen = []

    def watched(x, rows, signs, dim):
        seen.append(tuple(x.shape))
        return x.new_zeros(len(x), dim)

    monkeypatch.setattr(grass, "scatter", watched)
    with unchecked():
        projected(Grass(5))("layer", Sizes(2, 1, 3, 1, 100, 100).one(LINEAR["linear"]))
        projected(Grass(5, "two"))("layer", Sizes(2, 1, 3, 1, 100, 100).one(LINEAR["linear"]))
    assert seen == [(2, 20), (2, 25)]


def test_the_default_blow_up_is_four():
    assert Grass(16).mask.count == 64 and Grass(16, "two").kept == 8


def test_maps_keep_what_is_small_enough():
    x, y = SMALL.trees()
    for spec in (Grass(1000), Grass(1000, "two")):
        assert_same(gram(project(x, spec), project(y, spec)), gram(x, y))


def test_dimensions_are_per_parameter():
    leaf = Sizes(2, 1, 3, 1, 30, 40).one(LINEAR["stacked_bias"])
    assert [p.width for p in projected(Grass(8))("w", leaf).parts] == [8, 8, 8, 2]
    assert [p.width for p in projected(Grass(8, "two"))("w", leaf).parts] == [8, 8]
    assert [p.weight for p in projected(Grass(8))("w", leaf).parts] == [
        "q.weight",
        "k.weight",
        "q.bias",
        "k.bias",
    ]
    assert prod(matrix_of(Projection(3, sides="dense"), "w", leaf).shape) == 3 * 42 * 31
    assert vectors(project(GradTree({"w": leaf}), Mask(9))).shape == (2, 9 * 3 + 2)
