"""Sharded modules with parameters of their own, which are run once more in backward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from attrax.core import Block, stored
from attrax.frontends import capture

from .oracle import assert_gradients
from .parallel import examples, seeded

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS = 2


class Scaled(nn.Module):
    """A layer and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(8, 8), nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) * self.gain


class Net(nn.Module):
    """A model with a bare parameter at its root, as vision transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.body, self.head = nn.Embedding(11, 8), Scaled(), nn.Linear(8, 3)
        self.place = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.tok(ids) + self.place).mean(1))


def fsdp1(model: nn.Module) -> nn.Module:
    policy, cpu = ModuleWrapPolicy({Scaled}), torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True)


def fsdp2(model: Any) -> nn.Module:
    fully_shard(model.body)
    return fully_shard(model)


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {"fsdp1": fsdp1, "fsdp2": fsdp2}


def gradients(model: nn.Module, rows: list[int]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Gradients of each example's own loss in two backwards, one after the other, and what is not captured."""
    x, y = examples()
    blocks: list[Block] = []
    with capture(model, sinks=[blocks.append], loss="sum") as running:
        for _ in range(2):
            F.cross_entropy(model(x[rows]), y[rows], reduction="sum").backward()
    found = [stored(block.grads) for block in blocks]
    missed = {gap.parameter: gap.reason for gap in running.coverage.gaps}
    return {n: torch.cat([own[n] for own in found]) for n in found[0]}, missed


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    rows = list(range(6))[rank::RANKS]
    torch.save(
        {kind: gradients(wrap(seeded(Net)), rows) for kind, wrap in KINDS.items()}, f"{folder}/{rank}.pt"
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("bare")
    multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind, several):
    """Of FSDP1, all but those of a module with wrapped parts, which is said."""
    for rank, (got, missed) in enumerate(found[kind] for found in several):
        right, _ = gradients(seeded(Net), list(range(6))[rank::RANKS])
        assert_gradients(got, {n: g for n, g in right.items() if n not in missed})
        assert list(missed) == ([] if kind == "fsdp2" else ["place"])
        assert all("wrapped in FSDP1" in reason for reason in missed.values())
