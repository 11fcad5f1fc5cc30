"""Language models trained by torchrun, by scripts and by Hugging Face's Trainer, captured as they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attrax
from attrax.core import GradTree, aggregate, stored

from .llms import in_float64  # noqa: F401
from .parallel_llms import (
    AVERAGED,
    LOOKED_AT,
    MODES,
    PER_RANK,
    SCRIPT_STEPS,
    STEPS,
    documents,
    llama,
)
from .trainers import label_losses

pytestmark = pytest.mark.usefixtures("unchecked")
ROOT = Path(__file__).resolve().parents[2]
RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llms")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*run, "-m", "tests.frontends.parallel_llms", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return path


@pytest.fixture
def in_double(in_float64: None) -> Iterator[None]:  # noqa: F811
    """Models are made and computed in float64, as by the script."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(got: Tensor, right: Tensor, within: float) -> bool:
    return bool((got - right).abs().max() <= within * right.abs().max() + 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_a_script_trains_as_without_a_capture(folder, mode):
    alone, watched = (torch.load(folder / f"{mode}-{how}.pt") for how in ("alone", "watched"))
    assert alone.keys() == watched.keys() == {*LOOKED_AT, SCRIPT_STEPS}
    for step, right in alone.items():
        assert right.keys() == watched[step].keys()
        assert all(torch.equal(watched[step][name], x) for name, x in right.items())
    assert not torch.equal(alone[0]["model.norm.weight"], alone[SCRIPT_STEPS]["model.norm.weight"])


@pytest.mark.parametrize("mode", MODES)
def test_a_script_writes_gradients_of_one_example_at_a_time(folder, mode, in_double):
    """At the parameters of three steps, the last among them, in float64."""
    ids, labels = documents()
    size, noted = RANKS * PER_RANK, torch.load(folder / f"{mode}-watched.pt")
    found = attrax.open_store(folder / mode, block_examples="step")
    assert (len(found), found.steps()) == (SCRIPT_STEPS * size, tuple(range(SCRIPT_STEPS)))
    model = llama()
    for step in LOOKED_AT:
        model.load_state_dict(noted[step], strict=False)
        now = slice(step * size, (step + 1) * size)
        own: list[attrax.Block] = []
        for i in range(now.start, now.stop):
            with attrax.capture(model, sinks=[own.append]):
                model(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss.backward()
            model.zero_grad()
        (block,) = (
            attrax.Block(GradTree(dict(leaves)), examples)
            for examples, leaves in found.at(step).map(lambda _, leaf, __: leaf)
        )
        assert block.examples.ids == tuple(i for b in own for i in b.examples.ids)
        assert block.examples.fingerprint == own[0].examples.fingerprint
        for i in range(size):
            loss = label_losses(model, {"input_ids": ids[now][i : i + 1], "labels": labels[now][i : i + 1]})
            grads = torch.autograd.grad(loss, list(model.parameters()))
            weight = block.examples.weight[i].double()
            for (name, _), right in zip(model.named_parameters(), grads, strict=True):
                assert close(stored(block.grads)[name][i] / weight, right, 1e-10), name


@pytest.mark.parametrize("averaged", AVERAGED)
def test_a_trainer_uses_the_gradients_that_were_captured(folder, averaged):
    used = torch.load(folder / f"trainer{averaged}.pt")
    found = attrax.open_store(folder / f"trainer{averaged}")
    assert len(used) == STEPS and found.steps() == tuple(range(STEPS))
    for step, grads in enumerate(used):
        sums: dict[str, Tensor] = {}
        weights: set[float] = set()
        tokens = 0
        for examples, leaves in found.at(step).map(lambda name, leaf, _: leaf):
            weights |= set(examples.weight.tolist())
            tokens += int(examples.tokens.sum())
            for name, total in stored(aggregate(GradTree(dict(leaves)))).items():
                sums[name] = sums.get(name, 0) + total[0] / RANKS
        assert len(found.at(step)) == 2 * RANKS * PER_RANK
        assert len(weights) == 1 or not averaged
        assert sums.keys() == grads.keys()
        assert all(close(sums[name], g, 1e-6) for name, g in grads.items())
