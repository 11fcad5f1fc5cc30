"""Language models trained on several processes as users do it; started by torchrun, see `test_distributed_llms`."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import attrax
from attrax.frontends.loop.capture import StepEvent

from .llms import float64

VOCAB, STEPS, PER_RANK = 29, 4, 3
SCRIPT_STEPS, LOOKED_AT = 20, (0, 7, 19)
MODES = ("ddp", "fsdp1", "fsdp2")
AVERAGED = (True, False)


def llama() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def documents() -> tuple[Tensor, Tensor]:
    """Token ids padded with 0, and labels without the pads."""
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (120, 9), generator=gen)
    ids = ids.masked_fill(torch.arange(9) >= torch.randint(2, 10, (120, 1), generator=gen), 0)
    return ids, ids.masked_fill(ids == 0, -100)


def wrapped(mode: str, model: Any) -> nn.Module:
    if mode == "ddp":
        return DistributedDataParallel(model)
    if mode == "fsdp1":
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def loop(mode: str, path: Path, watched: bool) -> None:
    """The loop of a script, with a capture around it or not; notes parameters before some steps and after the last."""
    model = wrapped(mode, llama())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids, labels = documents()
    sinks = [attrax.store(path / mode, run="all")] if watched else []
    noted: dict[int, dict[str, Tensor]] = {}
    with attrax.capture(model, sinks=sinks, strict=True) if watched else nullcontext():
        for step in range(SCRIPT_STEPS):
            if step in LOOKED_AT:
                noted[step] = whole(model)
            now = slice(step * ranks * PER_RANK + rank, (step + 1) * ranks * PER_RANK, ranks)
            model(input_ids=ids[now], labels=labels[now]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    noted[SCRIPT_STEPS] = whole(model)
    if rank == 0:
        torch.save(noted, path / f"{mode}-{'watched' if watched else 'alone'}.pt")


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, put together from the shards of all processes."""
    flat = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False) if flat else nullcontext():
        return {
            name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): (
                p.full_tensor() if isinstance(p, DTensor) else p
            )
            .detach()
            .clone()
            for name, p in model.named_parameters()
        }


class Documents(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels = documents()
        return {"input_ids": ids[index], "labels": labels[index]}


def trainer(averaged: bool, path: Path) -> None:
    """An unmodified Hugging Face Trainer; the gradients that its optimizer uses are kept."""
    model = llama()
    seen: list[dict[str, Tensor]] = []

    def note(event: StepEvent) -> None:
        seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        str(path / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=PER_RANK,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=averaged,
        max_grad_norm=0.0,
        **options,
    )
    sinks = [attrax.store(path / f"trainer{averaged}", run="all")]
    with attrax.capture(model, sinks=sinks, before_step=[note], strict=True):
        Trainer(model=model, args=arguments, train_dataset=Documents()).train()
    if dist.get_rank() == 0:
        torch.save(seen, path / f"trainer{averaged}.pt")


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for averaged in AVERAGED:  # accelerate makes the process group
        trainer(averaged, Path(folder))
    float64(pytest.MonkeyPatch())
    torch.set_default_dtype(torch.float64)
    for mode in MODES:
        for watched in (False, True):
            loop(mode, Path(folder), watched)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
