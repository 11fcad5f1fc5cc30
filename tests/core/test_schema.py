"""Descriptions of leaves and shards: plain values that survive JSON, and nothing else is read as one."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from attrax.core import Grouped
from attrax.core.packed import pack, unpack
from attrax.core.schema import Form, form_from_json, form_of

from .toys import KINDS, SMALL, law, refused

kinds = pytest.mark.parametrize("kind", KINDS)


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
