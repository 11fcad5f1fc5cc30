"""SparseAdam: directions, recorded runs and selection against literal steps with the gradient of the rows looked up."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import (
    Block,
    Directions,
    GradTree,
    Materialized,
    Projection,
    Step,
    project,
    projected,
    step,
    stored,
    targeted,
    transformed,
)
from attrax.core.directions import directed, touched
from attrax.frontends import (
    StepEvent,
    capture,
    open_store,
    open_trajectory,
    record,
    restore,
    select,
    store,
)
from attrax.frontends.runs.optimizers import read_optimizer

from .models import seeded
from .oracle import assert_gradients, block_gradients

pytestmark = pytest.mark.usefixtures("unchecked")
V, PAD, STEPS = 9, 2, 5
Batch = dict[str, Tensor]


class Words(nn.Module):
    """Two calls of one sparse embedding; position 3 of the first counts for nothing: its rows have zero gradients."""

    def __init__(self, twice: bool = True, bag: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(V, 4, padding_idx=PAD, sparse=True)
        self.bag = nn.EmbeddingBag(V, 4, padding_idx=PAD, sparse=True, mode="mean") if bag else None
        self.out = nn.Linear(4, 3)
        self.twice = twice

    def forward(self, x: Tensor, second: Tensor) -> Tensor:
        h = (self.emb(x) * torch.tensor([1.0, 1.0, 1.0, 0.0]).unsqueeze(1).to(self.out.weight)).mean(1)
        h = h + self.emb(second).sum(1) if self.twice else h
        h = h + self.bag(second) if self.bag is not None else h
        return self.out(torch.tanh(h))


def words(count: int, rows: int = 4, seed: int = 1) -> list[Batch]:
    """Of every second batch, the last two rows of the vocabulary are in position 3 at most."""
    gen = torch.Generator().manual_seed(seed)

    def batch(some: int) -> Batch:
        ids = torch.randint(some, (rows, 6), generator=gen)
        quiet = torch.randint(V, (rows, 1), generator=gen)
        y = torch.randint(3, (rows,), generator=gen)
        return {"x": torch.cat([ids[:, :3], quiet], 1), "second": ids[:, 4:], "y": y}

    return [batch(V - 2 * (k % 2)) for k in range(count)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["second"]), batch["y"])


def only(batch: Batch, rows: Any) -> Batch:
    return {k: v[rows] for k, v in batch.items()}


def make(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """SparseAdam of the embeddings beside AdamW of everything else."""
    sparse = [p for n, p in model.named_parameters() if "out" not in n]
    dense = [p for n, p in model.named_parameters() if "out" in n]
    return [
        torch.optim.SparseAdam(sparse, lr=0.05, **({"betas": (0.8, 0.95)} | options)),
        torch.optim.AdamW(dense, lr=0.05, weight_decay=0.1),
    ]


def loop(model: nn.Module, batches: list[Batch], accumulate: int = 1, **options: Any) -> list[Any]:
    moving = make(model, **options)
    for k, batch in enumerate(batches, 1):
        (loss_of(model, batch) / accumulate).backward()
        if k % accumulate == 0:
            for optimizer in moving:
                optimizer.step()
            model.zero_grad()
    return moving


def own_gradient(model: nn.Module, batch: Batch, i: int, share: int) -> dict[str, Tensor]:
    """Gradient of one example's backward alone, sparse where torch makes it so."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    (loss_of(copied, only(batch, [i])) / share).backward()
    return {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}


def literal(model: nn.Module, moving: torch.optim.Optimizer, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a step moves by that consumes these gradients, on copies, decay and rate factored out."""
    rules, _ = read_optimizer(moving, model)
    copied, again = copy.deepcopy((model, moving))
    before = {n: p.detach().clone() for n, p in copied.named_parameters()}
    named = dict(copied.named_parameters())
    for n, p in named.items():
        p.grad = grads.get(n)
    again.step()
    return {n: ((1 - r.lr * r.decay) * before[n] - named[n].detach()) / r.lr for n, r in rules.items()}


class Oracle:
    """Called before each optimizer's step: directions of the examples of the step's batches, one at a time."""

    def __init__(self, batches: list[Batch], accumulate: int = 1, centered: bool = False) -> None:
        self.batches, self.accumulate, self.centered = batches, accumulate, centered
        self.found: list[dict[str, Tensor]] = [{} for _ in batches]
        self._grads: dict[int, list[dict[str, Tensor]]] = {}

    def __call__(self, event: StepEvent) -> None:
        first = event.step * self.accumulate
        with event.capture.paused():
            for k in range(first, first + self.accumulate):
                batch = self.batches[k]
                if k not in self._grads:  # of the first optimizer that steps: nothing has moved yet
                    rows = range(len(batch["y"]))
                    self._grads[k] = [own_gradient(event.model, batch, i, self.accumulate) for i in rows]
                moved = [self._direction(event, grads) for grads in self._grads[k]]
                self.found[k] |= {n: torch.stack([row[n] for row in moved]) for n in moved[0]}

    def _direction(self, event: StepEvent, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        D = literal(event.model, event.optimizer, grads)
        if not self.centered:
            return D
        origin = literal(event.model, event.optimizer, {n: 0 * g for n, g in grads.items()})
        return {n: x - origin[n] for n, x in D.items()}


def directions(model: nn.Module, batches: list[Batch], accumulate: int = 1, **how: Any) -> Any:
    """Blocks of directions and their oracle; training is as without them, bit for bit."""
    options = how.pop("options", {})
    blocks: list[Block] = []
    how = {"directions": Directions("sum")} | how
    alone, oracle = copy.deepcopy(model), Oracle(batches, accumulate, how["directions"].centered)
    loop(alone, batches, accumulate, **options)
    how = {"loss": "example_mean", "before_step": [oracle]} | how
    with capture(model, sinks=[blocks.append], **how):
        loop(model, batches, accumulate, **options)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    return blocks, oracle


CASES: dict[str, Any] = {
    "two calls": ({}, {}),
    "bag": ({"bag": True}, {}),
    "maximize": ({}, {"maximize": True}),
    "large eps": ({}, {"eps": 0.1}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_directions_are_literal_steps_with_an_examples_own_sparse_gradient(
    name: str, accumulate: int
) -> None:
    about, options = CASES[name]
    batches = words(6)
    blocks, oracle = directions(seeded(lambda: Words(**about)), batches, accumulate, options=options)
    assert len(blocks) == len(batches)
    for block, right in zip(blocks, oracle.found, strict=True):
        assert_gradients(block_gradients(block), right, 1e-10)


def test_twenty_steps_train_as_without() -> None:
    directions(seeded(Words), words(20), before_step=[])


def test_rows_that_are_touched_by_zeros_move_and_others_stay() -> None:
    """Position 3 has no gradient; the padding row is not looked up; of a row, repeated or not, one step."""
    batches = words(4)
    batches[-1]["x"] = torch.tensor([[0, 0, 1, 7], [3, PAD, 3, 8], [PAD] * 4, [4, 4, 4, 4]])
    blocks, _ = directions(seeded(lambda: Words(twice=False)), batches)
    moved = block_gradients(blocks[-1])["emb.weight"].abs().sum(-1) > 0
    found = [row.nonzero().flatten().tolist() for row in moved]
    assert found == [[0, 1, 7], [3, 8], [], [4]]


def test_centered_directions_are_without_that_of_zeros_in_the_same_rows() -> None:
    blocks, oracle = directions(seeded(Words), words(4), directions=Directions("sum", centered=True))
    for block, right in zip(blocks, oracle.found, strict=True):
        assert_gradients(block_gradients(block), right, 1e-10)


def test_a_projection_comes_after() -> None:
    spec = Projection(16)
    batches = words(4)
    small, _ = directions(seeded(Words), batches, transform=projected(spec))
    whole, _ = directions(seeded(Words), batches)
    for block, large in zip(small, whole, strict=True):
        expected = project(large.grads, spec)
        for name, leaf in block.grads.items():
            assert torch.allclose(leaf.w, expected[name].w, rtol=1e-12, atol=1e-12)


def test_rows_that_a_leaf_does_not_tell_are_refused() -> None:
    blocks: list[Block] = []
    model = seeded(Words)
    with capture(model, sinks=[blocks.append], loss="example_mean"):
        moving = loop(model, words(2))
    rules, states = read_optimizer(moving[0], model)
    leaf = blocks[0].grads["emb.weight"]
    built = Materialized(block_gradients(blocks[0])["emb.weight"], leaf.parts)
    with pytest.raises(ValueError, match=r"'emb.weight'.*rows that an example looks up.*Materialized"):
        directed(rules, states)("emb.weight", built)
    with pytest.raises(ValueError, match="sparse=True"):
        directed(rules, states)("emb.weight", replace(leaf, sparse=False))


class Tagger(nn.Module):
    """A label for every position, which no other position has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(V, 4, padding_idx=PAD, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.emb(x)))


@pytest.mark.parametrize(
    "owners", [torch.tensor([0, 1, 0]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, -1], [2, 2, 2, 2]])]
)
def test_examples_of_several_rows_or_of_parts_of_rows_touch_their_own_ids(owners: Tensor) -> None:
    """Row 0 of the vocabulary, which padding could be taken for, is looked up by nobody."""
    x = torch.tensor([[1, 3, PAD, 4], [5, 5, 6, 6], [7, 1, 8, 3]])
    blocks: list[Block] = []
    model = seeded(Tagger)
    how: dict[str, Any] = {"examples": lambda inputs, rows: owners, "loss": "sum"}
    with capture(model, sinks=[blocks.append], verify=False, **how):
        model(x).sum().backward()
    rows = touched(blocks[0].grads["emb.weight"])
    assert rows is not None
    each = owners if owners.ndim == 2 else owners[:, None].expand(x.shape)
    expected = [set(x[each == k].tolist()) - {PAD} for k in range(len(rows))]
    assert [set(row.nonzero().flatten().tolist()) for row in rows] == expected


# Recorded runs.


def recorded(folder: Path, batches: list[Batch], accumulate: int = 1) -> tuple[Any, nn.Module]:
    model = seeded(Words)
    with (
        store(folder, keep_factored=True) as sink,
        capture(model, sinks=[sink], loss="example_mean", trajectory=record(folder)),
    ):
        loop(model, batches, accumulate)
    return open_trajectory(folder), model


def replayed(now: Step, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    rows = now.touched.get(name)
    return step(now.optimizers[name], now.parameters[name], now.gradients[name], now.states[name], rows)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recorded_step_is_the_step_that_was_taken(accumulate: int, tmp_path: Path) -> None:
    found, model = recorded(tmp_path, words(8), accumulate)
    steps = [found.step(n) for n in found.steps]
    for now, after in zip(steps, [*steps[1:], None], strict=True):
        assert set(now.touched) == {"emb.weight"} and not now.touched["emb.weight"][PAD]
        for name in now.optimizers:
            theta, state = replayed(now, name)
            right = model.get_parameter(name).detach() if after is None else after.parameters[name]
            assert (theta - right).abs().max() <= 1e-12
            for key in ("exp_avg", "exp_avg_sq") if after is not None else ():
                assert (state[key] - after.states[name][key]).abs().max() <= 1e-12  # type: ignore[union-attr]


def test_a_step_without_its_rows_is_refused(tmp_path: Path) -> None:
    found, _ = recorded(tmp_path, words(2))
    with pytest.raises(ValueError, match="unknown which"):
        replayed(replace(found.step(1), touched={}), "emb.weight")


def test_stored_gradients_still_tell_the_rows_of_zeros(tmp_path: Path) -> None:
    """Directions from the store are those that were taken as training ran."""
    batches = words(4)
    live, _ = directions(seeded(Words), batches)
    found, _ = recorded(tmp_path, batches)
    for number, right in zip(found.steps, live, strict=True):
        now = found.step(number)
        moves = transformed(
            targeted(open_store(tmp_path).at(number), "sum"), directed(now.optimizers, now.states)
        )
        ((_, leaves),) = moves.map(lambda name, leaf, _: leaf)
        assert_gradients(stored(GradTree(leaves)), block_gradients(right), 1e-10)


def test_a_restored_step_goes_on_as_it_did(tmp_path: Path) -> None:
    batches = words(6)
    found, model = recorded(tmp_path, batches)
    again = seeded(Words)
    moving = make(again)
    for part, optimizer in zip(("emb", "out"), moving, strict=True):
        now = found.step(3)
        own = {n: rule for n, rule in now.optimizers.items() if part in n}
        restore(replace(now, optimizers=own), again, optimizer)
    for batch in batches[3:]:
        loss_of(again, batch).backward()
        for optimizer in moving:
            optimizer.step()
        again.zero_grad()
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-14


# Selection.


def keep_some(scores: Tensor, _: Callable[[], Tensor]) -> Tensor:
    return torch.arange(len(scores)) % 2 == 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("denominator", ["fixed", "examples"])
def test_selected_steps_touch_the_rows_of_kept_examples_alone(denominator: str, accumulate: int) -> None:
    """As a loop that trains on every second example only."""
    batches = words(8)
    model, right = seeded(Words), seeded(Words)
    half = [only(b, slice(0, None, 2)) for b in batches]
    share = 2 if denominator == "fixed" else 1
    moving = make(right)
    for k, batch in enumerate(half, 1):
        (loss_of(right, batch) / accumulate / share).backward()
        if k % accumulate == 0:
            for optimizer in moving:
                optimizer.step()
            right.zero_grad()
    keep = select(batches[0], keep_some, loss=per_example, denominator=denominator)  # type: ignore[arg-type]
    blocks: list[Block] = []
    with capture(model, sinks=[blocks.append], after_backward=[keep], loss="example_mean"):
        own = loop(model, batches, accumulate)
    for (name, p), q in zip(model.named_parameters(), right.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-9, name
    for mine, theirs in zip(own, moving, strict=True):
        for a, b in zip(mine.state.values(), theirs.state.values(), strict=True):
            assert (a["exp_avg"] - b["exp_avg"]).abs().max() <= 1e-12
            assert (a["exp_avg_sq"] - b["exp_avg_sq"]).abs().max() <= 1e-12


def per_example(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["second"]), batch["y"], reduction="none")
