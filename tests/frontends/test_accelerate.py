"""A loop with accelerate inside a capture."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from attrax.core import Block, Blocks, targeted
from attrax.frontends import capture, classification, open_store, trainer_options

from .llms import in_float64  # noqa: F401
from .loops import known, mean_ce
from .models import MLP, classes, seeded
from .oracle import assert_gradients, captured, one_by_one
from .trainers import Check, label_losses, llama, texts, tokenizer, trained_alike

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


def data() -> DataLoader:
    made = tokenizer()(texts(), padding="max_length", truncation=True, max_length=40, return_tensors="pt")
    rows = [
        {"input_ids": a, "attention_mask": m}
        for a, m in zip(made["input_ids"], made["attention_mask"], strict=True)
    ]
    return DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))  # pyright: ignore


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(accumulate):
    """The model returns the mean over its own micro-batch, which accelerate divides by the steps it accumulates."""
    assert_accelerated(llama, accumulate)


def test_accelerate_in_float64(in_float64):  # noqa: F811
    """One document at a time gives the same gradients to 1e-10."""
    assert_accelerated(lambda: llama().double(), 2)


def training(accumulate: int, epochs: int) -> Callable[[Any], Any]:
    """Makes a loop of a model whose own loss accelerate divides."""

    def train(model: Any) -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        made, optimizer, batches = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-2), data()
        )

        def start() -> None:
            for _ in range(epochs):
                for batch in batches:
                    with accelerator.accumulate(made):
                        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
                        accelerator.backward(made(**batch, labels=labels).loss)
                        optimizer.step()
                        optimizer.zero_grad()

        return start, {}

    return train


def assert_accelerated(build: Callable[[], Any], accumulate: int) -> None:
    check, running = trained_alike(build, training(accumulate, 4), lambda model: Check(build(), label_losses))
    assert running.coverage.share == 1 and len(check.blocks) == 24
    assert [b.examples.step for b in check.blocks] == [k // accumulate for k in range(24)]
    for block in check.blocks:
        c, n = known(block)
        assert c.tolist() == pytest.approx([1 / (accumulate * int(n.sum()))] * 4)


def outside(accumulate: int, blocks: list[Block], batches: list[Any], declare: Callable[[Any], Any]) -> Any:
    """A loop that computes its loss outside of the model; returns the model as it was."""
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=accumulate), seeded(MLP)
    start = copy.deepcopy(model)
    made, moving = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    with capture(made, sinks=[blocks.append], **declare(accelerator)):
        for batch in batches:
            with accelerator.accumulate(made):
                accelerator.backward(mean_ce(made, batch))
                moving.step()
                moving.zero_grad()
    return start


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_outside_of_the_model(accumulate, rng):
    """Gradients of the target "sum" are those of each example alone, whatever accelerate divides by."""
    batches, blocks = [classes(rng, rows) for rows in (4, 3, 4)], []
    model = outside(
        accumulate, blocks, batches, lambda accelerator: trainer_options(accelerator, loss="example_mean")
    )
    for block, batch in zip(blocks, batches, strict=True):
        right = one_by_one(model, batch, classification())
        assert_gradients(captured(targeted(Blocks([block]), "sum")), right)


def test_a_loss_outside_of_the_model_that_is_divided_unseen(rng):
    blocks: list[Block] = []
    with pytest.raises(
        RuntimeError, match=r"accelerate divides the loss by the 2 steps.*trainer_options\(acc"
    ):
        outside(2, blocks, [classes(rng), classes(rng)], lambda _: {"loss": "example_mean"})
    outside(1, blocks, [classes(rng)], lambda _: {"loss": "example_mean"})


def test_two_processes(tmp_path):
    """torchrun: each captures its own half into one store; all documents are there, in the order of the data."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    for how in ("alone", "watched"):
        done = subprocess.run(
            [*program, "-m", "tests.frontends.accelerated", str(tmp_path), how],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        alone, watched = (torch.load(tmp_path / f"{how}{rank}.pt") for how in ("alone", "watched"))
        assert all(torch.equal(p, q) for p, q in zip(alone, watched, strict=True))
    seen = [examples for examples, _ in open_store(tmp_path / "store").map(lambda name, leaf, examples: None)]
    assert len({i for x in seen for i in x.ids}) == 24 and {x.step for x in seen} == {0, 1, 2}
