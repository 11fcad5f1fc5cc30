"""A tiny training with OLMo-core, as its users write it; also a program, for several processes under torchrun."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed import parallel
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import (
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig
from torch import Tensor

import attrax
from attrax.core import Block, stored
from attrax.frontends import BackwardEvent, trainer_callback, trainer_options

from .trainers import Check, keep_double, trained_alike, whole

LENGTH, VOCAB, STEPS = 16, 41, 20
RATE, CLIP = 1e-2, 0.2
MODES, LOOKED_AT = ("ddp", "fsdp"), (0, 7, 19)
SCHEDULE = CosWithWarmup(warmup=2)


def model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A transformer of two layers."""
    torch.manual_seed(0)
    config = TransformerConfig.llama_like(d_model=16, n_layers=2, n_heads=2, vocab_size=VOCAB)
    made = config.build(init_device=device).to(dtype)
    made.dtype = dtype  # in which FSDP gathers parameters
    return made


def loss(model: Any, row: Mapping[str, Tensor]) -> Tensor:
    """The sum over the labels of a row of their negative log-likelihood."""
    logits = model(row["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, row["labels"].flatten(), ignore_index=-100, reduction="sum")


def rows(folder: Path) -> dict[str, Tensor]:
    """The sequences of the data as a batch, with all that OLMo-core calls a model with for each."""
    tokens = torch.from_numpy(np.fromfile(folder / "tokens.npy", np.uint8)).view(-1, LENGTH).long()
    mask = torch.from_numpy(np.fromfile(folder / "labels.npy", np.bool_)).view(-1, LENGTH)
    labels = F.pad(tokens.masked_fill(~mask, -100)[:, 1:], (0, 1), value=-100)
    return {"input_ids": tokens, "labels": labels, "label_mask": mask, "index": torch.arange(len(tokens))}


def written(path: Path, values: Any) -> str:
    """A file of values, which several processes may write at once."""
    own = path.with_suffix(f".{os.getpid()}")
    values.tofile(own)
    os.replace(own, path)
    return str(path)


def trainer(
    net: Any, folder: Path, steps: int = STEPS, mode: str | None = None, callbacks: Any = None
) -> Any:
    """A trainer of the model: 4 sequences a process in micro-batches of 2, some labels masked, gradients clipped."""
    draws = np.random.default_rng(0)
    tokens = written(folder / "tokens.npy", draws.integers(3, VOCAB, 6000, dtype=np.uint8))
    labels = written(folder / "labels.npy", draws.random(6000) < 0.7)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=RATE, fused=False),
        dp_config=None if mode is None else TransformerDataParallelConfig(name=DataParallelType(mode)),
        max_grad_norm=CLIP,
        scheduler=SCHEDULE,
        compile_model=False,
    ).build(net)
    tokenizer = TokenizerConfig(vocab_size=VOCAB, eos_token_id=2, pad_token_id=0, bos_token_id=1)
    data = NumpyFSLDatasetConfig(
        paths=[tokens],
        label_mask_paths=[labels],
        sequence_length=LENGTH,
        tokenizer=tokenizer,
        work_dir=str(folder / "work"),
    ).build()
    loader = NumpyDataLoaderConfig(
        global_batch_size=4 * LENGTH * get_world_size(), seed=0, num_workers=0
    ).build(data, dp_process_group=module.dp_process_group)
    config = TrainerConfig(
        save_folder=str(folder / "save"),
        work_dir=str(folder / "work"),
        save_overwrite=True,
        max_duration=Duration.steps(steps),
        metrics_collect_interval=5,
        no_checkpoints=True,
    )
    for name, callback in (callbacks or {}).items():
        config = config.with_callback(name, callback)
    return config.build(module, loader)


def run(mode: str, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train in float64 without a capture, in one, and with the callback, whose blocks are those of the capture.

    Returns:
        What this process has captured; parameters, and gradients before they are clipped, of some steps.
    """
    noted: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
    files = attrax.store(folder / mode, run=mode)
    build = lambda device="meta": model(device, torch.float64)  # noqa: E731

    def note(event: BackwardEvent) -> None:
        if event.step in LOOKED_AT:
            both = lambda p: (whole(p.detach()).clone(), whole(p.grad).clone())  # noqa: E731
            noted[event.step] = {name: both(p) for name, p in event.model.named_parameters()}

    def train(net: Any, callbacks: Any = None) -> Any:
        patch.setattr(parallel, "_WORLD_MESH", None)  # of which OLMo-core makes one a process
        made = trainer(net, folder, mode=mode, callbacks=callbacks)
        return made.fit, {**trainer_options(made), "sinks": [files], "after_backward": [note]}

    held, running = trained_alike(build, train, lambda _: Check(build("cpu"), loss, every=1))
    mock, used = held.blocks[:2], held.blocks[2:]  # OLMo-core warms up with a batch
    again: list[Block] = []
    start, _ = train(build(), {"attrax": trainer_callback("olmo_core", sinks=[again.append])})
    start()
    for one, other in zip(used, again, strict=True):
        assert one.examples.ids == other.examples.ids
        pairs = zip(stored(one.grads).items(), stored(other.grads).items(), strict=True)
        assert all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)
    return {
        "checked": held.checked,
        "share": running.coverage.share,
        "mock": [b.examples for b in mock],
        "used": [b.examples for b in used],
        "noted": noted,
    }


def main(folder: Path) -> None:
    """One process of two."""
    prepare_training_environment(backend="gloo", seed=0)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        keep_double(patch)
        for mode in MODES:
            torch.save(run(mode, folder, patch), folder / f"{mode}{dist.get_rank()}.pt")
    teardown_training_environment()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
