"""Random projections: P G P^T with P drawn by name, unbiased at every width."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from attrax.core import (
    Factorized,
    GradTree,
    Materialized,
    Part,
    Projection,
    Sum,
    eigenbasis,
    gram,
    kronecker_sums,
    materialize_leaf,
    project,
    projected,
    spectrum,
    tree_map,
    unstack,
)
from attrax.core import dense as module
from attrax.core.projection import projection_key, projection_matrix

from .dense import assert_same, gradient, vectors
from .toys import (
    FACTORED,
    KINDS,
    LINEAR,
    SMALL,
    SUMS,
    Sizes,
    cut,
    generator,
    law,
    normal,
    refused,
    sizes,
    tree,
    unchecked,
)

MATRICES = {**LINEAR, **{kind: KINDS[kind] for kind in ("embedding", "built_matrix", "tied", "mixed")}}
VECTORS = {kind: KINDS[kind] for kind in ("norm", "bias", "built_vector")}
DRAWN = ("rademacher", "gaussian", "sjlt", "srht")
specs = st.one_of(
    st.builds(Projection, st.integers(1, 4), st.sampled_from(DRAWN), seed=st.integers(0, 99)),
    st.builds(Projection, st.just(4), st.just("sjlt"), seed=st.integers(0, 99), nonzeros=st.just(2)),
)


def side(spec, name, which, width):
    """P [k, width] of one side in float64; the identity where the side is kept."""
    matrix = projection_matrix(spec, name, which, width)
    return torch.eye(width, dtype=torch.float64) if matrix is None else matrix.double().T


def flat_side(spec, width):
    """P [k, width] of the flat gradient; structured matrices have entries 0 or +-c, c in float64."""
    P = side(spec, "layer", "dense", width)
    count = {"sjlt": spec.nonzeros, "srht": spec.dim}.get(spec.kind)
    return P if count is None else P.sign() * count**-0.5


def two_sided(spec, name, leaf):
    """P_g G P_a^T, every stacked part with its own P_g."""
    G = gradient(leaf)
    Pa = side(spec, name, "a", G.shape[2])
    Pg = torch.block_diag(*[side(spec, part.weight, "g", part.width) for part in leaf.parts])
    return Pg @ G @ Pa.T


@pytest.mark.parametrize("kind", MATRICES)
@law(15, size=sizes(empty=True), spec=specs)
def test_two_sided_projection_is_the_product_with_both_matrices(kind, size, spec):
    leaf = size.one(MATRICES[kind])
    expected = two_sided(spec, "layer", leaf)
    for keep_rows in (False, True):
        out = projected(spec, keep_rows=keep_rows)("layer", leaf)
        assert out.basis == spec.basis
        assert [part.width for part in out.parts] == [min(part.width, spec.dim) for part in leaf.parts]
        assert_same(gradient(out), expected)


@pytest.mark.parametrize("kind", VECTORS)
@law(10, size=sizes(), spec=specs)
def test_vectors_are_not_projected_on_two_sides(kind, size, spec):
    leaf = size.one(VECTORS[kind])
    out = projected(spec)("layer", leaf)
    assert out.basis == spec.basis
    assert_same(gradient(out), gradient(leaf))


@pytest.mark.parametrize("kind", KINDS)
@law(15, size=sizes(empty=True), spec=specs)
def test_dense_projection_is_the_product_with_the_flat_gradient(kind, size, spec):
    spec = replace(spec, sides="dense")
    leaf = size.one(KINDS[kind])
    flat = gradient(leaf).flatten(1)
    width = flat.shape[1]
    P = torch.eye(width, dtype=torch.float64) if width <= spec.dim else flat_side(spec, width)
    out = projected(spec)("layer", leaf)
    assert isinstance(out, Materialized) and out.basis == spec.basis
    assert_same(out.w, flat @ P.T)


def test_projecting_the_identity_shows_the_matrix():
    spec = Projection(3, "gaussian", "dense", seed=5)
    units = replace(SMALL.one(KINDS["built_vector"]), w=torch.eye(20, dtype=torch.float64))
    out: Any = projected(spec)("w", units)
    matrix = projection_matrix(spec, "w", "dense", 20)
    assert matrix is not None
    assert_same(out.w, matrix.double())


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("chunk", [1, 7, 64, 10**9])
def test_row_chunks_do_not_change_a_dense_projection(chunk, kind, monkeypatch):
    leaf = Sizes(4, 1, 2, 1, 7, 9).one(KINDS["linear"])
    spec = Projection(5, kind, sides="dense")
    whole: Any = projected(spec)("w", leaf)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    cut: Any = projected(spec)("w", leaf)
    assert_same(cut.w, whole.w)


@pytest.mark.parametrize("sides", ["two", "dense"])
def test_groups_of_examples_are_projected_as_one(sides):
    """The last group is shorter than the others."""
    x, _ = Sizes(10, 1, 2, 1, 30, 5).trees(LINEAR)
    spec = Projection(5, sides=sides)
    groups = [vectors(project(group, spec)) for group in cut(x, 4, 4, 2)]
    assert_same(torch.cat(groups), vectors(project(x, spec)))


def test_matrices_never_change():
    """Projected gradients on disk are only usable with projected queries while these numbers stay."""
    gaussian = projection_matrix(Projection(3, "gaussian", seed=2), "fc.weight", "a", 5)
    assert gaussian is not None
    torch.testing.assert_close(
        gaussian[3], torch.tensor([-0.757385194, 1.04676497, -0.53053689]), rtol=1e-6, atol=0
    )
    expected = {"g": ["+++", "++-", "--+", "+-+", "-+-"], "dense": ["-+-", "--+", "-+-"]}
    for which, rows in expected.items():
        matrix = projection_matrix(Projection(3, seed=2), "fc.weight", which, len(rows))
        assert matrix is not None
        assert ["".join("-+"[int(x > 0)] for x in row) for row in matrix] == rows


def test_any_rows_of_a_matrix_are_those_of_the_whole():
    spec = Projection(5, "gaussian", "dense")
    whole = projection_matrix(spec, "w", "dense", 33)
    assert whole is not None
    for start, stop in ((0, 4), (4, 8), (8, 33), (17, 18)):
        part = projection_matrix(spec, "w", "dense", 33, slice(start, stop))
        assert part is not None and torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("kind", MATRICES)
def test_sides_no_wider_than_the_dimension_are_exact(kind):
    leaf = SMALL.one(MATRICES[kind])
    for spec in (Projection(9), Projection(9, "gaussian")):
        assert_same(gradient(projected(spec)("layer", leaf)), gradient(leaf))
    dense = Projection(200, sides="dense")
    assert_same(gradient(projected(dense)("layer", leaf)).squeeze(1), gradient(leaf).flatten(1))


def test_the_largest_exact_dimension_keeps_gram_matrices():
    x, y = SMALL.trees()
    for spec in (Projection(100), Projection(100, sides="dense")):
        assert_same(gram(project(x, spec), project(y, spec)), gram(x, y))


@pytest.mark.parametrize("which", ["a", "g", "dense"])
@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("width", [48, 192, 768])
def test_inner_products_are_unbiased_at_every_width(which, kind, width):
    """Otherwise a sum over layers would weigh them by their shapes."""
    draws = 100
    u, w = normal(generator(width), 2, width)
    u = u / u.norm()
    w = w - (w @ u) * u
    pair = torch.stack([u, 0.5 * u + 0.75**0.5 * w / w.norm()], 1)
    with unchecked():
        out = torch.stack(
            [side(Projection(16, kind, seed=s), "w", which, width) @ pair for s in range(draws)]
        )
    ratios = torch.stack([(out[..., 0] * out[..., 1]).sum(1) / 0.5, out[..., 0].square().sum(1)])
    error = ratios.std(1) / draws**0.5
    assert ((ratios.mean(1) - 1).abs() <= 5 * error).all(), ratios.mean(1)
    assert (error < 0.1).all()


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_products_of_matrices_projected_on_both_sides_are_unbiased(kind):
    x, y = Sizes(1, 1, 3, 2, 40, 30, seed=1).pair(KINDS["linear"])
    G = gradient(x).squeeze(0)
    H = gradient(y).squeeze(0) + G
    with unchecked():
        specs = [Projection(12, kind, seed=seed) for seed in range(200)]
        sides = [(side(spec, "w", "g", 30), side(spec, "w", "a", 40)) for spec in specs]
    found = torch.stack([((Pg @ G @ Pa.T) * (Pg @ H @ Pa.T)).sum() for Pg, Pa in sides])
    error = found.std() / len(found) ** 0.5
    truth = (G * H).sum()
    assert abs(found.mean() - truth) < 5 * error
    assert error < 0.1 * truth.abs()


def test_matrices_depend_on_seed_name_side_width_dimension_and_kind():
    addresses = [
        (Projection(4), "w", "a", 50),
        (Projection(4, seed=1), "w", "a", 50),
        (Projection(4, "gaussian"), "w", "a", 50),
        (Projection(5), "w", "a", 50),
        (Projection(4), "v", "a", 50),
        (Projection(4), "w", "g", 50),
        (Projection(4), "w", "a", 51),
    ]
    for x, y in itertools.combinations_with_replacement(addresses, 2):
        a, b = projection_matrix(*x), projection_matrix(*y)
        assert a is not None and b is not None
        if x == y:
            assert torch.equal(a, b)
        else:
            both = torch.stack([a[:50, :4].flatten(), b[:50, :4].flatten()])
            assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / 200**0.5


def test_sparse_projections_of_other_sparsity_are_drawn_apart():
    one, two = (Projection(4, "sjlt", nonzeros=s) for s in (1, 2))
    assert projection_key(one, "w", "a", 50) != projection_key(two, "w", "a", 50)


def test_entries_have_variance_one_over_k():
    for kind in ("rademacher", "gaussian"):
        matrix = projection_matrix(Projection(64, kind), "w", "a", 2000)
        assert matrix is not None
        assert float(matrix.square().mean()) == pytest.approx(1 / 64, rel=0.02)
        assert abs(float(matrix.mean())) < 5 / (64 * 128_000) ** 0.5


def test_layers_that_share_an_input_share_its_matrix_only():
    leaf = Sizes(3, 1, 2, 1, 9, 8).one(LINEAR["stacked"])
    spec = Projection(2)
    together = gradient(projected(spec)("qkv", leaf))
    alone = [gradient(projected(spec)("qkv", part)) for part in unstack(leaf).values()]
    assert_same(together, torch.cat(alone, 1))


def test_the_uses_of_a_tied_weight_are_projected_alike():
    """Both uses see one P, so cross terms survive; they join as rows of one leaf."""
    x = Sizes(3, 2, 4, 3, 7, 12).one(SUMS["tied"])
    spec = Projection(3)
    out = projected(spec, keep_rows=True)("emb", x)
    assert isinstance(out, Factorized) and out.calls == 2
    assert_same(gradient(out), two_sided(spec, "emb", x))
    mixed = projected(spec)("w", Sizes(3, 2, 4, 3, 7, 12).one(SUMS["mixed"]))
    assert isinstance(mixed, Sum)


def test_projected_rows_can_be_kept_for_statistics():
    leaf = Sizes(30, 1, 9, 1, 8, 7).one(LINEAR["linear_bias"])
    spec = Projection(3)
    rows = projected(spec, keep_rows=True)("w", leaf)
    assert isinstance(rows, Factorized) and not rows.bias
    built = projected(spec)("w", leaf)
    assert isinstance(built, Materialized)
    basis = eigenbasis(kronecker_sums(rows))
    assert_same(spectrum(rows, basis).total, spectrum(built, basis).total)


def test_projecting_twice_is_projecting_once():
    run = projected(Projection(3))
    for kind in MATRICES:
        once = run("w", Sizes(3, 1, 2, 1, 8, 9).one(MATRICES[kind]))
        assert_same(gradient(run("w", once)), gradient(once))


def test_narrow_gradients_are_projected_in_float32():
    leaf = tree_map(lambda v: v.bfloat16(), SMALL.one(LINEAR["linear"]))
    for spec in (Projection(2), Projection(2, sides="dense")):
        out = projected(spec)("w", leaf)
        assert isinstance(out, Materialized) and out.w.dtype == torch.float32
    assert_same(gradient(projected(Projection(2))("w", leaf)).float(), two_sided(Projection(2), "w", leaf))


def test_trees_are_projected_leaf_by_leaf_under_their_names():
    x, _ = SMALL.trees(LINEAR)
    spec = Projection(2, "gaussian")
    out = project(x, spec)
    assert list(out) == list(x)
    expected = torch.cat([two_sided(spec, name, leaf).flatten(1) for name, leaf in x.items()], 1)
    assert_same(vectors(out), expected)


def test_sides_that_used_different_projections_do_not_meet():
    x, y = SMALL.trees(LINEAR)
    with refused("gram: leaf 'linear'", "two-rademacher-2-seed0", "two-rademacher-2-seed1", "same transform"):
        gram(project(x, Projection(2)), project(y, Projection(2, seed=1)))


@pytest.mark.parametrize("wrong", [dict(dim=0), dict(dim=-3), dict(dim=4, sides="three")])
def test_specifications_without_meaning_are_refused(wrong: dict[str, Any]):
    with refused("project: got Projection(", "dim >= 1", "'two', 'elementwise' or 'dense'"):
        projected(Projection(**wrong))


def test_unknown_kinds_are_refused():
    unknown: Any = "cauchy"
    leaf = SMALL.one(LINEAR["linear"])
    with refused("projection kind: got 'cauchy'", "'rademacher', 'gaussian', 'sjlt', 'srht'"):
        projected(Projection(2, unknown))("w", leaf)


def test_rows_stay_factored_while_they_are_smaller():
    short, long = (Sizes(2, 1, T, 1, 50, 50).one(FACTORED["linear"]) for T in (1, 20))
    run = projected(Projection(16))
    assert isinstance(run("w", short), Factorized) and isinstance(run("w", long), Materialized)


def test_part_names_address_the_output_matrices():
    """A layer keeps its projection whether it is stacked with others or not."""
    leaf = Sizes(3, 1, 2, 1, 4, 9).one(LINEAR["linear"])
    spec = Projection(2)
    renamed = replace(leaf, parts=(Part("other.weight", 9),))
    one, two = (gradient(projected(spec)("w", x)) for x in (leaf, renamed))
    assert not torch.allclose(one, two)
    assert_same(gradient(materialize_leaf(projected(spec)("w", leaf))), two_sided(spec, "w", leaf))
    assert (
        GradTree({"w": leaf}).map(projected(spec))["w"].basis == tree(w=projected(spec)("w", leaf))["w"].basis
    )
