"""K-FAC and EK-FAC influence against dense Kronecker products, covariances and solves."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from attrax.core import (
    Blocks,
    Eigenbasis,
    Factorized,
    GradTree,
    Part,
    Projection,
    Source,
    factorized,
    is_linear,
    project,
    projected,
    scale_examples,
    take,
    transformed,
    tree_map,
    unstack,
)
from attrax.methods import Curvature, ekfac, fit_ekfac, fit_kfac, influence, kfac, preconditioned

from ..core.dense import assert_same, gradient
from ..core.toys import LINEAR, Sizes, block, cut, generator, named, normal, refused, source, tree

FIT = Sizes(B=30, Q=3, T=3, S=2, Ni=3, No=4, seed=5)
TRAIN, QUERY = FIT.trees(LINEAR)
EVERYTHING, QUESTIONS = FIT.trees()
METHODS = {"kfac": (kfac, fit_kfac), "ekfac": (ekfac, fit_ekfac)}
methods = pytest.mark.parametrize("name", METHODS)


def layers(grads: GradTree) -> GradTree:
    """Every layer on its own, stacks taken apart."""
    stacks = {k: leaf for k, leaf in grads.items() if isinstance(leaf, Factorized)}
    return GradTree({f"{k}/{w}": one for k, leaf in stacks.items() for w, one in unstack(leaf).items()})


def dense_curvature(leaf: Any, method: str) -> torch.Tensor:
    """[No Ni, No Ni] over row-major vectors, from covariances over rows with a gradient and their eigenvectors."""
    g, a = leaf.g.flatten(0, 1), leaf.a.flatten(0, 1)
    a = torch.cat([a, torch.ones(len(a), int(leaf.bias), dtype=a.dtype)], 1)
    seen = g.abs().sum(1) > 0
    A, C = (x[seen].T @ x[seen] / seen.sum() for x in (a, g))
    positions = seen.sum() / leaf.g.shape[0]
    if method == "kfac":
        return torch.kron(C, A) * positions
    Q = torch.kron(torch.linalg.eigh(C).eigenvectors, torch.linalg.eigh(A).eigenvectors)
    G = gradient(leaf).flatten(1)
    return Q @ (G @ Q).square().mean(0).diag() @ Q.T


def dense_influence(train: GradTree, query: GradTree, method: str, damping: float) -> torch.Tensor:
    total = torch.zeros(())
    for name, leaf in layers(train).items():
        H = dense_curvature(leaf, method)
        damped = H + damping * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
        V = gradient(layers(query)[name]).flatten(1)
        total = total + gradient(leaf).flatten(1) @ torch.linalg.solve(damped, V.T)
    return total


@methods
@pytest.mark.parametrize("damping", [0.1, 2.0])
def test_scores_are_those_of_the_dense_curvature(name, damping):
    """Stacked layers share an input covariance, each with damping relative to its own mean."""
    method, _ = METHODS[name]
    s = method(source(TRAIN), source(QUERY), damping=damping)
    assert_same(s.values, dense_influence(TRAIN, QUERY, name, damping))
    assert (s.ids, s.query_ids) == (named(30), named(3))
    assert s.about["method"] == name and s.about["damping"] == f"{damping} x mean eigenvalue of each layer"
    assert s.about["fisher"] == "empirical" and s.about["target"] == "sum" and s.about["projection"] == "none"


@methods
def test_a_fit_is_scored_again_without_refitting(name):
    method, fit = METHODS[name]
    curvature = fit(source(TRAIN))
    before = [x.clone() for x in pytree.tree_leaves(curvature)]
    for damping in (0.1, 0.5, 0.1):
        s = influence(curvature, source(TRAIN), source(QUERY), damping=damping)
        assert_same(s.values, method(source(TRAIN), source(QUERY), damping=damping).values)
    assert all(torch.equal(x, y) for x, y in zip(before, pytree.tree_leaves(curvature), strict=True))


def test_the_corrected_spectrum_is_used_for_scoring():
    """A small classifier's second layer: EK-FAC and K-FAC scores differ clearly."""
    gen = generator(56)
    W1, W2 = normal(gen, 4, 3), normal(gen, 3, 4)
    leaves = []
    for n in (8, 2):
        x, y = normal(gen, n, 3), torch.randint(3, (n,), generator=gen)
        h = torch.tanh(x @ W1.T)
        p = functional.softmax(h @ W2.T, 1) - functional.one_hot(y, 3)
        leaves.append(factorized("l2.weight", h.unsqueeze(1), p.unsqueeze(1)))
    train, query = (tree(l2=leaf) for leaf in leaves)
    scores = {name: method(source(train), source(query)).values for name, (method, _) in METHODS.items()}
    for name, values in scores.items():
        assert_same(values, dense_influence(train, query, name, 0.1))
    assert (scores["ekfac"] - scores["kfac"]).norm() > 0.2 * scores["kfac"].norm()


def linear_only(grads: GradTree) -> GradTree:
    return GradTree({k: leaf for k, leaf in grads.items() if is_linear(k, leaf)})


@methods
def test_leaves_out_of_scope_do_not_enter(name):
    """By default: linear layers without embeddings, norms and the head."""
    method, fit = METHODS[name]
    a, g = normal(generator(0), 30, 2, 3), normal(generator(1), 30, 2, 4)
    head = factorized([Part("lm_head.weight", 4, head=True)], a, g)
    factored = {k: leaf for k, leaf in EVERYTHING.items() if not k.startswith("built")}
    train = GradTree({**factored, "head": head})
    query = GradTree({**{k: QUESTIONS[k] for k in factored}, "head": take(head, slice(0, 3))})
    assert set(fit(source(train)).bases) == set(LINEAR)
    expected = dense_influence(linear_only(train), linear_only(query), name, 0.1)
    assert_same(method(source(train), source(query)).values, expected)
    chosen = method(source(train), source(query), scope=lambda k, _: k in ("head", "linear"))
    two_layers = [GradTree({k: side[k] for k in ("head", "linear")}) for side in (train, query)]
    assert_same(chosen.values, dense_influence(two_layers[0], two_layers[1], name, 0.1))


@methods
@pytest.mark.parametrize("dim", [2, 3, 50])
def test_curvature_on_projected_factors_is_that_of_the_projected_layers(name, dim):
    method, fit = METHODS[name]
    spec = Projection(dim, seed=3)
    s = method(source(TRAIN), source(QUERY), projection=spec)
    train, query = (side.map(projected(spec, keep_rows=True)) for side in (TRAIN, QUERY))
    assert_same(s.values, dense_influence(train, query, name, 0.1))
    assert s.about["projection"] == spec.basis and fit(source(TRAIN), projection=spec).projection == spec
    if dim == 50:
        assert_same(s.values, dense_influence(TRAIN, QUERY, name, 0.1))


@methods
def test_already_projected_gradients_score_the_same(name):
    _, fit = METHODS[name]
    spec = Projection(2)
    curvature = fit(source(TRAIN), projection=spec)
    expected = influence(curvature, source(TRAIN), source(QUERY)).values
    stored = [source(project(side, spec)) for side in (TRAIN, QUERY)]
    assert_same(influence(curvature, *stored).values, expected)


@methods
def test_fits_do_not_depend_on_blocks(name):
    _, fit = METHODS[name]
    whole = fit(source(TRAIN))
    for lengths in ((1, 29), (10, 0, 20), (30,)):
        other = fit(source(*cut(TRAIN, *lengths)))
        assert other.examples == 30
        for k, values in whole.eigenvalues.items():
            assert_same(other.eigenvalues[k], values, within=1e-9)
        assert_same(
            influence(other, source(TRAIN), source(QUERY)).values,
            influence(whole, source(TRAIN), source(QUERY)).values,
            within=1e-9,
        )


@methods
def test_a_fit_in_one_order_scores_another(name):
    """Rows are matched by id, never by position."""
    _, fit = METHODS[name]
    order = torch.randperm(30, generator=generator(87))
    shuffled = Blocks(
        [block(TRAIN.map(lambda _, leaf: take(leaf, order)), tuple(f"x{i}" for i in order.tolist()))]
    )
    s = influence(fit(shuffled), source(TRAIN), source(QUERY))
    turned = influence(fit(source(TRAIN)), shuffled, source(QUERY))
    assert turned.ids != s.ids
    assert_same(turned.in_order(s.ids).values, s.values, within=1e-9)


@methods
def test_the_loss_weight_of_a_batch_does_not_reach_the_curvature(name):
    """Captured gradients hold c G: without undoing it, covariances of small batches would count c^2 times."""
    method, _ = METHODS[name]
    c = torch.linspace(0.1, 2, 30, dtype=torch.float64)
    captured = TRAIN.map(lambda _, leaf: scale_examples(leaf, c))
    blocks = [
        block(g, ids, weight=c[s])
        for g, ids, s in zip(
            cut(captured, 10, 20), (named(10), named(20, 10)), (slice(0, 10), slice(10, 30)), strict=True
        )
    ]
    s = method(Blocks(blocks), source(QUERY))
    assert_same(s.values, dense_influence(TRAIN, QUERY, name, 0.1), within=1e-9)
    trained = method(Blocks(blocks), source(QUERY), target="as_trained")
    assert_same(trained.values, dense_influence(captured, QUERY, name, 0.1), within=1e-9)


class Labeled(Blocks):
    """Gradients whose sampled labels flip the sign of some output gradients, as the seed says."""

    def resample(self, seed: int) -> Source:
        def flip(_, leaf):
            signs = torch.randint(0, 2, (leaf.g.shape[-1],), generator=generator(seed)) * 2.0 - 1
            return replace(leaf, g=leaf.g * signs)

        return transformed(self, flip)


@methods
def test_a_sampled_fisher_is_fitted_on_sampled_labels(name):
    """The fit sees the samples, in both passes the same; the scores see the data."""
    method, fit = METHODS[name]
    live = Labeled(source(TRAIN).blocks)
    sampled = fit(live, fisher="sampled", seed=4)
    assert sampled.fisher == "sampled"
    expected = fit(live.resample(4))
    for k, values in expected.eigenvalues.items():
        assert_same(sampled.eigenvalues[k], values)
    s = method(live, source(QUERY), fisher="sampled", seed=4)
    assert_same(s.values, influence(expected, source(TRAIN), source(QUERY)).values)
    assert s.about["fisher"] == "sampled"
    assert not torch.allclose(s.values, method(live, source(QUERY), fisher="sampled", seed=5).values)


def test_preconditioning_drops_what_was_not_fitted():
    curvature = fit_kfac(source(TRAIN))
    run = preconditioned(curvature)
    assert run("absent", TRAIN["linear"]) is None
    solved = run("linear", QUERY["linear"])
    assert solved is not None
    expected = dense_influence(tree(x=TRAIN["linear"]), tree(x=QUERY["linear"]), "kfac", 0.1)
    assert_same(gradient(TRAIN["linear"]).flatten(1) @ gradient(solved).flatten(1).T, expected)


def test_scores_predict_the_loss_after_removal():
    """Ridge regression solved exactly: a positive score means that removing the example raises the query's loss."""
    gen = generator(69)
    n, ridge = 12, 0.1
    X, Xq = normal(gen, n, 3), normal(gen, 4, 3)
    truth = normal(gen, 3)
    y, yq = X @ truth + normal(gen, n), Xq @ truth + normal(gen, 4)
    eye = torch.eye(3, dtype=torch.float64)

    def solve(rows: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(X[rows].T @ X[rows] / n + ridge * eye, X[rows].T @ y[rows] / n)

    def loss(theta: torch.Tensor) -> torch.Tensor:
        return 0.5 * (Xq @ theta - yq).square()

    every = torch.arange(n)
    theta = solve(every)
    removal = torch.stack([loss(solve(every[every != i])) - loss(theta) for i in range(n)])

    def side(inputs: torch.Tensor, labels: torch.Tensor) -> GradTree:
        residual = (inputs @ theta - labels)[:, None, None]
        return tree(w=factorized("w", inputs.unsqueeze(1), residual))

    values, vectors = torch.linalg.eigh(X.T @ X / n)
    parts = (Part("w", 1),)
    one = torch.ones(1, dtype=torch.float64)
    basis = Eigenbasis(vectors, (one.reshape(1, 1),), values, (one,), one.squeeze(), parts)
    hessian = Curvature({"w": basis}, {"w": values.unsqueeze(0)}, "kfac", "empirical", "sum", "p0", n)
    s = influence(hessian, source(side(X, y)), source(side(Xq, yq)), damping=ridge / float(values.mean()))
    g, v = (gradient(side(*rows)["w"]).flatten(1) for rows in ((X, y), (Xq, yq)))
    assert_same(s.values, g @ torch.linalg.solve(X.T @ X / n + ridge * eye, v.T))
    effect = s.values / n
    assert float(torch.corrcoef(torch.stack([effect.flatten(), removal.flatten()]))[0, 1]) > 0.9
    large = effect.abs() > 0.1 * effect.abs().max()
    assert (effect.sign() == removal.sign())[large].all()


def test_a_wide_layer_keeps_diagonals():
    curvature = fit_kfac(source(TRAIN), max_dim=3)
    basis = curvature.bases["linear"]
    assert basis.ua is not None and basis.ug == (None,)
    s = influence(curvature, source(TRAIN), source(QUERY))
    assert s.values.isfinite().all()


def test_curvature_is_a_value():
    curvature = fit_ekfac(source(TRAIN))
    narrow = tree_map(lambda x: x.float() if x.is_floating_point() else x, curvature)
    assert isinstance(narrow, Curvature)
    assert (narrow.method, narrow.fingerprint, narrow.examples) == ("ekfac", "p0", 30)
    assert narrow.eigenvalues["linear"].dtype == torch.float32
    for field in ("method", "bases", "examples"):
        with pytest.raises(FrozenInstanceError):
            setattr(curvature, field, None)


@methods
def test_scores_hold_at_the_parameters_of_the_fit_only(name):
    _, fit = METHODS[name]
    curvature = fit(source(TRAIN))
    moved = dict(fingerprint="p1", step=9)
    with refused(f"{name}: ", "'p0'", "'p1' at step 9", "fixed parameters"):
        influence(curvature, source(TRAIN), source(QUERY, **moved))
    with refused(f"{name}: ", "'p0'", "'p1' at step 9", "fixed parameters"):
        influence(curvature, source(TRAIN, **moved), source(QUERY))
    with refused(f"fit_{name}: ", "'p1'", "fixed parameters"):
        fit(Blocks([block(TRAIN, named(30)), block(TRAIN, named(30), fingerprint="p1")]))


@methods
def test_fits_refuse_what_they_cannot_answer(name):
    method, fit = METHODS[name]
    unknown: Any = "true"
    with refused(f"fit_{name}: fisher: got 'true'", "'empirical' or 'sampled'"):
        fit(source(TRAIN), fisher=unknown)
    with refused(f"fit_{name}: fisher='sampled'", "which Blocks does not hold", "fisher='empirical'"):
        fit(source(TRAIN), fisher="sampled")
    with refused(f"fit_{name}: no leaf is in scope", "scope="):
        fit(source(TRAIN), scope=lambda *_: False)
    with refused(f"fit_{name}: the source yielded no examples"):
        fit(Blocks([]))
    with refused("damping: got -0.1", ">= 0"):
        method(source(TRAIN), source(QUERY), damping=-0.1)
    once = Blocks(iter(source(TRAIN).blocks))
    with refused("needs several passes", "can be read once", "Use a store"):
        method(once, source(QUERY))
    leaf = FIT.one(LINEAR["stacked"])
    broken = replace(leaf, a=leaf.a.index_fill(0, torch.tensor([3]), torch.nan))
    with refused("eigenbasis: layer 'q.weight'", "non-finite"):
        fit(source(tree(qkv=broken)))


@methods
def test_layers_must_be_those_of_the_fit(name):
    _, fit = METHODS[name]
    curvature = fit(source(TRAIN))
    fewer = QUERY.map(lambda k, leaf: leaf if k != "linear" else None)
    with refused(f"{name}: train leaf 'linear' has no query gradient"):
        influence(curvature, source(TRAIN), source(fewer))
    with refused(f"{name}: ", "no train block has: ['linear']"):
        influence(
            curvature, source(TRAIN.map(lambda k, leaf: leaf if k != "linear" else None)), source(QUERY)
        )
    other = GradTree({**QUERY, "linear": QUERY["conv1d"]})
    with refused("curvature: leaf covers ['c_fc.weight']", "the fit ['fc.weight']"):
        influence(curvature, source(TRAIN), source(other))


def test_a_hook_free_model_gives_the_same_curvature():
    """Rows captured from a linear layer by hand fit the covariances of its inputs and output gradients."""
    gen = generator(11)
    layer = nn.Linear(3, 2, dtype=torch.float64)
    x = normal(gen, 6, 4, 3)
    out = layer(x)
    (g,) = torch.autograd.grad((out**3).sum(), [out])
    curvature = fit_kfac(source(tree(fc=factorized("fc.weight", x, g, bias="fc.bias"))))
    a = torch.cat([x.flatten(0, 1), torch.ones(24, 1, dtype=torch.float64)], 1)
    H = torch.kron(g.flatten(0, 1).T @ g.flatten(0, 1) / 24, a.T @ a / 24) * 4
    assert_same(curvature.eigenvalues["fc"].flatten().sort().values, torch.linalg.eigvalsh(H))


@methods
def test_queries_of_low_rank_are_off_by_no_more_than_they_say(name):
    """Full rank changes nothing; below it, scores move by at most the stated error times both norms."""
    fit = METHODS[name][1](source(TRAIN))
    exact = influence(fit, source(TRAIN), source(QUERY))
    full = influence(fit, source(TRAIN), source(QUERY), query_rank=4)
    assert_same(full.values, exact.values)
    short = influence(fit, source(TRAIN), source(QUERY), query_rank=1)
    error = (short.values - exact.values).abs()
    assert float(error.max()) > 1e-3 * float(exact.values.abs().max())
    stated = float(short.about["query_rank"].split("layer ")[1].split()[0])
    bound = torch.zeros_like(exact.values)
    for key in fit.bases:
        query = gradient(preconditioned(fit, damping=0.1)(key, QUERY[key])).flatten(1).norm(dim=1)
        bound += gradient(TRAIN[key]).flatten(1).norm(dim=1)[:, None] * query * 1.01 * stated
    assert bool((error <= bound).all())
