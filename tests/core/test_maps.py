"""Every map is one matrix: for every kind of leaf, however the examples are cut, with its own label."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from attrax.core import (
    Grass,
    Leaf,
    Mask,
    Projection,
    concat_rows,
    fit_subspace,
    gram,
    kronecker_sums,
    project,
    projected,
    tree_map,
    unstack,
)
from attrax.core.leaves import dtype_of

from .dense import assert_same, gradient, vectors
from .maps import matrix_of
from .toys import KINDS, LINEAR, SMALL, Sizes, cut, refused, tree, unchecked

MAPS: dict[str, Any] = {
    "rademacher": Projection(2),
    "gaussian": Projection(2, "gaussian"),
    "sjlt": Projection(2, "sjlt", nonzeros=2),
    "srht": Projection(2, "srht"),
    "elementwise": Projection(3, sides="elementwise"),
    "elementwise_gaussian": Projection(3, "gaussian", sides="elementwise"),
    "dense": Projection(3, sides="dense"),
    "dense_sjlt": Projection(4, "sjlt", "dense", nonzeros=2),
    "dense_srht": Projection(3, "srht", "dense"),
    "mask": Mask(3),
    "mask_raw": Mask(2, scale="none", masks=2, index=1),
    "grass": Grass(2, blowup=3),
    "grass_two": Grass(2, "two", blowup=2, nonzeros=2),
}
"""One of every kind."""
BIG = Sizes(3, 2, 5, 4, 7, 6, seed=3)
maps = pytest.mark.parametrize("which", MAPS)
kinds = pytest.mark.parametrize("kind", KINDS)


@maps
@kinds
def test_every_kind_of_leaf_meets_the_same_matrix(which, kind):
    """The matrix is what the map makes of unit gradients; rows, one-hots and sums must give its product."""
    spec = MAPS[which]
    with unchecked():
        for size in (SMALL, BIG, Sizes(0, 0, 2, 2, 3, 4), Sizes(2, 2, 0, 1, 3, 4)):
            leaf = size.one(KINDS[kind])
            expected = gradient(leaf).flatten(1) @ matrix_of(spec, "layer", leaf).T
            for keep_rows in (False, True):
                out = projected(spec, keep_rows=keep_rows)("layer", leaf)
                assert out.basis == spec.basis
                assert_same(gradient(out).flatten(1), expected)


@maps
def test_checked_leaves_of_every_kind_pass(which):
    x, _ = SMALL.trees()
    assert list(project(x, MAPS[which])) == list(x)


@maps
def test_groups_of_examples_are_mapped_as_one(which):
    """The last group is shorter than the others."""
    x, _ = Sizes(10, 1, 2, 1, 7, 6).trees()
    run = projected(MAPS[which])
    with unchecked():
        groups = [vectors(group.map(run)) for group in cut(x, 4, 4, 2)]
        assert_same(torch.cat(groups), vectors(project(x, MAPS[which])))


@maps
def test_calls_of_a_layer_are_mapped_as_their_sum(which):
    run = projected(MAPS[which])
    for kind in ("stacked_bias", "embedding", "norm", "bias"):
        x, y = replace(BIG, Q=3, S=5).pair(KINDS[kind])
        with unchecked():
            expected = gradient(run("w", x)) + gradient(run("w", y))
            assert_same(gradient(run("w", concat_rows([x, y]))), expected)


@maps
def test_a_map_is_applied_once(which):
    run = projected(MAPS[which])
    once = run("w", BIG.one(LINEAR["stacked_bias"]))
    assert run("w", once) is once
    with refused("project: leaf 'w'", once.basis, "rademacher-9", "one map"):
        projected(Projection(9))("w", once)


def test_gradients_of_different_maps_do_not_meet():
    leaf = SMALL.one(LINEAR["linear"])
    mapped = [tree(w=projected(spec)("w", leaf)) for spec in MAPS.values()]
    for one, two in itertools.combinations([*mapped, tree(w=leaf)], 2):
        with refused("gram: leaf 'w'", "basis", "same transform"):
            gram(one, two)


@pytest.mark.parametrize(
    "spec",
    [Projection(4, "sjlt", nonzeros=2), Mask(5), Mask(5, masks=2), Grass(4), Grass(4, "two", nonzeros=2)],
)
def test_labels_tell_every_field(spec: Any):
    other: dict[str, Any] = {
        "dim": 8, "count": 7, "kind": "srht", "sides": "dense" if spec != Grass(4) else "two", "seed": 1,
        "nonzeros": 4, "scale": "none", "masks": 3, "index": 1, "blowup": 2,
    }  # fmt: skip
    for name in spec.__dataclass_fields__:
        assert replace(spec, **{name: other[name]}).basis != spec.basis, name


@maps
@pytest.mark.parametrize("kind", ["stacked_bias", "embedding", "norm", "tied", "built_matrix"])
def test_narrow_gradients_are_mapped_in_float32(which, kind):
    run = projected(MAPS[which])

    def cast(leaf: Leaf, dtype: torch.dtype) -> Leaf:
        return tree_map(lambda v: v.to(dtype) if v.is_floating_point() else v, leaf)

    with unchecked():
        narrow = cast(BIG.one(KINDS[kind]), torch.bfloat16)
        out = run("layer", narrow)
        assert dtype_of(out) == torch.float32
        assert_same(gradient(out), gradient(run("layer", cast(narrow, torch.float64))), within=1e-5)


@pytest.mark.parametrize("which", [w for w in MAPS if "two" in w or MAPS[w].basis.startswith("two")])
def test_layers_that_share_an_input_are_mapped_as_alone(which):
    """Side a goes by the leaf's name, side g by the part's."""
    leaf = BIG.one(LINEAR["stacked_bias"])
    run = projected(MAPS[which])
    parts = {name: gradient(run("qkv", part)).flatten(1) for name, part in unstack(leaf).items()}
    together = run("qkv", leaf)
    pieces = (
        gradient(together).squeeze(1).split([p.width for p in together.parts], -1 if _flat(together) else 1)
    )
    for piece, alone in zip(pieces, parts.values(), strict=True):
        assert_same(piece.flatten(1), alone)


def _flat(leaf: Leaf) -> bool:
    return gradient(leaf).shape[1] == 1


def test_the_subspace_of_a_fit_is_a_map_too():
    leaf = BIG.one(LINEAR["stacked_bias"])
    fit = fit_subspace({"layer": kronecker_sums(leaf)}, 2)
    expected = gradient(leaf).flatten(1) @ matrix_of(fit, "layer", leaf).T
    assert_same(gradient(projected(fit)("layer", leaf)).flatten(1), expected)


@pytest.mark.parametrize(
    "wrong",
    [
        Mask(0), Mask(3, masks=2, index=2), Grass(0), Grass(3, nonzeros=2), Grass(3, blowup=0),
        Projection(3, "sjlt", nonzeros=2), Projection(4, "srht", "elementwise"),
    ],
)  # fmt: skip
def test_specifications_without_meaning_are_refused(wrong: Any):
    with refused("got", "expected"):
        projected(wrong)("w", Sizes(1, 1, 1, 1, 9, 9).one(LINEAR["linear"]))
