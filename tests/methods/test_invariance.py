"""Whole methods give the same scores however their data is cut, padded, ordered, stored or planned."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from attrax.core import (
    CPU,
    Blocks,
    Hardware,
    Scores,
    Source,
    compact,
    pad_rows,
    take,
    transformed,
    trim_rows,
)
from attrax.methods import ekfac, fit_ekfac, gradcos, graddot, kfac, logra, self_influence

from ..core.dense import assert_same
from ..core.toys import FACTORED, Sizes, block, cut, law, named, source, unchecked

Method: TypeAlias = Callable[[Source, Source, Hardware], Scores]

METHODS: dict[str, Method] = {
    "graddot": lambda train, query, hardware: graddot(train, query, hardware=hardware),
    "gradcos": lambda train, query, hardware: gradcos(train, query, hardware=hardware),
    "kfac": lambda train, query, hardware: kfac(train, query, hardware=hardware),
    "ekfac": lambda train, query, hardware: ekfac(train, query, hardware=hardware),
    "logra": lambda train, query, hardware: logra(train, query, dim=2, hardware=hardware),
    "self_influence": lambda train, _, hardware: self_influence(train, hardware=hardware),
    "curved self_influence": lambda train, _, hardware: self_influence(
        train, curvature=fit_ekfac(train), hardware=hardware
    ),
}
methods = pytest.mark.parametrize("name", METHODS)

SIZE = Sizes(B=6, Q=3, T=4, S=2, Ni=3, No=4, seed=1)
TRAIN, QUERY = SIZE.trees(
    {k: FACTORED[k] for k in ("linear_bias", "stacked", "called_twice", "embedding", "norm")}
)
WITHIN = 1e-8
"""Eigenvectors of nearly equal covariances differ by more than the covariances do."""


def score(name: str, train: Source, query: Source, hardware: Hardware = CPU) -> torch.Tensor:
    with unchecked():
        return METHODS[name](train, query, hardware).in_order(named(6)).values


@pytest.fixture(scope="module")
def right() -> dict[str, torch.Tensor]:
    return {name: score(name, source(TRAIN), source(QUERY)) for name in METHODS}


@methods
@law(
    6,
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    queries=st.sampled_from([(3,), (1, 2), (1, 0, 1, 1)]),
)
def test_scores_do_not_depend_on_block_sizes(name, lengths, queries, right):
    rest = 6 - sum(lengths)
    lengths = [*lengths, rest] if rest >= 0 else [6]
    assert_same(
        score(name, source(*cut(TRAIN, *lengths)), source(*cut(QUERY, *queries))), right[name], WITHIN
    )


@methods
@pytest.mark.parametrize("memory", [4096, 500])
def test_scores_do_not_depend_on_the_memory_budget(name, memory, right):
    assert_same(score(name, source(TRAIN), source(QUERY), replace(CPU, memory=memory)), right[name], WITHIN)


@methods
def test_scores_do_not_depend_on_the_machine(name, right):
    """Other figures choose other routes."""
    for hardware in (Hardware(1e15, 1e9, 0.0), Hardware(1e9, 1e15, 0.0), Hardware(1e15, 1e15, 1.0)):
        assert_same(score(name, source(TRAIN), source(QUERY), hardware), right[name], WITHIN)


@methods
def test_scores_do_not_depend_on_padding(name, right):
    padded = [
        grads.map(lambda _, leaf, T=T: pad_rows(leaf, T))
        for T, grads in zip((9, 4, 20), cut(TRAIN, 1, 3, 2), strict=True)
    ]
    query = QUERY.map(lambda _, leaf: pad_rows(leaf, 7))
    assert_same(score(name, source(*padded), source(query)), right[name], WITHIN)
    trimmed = transformed(source(*padded), lambda _, leaf: trim_rows(leaf))
    assert_same(score(name, trimmed, source(query)), right[name], WITHIN)


@methods
def test_scores_do_not_depend_on_the_order_of_examples(name, right):
    order = [4, 2, 0, 5, 1, 3]
    shuffled = TRAIN.map(lambda _, leaf: take(leaf, torch.tensor(order)))
    ids = tuple(f"x{i}" for i in order)
    blocks = Blocks([block(g, ids[2 * k : 2 * k + 2]) for k, g in enumerate(cut(shuffled, 2, 2, 2))])
    assert_same(score(name, blocks, source(QUERY)), right[name], WITHIN)


@pytest.mark.parametrize("name", ["graddot", "gradcos", "logra", "self_influence"])
def test_scores_do_not_depend_on_the_form_of_the_leaves(name, right):
    """K-FAC and EK-FAC need rows; the others take built gradients as well."""
    small = transformed(source(TRAIN), lambda _, leaf: compact(leaf))
    assert_same(score(name, small, source(QUERY)), right[name], WITHIN)


@methods
def test_duplicates_score_what_the_example_scores(name, right):
    """Scored a second time, an example has the same row; a fit on everything twice is the same fit."""
    twice = Blocks([block(TRAIN, named(6)), block(TRAIN, tuple(f"copy-{i}" for i in named(6)))])
    with unchecked():
        s = METHODS[name](twice, source(QUERY), CPU)
    assert_same(s.values[:6], right[name], WITHIN)
    assert_same(s.values[6:], right[name], WITHIN)


@methods
def test_every_example_has_one_row_and_every_query_one_column(name):
    with unchecked():
        s = METHODS[name](source(*cut(TRAIN, 2, 4)), source(QUERY), CPU)
    assert s.ids == named(6) and s.query_ids == (("self",) if "self" in name else named(3))
    assert s.values.shape == (len(s.ids), len(s.query_ids))
    assert {"method", "target", "unit", "sign"} <= set(s.about)


@methods
def test_sources_are_left_as_they_were(name):
    tensors = tree_leaves((TRAIN, QUERY))
    before = [x.clone() for x in tensors]
    score(name, source(TRAIN), source(QUERY))
    assert all(torch.equal(x, y) for x, y in zip(before, tensors, strict=True))
