"""Processes that train, attribute and fail together; each writes down what it got."""

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import attrax
from attrax.core import Block, GradTree, counted_once, factorized, gram, stored
from attrax.core.factorization import find_rule
from attrax.core.products import sq_norms_leaf
from attrax.core.shards import Cut
from attrax.frontends.model.distributed import Processes
from attrax.frontends.model.fingerprints import model_fingerprint
from attrax.frontends.model.sharding import gradients, is_sharded, named, pieces, whole
from attrax.frontends.states import save_state

STEPS, PER_STEP, REPEATED = 20, 8, 7
CLASSIFY = attrax.classification()


class Part(nn.Module):
    """A part that is sharded as a whole: two layers, a norm, and one without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)
        self.gain = Gain(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(self.norm(x + self.down(torch.tanh(self.up(x)))))


class Gain(nn.Module):
    """Captured by running it once more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.one


class Network(nn.Module):
    """Tokens and positions (looked up once for all examples), two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList([Part(), Part()])
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class LM(nn.Module):
    """A language model that returns its own mean loss, over `num_items_in_batch` terms where given."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.mix(self.tok(input_ids))))
        flat, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = F.cross_entropy(flat, wanted, ignore_index=-100, reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": logits}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def alone(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    policy, cpu = ModuleWrapPolicy({Part}), torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True, **options
    )


def fsdp2(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Part):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicas() -> DeviceMesh:
    """Two replicas of a model, each of which lies in shards on half of the processes."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}
HYBRID: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp1": lambda model: fsdp1(
        model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=replicas()
    ),
    "fsdp2": lambda model: fsdp2(model, replicas()),
}


@contextlib.contextmanager
def unreduced(model: Any) -> Iterator[None]:
    """Backwards inside it are not reduced."""
    if not isinstance(model, FSDPModule):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not hasattr(model, "stays_gathered"))
    yield
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)


def examples() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    n = STEPS * PER_STEP
    return torch.randint(0, 11, (n, 5), generator=gen), torch.randint(0, 3, (n,), generator=gen)


def dealt(rows: Iterable[int]) -> list[int]:
    """This process's share of some rows."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return list(rows)[rank::ranks]


def train(model: nn.Module, steps: list[list[int]], sinks: list[Any] | None = None) -> dict[str, Tensor]:
    """A loop with a mean loss on these rows; the parameters it ends with, whole."""
    x, y = examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    now: list[int] = []

    def loop() -> None:
        nonlocal now
        for now in steps:
            optimizer.zero_grad()
            F.cross_entropy(model(x[now]), y[now]).backward()
            optimizer.step()

    if sinks is None:
        loop()
    else:
        options = {"loss": "example_mean", "strict": True, "ids": lambda _: [str(i) for i in now]}
        with attrax.capture(model, sinks=sinks, **options):
            loop()
    return weights(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by the names of the model alone, gathered from all processes."""
    plain = (
        FullyShardedDataParallel.summon_full_params(model, writeback=False)
        if isinstance(model, FullyShardedDataParallel)
        else torch.no_grad()
    )
    with plain:
        named = {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}
        named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in named.items()}
        return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in named.items()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """What `.grad` holds, by the names of the model alone, gathered from all processes."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    flat, own = pieces(inner), named(inner)
    return {n: whole(g, flat.get(id(own[n]))).clone() for n, g in gradients(inner).items()}


def steps() -> list[list[int]]:
    return [dealt(range(s * PER_STEP, (s + 1) * PER_STEP)) for s in range(STEPS)]


def sampled() -> list[list[int]]:
    """One step on all of a sampler's rows, which it evens out by repeating the first ones."""
    if not dist.is_initialized():
        return [list(range(REPEATED))]
    return [list(DistributedSampler(range(REPEATED), shuffle=False))]


def batches(rows: list[int], size: int) -> list[dict[str, Any]]:
    x, y = examples()
    cuts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{"x": x[cut], "y": y[cut], "example_ids": [str(i) for i in cut]} for cut in cuts]


def attribute(model: nn.Module) -> dict[str, Any]:
    """Gradients of this process's share, the curvature of all shares, and scores of all examples."""
    ranks = attrax.processes()
    data = batches(dealt(range(9)), 2)  # one batch more on rank 0
    train, query = attrax.live(model, data, CLASSIFY), attrax.live(model, batches([90, 91, 92], 3), CLASSIFY)
    grads: dict[str, Any] = {}
    for known, leaves in train.map(lambda name, leaf, _: stored(GradTree({name: leaf}))):
        found = {n: w for leaf in leaves.values() for n, w in leaf.items()}
        grads |= {key: {n: w[i] for n, w in found.items()} for i, key in enumerate(known.ids)}
    curvature = attrax.fit_ekfac(train, ranks=ranks)
    found = {"influence": attrax.gather_scores(attrax.influence(curvature, train, query))}
    if not is_sharded(model):  # in the others, nothing but the source is different
        found |= {
            "kfac": attrax.kfac(train, query, ranks=ranks),
            "ekfac": attrax.ekfac(train, query, ranks=ranks),
            "logra": attrax.logra(train, query, dim=3, ranks=ranks),
            "graddot": attrax.gather_scores(attrax.graddot(train, query)),
        }
    return {"grads": grads, "curvature": curvature, "scores": found}


def interrupted(model: nn.Module, between: Callable[[nn.Module], object]) -> dict[str, Tensor]:
    """Two steps, with something between the backwards of the second."""
    x, y = examples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for now in steps()[:2]:
        optimizer.zero_grad()
        F.cross_entropy(model(x[now]), y[now]).backward()
        between(model)
        F.cross_entropy(model(x[now]), y[now]).backward()
        optimizer.step()
    return weights(model)


def token_mean(model: nn.Module) -> dict[str, Any]:
    """One step of documents of unequal length, with the loss of Hugging Face's trainer."""
    gen = torch.Generator().manual_seed(2)
    ids, lengths = torch.randint(0, 11, (8, 6), generator=gen), torch.tensor([6, 2, 5, 2, 6, 3, 4, 2])
    labels = ids.masked_fill(torch.arange(6) >= lengths[:, None], -100)
    terms = (lengths - 1).sum()
    own = dealt(range(8))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    blocks: list[Block] = []
    with attrax.capture(model, sinks=[blocks.append], ids=lambda _: [str(i) for i in own]):
        (model(ids[own], labels=labels[own], num_items_in_batch=terms)["loss"] * ranks).backward()
    (block,) = blocks
    grads = {
        n: w / block.examples.weight.reshape(-1, *[1] * (w.ndim - 1)) for n, w in stored(block.grads).items()
    }
    return {
        "ids": block.examples.ids,
        "weight": block.examples.weight,
        "tokens": block.examples.tokens,
        "grads": {key: {n: w[i] for n, w in grads.items()} for i, key in enumerate(block.examples.ids)},
    }


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    """What all processes say where one of them, or all, did something wrong."""
    rank, ranks = dist.get_rank(), Processes()
    flat = FullyShardedDataParallel(seeded(Network), device_id=torch.device("cpu"), use_orig_params=False)

    def fails(task: int) -> int:
        if task == 1:
            raise ValueError("no such layer")
        return task

    model = seeded(Network)
    share = batches([0, 1], 2) if rank == 0 else []
    return tensor_parallel() | {
        "flat": refusal(lambda: attrax.capture(flat)),
        "task": refusal(lambda: ranks.dealt(fails, {"a": 0, "b": 1, "c": 2}, float)),
        "shapes": refusal(lambda: ranks.total({"w": torch.ones(2 + rank)})),
        "empty": refusal(lambda: attrax.fit_kfac(attrax.live(model, share, CLASSIFY), ranks=ranks)),
    }


def results(wrap: Callable[[nn.Module], nn.Module], folder: Path | None) -> dict[str, Any]:
    """Everything that is compared between one process and several."""

    def sink(name: str) -> list[Any]:
        blocks: list[Block] = []
        kept[name] = blocks
        return [blocks.append] if folder is None else [attrax.store(folder / name, run="all")]

    kept: dict[str, list[Block]] = {}
    model = wrap(seeded(Network))
    found = {
        "coverage": str(attrax.capture(model).coverage),
        "fingerprint": model_fingerprint(
            model.module if isinstance(model, DistributedDataParallel) else model
        ),
        "captured": train(model, steps(), sink("steps")),
        "plain": train(wrap(seeded(Network)), steps()),
        "sampled": train(wrap(seeded(Network)), sampled(), sink("sampled")),
        "attributed": attribute(wrap(seeded(Network)).eval()),
        "tokens": token_mean(wrap(seeded(LM))),
        "interrupted": interrupted(
            wrap(seeded(Network)), lambda model: list(source(model).map(lambda *_: None))
        ),
        "uninterrupted": interrupted(wrap(seeded(Network)), lambda _: None),
    }
    return found | {"blocks": kept}


class Wide(nn.Module):
    """Two layers that are cut in tensor parallel training, and a norm that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


CUTS: dict[str, Cut] = {"up": "outputs", "down": "inputs", "norm": "none"}  # of weights


def leaves(model: nn.Module) -> GradTree:
    """What this process counts of the gradients of three sequences, from what its layers see."""
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3)).double()
    rank = dist.get_rank()
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def local(t: Tensor) -> Tensor:
        t = t.detach()
        return t.to_local() if isinstance(t, DTensor) else t

    for name in CUTS:

        def keep(_: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            output.register_hook(lambda g: seen.update({name: (local(args[0]), local(g))}))

        model.get_submodule(name).register_forward_hook(keep)
    model(x).square().sum().backward()
    made = {n: factorized(f"{n}.weight", *seen[n], bias=f"{n}.bias") for n in ("up", "down")}
    norm = find_rule(model.get_submodule("norm"))
    assert norm is not None
    made |= norm.factorize(model.get_submodule("norm"), *seen["norm"])
    whole = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    if len(whole) == 6:
        return GradTree(made)
    counted = {n: counted_once(leaf, CUTS.get(n, "none"), rank) for n, leaf in made.items()}
    return GradTree({n: leaf for n, leaf in counted.items() if leaf is not None})


def products(model: nn.Module) -> dict[str, Tensor]:
    tree = leaves(model)
    return {"gram": gram(tree, tree), "squares": sum(sq_norms_leaf(leaf) for leaf in tree.values())}


def tensor_parallel() -> dict[str, Any]:
    """Products of a model that is cut over the processes, and of one that is not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    cut = parallelize_module(seeded(Wide), mesh, plan)
    return {"cut": Processes().total(products(cut)), "whole": products(seeded(Wide))}


def source(model: nn.Module) -> Any:
    return attrax.live(model.eval(), batches(dealt(range(8)), 2), CLASSIFY)


def work(rank: int, folder: str, ranks: int, hybrid: bool = False) -> None:
    """One process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.filterwarnings("ignore", message="live: the parameters of FullyShardedDataParallel")
    if rank == 0:
        torch.save(results(alone, None), f"{folder}/alone.pt")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    for kind, wrap in (HYBRID if hybrid else KINDS).items():
        torch.save(results(wrap, Path(folder) / kind), f"{folder}/{kind}{rank}.pt")
    torch.save(refusals(), f"{folder}/refusals{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def killed(rank: int, folder: str, kind: str) -> None:
    """Two processes train and write; the second is killed in its fourth step, the first says what it saw."""
    _together(rank, folder)
    sink = attrax.store(f"{folder}/store", run="all", shard_examples=1, buffer_bytes=0)
    model, seen = KINDS[kind](seeded(Network)), 0

    def watched(block: Block) -> None:
        nonlocal seen
        sink(block)
        seen += 1
        if seen == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Path(f"{folder}/error").write_text(refusal(lambda: train(model, steps(), [watched])))
    sink.close()


def killed_in_a_fit(rank: int, folder: str) -> None:
    """The second of two processes is killed while both attribute."""
    _together(rank, folder)

    query = source(seeded(Network))
    blocks = [Block(GradTree(dict(x)), examples) for examples, x in query.map(lambda _, leaf, __: leaf)]

    class Dying(attrax.Blocks):
        def map(self, visit: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().map(visit)

    error = refusal(lambda: attrax.ekfac(Dying(blocks), query, ranks=attrax.processes()))
    Path(f"{folder}/error").write_text(error)


def _together(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meet, wait = f"file://{folder}/meet", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=wait)


def saved(rank: int, folder: str) -> None:
    """Each of two processes of sharded training saves the curvature and the scores; the second has a batch less."""
    _together(rank, folder)
    ranks, mine = attrax.processes(), dealt(range(8))
    model = fsdp2(seeded(Network)).eval()
    train = attrax.live(model, batches(mine[: len(mine) - 2 * rank], 2), CLASSIFY)
    curvature = attrax.fit_ekfac(train, ranks=ranks)
    save_state(curvature, f"{folder}/curvature{rank}.safetensors")
    own = attrax.self_influence(train, curvature=curvature)
    attrax.write_scores(attrax.gather_scores(own), f"{folder}/scores{rank}.parquet")
    dist.barrier()
    dist.destroy_process_group()


def raising(rank: int, folder: str) -> None:
    """The second of two processes of sharded training raises in the middle of a fit."""
    _together(rank, folder)

    class Failing(attrax.Blocks):
        def map(self, visit: Any) -> Any:
            yield from super().map(visit)
            if rank == 1:
                raise KeyError("a row that is not there")

    blocks = [
        Block(GradTree(dict(x)), examples)
        for examples, x in source(seeded(Network)).map(lambda _, leaf, __: leaf)
    ]
    try:
        attrax.fit_ekfac(Failing(blocks), ranks=attrax.processes())
    except (KeyError, RuntimeError) as error:
        Path(f"{folder}/error{rank}").write_text(f"{type(error).__name__}: {error}")
