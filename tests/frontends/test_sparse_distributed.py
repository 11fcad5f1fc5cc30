"""SparseAdam on two replicas: directions, records and selection are those of one process that has all examples."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from attrax.core import Block, Directions, Step
from attrax.frontends import capture, record, select

from .models import seeded
from .oracle import assert_gradients, block_gradients
from .parallel import ddp
from .test_sparse import Words, keep_some, loss_of, make, only, per_example, words

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS, ROWS, STEPS = 2, 8, 6


def rows_of(rank: int | None) -> list[int]:
    return list(range(ROWS)) if rank is None else list(range(rank, ROWS, RANKS))


def train(model: Any, rank: int | None, selected: bool, accumulate: int = 1) -> dict[str, Any]:
    """Directions by step and example, what was recorded, and the parameters at the end."""
    own, blocks, steps = rows_of(rank), list[Block](), list[Step]()
    batches = words(STEPS, ROWS)
    how: dict[str, Any] = {"ids": lambda inputs: [str(i) for i in own], "loss": "example_mean"}
    if selected:
        how["after_backward"] = [select(batches[0], keep_some, loss=per_example, denominator="fixed")]  # type: ignore[arg-type]
    else:
        how |= {"directions": Directions("sum"), "sinks": [blocks.append]}
    moving = make(model)
    with capture(model, trajectory=record(steps.append), **how):
        for k, batch in enumerate(batches, 1):
            with contextlib.nullcontext() if k % accumulate == 0 else model.no_sync():
                loss_of(model, only(batch, own)).backward()
            if k % accumulate == 0:
                for optimizer in moving:
                    optimizer.step()
                model.zero_grad()
    found = {
        f"{b.examples.step} {name}": {n: g[i] for n, g in block_gradients(b).items()}
        for b in blocks
        for i, name in enumerate(b.examples.ids)
    }
    touched = [step.touched["emb.weight"] for step in steps]
    end = {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}
    moments = list(moving[0].state.values())
    return {"directions": found, "touched": touched, "end": end, "m": moments[0]["exp_avg"]}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    cases = ((False, 1), (True, 1), (True, 2))
    found = [train(ddp(seeded(Words)), rank, *case) for case in cases]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def literal(kept: list[int], accumulate: int) -> tuple[dict[str, Tensor], Tensor]:
    """Training on some rows of every batch, with the denominator of all."""
    model = seeded(Words)
    moving = make(model)
    for k, batch in enumerate(words(STEPS, ROWS), 1):
        (per_example(model, only(batch, kept)).sum() / ROWS).backward()
        if k % accumulate == 0:
            for optimizer in moving:
                optimizer.step()
            model.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}, next(iter(moving[0].state.values()))[
        "exp_avg"
    ]


def test_two_replicas(tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path),), nprocs=RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    right = train(seeded(Words), None, False)
    assert len(right["directions"]) == STEPS * ROWS
    both = first[0]["directions"] | second[0]["directions"]
    assert both.keys() == right["directions"].keys()
    for key, expected in right["directions"].items():
        assert_gradients(both[key], expected, 1e-8)
    assert all(torch.equal(a, b) for a, b in zip(first[0]["touched"], right["touched"], strict=True))
    kept = [i for rank in range(RANKS) for i in rows_of(rank)[::2]]
    for k, accumulate in ((1, 1), (2, 2)):
        end, m = literal(kept, accumulate)
        for one in (first[k], second[k]):
            assert_gradients(one["end"], end, 1e-9)
            assert (one["m"] - m).abs().max() <= 1e-12
