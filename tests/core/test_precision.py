"""Sixteen-bit factors lose nothing but their own rounding: every operation, by every route, is float32 arithmetic.

Factors are positive, so that nothing cancels and theory says what float32 may lose: a number that went through n
additions and multiplications is off by at most n u of itself, u = 2^-24 (Higham 2002, section 3.1), in whatever order
they were done.  Where a map has negative entries, "of itself" becomes "of the sum of the terms' sizes".
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from attrax.core import (
    Leaf,
    Materialized,
    Sum,
    aggregate,
    concat_rows,
    gram_leaf,
    materialize_leaf,
    self_gram,
    sq_norms_leaf,
    tree_map,
)
from attrax.core import execute as execution
from attrax.core.contract import ROUTES
from attrax.core.grass import Grass
from attrax.core.kronecker import (
    Eigenbasis,
    eigenbasis,
    ekfac_eigenvalues,
    kronecker_sums,
    merge,
    merge_spectrum,
    precondition,
    spectrum,
)
from attrax.core.lowrank import low_rank
from attrax.core.maps import projected
from attrax.core.masks import Mask
from attrax.core.products import token_scores_leaf
from attrax.core.projection import KINDS as MAP_KINDS
from attrax.core.projection import Projection
from attrax.core.subspace import fit_subspace

from .dense import assert_same, gradient, token_shares
from .layer_cases import (
    Case,
    bags,
    bilinears,
    by_rule,
    convolutions,
    linears,
    norms,
    prelus,
    transposed_convolutions,
)
from .maps import matrix_of
from .toys import FACTORED, KINDS, LINEAR, Sizes, generator, normal, tree, unchecked

U = 2.0**-24
SIZES = Sizes(B=3, Q=2, T=12, S=9, Ni=5, No=6, seed=3)
NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def without_the_type_checker() -> Iterator[None]:
    """Its cost would be most of this file's."""
    with unchecked():
        yield


def narrow(leaf: Any, dtype: torch.dtype) -> Any:
    """Positive factors in low precision."""
    return tree_map(lambda v: v.abs().to(dtype) if v.is_floating_point() else v, leaf)


def pair(kind: str, dtype: torch.dtype, sizes: Sizes = SIZES) -> tuple[Any, Any]:
    x, y = sizes.pair(KINDS[kind])
    return narrow(x, dtype), narrow(y, dtype)


def sizes_of(leaf: Leaf) -> tuple[int, int, int]:
    """Rows, outputs and inputs."""
    uses = leaf.uses if isinstance(leaf, Sum) else (leaf,)
    rows = max(1 if isinstance(use, Materialized) else use.g.shape[-2] for use in uses)
    return rows, *gradient(leaf).shape[1:]


def depth(route: str, x: Leaf, y: Leaf) -> int:
    """Most operations between a factor and the result: every step of a route multiplies and sums over some letters."""
    (T, No, Ni), S, wide = sizes_of(x), sizes_of(y)[0], max(sizes_of(x)[1:])
    longest = {
        "factor": Ni + No + T * S,
        "materialize": T + S + No * Ni,
        "mixed": S + wide + T * wide,
        "mixed_train": T + wide + S * wide,
        "chain": wide + max(T, S) * (1 + wide),
    }
    return longest[route] + 4


def assert_float32(value: Tensor, exact: Tensor, operations: int, size: Tensor | None = None) -> None:
    """Off by no more than so many float32 operations on terms whose sizes add up to `size`."""
    assert value.shape == exact.shape
    size = exact if size is None else size
    allowed = 1.01 * operations * U * size
    excess = (value.double() - exact).abs() / allowed.clamp_min(1e-300)
    worst = float(excess.max())
    assert worst <= 1, f"{worst:.3g} times the error that {operations} operations in float32 can make"


def in_float32(value: Tensor) -> Tensor:
    assert value.dtype == torch.float32
    return value


def check_gram(x: Leaf, y: Leaf, route: Any) -> None:
    exact = torch.einsum("boi,qoi->bq", gradient(x), gradient(y))
    assert_float32(gram_leaf(x, y, route=route), exact, depth(route, x, y))


def check_self_gram(x: Leaf, y: Leaf, route: Any) -> None:
    exact = torch.einsum("boi,qoi->bq", gradient(x), gradient(x))
    assert_float32(self_gram(tree(x=x), route=route), exact, depth(route, x, x))


def check_norms(x: Leaf, y: Leaf, route: Any) -> None:
    exact = gradient(x).square().sum((1, 2))
    assert_float32(sq_norms_leaf(x, route=route), exact, depth(route, x, x))


def check_token_scores(x: Leaf, y: Leaf, route: Any) -> None:
    assert_float32(token_scores_leaf(x, y, route=route), token_shares(x, y), depth(route, x, y) + 4)


PRODUCTS: dict[str, Callable[[Leaf, Leaf, Any], None]] = {
    "gram": check_gram,
    "self_gram": check_self_gram,
    "norms": check_norms,
    "token_scores": check_token_scores,
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("operation", PRODUCTS)
def test_products_are_float32_arithmetic_by_every_route(operation, route, dtype):
    for kind in FACTORED if operation == "token_scores" else KINDS:
        PRODUCTS[operation](*pair(kind, dtype), route)


@pytest.mark.parametrize("dtype", NARROW)
def test_results_are_float32(dtype):
    for kind in KINDS:
        x, y = pair(kind, dtype)
        in_float32(gram_leaf(x, y))
        in_float32(sq_norms_leaf(x))
        in_float32(materialize_leaf(x).w)
        in_float32(aggregate(tree(x=x))["x"].w)  # type: ignore[attr-defined]
        if kind in FACTORED:
            in_float32(token_scores_leaf(x, y))


@pytest.mark.parametrize("dtype", NARROW)
def test_built_and_summed_gradients_are_float32_arithmetic(dtype):
    for kind in KINDS:
        x, _ = pair(kind, dtype)
        rows = sizes_of(x)[0] + 2
        assert_float32(gradient(materialize_leaf(x)), gradient(x), rows)
        total = gradient(aggregate(tree(x=x))["x"])
        assert_float32(total, gradient(x).sum(0, keepdim=True), SIZES.B * rows)


def rounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a route hands on its result in bfloat16."""
    contract = execution.contract_pair
    monkeypatch.setattr(execution, "contract_pair", lambda *given: contract(*given).bfloat16().float())


def narrow_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is widened before it is multiplied and summed."""
    for name, module in list(sys.modules.items()):
        if name.startswith("attrax.core") and hasattr(module, "wide"):
            monkeypatch.setattr(module, "wide", lambda dtype: dtype)


PLANTS = {f.__name__: f for f in (rounded_steps, narrow_arithmetic)}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("operation", PRODUCTS)
def test_the_bound_sees_a_product_in_bfloat16(operation, route, plant, monkeypatch):
    PLANTS[plant](monkeypatch)
    for kind in ("linear", "norm"):
        with pytest.raises(AssertionError, match="times the error"):
            PRODUCTS[operation](*pair(kind, torch.bfloat16), route)


MAPS = {
    spec.basis: spec
    for spec in (
        *(Projection(4, kind, sides) for sides, kinds in MAP_KINDS.items() for kind in kinds),  # type: ignore[arg-type]
        *(Mask(4), Grass(4, blowup=2), Grass(4, "two", blowup=2)),
    )
}


@cache
def exact_map(spec: Any, kind: str) -> Tensor:
    return matrix_of(spec, "x", pair(kind, torch.float64)[0])


def check_map(spec: Any, kind: str, dtype: torch.dtype, keep_rows: bool = False) -> None:
    x, _ = pair(kind, dtype)
    found, P = projected(spec, keep_rows=keep_rows)("x", x), exact_map(spec, kind)
    G = gradient(x).flatten(1)
    rows, No, Ni = sizes_of(x)
    got = gradient(materialize_leaf(found)).flatten(1)
    assert_float32(got, G @ P.T, rows + No * Ni + No + Ni + 8, G @ P.abs().T)


@cache
def fitted(kind: str) -> Any:
    return fit_subspace({"x": kronecker_sums(SIZES.one(LINEAR[kind]))}, 3)


@pytest.mark.parametrize("name", MAPS)
def test_maps_are_float32_arithmetic(name):
    for kind in ("linear", "stacked_bias", "embedding", "norm", "tied", "built_matrix"):
        check_map(MAPS[name], kind, torch.bfloat16)
    check_map(MAPS[name], "linear", torch.float16)
    check_map(MAPS[name], "linear", torch.bfloat16, keep_rows=True)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", ["linear", "linear_bias", "stacked_bias"])
def test_fitted_maps_are_float32_arithmetic(kind, dtype):
    check_map(fitted(kind), kind, dtype)


@pytest.mark.parametrize("name", [*MAPS, "subspace"])
def test_the_bound_sees_a_map_in_bfloat16(name, monkeypatch):
    spec = MAPS[name] if name in MAPS else fitted("linear")
    exact_map(spec, "linear")
    narrow_arithmetic(monkeypatch)
    with pytest.raises(AssertionError, match="times the error"):
        check_map(spec, "linear", torch.bfloat16)


@pytest.mark.parametrize("dtype", NARROW)
def test_low_rank_rows_are_float32(dtype):
    """A decomposition: backward stable, to a small multiple of u of the norm."""
    x, _ = pair("linear_bias", dtype)
    found = low_rank(x)
    in_float32(found.leaf.g)
    size = gradient(x).square().sum((1, 2), keepdim=True).sqrt()
    assert_float32(gradient(found.leaf), gradient(x), 4 * sum(sizes_of(x)), size.expand(-1, 6, 6))


def check_sums(dtype: torch.dtype, batches: int = 50) -> None:
    pieces = [pair("linear_bias", dtype, replace(SIZES, seed=seed))[0] for seed in range(batches)]
    sums = kronecker_sums(pieces[0])
    for piece in pieces[1:]:
        sums = merge(sums, kronecker_sums(piece))
    a, g = (torch.cat([getattr(p, n).double().flatten(0, 1) for p in pieces]) for n in "ag")
    a = torch.cat([a, torch.ones(len(a), 1, dtype=torch.float64)], 1)
    operations = SIZES.B * SIZES.T + batches
    assert_float32(sums.a, a.T @ a, operations)
    assert_float32(sums.g[0], g.T @ g, operations)


@pytest.mark.parametrize("dtype", NARROW)
def test_kronecker_sums_are_float32_arithmetic(dtype):
    sums = kronecker_sums(pair("linear_bias", dtype)[0])
    in_float32(sums.a), in_float32(sums.g[0])
    check_sums(dtype)


def permuting(leaf: Leaf) -> Eigenbasis:
    """An eigenbasis without negative entries."""
    (part,), (_, No, Ni) = leaf.parts, sizes_of(leaf)
    ua, ug = (torch.eye(n)[torch.randperm(n, generator=generator(n))] for n in (Ni, No))
    return Eigenbasis(ua, (ug,), torch.ones(Ni), (torch.ones(No),), torch.tensor(1.0), (part,))


def check_spectrum(kind: str, dtype: torch.dtype) -> None:
    pieces = [pair(kind, dtype, replace(SIZES, seed=seed))[0] for seed in range(20)]
    basis, total = permuting(pieces[0]), None
    for piece in pieces:
        more = spectrum(piece, basis)
        total = more if total is None else merge_spectrum(total, more)
    assert total is not None and basis.ua is not None and basis.ug[0] is not None
    G = torch.cat([gradient(piece) for piece in pieces])
    turned = basis.ug[0].double().T @ G @ basis.ua.double()
    rows, No, Ni = sizes_of(pieces[0])
    operations = 2 * (rows + No + Ni) + SIZES.B + len(pieces) + 2
    assert_float32(ekfac_eigenvalues(total), turned.square().mean(0), operations)


def check_preconditioned(kind: str, dtype: torch.dtype) -> None:
    x, _ = pair(kind, dtype)
    basis, (rows, No, Ni) = permuting(x), sizes_of(x)
    values = normal(generator(5), No, Ni).abs().float()
    assert basis.ua is not None and basis.ug[0] is not None
    ug, ua = basis.ug[0].double(), basis.ua.double()
    exact = ug @ (ug.T @ gradient(x) @ ua / (values.double() + 0.5)) @ ua.T
    solved = precondition(x, basis, values, damping=0.5)
    assert_float32(gradient(solved), exact, rows + 2 * (No + Ni) + 4)


CURVATURE = {"spectrum": check_spectrum, "precondition": check_preconditioned}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", ["linear", "linear_bias", "built_matrix"])
@pytest.mark.parametrize("operation", CURVATURE)
def test_curvature_is_float32_arithmetic(operation, kind, dtype):
    CURVATURE[operation](kind, dtype)


def test_the_bound_sees_curvature_in_bfloat16(monkeypatch):
    narrow_arithmetic(monkeypatch)
    with pytest.raises(AssertionError, match="times the error"):
        check_sums(torch.bfloat16)
    for check in CURVATURE.values():
        with pytest.raises(AssertionError, match="times the error"):
            check("built_matrix", torch.bfloat16)


def check_decomposition(dtype: torch.dtype) -> None:
    """Eigenvalues of a float32 covariance over six decades, each to its own precision."""
    scale = torch.logspace(0, -3, 40)
    sums = kronecker_sums(replace(linear_leaf(), a=normal(generator(1), 1, 200, 40).float() * scale))
    basis = eigenbasis(sums, dtype=dtype)
    exact = torch.linalg.eigvalsh((sums.a / sums.rows).double())
    assert_float32(basis.la, exact, 1)


def linear_leaf() -> Any:
    return replace(Sizes(1, 1, 200, 1, 40, 3), seed=2).one(LINEAR["linear"])


def test_covariances_are_decomposed_in_float64():
    check_decomposition(torch.float64)
    with pytest.raises(AssertionError, match="times the error"):
        check_decomposition(torch.float32)


def test_calls_that_were_built_are_added_in_float32():
    """A weight used many times, of which only the gradients are known."""
    x = pair("built_matrix", torch.bfloat16)[0]
    joined = concat_rows([x] * 100)
    in_float32(joined.w)
    assert_float32(gradient(joined), 100 * gradient(x), 100)


def layer_cases() -> Iterator[Case]:
    """Layers whose rules do arithmetic of their own."""
    yield from (*linears(), *bilinears(), *prelus(), *bags(), *norms())
    yield from convolutions(1, kernel_size=[3], stride=[2], pad=[(1, "zeros")])
    yield from transposed_convolutions(1, kernel_size=[3], stride=[2], output_padding=[0])


@pytest.mark.parametrize("dtype", NARROW)
def test_layer_rules_add_no_rounding(dtype):
    for case in layer_cases():
        with torch.no_grad():
            target = normal(generator(10), *case.output(*case.inputs).shape, dtype=dtype)
        low, same = (
            replace(case, inputs=tuple(v.to(dtype).to(d) if is_real(v) else v for v in case.inputs))
            for d in (dtype, torch.float64)
        )
        found, exact = by_rule(low, target), by_rule(same, target.double())
        for name, value in found.items():
            assert_same(in_float32(value), exact[name])


def is_real(v: Any) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()
