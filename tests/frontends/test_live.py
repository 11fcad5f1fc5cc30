"""Gradients from a live source against autograd of one example at a time, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from attrax.core import Factorized, Lookup, Sum, collect, gram, norms
from attrax.frontends import causal_lm, classification, live

from .models import MLP, TinyLM, classes, documents, seeded
from .oracle import assert_gradients, captured, flat, gradients, one_by_one, unpadded

CLASSIFY = classification()


class Around(nn.Module):
    """A function of one submodule or several."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def several_calls() -> nn.Module:
    """One layer called three times, with inputs of different kinds."""
    return Around(
        lambda m, x: m.out(torch.tanh(m.f(torch.tanh(m.f(x)))) + m.f(2 * x)),
        f=nn.Linear(4, 4),
        out=nn.Linear(4, 3),
    )


def frozen_weight() -> nn.Module:
    """Weight frozen and bias trainable, a frozen layer, a trainable one."""
    model = MLP()
    model.first.weight.requires_grad_(False)
    model.second.requires_grad_(False)
    return model


def keyword_calls() -> nn.Module:
    return Around(lambda m, x: m.b(input=torch.tanh(m.a(input=x))), a=nn.Linear(4, 5), b=nn.Linear(5, 3))


def separate_biases() -> nn.Module:
    """Two layers that share their weight but not their bias."""
    model = Around(
        lambda m, x: m.c(torch.tanh(m.a(x)) + m.b(x * x)),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        c=nn.Linear(4, 3),
    )
    model.get_submodule("b").weight = model.get_submodule("a").weight
    return model


def shared_bias() -> nn.Module:
    """Two layers that share their bias but not their weight."""
    model = separate_biases()
    model.get_submodule("b").weight = nn.Parameter(torch.randn(4, 4))
    model.get_submodule("b").bias = model.get_submodule("a").bias
    return model


def many_axes() -> nn.Module:
    """Layers on inputs with two further axes, and norms over several axes."""
    return Around(
        lambda m, x: m.out(m.rms(m.ln(torch.tanh(m.f(x[:, None, :, None] * torch.ones(2, 1, 4)))))).mean(
            (1, 2)
        ),
        f=nn.Linear(4, 5),
        ln=nn.LayerNorm([2, 4, 5]),
        rms=nn.RMSNorm([4, 5], eps=1e-3),
        out=nn.Linear(5, 3),
    )


def norms_of_models() -> nn.Module:
    return Around(
        lambda m, x: m.out(m.hf(m.nn(m.f(x)))),
        f=nn.Linear(4, 5),
        nn=nn.RMSNorm(5),
        hf=LlamaRMSNorm(5),
        out=nn.Linear(5, 3),
    )


def transposed() -> nn.Module:
    """The real GPT-2 layer, whose weight is stored [Ni, No]; square, so that a transposed answer has its shape."""
    return Around(lambda m, x: m.b(torch.tanh(m.a(x))), a=Conv1D(4, 4), b=Conv1D(3, 4))


def shared_with_transposed() -> nn.Module:
    """One weight, used as W x by one layer and as x W by another."""
    model = Around(
        lambda m, x: m.out(m.b(torch.tanh(m.a(x)))), a=nn.Linear(4, 4), b=Conv1D(4, 4), out=nn.Linear(4, 3)
    )
    model.get_submodule("b").weight = model.get_submodule("a").weight
    return model


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "bias": MLP,
    "no_bias": lambda: MLP(bias=False),
    "inplace_relu": lambda: MLP(inplace=True),
    "nonreentrant": lambda: MLP(how="nonreentrant"),
    "several_calls": several_calls,
    "frozen_weight": frozen_weight,
    "keyword_calls": keyword_calls,
    "separate_biases": separate_biases,
    "shared_bias": shared_bias,
    "many_axes": many_axes,
    "norms_of_models": norms_of_models,
    "transposed": transposed,
    "shared_with_transposed": shared_with_transposed,
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers(kind, rng):
    model, batch = seeded(CLASSIFIERS[kind]), classes(rng)
    within = 1e-6 if kind == "norms_of_models" else 1e-10  # LlamaRMSNorm computes in float32
    assert_gradients(captured(live(model, [batch], CLASSIFY)), one_by_one(model, batch, CLASSIFY), within)


LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "tied": {"tied": True},
    "rms": {"norm": nn.RMSNorm},
    "shared_norm": {"shared_norm": True},
    "nonreentrant": {"how": "nonreentrant", "tied": True},
}


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_language_models_with_padding(kind, rng):
    model = seeded(lambda: TinyLM(**LANGUAGE_MODELS[kind]))
    batch = documents(rng, [5, 3, 7, 2], width=9)
    right = gradients(model, causal_lm(), [unpadded(batch, i) for i in range(4)])
    got = captured(live(model, [batch]))
    assert_gradients(got, right)
    if kind != "tied":
        assert not got["tok.weight"][:, 0].any() or model.head.weight is model.tok.weight


@pytest.mark.parametrize("kind", ["mlp", "lm"])
def test_reentrant_checkpointing(kind, rng):
    build: Callable[[str | None], nn.Module] = {
        "mlp": lambda how: MLP(how=how),
        "lm": lambda how: TinyLM(how=how, tied=True, shared_norm=True),
    }[kind]
    batch = classes(rng) if kind == "mlp" else documents(rng, [4, 6])
    loss = CLASSIFY if kind == "mlp" else causal_lm()
    plain, model = seeded(lambda: build(None)), seeded(lambda: build("reentrant"))
    assert_gradients(captured(live(model, [batch], loss)), one_by_one(plain, batch, loss))


def test_checkpointing_reuses_memory_but_not_inputs(rng):
    """Inputs of checkpointed layers are freed in the forward pass: an address does not identify them."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for a, b in zip(self.layers[::2], self.layers[1::2], strict=True):
                block = lambda h, a=a, b=b: torch.tanh(b(torch.tanh(a(torch.tanh(h)))))  # noqa: E731
                h = checkpoint(block, h, use_reentrant=False)
            return self.last(h)

    model, batch = seeded(Deep), classes(rng)
    block = collect(live(model, [batch], CLASSIFY, verify=False))
    assert all(len(leaf.parts) == 1 for leaf in block.grads.values())
    assert_gradients(
        captured(live(model, [batch], CLASSIFY, verify=False)), one_by_one(model, batch, CLASSIFY)
    )


def test_a_fully_masked_example_has_no_gradient(rng):
    model, batch = seeded(TinyLM), documents(rng, [5, 5, 4])
    batch["labels"][0] = -100
    got = captured(live(model, [batch]))
    assert all(not g[0].any() for g in got.values())
    assert_gradients(got, one_by_one(model, batch, causal_lm()))


def test_the_model_may_be_called_several_times_in_one_loss(rng):
    def pair(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            anchor = model(3 * batch["x"])
        return (model(batch["x"]) - 2 * model(-batch["x"]) + anchor).square().sum(1)

    model, batch = seeded(MLP), classes(rng)
    assert_gradients(captured(live(model, [batch], pair)), one_by_one(model, batch, pair))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_mode_of_the_caller_does_not_matter(mode, rng):
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    with mode():
        fresh = {k: v.clone() for k, v in batch.items()}
        got = captured(live(model, [batch, fresh], CLASSIFY))
    assert_gradients(got, {n: torch.cat([g, g]) for n, g in right.items()})


def test_a_loss_may_unpack_its_batch_or_take_things_out_of_it(rng):
    """Ids made of the content do not get in the way of ``model(**batch)``."""

    def unpacked(model: nn.Module, batch: Any) -> Tensor:
        y = batch.pop("y")
        return F.cross_entropy(model(**batch), y, reduction="none")

    model, batch = seeded(MLP), classes(rng)
    source = live(model, [batch], unpacked)
    assert_gradients(captured(source), one_by_one(model, batch, CLASSIFY))
    assert_gradients(captured(source), captured(live(model, [batch], CLASSIFY)))
    assert list(batch) == ["x", "y"]


def test_only_part_of_the_model_may_run(rng):
    def first(model: nn.Module, batch: Any) -> Tensor:
        return model.get_submodule("first")(batch["x"]).square().sum(1)

    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, first)
    got = captured(live(model, [batch], first))
    assert_gradients(got, {n: right[n] for n in ("first.weight", "first.bias")})


@pytest.mark.parametrize("sparse", [False, True])
def test_padding_rows_of_embeddings_and_sparse_gradients(sparse, rng):
    model = seeded(
        lambda: Around(
            lambda m, x: m.out(m.emb(x).sum(1)),
            emb=nn.Embedding(9, 4, padding_idx=2, sparse=sparse),
            out=nn.Linear(4, 3),
        )
    )
    batch = {"x": torch.tensor([[1, 2, 2], [3, 3, 8]]), "y": torch.tensor([0, 2])}
    got = captured(live(model, [batch], CLASSIFY))
    assert not got["emb.weight"][:, 2].any()
    right = (
        one_by_one(model, batch, CLASSIFY)
        if not sparse
        else gradients(seeded_dense(model), CLASSIFY, rows_of(batch))
    )
    assert_gradients(got, right)


def seeded_dense(model: Any) -> nn.Module:
    model.emb.sparse = False
    return model


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v[i : i + 1] for k, v in batch.items()} for i in range(2)]


def test_autocast_is_compared_at_its_own_precision(rng):
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch["x"])
        return F.cross_entropy(logits.float(), batch["y"], reduction="none")

    model = seeded(MLP, dtype=torch.float32)
    batch = classes(rng)
    batch["x"] = batch["x"].float()
    got, right = captured(live(model, [batch], loss)), one_by_one(model, batch, loss)
    assert_gradients({n: g.float() for n, g in got.items()}, right, within=0.05)


def test_layers_fed_by_one_tensor_are_one_leaf(rng):
    model, batch = seeded(lambda: TinyLM(bias=False, layers=1)), documents(rng, [5, 4])
    grads = collect(live(model, [batch])).grads
    attention, gated = grads["blocks.0.q.weight"], grads["blocks.0.gate.weight"]
    assert isinstance(attention, Factorized) and isinstance(gated, Factorized)
    assert [p.weight for p in attention.parts] == [f"blocks.0.{n}.weight" for n in "qkv"]
    assert attention.a.shape == (2, 5, 6) and attention.g.shape == (2, 5, 18)
    assert [p.weight for p in gated.parts] == ["blocks.0.gate.weight", "blocks.0.up.weight"]
    assert gated.a.shape == (2, 5, 6) and gated.g.shape == (2, 5, 24)
    assert "blocks.0.k.weight" not in grads and "blocks.0.up.weight" not in grads


def test_layers_with_and_without_bias_are_not_stacked(rng):
    model = seeded(lambda: TinyLM(layers=1))
    model.blocks[0].k.register_parameter("bias", None)
    grads = collect(live(model, [documents(rng, [4, 3])])).grads
    assert {len(grads[f"blocks.0.{n}.weight"].parts) for n in "qk"} == {1, 2}


def test_a_tied_weight_is_one_leaf_with_exact_cross_terms(rng):
    model, batch = seeded(lambda: TinyLM(tied=True)), documents(rng, [5, 3, 6])
    grads = collect(live(model, [batch])).grads
    leaf = grads["tok.weight"]
    assert isinstance(leaf, Sum) and {type(use) for use in leaf.uses} == {Lookup, Factorized}
    right = flat(one_by_one(model, batch, causal_lm()))
    torch.testing.assert_close(norms(grads), right.norm(dim=1), rtol=1e-10, atol=0)
    torch.testing.assert_close(gram(grads, grads), right @ right.T, rtol=1e-10, atol=1e-10)
