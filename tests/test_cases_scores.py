"""Faults that users of such libraries have reported, and what attrax does instead: curvature and scores."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attrax
from attrax.core import (
    Leaf,
    Materialized,
    Part,
    factorized,
    materialize_leaf,
    materialized,
    projection,
    take,
)

from .case_models import (
    CLASSIFY,
    Net,
    all_same,
    brute,
    grads_of,
    part,
    points,
    recorded,
    rows_of,
    same,
    seeded,
    vectors,
)
from .case_models import quick as quick


def squares(model: nn.Module, batch: Any) -> Tensor:
    """Half the squared error, summed over valid positions."""
    return 0.5 * ((model(batch["x"]) - batch["y"]).square().sum(2) * batch["mask"]).sum(1)


def sequences(width: int = 4) -> dict[str, Tensor]:
    """Three sequences of 4, 2 and 3 valid positions; padded positions hold numbers that are not zero."""
    gen = torch.Generator().manual_seed(54)
    x = torch.randn(3, width, 3, generator=gen, dtype=torch.float64)[:, torch.arange(width)]
    y = torch.randn(3, width, 2, generator=gen, dtype=torch.float64)
    return {"x": x, "y": y, "mask": (torch.arange(width) < torch.tensor([4, 2, 3])[:, None]).double()}


def rebuilt(u: Tensor | None, values: Tensor) -> Tensor:
    """The factor that was decomposed."""
    assert u is not None
    return u @ values.diag() @ u.T


def test_k10_b43_norms_of_biases_over_positions():
    """|sum_t delta_t|^2 is not sum_st (delta_s . delta_t)^2."""
    model, batch = seeded(lambda: nn.Linear(4, 3), 43), {}
    gen = torch.Generator().manual_seed(43)
    batch = {
        "x": torch.randn(2, 5, 4, generator=gen).double(),
        "y": torch.randn(2, 5, 3, generator=gen).double(),
    }
    batch["mask"] = torch.ones(2, 5)
    right = brute(model, squares, rows_of(batch))
    source = attrax.live(model, [batch], squares)
    G = vectors(right)
    same(attrax.graddot(source, source).values, G @ G.T)
    model.weight.requires_grad_(False)
    bias = attrax.live(model, [batch], squares)
    same(attrax.self_influence(bias).values[:, 0], right["bias"].square().sum(1))
    model.weight.requires_grad_(True)
    model.bias.requires_grad_(False)
    weight = attrax.live(model, [batch], squares)
    same(attrax.self_influence(weight).values[:, 0], right["weight"].flatten(1).square().sum(1))


def test_k11_b49_second_moments_of_bfloat16_rows():
    """1024 batches of 8 equal rows: a bfloat16 sum would stick at 2048."""
    row = torch.tensor([1.0, 2.0, -1.0, 0.5])
    leaf = factorized("w", row.bfloat16().expand(8, 1, 4), torch.ones(8, 1, 1).bfloat16())
    block = attrax.Block(
        attrax.GradTree({"w": leaf}), attrax.Examples(tuple("abcdefgh"), weight=torch.ones(8))
    )
    basis = attrax.fit_kfac(attrax.Blocks([block] * 1024)).bases["w"]
    same(rebuilt(basis.ua, basis.la), torch.outer(row, row), within=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_k12_b54_b57_factors_count_valid_positions(bias):
    """Means over the 9 valid positions, the constant input 1 on these only, however the data are cut or padded."""
    model, batch = seeded(lambda: nn.Linear(3, 2, bias=bias), 54), sequences()
    valid = batch["mask"].bool()
    a, delta = batch["x"][valid], (model(batch["x"]) - batch["y"])[valid].detach()
    a = torch.cat([a, torch.ones(9, 1)], 1) if bias else a
    longer = {k: torch.cat([v, v[:, :2] * (0 if k == "mask" else 1)], 1) for k, v in batch.items()}
    twice = {k: torch.cat([v, v]) for k, v in batch.items()}
    for data in ([batch], [longer], [part(batch, 0, 1), part(batch, 1, 3)], [twice]):
        basis = attrax.fit_kfac(attrax.live(model, data, squares)).bases["weight"]
        same(rebuilt(basis.ua, basis.la), a.T @ a / 9)
        same(rebuilt(basis.ug[0], basis.lg[0]), delta.T @ delta / 9)
        assert float(basis.positions) == 3
    if bias:
        assert float((a.T @ a / 9)[-1, -1]) == 1


def test_k12_b58_the_eigenvalue_correction_is_used():
    model = seeded(lambda: Net(3, 4, 3, bias=False), 58)
    train, query = points(58, 8, 3), points(59, 2, 3)
    h = torch.tanh(model.l1(train["x"])).detach()
    g, q = (brute(model, CLASSIFY, rows_of(side))["l2.weight"] for side in (train, query))
    delta = (g @ h.unsqueeze(2)).squeeze(2) / h.square().sum(1, keepdim=True)
    (la, Qa), (lg, Qg) = torch.linalg.eigh(h.T @ h / 8), torch.linalg.eigh(delta.T @ delta / 8)
    turned, asked = Qg.T @ g @ Qa, Qg.T @ q @ Qa

    def score(eigenvalues: Tensor) -> Tensor:
        return torch.einsum("qij,nij->nq", asked / (eigenvalues + 0.1 * eigenvalues.mean()), turned)

    sources = [attrax.live(model, [side], CLASSIFY) for side in (train, query)]
    only = lambda name, leaf: name == "l2.weight"  # noqa: E731
    corrected, product = score(turned.square().mean(0)), score(torch.outer(lg, la))
    same(attrax.ekfac(*sources, scope=only, damping=0.1).values, corrected, within=1e-8)
    same(attrax.kfac(*sources, scope=only, damping=0.1).values, product, within=1e-8)
    assert (corrected - product).abs().max() > 0.1 * corrected.abs().max()


def test_k13_b60_one_example_that_is_not_finite():
    """Named with its layer before anything is decomposed; or left out, and the others are as they are."""
    model, batch = seeded(Net, 60), points(60, 6)
    G = vectors(brute(model, CLASSIFY, rows_of({k: v[[0, 1, 2, 3, 5]] for k, v in batch.items()})))
    batch["x"][4, 0], batch["x"][4, 1] = float("inf"), float("-inf")
    named = batch | {"example_ids": torch.arange(6)}
    with pytest.raises(ValueError, match=r"examples \['4'\] in layers.*'l1.weight'"):
        attrax.fit_ekfac(attrax.live(model, [named], CLASSIFY))
    healthy = attrax.live(model, [named], CLASSIFY, on_nonfinite="skip")
    scores = attrax.graddot(healthy, healthy)
    assert scores.ids == ("0", "1", "2", "3", "5") and healthy.skipped[0][0] == "4"
    same(scores.values, G @ G.T)
    assert attrax.ekfac(healthy, healthy).values.isfinite().all()


@pytest.mark.parametrize("values", [(float("inf"), -float("inf")), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_k13_b60_an_example_of_a_loop_that_is_not_finite(values):
    """Left out with a warning, or named, in the first step as well, where captured gradients are checked."""
    model, batch = seeded(Net, 60), points(60, 6)
    right = brute(model, CLASSIFY, rows_of({k: v[[0, 1, 2, 3, 5]] for k, v in batch.items()}))
    batch["x"][4, :2] = torch.tensor(values)
    ids = lambda inputs: "abcdef"  # noqa: E731
    with pytest.warns(RuntimeWarning, match=r"examples \['e'\] in layers.*left out"):
        all_same(recorded(model, [batch], CLASSIFY, ids=ids), right)
    with pytest.raises(ValueError, match=r"examples \['e'\] in layers.*'l1.weight'"):
        recorded(model, [batch], CLASSIFY, ids=ids, on_nonfinite="raise")


@pytest.mark.filterwarnings("error")
def test_k13_b60_a_first_example_that_is_not_finite():
    """The example that is compared with autograd is another one."""
    model, batch = seeded(Net, 60), points(60, 6) | {"example_ids": list("abcdef")}
    batch["x"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"examples \['a'\] in layers.*'l1.weight'"):
        grads_of(attrax.live(model, [batch], CLASSIFY))


def test_k13_b62_damping_is_added_once(tmp_path):
    """Three solves in a row give one result, and the factors stay what they were, in memory and on disk."""
    model, batch = seeded(lambda: nn.Linear(4, 3, bias=False), 62), points(62, 9)
    source = attrax.live(model, [batch], CLASSIFY)
    fit = attrax.fit_kfac(source)
    attrax.save_curvature(fit, str(tmp_path / "fit.h5"))
    stored = (tmp_path / "fit.h5").read_bytes()
    before = {n: x.clone() for n, x in fit.eigenvalues.items()}
    A, C = batch["x"].T @ batch["x"] / 9, rebuilt(fit.bases["weight"].ug[0], fit.bases["weight"].lg[0])
    H = torch.kron(C, A)
    damped = H + 0.3 * H.trace() / 12 * torch.eye(12)
    G = grads_of(source)["weight"].flatten(1)
    solve = attrax.preconditioned(fit, damping=0.3)
    for _ in range(3):
        solved = attrax.collect(attrax.transformed(source, solve)).grads
        right = torch.linalg.solve(damped, G.T).T
        same(materialize_leaf(solved["weight"]).w.flatten(1), right, within=1e-8)
    assert all(torch.equal(before[n], x) for n, x in fit.eigenvalues.items())
    attrax.influence(fit, source, source, damping=0.3)
    assert (tmp_path / "fit.h5").read_bytes() == stored


def test_k13_b64_a_damped_solve_that_a_series_does_not_reach():
    """Eigenvalues from 0.05 to 40, damping 0.01: the exact solution, where 200 terms of a scaled series are 1e30."""
    gen = torch.Generator().manual_seed(64)
    Q = torch.linalg.qr(torch.randn(6, 6, generator=gen, dtype=torch.float64))[0]
    e = torch.tensor([0.05, 0.3, 1.0, 4.0, 15.0, 40.0], dtype=torch.float64)
    v = torch.randn(1, 6, generator=gen, dtype=torch.float64)
    inputs = (6 * e).sqrt()[:, None] * Q.T
    H = inputs.T @ inputs / 6
    same(H, Q @ e.diag() @ Q.T)
    one = lambda name, a: factorized(name, a[:, None], torch.ones(len(a), 1, 1).double())  # noqa: E731
    block = attrax.Block(
        attrax.GradTree({"w": one("w", inputs)}), attrax.Examples(tuple("abcdef"), weight=torch.ones(6))
    )
    fit = attrax.fit_kfac(attrax.Blocks([block]))
    solve = attrax.preconditioned(fit, damping=0.01 / float(e.mean()))
    solved = solve("w", one("w", v))
    assert solved is not None
    right = torch.linalg.solve(H + 0.01 * torch.eye(6), v[0])
    same(materialize_leaf(solved).w.flatten(), right, within=1e-8)
    h = v[0].clone()
    for _ in range(200):
        h = v[0] + h - (H @ h + 0.01 * h) / 10
    assert h.norm() > 1e30


@pytest.mark.parametrize("sides", ["two", "dense"])
def test_k14_b65_projections_keep_the_scale_of_every_layer(sides):
    """<Pu, Pv> averages <u, v> whatever the shape of the layer."""
    seeds = 200
    for No, Ni in ((6, 8), (12, 16), (24, 32)):
        gen = torch.Generator().manual_seed(No)
        u, w = torch.randn(2, No * Ni, generator=gen, dtype=torch.float64)
        u = u / u.norm()
        w = w - (w @ u) * u
        pair = torch.stack([u, 0.5 * u + 0.75**0.5 * w / w.norm()]).reshape(2, No, Ni)
        leaf = materialized("w", pair)
        ratios: list[list[float]] = []
        for seed in range(seeds):
            spec = attrax.Projection(16 if sides == "dense" else 4, sides=sides, seed=seed)
            small = attrax.projected(spec)("w", leaf)
            x, y = materialize_leaf(small).w.flatten(1)
            ratios.append([float(x @ y) / 0.5, float(x @ x)])
        found = torch.tensor(ratios)
        assert ((found.mean(0) - 1).abs() < 5 * found.std(0) / seeds**0.5).all(), (No, Ni, found.mean(0))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "srht", "sjlt"])
def test_k14_b68_remainders_of_chunks(kind, monkeypatch):
    """Ten rows in blocks of 4, thirty columns in chunks of 7: the same as one product."""
    g = torch.randn(10, 5, 6, generator=torch.Generator().manual_seed(68), dtype=torch.float64)
    spec = attrax.Projection(5, kind, "dense", nonzeros=5, seed=1)
    P = projection.projection_matrix(spec, "w", "dense", 30)
    assert P is not None
    monkeypatch.setattr("attrax.core.dense._CHUNK", 7 * 5)
    leaf = materialized("w", g)
    pieces = [take(leaf, slice(i, i + 4)) for i in (0, 4, 8)]
    got = [attrax.projected(spec)("w", piece) for piece in pieces]
    same(torch.cat([x.w for x in got if isinstance(x, Materialized)]), g.flatten(1) @ P.double(), within=1e-6)


def test_k15_b69_positive_scores_are_helpful():
    """Ridge regression solved exactly, with the exact Hessian: scores against retraining without each example."""
    gen = torch.Generator().manual_seed(71)
    n, decay = 30, 0.1
    X, y = torch.randn(n, 3, generator=gen).double(), torch.randn(n, generator=gen).double()
    Xq, yq = torch.randn(4, 3, generator=gen).double(), torch.randn(4, generator=gen).double()
    H = X.T @ X / n + decay * torch.eye(3)
    theta = torch.linalg.solve(H, X.T @ y / n)
    loss_at = lambda t: 0.5 * (Xq @ t - yq).square()  # noqa: E731
    removed: list[Tensor] = []
    for i in range(n):
        keep = [k for k in range(n) if k != i]
        other = torch.linalg.solve(X[keep].T @ X[keep] / n + decay * torch.eye(3), X[keep].T @ y[keep] / n)
        removed.append(loss_at(other) - loss_at(theta))
    model = nn.Linear(3, 1, bias=False).double().eval()
    model.weight.data.copy_(theta[None])
    error = lambda m, b: 0.5 * (m(b["x"])[:, 0] - b["y"]).square()  # noqa: E731
    train, query = (attrax.live(model, [{"x": x, "y": t}], error) for x, t in ((X, y), (Xq, yq)))
    inverse = torch.linalg.inv(H)

    def newton(name: str, leaf: Leaf) -> Leaf:
        built = materialize_leaf(leaf)
        return replace(built, w=built.w @ inverse)

    scores = attrax.graddot(train, attrax.transformed(query, newton)).values / n
    loo = torch.stack(removed)
    assert torch.corrcoef(torch.stack([scores.flatten(), loo.flatten()]))[0, 1] > 0.95
    big = loo.abs() > 0.1 * loo.abs().max()
    assert (scores.sign() == loo.sign())[big].all() and big.sum() > 10
    kronecker = attrax.ekfac(train, query, damping=0.1).values
    assert torch.corrcoef(torch.stack([kronecker.flatten(), loo.flatten()]))[0, 1] > 0.7


def test_k15_b72_spearman_with_ties():
    a, b = torch.tensor([1.0, 2, 2, 3, 5, 2]), torch.tensor([2.0, 1, 3, 3, 4, 3])

    def average(x: Tensor) -> Tensor:
        return (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) + 1) / 2

    right = torch.corrcoef(torch.stack([average(a), average(b)]))[0, 1]
    assert attrax.spearman(a, b) == pytest.approx(float(right)) == pytest.approx(0.741935, abs=1e-6)
    by_place = torch.stack([x.argsort(stable=True).argsort().float() for x in (a, b)])
    assert abs(float(torch.corrcoef(by_place)[0, 1]) - float(right)) > 0.01


def vectors_as_source(g: Tensor, prefix: str) -> attrax.Blocks:
    leaf = Materialized(g, (Part("v", 1),))
    ids = tuple(f"{prefix}{i}" for i in range(len(g)))
    about = attrax.Examples(ids, weight=torch.ones(len(g)))
    return attrax.Blocks([attrax.Block(attrax.GradTree({"v": leaf}), about)])


def test_k15_b74_aggregated_queries():
    gen = torch.Generator().manual_seed(74)
    q, g = (torch.randn(k, 7, generator=gen, dtype=torch.float64) for k in (3, 6))
    train, query = vectors_as_source(g, "t"), vectors_as_source(q, "q")
    dots, cosines = attrax.graddot(train, query), attrax.gradcos(train, query)
    same(dots.aggregate("sum").values[:, 0], (g @ q.T).sum(1))
    same(dots.aggregate("mean").values[:, 0], (g @ q.T).mean(1))
    same(
        attrax.graddot(train, vectors_as_source(q.sum(0, keepdim=True), "q")).values,
        dots.aggregate("sum").values,
    )
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    mean_of_cosines = (unit(g) @ unit(q).T).mean(1)
    same(cosines.aggregate("mean").values[:, 0], mean_of_cosines)
    assert (unit(g) @ unit(q.mean(0)) - mean_of_cosines).abs().max() > 0.05


@pytest.mark.parametrize("rows", [5, 1])
def test_k15_b76_the_nearest_query(rows):
    gen = torch.Generator().manual_seed(76)
    q, g = (torch.randn(k, 4, generator=gen, dtype=torch.float64) for k in (3, rows))
    nearest = attrax.graddot(vectors_as_source(g, "t"), vectors_as_source(q, "q")).aggregate("max")
    assert nearest.values.shape == (rows, 1)
    same(nearest.values[:, 0], (g @ q.T).amax(1))
