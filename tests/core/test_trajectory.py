"""Trajectories as values."""

import torch

from attrax.core import Block, Examples, GradTree, Recorded, Step, Trajectory, materialized
from attrax.core.trajectory import used


def block(step: int, micro: int, value: float) -> Block:
    grads = GradTree({"b": materialized("b", torch.full((2, 3), value, dtype=torch.float64))})
    weight = torch.tensor([8.0, 4.0], dtype=torch.float64)
    return Block(grads, Examples((f"{step}.{micro}.0", f"{step}.{micro}.1"), step, micro, weight))


BLOCKS = [block(0, 0, 1.0), block(1, 0, 2.0), block(1, 1, 3.0), block(1, 2, 4.0)]


def test_steps_and_their_gradients() -> None:
    run = Recorded([Step(0, {}, {}), Step(1, {}, {})], BLOCKS)
    assert isinstance(run, Trajectory) and run.steps == (0, 1) and run.step(1).step == 1
    found = list(run.gradients(1).map(lambda name, leaf, examples: float(leaf.w.sum())))
    assert [examples.micro for examples, _ in found] == [0, 1, 2]
    assert [values["b"] for _, values in found] == [12.0, 18.0, 24.0]


def test_gradients_are_as_the_optimizer_used_them() -> None:
    """Gradients and their weights are scaled; what was thrown away is neither visited nor yielded."""
    visited: list[tuple[int, list[float]]] = []

    def visit(name: str, leaf: object, examples: Examples) -> float:
        assert examples.weight is not None
        visited.append((examples.micro, examples.weight.tolist()))
        return float(leaf.w.sum())  # type: ignore[attr-defined]

    run = Recorded([Step(1, {}, {}, share=0.25, unused=(1,))], BLOCKS)
    found = list(run.gradients(1).map(visit))
    assert visited == [(0, [2.0, 1.0]), (2, [2.0, 1.0])]
    assert [values for _, values in found] == [{"b": 3.0}, {"b": 6.0}]
    assert all(e.weight is not None and e.weight.tolist() == [2.0, 1.0] for e, _ in found)


def test_sources_stay_reiterable() -> None:
    run = Recorded([Step(1, {}, {}, share=0.5)], BLOCKS)
    source = run.gradients(1)
    assert source.reiterable and used(source, run.step(1)).reiterable
    assert len(list(source.map(lambda *_: None))) == len(list(source.map(lambda *_: None))) == 3
