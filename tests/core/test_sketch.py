"""Sparse and Hadamard projections: their matrices by definition, their exact properties, their fast forms."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import linalg

from attrax.core import Projection
from attrax.core.projection import projection_matrix
from attrax.core.random import permuted, random_rows, raw_words
from attrax.core.sketch import hadamard, hadamard_rows, scatter, sparse_targets

from .dense import assert_same
from .toys import generator, law, normal, refused

KEY = 0x0123456789ABCDEF_FEDCBA9876543210


def sparse_matrix(width, dim, nonzeros):
    """P [k, d]: word (c, b) of the stream gives the row of input c in block b (high bits) and its sign (lowest bit)."""
    P = np.zeros((dim, width))
    height = dim // nonzeros
    for c, b in itertools.product(range(width), range(nonzeros)):
        word = int(raw_words(KEY, c * nonzeros + b, 1)[0])
        P[b * height + int((word >> 11) / 2**53 * height), c] = (2 * (word & 1) - 1) / nonzeros**0.5
    return torch.from_numpy(P)


def hadamard_matrix(width, dim):
    """P [k, d] = sqrt(n/k) R H D, of the columns that are not padding."""
    n = 1 << int(np.ceil(np.log2(width)))
    H = linalg.hadamard(n) / n**0.5
    D = np.diag(random_rows(KEY, "rademacher", slice(0, n), 1).double().flatten().numpy())
    R = np.eye(n)[permuted(KEY ^ 1, 0, dim, n)]
    return torch.from_numpy(((n / dim) ** 0.5 * R @ H @ D)[:, :width])


@pytest.mark.parametrize(("dim", "nonzeros"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6)])
def test_sparse_projections_are_their_definition(dim, nonzeros):
    P = sparse_matrix(20, dim, nonzeros)
    rows, signs = sparse_targets(KEY, slice(0, 20), dim, nonzeros)
    x = normal(generator(0), 3, 20)
    assert_same(scatter(x, rows, signs, dim), x @ P.T)
    assert_same(P.norm(dim=0), torch.ones(20, dtype=torch.float64))
    assert ((P != 0).sum(0) == nonzeros).all()


@pytest.mark.parametrize("width", [1, 2, 5, 8, 13, 16])
@pytest.mark.parametrize("dim", [1, 3])
def test_hadamard_projections_are_their_definition(width, dim):
    if dim > width:
        return
    P = hadamard_matrix(width, dim)
    x = normal(generator(0), 3, width)
    assert_same(hadamard(x, KEY, dim), x @ P.T)
    assert_same(hadamard_rows(KEY, slice(0, width), width, dim), P.T)


@law(30, start=st.integers(0, 40), count=st.integers(0, 40), dim=st.sampled_from([2, 4, 8]))
def test_any_inputs_have_the_columns_of_the_whole(start, count, dim):
    whole = hadamard_rows(KEY, slice(0, 80), 80, dim)
    part = slice(start, start + count)
    assert torch.equal(hadamard_rows(KEY, part, 80, dim), whole[part])
    rows, signs = sparse_targets(KEY, slice(0, 80), dim, 2)
    some = sparse_targets(KEY, part, dim, 2)
    assert torch.equal(some[0], rows[part]) and torch.equal(some[1], signs[part])


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_hadamard_projections_to_full_width_keep_inner_products(n):
    x = normal(generator(1), 4, n)
    y = hadamard(x, KEY, n)
    assert_same(y @ y.T, x @ x.T)


@pytest.mark.parametrize("kind", ["rademacher", "sjlt", "srht"])
def test_columns_have_length_one(kind):
    matrix = projection_matrix(Projection(6, kind, nonzeros=3), "w", "a", 100)
    assert matrix is not None
    assert_same(matrix.norm(dim=1), torch.ones(100))


@pytest.mark.parametrize(("dim", "nonzeros"), [(4, 3), (2, 4), (2, 0)])
def test_blocks_must_divide_the_dimension(dim, nonzeros):
    with refused("sjlt", f"{nonzeros} nonzeros", f"got {dim}"):
        sparse_targets(KEY, slice(0, 3), dim, nonzeros)
