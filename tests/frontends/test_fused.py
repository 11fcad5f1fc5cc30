"""Heads that TRL fuses with the loss, in all their variants, against one row at a time."""

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from attrax.core import Block
from attrax.frontends import capture, causal_lm

from .loops import known
from .oracle import assert_gradients, block_gradients, gradients, row
from .trainers import llama, one_row

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def blocks() -> list[Block]:
    return []


def gemma() -> Any:
    """Tied embeddings and logits that are squashed."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config)


def biased() -> Any:
    model = llama()
    model.lm_head = nn.Linear(16, 31)
    return model


def batch(gen: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 31, (3, 7), generator=gen)
    labels = ids.clone()
    labels[0, :4], labels[2] = -100, -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("build", [llama, gemma, biased])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies(build, temperature, blocks, rng):
    model, rows = build(), batch(rng)
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))

    def loss(model: Any, batch: Any) -> Tensor:
        out = model(**batch, fused_lm_head=True)
        return (out.log_probs.sum(1).square() - 0.3 * out.entropy.sum(1)) / 9

    right = gradients(model, loss, [one_row(rows, i) for i in range(3)])
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        loss(model, rows).sum().backward()
    assert_gradients(block_gradients(blocks[0]), right, 5e-6, zero=1e-7)
    assert not any(bool(g[2].any()) for g in block_gradients(blocks[0]).values()), "a row without labels"


def test_a_frozen_head_and_a_head_left_out(blocks, rng):
    rows = batch(rng)
    for how in ("frozen", "left out"):
        model = llama()
        model.lm_head.requires_grad_(how != "frozen")
        add_fused_lm_head(model)
        loss = lambda m, batch: -m(**batch, fused_lm_head=True).log_probs.sum(1)  # noqa: E731
        right = gradients(model, loss, [one_row(rows, i) for i in range(3)])
        right.pop("lm_head.weight", None)
        with capture(model, sinks=[blocks.append], loss="sum", exclude="lm_head"):
            loss(model, rows).sum().backward()
        assert_gradients(block_gradients(blocks[-1]), right, 5e-6, zero=1e-7)


def test_a_token_mean_is_read_off_what_arrives(blocks, rng):
    """Whatever the loop does with its loss; refused if tokens do not weigh alike."""
    model, rows = llama(), batch(rng)
    add_fused_lm_head(model)
    with capture(model, sinks=[blocks.append], loss="token_mean"):
        (-3 * model(**rows, fused_lm_head=True).log_probs.sum() / 7).backward()
        with pytest.raises(ValueError, match="tokens of one batch carry different weights"):
            model(**rows, fused_lm_head=True).log_probs.square().sum().backward()
    c, n = known(blocks[0])
    assert c.tolist() == pytest.approx([3 / 7] * 3) and n.tolist() == [3, 6, 0]
    each = gradients(llama(), causal_lm(), [one_row(rows, i) for i in range(3)])
    assert_gradients(block_gradients(blocks[0]), {k: g * 3 / 7 for k, g in each.items()}, 5e-6, zero=1e-7)


def test_nothing_refers_to_a_graph_that_was_used(rng):
    """Hooks on a node must not keep it: its tensors are the largest there are."""
    model, rows, seen = llama(), row(batch(rng), 1), []
    add_fused_lm_head(model)
    gc.collect()
    gc.disable()
    try:
        with capture(model, loss="sum", verify=False):
            for _ in range(2):
                out = model(**rows, fused_lm_head=True)
                seen.append(weakref.ref(out.log_probs.grad_fn.next_functions[0][0].next_functions[0][0]))
                out.log_probs.sum().backward()
                del out
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()
