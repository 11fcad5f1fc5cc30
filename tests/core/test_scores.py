"""Scores: rows keyed by example, step and block; columns by query."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from attrax.core import Examples, Scores
from attrax.core.scores import SIGN, scores

from .dense import assert_same
from .toys import generator, law, named, normal, refused


def table(*rows: list[float], ids: str = "abcdefgh", queries: str = "pqr", **fields: Any) -> Scores:
    values = torch.tensor(rows)
    return Scores(values, tuple(ids[: len(rows)]), tuple(queries[: values.shape[1]]), **fields)


RUN = table(
    *([1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]), ids="abab", steps=(1, 1, 0, 2), micros=(0, 1, 0, 0)
)
"""Two examples, each seen at two steps."""


def test_top_lists_the_highest_first():
    s = table([1.0], [3.0], [2.0])
    assert s.top(2) == [("b", 3.0), ("c", 2.0)]
    assert s.top(2, lowest=True) == [("a", 1.0), ("c", 2.0)]
    assert s.top(10) == [("b", 3.0), ("c", 2.0), ("a", 1.0)]


def test_top_breaks_ties_in_row_order():
    s = table([1.0], [2.0], [1.0], [2.0])
    assert [i for i, _ in s.top(4)] == ["b", "d", "a", "c"]
    assert [i for i, _ in s.top(4, lowest=True)] == ["a", "c", "b", "d"]


def test_queries_are_addressed_by_id_or_position():
    s = table([1.0, 5.0], [2.0, 4.0])
    assert s.top(1, "q") == s.top(1, 1) == s.top(1, -1) == [("a", 5.0)]
    assert s.query("q", "p").values.tolist() == [[5.0, 1.0], [4.0, 2.0]]
    assert s.query("q").query_ids == ("q",)


def test_unknown_queries_are_refused_and_known_ones_named():
    s = table([1.0, 5.0])
    with refused("unknown query 'z'", "there are 2: ['p', 'q']", error=KeyError):
        s.query("z")
    for position in (2, -3):
        with refused(f"query {position} is out of range", "there are 2 queries", error=KeyError):
            s.top(1, position)
    with refused("top: k must be at least 1, got 0"):
        s.top(0)


def test_examples_keep_their_rows_and_row_keys():
    one = RUN.example("b")
    assert (one.ids, one.steps, one.micros) == (("b", "b"), (1, 2), (1, 0))
    assert one.values.tolist() == [[2.0, 20.0], [4.0, 40.0]]
    assert RUN.example("b", "a").ids == RUN.ids
    with refused("unknown examples ['z']", "the scores have 2 examples", error=KeyError):
        RUN.example("a", "z")


def test_rows_of_an_example_add_up():
    folded, count = RUN.per_example()
    assert folded.ids == ("a", "b") and folded.values.tolist() == [[4.0, 40.0], [6.0, 60.0]]
    assert count.tolist() == [2, 2]
    assert (folded.steps, folded.micros, folded.query_ids) == ((), (), ("p", "q"))


@law(30, ids=st.lists(st.sampled_from("abcde"), max_size=12), seed=st.integers(0, 99))
def test_folding_keeps_the_total_and_the_first_order(ids, seed):
    values = normal(generator(seed), len(ids), 2)
    folded, count = Scores(values, tuple(ids), ("p", "q")).per_example()
    assert list(folded.ids) == list(dict.fromkeys(ids))
    assert [int(n) for n in count] == [ids.count(i) for i in folded.ids]
    assert_same(folded.values.sum(0), values.sum(0), within=1e-9)
    for k, i in enumerate(folded.ids):
        assert_same(folded.values[k], values[[j for j, other in enumerate(ids) if other == i]].sum(0))


@law(30, order=st.permutations(range(5)), steps=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_rows_in_a_given_order_do_not_depend_on_the_order_they_came_in(order, steps):
    ids, values = ("a", "b", "a", "c", "b"), torch.arange(5.0).unsqueeze(1)
    micros = (0, 1, 2, 3, 4)
    came = Scores(
        *(values[list(order)], tuple(ids[k] for k in order), ("q",)),
        *(tuple(steps[k] for k in order), tuple(micros[k] for k in order)),
    )
    found = came.in_order(["c", "a", "b"])
    expected = sorted(range(5), key=lambda k: ("cab".index(ids[k]), steps[k], micros[k]))
    assert found.values.flatten().tolist() == [float(k) for k in expected]
    assert found.ids == tuple(ids[k] for k in expected)
    assert found.steps == tuple(steps[k] for k in expected)
    assert found.micros == tuple(micros[k] for k in expected)


def test_ordering_drops_what_is_not_asked_for_and_invents_nothing():
    assert RUN.in_order(["b"]).values.tolist() == [[2.0, 20.0], [4.0, 40.0]]
    with refused("in_order: 2 examples have no score", "['y', 'z']", error=KeyError):
        RUN.in_order(["a", "y", "z"])


@pytest.mark.parametrize("rows", [5, 1])
def test_queries_are_aggregated_after_scoring(rows):
    values = normal(generator(rows), rows, 3)
    s = Scores(values, named(rows), ("p", "q", "r"))
    for total, expected in (
        (s.aggregate("sum"), values.sum(1)),
        (s.aggregate("mean"), values.mean(1)),
        (s.aggregate("max"), values.max(1).values),
    ):
        assert_same(total.values, expected.unsqueeze(1))
    assert s.aggregate("max").query_ids == ("max",) and s.aggregate("sum", "task").query_ids == ("task",)
    unknown: Any = "median"
    with refused("aggregate: got 'median'", "'sum', 'mean' or 'max'"):
        s.aggregate(unknown)


def test_scores_are_keyed_by_the_blocks_they_came_from():
    blocks = [Examples(("a", "b"), step=3, micro=1), Examples((), step=4), Examples(("c",), step=5)]
    s = scores(torch.ones(3, 2), blocks, ["p", "q"], {"method": "graddot"})
    assert (s.ids, s.steps, s.micros, s.query_ids) == (("a", "b", "c"), (3, 3, 5), (1, 1, 0), ("p", "q"))
    assert s.about == {"method": "graddot", "sign": SIGN}
    assert len(s) == 3 and repr(s) == "Scores(3 rows x 2 queries, graddot)"
    with refused("scores: (2, 2) values for 3 examples and 2 queries"):
        scores(torch.ones(2, 2), blocks, ["p", "q"], {})


def test_scores_say_what_their_sign_means():
    assert "higher = more helpful" in table([1.0]).about["sign"]
    assert repr(table([1.0])) == "Scores(1 rows x 1 queries, unnamed)"
