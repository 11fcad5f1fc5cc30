"""Layers and parameters that are replaced while a capture is open: followed, or an error."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

from attrax.frontends import capture, classification, open_store, open_trajectory, record, store

from .loops import sum_ce
from .models import MLP, TinyLM, classes, documents, seeded
from .oracle import assert_gradients, block_gradients, one_by_one

CLASSIFY = classification()
pytestmark = pytest.mark.usefixtures("unchecked")


def step(model: nn.Module, batch: Any, rate: float) -> None:
    """A step with an optimizer of its own."""
    moving = torch.optim.SGD(model.parameters(), lr=rate)
    sum_ce(model, batch).backward()
    moving.step()
    model.zero_grad()


def loaded(model: nn.Module, *, parameters: bool) -> None:
    """Load other values, in place of the old parameters."""
    values = {n: 0.5 * p.detach() for n, p in model.state_dict().items()}
    if parameters:
        values = {n: nn.Parameter(v) for n, v in values.items()}
    model.load_state_dict(values, assign=True)


@pytest.mark.parametrize("parameters", [False, True])
def test_parameters_that_are_replaced_are_followed(parameters, rng, tmp_path):
    """Gradients, steps, rates, fingerprints and the recorded trajectory go on."""
    model, batches, blocks, right = seeded(MLP), [classes(rng) for _ in range(4)], [], []
    with capture(
        model, loss="sum", sinks=[store(tmp_path), blocks.append], trajectory=record(tmp_path)
    ) as running:
        for k, batch in enumerate(batches):
            if k == 2:
                loaded(model, parameters=parameters)
            with running.paused():
                right.append(one_by_one(model, batch, CLASSIFY))
            step(model, batch, 0.1 / (k + 1))
    for block, expected in zip(blocks, right, strict=True):
        assert_gradients(block_gradients(block), expected)
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [
        (k, 0.1 / (k + 1)) for k in range(4)
    ]
    assert len({b.examples.fingerprint for b in blocks}) == 4
    run = open_trajectory(tmp_path)
    assert tuple(run.steps) == open_store(tmp_path).steps() == (0, 1, 2, 3)
    for k, expected in enumerate(right):
        assert_gradients(
            {n: g[None] for n, g in run.step(k).gradients.items()},
            {n: g.sum(0, keepdim=True) for n, g in expected.items()},
        )


def test_parameters_that_are_replaced_are_checked_again(rng):
    class Doubled(MLP):
        twice = False

        def forward(self, x: Any) -> Any:
            return super().forward(x) + (self.last.weight.sum(1) if self.twice else 0)

    model, batch = seeded(Doubled), classes(rng)
    with capture(model, loss="sum"):
        step(model, batch, 0.1)
        model.twice = True
        loaded(model, parameters=True)
        with pytest.raises(RuntimeError, match="last.weight"):
            step(model, batch, 0.1)


def untied(model: Any) -> None:
    model.head.weight = nn.Parameter(model.tok.weight.detach().clone())


def resized(model: Any) -> None:
    model.tok.weight.data, model.tok.num_embeddings = torch.cat([model.tok.weight.data] * 2), 22


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another layer": (lambda m: setattr(m, "ln", nn.LayerNorm(6).double()), r"layer 'ln' .*'ln.weight', 'ln"),
    "a layer less": (lambda m: setattr(m, "ln", nn.Identity()), r"layer 'ln' .*'ln.weight', 'ln.bias'"),
    "a layer around it": (lambda m: setattr(m, "ln", nn.Sequential(m.ln)), r"layer 'ln' .*'ln.weight'"),
    "a parametrization": (lambda m: parametrizations.weight_norm(m.blocks[0].q), r"layer 'blocks.0.q'"),
    "no longer tied": (untied, r"layer 'head' .*'tok.weight'"),
    "resized in place": (resized, r"layer 'tok' .*other shapes.*\(22, 6\), \(11, 6\)"),
    "a layer more": (
        lambda m: setattr(m, "more", nn.Linear(2, 2).double()),
        r"part of the model.*more.weight",
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_replaced_are_refused(change, rng):
    changed, message = CHANGES[change]
    model, batch = seeded(lambda: TinyLM(layers=1, tied=True)), documents(rng, [5, 3])
    del batch["labels"]
    with capture(model, loss="sum"):
        model(**batch).square().sum().backward()
        model.zero_grad()
        changed(model)
        with pytest.raises(RuntimeError, match=message):
            model(**batch).square().sum().backward()
        with pytest.raises(RuntimeError, match=message):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    with capture(model, loss="sum"):
        model(**batch).square().sum().backward()


def test_values_put_in_for_one_call_are_not_followed(rng):
    model, batches, blocks = seeded(MLP), [classes(rng), classes(rng)], []
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, loss="sum", sinks=[blocks.append]):
        for batch in batches:
            values = {n: p * 1.0 for n, p in model.named_parameters()}
            logits = torch.func.functional_call(model, values, (batch["x"],))
            nn.functional.cross_entropy(logits, batch["y"], reduction="sum").backward()
            moving.step()
            moving.zero_grad()
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [(0, 0.1), (1, 0.1)]


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_is_sharded_inside_is_refused(one_process, rng):
    model, batch = seeded(MLP), classes(rng)
    with capture(model, loss="sum"):
        fully_shard(model.second)
        with pytest.raises(RuntimeError, match="was sharded inside the context.*Shard it first"):
            sum_ce(model, batch).backward()


def test_a_sharded_model_may_have_run_before(one_process, rng):
    """Its parameters are gathered then, and sharded again when the optimizer steps."""
    model, batch, blocks = seeded(MLP), classes(rng), []
    right = one_by_one(model, batch, CLASSIFY)
    fully_shard(model)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch["x"])
    with capture(model, loss="sum", sinks=[blocks.append]):
        for _ in range(2):
            sum_ce(model, batch).backward()
            moving.step()
            moving.zero_grad()
    assert [(b.examples.step, b.examples.learning_rate) for b in blocks] == [(0, 0.1), (1, 0.1)]
    assert_gradients(block_gradients(blocks[0]), right)
