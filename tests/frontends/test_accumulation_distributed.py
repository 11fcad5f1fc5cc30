"""Processes that reduce gradients once a step (``no_sync``): selection trains as one does on the kept examples."""

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from attrax.frontends import capture, live, select, trainer_options
from attrax.frontends.loop.capture import Capture
from attrax.frontends.loop.selection import Decision

from .oracle import assert_gradients
from .parallel import (
    CLASSIFY,
    KINDS,
    LM,
    Network,
    examples,
    fsdp1,
    fsdp2,
    refusal,
    seeded,
    unreduced,
    weights,
)
from .test_selection_distributed import of_examples, uneven

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS, STEPS, OWN, RATE = 2, 2, 3, 0.1


def gathered(model: nn.Module) -> nn.Module:
    """Parameters stay gathered from a backward that is not reduced to the next forward."""
    model = fsdp2(model)
    model.stays_gathered = True  # type: ignore[assignment]
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **KINDS,
    "gradients": partial(fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "replicas": partial(fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD),
    "gathered": gathered,
}


@dataclass(frozen=True)
class Case:
    """What a selection divides by, whether layers decide apart, and which backwards of a step are reduced."""

    denominator: str
    scope: str = "global"
    reduced: tuple[bool, ...] = (False, False, True)


CASES = {
    "fixed": Case("fixed"),
    "examples": Case("examples"),
    "tokens": Case("tokens"),
    "layers": Case("tokens", scope="layer"),
    "some": Case("tokens", reduced=(True, False, False, True)),
}

TRAINED = [(kind, name) for kind in WRAPS for name in (CASES if kind in KINDS else ["examples", "layers"])]


def documents() -> tuple[Tensor, Tensor]:
    """Ids and labels of documents of unequal length."""
    gen = torch.Generator().manual_seed(2)
    ids, lengths = torch.randint(0, 11, (90, 6), generator=gen), torch.randint(2, 7, (90,), generator=gen)
    return ids, ids.masked_fill(torch.arange(6) >= lengths[:, None], -100)


def terms(rows: list[int]) -> int:
    return int((documents()[1][rows, 1:] != -100).sum())


def rows_of(case: Case, step: int) -> list[list[int]]:
    """The rows of all processes in each backward of a step."""
    n, rows = len(case.reduced), OWN * dist.get_world_size()
    return [list(range((step * n + k) * rows, (step * n + k + 1) * rows)) for k in range(n)]


def losses_of(model: Any, batch: Any) -> Tensor:
    """Loss of each document."""
    logits = model(batch["ids"], labels=batch["labels"], num_items_in_batch=torch.tensor(1))["logits"]
    return F.cross_entropy(
        logits[:, :-1].mT, batch["labels"][:, 1:], ignore_index=-100, reduction="none"
    ).sum(1)


def total(model: Any, case: Case, rows: list[int]) -> Tensor:
    """The summed loss of some rows."""
    if case.denominator == "tokens":
        ids, labels = documents()
        return model(ids[rows], labels=labels[rows], num_items_in_batch=torch.tensor(1))["loss"]
    x, y = examples()
    return F.cross_entropy(model(x[rows]), y[rows], reduction="sum")


def made(case: Case) -> nn.Module:
    return seeded(LM if case.denominator == "tokens" else Network)


def target_of(case: Case) -> tuple[dict[str, Tensor], Callable[[Any, Any], Tensor]]:
    (x, y), (ids, labels) = examples(), documents()
    if case.denominator == "tokens":
        return {"ids": ids[80:82], "labels": labels[80:82]}, losses_of
    return {"x": x[80:82], "y": y[80:82]}, of_examples


def train(
    wrap: Callable[[nn.Module], nn.Module], case: Case, rank: int
) -> tuple[dict[str, Tensor], list[Decision]]:
    """Parameters after some steps, and what this process decided."""
    model = wrap(made(case))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    decisions: list[Decision] = []
    now: list[int] = []
    ranks = dist.get_world_size()
    with selecting(model, case, now, decisions):
        for step in range(STEPS):
            batches = rows_of(case, step)
            size = terms(sum(batches, [])) / ranks if case.denominator == "tokens" else OWN
            for rows, reduced in zip(batches, case.reduced, strict=True):
                now[:] = rows[rank::ranks]
                with contextlib.nullcontext() if reduced else unreduced(model):
                    backward(model, case, now, size)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), decisions


def selecting(
    model: nn.Module, case: Case, now: list[int], decisions: list[Decision], accelerator: Any = None
) -> Capture:
    """A capture that keeps what a case keeps of the rows of now."""
    target, loss = target_of(case)
    options: dict[str, Any] = {"denominator": case.denominator, "scope": case.scope}
    keep = select(target, uneven, loss=loss, sink=decisions.append, **options)
    how: Any = None if case.denominator == "tokens" else "example_mean"
    how = how if accelerator is None else trainer_options(accelerator, loss=how)["loss"]
    return capture(model, after_backward=[keep], loss=how, ids=lambda _: [str(i) for i in now], strict=True)


def accelerated(version: int, rank: int) -> tuple[dict[str, Tensor], list[Decision]]:
    """The same with accelerate, which reduces in the last backward of a step and divides losses by their number."""
    case, model = CASES["examples"], made(CASES["examples"])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(case.reduced))
    for state in (PartialState(), accelerator.state):  # accelerate shards on other devices only
        state.distributed_type, state.device = DistributedType.FSDP, torch.device("cpu")
    parts: Any = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Part"]}
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, use_orig_params=True, cpu_ram_efficient_loading=False, **parts
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    decisions: list[Decision] = []
    now: list[int] = []
    with selecting(model, case, now, decisions, accelerator):
        for step in range(STEPS):
            for rows in rows_of(case, step):
                now[:] = rows[rank::RANKS]
                with accelerator.accumulate(model):
                    accelerator.backward(total(model, case, now) / OWN)
                    optimizer.step()
                    optimizer.zero_grad()
    return weights(model), decisions


def backward(model: Any, case: Case, rows: list[int], size: float) -> None:
    if case.denominator == "tokens":
        ids, labels = documents()
        model(ids[rows], labels=labels[rows], num_items_in_batch=torch.tensor(float(size)))["loss"].backward()
    else:
        (total(model, case, rows) / size).backward()


def watched(wrap: Callable[[nn.Module], nn.Module], capturing: bool, between: bool) -> dict[str, Tensor]:
    """Parameters after steps of a backward that is not reduced and one that is, with a live source between them."""
    model, (x, y) = wrap(seeded(Network)).eval(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    data = [{"x": x[60:62], "y": y[60:62], "example_ids": ["a", "b"]}]
    with (
        capture(model, loss="example_mean", strict=True) if capturing else contextlib.nullcontext() as running
    ):
        for step in range(STEPS):
            first, second = ([2 * k + dist.get_rank(), 2 * k + 6] for k in (step, step + 10))
            with unreduced(model):
                F.cross_entropy(model(x[first]), y[first]).backward()
            if between:
                with running.paused() if running else contextlib.nullcontext():
                    list(live(model, data, CLASSIFY).map(lambda *_: None))
            F.cross_entropy(model(x[second]), y[second]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def refusals() -> list[str]:
    """What a selection says of backwards that it cannot undo."""

    def part_of_it(model: Any) -> None:
        model.set_requires_gradient_sync(False, recurse=False)

    def between_replicas(model: Any) -> None:
        model.set_requires_all_reduce(False)

    def summed(model: Any) -> None:
        model.set_gradient_divide_factor(1.0)

    mesh, case = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards")), CASES["fixed"]
    found = []
    for change in (part_of_it, between_replicas, summed):
        model: Any = seeded(Network)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        change(model)
        with selecting(model, case, [0, 1], []):
            found.append(refusal(lambda model=model: backward(model, case, [0, 1], 2.0)))
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    where = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }
    os.environ.update({name: str(value) for name, value in where.items()})
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found: dict[Any, Any] = {(kind, name): train(WRAPS[kind], CASES[name], rank) for kind, name in TRAINED}
    found["refusals"] = refusals()
    found |= {("accelerate", str(version)): accelerated(version, rank) for version in (1, 2)}
    found |= {
        (kind, "watched"): [watched(wrap, *how) for how in ((False, False), (True, True))]
        for kind, wrap in WRAPS.items()
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("together")
    multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def mean_gradients(model: nn.Module, case: Case, kept: list[list[int]], ranks: int) -> dict[str, Tensor]:
    """The gradient of a step whose backwards keep these rows of what all processes had."""
    if case.denominator == "tokens":
        loss: Any = sum(total(model, case, rows) for rows in kept) / terms(sum(kept, []))
    else:
        sizes = [OWN * ranks if case.denominator == "fixed" else len(rows) for rows in kept]
        loss = sum(total(model, case, rows) / size for rows, size in zip(kept, sizes, strict=True))
    names, own = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, own), strict=True))


def assert_trained(case: Case, ranks: list[Any], share: float = 1.0) -> None:
    """One process gets there with the gradients of what all have kept."""
    got, decided = ranks[0][0], [decisions for _, decisions in ranks]
    assert all(torch.equal(w, got[n]) for other, _ in ranks for n, w in other.items())
    model = made(case)
    begun = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        grads = {}
        for layer in dict.fromkeys(d.layer for d in decided[0]):
            backwards = [
                ds for ds in zip(*decided, strict=True) if (ds[0].step, ds[0].layer) == (step, layer)
            ]
            kept = [[int(i) for d in ds for i in d.kept] for ds in backwards]
            assert len(kept) == len(case.reduced)
            assert all(len({len(d.kept) for d in ds}) > 1 for ds in backwards), (
                "processes keep different numbers"
            )
            found = mean_gradients(model, case, kept, len(ranks))
            grads |= {n: share * g for n, g in found.items() if not layer or n.rpartition(".")[0] == layer}
        for n, p in model.named_parameters():
            p.grad = grads[n]
        optimizer.step()
    moved = {n: p.detach() - begun[n] for n, p in model.named_parameters()}
    assert_gradients({n: w - begun[n] for n, w in got.items()}, moved)


@pytest.mark.parametrize(("kind", "name"), TRAINED)
def test_parameters_are_those_of_one_process_on_the_kept_examples(kind, name, parallel):
    assert_trained(CASES[name], [ranks[kind, name] for ranks in parallel])


@pytest.mark.parametrize("kind", WRAPS)
def test_capture_and_live_sources_leave_training_as_it_is(kind, parallel):
    for plain, *others in (ranks[kind, "watched"] for ranks in parallel):
        assert all(torch.equal(w, plain[n]) for other in others for n, w in other.items())


def test_backwards_that_leave_no_mean_are_refused(parallel):
    right = ("some of its parts", "not over replicas", "set_gradient_divide_factor")
    for ranks in parallel:
        assert all(part in text for part, text in zip(right, ranks["refusals"], strict=True))


@pytest.mark.parametrize("version", ["1", "2"])
def test_accelerate_accumulates(version, parallel):
    assert_trained(CASES["examples"], [ranks["accelerate", version] for ranks in parallel], 1 / 3)
