"""What the measurements share: random Llamas, random tokens, CPU time, and the record of a run."""

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SMALL = {"hidden": 384, "layers": 6, "heads": 6, "inner": 1024, "vocab": 2048}
WIDE = {"hidden": 1024, "layers": 2, "heads": 8, "inner": 2736, "vocab": 2048}


def llama(shape: dict[str, int]) -> torch.nn.Module:
    """A random Llama, untied, with eager attention and weights large enough for its layers to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        intermediate_size=shape["inner"],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    net = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim > 1:
                p.mul_(4.0)
    return net


def tokens(
    count: int, length: int, batch: int, seed: int, vocab: int = 2048
) -> list[dict[str, torch.Tensor]]:
    """Batches of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(4, vocab, (count, length), generator=generator)
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in rows.split(batch)]


def body(name: str, module: torch.nn.Module) -> bool:
    """All linear layers but the head."""
    return isinstance(module, torch.nn.Linear) and name != "lm_head"


def seconds(run: Callable[[], Any]) -> float:
    """CPU time of one call; the wall time of one thread on an idle core."""
    start = time.process_time()
    run()
    return time.process_time() - start


def write(out: Path | None, **results: Any) -> None:
    """Write the results with the command and the machine, if a file was asked for."""
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if out:
        out.write_text(json.dumps(record | results, indent=1) + "\n")
