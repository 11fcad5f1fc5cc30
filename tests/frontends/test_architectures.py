"""Tiny random models of real architectures in float64: coverage, and every captured gradient against autograd.

Models whose norms compute in float32 whatever the model's dtype agree to 1e-6: rounding to float32 differs between a
document alone and in a batch.  The others agree to 1e-10.
"""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from attrax.core import Sum, collect
from attrax.frontends import causal_lm, live

from .oracle import assert_gradients, captured, gradients

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
VOCAB = 17
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_key_value_heads": 2}
GEMMA: dict[str, Any] = {"head_dim": 4, "hidden_activation": "gelu_pytorch_tanh"}
FLOAT32_NORM, EXACT = 1e-6, 1e-10

ARCHITECTURES: dict[str, tuple[str, dict[str, Any], float]] = {
    "gpt2": ("GPT2", {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32}, EXACT),
    "llama": ("Llama", {"tie_word_embeddings": False}, FLOAT32_NORM),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}, FLOAT32_NORM),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, FLOAT32_NORM),
    "qwen3": ("Qwen3", {"head_dim": 4}, FLOAT32_NORM),
    "mistral": ("Mistral", {}, FLOAT32_NORM),
    "gemma": ("Gemma", GEMMA, FLOAT32_NORM),
    "gemma2": ("Gemma2", GEMMA | {"query_pre_attn_scalar": 4, "sliding_window": 16}, FLOAT32_NORM),
    "gemma3": ("Gemma3", GEMMA | {"query_pre_attn_scalar": 4, "sliding_window": 16}, FLOAT32_NORM),
    "phi": ("Phi", HEADS, EXACT),
    "gpt_neox": ("GPTNeoX", {"hidden_act": "gelu"}, EXACT),
}


def build(family: str, **options: Any) -> Any:
    """A model in float64, without dropout, whose norms are not at their initial values."""
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**SMALL | options)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, head)(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def documents() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Three documents of 5, 3 and 6 tokens padded on the right, and each by itself."""
    gen = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB, (1, length), generator=gen) for length in (5, 3, 6)]
    pad = lambda x, value: torch.nn.functional.pad(x, (0, 6 - x.shape[1]), value=value)  # noqa: E731
    batch = {
        "input_ids": torch.cat([pad(x, 0) for x in rows]),
        "attention_mask": torch.cat([pad(torch.ones_like(x), 0) for x in rows]),
        "labels": torch.cat([pad(x, -100) for x in rows]),
    }
    alone = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x} for x in rows]
    return batch, alone


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_gradient(kind):
    model, (batch, alone) = build(ARCHITECTURES[kind][0], **ARCHITECTURES[kind][1]), documents()
    source = live(model, [batch])
    assert source.coverage.share == 1 and not source.coverage.gaps
    right = gradients(model, causal_lm(), alone)
    assert_gradients(captured(source), right, within=ARCHITECTURES[kind][2])


@pytest.mark.parametrize("kind", ["gpt2", "llama_tied", "gpt_neox"])
def test_leaves(kind):
    """Which layers are stacked, tied, and the head."""
    model, (batch, _) = build(ARCHITECTURES[kind][0], **ARCHITECTURES[kind][1]), documents()
    grads = collect(live(model, [batch], verify=False)).grads
    tied = [name for name, leaf in grads.items() if isinstance(leaf, Sum)]
    assert tied == {"gpt2": ["transformer.wte.weight"], "llama_tied": ["model.embed_tokens.weight"]}.get(
        kind, []
    )
    stacks = [len(leaf.parts) for leaf in grads.values() if len(leaf.parts) > 1]
    assert stacks == ([2, 3] * 2 if kind == "llama_tied" else [])
    heads = [part.weight for leaf in grads.values() for part in leaf.parts if part.head]
    assert heads == (["lm_head.weight"] if kind == "gpt_neox" else [])


def test_an_encoder_with_tied_head_and_shared_bias():
    """BERT: word embeddings and decoder share a weight; types and positions broadcast over the batch."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
    config._attn_implementation = "eager"
    model = transformers.BertForMaskedLM(config).double().eval()
    batch = {"input_ids": torch.randint(3, VOCAB, (3, 5))}
    loss = lambda m, b: m(input_ids=b["input_ids"]).logits.square().sum((1, 2))  # noqa: E731
    source = live(model, [batch], loss)
    assert source.coverage.share == 1
    right = gradients(model, loss, [{"input_ids": x[None]} for x in batch["input_ids"]])
    assert_gradients(captured(source), right)


def test_left_padding_shifts_no_position():
    """GPT-2 has learned positions: a document padded on the left has the gradient it has alone."""
    model, (_, alone) = build("GPT2", **ARCHITECTURES["gpt2"][1]), documents()
    pad = lambda x, value: torch.nn.functional.pad(x, (6 - x.shape[1], 0), value=value)  # noqa: E731
    batch = {k: torch.cat([pad(doc[k], -100 if k == "labels" else 0) for doc in alone]) for k in alone[0]}
    assert_gradients(captured(live(model, [batch])), gradients(model, causal_lm(), alone))


def test_opt_flattens_its_batch():
    """OPT feeds [B T, d] to some layers, and its position table computes the ids it looks up."""
    model, (batch, alone) = build("OPT", ffn_dim=12, word_embed_proj_dim=8), documents()
    assert_gradients(captured(live(model, [batch])), gradients(model, causal_lm(), alone))
