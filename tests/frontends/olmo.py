"""A tiny training with OLMo-core, as its users write it; also a program, for several processes under torchrun."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import (
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

LENGTH, VOCAB = 16, 41


def model(device: str = "cpu") -> Any:
    """A transformer of two layers."""
    torch.manual_seed(0)
    config = TransformerConfig.llama_like(d_model=16, n_layers=2, n_heads=2, vocab_size=VOCAB)
    return config.build(init_device=device)


def trainer(net: Any, folder: Path, steps: int = 20, mode: str | None = None, callbacks: Any = None) -> Any:
    """A trainer of the model: 4 sequences in micro-batches of 2, gradients clipped."""
    tokens = folder / "tokens.npy"
    if not tokens.exists():
        made = np.random.default_rng(0).integers(3, VOCAB, 6000, dtype=np.uint16)
        made.tofile(folder / f"tokens.{os.getpid()}")
        os.replace(folder / f"tokens.{os.getpid()}", tokens)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=1e-2, fused=False),
        dp_config=None if mode is None else TransformerDataParallelConfig(name=DataParallelType(mode)),
        max_grad_norm=0.5,
        scheduler=CosWithWarmup(warmup_steps=2),
        compile_model=False,
    ).build(net)
    tokenizer = TokenizerConfig(vocab_size=VOCAB, eos_token_id=2, pad_token_id=0, bos_token_id=1)
    data = NumpyFSLDatasetConfig(
        paths=[str(tokens)], sequence_length=LENGTH, tokenizer=tokenizer, work_dir=str(folder / "work")
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=4 * LENGTH, seed=0, num_workers=0).build(
        data, dp_process_group=module.dp_process_group
    )
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


def main(mode: str, folder: Path, watched: bool) -> None:
    """One process of two: train, inside a capture or not, and note the parameters of this process."""
    import attrax

    prepare_training_environment(backend="gloo", seed=0)
    made, blocks, rank = trainer(model("meta"), folder, steps=4, mode=mode), [], os.environ["RANK"]
    net = made.train_module.model
    sinks = [blocks.append, attrax.store(folder / "store", run=mode)] if watched else []
    with attrax.capture(net, **attrax.trainer_options(made), sinks=sinks) if watched else nullcontext():
        made.fit()
    local = [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in net.parameters()]
    torch.save(local, folder / f"{'watched' if watched else 'alone'}{rank}.pt")
    report = {"blocks": len(blocks), "examples": sum(len(b.examples) for b in blocks)}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    teardown_training_environment()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "watched")
