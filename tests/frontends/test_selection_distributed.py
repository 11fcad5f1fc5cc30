"""Online selection on two processes: `.grad` is that of one process on all examples that any process keeps."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from attrax.frontends import capture, select
from attrax.frontends.loop.selection import Decision
from attrax.methods import drop_fraction

from .oracle import assert_gradients
from .parallel import KINDS, Network, examples, seeded, whole_gradients

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS = 2


def of_examples(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def uneven(scores: Tensor, interactions: Any) -> Tensor:
    """Processes keep different numbers of examples, so that their own counts are not those of all."""
    rank = dist.get_rank() % 2
    return drop_fraction((1 + rank) / 3)(scores, interactions)


CASES: dict[str, dict[str, Any]] = {
    "fixed": {"denominator": "fixed"},
    "examples": {"denominator": "examples"},
    "layer": {"denominator": "examples", "scope": "layer"},
    "accumulated": {"denominator": "examples"},
    "unsynchronized": {"denominator": "fixed"},
}


def run(kind: str, case: str, rank: int) -> tuple[dict[str, Tensor], list[Decision]]:
    """`.grad` after two micro-batches (or one), and this process's decisions."""
    x, y = examples()
    model, now = KINDS[kind](seeded(Network)), [0]
    decisions: list[Decision] = []
    target = {"x": x[12:14], "y": y[12:14]}
    keep = select(target, uneven, loss=of_examples, sink=decisions.append, **CASES[case])
    with capture(
        model,
        after_backward=[keep],
        loss="example_mean",
        ids=lambda inputs: [str(i) for i in now],
        strict=True,
    ):
        batches = [range(6), range(6, 12)] if case in ("accumulated", "unsynchronized") else [range(6)]
        for k, rows in enumerate(batches):
            now[:] = list(rows)[rank::RANKS]
            alone = case == "unsynchronized" and k == 0 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if alone else contextlib.nullcontext():
                F.cross_entropy(model(x[now]), y[now]).backward()
    return whole_gradients(model), decisions


def work(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.save({case: run(kind, case, rank) for case in CASES}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=KINDS)
def parallel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    multiprocessing.spawn(work, (str(folder), request.param), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process_on_the_kept_examples(case, parallel):
    (got, first), (other, second) = (ranks[case] for ranks in parallel)
    assert all(torch.equal(g, other[n]) for n, g in got.items())
    assert len(first) == len(second)
    x, y = examples()
    for layer in dict.fromkeys(d.layer for d in first):
        model: nn.Module = seeded(Network)
        for a, b in zip(first, second, strict=True):
            if a.layer != layer:
                continue
            assert (a.micro, a.layer) == (b.micro, b.layer) and len(a.kept) != len(b.kept)
            kept = [int(i) for i in a.kept + b.kept]
            share = len(kept) / 6 if CASES[case]["denominator"] == "fixed" else 1.0
            (F.cross_entropy(model(x[kept]), y[kept]) * share).backward()
        mine = [n for n in got if not layer or n.rpartition(".")[0] == layer]
        right = {n: p.grad for n, p in model.named_parameters() if n in mine and p.grad is not None}
        assert_gradients({n: got[n] for n in mine}, right)


def test_scores_are_those_of_one_process(parallel):
    x, y = examples()
    model = seeded(Network)
    grads = lambda rows, scale: torch.cat(  # noqa: E731
        [
            g.flatten()
            for g in torch.autograd.grad(
                F.cross_entropy(model(x[rows]), y[rows]) * scale, list(model.parameters())
            )
        ]
    )
    v = grads([12, 13], 1.0)
    for ranks in parallel:
        (decision,) = ranks["fixed"][1]
        right = [float(grads([int(i)], 1 / 3) @ v) for i in decision.ids]
        assert decision.scores == pytest.approx(right, rel=1e-9)
