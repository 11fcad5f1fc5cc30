"""Tiny random models of real architectures: every captured gradient against autograd, one example at a time.

Models that compute their norms in float32 whatever the model's dtype round the output gradients of those norms to
float32 themselves, so there the agreement is that of float32.
"""

import os

import pytest
import torch
from torch import Tensor, nn

import attrax
from attrax.core import stored

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GROUPED = {**SIZES, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, object], float]] = {
    "gpt2": ("GPT2", {**GPT2, "eos_token_id": 2}, 1e-10),
    "llama": ("Llama", {**GROUPED, "attention_bias": True}, 1e-10),
    "llama-tied": ("Llama", {**GROUPED, "tie_word_embeddings": True}, 1e-10),
    "mistral": ("Mistral", {**GROUPED, "head_dim": 8}, 1e-10),
    "qwen2": ("Qwen2", GROUPED, 1e-10),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}, 1e-10),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 8}, 1e-5),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8}, 1e-5),
    "phi": ("Phi", SIZES, 1e-10),
    "gpt-neox": ("GPTNeoX", SIZES, 1e-10),
}


def build(name: str) -> nn.Module:
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    head = getattr(transformers, f"{kind}LMHeadModel", None) or getattr(transformers, f"{kind}ForCausalLM")
    model = head(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4)
    return model


def padded_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (4, 10), generator=generator)
    mask = (torch.arange(10) < torch.tensor([10, 7, 5, 2])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def alone(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    length = int(batch["attention_mask"][row].sum())
    return {k: v[row : row + 1, :length] for k, v in batch.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_every_captured_gradient_is_that_of_the_document_alone(name: str) -> None:
    model, batch, tolerance = build(name), padded_batch(), MODELS[name][2]
    source = attrax.live(model, [batch])
    assert source.coverage.share == 1.0, str(source.coverage)
    found = stored(attrax.collect(source).grads)
    named = dict(model.named_parameters())
    assert set(found) == set(named)
    for row in range(4):
        loss = attrax.causal_lm()(model, alone(batch, row)).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        largest = max(float(g.abs().max()) for g in grads if g is not None)
        for parameter, grad in zip(named, grads, strict=True):
            right = torch.zeros_like(named[parameter]) if grad is None else grad
            scale = max(float(right.abs().max()), 1e-6 * largest)
            assert float((found[parameter][row] - right).abs().max()) <= tolerance * scale, parameter


@pytest.mark.filterwarnings("ignore")
def test_layers_that_share_an_input_are_one_leaf() -> None:
    grads = attrax.collect(attrax.live(build("llama"), [padded_batch()])).grads
    attention = grads["model.layers.0.self_attn.q_proj.weight"]
    assert [part.width for part in attention.parts] == [32, 16, 16]
    assert grads["model.layers.0.mlp.gate_proj.weight"].parts[1].weight.endswith("up_proj.weight")
    tied = attrax.collect(attrax.live(build("llama-tied"), [padded_batch()])).grads
    assert type(tied["model.embed_tokens.weight"]).__name__ == "Sum"
