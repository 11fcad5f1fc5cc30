"""Tiny random models of Hugging Face in float64, which can be made to compute in float64 throughout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .trainers import keep_double

VOCAB = 17
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `float64`."""
    float64(monkeypatch)


def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's norm, eager attention and the models' own losses without their detours by float32."""
    softmax = F.softmax
    keep_double(monkeypatch)
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    monkeypatch.setattr(LlamaRMSNorm, "forward", _norm)


def llm(family: str, attention: str = "eager", *, tied: bool = True) -> Any:
    """A Llama or GPT-2 with two layers, norms away from their initial values."""
    if family == "llama":
        config: Any = transformers.LlamaConfig(
            **SMALL,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=12,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
        )
    else:
        config = transformers.GPT2Config(**SMALL, n_embd=8, n_layer=2, n_head=2, n_positions=32)
    config._attn_implementation = attention
    torch.manual_seed(0)
    build = transformers.LlamaForCausalLM if family == "llama" else transformers.GPT2LMHeadModel
    model = build(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def alone(document: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
    """A document as a batch of its own."""
    ids = document.long()[None]
    return {"input_ids": ids, "labels": ids if labels is None else labels.long()[None]}
