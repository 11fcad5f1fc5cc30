"""Faults that users of such libraries have reported, and what attrax does instead: gradients of models.

Each test names the kind of fault (K) and the report (B) it rebuilds; the right answers are brute force.
"""

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attrax
from attrax.core import aggregate

from .case_models import (
    CLASSIFY,
    IGNORE,
    LM,
    PREDICT,
    Checkpointed,
    Net,
    WithLoss,
    all_same,
    alone,
    both_give,
    brute,
    documents,
    each_position,
    grads_of,
    mean_ce,
    padded,
    part,
    points,
    recorded,
    rows_of,
    same,
    seeded,
    steps,
    vectors,
)
from .case_models import quick as quick


def test_k01_b01_padding_on_the_right():
    model, docs = seeded(LM, 1), documents(1, [5, 3, 7, 2])
    right = brute(model, PREDICT, alone(docs))
    for batches in ([padded(docs)], [padded(docs, 12)], [padded(docs[:1]), padded(docs[1:], 9)]):
        got = grads_of(attrax.live(model, batches))
        all_same(got, right)
        assert not got["tok.weight"][:, 0].any()
        all_same(recorded(model, batches, PREDICT), right)


def test_k01_b03_one_fully_masked_example():
    def mean_over_own(model: nn.Module, batch: Any) -> Tensor:
        return PREDICT(model, batch) / PREDICT.tokens(batch).clamp_min(1)

    model, batch = seeded(LM, 3), padded(documents(3, [6] * 4))
    batch["labels"][2] = IGNORE
    got = grads_of(attrax.live(model, [batch], mean_over_own))
    all_same(got, brute(model, mean_over_own, rows_of(batch)))
    assert all(not g[2].any() and g[0].isfinite().all() for g in got.values())
    all_same(recorded(model, [batch], mean_over_own), got)
    source = attrax.live(model, [batch])
    means, sums = vectors(got), vectors(grads_of(source))
    same(attrax.graddot(source, source, target="mean").values, means @ means.T)
    assert sums[0].norm() > 2 * means[0].norm()


def test_k03_b11_gradients_are_not_divided_by_the_batch():
    model, batch = seeded(Net, 11), points(11, 6)
    right = brute(model, CLASSIFY, rows_of(batch))
    for size in (1, 2, 3, 6):
        pieces = [part(batch, i, i + size) for i in range(0, 6, size)]
        all_same(grads_of(attrax.live(model, pieces, CLASSIFY)), right)
        blocks: list[Any] = []
        with attrax.capture(model, sinks=[blocks.append], loss="example_mean"):
            for piece in pieces:
                mean_ce(model, piece).backward()
                model.zero_grad()
        all_same(grads_of(attrax.targeted(attrax.Blocks(blocks), "sum")), right)


def test_k03_b13_an_unknown_reduction_is_refused():
    """What a loop declares is what is recorded, and must be one of the names there are."""
    model, docs = seeded(WithLoss, 9), documents(9, [7, 3])
    batch, count = padded(docs), 8
    weights: dict[Literal["sum", "token_mean", "example_mean"], float]
    weights = {"sum": 1.0, "token_mean": 1 / count}
    blocks: list[Any] = []
    for declared, c in weights.items():
        blocks.clear()
        with attrax.capture(model, sinks=[blocks.append], loss=declared):
            logits = model(**batch)["logits"]
            each = F.cross_entropy(
                logits[:, :-1].mT, batch["labels"][:, 1:], ignore_index=IGNORE, reduction="none"
            )
            (c * each.sum()).backward()
        model.zero_grad()
        assert blocks[0].examples.weight.tolist() == [c, c] and blocks[0].examples.tokens.tolist() == [6, 2]
    with pytest.raises(ValueError, match="'garbage'"):
        attrax.capture(model, loss="garbage")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'garbage'"):
        attrax.graddot(attrax.Blocks(blocks), attrax.Blocks(blocks), target="garbage")  # pyright: ignore
    with pytest.raises(ValueError, match="is the mean over"), attrax.capture(model, loss="sum"):
        model(**batch)["loss"].backward()
    with (
        pytest.raises(ValueError, match="sums or of their means"),
        attrax.capture(model, loss="example_mean"),
    ):
        model(**batch)["logits"].sum().backward()


def test_k03_b09_gradient_accumulation():
    """The step is the sum of token gradients over all tokens of the step, for any split into micro-batches."""
    model, docs = seeded(WithLoss, 9), documents(9, [7, 3, 4, 2])
    language = seeded(LM, 9)
    language.load_state_dict(model.state_dict())
    each = brute(language, PREDICT, alone(docs))
    for cuts in ([(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 4)]):
        blocks: list[Any] = []
        with attrax.capture(model, sinks=[blocks.append]):
            for start, stop in cuts:
                batch = padded(docs[start:stop])
                own = int((batch["labels"][:, 1:] != IGNORE).sum())
                (model(**batch)["loss"] * own / 12).backward()
        model.zero_grad()
        all_same(grads_of(attrax.Blocks(blocks)), {n: g / 12 for n, g in each.items()})
        all_same(grads_of(attrax.targeted(attrax.Blocks(blocks), "sum")), each)


def test_k04_b15_tied_embedding_and_head():
    model, docs = seeded(lambda: LM(tied=True), 15), documents(15, [5, 3, 6])
    source = attrax.live(model, [padded(docs)])
    right = brute(model, PREDICT, alone(docs))
    all_same(grads_of(source), right)
    all_same(recorded(model, [padded(docs)], PREDICT), right)
    only = attrax.transformed(source, lambda name, leaf: leaf if name == "tok.weight" else None)
    flat = right["tok.weight"].flatten(1)
    same(attrax.graddot(only, only).values, flat @ flat.T)
    same(attrax.self_influence(only).values[:, 0], flat.square().sum(1))
    untied = seeded(LM, 15)
    untied.load_state_dict(model.state_dict())
    paths = brute(untied, PREDICT, alone(docs))
    same(paths["tok.weight"] + paths["head.weight"], right["tok.weight"])
    squared = paths["tok.weight"].flatten(1).square().sum(1) + paths["head.weight"].flatten(1).square().sum(1)
    assert (flat.square().sum(1) - squared).abs().min() > 1e-3


def test_k04_b18_one_norm_in_two_places():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f1, self.f2, self.norm, self.out = (
                nn.Linear(4, 5),
                nn.Linear(5, 5),
                nn.LayerNorm(5),
                nn.Linear(5, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.norm(self.f1(x)))
            return self.out(self.norm(h + self.f2(h)))

    both_give(seeded(Shared, 18), steps(18, 4, 3), each_position)


class Named(nn.Linear):
    """A layer whose input has a name of its own."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


class Keywords(nn.Module):
    """Every layer is called by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.l1, self.norm, self.l2 = (
            nn.Embedding(7, 4),
            Named(4, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.l1(hidden_states=self.emb(input=x))
        return self.l2(input=torch.tanh(self.norm(input=h)))


def test_k05_b19_keyword_calls():
    batch = steps(19, 5, 3) | {"x": torch.arange(15).view(5, 3) % 7}
    both_give(seeded(Keywords, 19), batch, each_position)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_k05_b21_a_model_compiled_before():
    model, batch = seeded(Net, 21), points(21, 5)
    right = brute(model, CLASSIFY, rows_of(batch))
    compiled: Any = torch.compile(model, backend="eager")
    compiled(batch["x"])
    all_same(grads_of(attrax.live(compiled, [batch], CLASSIFY)), right)
    with pytest.raises(RuntimeError, match="already compiled"):
        attrax.capture(compiled)
    blocks: list[Any] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"), torch.compiler.set_stance("force_eager"):
        F.cross_entropy(compiled(batch["x"]), batch["y"], reduction="sum").backward()
    all_same(grads_of(attrax.Blocks(blocks)), right)
    torch._dynamo.reset()


class Direct(Net):
    """Calls a layer past its hooks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.tanh(self.l1.forward(x)))


class Functional(Net):
    """Uses the weights of a layer that is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.tanh(F.linear(x, self.l1.weight, self.l1.bias)))


@pytest.mark.parametrize("build", [Direct, Functional])
def test_k05_b23_a_layer_called_past_its_hooks(build):
    """Right but slow and said so from data; from a loop, right once the module around it is recomputed."""
    model, batch = seeded(build, 23), points(23, 5)
    never = r"l1.weight: has a gradient but its layer was never captured"
    with pytest.warns(RuntimeWarning, match="l1.bias, l1.weight"):
        found = grads_of(attrax.live(model, [batch], CLASSIFY))
    all_same(found, brute(model, CLASSIFY, rows_of(batch)))
    with pytest.raises(RuntimeError, match=never):
        grads_of(attrax.live(model, [batch], CLASSIFY, strict=True))
    with pytest.raises(RuntimeError, match=never):
        recorded(model, [batch], CLASSIFY)
    around = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), build()), 23)
    for outer, inner in ((model, build), (around, "2")):
        both_give(outer, batch, CLASSIFY, recompute=inner)


class Experts(nn.Module):
    """One of three experts for every position; their weights are one tensor, the router's belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 5, 4))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = (x @ self.router.T).softmax(-1).max(-1)
        return self.out(share[..., None] * torch.tanh((self.experts[chosen] @ x[..., None])[..., 0]))


@pytest.mark.parametrize("inside", [False, True])
def test_k05_b25_experts_in_one_tensor(inside):
    """All 90 numbers of the block, as the whole model and inside another; an unused expert has no gradient."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Experts()) if inside else Experts(), 25)
    batch = steps(25, 4, 3)
    source = attrax.live(model, [batch], each_position)
    assert source.coverage.share == 1 and not source.coverage.gaps
    both_give(model, batch, each_position)
    block = model[1] if inside else model
    x = model[0](batch["x"]) if inside else batch["x"]
    used = F.one_hot((x @ block.router.T).argmax(-1), 3).any(1)
    got = grads_of(source)["1.experts" if inside else "experts"]
    assert torch.equal(got.flatten(2).any(2), used) and not used.all()


class Activations(nn.Module):
    """What follows a layer of any kind overwrites its output, or does not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.l1, self.l2, self.l3 = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.conv, self.relu = nn.LayerNorm(6), nn.Conv1d(1, 2, 3), nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.l1(x))
        h = self.relu(self.norm(h))
        h = self.relu(self.conv(h[:, None])).sum(1)
        h = self.l2(F.pad(h, (1, 1)))
        h = h.mul_(2).tanh_() if self.inplace else torch.tanh(2 * h)
        return self.l3(h)


def test_k06_b27_activations_in_place():
    model, plain = (seeded(lambda i=inplace: Activations(i), 27) for inplace in (True, False))
    batch = points(27, 5)
    both_give(model, batch, CLASSIFY, brute(plain, CLASSIFY, rows_of(batch)))
    with attrax.capture(model, loss="sum"):
        output = model(batch["x"])
        assert torch.equal(output, plain(batch["x"]))
        output.sum().backward()


def test_k06_b30_sums_over_batches_do_not_share_a_buffer():
    model, batch = seeded(Net, 30), points(30, 6)
    right = brute(model, CLASSIFY, rows_of(batch))
    blocks: list[Any] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"):
        for i in (0, 2, 4):
            CLASSIFY(model, part(batch, i, i + 2)).sum().backward()
            model.zero_grad(set_to_none=False)
    whole = attrax.collect(attrax.Blocks(blocks)).grads
    total = attrax.stored(aggregate(whole))
    all_same({n: g[0] for n, g in total.items()}, {n: g.sum(0) for n, g in right.items()})


def test_k07_b31_a_frozen_weight_with_a_trainable_bias():
    model = seeded(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), 31
    )
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    flags, batch = [p.requires_grad for p in model.parameters()], points(31, 5)
    right = brute(model, CLASSIFY, rows_of(batch))
    assert set(right) == {"0.bias", "4.weight", "4.bias"}
    both_give(model, batch, CLASSIFY, right)
    assert flags == [p.requires_grad for p in model.parameters()]


class Mixed(nn.Module):
    """Layers of other kinds, one parameter of each frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.l1 = nn.LayerNorm(4), nn.Conv1d(1, 2, 3), nn.Linear(4, 3)
        for frozen in (self.norm.weight, self.conv.weight, self.l1.bias):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.l1(torch.tanh(self.conv(self.norm(x)[:, None])).flatten(1))


def test_k07_b31_other_layers_that_are_frozen_in_part():
    model, batch = seeded(Mixed, 32), points(32, 5)
    right = brute(model, CLASSIFY, rows_of(batch))
    assert set(right) == {"norm.bias", "conv.bias", "l1.weight"}
    both_give(model, batch, CLASSIFY, right)


class LowRank(nn.Module):
    """A frozen layer with a trainable bias and a low-rank update, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        base.weight.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))

    def merged(self) -> nn.Linear:
        weight = self.lora_B["default"].weight @ self.lora_A["default"].weight
        self.base_layer.weight.data += 0.5 * weight.data
        return self.base_layer


def test_k07_b33_a_bias_inside_a_wrapped_layer():
    """Exactly the trainable parameters, under the wrapped names and, after the merge, under the plain ones."""

    def build() -> nn.Module:
        net = Net()
        net.l2.requires_grad_(False)
        net.l1 = LowRank(net.l1)
        return net

    model, batch = seeded(build, 33), points(33, 5)
    b = model.l1.lora_B["default"].weight
    start = torch.zeros_like(b), b.data.clone()
    for b.data in start:
        right = brute(model, CLASSIFY, rows_of(batch))
        assert set(right) == {
            "l1.base_layer.bias",
            "l1.lora_A.default.weight",
            "l1.lora_B.default.weight",
        }
        both_give(model, batch, CLASSIFY, right)
        assert bool(right["l1.lora_A.default.weight"].any()) == bool(b.any())
    model.l1 = model.l1.merged()
    right = brute(model, CLASSIFY, rows_of(batch))
    assert set(right) == {"l1.bias"}
    both_give(model, batch, CLASSIFY, right)


@pytest.mark.parametrize("how", ["reentrant", "nonreentrant"])
def test_k08_b35_b37_checkpointing(how):
    """A layer used inside and outside; rows once a step, none left over for the next."""
    model, batch = seeded(lambda: Checkpointed(how), 35), points(35, 4)
    right = brute(seeded(lambda: Checkpointed(None), 35), CLASSIFY, rows_of(batch))
    all_same(grads_of(attrax.live(model, [batch], CLASSIFY)), right)
    blocks: list[Any] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"):
        for _ in range(2):
            CLASSIFY(model, batch).sum().backward()
            model.zero_grad()
    assert len(blocks) == 2
    for block in blocks:
        assert {leaf.g.shape[:2] for n, leaf in block.grads.items() if "shared" not in n} == {(4, 1)}
        assert block.grads["shared.weight"].g.shape == (4, 2, 5)
        all_same(attrax.stored(block.grads), right)
