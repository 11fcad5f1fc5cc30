"""Faults that users of attribution libraries reported, as they would meet them here: each with its right value.

The right values are computed one example at a time by plain autograd in float64, without padding, batching or hooks.
Every test goes through the public package.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attrax
from attrax.core import factorized, gram, is_linear, kronecker_sums, self_gram, sq_norms, stored

Batch = Mapping[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class MLP(nn.Module):
    """Two linear layers around a tanh."""

    def __init__(self, sizes: Sequence[int] = (4, 5, 3), bias: bool = True) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(*sizes[:2], bias=bias), nn.Linear(*sizes[1:], bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.tanh(self.l1(x)))


class TinyLM(nn.Module):
    """A causal language model with learned positions that are looked up once for the whole batch."""

    def __init__(self, tied: bool = False, vocab: int = 11, width: int = 6) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(12, width)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        x = self.tok(input_ids) + self.pos(torch.arange(length)[None])
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        seen = torch.ones(length, length, dtype=torch.bool).tril().expand(len(input_ids), -1, -1)
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, :].bool() | torch.eye(length, dtype=torch.bool)
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
        return self.head(x + self.out(scores.softmax(-1) @ v))


def xent(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a classifier, one loss an example."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def classified(n: int = 6, width: int = 4, classes: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(n, width), "y": torch.randint(classes, (n,))}


def documents(*lengths: int) -> list[Tensor]:
    return [torch.randint(1, 11, (n,)) for n in lengths]


def padded(docs: Sequence[Tensor], width: int | None = None) -> dict[str, Tensor]:
    width = width or max(map(len, docs))
    rows = torch.stack([F.pad(d, (0, width - len(d))) for d in docs])
    return {
        "input_ids": rows,
        "attention_mask": (rows > 0).long(),
        "labels": rows.masked_fill(rows == 0, -100),
    }


def one_by_one(model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> dict[str, Tensor]:
    """Per-example gradients of every trainable parameter by plain autograd."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for loss in losses:
        grads = torch.autograd.grad(loss(), list(named.values()), allow_unused=True)
        rows.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), grads, strict=True)]
        )
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(named)}


def rows_of(model: nn.Module, batch: Batch, loss: Loss = xent) -> dict[str, Tensor]:
    size = len(next(iter(batch.values())))
    cut = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(size)]
    return one_by_one(model, [lambda row=row: loss(model, row).sum() for row in cut])


def doc_rows(model: nn.Module, docs: Sequence[Tensor]) -> dict[str, Tensor]:
    lm = attrax.causal_lm()
    alone = [{"input_ids": d[None], "labels": d[None]} for d in docs]
    return one_by_one(model, [lambda b=b: lm(model, b).sum() for b in alone])


def captured(model: nn.Module, batches: Sequence[Batch], loss: Any = xent, **options: Any) -> attrax.GradTree:
    return attrax.collect(attrax.live(model.eval(), list(batches), loss, **options)).grads


def agree(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert set(found) == set(right)
    for name, value in right.items():
        scale = max(1e-300, float(value.abs().max()))
        assert float((found[name] - value).abs().max()) <= 1e-10 * scale + 1e-14, name


def flat(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in grads.values()], 1)


@pytest.mark.parametrize("cuts", [[4], [1, 3]])
@pytest.mark.parametrize("width", [7, 12])
def test_right_padding_changes_nothing(cuts: list[int], width: int) -> None:
    model, docs = TinyLM(), documents(5, 3, 7, 2)
    whole = padded(docs, width)
    parts = zip(*(v.split(cuts) for v in whole.values()), strict=True)
    batches = [dict(zip(whole, part, strict=True)) for part in parts]
    found = stored(captured(model, batches, attrax.causal_lm()))
    agree(found, doc_rows(model, docs))
    assert not found["tok.weight"][:, 0].any()


def test_an_example_without_labels_has_no_gradient_and_spoils_nothing() -> None:
    model, docs = TinyLM(), documents(6, 6, 6)
    batch = padded(docs)
    batch["labels"][1] = -100
    found = stored(captured(model, [batch], attrax.causal_lm()))
    right = doc_rows(model, docs)
    agree(
        found,
        {n: g * torch.tensor([1.0, 0.0, 1.0]).reshape(3, *[1] * (g.ndim - 1)) for n, g in right.items()},
    )


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_gradients_do_not_depend_on_batch_size_or_loss_reduction(size: int) -> None:
    model, batch = MLP(), classified()
    blocks: list[attrax.Block] = []
    with attrax.capture(model, sinks=[blocks.append], loss="example_mean"):
        for k in range(0, 6, size):
            part = {n: v[k : k + size] for n, v in batch.items()}
            model.zero_grad()
            xent(model, part).mean().backward()
    source = attrax.targeted(attrax.Blocks(blocks), "sum")
    agree(stored(attrax.collect(source).grads), rows_of(model, batch))


def test_accumulated_micro_batches_make_the_step_of_one_batch() -> None:
    model, docs = TinyLM(), documents(7, 3, 4, 2)
    total = sum(len(d) - 1 for d in docs)
    weigh = lambda inputs, rows: (torch.full((rows,), 1 / total), None)  # noqa: E731
    blocks: list[attrax.Block] = []
    with attrax.capture(model, sinks=[blocks.append], loss=weigh):
        for part in (docs[:2], docs[2:]):
            (attrax.causal_lm()(model, padded(part)).sum() / total).backward()
    shares = [stored(block.grads) for block in blocks]
    right = {n: g.sum(0) / total for n, g in doc_rows(model, docs).items()}
    agree({n: sum(s[n].sum(0) for s in shares) for n in right}, right)  # type: ignore[misc]


def test_an_unknown_reduction_is_refused_before_anything_runs() -> None:
    with pytest.raises((ValueError, TypeError), match="garbage"):
        attrax.capture(MLP(), loss="garbage")  # type: ignore[arg-type]


def test_a_tied_weight_is_one_gradient_with_its_cross_terms() -> None:
    model, docs = TinyLM(tied=True), documents(5, 3, 6)
    grads = captured(model, [padded(docs)], attrax.causal_lm())
    right = doc_rows(model, docs)
    agree(stored(grads), right)
    tied = attrax.GradTree({"tok.weight": grads["tok.weight"]})
    rows = right["tok.weight"].flatten(1)
    torch.testing.assert_close(sq_norms(tied), rows.square().sum(1), rtol=1e-11, atol=0)
    torch.testing.assert_close(self_gram(tied), rows @ rows.T, rtol=1e-11, atol=1e-12)


def test_a_norm_used_twice_sums_its_uses() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f1, self.f2 = nn.Linear(4, 5), nn.Linear(5, 5)
            self.norm, self.out = nn.LayerNorm(5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.norm(self.f1(x)))
            return self.out(self.norm(h + self.f2(h)))

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]).transpose(1, 2), b["y"], reduction="none").sum(1)

    model, batch = Shared(), {"x": torch.randn(4, 3, 4), "y": torch.randint(3, (4, 3))}
    agree(stored(captured(model, [batch], loss)), rows_of(model, batch, loss))


def test_layers_called_by_keyword_are_seen() -> None:
    class Keywords(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.l2(input=torch.tanh(self.l1(input=x)))

    model, batch = Keywords(), classified()
    agree(stored(captured(model, [batch])), rows_of(model, batch))


def test_a_compiled_model_is_refused_by_capture_and_right_live() -> None:
    model, batch = MLP(), classified()
    right = rows_of(model, batch)
    compiled = torch.compile(model, backend="eager")
    compiled(batch["x"])
    with pytest.raises(RuntimeError, match="compiled"):
        attrax.capture(compiled, loss="sum")  # type: ignore[arg-type]
    agree(stored(captured(compiled, [batch])), right)  # type: ignore[arg-type]


def test_a_layer_whose_hooks_are_bypassed_is_named() -> None:
    class Bypass(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.l2(torch.tanh(self.l1.forward(x)))

    with pytest.raises(RuntimeError, match="l1"):
        captured(Bypass(), [classified()])


def test_parameters_without_a_rule_are_listed_with_their_share() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 5, 4))
            self.out = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            picked = (x @ self.router.T).argmax(-1)
            return self.out(torch.tanh(torch.einsum("noi,ni->no", self.experts[picked], x)))

    source = attrax.live(Experts().eval(), [classified()], xent)
    assert source.coverage.share == pytest.approx(18 / 90)
    assert {gap.parameter for gap in source.coverage.gaps} == {"router", "experts"}
    with pytest.raises(ValueError, match="experts"):
        attrax.live(Experts().eval(), [classified()], xent, strict=True)


def test_in_place_activations_change_nothing() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(True), nn.Linear(6, 3)
    )
    batch = classified()
    agree(stored(captured(model, [batch])), rows_of(model, batch))


def test_sums_over_batches_do_not_alias_reused_gradients() -> None:
    model, batch = MLP(), classified()
    right = {n: g.sum(0) for n, g in rows_of(model, batch).items()}
    blocks: list[attrax.Block] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"):
        for k in (0, 2, 4):
            model.zero_grad(set_to_none=False)
            xent(model, {n: v[k : k + 2] for n, v in batch.items()}).sum().backward()
    sums = [stored(attrax.core.aggregate(block.grads)) for block in blocks]
    agree({n: sum(s[n][0] for s in sums) for n in right}, right)  # type: ignore[misc]


def test_frozen_parameters_stay_out_and_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    batch = classified()
    found = stored(captured(model, [batch]))
    assert set(found) == {"0.bias", "4.weight", "4.bias"}
    agree(found, rows_of(model, batch))
    assert [p.requires_grad for p in model.parameters()] == [False, True, False, False, True, True]


class Checkpointed(nn.Module):
    """A weight used inside and outside a checkpointed block."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.emb, self.shared = nn.Linear(4, 5), nn.Linear(5, 5)
        self.mid, self.out = nn.Linear(5, 5), nn.Linear(5, 3)
        self.reentrant = reentrant

    def block(self, h: Tensor) -> Tensor:
        return torch.tanh(self.mid(torch.tanh(self.shared(h))))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.emb(x))
        plain = self.reentrant is None
        h = self.block(h) if plain else checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.out(torch.tanh(self.shared(h)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_count_once(reentrant: bool) -> None:
    model, plain, batch = Checkpointed(reentrant), Checkpointed(None), classified(5)
    plain.load_state_dict(model.state_dict())
    right = rows_of(plain, batch)
    blocks: list[attrax.Block] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"):
        for _ in range(2):
            model.zero_grad()
            xent(model, batch).sum().backward()
    assert [len(block.examples) for block in blocks] == [5, 5]
    for block in blocks:
        agree(stored(block.grads), right)
    agree(stored(captured(model, [batch])), right)


def test_the_bias_norm_of_a_sequence_is_that_of_its_sum() -> None:
    model, batch = nn.Linear(4, 3), {"x": torch.randn(2, 5, 4), "y": torch.randn(2, 5, 3)}

    def loss(net: nn.Module, b: Batch) -> Tensor:
        return 0.5 * (net(b["x"]) - b["y"]).square().sum((1, 2))

    grads, right = captured(model, [batch], loss), rows_of(model, batch, loss)
    torch.testing.assert_close(sq_norms(grads), flat(right).square().sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(self_gram(grads), flat(right) @ flat(right).T, rtol=1e-12, atol=1e-12)


def test_transposed_weights_keep_their_layout() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(4, 4), nn.Tanh(), conv1d(3, 4))
    batch = classified(5)
    grads = captured(model, [batch])
    agree(stored(grads), rows_of(model, batch))
    assert kronecker_sums(grads["2.weight"]).a.shape == (5, 5)  # type: ignore[arg-type]


def test_bfloat16_covariances_keep_growing() -> None:
    row = torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.bfloat16)
    leaf = factorized("w", row.expand(8, 1, 4), torch.ones(8, 1, 1, dtype=torch.bfloat16))
    total = kronecker_sums(leaf)
    for _ in range(1023):
        total = attrax.core.merge(total, kronecker_sums(leaf))
    assert torch.equal(total.a, 8192 * torch.outer(row, row).float())


def test_mixed_dtypes_are_multiplied_in_float32() -> None:
    a, g = torch.randn(3, 5, 4).bfloat16(), torch.randn(3, 5, 2).float()
    w = stored(attrax.GradTree({"w": factorized("w", a, g)}))["w"]
    torch.testing.assert_close(
        w.double(), torch.einsum("nto,nti->noi", g.double(), a.double()), rtol=1e-5, atol=1e-6
    )


def test_a_loss_scale_is_divided_out() -> None:
    model, batch = MLP(), classified(4)
    right = flat(rows_of(model, batch))
    blocks: list[attrax.Block] = []
    scaled = lambda inputs, rows: (torch.full((rows,), 1024.0), None)  # noqa: E731
    with attrax.capture(model, sinks=[blocks.append], loss=scaled):
        (1024 * xent(model, batch).sum()).backward()
    train = attrax.Blocks(blocks)
    scores = attrax.graddot(train, train)
    torch.testing.assert_close(scores.values, right @ right.T, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("width", [4, 6])
def test_covariances_count_valid_tokens_only(width: int) -> None:
    model, lengths = nn.Linear(3, 2), torch.tensor([4, 2, 3])
    mask = (torch.arange(width) < lengths[:, None]).double()
    batch = {"x": torch.randn(3, width, 3), "y": torch.randn(3, width, 2), "mask": mask}

    def loss(net: nn.Module, b: Batch) -> Tensor:
        return 0.5 * ((net(b["x"]) - b["y"]).square().sum(2) * b["mask"]).sum(1)

    sums = kronecker_sums(captured(model, [batch], loss)["weight"])  # type: ignore[arg-type]
    valid = torch.cat([batch["x"], torch.ones(3, width, 1)], 2)[mask.bool()]
    assert (int(sums.rows), int(sums.examples)) == (9, 3)
    torch.testing.assert_close(sums.a, valid.T @ valid, rtol=1e-12, atol=0)
    assert float(sums.a[-1, -1]) == 9


def _rotated(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Dense covariance eigenbasis of layer l2 and its gradients in it."""
    with torch.no_grad():
        a = torch.tanh(model.l1(batch["x"]))  # type: ignore[operator]
        p = F.softmax(model(batch["x"]), -1) - F.one_hot(batch["y"], 3)
    la, ua = torch.linalg.eigh(a.T @ a / len(a))
    lg, ug = torch.linalg.eigh(p.T @ p / len(p))
    return la, ua, lg, ug, ug.T @ torch.einsum("no,ni->noi", p, a) @ ua


def test_the_eigenvalue_correction_that_was_asked_for_is_used() -> None:
    model = MLP((3, 4, 3), bias=False)
    train, query = classified(8, 3), classified(2, 3)
    la, ua, lg, ug, turned = _rotated(model, train)
    grads = rows_of(model, query)["l2.weight"]
    asked = ug.T @ grads @ ua
    sides = [attrax.live(model.eval(), [b], xent, include="l2") for b in (train, query)]
    for method, values in ((attrax.ekfac, turned.square().mean(0)), (attrax.kfac, torch.outer(lg, la))):
        right = torch.einsum("qoi,noi->nq", asked / (values + 0.1 * values.mean()), turned)
        torch.testing.assert_close(method(*sides).values, right, rtol=1e-8, atol=1e-9)


def test_one_nonfinite_example_is_named_or_skipped() -> None:
    model, batch = MLP(), classified()
    keep = [0, 1, 2, 3, 5]
    right = flat(rows_of(model, {k: v[keep] for k, v in batch.items()}))
    batch["x"][4, :2] = torch.tensor([float("inf"), float("-inf")])
    named = {**batch, "example_ids": [f"e{i}" for i in range(6)]}
    with pytest.raises(ValueError, match="e4"):
        attrax.fit_kfac(attrax.live(model.eval(), [named], xent))
    healthy = attrax.live(model.eval(), [named], xent, on_nonfinite="skip")
    torch.testing.assert_close(
        self_gram(attrax.collect(healthy).grads), right @ right.T, rtol=1e-11, atol=1e-12
    )
    assert {name for name, _ in healthy.skipped} == {"e4"}


def test_positive_scores_mean_helpful() -> None:
    n, damping = 12, 0.1
    X, y, Xq, yq = torch.randn(n, 3), torch.randn(n), torch.randn(4, 3), torch.randn(4)

    def solve(keep: list[int]) -> Tensor:
        H = X[keep].T @ X[keep] / n + damping * torch.eye(3)
        return torch.linalg.solve(H, X[keep].T @ y[keep] / n)

    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(solve(list(range(n)))[None])

    def loss(net: nn.Module, b: Batch) -> Tensor:
        return 0.5 * (net(b["x"]).squeeze(1) - b["y"]).square()

    train, query = ({"x": a, "y": b[:, None].squeeze(1)} for a, b in ((X, y), (Xq, yq)))
    H = X.T @ X / n + damping * torch.eye(3)
    solved = attrax.core.materialized(
        "weight", (rows_of(model, query, loss)["weight"].squeeze(1) @ torch.linalg.inv(H) / n).unsqueeze(1)
    )
    scores = gram(captured(model, [train], loss), attrax.GradTree({"weight": solved}))
    truth = []
    for i in range(n):
        w = solve([j for j in range(n) if j != i])
        with torch.no_grad():
            truth.append(0.5 * (Xq @ w - yq).square() - loss(model, query))
    loo = torch.stack(truth)
    assert float(torch.corrcoef(torch.stack([loo.flatten(), scores.flatten()]))[0, 1]) > 0.95
    plain = attrax.graddot(*(attrax.live(model.eval(), [b], loss) for b in (train, query)))
    assert "higher = more helpful" in plain.about["sign"]


def test_ties_share_their_average_rank() -> None:
    a, b = torch.tensor([1.0, 2, 2, 3, 5, 2]), torch.tensor([2.0, 1, 3, 3, 4, 3])
    assert attrax.average_ranks(a).tolist() == [1, 3, 3, 5, 6, 3]
    ranks = torch.tensor([[1.0, 3, 3, 5, 6, 3], [2.0, 1, 4, 4, 6, 4]])
    assert attrax.spearman(a, b) == pytest.approx(float(torch.corrcoef(ranks)[0, 1]))


def test_aggregation_happens_on_scores() -> None:
    S = torch.randn(5, 3)
    scores = attrax.Scores(S, tuple("abcde"), tuple("xyz"))
    torch.testing.assert_close(scores.aggregate("sum").values[:, 0], S.sum(1))
    torch.testing.assert_close(scores.aggregate("mean").values[:, 0], S.mean(1))
    assert scores.aggregate("max").values.shape == (5, 1)
    one = attrax.Scores(S[:1], ("a",), tuple("xyz")).aggregate("max")
    assert one.values.tolist() == [[float(S[0].max())]]


def test_empty_batches_add_nothing_and_do_not_raise() -> None:
    model, batch = MLP(), classified(5)
    parts = [{k: v[a:b] for k, v in batch.items()} for a, b in ((0, 3), (3, 3), (3, 5))]
    grads = captured(model, parts)
    agree(stored(grads), rows_of(model, batch))
    sides = [attrax.live(model.eval(), p, xent) for p in (parts, [batch])]
    one, other = (attrax.fit_kfac(side) for side in sides)
    assert one.examples == other.examples == 5
    for name, values in one.eigenvalues.items():
        torch.testing.assert_close(values, other.eigenvalues[name], rtol=1e-9, atol=1e-12)


def test_two_orders_of_the_data_give_scores_matched_by_id() -> None:
    model, batch = MLP(), classified()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    names = [f"e{i}" for i in range(6)]
    shuffled = {k: v[order] for k, v in batch.items()} | {"example_ids": [names[i] for i in order]}
    in_order = attrax.live(model.eval(), [{**batch, "example_ids": names}], xent)
    other = attrax.live(model.eval(), [shuffled], xent)
    right = attrax.ekfac(in_order, in_order)
    found = attrax.influence(attrax.fit_ekfac(in_order), other, in_order).in_order(names)
    torch.testing.assert_close(found.values, right.values, rtol=1e-9, atol=1e-10)


def test_sampler_duplicates_are_stored_once_in_data_order(tmp_path: Any) -> None:
    model, batch = MLP(), classified(10)
    right = flat(rows_of(model, batch))
    names = [f"e{i}" for i in range(10)]
    dealt = [*range(10), 0, 1]
    for rank in range(4):
        mine = dealt[rank::4]
        part = {k: v[mine] for k, v in batch.items()} | {"example_ids": [names[i] for i in mine]}
        with attrax.store(tmp_path / "store", run="job", rank=rank) as sink:
            sink(attrax.collect(attrax.live(model.eval(), [part], xent)))
    found = attrax.open_store(tmp_path / "store")
    assert len(found) == 10
    assert sorted(found.ids) == sorted(names)
    rows = flat(stored(found.block(names).grads))
    order = [list(stored(found.block(names).grads)), list(rows_of(model, batch))]
    right = torch.cat([rows_of(model, batch)[n].flatten(1) for n in order[0]], 1)
    torch.testing.assert_close(rows, right, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_model(fails: bool) -> None:
    model, batch = MLP().train(), classified(4)
    model.l1.bias.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)

    def state() -> list[Any]:
        hooks = [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in model.modules()
        ]
        kept = [
            (p.tolist(), p.grad.tolist(), p.requires_grad) for p in model.parameters() if p.grad is not None
        ]
        modes = [m.training for m in model.modules()]
        return [hooks, kept, modes, list(model.state_dict()), torch.get_rng_state().sum()]

    def loss(net: nn.Module, b: Batch) -> Tensor:
        out = xent(net, b)
        if fails:
            raise KeyboardInterrupt
        return out

    before = state()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            attrax.collect(attrax.live(model, [batch], loss))
    else:
        attrax.collect(attrax.live(model, [batch], loss))
    with torch.no_grad():
        model(batch["x"])
    assert state() == before


def test_gradients_are_those_of_the_model_as_it_is_now() -> None:
    model, batch = MLP().float(), classified(5)
    source = attrax.live(model.eval(), [batch], xent)
    model.double()
    model.load_state_dict(MLP().state_dict())
    agree(stored(attrax.collect(source).grads), rows_of(model, batch))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_projections_weigh_layers_of_every_width_alike(kind: Any) -> None:
    for width in (48, 192, 768):
        u = torch.randn(1, 1, width)
        leaf = factorized("w", u, torch.ones(1, 1, 1))
        ratios = []
        for seed in range(200):
            spec = attrax.Projection(16, kind=kind, seed=seed)
            x = attrax.core.project(attrax.GradTree({"w": leaf}), spec)
            ratios.append(float(sq_norms(x)) / float(u.square().sum()))
        values = torch.tensor(ratios)
        assert abs(float(values.mean()) - 1) < 5 * float(values.std()) / math.sqrt(len(values)) + 1e-3


def test_the_default_scope_leaves_out_norms_and_embeddings() -> None:
    grads = captured(TinyLM(tied=True), [padded(documents(5, 4))], attrax.causal_lm())
    assert {name for name, leaf in grads.items() if is_linear(name, leaf)} == {"qkv.weight", "out.weight"}
