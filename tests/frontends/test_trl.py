"""Unmodified trainers of TRL inside a capture."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from attrax.frontends import capture, trainer_options
from attrax.frontends.trainers import Samples

from .loops import known
from .trainers import Check, label_losses, llama, texts, tokenizer, trained_alike

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "max_steps": 20,
}


def completions() -> Dataset:
    return Dataset.from_dict({"prompt": [x[:8] for x in texts()], "completion": [x[8:] for x in texts()]})


def sft(model: Any, path: Any, **options: Any) -> Any:
    arguments = SFTConfig(str(path), max_length=64, **{**COMMON, "bf16": False, **options})
    return SFTTrainer(model=model, args=arguments, train_dataset=completions(), processing_class=tokenizer())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_steps": 20},
        {"gradient_checkpointing": False, "max_steps": 4, "learning_rate": 0.0},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "max_steps": 4},
    ],
    ids=["defaults", "accumulating", "no checkpointing", "reentrant"],
)
def test_sft(options, tmp_path):
    def train(model: Any) -> Any:
        trainer = sft(model, tmp_path, **options)
        return trainer.train, trainer_options(trainer)

    check, running = trained_alike(llama, train, lambda model: Check(llama(), label_losses))
    assert running.coverage.share == 1
    for step in {b.examples.step for b in check.blocks}:
        found = [known(b) for b in check.blocks if b.examples.step == step]
        total = sum(int(n.sum()) for _, n in found)
        assert all(c.tolist() == pytest.approx([1 / total] * len(c)) for c, _ in found)
