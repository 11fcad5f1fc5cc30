"""Directions of an optimizer on two processes are those of one process that has all examples."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn

from attrax.core import Directions, Target
from attrax.frontends import capture

from .oracle import assert_gradients, block_gradients
from .parallel import KINDS, Network, examples, seeded

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS, STEPS, PER_STEP = 2, 3, 4
TARGETS: tuple[Target, ...] = ("as_trained", "sum")
Found = dict[tuple[str, int, str], dict[str, Tensor]]


def train(model: nn.Module, rank: int | None, target: Target) -> Found:
    """Directions of the rows of one process, or of all, by step and example."""
    x, y = examples()
    moving = torch.optim.AdamW(model.parameters(), lr=0.05)
    blocks, now = [], list[int]()
    how = {"loss": "example_mean", "directions": Directions(target), "verify": False}
    with capture(model, sinks=[blocks.append], ids=lambda inputs: [str(i) for i in now], **how):
        for k in range(STEPS):
            every = list(range(PER_STEP * k, PER_STEP * (k + 1)))
            now[:] = every if rank is None else every[rank::RANKS]
            F.cross_entropy(model(x[now]), y[now]).backward()
            moving.step()
            moving.zero_grad()
    return {
        (target, b.examples.step, name): {n: g[i] for n, g in block_gradients(b).items()}
        for b in blocks
        for i, name in enumerate(b.examples.ids)
    }


def work(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found: Found = {}
    for target in TARGETS:
        found |= train(KINDS[kind](seeded(Network)), rank, target)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_directions_on_two_processes(kind: str, tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path), kind), nprocs=RANKS)
    found: Found = {}
    for rank in range(RANKS):
        found |= torch.load(tmp_path / f"{rank}.pt")
    right: Found = {}
    for target in TARGETS:
        right |= train(seeded(Network), None, target)
    assert found.keys() == right.keys() and len(right) == len(TARGETS) * STEPS * PER_STEP
    for key, expected in right.items():
        assert_gradients(found[key], expected, 1e-8)
