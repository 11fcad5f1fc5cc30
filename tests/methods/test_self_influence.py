"""Self-influence: the diagonal of what the pairwise methods give."""

import pytest
import torch

from attrax.core import CPU, Blocks, Hardware, Projection, scale_examples
from attrax.methods import fit_ekfac, fit_kfac, graddot, influence, self_influence

from ..core.dense import assert_same, vectors
from ..core.toys import LINEAR, SMALL, Sizes, block, cut, named, refused, source, unchecked

TRAIN, _ = Sizes(B=12, Q=1, T=3, S=1, Ni=3, No=4, seed=2).trees(LINEAR)
fits = pytest.mark.parametrize("fit", [fit_kfac, fit_ekfac])
TIGHT = Hardware(CPU.flops, CPU.bandwidth, CPU.launch, 300)


def test_plain_self_influence_is_the_squared_norm():
    x, _ = SMALL.trees()
    s = self_influence(source(*cut(x, 1, 0, 2)))
    assert_same(s.values, vectors(x).square().sum(1, keepdim=True))
    assert (s.ids, s.query_ids) == (named(3), ("self",))
    assert_same(s.values.flatten(), graddot(source(x), source(x)).values.diagonal())
    assert s.about["method"] == "self_influence" and s.about["curvature"] == "none"


@fits
@pytest.mark.parametrize("damping", [0.1, 2.0])
@pytest.mark.parametrize("projection", [None, Projection(2)])
def test_curved_self_influence_is_the_diagonal_of_the_influence(fit, damping, projection):
    curvature = fit(source(TRAIN), projection=projection)
    expected = influence(curvature, source(TRAIN), source(TRAIN), damping=damping).values.diagonal()
    for blocks, hardware in ((source(TRAIN), CPU), (source(*cut(TRAIN, 5, 0, 7)), TIGHT)):
        with unchecked():
            s = self_influence(blocks, curvature=curvature, damping=damping, hardware=hardware)
        assert_same(s.values.flatten(), expected)
    assert (s.values >= 0).all()
    assert s.about["curvature"] == curvature.method and s.about["damping"].startswith(f"{damping} x")


def test_leaves_outside_the_fit_do_not_enter():
    everything, _ = Sizes(B=12, Q=1, T=3, S=1, Ni=3, No=4).trees()
    x = everything.map(lambda k, leaf: leaf if k in LINEAR else None)
    curvature = fit_kfac(source(x))
    scores = [self_influence(source(side), curvature=curvature).values for side in (everything, x)]
    assert_same(scores[0], scores[1])


def test_the_target_is_that_of_the_fit_if_there_is_one():
    c, n = torch.linspace(0.5, 2, 12, dtype=torch.float64), torch.arange(12) % 3 + 1
    captured = Blocks(
        [block(TRAIN.map(lambda _, leaf: scale_examples(leaf, c)), named(12), weight=c, tokens=n)]
    )
    plain = vectors(TRAIN).square().sum(1, keepdim=True)
    assert_same(self_influence(captured).values, plain)
    assert_same(self_influence(captured, target="mean").values, plain / n[:, None] ** 2)
    assert_same(self_influence(captured, target="as_trained").values, plain * c[:, None] ** 2)
    curvature = fit_ekfac(captured, target="mean")
    s = self_influence(captured, curvature=curvature)
    assert_same(s.values.flatten(), influence(curvature, captured, captured).values.diagonal())
    assert s.about["target"] == "mean"


def test_what_does_not_fit_is_refused():
    curvature = fit_kfac(source(TRAIN))
    with refused("self_influence: ", "'p0'", "'p1' at step 2", "fixed parameters"):
        self_influence(source(TRAIN, fingerprint="p1", step=2), curvature=curvature)
    with refused("self_influence: the train source yielded no examples"):
        self_influence(Blocks([]))
    fewer = TRAIN.map(lambda k, leaf: leaf if k != "linear" else None)
    with refused("self_influence: ", "no train block has: ['linear']", "selection of the fit"):
        self_influence(source(fewer), curvature=curvature)
    with refused("damping: got -0.5", ">= 0"):
        self_influence(source(TRAIN), curvature=curvature, damping=-0.5)
