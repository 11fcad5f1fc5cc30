"""Captures of loops that do more than step: exceptions, evaluation, copies, compiled models, changed selections."""

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from attrax.core import Block
from attrax.frontends import capture, classification, live, probe

from .loops import lm_loss, mean_ce, own_loss, recorded, sum_ce, train
from .models import MLP, LossLM, classes, documents, seeded
from .oracle import assert_gradients, block_gradients, one_by_one
from .test_live import Around
from .traces import assert_untouched, snapshot, untouched, watched_inputs

CLASSIFY = classification()
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def blocks() -> list[Block]:
    return []


def steps(blocks: list[Block]) -> list[tuple[int, int, float | None]]:
    return [(b.examples.step, b.examples.micro, b.examples.learning_rate) for b in blocks]


def test_nothing_is_left_on_the_model(blocks, rng):
    model, batch = seeded(MLP), classes(rng)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    nothing = pytest.warns(RuntimeWarning, match="nothing was captured: no backward passed")
    with untouched(model), nothing, capture(model, sinks=[blocks.append], loss="sum"):
        pass
    with untouched(model), pytest.raises(KeyError), capture(model, sinks=[blocks.append], loss="sum"):
        raise KeyError("inside")
    before = snapshot(model)
    with capture(model, sinks=[blocks.append], loss="sum"):
        sum_ce(model, batch).backward()
    for p in model.parameters():
        p.grad = before["grads"] and torch.full_like(p, 0.25)
    after = snapshot(model)
    assert_untouched(model, before | {"grads": after["grads"]})
    sum_ce(model, batch).backward()
    assert len(blocks) == 1


def test_nothing_accumulates_without_a_backward(blocks, rng):
    """Evaluation, logging with gradients that are never used, and an exception keep no activation alive."""
    model, batch = seeded(lambda: LossLM(layers=1)), documents(rng, [5, 3])
    with capture(model, sinks=[blocks.append]), watched_inputs(model.lm.head) as seen:
        with torch.no_grad():
            model(**batch)
        with torch.inference_mode():
            model(**batch)
        assert model(**batch)["loss"].requires_grad
        with pytest.raises(KeyError):
            raise KeyError(model(**batch)["loss"].item())
        own_loss(model, batch).backward()
        assert len(seen) == 5 + 8, (
            "the forwards above, five that ask for examples and try the shared positions, three that keep rows apart"
        )
    assert len(blocks) == 1


def test_passes_and_blocks_need_no_garbage_collector(rng):
    """Factors and graphs are freed by reference counts alone."""
    model, batch = seeded(MLP), classes(rng)
    refs: list[Any] = []
    watch = lambda m, args: refs.append(StorageWeakRef(args[0].untyped_storage()))  # noqa: E731
    model.last.register_forward_pre_hook(watch)
    gc.collect()
    gc.disable()
    try:
        with capture(model, sinks=[lambda block: None], loss="sum"):
            train(model, [batch] * 3, sum_ce)
            assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


def test_passes_that_are_not_differentiated_change_nothing(blocks, rng):
    model, batches = seeded(MLP), [classes(rng), classes(rng)]
    right = one_by_one(model, batches[0], CLASSIFY)
    with capture(model, sinks=[blocks.append], loss="sum"):
        sum_ce(model, batches[1])
        with torch.no_grad():
            sum_ce(model, batches[1])
        sum_ce(model, batches[0]).backward()
        sum_ce(model, batches[1])
    assert len(blocks) == 1
    assert_gradients(block_gradients(blocks[0]), right)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_does_not_poison_the_next_step(where, blocks, rng):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise KeyError("backward")

    def fail(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        if m.broken and where == "forward":
            raise KeyError("forward")
        return m.b(torch.tanh(Failing.apply(h) if m.broken else h))

    model = seeded(lambda: Around(fail, a=nn.Linear(4, 5), b=nn.Linear(5, 3)))
    bad, good = classes(rng), classes(rng)
    right = one_by_one(object_with(model, broken=False), good, CLASSIFY)
    with capture(model, sinks=[blocks.append], loss="sum"):
        waiting = sum_ce(model, good)
        for _ in range(2):
            object_with(model, broken=True)
            with pytest.raises(KeyError, match=where):
                sum_ce(model, bad).backward()
            model.zero_grad()
        object_with(model, broken=False)
        waiting.backward()
        sum_ce(model, good).backward()
    assert len(blocks) == 2
    for block in blocks:
        assert_gradients(block_gradients(block), right)


def object_with(model: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def test_evaluation_between_steps_and_paused(blocks, rng):
    model, batches = seeded(MLP), [classes(rng) for _ in range(3)]
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = copy.deepcopy(model)
    train(alone, batches, sum_ce)
    with capture(model, sinks=[blocks.append], loss="sum") as running:
        for batch in batches:
            sum_ce(model, batch).backward()
            moving.step()
            moving.zero_grad()
            model.eval()
            with torch.no_grad():
                mean_ce(model, batches[0])
            model.train()
            with running.paused():
                sum_ce(model, batches[0]).backward()
                moving.zero_grad()
    assert steps(blocks) == [(0, 0, 0.1), (1, 0, 0.1), (2, 0, 0.1)]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_live_source_inside_a_capture_is_not_captured(blocks, rng):
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    with capture(model, sinks=[blocks.append], loss="sum"):
        for _ in live(model, [classes(rng)], CLASSIFY).map(lambda name, leaf, examples: None):
            pass
        sum_ce(model, batch).backward()
    assert len(blocks) == 1
    assert_gradients(block_gradients(blocks[0]), right)


def test_a_copy_or_a_pickle_of_the_model_does_not_feed_the_capture(blocks, rng):
    model, batch = seeded(MLP), classes(rng)
    with capture(model, sinks=[blocks.append], loss="sum"):
        twin = copy.deepcopy(model)
        sum_ce(twin, batch).backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        sum_ce(torch.load(file, weights_only=False), batch).backward()
        sum_ce(model, batch).backward()
    assert len(blocks) == 1
    sum_ce(twin, batch).backward()
    assert len(blocks) == 1


def test_entering_again(blocks, rng):
    model, batch = seeded(MLP), classes(rng)
    running = capture(model, sinks=[blocks.append], loss="sum")
    with running:
        sum_ce(model, batch).backward()
        with pytest.raises(RuntimeError, match="already running"), running:
            pass
        sum_ce(model, batch).backward()
    with running, capture(model, sinks=[blocks.append], loss="sum"):
        sum_ce(model, batch).backward()
    assert len(blocks) == 4
    for block in blocks[1:]:
        assert_gradients(block_gradients(block), block_gradients(blocks[0]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_models(blocks, rng):
    model, batch = seeded(MLP), classes(rng)
    compiled: Any = torch.compile(model, backend="eager")
    for refused in (compiled, nn.ModuleList([compiled])):
        with pytest.raises(RuntimeError, match=r"already compiled.*force_eager"):
            capture(refused, loss="sum")
    within = seeded(MLP)
    within.second.compile(backend="eager")
    with pytest.raises(RuntimeError, match="second is already compiled"):
        capture(within, loss="sum")
    torch._dynamo.reset()
    right = one_by_one(model, batch, CLASSIFY)
    with capture(model, sinks=[blocks.append], loss="sum"):
        later: Any = torch.compile(model, backend="eager")
        for _ in range(2):
            sum_ce(later, batch).backward()
    assert len(blocks) == 2
    for block in blocks:
        assert_gradients(block_gradients(block), right)
    torch._dynamo.reset()


def test_hooks_that_do_not_fire_are_noticed(rng):
    """Another copy is trained, or layers are called past their hooks: an error at once, not an empty store."""
    model, batch = seeded(MLP), classes(rng)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, loss="sum"):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match=r"not captured. Layers never called: \['first'"):
            moving.step()
    direct = lambda m, x: m.b.forward(torch.tanh(m.a(x)))  # noqa: E731
    part = seeded(lambda: Around(direct, a=nn.Linear(4, 4), b=nn.Linear(4, 3)))
    with capture(part, loss="sum"), pytest.raises(RuntimeError, match="b.weight: has a gradient but"):
        sum_ce(part, batch).backward()


def test_parameters_that_become_trainable_are_noticed(rng):
    model, batch = seeded(MLP), classes(rng)
    model.first.requires_grad_(False)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, loss="sum"):
        sum_ce(model, batch).backward()
        moving.step()
        model.first.requires_grad_(True)
        sum_ce(model, batch).backward()
        with pytest.raises(RuntimeError, match=r"became trainable.*first.bias"):
            moving.step()


def test_batch_statistics_are_refused():
    for norm in (nn.BatchNorm1d(4).train(), nn.BatchNorm1d(4, track_running_stats=False).eval()):
        with pytest.raises(ValueError, match="'1' is a BatchNorm with batch statistics"):
            capture(nn.Sequential(nn.Linear(4, 4), norm))
    capture(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()))


def test_probing_within_a_loop_restores_modes(blocks, rng):
    model = seeded(lambda: LossLM(layers=1)).train()
    model.lm.blocks.eval()
    queries: list[Block] = []
    recall = probe([documents(rng, [4])], queries.append, lm_loss)
    recorded_blocks, _, _ = recorded(model, [documents(rng, [5, 3])] * 2, own_loss, {"before_step": [recall]})
    assert [q.examples.step for q in queries] == [0, 1]
    assert [q.examples.fingerprint for q in queries] == [b.examples.fingerprint for b in recorded_blocks]
    assert model.training and not model.lm.blocks.training
