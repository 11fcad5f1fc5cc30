"""Training on two processes (replicated or sharded parameters): what they capture is what one process captures."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attrax.core import Block, GradTree, stored
from attrax.frontends import capture, open_store, store
from attrax.frontends.fingerprints import whole

pytestmark = pytest.mark.usefixtures("unchecked")
STEPS, PER_STEP, RANKS = 3, 6, 2


class Network(nn.Module):
    """Tokens and positions (looked up once for all examples), a linear layer, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.mix, self.norm, self.head = nn.Linear(40, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1])[None])
        return self.head(torch.relu(self.norm(self.mix(x.flatten(1)))))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().double()


def examples() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    n = STEPS * PER_STEP
    return torch.randint(0, 11, (n, 5), generator=gen), torch.randint(0, 3, (n,), generator=gen)


def train(model: nn.Module, rows: list[list[int]], sinks: list[Any]) -> nn.Module:
    """A loop with a mean loss, on these rows of the data at every step."""
    x, y = examples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = iter(rows)
    now: list[int] = []
    with capture(
        model, sinks=sinks, loss="example_mean", ids=lambda inputs: [str(i) for i in now], strict=True
    ):
        for now in step:
            optimizer.zero_grad()
            F.cross_entropy(model(x[now]), y[now]).backward()
            optimizer.step()
    return model


def rows_of(rank: int | None) -> list[list[int]]:
    """Rows of one process at every step; of all if there is one process."""
    steps = [list(range(s * PER_STEP, (s + 1) * PER_STEP)) for s in range(STEPS)]
    return steps if rank is None else [step[rank::RANKS] for step in steps]


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module)
    return fully_shard(model)


KINDS = {"ddp": replicated, "fsdp2": sharded}


def work(rank: int, folder: str, kind: str) -> None:
    """One process of data parallel training; all write into one store."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = KINDS[kind](network())
    train(model, rows_of(rank), [store(f"{folder}/store", run="both")])
    weights = {name.removeprefix("module."): whole(p.detach()) for name, p in model.named_parameters()}
    torch.save(weights, f"{folder}/weights{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=KINDS)
def parallel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    multiprocessing.spawn(work, (str(folder), request.param), nprocs=RANKS)
    return folder


@pytest.fixture(scope="module")
def alone() -> tuple[list[Block], nn.Module]:
    blocks: list[Block] = []
    model = train(network(), rows_of(None), [blocks.append])
    return blocks, model


def gradients(blocks: Any) -> dict[tuple[int, str], dict[str, Tensor]]:
    """Gradients of the sum loss by step and example."""
    found = {}
    for block in blocks:
        for name, w in stored(block.grads).items():
            for i, key in enumerate(block.examples.ids):
                own = w[i] / block.examples.weight[i]
                found.setdefault((block.examples.step, key), {})[name] = own
    return found


def blocks_in(folder: Path) -> list[Block]:
    """Blocks of the store that all processes wrote."""
    found: list[Block] = []
    for examples, leaves in open_store(folder / "store").map(lambda name, leaf, _: leaf):
        found.append(Block(GradTree(leaves), examples))
    return found


def test_one_store_holds_every_example_once_in_order(parallel, alone):
    blocks = blocks_in(parallel)
    assert [b.examples.ids for b in blocks] == [b.examples.ids for b in alone[0]]
    assert len({b.examples.fingerprint for b in blocks}) == STEPS
    right, got = gradients(alone[0]), gradients(blocks)
    assert got.keys() == right.keys()
    for key, grads in right.items():
        assert got[key].keys() == grads.keys()
        for name, g in grads.items():
            assert torch.allclose(got[key][name], g, rtol=1e-10, atol=1e-13), (key, name)


def test_training_is_as_without_a_capture_and_the_same_everywhere(parallel, alone):
    first, second = (torch.load(parallel / f"weights{rank}.pt") for rank in range(RANKS))
    for name, w in alone[1].named_parameters():
        assert torch.equal(first[name], second[name]) and torch.allclose(first[name], w, rtol=1e-12)
