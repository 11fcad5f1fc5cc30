"""The counter-based stream: entries are functions of key and position alone, with the right distribution."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats

from attrax.core.random import permuted, random_rows, raw_words, stream_key, uniform

from .toys import law, refused

kinds = pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
KEY = 0x0123456789ABCDEF_FEDCBA9876543210


def test_the_stream_never_changes():
    """Projected gradients on disk are only usable while these numbers stay."""
    assert stream_key(0, "fc.weight", "a", 3, 2, "gaussian") == 58445351456139079024526251312568584538
    assert raw_words(KEY, 0, 2).tolist() == [5377138790426312260, 13516482618556681533]
    assert raw_words(KEY, 5, 2).tolist() == [9883201175627997387, 11352318735254779690]
    signs = random_rows(KEY, "rademacher", slice(0, 4), 6)
    assert ["".join("-+"[int(x > 0)] for x in row) for row in signs] == [
        "--+---",
        "+--+++",
        "+++-+-",
        "+-+-+-",
    ]
    normals = random_rows(KEY, "gaussian", slice(0, 2), 3)
    frozen = [[-0.089906596, -0.82529628, -1.46909416], [0.246928468, -0.936600566, -0.214114279]]
    torch.testing.assert_close(normals, torch.tensor(frozen), rtol=1e-6, atol=0)


def test_words_are_numpys_philox():
    assert np.array_equal(raw_words(KEY, 0, 50), np.random.Philox(key=KEY).random_raw(50))


@kinds
@law(50, start=st.integers(0, 300), count=st.integers(0, 300), columns=st.integers(1, 9))
def test_any_rows_are_those_of_the_whole(kind, start, count, columns):
    whole = random_rows(KEY, kind, slice(0, 600), columns)
    assert torch.equal(
        random_rows(KEY, kind, slice(start, start + count), columns), whole[start : start + count]
    )


@law(50, start=st.integers(0, 10_000), count=st.integers(0, 50))
def test_uniforms_are_addressed_by_position(start, count):
    assert np.array_equal(uniform(KEY, start, count), uniform(KEY, 0, start + count)[start:])


@law(50, words=st.lists(st.one_of(st.integers(), st.text(max_size=5)), min_size=1, max_size=4))
def test_keys_depend_on_every_word_and_their_order(words):
    key = stream_key(*words)
    assert 0 <= key < 2**128 and key == stream_key(*words)
    assert key != stream_key(*words, "")
    assert len({stream_key(*words, i) for i in range(5)}) == 5
    if words != words[::-1]:
        assert stream_key(*words[::-1]) != key or [*map(str, words)] == [*map(str, words[::-1])]


def test_streams_of_different_keys_are_unrelated():
    x, y = (random_rows(stream_key(seed, "w"), "gaussian", slice(0, 100_000), 1).flatten() for seed in (0, 1))
    assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 5 / 100_000**0.5


def test_signs_are_fair_and_independent():
    x = random_rows(KEY, "rademacher", slice(0, 1000), 100).double()
    assert set(x.unique().tolist()) == {-1.0, 1.0}
    n = x.numel()
    assert abs(float(x.mean())) < 5 / n**0.5
    assert abs(float((x[:, 1:] * x[:, :-1]).mean())) < 5 / n**0.5
    assert abs(float((x[1:] * x[:-1]).mean())) < 5 / n**0.5


def test_normals_are_normal():
    x = random_rows(KEY, "gaussian", slice(0, 1000), 100).double().flatten().numpy()
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 5 / len(x) ** 0.5
    assert np.isfinite(x).all()


long = st.integers(2**14 + 1, 40_000)


@law(50, size=st.one_of(st.integers(1, 3000), long), start=st.integers(0, 3000), count=st.integers(0, 3000))
def test_parts_of_a_permutation_are_those_of_the_whole(size, start, count):
    whole = permuted(KEY, 0, size, size)
    assert sorted(whole.tolist()) == list(range(size))
    start = min(start, size)
    count = min(count, size - start)
    assert np.array_equal(permuted(KEY, start, count, size), whole[start : start + count])


def test_permutations_never_change():
    assert permuted(KEY, 0, 8, 1000).tolist() == [15, 657, 688, 485, 497, 331, 567, 985]
    assert permuted(KEY, 10**9, 3, 10**12).tolist() == [756399849237, 587608823679, 303125578543]


@pytest.mark.parametrize("size", [2, 3, 5, 17])
def test_permutations_are_uniform(size):
    """Every entry is everywhere equally often, and so is every ordered pair in the first two places."""
    draws = 4000
    found = np.stack([permuted(stream_key(seed, "p"), 0, size, size) for seed in range(draws)])
    counts = np.stack([np.bincount(column, minlength=size) for column in found.T])
    assert (abs(counts - draws / size) < 5 * (draws / size) ** 0.5).all()
    pairs = np.bincount(found[:, 0] * size + found[:, 1], minlength=size**2)
    expected = draws / (size * (size - 1))
    different = ~np.eye(size, dtype=bool).flatten()
    assert (abs(pairs[different] - expected) < 5 * expected**0.5).all()
    assert not pairs[~different].any()


def test_long_permutations_are_uniform():
    """First two entries in 6 x 6 equal pieces of the range, over many keys; neighbours are unrelated."""
    draws, size = 4000, 2**14 + 2
    found = np.stack([permuted(stream_key(seed, "p"), 5, 2, size) for seed in range(draws)])
    pieces = found * 6 // size
    counts = np.bincount(pieces[:, 0] * 6 + pieces[:, 1], minlength=36)
    assert (abs(counts - draws / 36) < 5 * (draws / 36) ** 0.5).all()
    whole = permuted(KEY, 0, size, size)
    places = np.arange(size)
    for other in (places, whole[np.roll(places, 1)], whole[::-1]):
        assert abs(np.corrcoef(whole, other)[0, 1]) < 5 / size**0.5
    assert abs(int((whole == places).sum()) - 1) < 6


def test_more_entries_than_a_permutation_has_are_refused():
    with refused("permuted: entries 3 to 6 of a permutation of 5", "take fewer"):
        permuted(KEY, 3, 3, 5)


def test_unknown_kinds_are_refused():
    unknown: Any = "cauchy"
    with refused("projection kind: got 'cauchy'", "'rademacher' or 'gaussian'"):
        random_rows(KEY, unknown, slice(0, 1), 1)
