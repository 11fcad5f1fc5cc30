"""Language models trained by torchrun, by scripts and by Hugging Face's Trainer, captured as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attrax
from attrax.core import GradTree, aggregate, stored

from .parallel_llms import AVERAGED, MODES, PER_RANK, STEPS, documents, llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]
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


def close(got: Tensor, right: Tensor) -> bool:
    return bool((got - right).abs().max() <= 1e-6 * right.abs().max() + 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_script_writes_what_one_process_captures(folder, mode):
    ids, labels = documents()
    size = RANKS * PER_RANK
    blocks: list[attrax.Block] = []
    with attrax.capture(llama(), sinks=[blocks.append]) as running:
        running.model(input_ids=ids[:size], labels=labels[:size]).loss.backward()
    (right,) = blocks
    found = attrax.open_store(folder / mode)
    assert (len(found), found.steps(), len(found.fingerprints)) == (STEPS * size, tuple(range(STEPS)), STEPS)
    got = found.block(list(right.examples.ids))
    assert found.at(0).ids == right.examples.ids
    assert got.examples.fingerprint == right.examples.fingerprint
    assert got.examples.tokens.tolist() == right.examples.tokens.tolist()
    one, several = stored(right.grads), stored(got.grads)
    assert one.keys() == several.keys()
    for name, w in one.items():
        scale = (right.examples.weight / got.examples.weight).reshape(-1, *[1] * (w.ndim - 1))
        assert close(several[name] * scale.float(), w), name


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
        assert all(close(sums[name], g) for name, g in grads.items())
