"""Steps and learning rates of every kind of loop, and TracIn from what was recorded against the formula."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from attrax.core import Block, fingerprint
from attrax.frontends import capture, classification, open_store, probe, record, store
from attrax.frontends.loop.capture import StepEvent
from attrax.methods import tracin

from .loops import lm_loss, own_loss, sum_ce
from .models import MLP, LossLM, classes, documents, seeded
from .oracle import flat, one_by_one

pytestmark = pytest.mark.usefixtures("unchecked")
Steps = list[tuple[int, int, float | None]]
Loop = Callable[[nn.Module, list[Any]], object]


def halving(optimizer: Optimizer) -> Any:
    """A scheduler: the rate differs at every step, so that a rate taken a step too late shows."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def plain(model: nn.Module, batches: list[Any]) -> None:
    moving = SGD(model.parameters(), lr=0.4)
    schedule = halving(moving)
    for batch in batches:
        moving.zero_grad()
        sum_ce(model, batch).backward()
        moving.step()
        schedule.step()


def in_closure(model: nn.Module, batches: list[Any]) -> None:
    """How Lightning runs a step: forward and backward inside ``optimizer.step``."""
    moving = SGD(model.parameters(), lr=0.4)
    schedule = halving(moving)

    def closure(batch: Any) -> Tensor:
        moving.zero_grad()
        loss = sum_ce(model, batch)
        loss.backward()
        return loss

    for batch in batches:
        moving.step(lambda batch=batch: closure(batch).item())
        schedule.step()


def by_hand(model: nn.Module, batches: list[Any], *, data: bool = False) -> None:
    for batch in batches:
        model.zero_grad()
        sum_ce(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                (p.data if data else p).sub_(0.1 * p.grad)


def two_optimizers(model: Any, batches: list[Any], *, second: float = 0.4) -> None:
    rest = [*model.first.parameters(), *model.second.parameters()]
    moving = [SGD(rest, lr=0.4), SGD(model.last.parameters(), lr=second)]
    for batch in batches:
        model.zero_grad()
        sum_ce(model, batch).backward()
        for optimizer in moving:
            optimizer.step()


def two_groups(model: Any, batches: list[Any]) -> None:
    rest = [*model.second.parameters(), *model.last.parameters()]
    moving = SGD([{"params": model.first.parameters()}, {"params": rest, "lr": 0.1}], lr=0.4)
    for batch in batches:
        moving.zero_grad()
        sum_ce(model, batch).backward()
        moving.step()


def some_parameters(model: Any, batches: list[Any]) -> None:
    """Only the last layer is trained, the others still have gradients."""
    moving = SGD(model.last.parameters(), lr=0.4)
    for batch in batches:
        model.zero_grad()
        sum_ce(model, batch).backward()
        moving.step()


def thrown_away(model: nn.Module, batches: list[Any]) -> None:
    """The second backward of every step only; the first one's gradients are zeroed in one of two ways."""
    moving = SGD(model.parameters(), lr=0.4)
    for k, batch in enumerate(batches):
        sum_ce(model, batch).backward()
        moving.zero_grad(set_to_none=k % 2 == 0)
        sum_ce(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        moving.step()
        moving.zero_grad()


def without_steps(model: nn.Module, batches: list[Any]) -> None:
    """Gradients are only collected."""
    for batch in batches:
        sum_ce(model, batch).backward()
        model.zero_grad()


LOOPS: dict[str, tuple[Loop, Steps]] = {
    "plain": (plain, [(0, 0, 0.4), (1, 0, 0.2), (2, 0, 0.1)]),
    "in_closure": (in_closure, [(0, 0, 0.4), (1, 0, 0.2), (2, 0, 0.1)]),
    "by_hand": (by_hand, [(0, 0, None), (1, 0, None), (2, 0, None)]),
    "by_hand_through_data": (
        lambda m, b: by_hand(m, b, data=True),
        [(0, 0, None), (1, 0, None), (2, 0, None)],
    ),
    "two_optimizers": (two_optimizers, [(0, 0, 0.4), (1, 0, 0.4), (2, 0, 0.4)]),
    "two_rates": (lambda m, b: two_optimizers(m, b, second=0.1), [(k, 0, None) for k in range(3)]),
    "two_groups": (two_groups, [(k, 0, None) for k in range(3)]),
    "some_parameters": (some_parameters, [(k, 0, None) for k in range(3)]),
    "thrown_away": (thrown_away, [(k, m, 0.4 * m) for k in range(3) for m in (0, 1)]),
    "without_steps": (without_steps, [(0, k, None) for k in range(3)]),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_steps_and_rates(kind, rng):
    loop, expected = LOOPS[kind]
    model, batches, blocks = seeded(MLP), [classes(rng) for _ in range(3)], []
    alone = copy.deepcopy(model)
    loop(alone, batches)
    with capture(model, sinks=[blocks.append], loss="sum"):
        loop(model, batches)
    found = [(b.examples.step, b.examples.micro, b.examples.learning_rate) for b in blocks]
    assert found == expected
    marks = {b.examples.step: b.examples.fingerprint for b in blocks}
    assert len(set(marks.values())) == len(marks)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_block_is_there_as_soon_as_its_step_is_taken(rng):
    model, blocks = seeded(MLP), []
    moving = SGD(model.parameters(), lr=0.1)
    with capture(model, sinks=[blocks.append], loss="sum"):
        sum_ce(model, classes(rng)).backward()
        assert blocks == []
        moving.step()
        assert len(blocks) == 1


@pytest.mark.parametrize("verify", [True, False])
def test_optimizers_inside_the_backward(rng, verify):
    """One optimizer a parameter, run by the parameter's own hook while the backward goes on."""
    model, blocks = seeded(MLP), []

    def attach(p: nn.Parameter) -> None:
        moving = SGD([p], lr=0.1)

        def step(p: Tensor) -> None:
            moving.step()
            moving.zero_grad()

        p.register_post_accumulate_grad_hook(step)

    for p in model.parameters():
        attach(p)
    with capture(model, sinks=[blocks.append], loss="sum", verify=verify):
        for _ in range(3):
            sum_ce(model, classes(rng)).backward()
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [(k, 0.1) for k in range(3)]
    assert len({b.examples.fingerprint for b in blocks}) == 3


def test_a_line_search_moves_parameters_within_a_step(rng):
    """LBFGS evaluates its closure at several points: one step, as many fingerprints."""
    model, batch, blocks = seeded(MLP), classes(rng), []
    moving = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        moving.zero_grad()
        loss = sum_ce(model, batch)
        loss.backward()
        return loss

    with capture(model, sinks=[blocks.append], loss="sum"):
        moving.step(closure)
    assert {b.examples.step for b in blocks} == {0} and len(blocks) > 1
    assert len({b.examples.fingerprint for b in blocks}) == len(blocks)


def test_an_adversarial_pair_shares_two_models(rng):
    """A generator and a discriminator in one capture: each step holds those that its optimizer moves."""
    parts = seeded(lambda: nn.ModuleDict({"gen": nn.Linear(4, 4), "dis": nn.Linear(4, 1)}))
    x, blocks = classes(rng)["x"], []
    gen, dis = SGD(parts["gen"].parameters(), lr=0.2), SGD(parts["dis"].parameters(), lr=0.3)
    with capture(parts, sinks=[blocks.append], loss="sum"):
        for _ in range(2):
            dis.zero_grad()
            (parts["dis"](x) - parts["dis"](parts["gen"](x).detach())).sum().backward()
            dis.step()
            parts["dis"].requires_grad_(False)
            gen.zero_grad()
            parts["dis"](parts["gen"](x)).sum().backward()
            gen.step()
            parts["dis"].requires_grad_(True)
    captured = [(b.examples.step, tuple(b.grads)) for b in blocks]
    real_and_fake = [(0, ("dis.weight",)), (0, ("dis.weight",)), (1, ("gen.weight",))]
    assert captured == real_and_fake + [(step + 2, names) for step, names in real_and_fake]


def test_callbacks_see_the_state_before_the_step(rng):
    model, batches, events = seeded(MLP), [classes(rng), classes(rng)], []

    def look(event: StepEvent) -> None:
        marks = {b.examples.fingerprint for b in event.blocks}
        assert marks == {fingerprint(dict(event.model.named_parameters()))}
        assert {b.examples.learning_rate for b in event.blocks} == {event.learning_rate}
        events.append((event.step, len(event.blocks), event.learning_rate, type(event.optimizer)))

    with capture(model, before_step=[look], loss="sum"):
        plain(model, batches)
    assert events == [(0, 1, 0.4, SGD), (1, 1, 0.2, SGD)]


def test_a_callback_may_change_the_gradients(rng):
    """Online selection: the step uses what the callback leaves in `.grad`."""
    model, batch = seeded(MLP), classes(rng)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def drop(event: StepEvent) -> None:
        event.model.zero_grad()

    with capture(model, before_step=[drop], loss="sum"):
        plain(model, [batch])
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_sinks_are_closed_and_see_every_block_once(rng, tmp_path):
    model, batches, blocks = seeded(MLP), [classes(rng) for _ in range(3)], []

    def interrupted() -> None:
        plain(model, batches[:2])
        sum_ce(model, batches[2]).backward()
        raise KeyError("stop")

    with pytest.raises(KeyError), capture(model, sinks=[store(tmp_path / "cut"), blocks.append], loss="sum"):
        interrupted()
    assert [b.examples.learning_rate for b in blocks] == [0.4, 0.2, None]
    assert open_store(tmp_path / "cut").steps() == (0, 1, 2)


@pytest.mark.parametrize("calls", [False, True], ids=["close", "call"])
def test_sinks_are_closed_whatever_another_one_raises(calls, rng, tmp_path):
    class Broken:
        def __call__(self, block: Block) -> None:
            if calls:
                raise OSError("no space")

        def close(self) -> None:
            raise OSError("no space")

    model, sink = seeded(MLP), store(tmp_path)
    with pytest.raises(OSError, match="no space"), capture(model, sinks=[sink, Broken()], loss="sum"):
        plain(model, [classes(rng)])
    assert open_store(tmp_path).steps() == (0,)
    with pytest.raises(OSError), capture(model, sinks=[Broken(), store(tmp_path / "after")], loss="sum"):
        plain(model, [classes(rng)])
    assert not list((tmp_path / "after").glob("*.lock"))


def test_blocks_that_did_not_wait_for_the_first_step_are_told_of(rng):
    model, blocks = seeded(MLP), []
    moving = SGD(model.parameters(), lr=0.4)
    with capture(model, sinks=[blocks.append], loss="sum"):
        for _ in range(66):
            sum_ce(model, classes(rng, 1)).backward()
        with pytest.warns(RuntimeWarning, match="65 blocks went to the sinks before any optimizer"):
            moving.step()
    assert [b.examples.learning_rate for b in blocks] == [None] * 65 + [0.4]


def sharpness_aware(model: nn.Module, batches: list[Any], ascent: Any) -> None:
    """SAM by hand: gradients of the step are those at parameters that an ascent has moved for a moment."""
    moving = SGD(model.parameters(), lr=0.4)
    for batch in batches:
        with ascent():
            sum_ce(model, batch).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.add_(p.grad, alpha=0.05)
        moving.zero_grad()
        sum_ce(model, batch).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        moving.step()
        moving.zero_grad()


def test_an_ascent_by_hand(rng):
    """What it is counted as is told; paused, it is no step."""
    model, batches, blocks = seeded(MLP), [classes(rng) for _ in range(3)], []
    with (
        capture(model, sinks=[blocks.append], loss="sum"),
        pytest.warns(RuntimeWarning, match=r"counted as 1 steps.*SAM.*paused"),
    ):
        sharpness_aware(model, batches, nullcontext)
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks[:2]] == [(0, None), (1, 0.4)]
    blocks.clear()
    with capture(model, sinks=[blocks.append], loss="sum") as running:
        sharpness_aware(model, batches, running.paused)
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [(k, 0.4) for k in range(3)]


@pytest.mark.parametrize("decay", [0.9, 0.0])
def test_gradients_that_stay_over_a_step(decay, rng):
    """Momentum by hand: a step moves by more than its blocks, and its clipping is unknown; unless nothing stayed."""
    model, batches, steps = seeded(MLP), [classes(rng) for _ in range(3)], []
    moving = SGD(model.parameters(), lr=0.4)
    with (
        capture(model, loss="sum", trajectory=record(steps.append)),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for batch in batches:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(decay)
            sum_ce(model, batch).backward()
            moving.step()
    texts = [str(w.message) for w in told if w.category is RuntimeWarning]
    if decay:
        assert len(texts) == 1 and "step 1 uses gradients that were in .grad before" in texts[0]
        assert [step.clip is None for step in steps] == [False, True, True]
    else:
        assert not texts and [step.clip.coefficient for step in steps] == pytest.approx([1.0] * 3)


def test_tracin_from_stores_equals_the_formula(rng, tmp_path):
    """sum over steps of rate x c_i x <G_i, V_q>, all at the parameters of the step, computed densely on the side."""
    model = seeded(lambda: LossLM(layers=1, tied=True)).train()
    batches = [documents(rng, lengths) for lengths in ([5, 3], [4, 6], [2, 7])]
    queries = documents(rng, [4, 3])
    moving = SGD(model.parameters(), lr=0.4)
    schedule = halving(moving)
    right: dict[str, Tensor] = {}
    blocks: list[Block] = []
    sides = {side: store(tmp_path / side, keep_factored=True) for side in ("train", "query")}
    recall = probe([queries], sides["query"], lm_loss)
    with sides["query"], capture(model, sinks=[sides["train"], blocks.append], before_step=[recall]):
        for k, batch in enumerate(batches + batches[:1]):
            g, v = flat(one_by_one(model, batch, lm_loss)), flat(one_by_one(model, queries, lm_loss))
            count = int((batch["labels"][:, 1:] != -100).sum())
            values = moving.param_groups[0]["lr"] / count * g @ v.T
            own_loss(model, batch).backward()
            moving.step()
            moving.zero_grad()
            schedule.step()
            for name, value in zip((f"{k % 3}a", f"{k % 3}b"), values, strict=True):
                right[name] = right.get(name, 0) + value
    del model
    scores, folded = tracin(open_store(tmp_path / "train"), open_store(tmp_path / "query")).per_example()
    expected = torch.stack([right[f"{k}{x}"] for k in range(3) for x in "ab"])
    assert scores.ids == tuple(i for b in blocks[:3] for i in b.examples.ids)
    assert folded.tolist() == [2, 2, 1, 1, 1, 1]
    assert (scores.values - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_a_probe_records_queries_at_the_steps_asked_for(rng):
    model, batches, query = seeded(MLP), [classes(rng) for _ in range(4)], classes(rng, 2)
    queries, blocks = [], []
    recall = probe([query], queries.append, classification(), when=lambda step: step % 2 == 1)
    with capture(model, sinks=[blocks.append], before_step=[recall], loss="sum"):
        two_optimizers(model, batches)
    assert [q.examples.step for q in queries] == [1, 3]
    marks = {b.examples.step: b.examples.fingerprint for b in blocks}
    assert [q.examples.fingerprint for q in queries] == [marks[1], marks[3]]
    assert list(queries[0].grads) == list(blocks[0].grads)
