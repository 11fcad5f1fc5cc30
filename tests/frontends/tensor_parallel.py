"""Processes that share the layers of a model (tensor parallel training); each writes down what it got."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import attrax
from attrax.core import Block, Blocks, Step, sq_norms_leaf
from attrax.core.ranks import ALONE
from attrax.frontends.model.distributed import Processes
from attrax.frontends.model.fingerprints import model_fingerprint

from .parallel import refusal, weights

STEPS, VOCAB = 2, 11
Make = Callable[[], nn.Module]
Cut = Callable[[nn.Module, DeviceMesh], nn.Module]


class Part(nn.Module):
    """A norm that is whole everywhere and two layers that are cut, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.gate(y)) * self.up(y))


class Network(nn.Module):
    """Tokens, two parts, a norm without a rule of its own, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.parts = nn.Embedding(VOCAB, 6), nn.ModuleList([Part(), Part()])
        self.norm, self.head = nn.RMSNorm(6), nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for part in self.parts:
            x = part(x)
        return self.head(self.norm(x)).mean(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().double()


def llama() -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        attention_bias=True,
    )
    return LlamaForCausalLM(config).double()


def planned(plan: Mapping[str, Any]) -> Cut:
    return lambda model, mesh: parallelize_module(model, mesh, dict(plan))


PAIR = {"parts.*.gate": ColwiseParallel(), "parts.*.up": ColwiseParallel(), "parts.*.down": RowwiseParallel()}
DEFAULT = PAIR | {
    "tok": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
GATHERED = {
    "tok": ColwiseParallel(output_layouts=Replicate()),
    "parts.*.gate": ColwiseParallel(use_local_output=False),
    "parts.*.up": ColwiseParallel(use_local_output=False),
    "parts.*.down": RowwiseParallel(),
    "head": RowwiseParallel(input_layouts=Replicate()),
}
SEQUENCE = {
    "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "parts.*.norm": SequenceParallel(),
    "parts.*": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
    ),
    "parts.*.gate": ColwiseParallel(input_layouts=Shard(1)),
    "parts.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "parts.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
LAYERS = {f"model.layers.*.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def hugging_face(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model's own plan, applied as ``from_pretrained(tp_plan="auto")`` does it."""
    plan: dict[str, str] = {}
    for pattern, style in (model.tp_plan | {"model.embed_tokens": "embedding_rowwise"}).items():
        path = pattern.replace("*", "0")
        own = [n for n, _ in model.get_submodule(path).named_parameters()]
        plan |= {path: style} | {f"{path}.{n}": style for n in own}
    return apply_tensor_parallelism(model, mesh, plan)


KINDS: dict[str, tuple[Make, Cut]] = {
    "default": (network, planned(DEFAULT)),
    "gathered": (network, planned(GATHERED)),
    "sequence": (network, planned(SEQUENCE)),
    "llama": (llama, planned(LAYERS)),
    "hugging face": (llama, hugging_face),
}


def rows(wanted: Iterable[int], rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """A batch of a process's share of some rows."""
    gen = torch.Generator().manual_seed(2)
    ids, y = torch.randint(0, VOCAB, (64, 6), generator=gen), torch.randint(0, 4, (64,), generator=gen)
    own = list(wanted)[rank::ranks]
    return {"x": ids[own], "y": y[own], "example_ids": [str(i) for i in own]}


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Summed loss of each example [B]."""
    if isinstance(model, Network):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    logits = model(input_ids=batch["x"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["x"][:, 1:], reduction="none").sum(1)


@dataclass(frozen=True)
class Share:
    """Which of the processes with different examples this one is among, and the processes themselves."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None

    def rows(self, *wanted: int) -> dict[str, Any]:
        return rows(wanted, self.rank, self.ranks)


ALL = Share()


def train(model: nn.Module, share: Share = ALL, **options: Any) -> dict[str, Tensor]:
    """A loop with a mean loss; the parameters it ends with, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    now: dict[str, Any] = {}

    def loop() -> None:
        nonlocal now
        for step in range(STEPS):
            now = share.rows(*range(4 * step, 4 * step + 4))
            optimizer.zero_grad()
            loss(model, now).mean().backward()
            optimizer.step()

    if not options:
        loop()
    else:
        options = {"loss": "example_mean", "strict": True, "ids": lambda _: now["example_ids"]} | options
        with attrax.capture(model, **options):
            loop()
    return weights(model)


def sources(model: nn.Module, share: Share = ALL, **options: Any) -> tuple[Any, Any]:
    data = [share.rows(0, 1, 2, 3), share.rows(4, 5)]
    return (
        attrax.live(model, data, loss, strict=True, **options),
        attrax.live(model, [rows(range(40, 42))], loss, strict=True, **options),
    )


def gradients(source: Any) -> dict[str, dict[str, Tensor]]:
    """Every example's gradient, by id and parameter."""
    grads: dict[str, dict[str, Tensor]] = {}
    for known, leaves in source.map(lambda name, leaf, _: attrax.stored(attrax.GradTree({name: leaf}))):
        found = {n: w for leaf in leaves.values() for n, w in leaf.items()}
        grads |= {key: {n: w[i] for n, w in found.items()} for i, key in enumerate(known.ids)}
    return grads


def squares(source: Any) -> dict[str, Tensor]:
    """Squared norm of every example's gradient, by id."""
    found: dict[str, Tensor] = {}
    for known, leaves in source.map(lambda name, leaf, _: sq_norms_leaf(leaf)):
        found |= dict(zip(known.ids, torch.stack(list(leaves.values())).sum(0), strict=True))
    return found


def scores(model: nn.Module, share: Share = ALL) -> dict[str, Any]:
    train, query = sources(model, share)
    ranks = attrax.processes(share.group) if share.ranks > 1 else ALONE
    together = lambda found: attrax.gather_scores(found, share.group) if share.ranks > 1 else found  # noqa: E731
    return {
        "kfac": attrax.kfac(train, query, fisher="empirical", ranks=ranks),
        "ekfac": attrax.ekfac(train, query, fisher="empirical", ranks=ranks),
        "logra": attrax.logra(train, query, dim=3, ranks=ranks),
        "gradcos": together(attrax.gradcos(train, query)),
    }


def shards(model: nn.Module) -> dict[str, Any]:
    """What adds up of each process's shards."""
    train_side, query = sources(model, tensor_parallel="shards")
    own = attrax.graddot(train_side, query)
    return {"graddot": attrax.sum_scores(own), "squares": Processes().total(squares(train_side))}


def captured_shards(model: nn.Module) -> dict[str, Tensor]:
    """Squared norms of the gradients of a training run, added up over the shards in its blocks."""
    blocks: list[Block] = []
    train(model, sinks=[blocks.append], tensor_parallel="shards")
    return Processes().total(squares(Blocks(blocks)))


def probed(model: nn.Module) -> list[Block]:
    """Gradients of queries at the steps of a training run."""
    queries: list[Block] = []
    train(model, before_step=[attrax.probe([rows(range(40, 42))], queries.append, loss)])
    return queries


def selected(model: nn.Module, share: Share = ALL) -> dict[str, Tensor]:
    """Training on the examples that serve a target, of their whole gradients."""
    keep = attrax.select(rows(range(40, 42)), lambda scores, _: scores > 0, loss=loss)
    return train(model, share, after_backward=[keep])


def moves(model: nn.Module, share: Share = ALL) -> dict[str, Any]:
    """Steps of the optimizer and directions of the examples, from one training run."""
    steps: list[Step] = []
    directions: list[Block] = []
    options = {"trajectory": attrax.record(steps.append), "directions": attrax.Directions("as_trained")}
    train(model, share, sinks=[directions.append], **options)
    return {"steps": steps, "directions": directions}


def common(make: Make, cut: Callable[[nn.Module], nn.Module], folder: Path | None) -> dict[str, Any]:
    """What is compared between one process and several for every plan."""
    blocks: list[Block] = []
    sink: Any = blocks.append if folder is None else attrax.store(folder, run="all", keep_factored=True)
    train_side, query = sources(cut(make()).eval())
    return {
        "fingerprint": model_fingerprint(cut(make())),
        "coverage": str(attrax.capture(cut(make())).coverage),
        "captured": train(cut(make()), sinks=[sink]),
        "plain": train(cut(make())),
        "blocks": blocks,
        "gradients": gradients(train_side),
        "squares": squares(train_side),
        "graddot": attrax.graddot(train_side, query),
    }


def further(cut: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """What is compared for one plan: nothing in it knows of plans."""
    return {
        "scores": scores(cut(network()).eval()),
        "probed": probed(cut(network())),
        "selected": selected(cut(network())),
        "moves": moves(cut(network())),
    }


def alone(folder: Path) -> None:
    for make in (network, llama):
        torch.save(common(make, lambda model: model, None), folder / f"{make.__name__}.pt")
    torch.save(further(lambda model: model), folder / "further.pt")


def work(rank: int, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    path = Path(folder)
    if rank == 0:
        alone(path)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for kind, (make, cut) in KINDS.items():
        here = lambda model, cut=cut: cut(model, mesh)  # noqa: E731
        found = common(make, here, path / kind) | {"shards": shards(here(make()))}
        torch.save(found, path / f"{kind}{rank}.pt")
    cut_default = lambda model: planned(DEFAULT)(model, mesh)  # noqa: E731
    found = further(cut_default) | {"shards": captured_shards(cut_default(network()))}
    torch.save(found, path / f"further{rank}.pt")
    torch.save(refusals(mesh, path / "unused"), path / f"refusals{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def refusals(mesh: DeviceMesh, path: Path) -> dict[str, str]:
    """What the front-ends say of what they cannot do."""
    model = planned(DEFAULT)(network(), mesh)
    part = planned(PAIR)(network(), mesh)
    train_side, query = sources(model.eval())
    own = attrax.graddot(train_side, query)
    per_rank = replace(own, ids=tuple(f"{dist.get_rank()} {i}" for i in own.ids))
    batch, sink = [rows(range(2))], attrax.store(path, run="unused")
    mine, half = Share(dist.get_rank(), 2), {n: how for n, how in SEQUENCE.items() if n != "parts.*.norm"}
    packed = apply_tensor_parallelism(
        network(), mesh, {"head": "packed_colwise", "head.weight": "packed_colwise"}
    )
    options = {"loss": "example_mean", "tensor_parallel": "shards"}
    return {
        "unknown": refusal(lambda: attrax.live(model, batch, loss, tensor_parallel="both")),
        "whole layer": refusal(lambda: attrax.capture(part, recompute=r"parts\.0$")),
        "uncut": refusal(lambda: attrax.capture(network(), **options)),
        "none cut": refusal(lambda: attrax.capture(model, include="norm", **options)),
        "directions": refusal(lambda: attrax.capture(model, directions=attrax.Directions("mean"), **options)),
        "store": refusal(lambda: attrax.capture(model, sinks=[sink], **options)),
        "functional": refusal(lambda: attrax.functional(model, batch, loss)),
        "forward": refusal(lambda: attrax.forward_scores(model, batch, query, loss)),
        "other examples": refusal(lambda: attrax.sum_scores(per_rank)),
        "other batches": refusal(lambda: train(planned(PAIR)(network(), mesh), mine, sinks=[print])),
        "half a sequence": refusal(lambda: train(planned(half)(network(), mesh), sinks=[print])),
        "half packed": refusal(lambda: attrax.capture(packed)),
    }


def over_both(rank: int, folder: str) -> None:
    """One of four processes: two share the layers of each replica, whose parameters FSDP spreads over the replicas."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    path = Path(folder)
    if rank == 0:
        alone(path)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    share = Share(mesh["data"].get_local_rank(), 2, mesh["data"].get_group())

    def cut(model: nn.Module) -> nn.Module:
        model = planned(DEFAULT)(model, mesh["layers"])
        for part in model.parts:
            fully_shard(part, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    sink = attrax.store(path / "both", run="all", keep_factored=True)
    train_side, query = sources(cut(network()).eval(), share)
    found = {
        "fingerprint": model_fingerprint(cut(network())),
        "captured": train(cut(network()), share, sinks=[sink]),
        "plain": train(cut(network()), share),
        "gradients": gradients(train_side),
        "graddot": attrax.gather_scores(attrax.graddot(train_side, query)),
        "scores": scores(cut(network()).eval(), share),
        "selected": selected(cut(network()), share),
        "moves": moves(cut(network()), share),
    }
    torch.save(found, path / f"both{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
