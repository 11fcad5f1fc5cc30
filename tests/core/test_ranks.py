"""What processes that share a data set agree on, without any process."""

import pytest
import torch

from attrax.core import Block, Blocks, Examples, GradTree, Scores, counted_once, factorized, fold
from attrax.core import gram as gram_of
from attrax.core.identity import bit_sums
from attrax.core.kronecker import eigen_cost, kronecker_sums
from attrax.core.ranks import Alone, Ranks
from attrax.core.scores import interleaved
from attrax.frontends.model.distributed import deal


class Pair(Alone):
    """This process, and another one that says something else."""

    def __init__(self, other: object) -> None:
        object.__setattr__(self, "other", other)

    def listed(self, value):
        return [value, self.other]


def source(*ids: str, fingerprint: str = "p") -> Blocks:
    leaf = factorized("w", torch.ones(len(ids), 1, 2), torch.ones(len(ids), 1, 3))
    return Blocks([Block(GradTree({"w": leaf}), Examples(ids, fingerprint=fingerprint))])


def rows(leaf):
    return leaf.g.sum()


@pytest.mark.parametrize(
    ("other", "message"),
    [((None, []), "the source of rank 1 yielded no examples"), (("q", ["b"]), "rank 1 'q'")],
)
def test_a_fold_refuses_shares_that_are_no_set(other, message):
    with pytest.raises(ValueError, match=message):
        fold(lambda state, leaf: rows(leaf), source("a"), ranks=Pair(other))


def test_a_fold_warns_of_examples_in_several_shares():
    with pytest.warns(RuntimeWarning, match="1 examples, e.g. 'a', are in the shares of several ranks"):
        assert fold(lambda state, leaf: rows(leaf), source("a", "b"), ranks=Pair(("p", ["a"])))[2] == 3


def test_a_fold_counts_the_examples_of_all_shares():
    ranks = Pair(("p", ["c", "c"]))
    assert isinstance(ranks, Ranks)
    assert fold(lambda state, leaf: rows(leaf), source("a", "b"), ranks=ranks)[2] == 4


def share(ids: str, steps: tuple[int, ...] = (), values: range | None = None) -> Scores:
    numbers = torch.tensor([float(ord(i)) for i in ids])[:, None]
    return Scores(numbers, tuple(ids), ("q",), steps, (0,) * len(steps))


def test_scores_dealt_in_turn_are_put_in_order_at_every_step():
    one, two = share("acgi", (0, 0, 1, 1)), share("bdhj", (0, 0, 1, 1))
    found = interleaved([one, two])
    assert "".join(found.ids) == "abcdghij" and found.steps == (0, 0, 0, 0, 1, 1, 1, 1)
    assert found.values.flatten().tolist() == [float(ord(i)) for i in found.ids]


def test_scores_of_another_process_are_not_repeated_but_own_rows_are_kept():
    assert "".join(interleaved([share("acc"), share("ba")]).ids) == "abcc"
    assert "".join(interleaved([share("a", (0,)), share("a", (1,))]).ids) == "aa"


def test_scores_of_other_queries_are_refused():
    other = Scores(torch.ones(1, 1), ("a",), ("r",))
    with pytest.raises(ValueError, match="share 1 has scores of queries"):
        interleaved([share("a"), other])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_bit_sums_of_pieces_add_up(dtype, rng):
    x = torch.randn(7, 5, generator=rng).to(dtype)
    columns = [(bit_sums(x[:, c : c + 1], lambda index, c=c: index * 5 + c, 1)) for c in range(5)]
    assert torch.equal(torch.stack(columns).sum(0), bit_sums(x))


def test_bit_sums_are_those_of_all_entries_one_by_one(rng):
    x = torch.randn(300, 1013, generator=rng)
    bits = [int(b) for b in x.flatten().view(torch.int32)]
    expected = [sum(bits), sum(i * b for i, b in enumerate(bits, 1))]
    assert bit_sums(x).tolist() == [(total + 2**63) % 2**64 - 2**63 for total in expected]
    left, right = x[:, :400], x[:, 400:].contiguous()
    halves = [
        bit_sums(left, lambda i: i // 400 * 1013 + i % 400, 400),
        bit_sums(right, lambda i: i // 613 * 1013 + i % 613 + 400, 613),
    ]
    assert torch.equal(halves[0] + halves[1], bit_sums(x))


def test_tasks_are_dealt_by_cost():
    owner = deal({"a": 8.0, "b": 5.0, "c": 4.0, "d": 1.0}, 2)
    assert owner == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert set(deal({str(i): 1.0 for i in range(6)}, 3).values()) == {0, 1, 2}


def test_decompositions_cost_the_cubes_of_the_sides_that_are_decomposed():
    leaf = factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5), bias="b")
    assert eigen_cost(kronecker_sums(leaf)) == 5**3 + 5**3
    assert eigen_cost(kronecker_sums(leaf, max_dim=4)) == 0


@pytest.mark.parametrize("cut", ["inputs", "outputs"])
def test_products_of_shards_add_up(cut, rng):
    a = torch.randn(3, 4, 6, generator=rng, dtype=torch.float64)
    g = torch.randn(3, 4, 8, generator=rng, dtype=torch.float64)
    whole = GradTree({"w": factorized("w", a, g, bias="b")})
    shards = [(a[..., :2], g), (a[..., 2:], g)] if cut == "inputs" else [(a, g[..., :3]), (a, g[..., 3:])]
    total = torch.zeros(3, 3, dtype=torch.float64)
    for rank, (x, y) in enumerate(shards):
        leaf = counted_once(factorized("w", x, y, bias="b"), cut, rank)
        assert leaf is not None
        total += gram_of(GradTree({"w": leaf}), GradTree({"w": leaf}))
    torch.testing.assert_close(total, gram_of(whole, whole), rtol=1e-12, atol=0.0)


def test_a_layer_without_inputs_cannot_be_cut_there():
    from attrax.core import diagonal

    with pytest.raises(ValueError, match="Diagonal leaf has no inputs"):
        counted_once(diagonal("n", torch.ones(1, 1, 1), torch.ones(1, 1, 2)), "inputs", 1)
