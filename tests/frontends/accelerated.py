"""One process of data parallel training with accelerate; run by torchrun."""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import attrax

from .trainers import llama, texts, tokenizer


def main(folder: Path, watched: bool) -> None:
    """Train for an epoch, inside a capture or not, and note the parameters."""
    accelerator, model = Accelerator(cpu=True), llama()
    assert accelerator.num_processes == 2
    made = tokenizer()(texts(), padding="max_length", truncation=True, max_length=40, return_tensors="pt")
    rows = [
        {"input_ids": a, "attention_mask": m}
        for a, m in zip(*(made[k] for k in ("input_ids", "attention_mask")), strict=True)
    ]
    net, optimizer, data = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), 1e-2),
        DataLoader(rows, batch_size=4),  # pyright: ignore
    )
    with attrax.capture(net, sinks=[attrax.store(folder / "store", run="one")]) if watched else nullcontext():
        for batch in data:
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            accelerator.backward(net(**batch, labels=labels).loss)
            optimizer.step()
            optimizer.zero_grad()
    how = "watched" if watched else "alone"
    torch.save(
        [p.detach().clone() for p in model.parameters()], folder / f"{how}{accelerator.process_index}.pt"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "watched")
