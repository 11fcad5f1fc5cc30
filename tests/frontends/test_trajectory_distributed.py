"""Recording on two processes, replicated or sharded: one record of the whole, as one process would make it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn

from attrax.frontends import capture, open_trajectory, record, store
from attrax.frontends.sharding import whole

from .test_distributed import KINDS, PER_STEP, RANKS, STEPS, examples, network, rows_of
from .test_trajectory import assert_adds_up, assert_replays

pytestmark = pytest.mark.usefixtures("unchecked")


def train(model: nn.Module, rows: list[list[int]], folder: str) -> None:
    """A loop that clips, with momentum and weight decay."""
    x, y = examples()
    moving = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    now: list[int] = []
    with (
        store(f"{folder}/run", run="one", keep_factored=True) as sink,
        capture(
            model,
            sinks=[sink],
            loss="example_mean",
            ids=lambda inputs: [str(i) for i in now],
            trajectory=record(f"{folder}/run"),
        ),
    ):
        for now in rows:
            moving.zero_grad()
            F.cross_entropy(model(x[now]), y[now]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            moving.step()


def work(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = KINDS[kind](network())
    train(model, rows_of(rank), folder)
    weights = {name.removeprefix("module."): whole(p.detach()) for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(weights, f"{folder}/weights.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_record_what_one_does(kind: str, tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path), kind), nprocs=RANKS)
    model = network()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    found = open_trajectory(tmp_path / "run")
    assert found.steps == tuple(range(STEPS)) and found.step(0).share == 1 / RANKS
    assert_replays(found, model)
    assert_adds_up(found, active=True)
    assert sum(len(e) for e, _ in found.gradients(1).map(lambda *_: None)) == PER_STEP
    (tmp_path / "alone").mkdir()
    train(network(), rows_of(None), str(tmp_path / "alone"))
    alone = open_trajectory(tmp_path / "alone/run")
    for number in found.steps:
        mine, right = found.step(number), alone.step(number)
        assert mine.clip is not None and right.clip is not None
        assert mine.clip.norm == pytest.approx(right.clip.norm, rel=1e-10)
        for name, g in right.gradients.items():
            assert torch.allclose(mine.gradients[name], g, rtol=1e-8, atol=1e-12)
