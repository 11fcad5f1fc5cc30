"""Processes that train sharded models in mixed precision, and one process with a copy of the model in bfloat16."""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)

import attrax
from attrax.core import Block
from attrax.frontends.loop.selection import Decision

from .parallel import Network, batches, dealt, examples, fsdp1, steps, unreduced, weights, whole_gradients
from .test_selection_distributed import uneven

LOW, ROWS = torch.bfloat16, 8


def flat(model: nn.Module, **options: Any) -> nn.Module:
    return fsdp1(model, mixed_precision=MixedPrecision(LOW, torch.float32, **options))


def sharded(model: Any, *also: str, **options: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32, **options)
    for module in (*model.blocks, *(model.get_submodule(path) for path in also)):
        fully_shard(module, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp1": flat,
    "fsdp1 low gradients": partial(flat, keep_low_precision_grads=True),
    "fsdp2": sharded,
    "fsdp2 wide output": lambda model: sharded(model, "head", output_dtype=torch.float32),
}
SELECTIONS: list[tuple[str, tuple[bool, ...]]] = [("fixed", (True,)), ("examples", (False, False, True))]


def network() -> nn.Module:
    """In float32."""
    torch.manual_seed(0)
    return Network()


def losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="none")


def mean(model: Any, rows: list[int]) -> Tensor:
    x, y = examples()
    return losses(model, {"x": x[rows], "y": y[rows]}).mean()


def captured(model: nn.Module, rows: list[int], folder: Path | None = None) -> dict[str, Any]:
    """Gradients of this process's examples, and `.grad`."""
    blocks: list[Block] = []
    sinks: list[Any] = [blocks.append]
    if folder is not None:
        sinks.append(attrax.store(folder, run="all"))
    how: dict[str, Any] = {"loss": "example_mean", "strict": True, "ids": lambda _: [str(i) for i in rows]}
    with attrax.capture(model, sinks=sinks, **how):
        mean(model, rows).backward()
    return {"blocks": blocks, "grad": whole_gradients(model)}


def train(model: nn.Module, watched: bool) -> dict[str, Tensor]:
    """Parameters after twenty steps, with a capture around them or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # AdamW takes no low gradients

    def loop() -> None:
        for now in steps():
            optimizer.zero_grad()
            mean(model, now).backward()
            optimizer.step()

    if watched:
        with attrax.capture(model, sinks=[lambda _: None], loss="example_mean", strict=True):
            loop()
    else:
        loop()
    return weights(model)


def attribute(model: nn.Module) -> dict[str, Any]:
    """The curvature of all processes' examples, and scores."""
    ranks = attrax.processes()
    data = attrax.live(model, batches(dealt(range(9)), 2), losses)
    queries = attrax.live(model, batches([90, 91, 92], 3), losses)
    curvature = attrax.fit_kfac(data, ranks=ranks)
    return {
        "curvature": curvature,
        "scores": attrax.gather_scores(attrax.influence(curvature, data, queries)),
    }


def select(model: Any, denominator: Any, reduced: tuple[bool, ...]) -> dict[str, Any]:
    """`.grad` after backwards that a selection has changed, and its decisions."""
    x, y = examples()
    decisions: list[Decision] = []
    now: list[int] = []
    target = {"x": x[80:82], "y": y[80:82]}
    keep = attrax.select(target, uneven, loss=losses, sink=decisions.append, denominator=denominator)
    how: dict[str, Any] = {"loss": "example_mean", "ids": lambda _: [str(i) for i in now], "strict": True}
    with attrax.capture(model, after_backward=[keep], **how):
        for k, now in enumerate(dealt(range(6 * k, 6 * k + 6)) for k in range(len(reduced))):
            with contextlib.nullcontext() if reduced[k] else unreduced(model):
                mean(model, now).backward()
    return {"grad": whole_gradients(model), "decisions": decisions}


def results(wrap: Callable[[nn.Module], nn.Module], folder: Path | None) -> dict[str, Any]:
    """What is compared between one process and several."""
    return {
        "captured": captured(wrap(network()), dealt(range(ROWS)), folder),
        "attributed": attribute(wrap(network()).eval()),
    }


def work(rank: int, folder: str, ranks: int) -> None:
    """One process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if rank == 0:
        torch.save(results(lambda model: model.to(LOW), None), f"{folder}/alone.pt")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    for kind, wrap in KINDS.items():
        found = results(wrap, Path(folder) / kind)
        found |= {"plain": train(wrap(network()), False), "watched": train(wrap(network()), True)}
        found["selected"] = {how: select(wrap(network()), *how) for how in SELECTIONS}
        torch.save(found, f"{folder}/{kind}{rank}.pt")
    dist.destroy_process_group()
