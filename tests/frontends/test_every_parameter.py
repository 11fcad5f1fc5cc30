"""Parameters of every kind of module, and examples along any axis: live and capture against one example at a time."""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import collect
from attrax.frontends import capture, live
from attrax.methods import ekfac, fit_ekfac

from .models import seeded
from .oracle import assert_gradients, block_gradients, captured, one_by_one
from .test_live import Around

pytestmark = pytest.mark.usefixtures("unchecked")
T, D = 5, 4


def loss(model: nn.Module, batch: Any) -> Tensor:
    """One number an example, different for every position."""
    return model(batch["x"]).flatten(1).square().cumsum(1).tanh().sum(1)


class Scale(nn.Module):
    """A bare parameter, broadcast over examples and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Affine(nn.Module):
    """Bare parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ParameterList([torch.randn(D), torch.randn(D)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.terms[0] + self.terms[1]


class Relative(nn.Module):
    """Attention with a learned table of relative positions, looked up by [T, T] ids that no example axis has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(D, 3 * D), nn.Embedding(2 * T, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.bias(places[:, None] - places + T).permute(2, 0, 1)
        q, k, v = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT / math.sqrt(D) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


def lookup_positions(m: Any, x: Tensor) -> Tensor:
    return m.out(torch.tanh(m.first(x) + m.pos(torch.arange(x.shape[1]))))


def flattened(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.norm(m.first(x.flatten(0, 1))))
    return m.out(h).unflatten(0, x.shape[:2])


def flattened_by_position(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.norm(m.first(x.transpose(0, 1).flatten(0, 1))))
    return m.out(h).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def position_first(m: Any, x: Tensor) -> Tensor:
    return m.out(torch.tanh(m.norm(m.first(x.transpose(0, 1))))).transpose(0, 1)


def layers(**more: nn.Module) -> dict[str, nn.Module]:
    return {"first": nn.Linear(D, D), **more, "out": nn.Linear(D, 3)}


def between(inner: Callable[[Any, Tensor], Tensor], **more: nn.Module) -> nn.Module:
    """A linear layer, a function, a linear layer; inputs [B, T, D]."""
    return Around(lambda m, x: m.out(torch.tanh(inner(m, m.first(x)))), **layers(**more))


def attention(first: bool) -> nn.Module:
    def inner(m: Any, h: Tensor) -> Tensor:
        h = h if first else h.transpose(0, 1)
        mask = torch.full((T, T), -math.inf, dtype=h.dtype).triu(1)
        h = m.attn(h, h, value=h, attn_mask=mask, need_weights=False)[0]
        return h if first else h.transpose(0, 1)

    return between(inner, attn=nn.MultiheadAttention(D, 2, batch_first=first))


def recurrent(kind: type[nn.RNNBase], first: bool) -> nn.Module:
    def inner(m: Any, h: Tensor) -> Tensor:
        h = h if first else h.transpose(0, 1)
        out, state = m.rnn(h)
        out = out if first else out.transpose(0, 1)
        return out + (state[0] if isinstance(state, tuple) else state).sum(0)[:, None]

    return between(inner, rnn=kind(D, D, 2, batch_first=first))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scale": lambda: between(lambda m, h: m.scale(h), scale=Scale()),
    "parameter_list": lambda: between(lambda m, h: m.affine(h), affine=Affine()),
    "attention": lambda: attention(True),
    "attention_position_first": lambda: attention(False),
    "encoder": lambda: between(
        lambda m, h: m.enc(h), enc=nn.TransformerEncoderLayer(D, 2, 6, batch_first=True)
    ),
    "encoder_position_first": lambda: between(
        lambda m, h: m.enc(h.transpose(0, 1)).transpose(0, 1), enc=nn.TransformerEncoderLayer(D, 2, 6)
    ),
    "lstm": lambda: recurrent(nn.LSTM, True),
    "lstm_position_first": lambda: recurrent(nn.LSTM, False),
    "gru": lambda: recurrent(nn.GRU, True),
    "rnn_position_first": lambda: recurrent(nn.RNN, False),
    "weight_norm": lambda: between(
        lambda m, h: m.wn(h), wn=nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
    ),
    "old_weight_norm": lambda: between(lambda m, h: m.wn(h), wn=nn.utils.weight_norm(nn.Linear(D, D))),
    "flattened": lambda: Around(flattened, **layers(norm=nn.LayerNorm(D))),
    "flattened_by_position": lambda: Around(flattened_by_position, **layers(norm=nn.LayerNorm(D))),
    "position_first": lambda: Around(position_first, **layers(norm=nn.LayerNorm(D))),
    "positions": lambda: Around(lookup_positions, **layers(pos=nn.Embedding(T, D))),
}
APART: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "relative": (lambda: between(lambda m, h: m.rel(h), rel=Relative()), {"rel.bias.weight"}),
    "functional": (
        lambda: Around(lambda m, x: F.linear(torch.tanh(m.first(x)), m.first.weight), first=nn.Linear(D, D)),
        {"first.weight"},
    ),
}


def inputs(rows: int, gen: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, T, D, generator=gen, dtype=torch.float64)}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*", "ignore:.*enable_nested_tensor.*")
@pytest.mark.parametrize("rows", [1, 3, T])
@pytest.mark.parametrize("kind", MODELS)
def test_live(kind, rows, rng):
    """T examples make shapes say nothing."""
    model, batch = seeded(MODELS[kind]), inputs(rows, rng)
    source = live(model, [batch], loss, strict=True)
    assert source.coverage.share == 1
    assert_gradients(captured(source), one_by_one(model, batch, loss))
    assert not source.apart


@pytest.mark.filterwarnings("ignore:.*weight_norm.*", "ignore:.*enable_nested_tensor.*")
@pytest.mark.parametrize("rows", [3, T])
@pytest.mark.parametrize("kind", MODELS)
def test_capture(kind, rows, rng):
    model, batch, blocks = seeded(MODELS[kind]), inputs(rows, rng), []
    with capture(model, sinks=[blocks.append], strict=True, loss="sum"):
        loss(model, batch).sum().backward()
    assert_gradients(block_gradients(blocks[0]), one_by_one(model, batch, loss))


@pytest.mark.parametrize("rows", [3, T])
@pytest.mark.parametrize("kind", APART)
def test_live_where_no_layer_has_the_examples(kind, rows, rng):
    build, names = APART[kind]
    model, batch = seeded(build), inputs(rows, rng)
    source = live(model, [batch], loss)
    with pytest.warns(RuntimeWarning, match="differentiated one example at a time, which is exact but slow"):
        assert_gradients(captured(source), one_by_one(model, batch, loss))
    assert source.apart.keys() == names
    with pytest.raises(RuntimeError):
        collect(live(model, [batch], loss, strict=True))


def test_capture_leaves_out_what_has_no_example_axis(rng):
    model, batch, blocks = seeded(APART["relative"][0]), inputs(3, rng), []
    warned = pytest.warns(RuntimeWarning, match=r"'rel.bias'(?s:.*)left out")
    with capture(model, sinks=[blocks.append], loss="sum") as running, warned:
        loss(model, batch).sum().backward()
    right = one_by_one(model, batch, loss)
    del right["rel.bias.weight"]
    assert_gradients(block_gradients(blocks[0]), right)
    assert [g.parameter for g in running.coverage.gaps] == ["rel.bias.weight"]
    with pytest.raises(RuntimeError, match="cannot be told apart"), capture(model, loss="sum", strict=True):
        loss(model, batch).sum().backward()


def test_a_bare_parameter_of_the_model_itself(rng):
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.soft, self.out = nn.Parameter(torch.randn(2, D)), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            prompt = self.soft.expand(x.shape[0], -1, -1)
            return self.out(torch.tanh(torch.cat([prompt, x], 1)).cumsum(1))

    model, batch, blocks = seeded(Root), inputs(3, rng), []
    right = one_by_one(model, batch, loss)
    source = live(model, [batch], loss, strict=True)
    assert_gradients(captured(source), right)
    assert "soft: " not in str(source.coverage) and source.apart.keys() == {"soft"}
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        loss(model, batch).sum().backward()
    assert_gradients(block_gradients(blocks[0]), right)


def test_dropout_inside_a_recomputed_module_is_replayed(rng):
    """Training mode: each example's gradient under the very masks that the step drew."""

    def build() -> nn.Module:
        return between(
            lambda m, h: m.attn(h, h, h)[0], attn=nn.MultiheadAttention(D, 2, 0.3, batch_first=True)
        )

    model, batch, blocks = seeded(build).train(), inputs(3, rng), []
    torch.manual_seed(5)
    with capture(model, sinks=[blocks.append], loss="sum"):
        loss(model, batch).sum().backward()
    got = block_gradients(blocks[0])
    for i in range(3):
        torch.manual_seed(5)
        right = torch.autograd.grad(loss(model, batch)[i], list(model.parameters()))
        for (name, _), g in zip(model.named_parameters(), right, strict=True):
            assert torch.allclose(got[name][i], g, rtol=1e-10, atol=1e-12), name


def test_embeddings_that_compute_their_own_ids(rng):
    class Offset(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input + 2)

    model = seeded(lambda: Around(lambda m, x: m.out(m.emb(x)), emb=Offset(9, D), out=nn.Linear(D, 3)))
    batch = {"x": torch.randint(7, (4, T), generator=rng)}
    source = live(model, [batch], loss, strict=True)
    assert_gradients(captured(source), one_by_one(model, batch, loss))
    assert "recomputed Offset: 1 parameters" in str(source.coverage)


def test_kfac_leaves_out_what_has_no_factors(rng):
    model, data = seeded(MODELS["lstm"]), [inputs(4, rng)]
    source = live(model, data, loss)
    assert set(fit_ekfac(source).bases) == {"first.weight", "out.weight"}
    assert ekfac(source, source).values.shape == (4, 4)


@pytest.mark.parametrize("mix", ["recurrent", "sum"])
def test_capture_notices_inputs_that_do_not_have_examples_first(mix, rng):
    """[T, B, D] inputs: layers see T rows, which depend on each other."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return m.out(m.rnn(h)[0] if mix == "recurrent" else h.cumsum(0))

    more = {"rnn": nn.LSTM(D, D)} if mix == "recurrent" else {}
    model, x = seeded(lambda: Around(forward, **layers(**more))), inputs(3, rng)["x"].transpose(0, 1)
    refused = pytest.raises(
        RuntimeError, match=r"rows of layers \['out'\] do not move .*sequence-first inputs"
    )
    with refused, capture(model, loss="sum"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x)


def test_the_check_leaves_training_as_it_is(rng):
    """Dropout draws and batch counts are those of a step without a capture."""
    build = lambda: between(lambda m, h: m.drop(h), drop=nn.Dropout(0.5))  # noqa: E731
    batch, grads = inputs(3, rng), []
    for watch in (False, True):
        model = seeded(build).train()
        calls = []
        model.register_forward_hook(lambda m, *_, calls=calls: calls.append(m.training))
        torch.manual_seed(3)
        with capture(model, loss="sum") if watch else contextlib.nullcontext():
            loss(model, batch).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        assert calls == [True, *[False] * (5 if watch else 0)]
        assert model.training and model.drop.training
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Quantized(nn.Module):
    """A frozen linear layer in 8 bits with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-100, 100, (D, D), dtype=torch.int8))
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.get_buffer("weight").to(x.dtype) / 100
        return x @ base.T + self.up(self.down(x))


def test_adapters_of_quantized_layers(rng):
    model = seeded(lambda: between(lambda m, h: m.base(h), base=Quantized()))
    model.first.requires_grad_(False)
    batch, blocks = inputs(3, rng), []
    right = one_by_one(model, batch, loss)
    assert set(right) == {"base.down.weight", "base.up.weight", "out.weight", "out.bias"}
    assert_gradients(captured(live(model, [batch], loss, strict=True)), right)
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        loss(model, batch).sum().backward()
    assert_gradients(block_gradients(blocks[0]), right)


@pytest.mark.parametrize("options", [{"sparse": True}, {"padding_idx": 2}, {"max_norm": 1.0}])
def test_embeddings_in_every_configuration(options, rng):
    """`max_norm` renormalizes the rows it looks up, in place: gradients are at the renormalized rows."""
    model = seeded(
        lambda: Around(lambda m, x: m.out(m.emb(x)), emb=nn.Embedding(9, D, **options), out=nn.Linear(D, 3))
    )
    batch, blocks = {"x": torch.randint(9, (4, T), generator=rng)}, []
    model(batch["x"])
    dense = lambda found: {n: g.to_dense() if g.is_sparse else g for n, g in found.items()}  # noqa: E731
    rows = [
        torch.autograd.grad(loss(model, {"x": x[None]}).sum(), list(model.parameters())) for x in batch["x"]
    ]
    names = [n for n, _ in model.named_parameters()]
    right = {n: torch.stack([dense(dict(zip(names, row, strict=True)))[n] for row in rows]) for n in names}
    assert_gradients(captured(live(model, [batch], loss, strict=True)), right)
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        loss(model, batch).sum().backward()
    assert_gradients(block_gradients(blocks[0]), right)
