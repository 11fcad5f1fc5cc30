"""Tiny random models of real architectures in float64: coverage, and every gradient, live and captured.

Models whose norms compute in float32 whatever the model's dtype agree to 1e-6: rounding to float32 differs between a
document alone and in a batch.  The others agree to 1e-10.
"""

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from attrax.core import Sum, collect
from attrax.frontends import capture, causal_lm, live

from .oracle import assert_gradients, block_gradients, captured, gradients

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
MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "decoder_sparse_step": 1,
}  # fmt: skip
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
    "olmo2": ("Olmo2", {}, FLOAT32_NORM),
    "opt": ("OPT", {"ffn_dim": 12, "word_embed_proj_dim": 8}, EXACT),
    "mixtral": ("Mixtral", MOE | {"num_local_experts": 4}, FLOAT32_NORM),
    "qwen2_moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 6} | HEADS, FLOAT32_NORM),
    "qwen3_moe": ("Qwen3Moe", MOE | {"head_dim": 4}, FLOAT32_NORM),
    "olmoe": ("Olmoe", MOE | HEADS, FLOAT32_NORM),
}


def build(family: str, **options: Any) -> Any:
    """A model in float64, without dropout, whose norms are not at their initial values."""
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**SMALL | options)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return built(head, config)


def built(head: str, config: Any) -> Any:
    """A model in float64, in eval mode, with attention and experts in plain torch."""
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    return moved(getattr(transformers, head)(config))


def moved(model: Any) -> Any:
    """The model in float64 and eval mode, with no parameter at its initial value."""
    model = model.double().eval()
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
    assert not source.apart


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_gradient_of_a_training_step(kind):
    model, (batch, alone) = build(ARCHITECTURES[kind][0], **ARCHITECTURES[kind][1]), documents()
    right, blocks = gradients(model, causal_lm(), alone), []
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        causal_lm()(model, batch).sum().backward()
    assert_gradients(block_gradients(blocks[0]), right, within=ARCHITECTURES[kind][2])


def images(rows: int, size: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(rows, 3, size, size, generator=gen).double(),
        "y": torch.randint(2, (rows,), generator=gen),
    }


def classified(model: Any, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]).logits, batch["y"], reduction="none")


def answered(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["x"], labels=batch["y"]).logits
    return torch.nn.functional.cross_entropy(logits.mT, batch["y"], reduction="none").sum(1)


PATCHES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
}
VISION: dict[str, tuple[str, str, dict[str, Any], int, str | None]] = {
    "vit": ("ViT", "ForImageClassification", PATCHES | {"intermediate_size": 12, "patch_size": 4}, 8, None),
    "dinov2": ("Dinov2", "ForImageClassification", PATCHES | {"mlp_ratio": 2, "patch_size": 4}, 8, None),
    "resnet": (
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"},
        16,
        None,
    ),
    "convnext": (
        "ConvNext",
        "ForImageClassification",
        {"depths": [1, 1], "hidden_sizes": [4, 8], "num_stages": 2},
        16,
        None,
    ),
    "swin": (
        "Swin",
        "ForImageClassification",
        {"image_size": 8, "patch_size": 2, "embed_dim": 4, "depths": [2], "num_heads": [2], "window_size": 2},
        8,
        r"attention$",
    ),
}


@pytest.mark.parametrize("kind", VISION)
def test_vision(kind):
    """Swin looks its relative positions up without examples: its attention is recomputed as a whole."""
    family, head, options, size, whole = VISION[kind]
    model = built(family + head, getattr(transformers, f"{family}Config")(**options))
    check_both(model, images(3, size), classified, whole)


def check_both(
    model: Any, batch: dict[str, Tensor], loss: Any, recompute: Any = None, within: float = EXACT
) -> None:
    """Live and captured gradients of everything."""
    singles = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(len(batch["x"]))]
    right, blocks = gradients(model, loss, singles), []
    source = live(model, [batch], loss, recompute=recompute, strict=True)
    assert source.coverage.share == 1
    assert_gradients(captured(source), right, within=within)
    with capture(model, sinks=[blocks.append], loss="sum", recompute=recompute, strict=True):
        loss(model, batch).sum().backward()
    got = block_gradients(blocks[0])
    assert all(not right[name].any() for name in right.keys() - got.keys())
    assert_gradients(got, {name: right[name] for name in got}, within=within)


def test_t5():
    """An encoder-decoder; tables of relative positions have no example axis, and every layer of a stack adds them."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = built("T5ForConditionalGeneration", config)
    gen = torch.Generator().manual_seed(3)
    batch = {k: torch.randint(3, VOCAB, (3, n), generator=gen) for k, n in (("x", 5), ("y", 4))}
    check_both(model, batch, answered, transformers.models.t5.modeling_t5.T5Stack)
    with pytest.warns(RuntimeWarning, match=r"2 parameters \(decoder.block.0.*relative_attention_bias"):
        got = captured(live(model, [batch], answered))
    singles = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(3)]
    assert_gradients(got, gradients(model, answered, singles))


def test_mamba():
    """The mixer uses the weights of its convolution and of one projection past these layers."""
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=2, state_size=3, conv_kernel=3, time_step_rank=2
    )
    gen = torch.Generator().manual_seed(4)
    batch = {"x": torch.randint(3, VOCAB, (3, 5), generator=gen)}
    loss = lambda m, b: causal_lm()(m, {"input_ids": b["x"], "labels": b["x"]})  # noqa: E731
    check_both(built("MambaForCausalLM", config), batch, loss, r"mixer$", FLOAT32_NORM)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_adapters(kind):
    """LoRA: the base is frozen, only the adapters are captured."""
    targets = {"llama": ["q_proj", "v_proj", "embed_tokens"], "gpt2": ["c_attn"], "opt": ["q_proj", "fc1"]}[
        kind
    ]
    family, options, within = ARCHITECTURES[kind]
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=kind == "gpt2")
    model, (batch, alone) = moved(peft.get_peft_model(build(family, **options), config)), documents()
    right, blocks = gradients(model, causal_lm(), alone), []
    assert right and all("lora_" in name for name in right)
    source = live(model, [batch], strict=True)
    assert_gradients(captured(source), right, within=within)
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        causal_lm()(model, batch).sum().backward()
    assert_gradients(block_gradients(blocks[0]), right, within=within)


def test_adapters_that_use_weights_as_functions():
    """DoRA multiplies the adapters' weights: example by example, with a warning; or the adapted layers as a whole."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model, (batch, alone) = moved(peft.get_peft_model(build("Llama"), config)), documents()
    right = gradients(model, causal_lm(), alone)
    with pytest.warns(RuntimeWarning, match="one example at a time"):
        assert_gradients(captured(live(model, [batch])), right, within=FLOAT32_NORM)
    whole = live(model, [batch], recompute=r"q_proj$", strict=True)
    assert_gradients(captured(whole), right, within=FLOAT32_NORM)


VOCABULARY = {
    "gpt2": ["transformer.wpe.weight", "transformer.wte.weight"],
    "llama_tied": ["model.embed_tokens.weight"],
    "gpt_neox": ["gpt_neox.embed_in.weight", "lm_head.weight"],
}


@pytest.mark.parametrize("kind", VOCABULARY)
def test_leaves(kind):
    """Which layers are stacked, tied, and what maps to or from a vocabulary."""
    model, (batch, _) = build(ARCHITECTURES[kind][0], **ARCHITECTURES[kind][1]), documents()
    grads = collect(live(model, [batch], verify=False)).grads
    tied = [name for name, leaf in grads.items() if isinstance(leaf, Sum)]
    assert tied == {"gpt2": ["transformer.wte.weight"], "llama_tied": ["model.embed_tokens.weight"]}.get(
        kind, []
    )
    stacks = [len(leaf.parts) for leaf in grads.values() if len(leaf.parts) > 1]
    assert stacks == ([2, 3] * 2 if kind == "llama_tied" else [])
    vocabulary = [part.weight for leaf in grads.values() for part in leaf.parts if part.head]
    assert sorted(vocabulary) == VOCABULARY[kind]


def test_an_encoder_with_tied_head_and_shared_bias():
    """BERT: word embeddings and decoder share a weight; types and positions broadcast over the batch."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
    config._attn_implementation = "eager"
    model = transformers.BertForMaskedLM(config).double().eval()
    batch = {"x": torch.randint(3, VOCAB, (3, 5))}
    check_both(model, batch, lambda m, b: m(input_ids=b["x"]).logits.square().sum((1, 2)))


def test_left_padding_shifts_no_position():
    """GPT-2 has learned positions: a document padded on the left has the gradient it has alone."""
    model, (_, alone) = build("GPT2", **ARCHITECTURES["gpt2"][1]), documents()
    pad = lambda x, value: torch.nn.functional.pad(x, (6 - x.shape[1], 0), value=value)  # noqa: E731
    batch = {k: torch.cat([pad(doc[k], -100 if k == "labels" else 0) for doc in alone]) for k in alone[0]}
    assert_gradients(captured(live(model, [batch])), gradients(model, causal_lm(), alone))
