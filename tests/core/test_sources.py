"""Sources, transforms and reducers: what they compute, and what they refuse to mix."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from attrax.core import (
    Blocks,
    Examples,
    GradTree,
    Materialized,
    Projection,
    Source,
    Target,
    chain,
    collect,
    fold,
    gram,
    join,
    kronecker_sums,
    materialize,
    merge,
    projected,
    row_sums,
    scale_examples,
    selected,
    sq_norms_leaf,
    take,
    targeted,
    transformed,
)
from attrax.core.source import Resampling, one_fingerprint, resampled

from .dense import assert_same, gradient, vectors
from .toys import FACTORED, KINDS, LINEAR, SMALL, Sizes, block, cut, law, named, refused, source

cuts = st.sampled_from([(3,), (1, 2), (2, 1), (1, 1, 1), (0, 3), (1, 0, 2, 0)])
THREE = replace(SMALL, B=3)


def test_blocks_are_visited_in_order_leaf_by_leaf():
    x, _ = SMALL.trees()
    seen: list[tuple[str, tuple[str, ...]]] = []
    found = list(source(*cut(x, 2, 1)).map(lambda name, leaf, examples: seen.append((name, examples.ids))))
    assert seen == [(name, ids) for ids in (("x0", "x1"), ("x2",)) for name in KINDS]
    assert [examples.ids for examples, _ in found] == [("x0", "x1"), ("x2",)]


def test_a_generator_can_be_read_once():
    x, _ = SMALL.trees()
    assert source(x).reiterable
    once = Blocks(iter(source(x).blocks))
    assert isinstance(once, Source) and not once.reiterable
    assert not transformed(once, selected(lambda n, _: True)).reiterable
    assert transformed(source(x), selected(lambda n, _: True)).reiterable


@law(15, lengths=cuts, seed=st.integers(0, 99))
def test_folding_does_not_depend_on_the_blocks(lengths, seed):
    x, _ = replace(THREE, seed=seed).trees(LINEAR)

    def add(state, leaf):
        new = kronecker_sums(leaf)
        return new if state is None else merge(state, new)

    states, fingerprint, count = fold(add, source(*cut(x, *lengths)))
    assert (fingerprint, count) == ("p0", 3)
    for name, leaf in x.items():
        assert_same(states[name].a, kronecker_sums(leaf).a)


@law(15, lengths=cuts, seed=st.integers(0, 99))
def test_row_sums_add_leaves_and_keep_rows(lengths, seed):
    x, _ = replace(THREE, seed=seed).trees()
    found = list(row_sums(lambda name, leaf, _: sq_norms_leaf(leaf), source(*cut(x, *lengths))))
    assert [len(examples) for examples, _ in found] == list(lengths)
    assert_same(torch.cat([v for _, v in found if v is not None]), vectors(x).square().sum(1))


def test_measures_may_leave_leaves_out():
    x, _ = SMALL.trees()
    only = [
        v for _, v in row_sums(lambda n, leaf, _: sq_norms_leaf(leaf) if n == "norm" else None, source(x))
    ]
    assert only[0] is not None
    assert_same(only[0], gradient(x["norm"]).square().sum((1, 2)))
    assert [v for _, v in row_sums(lambda *_: None, source(x))] == [None]


@law(15, lengths=cuts, seed=st.integers(0, 99))
def test_collecting_gathers_all_examples(lengths, seed):
    x, y = replace(THREE, seed=seed).trees()
    whole = collect(source(*cut(x, *lengths)))
    assert whole.examples.ids == named(3) and list(whole.grads) == list(x)
    assert_same(vectors(whole.grads), vectors(x))
    assert_same(gram(whole.grads, y), gram(x, y))


def test_blocks_of_different_lengths_are_collected():
    short, long = (Sizes(2, 1, T, 1, 3, 4, seed=T).trees()[0] for T in (2, 5))
    both = collect(source(short, long))
    assert_same(vectors(both.grads), torch.cat([vectors(short), vectors(long)]))


def test_blocks_compacted_to_different_forms_are_collected():
    """A projection keeps few rows factored and builds many: queries of different lengths still join."""
    leaves = [Sizes(2, 1, T, 1, 30, 30, seed=T).one(FACTORED["linear"]) for T in (1, 40)]
    run = projected(Projection(8))
    blocks = collect(transformed(source(*[GradTree({"w": leaf}) for leaf in leaves]), run))
    assert len({type(run("w", leaf)) for leaf in leaves}) == 2
    assert isinstance(blocks.grads["w"], Materialized)
    assert_same(gradient(blocks.grads["w"]), torch.cat([gradient(run("w", leaf)) for leaf in leaves]))


def test_transforms_apply_to_every_leaf_and_drop_some():
    x, _ = SMALL.trees()
    keep = selected(lambda name, leaf: not isinstance(leaf, Materialized))
    seen = collect(transformed(source(x), keep)).grads
    assert list(seen) == [name for name, leaf in x.items() if not isinstance(leaf, Materialized)]
    halved = collect(source(x), lambda name, leaf: scale_examples(leaf, torch.full((3,), 0.5))).grads
    assert_same(vectors(halved), vectors(x) / 2)


def test_chained_transforms_apply_first_to_last_and_stop_at_a_drop():
    x = SMALL.one(KINDS["linear"])
    order: list[str] = []

    def note(word, result=True):
        return lambda name, leaf: order.append(word) or (leaf if result else None)

    assert chain(note("a"), note("b"))("w", x) is x
    assert chain(note("c", False), note("d"))("w", x) is None
    assert order == ["a", "b", "c"]
    assert chain()("w", x) is x


def test_targets_are_applied_block_by_block():
    """Blocks weigh examples differently: after targeting they are comparable."""
    x, _ = SMALL.trees()
    c, n = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([4, 2, 1])
    captured = x.map(lambda _, leaf: scale_examples(leaf, c))
    blocks = [
        block(grads, ids, weight=c[s], tokens=n[s])
        for grads, ids, s in zip(
            cut(captured, 2, 1), (("a", "b"), ("c",)), (slice(0, 2), slice(2, 3)), strict=True
        )
    ]
    expected: dict[Target, Any] = {
        "sum": vectors(x),
        "mean": vectors(x) / n[:, None],
        "as_trained": vectors(captured),
    }
    for target, values in expected.items():
        assert_same(vectors(collect(targeted(Blocks(blocks), target)).grads), values)


@pytest.mark.parametrize("reduce", ["fold", "collect"])
def test_an_empty_source_is_refused(reduce):
    x, _ = SMALL.trees()
    for empty in (Blocks([]), source(*cut(x, 0, 0))):
        with refused("scan: the source yielded no examples"):
            if reduce == "fold":
                fold(lambda state, leaf: 0, empty, operation="scan")
            else:
                collect(empty, operation="scan")


@pytest.mark.parametrize("reduce", ["fold", "collect"])
def test_moving_parameters_are_refused(reduce):
    x, _ = SMALL.trees()
    moved = Blocks([block(x, named(3)), block(x, named(3), fingerprint="p1", step=7)])
    with refused("scan: ", "'p0'", "'p1' at step 7", "fixed parameters", "tracin"):
        if reduce == "fold":
            fold(lambda state, leaf: 0, moved, operation="scan")
        else:
            collect(moved, operation="scan")


def test_fingerprints_are_compared_with_the_first():
    about = Examples(("a",), fingerprint="p")
    assert one_fingerprint(None, about, "scan") == one_fingerprint("p", about, "scan") == "p"
    with refused("scan: ", "'q'", "'p' at step 0"):
        one_fingerprint("q", about, "scan")


def test_a_leaf_that_a_block_lacks_is_zero_there():
    x, _ = SMALL.trees()
    fewer = GradTree({name: leaf for name, leaf in x.items() if name != "norm"})
    whole = join([block(fewer, named(3)), block(x, named(3))])
    found = materialize(whole.grads)["norm"].w  # type: ignore[union-attr]
    assert not found[:3].any() and found[3:].any() and torch.equal(found[3:], materialize(x)["norm"].w)  # type: ignore


class Labeled(Blocks):
    """A source that can draw labels: here every seed scales the gradients by itself."""

    def resample(self, seed: int) -> Source:
        return transformed(self, lambda _, leaf: scale_examples(leaf, torch.full((3,), float(seed))))


def test_labels_are_sampled_by_sources_that_can():
    x, _ = SMALL.trees()
    live = Labeled(source(x).blocks)
    assert isinstance(live, Resampling) and not isinstance(source(x), Resampling)
    assert_same(vectors(collect(resampled(live, 3, "fit")).grads), 3 * vectors(x))
    with refused("fit: fisher='sampled'", "which Blocks does not hold", "fisher='empirical'"):
        resampled(source(x), 3, "fit")


def test_visits_see_the_block_they_belong_to():
    x, _ = SMALL.trees()
    blocks = Blocks([block(grads, named(1), step=step) for step, grads in enumerate(cut(x, 1, 1, 1))])
    steps = [values["norm"] for _, values in blocks.map(lambda name, leaf, examples: examples.step)]
    assert steps == [0, 1, 2]


def test_maps_are_lazy():
    x, _ = SMALL.trees()
    made: list[int] = []

    def blocks() -> Iterator[Any]:
        for step in range(3):
            made.append(step)
            yield block(x, named(3), step=step)

    walk = Blocks(blocks()).map(lambda *_: None)
    next(walk)
    assert made == [0]
    assert take(x["norm"], slice(0, 1)) is not x["norm"]
