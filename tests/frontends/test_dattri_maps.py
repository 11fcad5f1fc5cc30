"""Dense projections by dattri: one fixed, unbiased matrix per leaf, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("dattri", reason="extra 'dattri'")

from attrax.core import GradTree, Materialized, Part, Projection, gram, project, take
from attrax.frontends import dattri_maps as module
from attrax.frontends.dattri_maps import DattriProjection, dattri_projected

from ..core.dense import assert_same, gradient
from ..core.maps import assert_mean, draws, matrix_of, units
from ..core.toys import KINDS, SMALL, Sizes, refused, tree

SPECS = [DattriProjection(5), DattriProjection(5, "rademacher", seed=3), DattriProjection(130)]
"""The last needs a second, shorter block of dattri's matrix."""
WIDE = Sizes(5, 2, 3, 2, 40, 12, seed=3)


def matrix(spec, leaf) -> Tensor:
    """P [k, d]: what becomes of unit gradients."""
    out: Any = dattri_projected(spec)("w", units(leaf))
    return out.w.double().T


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_leaf_meets_the_same_matrix(kind, spec):
    leaf = WIDE.one(KINDS[kind])
    out = dattri_projected(spec)("w", leaf)
    assert isinstance(out, Materialized) and out.basis == spec.basis
    assert_same(out.w, gradient(leaf).flatten(1) @ matrix(spec, leaf).T)


@pytest.mark.parametrize("spec", SPECS)
def test_groups_of_examples_are_projected_as_one(spec):
    leaf = WIDE.one(KINDS["stacked_bias"])
    run = dattri_projected(spec)
    pieces = [run("w", take(leaf, part)) for part in (slice(0, 3), slice(3, 5))]
    assert_same(torch.cat([gradient(p) for p in pieces]).float(), gradient(run("w", leaf)))


@pytest.mark.parametrize("kind", ["normal", "rademacher"])
def test_inner_products_are_unbiased(kind):
    pair = torch.randn(2, 40, generator=torch.Generator().manual_seed(3))
    leaf = Materialized(pair, (Part("w", 40),))

    def product(seed):
        out: Any = dattri_projected(DattriProjection(8, kind, seed))("w", leaf)
        return out.w[0] @ out.w[1], out.w[0] @ out.w[0]

    truth = torch.tensor([float(pair[0] @ pair[1]), float(pair[0] @ pair[0])])
    assert_mean(draws(300, lambda seed: torch.stack(product(seed))), truth)


def test_every_leaf_has_its_own_matrix():
    """dattri's blocks of seeds 0 and 1000 coincide; hashed seeds do not."""
    leaf = WIDE.one(KINDS["built_vector"])
    one, two = (dattri_projected(DattriProjection(5))(name, leaf) for name in ("w", "v"))
    assert not torch.allclose(gradient(one), gradient(two))


def test_small_leaves_are_exact():
    x, y = SMALL.trees()
    run = dattri_projected(DattriProjection(1000))
    assert_same(gram(x.map(run), y.map(run)), gram(x, y), within=1e-5)


def test_other_maps_do_not_meet_it():
    leaf = WIDE.one(KINDS["linear"])
    run = dattri_projected(DattriProjection(5))
    with refused("gram: leaf 'w'", "dattri-normal-5-cpu-seed0", "same transform"):
        gram(tree(w=run("w", leaf)), project(tree(w=leaf), Projection(5, sides="dense")))
    with refused("dattri: leaf 'w' is in basis", "one map"):
        run("w", project(tree(w=leaf), Projection(2))["w"])
    assert run("w", run("w", leaf)).basis == DattriProjection(5).basis
    assert matrix_of(Projection(5, sides="dense"), "w", leaf).shape == matrix(DattriProjection(5), leaf).shape


def restless(x):
    return torch.randn(len(x), 5)


FAULTY = {
    "does not repeat itself": restless,
    "is not linear": lambda x: x[:, :5].abs() * 40**0.5,
    "scales squared lengths by": lambda x: x[:, :5] / 100,
}


@pytest.mark.parametrize("fault", FAULTY)
def test_faulty_projectors_are_refused(fault, monkeypatch):
    monkeypatch.setattr(module, "_factory", lambda: lambda *args, **kwargs: FAULTY[fault])
    with refused("dattri: leaf 'w'", fault, "Projection(sides='dense')"):
        dattri_projected(DattriProjection(5))("w", WIDE.one(KINDS["linear"]))


@pytest.mark.parametrize("wrong", [dict(dim=0), dict(dim=4, kind="sjlt"), dict(dim=4, kind="random_mask")])
def test_specifications_without_meaning_are_refused(wrong: dict[str, Any]):
    with refused("dattri: got", "'normal' or 'rademacher'"):
        dattri_projected(DattriProjection(**wrong))


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    GradTree({"w": WIDE.one(KINDS["linear"])}).map(dattri_projected(DattriProjection(5)))
    assert torch.equal(torch.get_rng_state(), before)
