"""Recording on two processes, replicated or sharded: one record of the whole, as one process would make it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from attrax.frontends import capture, classification, live, open_trajectory, record, store
from attrax.methods import dvemb, trajectory_influence

from .parallel import KINDS, Network, examples, seeded, weights
from .test_trajectory import assert_adds_up, assert_replays

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS, STEPS, PER_STEP = 2, 3, 6


def rows_of(rank: int | None) -> list[list[int]]:
    """Rows of one process at every step; of all if there is one process."""
    steps = [list(range(s * PER_STEP, (s + 1) * PER_STEP)) for s in range(STEPS)]
    return steps if rank is None else [step[rank::RANKS] for step in steps]


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
            clip(model, 0.1)
            moving.step()


def clip(model: nn.Module, bound: float) -> None:
    """Clipping by the norm of everything; FSDP1's own method knows float32 only."""
    if not isinstance(model, FullyShardedDataParallel):
        nn.utils.clip_grad_norm_(model.parameters(), bound)
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = sum(g.square().sum() for g in grads)
    dist.all_reduce(total)
    for g in grads:
        g.mul_(min(1.0, bound / (float(total) ** 0.5 + 1e-6)))


def work(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = KINDS[kind](seeded(Network))
    train(model, rows_of(rank), folder)
    held = weights(model)
    if rank == 0:
        torch.save(held, f"{folder}/weights.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_record_what_one_does(kind: str, tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path), kind), nprocs=RANKS)
    model = seeded(Network)
    model.load_state_dict(torch.load(tmp_path / "weights.pt"), strict=False)
    found = open_trajectory(tmp_path / "run")
    assert found.steps == tuple(range(STEPS)) and found.step(0).share == 1 / RANKS
    assert_replays(found, model)
    assert_adds_up(found, active=True)
    assert sum(len(e) for e, _ in found.gradients(1).map(lambda *_: None)) == PER_STEP
    (tmp_path / "alone").mkdir()
    train(seeded(Network), rows_of(None), str(tmp_path / "alone"))
    alone = open_trajectory(tmp_path / "alone/run")
    x, y = examples()
    query = live(model.eval(), [{"x": x[:3], "y": y[:3]}], classification())
    for method in (trajectory_influence, dvemb):
        scores, expected = (method(run, query).per_example()[0] for run in (found, alone))
        values = scores.in_order(expected.ids).values
        assert torch.allclose(values, expected.values, rtol=1e-8, atol=1e-10 * float(values.abs().max()))
    for number in found.steps:
        mine, right = found.step(number), alone.step(number)
        assert mine.clip is not None and right.clip is not None
        assert mine.clip.norm == pytest.approx(right.clip.norm, rel=1e-10)
        for name, g in right.gradients.items():
            assert torch.allclose(mine.gradients[name], g, rtol=1e-8, atol=1e-12)
