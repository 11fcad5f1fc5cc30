"""Rank metrics, ties included."""

import pytest
import torch
from hypothesis import strategies as st
from scipy import stats

from attrax.core import Scores
from attrax.methods import average_ranks, descending_rank, recall_at, spearman

from ..core.toys import law, refused

values = st.lists(st.integers(-3, 3).map(float) | st.floats(-5, 5), min_size=2, max_size=12)


@law(50, x=values)
def test_tied_values_share_their_average_rank(x):
    ranks = average_ranks(torch.tensor(x, dtype=torch.float64))
    assert ranks.tolist() == stats.rankdata(x).tolist()


@law(50, pairs=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=12))
def test_spearman_is_scipys(pairs):
    x, y = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    found = spearman(x, y)
    if len(x.unique()) == 1 or len(y.unique()) == 1:
        assert found != found
    else:
        assert found == pytest.approx(stats.spearmanr(x.numpy(), y.numpy()).statistic, abs=1e-12)


def test_spearman_with_many_ties():
    a, b = torch.tensor([1.0, 2, 2, 3, 5, 2]), torch.tensor([2.0, 1, 3, 3, 4, 3])
    assert spearman(a, b) == pytest.approx(0.741935, abs=1e-6)


def test_spearman_needs_two_vectors_of_one_length():
    for x, y in (
        (torch.ones(3), torch.ones(4)),
        (torch.ones(1), torch.ones(1)),
        (torch.ones(2, 2), torch.ones(2, 2)),
    ):
        with refused(
            "spearman: expected two vectors of one length >= 2", str(tuple(x.shape)), str(tuple(y.shape))
        ):
            spearman(x, y)


TABLE = Scores(
    torch.tensor([[1.0, 5.0], [3.0, 5.0], [3.0, 0.0], [2.0, 5.0]]), ("a", "b", "c", "a"), ("p", "q")
)


def test_ranks_count_from_the_best_and_rows_of_an_example_add_up():
    assert [descending_rank(TABLE, "p", i) for i in "abc"] == [2.0, 2.0, 2.0]
    assert [descending_rank(TABLE, "q", i) for i in "abc"] == [1.0, 2.0, 3.0]


def test_recall_is_the_share_of_sources_found():
    s = Scores(
        torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 2.0], [0.0, 0.0]]), ("a", "b", "c", "d"), ("p", "q")
    )
    assert recall_at(s, {"p": "c", "q": "b"}, (1, 2, 3)) == {1: 0.5, 2: 0.5, 3: 1.0}
    assert recall_at(s, {"q": "a"}) == {1: 1.0, 5: 1.0, 10: 1.0}


def test_a_tie_does_not_count_as_found():
    """Otherwise constant scores would have perfect recall."""
    constant = Scores(torch.zeros(10, 1), tuple("abcdefghij"), ("q",))
    assert recall_at(constant, {"q": "a"}, (1, 5, 10)) == {1: 0.0, 5: 0.0, 10: 1.0}


def test_unknown_queries_and_examples_are_refused():
    with refused("unknown query 'z'", "['p', 'q']", error=KeyError):
        recall_at(TABLE, {"z": "a"})
    with refused("descending_rank: example 'z' is not among the 3", error=KeyError):
        recall_at(TABLE, {"p": "z"})
    with refused("recall_at: no query has a known source"):
        recall_at(TABLE, {})
