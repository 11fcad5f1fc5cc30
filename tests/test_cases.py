"""Faults that users of such libraries have reported, and what attrax does instead: gradients of models.

Each test names the kind of fault (K) and the report (B) it rebuilds; the right answers are brute force.
"""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import config
from torch import Tensor, nn

import attrax
from attrax.core import aggregate

from .case_models import (
    IGNORE,
    LM,
    Checkpointed,
    Net,
    WithLoss,
    all_same,
    brute,
    documents,
    grads_of,
    padded,
    part,
    points,
    rows_of,
    same,
    seeded,
    vectors,
)

CLASSIFY, PREDICT = attrax.classification(), attrax.causal_lm()


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """One thread for tiny tensors, and no run-time type checks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
    torch.set_num_threads(threads)


def mean_ce(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def alone(docs: list[Tensor]) -> list[dict[str, Tensor]]:
    return [padded([doc]) for doc in docs]


def test_k01_b01_padding_on_the_right():
    model, docs = seeded(LM, 1), documents(1, [5, 3, 7, 2])
    right = brute(model, PREDICT, alone(docs))
    for batches in ([padded(docs)], [padded(docs, 12)], [padded(docs[:1]), padded(docs[1:], 9)]):
        got = grads_of(attrax.live(model, batches))
        all_same(got, right)
        assert not got["tok.weight"][:, 0].any()


def test_k01_b03_one_fully_masked_example():
    def mean_over_own(model: nn.Module, batch: Any) -> Tensor:
        return PREDICT(model, batch) / PREDICT.tokens(batch).clamp_min(1)

    model, batch = seeded(LM, 3), padded(documents(3, [6] * 4))
    batch["labels"][2] = IGNORE
    got = grads_of(attrax.live(model, [batch], mean_over_own))
    all_same(got, brute(model, mean_over_own, rows_of(batch)))
    assert all(not g[2].any() and g[0].isfinite().all() for g in got.values())
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
    weights = {"sum": 1.0, "token_mean": 1 / count, "example_mean": 1 / 2}
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
    only = attrax.transformed(source, lambda name, leaf: leaf if name == "tok.weight" else None)
    flat = right["tok.weight"].flatten(1)
    same(attrax.graddot(only, only).values, flat @ flat.T)
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

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).mT, batch["y"], reduction="none").sum(1)

    gen = torch.Generator().manual_seed(18)
    batch = {"x": torch.randn(4, 3, 4, generator=gen).double(), "y": torch.randint(3, (4, 3), generator=gen)}
    model = seeded(Shared, 18)
    all_same(grads_of(attrax.live(model, [batch], loss)), brute(model, loss, rows_of(batch)))


def test_k05_b19_keyword_calls():
    class Keywords(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.l2(input=torch.tanh(self.l1(input=x)))

    model, batch = seeded(Keywords, 19), points(19, 5)
    all_same(grads_of(attrax.live(model, [batch], CLASSIFY)), brute(model, CLASSIFY, rows_of(batch)))


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


def test_k05_b23_a_layer_called_past_its_hooks():
    class Direct(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.l2(torch.tanh(self.l1.forward(x)))

    model, batch = seeded(Direct, 23), points(23, 5)
    with pytest.raises(RuntimeError, match=r"l1.weight: has a gradient but its layer was never captured"):
        grads_of(attrax.live(model, [batch], CLASSIFY, strict=True))
    with pytest.warns(RuntimeWarning, match="l1.bias, l1.weight"):
        found = grads_of(attrax.live(model, [batch], CLASSIFY))
    all_same(found, brute(model, CLASSIFY, rows_of(batch)))
    with pytest.raises(RuntimeError, match=r"l1.weight: has a gradient"), attrax.capture(model, loss="sum"):
        CLASSIFY(model, batch).sum().backward()


def test_k06_b27_activations_in_place():
    def layers(inplace: bool) -> nn.Module:
        relu = lambda: nn.ReLU(inplace=inplace)  # noqa: E731
        return nn.Sequential(nn.Linear(4, 6), relu(), nn.Linear(6, 6), relu(), nn.Linear(6, 3))

    model, plain, batch = seeded(lambda: layers(True), 27), seeded(lambda: layers(False), 27), points(27, 5)
    all_same(grads_of(attrax.live(model, [batch], CLASSIFY)), brute(plain, CLASSIFY, rows_of(batch)))
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
    all_same(grads_of(attrax.live(model, [batch], CLASSIFY)), right)
    blocks: list[Any] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"):
        CLASSIFY(model, batch).sum().backward()
    all_same(grads_of(attrax.Blocks(blocks)), right)
    assert flags == [p.requires_grad for p in model.parameters()]


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
