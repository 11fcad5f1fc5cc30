"""Kronecker-factored curvature against dense formulas: statistics, eigenbasis, spectrum, inverse."""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from attrax.core import (
    Factorized,
    Part,
    Projection,
    compact,
    concat,
    eigenbasis,
    ekfac_eigenvalues,
    factorized,
    is_linear,
    kfac_eigenvalues,
    kronecker_sums,
    materialize_leaf,
    merge,
    merge_spectrum,
    pad_rows,
    precondition,
    projected,
    relative_damping,
    rotate,
    spectrum,
    take,
    tree_map,
    unstack,
)
from attrax.core.kronecker import update

from .dense import assert_same, gradient
from .toys import KINDS, LINEAR, SMALL, Sizes, generator, law, normal, refused, sizes

FIT = Sizes(B=40, Q=3, T=3, S=2, Ni=3, No=4, seed=3)
"""Enough rows for covariances of full rank."""

linear_kinds = pytest.mark.parametrize("kind", LINEAR)


def rows_of(leaf):
    """Rows with a gradient: inputs (with their constant column) and output gradients, one row a line."""
    g = leaf.g.double().flatten(0, 1)
    a = leaf.a.double().flatten(0, 1)
    a = torch.cat([a, torch.ones(len(a), int(leaf.bias), dtype=torch.float64)], 1)
    seen = g.abs().sum(1) > 0
    return a[seen], g[seen]


def dense_kfac(leaf):
    """Per part: the Kronecker product of both covariances on the scale of an example's Fisher, [No Ni, No Ni]."""
    a, g = rows_of(leaf)
    A = a.T @ a / len(a)
    positions = len(a) / leaf.g.shape[0]
    blocks = g.split([part.width for part in leaf.parts], 1)
    return [torch.kron(x.T @ x / len(a), A) * positions for x in blocks]


def dense_solve(leaf, curvatures, damping):
    """(H + damping)^-1 V of every part, from dense matrices over row-major vectors."""
    V = gradient(leaf).split([part.width for part in leaf.parts], 1)
    solved = []
    for v, H, d in zip(V, curvatures, damping, strict=True):
        damped = H + d * torch.eye(len(H), dtype=torch.float64)
        solved.append(torch.linalg.solve(damped, v.flatten(1).T).T.reshape(v.shape))
    return torch.cat(solved, 1)


def parts_of(values, leaf):
    return values.split([part.width for part in leaf.parts])


def kronecker_vectors(basis):
    """Per part, the eigenvectors of its curvature as one matrix."""
    assert basis.ua is not None and None not in basis.ug
    return [torch.kron(u, basis.ua) for u in basis.ug]


def same_sums(x, y):
    assert_same(x.a, y.a)
    for u, v in zip(x.g, y.g, strict=True):
        assert_same(u, v)
    assert (int(x.rows), int(x.examples), x.parts) == (int(y.rows), int(y.examples), y.parts)


@linear_kinds
@law(15, size=sizes())
def test_statistics_are_sums_over_rows_with_a_gradient(kind, size):
    leaf = size.one(LINEAR[kind])
    sums = kronecker_sums(leaf)
    a, g = rows_of(leaf)
    assert_same(sums.a, a.T @ a)
    for x, part in zip(sums.g, g.split([p.width for p in leaf.parts], 1), strict=True):
        assert_same(x, part.T @ part)
    assert (int(sums.rows), int(sums.examples)) == (len(a), size.B)


@linear_kinds
@law(15, size=sizes(), at=st.integers(0, 4))
def test_statistics_of_a_split_add_up(kind, size, at):
    """A commutative monoid: any split, in any order, with nothing as its unit."""
    leaf = size.one(LINEAR[kind])
    head, tail = (kronecker_sums(take(leaf, s)) for s in (slice(0, at), slice(at, None)))
    whole = kronecker_sums(leaf)
    same_sums(merge(head, tail), whole)
    same_sums(merge(tail, head), whole)
    nothing = kronecker_sums(take(leaf, slice(0, 0)))
    same_sums(merge(whole, nothing), whole)
    same_sums(merge(merge(head, tail), whole), merge(head, merge(tail, whole)))
    same_sums(update(update(None, take(leaf, slice(0, at))), take(leaf, slice(at, None))), whole)


@linear_kinds
@law(15, size=sizes())
def test_padding_counts_nowhere(kind, size):
    """Neither zero rows nor what their inputs hold; the constant column is 1 on rows with a gradient only."""
    leaf = size.one(LINEAR[kind])
    longer = pad_rows(leaf, 2 * leaf.g.shape[1] + 2)
    assert isinstance(longer, Factorized)
    dirty = replace(longer, a=torch.where(longer.a == 0, 7.0, longer.a))
    same_sums(kronecker_sums(longer), kronecker_sums(leaf))
    same_sums(kronecker_sums(dirty), kronecker_sums(leaf))


def test_statistics_of_padded_sequences_are_those_of_their_tokens():
    """Sequences of 4, 2 and 3 tokens under a squared loss, padded with inputs that are not zero."""
    gen = generator(54)
    x, y = normal(gen, 3, 4, 3), normal(gen, 3, 4, 2)
    W, b = normal(gen, 2, 3), normal(gen, 2)
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 3])[:, None]
    g = (x @ W.T + b - y) * mask[..., None]
    sums = kronecker_sums(factorized("w", x, g, bias="b"))
    tokens = torch.cat([x[mask], torch.ones(9, 1, dtype=torch.float64)], 1)
    assert (int(sums.rows), int(sums.examples)) == (9, 3)
    assert_same(sums.a, tokens.T @ tokens)
    assert_same(sums.g[0], g[mask].T @ g[mask])
    basis = eigenbasis(sums)
    assert basis.ua is not None
    A = basis.ua @ basis.la.diag() @ basis.ua.T
    assert_same(A[-1, -1], torch.ones((), dtype=torch.float64))
    assert_same(A[-1, :-1], x[mask].mean(0))
    assert basis.positions == 3
    twice = take(factorized("w", x, g, bias="b"), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert_same(eigenbasis(kronecker_sums(twice)).la, basis.la)


def test_bfloat16_rows_are_summed_in_float32():
    """8192 equal rows in 1024 batches: a bfloat16 sum would stop growing near 2048."""
    row = torch.tensor([1.0, 2.0, -1.0, 0.5])
    batch = factorized("w", row.bfloat16().expand(8, 1, 4), torch.ones(8, 1, 1).bfloat16())
    sums = None
    for _ in range(1024):
        sums = update(sums, batch)
    assert sums is not None and sums.a.dtype == torch.float32
    assert torch.equal(sums.a, 8192 * torch.outer(row, row))
    assert torch.equal(sums.a / sums.rows, torch.outer(row, row))
    assert int(sums.rows) == int(sums.examples) == 8192


def test_mixed_dtypes_meet_in_the_accumulation_dtype():
    leaf = SMALL.one(LINEAR["linear"])
    narrow = replace(leaf, a=leaf.a.bfloat16(), g=leaf.g.float())
    assert kronecker_sums(narrow).a.dtype == torch.float32
    wide = kronecker_sums(narrow, dtype=torch.float64)
    a, g = rows_of(narrow)
    assert_same(wide.a, a.T @ a)
    assert_same(wide.g[0], g.T @ g)


@pytest.mark.parametrize("max_dim", [3, 2])
def test_a_wide_side_keeps_only_its_diagonal(max_dim):
    leaf = FIT.one(LINEAR["stacked"])  # Ni = 3, widths 4, 1, 5
    full, cut = kronecker_sums(leaf), kronecker_sums(leaf, max_dim=max_dim)
    assert [x.ndim for x in (cut.a, *cut.g)] == [2 if max_dim == 3 else 1, 1, 2, 1]
    for x, y in zip((full.a, *full.g), (cut.a, *cut.g), strict=True):
        assert_same(y if y.ndim == 2 else y.diag(), x if y.ndim == 2 else x.diagonal().diag())
    same_sums(merge(cut, cut), kronecker_sums(take(leaf, torch.arange(40).repeat(2)), max_dim=max_dim))


def test_a_diagonal_side_is_a_diagonal_covariance():
    leaf = FIT.one(LINEAR["linear"])
    basis = eigenbasis(kronecker_sums(leaf, max_dim=3))
    assert basis.ua is not None and basis.ug == (None,)
    a, g = rows_of(leaf)
    A, C = a.T @ a / len(a), (g.T @ g / len(g)).diagonal().diag()
    values = kfac_eigenvalues(basis)
    H = torch.kron(C, A) * len(a) / leaf.g.shape[0]
    query = FIT.pair(LINEAR["linear"])[1]
    assert_same(gradient(precondition(query, basis, values, damping=0.3)), dense_solve(query, [H], [0.3]))


@linear_kinds
def test_eigenbases_recompose_the_covariances(kind):
    leaf = FIT.one(LINEAR[kind])
    basis = eigenbasis(kronecker_sums(leaf))
    a, g = rows_of(leaf)
    sides = [
        (basis.ua, basis.la, a),
        *zip(basis.ug, basis.lg, g.split([p.width for p in leaf.parts], 1), strict=True),
    ]
    for u, values, x in sides:
        assert u is not None
        assert_same(u @ values.diag() @ u.T, x.T @ x / len(x))
        assert_same(u.T @ u, torch.eye(len(u), dtype=torch.float64))
        assert (values >= 0).all()
    assert_same(basis.positions, torch.tensor(len(a) / leaf.g.shape[0], dtype=torch.float64))


@linear_kinds
@law(10, size=sizes())
def test_rotated_gradients_are_the_gradients_in_the_eigenbasis(kind, size):
    leaf, query = size.pair(LINEAR[kind])
    basis = eigenbasis(kronecker_sums(leaf))
    ug = torch.block_diag(*[u for u in basis.ug if u is not None])
    expected = torch.einsum("op,boi,ij->bpj", ug, gradient(query), basis.ua)
    for form in (query, compact(query), materialize_leaf(query)):
        turned = rotate(form, basis)
        assert turned.basis == "/eigen" and not turned.bias
        assert_same(gradient(turned), expected)


def test_both_orders_of_rotating_agree():
    """Few rows: rotate the factors; many: build first."""
    basis = eigenbasis(kronecker_sums(FIT.one(LINEAR["stacked"])))
    kinds = set()
    for T in (1, 50):
        leaf = replace(FIT, B=2, T=T).one(LINEAR["stacked"])
        turned = rotate(leaf, basis)
        kinds.add(type(turned).__name__)
        assert_same(gradient(turned), gradient(rotate(materialize_leaf(leaf), basis)))
    assert kinds == {"Factorized", "Materialized"}


@linear_kinds
def test_the_spectrum_is_the_diagonal_of_the_fisher_in_the_eigenbasis(kind):
    """Positions are summed before squaring, one square an example."""
    leaf = FIT.one(LINEAR[kind])
    basis = eigenbasis(kronecker_sums(leaf))
    blocks = gradient(leaf).split([p.width for p in leaf.parts], 1)
    expected = []
    for Q, x in zip(kronecker_vectors(basis), blocks, strict=True):
        F = x.flatten(1).T @ x.flatten(1) / FIT.B
        expected.append((Q.T @ F @ Q).diagonal().reshape(x.shape[1:]))
    assert_same(ekfac_eigenvalues(spectrum(leaf, basis)), torch.cat(expected))


@linear_kinds
@law(10, size=sizes(), at=st.integers(0, 4), memory=st.sampled_from((1, 300, 2**28)))
def test_the_spectrum_does_not_depend_on_split_form_or_memory(kind, size, at, memory):
    leaf = size.one(LINEAR[kind])
    basis = eigenbasis(kronecker_sums(leaf))
    whole = spectrum(leaf, basis)
    for form in (leaf, materialize_leaf(leaf), compact(leaf), pad_rows(leaf, 3 * leaf.g.shape[1])):
        head, tail = (spectrum(take(form, s), basis, memory=memory) for s in (slice(0, at), slice(at, None)))
        both = merge_spectrum(head, tail)
        assert_same(both.total, whole.total)
        assert int(both.examples) == int(whole.examples) == size.B


@linear_kinds
@pytest.mark.parametrize("damping", [0.01, 3.0])
def test_kfac_inverts_the_dense_kronecker_product(kind, damping):
    leaf, query = FIT.pair(LINEAR[kind])
    basis = eigenbasis(kronecker_sums(leaf))
    values = kfac_eigenvalues(basis)
    dense = dense_kfac(leaf)
    for H, block in zip(dense, parts_of(values, leaf), strict=True):
        assert_same(block.flatten().sort().values, torch.linalg.eigvalsh(H))
    solved = precondition(query, basis, values, damping=damping)
    assert_same(gradient(solved), dense_solve(query, dense, [damping] * len(dense)))
    assert (solved.parts, solved.bias, solved.basis) == (query.parts, query.bias, query.basis)


@linear_kinds
def test_ekfac_inverts_the_dense_corrected_curvature(kind):
    leaf, query = FIT.pair(LINEAR[kind])
    basis = eigenbasis(kronecker_sums(leaf))
    values = ekfac_eigenvalues(spectrum(leaf, basis))
    damping = relative_damping(values, leaf.parts, 0.1)
    curvatures, amounts = [], []
    for Q, block in zip(kronecker_vectors(basis), parts_of(values, leaf), strict=True):
        curvatures.append(Q @ block.flatten().diag() @ Q.T)
        amounts.append(0.1 * block.mean())
    for form in (query, materialize_leaf(query)):
        solved = precondition(form, basis, values, damping=damping)
        assert_same(gradient(solved), dense_solve(query, curvatures, amounts))


def test_damping_is_relative_to_each_layers_own_mean():
    values = torch.tensor([[1.0, 3.0], [10.0, 30.0], [20.0, 40.0]])
    parts = (Part("q", 1), Part("k", 2))
    assert_same(relative_damping(values, parts, 0.1).float(), torch.tensor([[0.2], [2.5], [2.5]]))


def test_stacked_layers_are_preconditioned_as_if_alone():
    leaf, query = FIT.pair(LINEAR["stacked_bias"])
    basis = eigenbasis(kronecker_sums(leaf))
    values = ekfac_eigenvalues(spectrum(leaf, basis))
    together = precondition(query, basis, values, damping=relative_damping(values, leaf.parts, 0.1))
    alone = []
    for name, part in unstack(leaf).items():
        own = eigenbasis(kronecker_sums(part))
        L = ekfac_eigenvalues(spectrum(part, own))
        damping = relative_damping(L, part.parts, 0.1)
        alone.append(gradient(precondition(unstack(query)[name], own, L, damping=damping)))
    assert_same(gradient(together), torch.cat(alone, 1))


def test_damping_is_added_once_however_often_the_inverse_is_applied():
    leaf, query = FIT.pair(LINEAR["linear"])
    basis = eigenbasis(kronecker_sums(leaf))
    values = kfac_eigenvalues(basis)
    before = [x.clone() for x in (values, basis.la, *basis.lg)]
    results = [precondition(query, basis, values, damping=0.3).w for _ in range(3)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert all(torch.equal(x, y) for x, y in zip(before, (values, basis.la, *basis.lg), strict=True))


def test_the_two_spectra_agree_where_factors_are_independent():
    """With one position an example and a independent of g, K-FAC's products are the exact second moments."""
    gen = generator(9)
    a, g = normal(gen, 40_000, 1, 2), normal(gen, 40_000, 1, 2)
    leaf = factorized("w", a * torch.tensor([1.0, 3.0]), g * torch.tensor([2.0, 5.0]))
    basis = eigenbasis(kronecker_sums(leaf))
    exact = ekfac_eigenvalues(spectrum(leaf, basis))
    assert_same(kfac_eigenvalues(basis), exact, within=0.05)


def test_kfac_is_on_the_scale_of_an_examples_fisher():
    """Independent positions: the Fisher of a summed loss grows with the number of positions."""
    gen = generator(10)
    leaf = factorized("w", normal(gen, 20_000, 4, 2), normal(gen, 20_000, 4, 2))
    basis = eigenbasis(kronecker_sums(leaf))
    assert basis.positions == 4
    assert_same(kfac_eigenvalues(basis).mean(), ekfac_eigenvalues(spectrum(leaf, basis)).mean(), within=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fits_in_low_precision_are_those_of_the_same_factors(dtype):
    leaf, query = (tree_map(lambda v: v.to(dtype), x) for x in FIT.pair(LINEAR["linear_bias"]))
    basis = eigenbasis(kronecker_sums(leaf))
    values = kfac_eigenvalues(basis)
    solved = precondition(query, basis, values, damping=0.5)
    assert solved.w.dtype == torch.float32
    assert_same(gradient(solved).float(), dense_solve(query, dense_kfac(leaf), [0.5]), within=1e-4)


def test_scope_is_factored_layers_without_the_head():
    linear = SMALL.one(LINEAR["linear"])
    head = replace(linear, parts=(Part("lm_head.weight", 4, head=True),))
    inside = {kind: is_linear(kind, SMALL.one(build)) for kind, build in KINDS.items()}
    assert {kind for kind, yes in inside.items() if yes} == {*LINEAR, "built_matrix"}
    assert not is_linear("head", head)


@pytest.mark.parametrize("kind", ["embedding", "tied"])
def test_embeddings_stay_out_of_scope_projected_and_built(kind):
    leaf = SMALL.one(KINDS[kind])
    for seen in (
        projected(Projection(2), keep_rows=True)(kind, leaf),
        projected(Projection(2))(kind, leaf),
        materialize_leaf(leaf),
    ):
        assert not is_linear(kind, seen)


@pytest.mark.parametrize("kind", ["embedding", "norm", "groups", "built_matrix", "tied"])
def test_statistics_need_rows_of_a_linear_layer(kind):
    leaf = SMALL.one(KINDS[kind])
    phrases = (
        f"kronecker_sums: leaf '{leaf.parts[0].weight}' is {type(leaf).__name__}",
        "capture it factored",
    )
    with refused(*phrases, error=TypeError):
        kronecker_sums(leaf)


def test_statistics_of_different_layers_do_not_merge():
    x, y = (kronecker_sums(SMALL.one(LINEAR[kind])) for kind in ("linear", "conv1d"))
    with refused("merge: statistics of ['fc.weight'] and ['c_fc.weight']"):
        merge(x, y)


@pytest.mark.parametrize("side", ["a", "g"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_covariance_that_is_not_finite_names_its_layer(side, bad):
    leaf = SMALL.one(LINEAR["stacked"])
    factor = getattr(leaf, side).clone()
    factor[1, 0, -1] = bad
    sums = kronecker_sums(replace(leaf, **{side: factor}))
    layer = "q.weight" if side == "a" else "v.weight"
    with refused(f"eigenbasis: layer '{layer}'", "non-finite", "on_nonfinite='skip'"):
        eigenbasis(sums)


def test_a_layer_without_gradients_cannot_be_fitted():
    leaf = SMALL.one(LINEAR["linear"])
    with refused("eigenbasis: layer 'fc.weight'", "no row with a gradient", "examples with a loss"):
        eigenbasis(kronecker_sums(replace(leaf, g=torch.zeros_like(leaf.g))))


def test_a_fit_only_applies_to_its_own_layer():
    leaf = SMALL.one(LINEAR["linear"])
    basis = eigenbasis(kronecker_sums(SMALL.one(LINEAR["stacked"])))
    for operation in (lambda: rotate(leaf, basis), lambda: spectrum(leaf, basis)):
        with refused("curvature: leaf covers ['fc.weight']", "the fit ['q.weight'", "projection of the fit"):
            operation()


def test_statistics_do_not_depend_on_how_examples_were_batched():
    leaf = FIT.one(LINEAR["stacked_bias"])
    ragged = [take(leaf, slice(0, 1)), pad_rows(take(leaf, slice(1, 30)), 5), take(leaf, slice(30, 40))]
    total = None
    for block in ragged:
        total = update(total, block)
    assert total is not None
    same_sums(total, kronecker_sums(leaf))
    same_sums(kronecker_sums(concat(ragged)), kronecker_sums(leaf))


@pytest.mark.parametrize("width", [256, 257, 300, 513, 1100])
def test_covariances_of_wide_layers_are_summed_by_blocks(width):
    gen = torch.Generator().manual_seed(width)
    a, g = (torch.randn(2, 5, n, generator=gen, dtype=torch.float64) for n in (width, 3))
    sums = kronecker_sums(factorized("w", a, g))
    rows = a.reshape(-1, width)
    assert torch.allclose(sums.a, rows.T @ rows, rtol=1e-12, atol=1e-12)
