"""Steps of a run in a store: attempts that do steps again, and micro-batches of one step as one block."""

import warnings
from typing import Any

import pytest
import torch

from attrax.core import (
    Block,
    Blocks,
    Examples,
    GradTree,
    concat,
    factorized,
    materialize_leaf,
    materialized,
)
from attrax.frontends.storage.store import open_store, store
from attrax.methods import graddot


def step(number, *ids, value=0.0, micro=0, mark="") -> Block:
    """One block of a step; its rows tell which attempt made them."""
    rows = torch.stack([torch.full((5,), float(i) + value) for i in ids])
    about: dict[str, Any] = {"step": number, "micro": micro, "fingerprint": mark or f"{number} {value}"}
    return Block(
        GradTree({"w": materialized("w", rows)}), Examples(tuple(map(str, ids)), learning_rate=0.1, **about)
    )


def write(path, *blocks, **options: Any) -> Any:
    with store(path, **options) as sink:
        for block in blocks:
            sink(block)
    return open_store(path)


def found(source):
    """(step, id, value) of every row."""
    return [
        (examples.step, i, row[0].item() - float(i))
        for examples, leaves in source.map(lambda name, leaf, _: leaf.w)
        for i, row in zip(examples.ids, leaves["w"], strict=True)
    ]


def test_a_new_opening_is_a_new_run(tmp_path):
    first = write(tmp_path, step(0, 1))
    second = write(tmp_path, step(0, 2))
    assert len(second.runs) == 2 and first.runs == second.runs[:1]
    assert open_store(tmp_path, run=second.runs[1]).ids == ("2",)


def test_steps_done_again_after_a_checkpoint_supersede_those_before(tmp_path):
    """Five steps, then again from the third on with other examples: capture counts from 0 both times."""
    write(tmp_path, *(step(n, 10 + n) for n in range(5)), run="job")
    again = write(tmp_path, *(step(n, 20 + n, value=0.5) for n in range(3)), run="job", steps_done=2)
    expected = [(0, "10", 0.0), (1, "11", 0.0), (2, "20", 0.5), (3, "21", 0.5), (4, "22", 0.5)]
    assert found(again) == expected
    assert again.duplicates == 3 and again.missing(["12"]) == ("12",)


def test_the_last_attempt_counts_however_many_there_were(tmp_path):
    write(tmp_path, *(step(n, n) for n in range(6)), run="job", shard_examples=1)
    write(tmp_path, *(step(n, n + 4, value=0.25) for n in range(2)), run="job", steps_done=4)
    last = write(tmp_path, *(step(n, n + 2, value=0.5) for n in range(2)), run="job", steps_done=2)
    assert found(last) == [(0, "0", 0.0), (1, "1", 0.0), (2, "2", 0.5), (3, "3", 0.5)]


def test_ranks_resume_each_for_itself(tmp_path):
    for rank in range(2):
        write(tmp_path, *(step(n, 2 * n + rank) for n in range(3)), run="job", rank=rank)
    for rank in range(2):
        both = write(tmp_path, step(0, 4 + rank, value=0.5), run="job", rank=rank, steps_done=2)
    expected = [(0, "0", 0.0), (0, "1", 0.0), (1, "2", 0.0), (1, "3", 0.0), (2, "4", 0.5), (2, "5", 0.5)]
    assert found(both) == expected
    assert [e.ids for e, _ in both.map(lambda *_: None)] == [("0", "1"), ("2", "3"), ("4", "5")]


def test_another_run_is_not_superseded(tmp_path):
    write(tmp_path, *(step(n, n) for n in range(3)), run="one")
    write(tmp_path, *(step(n, 10 + n) for n in range(3)), run="two")
    both = write(tmp_path, step(0, 11, value=0.5), run="two", steps_done=1)
    assert found(open_store(tmp_path, run="one")) == [(n, str(n), 0.0) for n in range(3)]
    assert found(open_store(tmp_path, run="two")) == [(0, "10", 0.0), (1, "11", 0.5)]
    assert both.duplicates == 2


def test_of_two_attempts_without_a_checkpoint_the_later_row_of_an_example_stays(tmp_path):
    write(tmp_path, step(0, 1, 2, 3, mark="p"), run="job")
    again = write(tmp_path, step(0, 3, 4, value=0.5, mark="q"), run="job")
    assert sorted(found(again)) == [(0, "1", 0.0), (0, "2", 0.0), (0, "3", 0.5), (0, "4", 0.5)]


def test_steps_that_a_kill_lost_are_named_on_resuming(tmp_path):
    write(tmp_path, *(step(n, n) for n in range(3)), run="job")
    with pytest.warns(UserWarning, match=r"stored up to step 2: steps 3 to 4 were lost.*flush\(\)"):
        store(tmp_path, run="job", steps_done=5).close()
    write(tmp_path, step(0, 1, value=0.5), run="job", steps_done=1)
    with pytest.warns(UserWarning, match="stored up to step 1: steps 2 to 2 were lost"):
        store(tmp_path, run="job", steps_done=3).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store(tmp_path, run="job", steps_done=2).close()


def test_steps_done_needs_a_run(tmp_path):
    for options in ({"steps_done": 3}, {"steps_done": -1, "run": "r"}, {"buffer_bytes": -1}):
        with pytest.raises(ValueError, match="must be named"):
            store(tmp_path, **options)  # type: ignore[arg-type]


def windows(rng, lengths=((1, 1), (6, 5), (2,))) -> list[Block]:
    """Two steps of three micro-batches whose rows, and so whose stored forms, differ in number."""
    blocks, first = [], 0
    for number in range(2):
        for micro, rows in enumerate(lengths):
            size, T = len(rows), max(rows)
            a, g = (torch.randn(size, T, 4, generator=rng, dtype=torch.float64) for _ in "ag")
            for x, n in zip(g, rows, strict=True):
                x[n:] = 0
            weight = torch.rand(size, generator=rng, dtype=torch.float64) + 0.5
            ids = tuple(f"e{first + n}" for n in range(size))
            about = Examples(ids, number, micro, weight, torch.tensor(rows), f"at {number}", 0.1)
            blocks.append(Block(GradTree({"w": factorized("w", a, g)}), about))
            first += size
    return blocks


def test_micro_batches_of_a_step_are_one_block(tmp_path, rng):
    blocks = windows(rng)
    write(tmp_path, *blocks, shard_examples=3)
    source = open_store(tmp_path, block_examples="step")
    assert {form.kind for form in source.leaves["w"]} == {"Factorized", "Materialized"}
    read = [(examples, leaves["w"]) for examples, leaves in source.map(lambda name, leaf, _: leaf)]
    assert [(e.step, len(e)) for e, _ in read] == [(0, 5), (1, 5)]
    for (examples, leaf), written in zip(read, (blocks[:3], blocks[3:]), strict=True):
        assert examples.ids == tuple(i for b in written for i in b.examples.ids)
        for name in ("weight", "tokens"):
            whole = torch.cat([getattr(b.examples, name) for b in written])
            assert torch.equal(getattr(examples, name), whole)
        dense = torch.cat([materialize_leaf(b.grads["w"]).w for b in written])
        assert torch.allclose(materialize_leaf(leaf).w, dense, rtol=1e-12, atol=1e-14)
    query = Blocks([Block(GradTree({"w": concat([blocks[3].grads["w"]])}), blocks[3].examples)])
    scores, expected = graddot(source.at(1), query), graddot(Blocks(blocks[3:]), query)
    assert torch.allclose(scores.values, expected.values, rtol=1e-10)


def test_a_step_of_several_ranks_is_one_block(tmp_path):
    for rank, micros in ((0, 2), (1, 3)):
        blocks = [step(n, 100 * n + 10 * m + rank, micro=m) for n in range(4) for m in range(micros)]
        write(tmp_path, *blocks, run="job", rank=rank)
    read = [(e.step, e.ids) for e, _ in open_store(tmp_path, block_examples="step").map(lambda *_: None)]
    assert [number for number, _ in read] == [0, 1, 2, 3]
    assert read[1] == (1, ("100", "101", "110", "111", "121"))


def test_steps_of_two_runs_stay_apart(tmp_path):
    for run in ("one", "two"):
        write(tmp_path, step(0, len(run), mark="same", micro=0), run=run)
    write(tmp_path, step(0, 9, mark="same"), run="three")
    source = open_store(tmp_path, block_examples="step")
    assert [e.ids for e, _ in source.map(lambda *_: None)] == [("3",), ("9",)]


def test_blocks_of_a_step_that_cannot_be_one_say_why(tmp_path):
    other = Block(GradTree({"v": materialized("v", torch.ones(1, 2))}), step(0, 5).examples)
    for name, second, problem in (
        ("marks", step(0, 2, micro=1, mark="else"), "fingerprints"),
        ("leaves", other, r"leaves, e\.g\. \['v', 'w'\]"),
    ):
        write(tmp_path / name, step(0, 1), second)
        with pytest.raises(ValueError, match=f"blocks of step 0 .*{problem}.*block_examples=None"):
            found(open_store(tmp_path / name, block_examples="step"))
