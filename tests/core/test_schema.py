"""Packed rows: what a store writes stands for the same gradients, however blocks are cut and joined."""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from attrax.core import Grouped, Leaf, pad_rows, take, tree_map
from attrax.core.products import token_scores_leaf
from attrax.core.schema import (
    Form,
    Packed,
    concat_packed,
    form_from_json,
    form_of,
    pack,
    packed_bytes,
    take_packed,
    unpack,
)

from .dense import assert_same, gradient, token_shares
from .toys import FACTORED, KINDS, SMALL, SUMS, law, refused, sizes

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


def test_packed_arrays_are_copies():
    leaf = SMALL.one(KINDS["built_matrix"])
    packed = pack(leaf)
    leaf.w.zero_()
    assert packed.arrays[0].any()


def test_bytes_count_arrays_and_offsets():
    leaf = SMALL.one(KINDS["tied"])
    uses = [pack(use) for use in leaf.uses]
    own = sum(x.numel() * x.element_size() for p in uses for x in p.arrays)
    assert packed_bytes(pack(leaf)) == own + 3 * 4 * 8


@kinds
def test_forms_survive_json(kind):
    form = form_of(SMALL.one(KINDS[kind]))
    assert form_from_json(json.loads(json.dumps(asdict(form)))) == form
    assert str(form).startswith(form.kind + "(")


def test_forms_written_before_groups_are_read():
    form = form_of(SMALL.one(KINDS["linear"]))
    old = asdict(form)
    del old["positions"]
    assert form_from_json(old) == form


def test_rows_of_experts_are_no_positions_after_reading():
    leaf = replace(SMALL.one(KINDS["groups"]), positions=False)
    again = unpack(pack(leaf))
    assert isinstance(again, Grouped) and not again.positions
    assert form_from_json(json.loads(json.dumps(asdict(form_of(leaf))))) == form_of(leaf)


GOOD: dict[str, Any] = json.loads(json.dumps(asdict(form_of(SMALL.one(KINDS["linear"])))))


@pytest.mark.parametrize("field", GOOD)
@law(30, value=st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.integers(), max_size=2))
def test_malformed_forms_are_refused_or_read_as_forms(field, value):
    """Whatever a file holds, reading it ends in a form or in a ValueError."""
    for broken in ({**GOOD, field: value}, {k: v for k, v in GOOD.items() if k != field}):
        try:
            form = form_from_json(broken)
        except ValueError:
            continue
        assert isinstance(form, Form)


def test_inconsistent_forms_are_refused():
    flat = {"name": "g", "dtype": "float32", "shape": []}
    for broken in (
        {**GOOD, "kind": "Unknown"},
        {**GOOD, "parts": []},
        {**GOOD, "arrays": GOOD["arrays"][:1]},
        {**GOOD, "arrays": [GOOD["arrays"][0], flat]},
        {**GOOD, "calls": 0},
        {**GOOD, "kind": "Sum", "arrays": []},
        {**GOOD, "kind": "Grouped"},
        {
            **GOOD,
            "kind": "Grouped",
            "arrays": [{**a, "shape": [n, 4]} for a, n in zip(GOOD["arrays"], (2, 3), strict=True)],
        },
    ):
        with refused("the form of a leaf is inconsistent"):
            form_from_json(broken)
    for broken in ({}, {**GOOD, "parts": [{"weight": 3, "width": 1}]}, {**GOOD, "parts": 7}):
        with refused("the form of a leaf is malformed"):
            form_from_json(broken)
