"""Unmodified trainers on two processes: gradients of one example at a time, and training as without a capture."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .parallel_trainers import TRAINERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What the processes wrote, and their last words."""
    path = tmp_path_factory.mktemp("trainers")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*run, "-m", "tests.frontends.parallel_trainers", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return path, done.stderr[-6000:]


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(ran, name):
    path, words = ran
    found: list[dict[str, Any]] = []
    for rank in (0, 1):
        file = path / f"{name}{rank}.pt"
        assert file.exists(), words
        found.append(torch.load(file))
    for x in found:
        assert sorted(set(x["steps"])) == list(range(20)) and x["share"] == 1 and x["checked"] >= 10
    one, other = (x["ids"] for x in found)
    assert [set(a) & set(b) for a, b in zip(one, other, strict=True)].count(set()) > len(one) // 2
