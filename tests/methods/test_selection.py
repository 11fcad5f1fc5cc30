"""Rules of online selection, against their definitions."""

import pytest
import torch
from torch import Tensor

from attrax.methods import drop_fraction, drop_negative, greats, keep_top
from attrax.methods.selection import greedy


def unasked() -> Tensor:
    raise AssertionError("a rule on scores asked for interactions")


@pytest.mark.parametrize(("B", "dropped"), [(8, 4), (5, 2), (3, 2), (1, 0)])
def test_half_of_a_batch_is_rounded_to_even(B, dropped):
    keep = drop_fraction(0.5)(torch.arange(B, 0.0, -1), unasked)
    assert (~keep).nonzero().flatten().tolist() == list(range(B - dropped, B))


def test_ties_are_dropped_in_order_of_the_batch():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0])
    assert drop_fraction(0.6)(scores, unasked).tolist() == [False, False, False, True, True]
    assert keep_top(3)(scores, unasked).tolist() == [False, False, True, True, True]


def test_extremes_keep_all_or_nothing():
    scores = torch.tensor([1.0, -1.0])
    for rule in (drop_fraction(0.0), keep_top(2), keep_top(5), greats(0.0, 0.1)):
        assert rule(scores, lambda: torch.eye(2)).all()
    for rule in (drop_fraction(1.0), keep_top(0), greats(1.0, 0.1)):
        assert not rule(scores, lambda: torch.eye(2)).any()
    assert drop_negative(scores, unasked).tolist() == [True, False]


def test_what_is_not_a_number_is_dropped():
    scores = torch.tensor([float("nan"), -5.0, 1.0])
    assert drop_fraction(1 / 3)(scores, unasked).tolist() == [False, True, True]
    assert drop_negative(scores, unasked).tolist() == [False, False, True]
    assert greedy(scores, torch.zeros(3, 3), 2, 1.0).tolist() == [False, True, True]


def test_greats_is_the_greedy_maximization_of_its_formula(rng):
    g, v = torch.randn(7, 3, generator=rng).double(), torch.randn(3, generator=rng).double()
    s, h, eta = g @ v, g @ g.T, 2.0
    picked: list[int] = []
    for _ in range(4):
        gains = {i: eta * s[i] - eta**2 * sum(h[i, j] for j in picked) for i in range(7) if i not in picked}
        picked.append(max(gains, key=lambda i: float(gains[i])))
    assert greats(3 / 7, eta)(s, lambda: h).nonzero().flatten().tolist() == sorted(picked)
    assert sorted(picked) != s.topk(4).indices.sort().values.tolist(), "interactions decide here"


def test_the_rate_of_a_schedule_is_read_when_needed():
    rates = iter([0.0, 10.0])
    rule = greats(1 / 3, lambda: next(rates))
    s, h = torch.tensor([3.0, 2.9, 2.0]), torch.tensor([[4.0, 4.0, 0.0], [4.0, 4.0, 0.0], [0.0, 0.0, 1.0]])
    assert [rule(s, lambda: h).tolist() for _ in range(2)] == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("build", [drop_fraction, lambda x: greats(x, 0.1), lambda x: keep_top(int(x))])
def test_shares_are_checked(build):
    with pytest.raises(ValueError, match="expected a"):
        build(-2.0)
