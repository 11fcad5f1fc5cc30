"""LoGRA against dense solves with the Fisher of the projected gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attrax.core import (
    Blocks,
    GradTree,
    Projection,
    factorized,
    fit_subspace,
    kronecker_sums,
    project,
    scale_examples,
)
from attrax.methods import fit_logra, graddot, logra, score_logra

from ..core.dense import assert_same, gradient
from ..core.toys import LINEAR, Sizes, block, cut, named, refused, source, tree

FIT = Sizes(B=20, Q=3, T=3, S=2, Ni=5, No=4, seed=8)
TRAIN, QUERY = FIT.trees(LINEAR)
EVERYTHING, QUESTIONS = FIT.trees()


def dense_logra(train: GradTree, query: GradTree, spec: Any, damping: float) -> torch.Tensor:
    """x^T (F + damping tr(F)/d)^-1 x over layers, each part of a stack on its own."""
    total = torch.zeros(())
    for name, leaf in project(train, spec).items():
        widths = [part.width for part in leaf.parts]
        sides = (gradient(side).split(widths, 1) for side in (leaf, project(query, spec)[name]))
        for X, V in zip(*sides, strict=True):
            X, V = X.flatten(1), V.flatten(1)
            F = X.T @ X / len(X)
            d = len(F)
            total = total + X @ torch.linalg.solve(
                F + damping * F.trace() / d * torch.eye(d, dtype=F.dtype), V.T
            )
    return total


@pytest.mark.parametrize("dim", [2, 3, 16])
@pytest.mark.parametrize("damping", [0.1, 1.0])
def test_scores_solve_with_the_fisher_of_projected_gradients(dim, damping):
    s = logra(source(TRAIN), source(QUERY), dim=dim, damping=damping, seed=4)
    assert_same(s.values, dense_logra(TRAIN, QUERY, Projection(dim, seed=4), damping))
    assert (s.ids, s.query_ids) == (named(20), named(3))
    assert s.about["method"] == "logra" and s.about["projection"] == f"two-rademacher-{dim}-seed4"
    assert s.about["damping"] == f"{damping} x mean eigenvalue of each layer"


def test_the_fisher_is_the_mean_of_outer_products():
    spec = Projection(2, "gaussian")
    fit = fit_logra(source(TRAIN), projection=spec)
    for name, leaf in project(TRAIN, spec).items():
        blocks = gradient(leaf).split([part.width for part in leaf.parts], 1)
        for F, X in zip(fit.fisher[name], blocks, strict=True):
            assert_same(F, X.flatten(1).T @ X.flatten(1) / 20)
    assert (fit.examples, fit.fingerprint, fit.target) == (20, "p0", "sum")


@pytest.mark.parametrize("lengths", [(20,), (1, 19), (7, 0, 13)])
def test_fits_and_scores_do_not_depend_on_blocks(lengths):
    spec = Projection(2)
    fit = fit_logra(source(*cut(TRAIN, *lengths)), projection=spec)
    s = score_logra(fit, source(*cut(TRAIN, *lengths)), source(*cut(QUERY, 2, 1)))
    assert_same(s.values, dense_logra(TRAIN, QUERY, spec, 0.1))


def test_a_fit_is_scored_again_without_refitting():
    fit = fit_logra(source(TRAIN), projection=Projection(2))
    for damping in (0.1, 3.0, 0.1):
        s = score_logra(fit, source(TRAIN), source(QUERY), damping=damping)
        assert_same(s.values, dense_logra(TRAIN, QUERY, Projection(2), damping))


@pytest.mark.parametrize(
    "spec",
    [
        fit_subspace({name: kronecker_sums(leaf) for name, leaf in TRAIN.items()}, 2),
        Projection(2, "srht"),
        Projection(2, "sjlt", nonzeros=2),
    ],
)
def test_any_map_of_layers_serves(spec: Any):
    """Among them PCA-initialised LoGRA."""
    fit = fit_logra(source(TRAIN), projection=spec)
    s = score_logra(fit, source(TRAIN), source(QUERY))
    assert_same(s.values, dense_logra(TRAIN, QUERY, spec, 0.1))
    assert s.about["projection"] == spec.basis


def test_already_projected_gradients_score_the_same():
    spec = Projection(2)
    train, query = (source(project(side, spec)) for side in (TRAIN, QUERY))
    fit = fit_logra(train, projection=spec)
    assert_same(score_logra(fit, train, query).values, dense_logra(TRAIN, QUERY, spec, 0.1))


def test_queries_of_different_lengths_are_scored_together():
    short = replace(FIT, S=1).trees(LINEAR)[1]
    s = logra(source(TRAIN), source(QUERY, short), dim=3)
    both = [dense_logra(TRAIN, side, Projection(3), 0.1) for side in (QUERY, short)]
    assert_same(s.values, torch.cat(both, 1))


def test_heavy_damping_leaves_projected_inner_products():
    spec = Projection(3)
    train, query = tree(fc=TRAIN["linear"]), tree(fc=QUERY["linear"])
    damping = 1e9
    s = score_logra(fit_logra(source(train), projection=spec), source(train), source(query), damping=damping)
    X = gradient(project(train, spec)["fc"]).flatten(1)
    weight = damping * X.square().sum() / len(X) / X.shape[1]
    dots = graddot(source(project(train, spec)), source(project(query, spec)))
    assert_same(s.values * weight, dots.values, within=1e-6)


def test_leaves_out_of_scope_do_not_enter():
    s = logra(source(EVERYTHING), source(QUESTIONS), dim=2)
    linear = [GradTree({k: side[k] for k in (*LINEAR, "built_matrix")}) for side in (EVERYTHING, QUESTIONS)]
    assert_same(s.values, dense_logra(linear[0], linear[1], Projection(2), 0.1))
    one = logra(source(EVERYTHING), source(QUESTIONS), dim=2, scope=lambda name, _: name == "conv1d")
    conv1d = [tree(conv1d=side["conv1d"]) for side in (EVERYTHING, QUESTIONS)]
    assert_same(one.values, dense_logra(conv1d[0], conv1d[1], Projection(2), 0.1))


def test_the_target_applies_to_fit_and_scores():
    c, n = torch.linspace(0.5, 2, 20, dtype=torch.float64), torch.arange(20) % 5 + 1
    captured = TRAIN.map(lambda _, leaf: scale_examples(leaf, c))
    train = Blocks([block(captured, named(20), weight=c, tokens=n)])
    query = source(QUERY, tokens=torch.ones(3, dtype=torch.int64))
    mean = TRAIN.map(lambda _, leaf: scale_examples(leaf, 1 / n.double()))
    assert_same(logra(train, query, dim=2).values, dense_logra(TRAIN, QUERY, Projection(2), 0.1))
    assert_same(
        logra(train, query, dim=2, target="mean").values, dense_logra(mean, QUERY, Projection(2), 0.1)
    )


def test_scores_hold_at_the_parameters_of_the_fit_only():
    fit = fit_logra(source(TRAIN), projection=Projection(2))
    moved: dict[str, Any] = dict(fingerprint="p1", step=9)
    for train, query in ((source(TRAIN), source(QUERY, **moved)), (source(TRAIN, **moved), source(QUERY))):
        with refused("logra: ", "'p0'", "'p1' at step 9", "fixed parameters"):
            score_logra(fit, train, query)
    blocks = [block(TRAIN, named(20)), block(TRAIN, named(20), fingerprint="p1")]
    with refused("fit_logra: ", "'p1'", "fixed parameters"):
        fit_logra(Blocks(blocks), projection=Projection(2))


def test_fits_refuse_what_they_cannot_answer():
    spec = Projection(2)
    with refused("fit_logra: no leaf is in scope", "scope="):
        fit_logra(source(TRAIN), projection=spec, scope=lambda *_: False)
    with refused("fit_logra: the source yielded no examples"):
        fit_logra(Blocks([]), projection=spec)
    with refused("damping: got -1", ">= 0"):
        logra(source(TRAIN), source(QUERY), dim=2, damping=-1)
    with refused("logra: needs several passes", "can be read once", "Use a store"):
        logra(Blocks(iter(source(TRAIN).blocks)), source(QUERY), dim=2)
    fit = fit_logra(source(TRAIN), projection=spec)
    fewer = QUERY.map(lambda k, leaf: leaf if k != "linear" else None)
    with refused("logra: train leaf 'linear' has no query gradient"):
        score_logra(fit, source(TRAIN), source(fewer))


def test_a_fisher_that_cannot_be_solved_names_its_layer():
    few = tree(fc=factorized("fc.weight", torch.ones(1, 1, 4), torch.ones(1, 1, 4)))
    with refused("logra: layer 'fc'", "singular", "positive damping"):
        score_logra(fit_logra(source(few), projection=Projection(4)), source(few), source(few), damping=0.0)
    broken = tree(fc=factorized("fc.weight", torch.full((1, 1, 4), torch.nan), torch.ones(1, 1, 4)))
    with refused("logra: layer 'fc'", "non-finite", "on_nonfinite='skip'"):
        score_logra(fit_logra(source(broken), projection=Projection(4)), source(broken), source(broken))
