"""Trainers of other libraries on several processes, each held to what `trained_alike` asks; started by torchrun.

Every process checks its own blocks against autograd of one example at a time at the parameters of the step, in float64,
and that parameters are those of a run without a capture, bit by bit.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from attrax.frontends import trainer_options
from attrax.frontends.loop.trainers import Samples

from . import test_accelerate, test_lightning, test_trainer, test_trl
from .trainers import Check, label_losses, llama, trained_alike

Held = tuple[Check, Any]


def hf_trainer(path: Path) -> Held:
    def train(model: Any) -> Any:
        made = test_trainer.trainer(model, path, 2, max_steps=20)
        return made.train, trainer_options(made)

    return trained_alike(doubled, train, lambda _: Check(doubled(), label_losses))


def peft_adapters(path: Path) -> Held:
    def build() -> Any:
        return test_trainer.still(test_trainer.adapted).double()

    def train(model: Any) -> Any:
        made = test_trainer.trainer(model, path, 1, max_steps=20)
        return made.train, trainer_options(made)

    return trained_alike(build, train, lambda _: Check(build(), label_losses))


def doubled() -> Any:
    return test_trainer.still(test_trainer.doubled)


def accelerate(path: Path) -> Held:
    build = lambda: llama().double()  # noqa: E731
    return trained_alike(build, test_accelerate.training(2, 10), lambda _: Check(build(), label_losses))


def lightning(path: Path) -> Held:
    def train(net: nn.Module) -> Any:
        module = test_lightning.Module()
        module.net = net
        made = test_lightning.trainer(path, devices=2, strategy="ddp", accumulate_grad_batches=2)
        return lambda: made.fit(module, test_lightning.data()), trainer_options(made, loss="example_mean")

    build = lambda: test_lightning.Module().net  # noqa: E731
    return trained_alike(build, train, lambda _: Check(build(), test_lightning.loss))


def trl_sft(path: Path) -> Held:
    def train(model: Any) -> Any:
        made = test_trl.sft(model, path)
        return made.train, trainer_options(made)

    return trained_alike(test_trl.doubled, train, lambda _: Check(test_trl.doubled(), label_losses))


def trl_dpo(path: Path) -> Held:
    def train(model: Any) -> Any:
        made = test_trl.dpo(model, path, gradient_accumulation_steps=2)
        return made.train, trainer_options(made)

    loss = test_trl.preference(test_trl.doubled())
    return trained_alike(
        test_trl.doubled, train, lambda _: Check(test_trl.doubled(), loss, test_trl.one_pair)
    )


def trl_grpo(path: Path) -> Held:
    made: list[Samples] = []

    def train(model: Any) -> Any:
        trainer = test_trl.grpo(model, path, loss_type="dapo", max_steps=20)
        made.append(Samples(trainer))
        return trainer.train, {**trainer_options(trainer), "after_backward": made[-1:]}

    return trained_alike(
        test_trl.doubled, train, lambda _: Check(test_trl.doubled(), test_trl.advantage_times(made))
    )


TRAINERS: dict[str, Callable[[Path], Held]] = {
    "accelerate": accelerate,
    "hf_trainer": hf_trainer,
    "peft_adapters": peft_adapters,
    "lightning": lightning,
    "trl_sft": trl_sft,
    "trl_dpo": trl_dpo,
    "trl_grpo": trl_grpo,
}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    Accelerator(cpu=True)  # makes the process group
    rank = dist.get_rank()
    for name, run in TRAINERS.items():
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as path:
            test_trl.exact(patch)
            held, running = run(Path(path))
        about = {
            "ids": [b.examples.ids for b in held.blocks],
            "steps": [b.examples.step for b in held.blocks],
            "checked": held.checked,
            "share": running.coverage.share,
        }
        torch.save(about, Path(folder) / f"{name}{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
