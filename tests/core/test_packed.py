"""Packed rows: what a store writes stands for the same gradients, however blocks are cut and joined."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from attrax.core import Leaf, factorized, pad_rows, take, tree_map
from attrax.core.packed import Packed, concat_packed, pack, take_packed, unpack
from attrax.core.products import token_scores_leaf

from .dense import assert_same, gradient, token_shares
from .toys import FACTORED, KINDS, SMALL, SUMS, law, sizes

kinds = pytest.mark.parametrize("kind", KINDS)
ROWS = FACTORED | SUMS


def same_packed(x: Packed, y: Packed) -> None:
    assert x.form == y.form and np.array_equal(x.offsets, y.offsets)
    assert all(torch.equal(a, b) for a, b in zip(x.arrays, y.arrays, strict=True))
    for u, v in zip(x.uses, y.uses, strict=True):
        same_packed(u, v)


def silenced(leaf: Leaf) -> Leaf:
    """The leaf with rows of zero gradient inside and at the end of some examples."""

    def quiet(x: torch.Tensor) -> torch.Tensor:
        if x.ndim < 3 or not x.is_floating_point():
            return x
        x = x.clone()
        rows = x.transpose(1, 2) if x.ndim == 4 else x
        rows[:1, -1:], rows[1:2, 1:], rows[2:3, rows.shape[1] // 2 - 1 : rows.shape[1] // 2] = 0, 0, 0
        return x

    return tree_map(quiet, leaf)


@kinds
@law(15, size=sizes(empty=True))
def test_packing_and_unpacking_keeps_gradients_and_static_fields(kind, size):
    leaf = replace(size.one(KINDS[kind]), basis="k4")
    for each in (leaf, silenced(leaf)):
        again = unpack(pack(each))
        assert_same(gradient(again), gradient(each))
        assert pytree.tree_structure(again) == pytree.tree_structure(each)


@pytest.mark.parametrize("kind", FACTORED)
@law(10, size=sizes())
def test_packed_rows_keep_their_positions(kind, size):
    leaf, query = size.pair(FACTORED[kind])
    each = silenced(leaf)
    expected = token_shares(each, query)
    found = token_scores_leaf(unpack(pack(each)), query)
    assert_same(found, expected[:, : found.shape[1]])
    assert not expected[:, found.shape[1] :].any()


@pytest.mark.parametrize("kind", ROWS)
@law(10, size=sizes())
def test_padding_is_not_written(kind, size):
    leaf = size.one(ROWS[kind])
    same_packed(pack(pad_rows(leaf, 3 * size.T + 4)), pack(leaf))


@kinds
@law(15, size=sizes(), at=st.integers(0, 4))
def test_cutting_and_joining_packed_rows_is_cutting_and_joining_leaves(kind, size, at):
    leaf = silenced(size.one(KINDS[kind]))
    whole, at = pack(leaf), min(at, size.B)
    pieces = [take_packed(whole, slice(0, at)), take_packed(whole, slice(at, size.B))]
    for piece, part in zip(pieces, (slice(0, at), slice(at, None)), strict=True):
        assert_same(gradient(unpack(piece)), gradient(take(leaf, part)))
    same_packed(concat_packed(pieces), whole)
    for start in range(size.B - at):
        one = take_packed(pieces[1], slice(start, start + 1))
        assert_same(gradient(unpack(one)), gradient(take(leaf, slice(at + start, at + start + 1))))
    index = np.arange(size.B)[::-1].copy()
    assert_same(gradient(unpack(take_packed(whole, index))), gradient(leaf).flip(0))


def test_rows_that_lie_end_to_end_are_not_copied():
    leaf = SMALL.one(KINDS["linear"])
    whole, trimmed = pack(leaf), pack(silenced(leaf))
    leaf.a.zero_()
    assert not whole.arrays[0].any() and trimmed.arrays[0].any()


def test_copies_lie_in_the_memory_that_was_given():
    made = []

    def memory(shape, dtype):
        made.append(torch.empty(tuple(shape), dtype=dtype))
        return made[-1]

    leaf = silenced(SMALL.one(KINDS["linear"]))
    found = pack(leaf, memory)
    assert [x.data_ptr() for x in found.arrays] == [x.data_ptr() for x in made]
    same_packed(found, pack(leaf))


def test_long_rows_may_stay_where_they_are():
    a, g = torch.randn(3, 9, 4096), torch.randn(3, 9, 2)
    g[:, -1] = 0
    leaf = factorized("w", a, g)
    left, expected = pack(leaf, None), pack(leaf)
    assert left.arrays[0].data_ptr() == a.data_ptr() and left.arrays[0].shape == (3, 1, 8, 4096)
    for x, y in zip(left.arrays, expected.arrays, strict=True):
        assert torch.equal(x.reshape(y.shape), y)
