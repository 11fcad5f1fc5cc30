"""OLMo-core's unmodified trainer inside a capture; runs in an environment of its own (`make olmo`)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from olmo_core.train import prepare_training_environment, teardown_training_environment
from torch import Tensor

from attrax.core import Block
from attrax.frontends import open_store, trainer_callback, trainer_options

from . import olmo
from .loops import known
from .trainers import Check, trained_alike

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    hook = sys.excepthook
    prepare_training_environment(backend=None, seed=0)
    yield
    teardown_training_environment()
    sys.excepthook = hook


def loss(model: Any, row: Any) -> Tensor:
    logits = model(row["input_ids"])
    return F.cross_entropy(
        logits.flatten(0, 1).float(), row["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def test_olmo_core(tmp_path):
    """Micro-batches of two of four sequences; the loss is divided by the tokens of the whole batch."""

    def train(model: Any) -> Any:
        torch.manual_seed(1)
        made = olmo.trainer(model, tmp_path)
        return made.fit, trainer_options(made)

    check, running = trained_alike(olmo.model, train, lambda model: Check(olmo.model(), loss))
    assert running.coverage.share == 1
    mock, used = check.blocks[:2], check.blocks[2:]
    assert [b.examples.learning_rate for b in mock] == [0, 0], (
        "a batch to warm up, whose gradients are thrown away"
    )
    assert [b.examples.step for b in used] == [step for step in range(20) for _ in (0, 1)]
    assert all(b.examples.learning_rate for b in used)
    total = 4 * (olmo.LENGTH - 1)
    for block in used:
        c, n = known(block)
        assert c.tolist() == pytest.approx([1 / total] * 2) and n.tolist() == [olmo.LENGTH - 1] * 2


def test_a_callback_captures_while_it_trains(tmp_path):
    blocks: list[Block] = []
    callback, model = trainer_callback("olmo_core", sinks=[blocks.append]), olmo.model()
    olmo.trainer(model, tmp_path, steps=3, callbacks={"attrax": callback}).fit()
    assert len(blocks) == 6 and known(blocks[0])[1].tolist() == [olmo.LENGTH - 1] * 2
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes(mode, tmp_path):
    """Each captures its own examples into one store; training is as without a capture."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = "tests.frontends.olmo"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    for how in ("alone", "watched"):
        done = subprocess.run(
            [*program, "-m", module, mode, str(tmp_path), how],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for rank in (0, 1):
        ends = [torch.load(tmp_path / f"{how}{rank}.pt") for how in ("alone", "watched")]
        assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert report == {"blocks": 5, "examples": 10}, "four steps, and the mock batch before them"
    seen = [examples for examples, _ in open_store(tmp_path / "store").map(lambda name, leaf, examples: None)]
    assert sum(len(x) for x in seen) == 20 and len({x.fingerprint for x in seen}) == 4
    assert len({i for x in seen if x.learning_rate for i in x.ids}) == 16
