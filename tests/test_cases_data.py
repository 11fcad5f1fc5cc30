"""Faults that users of such libraries have reported, and what attrax does instead: layouts, types, batches, traces.

Each test names the kind of fault (K) and the report (B) it rebuilds; the right answers are brute force.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import attrax
from attrax.core import aggregate, factorized

from .case_models import (
    CLASSIFY,
    LM,
    PREDICT,
    Net,
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


@pytest.mark.parametrize("ids", ["[1, T]", "[T]"])
def test_k09_b39_positions_without_an_example_axis(ids):
    """One row a document, not one summed row."""

    class Positions(LM):
        def __init__(self) -> None:
            super().__init__()
            self.pos.register_forward_pre_hook(lambda _, args: args[0][0] if ids == "[T]" else None)

    model, docs = seeded(Positions, 39), documents(39, [5, 5, 5])
    both_give(model, padded(docs), PREDICT, brute(model, PREDICT, alone(docs)))
    both_give(model, padded(docs, 7), PREDICT, brute(model, PREDICT, alone(docs)))


class Axes(nn.Module):
    """Two layers and a norm that see examples and positions along one axis, or positions first."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.l1, self.norm, self.l2 = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        by_position = self.order != "batch and time"
        h = x.transpose(0, 1) if by_position else x
        shape = h.shape[:2]
        h = h if self.order == "time first" else h.flatten(0, 1)
        h = self.l2(torch.tanh(self.norm(self.l1(h)))).reshape(*shape, 3)
        return h.transpose(0, 1) if by_position else h


@pytest.mark.parametrize("order", ["batch and time", "time and batch", "time first"])
@pytest.mark.parametrize("T", [4, 3, 1])
def test_k09_b41_examples_along_another_axis(order, T):
    """Three rows for three examples, also where there are as many positions as examples."""
    model, batch = seeded(lambda: Axes(order), 41), steps(41, 3, T)
    both_give(model, batch, each_position)
    source = attrax.live(model, [part(batch, 0, 1), part(batch, 1, 3)], each_position)
    all_same(grads_of(source), brute(model, each_position, rows_of(batch)))


IMAGES = {
    "grouped": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (2, 1), 2), (4, 8, 7)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, padding_mode="circular"), (4, 5, 6)),
    "even_same": (lambda: nn.Conv1d(4, 2, 4, padding="same", groups=2), (4, 7)),
    "volume": (lambda: nn.Conv3d(2, 3, 2, (1, 2, 1), dilation=(1, 1, 2)), (2, 3, 4, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), 2, (1, 0), (1, 0), 2), (4, 3, 4)),
    "no_bias": (lambda: nn.Conv2d(4, 4, 2, groups=2, bias=False), (4, 3, 3)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", IMAGES)
def test_k10_b44_convolutions(kind):
    """Strides, dilations, paddings and groups; the norm over groups of channels beside them."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).flatten(1).square().cumsum(1).tanh().sum(1)

    build, shape = IMAGES[kind]
    gen = torch.Generator().manual_seed(44)
    batch = {"x": torch.randn(3, *shape, generator=gen, dtype=torch.float64) / 4}
    model = seeded(lambda: nn.Sequential(build()), 44)
    both_give(model, batch, loss)
    source = attrax.live(model, [batch], loss)
    G = vectors(brute(model, loss, rows_of(batch)))
    same(attrax.graddot(source, source).values, G @ G.T)
    same(attrax.self_influence(source).values[:, 0], G.square().sum(1))


def test_k10_b47_transposed_weights():
    """The real GPT-2 layer; a square weight, so that a transposed gradient has its shape; A is in x in."""
    model = seeded(lambda: nn.Sequential(Conv1D(4, 4), nn.Tanh(), Conv1D(3, 4)), 47)
    batch = points(47, 5)
    source = attrax.live(model, [batch], CLASSIFY)
    right = brute(model, CLASSIFY, rows_of(batch))
    all_same(grads_of(source), right)
    all_same(recorded(model, [batch], CLASSIFY), right)
    assert (right["0.weight"] - right["0.weight"].mT).abs().max() > 0.5 * right["0.weight"].abs().max()
    fit = attrax.fit_kfac(attrax.transformed(source, lambda n, leaf: leaf if n == "0.weight" else None))
    basis = fit.bases["0.weight"]
    assert basis.ua is not None
    ones = torch.cat([batch["x"], torch.ones(5, 1)], 1).double()
    same(basis.ua @ basis.la.diag() @ basis.ua.T, ones.T @ ones / 5)


def test_k11_b51_activations_and_gradients_of_different_precision():
    gen = torch.Generator().manual_seed(51)
    a = torch.randn(3, 5, 4, generator=gen).bfloat16()
    g = torch.randn(3, 5, 2, generator=gen)
    tree = attrax.GradTree({"w": factorized("w", a, g)})
    right = torch.einsum("nto,nti->noi", g.double(), a.double())
    got = attrax.stored(tree)["w"]
    assert got.dtype == torch.float32
    same(got.double(), right, within=1e-6)
    assert (torch.einsum("nto,nti->noi", g.bfloat16(), a).double() - right).abs().max() > 1e-3


def test_k11_b51_autocast():
    """Layers in bfloat16 of a float32 model: gradients in float32, as near to autograd's as bfloat16 is."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return each_position(model, batch).float()

    model, batch = seeded(Net, 51, torch.float32), steps(51, 3, 5)
    batch["x"] = batch["x"].float()
    right = brute(model, loss, rows_of(batch))
    for got in (grads_of(attrax.live(model, [batch], loss)), recorded(model, [batch], loss)):
        assert {g.dtype for g in got.values()} == {torch.float32}
        all_same(got, right, within=1e-2)


def test_k11_b53_a_loss_scale_does_not_reach_the_scores():
    model, batch = seeded(Net, 53), points(53, 4)
    right = brute(model, CLASSIFY, rows_of(batch))
    query = attrax.live(model, [batch], CLASSIFY)
    blocks: list[Any] = []
    scaled = lambda inputs, rows: (torch.full((rows,), 1024 / rows), None)  # noqa: E731
    with attrax.capture(model, sinks=[blocks.append], loss=scaled):
        (1024 * mean_ce(model, batch)).backward()
    model.zero_grad()
    train = attrax.Blocks(blocks)
    all_same(grads_of(attrax.targeted(train, "sum")), right)
    G = vectors(right)
    same(attrax.graddot(train, query).values, G @ G.T)


@pytest.mark.parametrize("declared", ["example_mean", "sum"])
def test_k11_b53_the_scale_of_a_loop_that_scales_its_own_loss(declared):
    model, batch = seeded(Net, 53), points(53, 4)
    right = brute(model, CLASSIFY, rows_of(batch))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    blocks: list[Any] = []
    loss = mean_ce if declared == "example_mean" else (lambda m, b: CLASSIFY(m, b).sum())
    with attrax.capture(model, sinks=[blocks.append], loss=declared, scaler=scaler):
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    for block in blocks:
        all_same(grads_of(attrax.targeted(attrax.Blocks([block]), "sum")), right)


def test_k17_b81_a_batch_without_examples(tmp_path):
    model, batch = seeded(Net, 81), points(81, 5)
    pieces = [part(batch, 0, 3), part(batch, 3, 3), part(batch, 3, 5)]
    right = brute(model, CLASSIFY, rows_of(batch))
    source = attrax.live(model, pieces, CLASSIFY)
    all_same(grads_of(source), right)
    fit, whole = attrax.fit_ekfac(source), attrax.fit_ekfac(attrax.live(model, [batch], CLASSIFY))
    assert fit.examples == whole.examples == 5
    for name in fit.eigenvalues:
        same(fit.eigenvalues[name], whole.eigenvalues[name])
    all_same(recorded(model, pieces, CLASSIFY), right)
    with attrax.store(tmp_path) as sink:
        for piece in [*pieces, pieces[1]]:
            for examples, leaves in attrax.live(model, [piece], CLASSIFY).map(lambda name, leaf, _: leaf):
                sink(attrax.Block(attrax.GradTree(leaves), examples))
    all_same(grads_of(attrax.open_store(tmp_path)), right)
    with pytest.raises(ValueError, match="yielded no examples"):
        grads_of(attrax.live(model, [pieces[1]], CLASSIFY))


def test_k17_b83_a_filler_row_silences_no_example():
    """Seven examples in batches of four: the filler weighs nothing, the last example what it weighs."""

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        return CLASSIFY(model, batch) * batch["w"]

    model, batch = seeded(Net, 83), points(83, 7)
    right = brute(model, CLASSIFY, rows_of(batch))
    filled = {k: torch.cat([v, v[-1:]]) for k, v in batch.items()}
    filled |= {"w": torch.tensor([1.0] * 7 + [0.0])}
    names = [f"x{i}" for i in (0, 1, 2, 3, 4, 5, 6, 6)]
    pieces = [part(filled | {"example_ids": names}, i, i + 4) for i in (0, 4)]
    block = attrax.collect(attrax.live(model, pieces, weighted))
    got = attrax.stored(block.grads)
    all_same({n: g[:7] for n, g in got.items()}, right)
    assert all(not g[7].any() for g in got.values()) and vectors(got)[6].norm() > 0.1
    total = attrax.stored(aggregate(block.grads))
    all_same({n: g[0] for n, g in total.items()}, {n: g.sum(0) for n, g in right.items()})
    query = attrax.live(model, [part(batch, 0, 2)], CLASSIFY)
    scores, _ = attrax.graddot(attrax.live(model, pieces, weighted), query).per_example()
    G = vectors(right)
    assert scores.ids == tuple(names[:7])
    same(scores.values, G @ G[:2].T)


def test_k18_b85_a_sampler_that_repeats_examples(tmp_path):
    """Ten examples dealt to four ranks in turn, the first two twice: ten rows in data order."""
    model, batch = seeded(Net, 85), points(85, 10)
    right = brute(model, CLASSIFY, rows_of(batch))
    dealt = [*range(10), 0, 1]
    for rank in range(4):
        index = torch.tensor(dealt[rank::4])
        piece = {k: v[index] for k, v in batch.items()} | {"example_ids": [f"x{i}" for i in index.tolist()]}
        with attrax.store(tmp_path, run="job", rank=rank) as sink:
            sink(attrax.collect(attrax.live(model, [piece], CLASSIFY)))
    source = attrax.open_store(tmp_path)
    assert attrax.collect(source).examples.ids == tuple(f"x{i}" for i in range(10))
    all_same(grads_of(source), right)


def test_k18_b87_two_passes_in_different_orders():
    """Fit on one order, score on another: equal factors, and scores that are matched by id."""
    model, batch = seeded(Net, 87), points(87, 6) | {"example_ids": torch.arange(6)}
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    in_file, shuffled = (
        attrax.live(model, [{k: v[index] for k, v in batch.items()}], CLASSIFY)
        for index in (torch.arange(6), order)
    )
    first, second = attrax.fit_ekfac(in_file), attrax.fit_ekfac(shuffled)
    names = [str(i) for i in range(6)]
    a = attrax.influence(first, in_file, in_file).in_order(names)
    b = attrax.influence(second, shuffled, shuffled).in_order(names).query(*names)
    same(a.values, b.values)
    G = vectors(brute(model, CLASSIFY, rows_of(points(87, 6))))
    same(attrax.graddot(shuffled, in_file).in_order(names).values, G @ G.T)


class Normed(nn.Module):
    """A norm over the batch between two layers, with statistics that are not the initial ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.l1, self.bn, self.l2 = nn.Linear(4, 5), nn.BatchNorm1d(5, **options), nn.Linear(5, 3)
        if self.bn.running_mean is not None and self.bn.running_var is not None:
            self.bn.running_mean.copy_(torch.linspace(-0.3, 0.4, 5))
            self.bn.running_var.copy_(torch.linspace(0.6, 1.7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.tanh(self.bn(self.l1(x))))


def test_k23_b108_batch_norm_with_its_running_statistics():
    """Right for every batch size, and the statistics stay what they were."""
    model, batch = seeded(Normed, 108), points(108, 6)
    right = brute(model, CLASSIFY, rows_of(batch))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for size in (1, 2, 6):
        pieces = [part(batch, i, i + size) for i in range(0, 6, size)]
        all_same(grads_of(attrax.live(model, pieces, CLASSIFY)), right)
        all_same(recorded(model, pieces, CLASSIFY), right)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_k23_b108_batch_norm_with_batch_statistics_is_refused(options):
    model, batch = seeded(lambda: Normed(**options), 108), points(108, 6)
    model.train(not options)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'bn' \(BatchNorm1d\).*undefined"):
        grads_of(attrax.live(model, [batch], CLASSIFY))
    with pytest.raises(ValueError, match="'bn' is a BatchNorm with batch statistics"):
        recorded(model, [batch], CLASSIFY)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_k23_b108_other_losses_without_gradients_of_examples_are_refused():
    """Negatives from the batch, and noise."""

    def contrastive(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).softmax(0).square().sum(1)

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return CLASSIFY(model, batch | {"x": batch["x"] + torch.randn_like(batch["x"])})

    model, batch = seeded(Net, 109), points(109, 6)
    with pytest.raises(RuntimeError, match="depends on the other examples of its batch"):
        grads_of(attrax.live(model, [batch], contrastive))
    with pytest.raises(ValueError, match="draws random numbers"):
        grads_of(attrax.live(model, [batch], noisy))
    dropping = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)), 109).train()
    with pytest.raises(ValueError, match=r"'1' \(Dropout\)"):
        grads_of(attrax.live(dropping, [batch], CLASSIFY))


def test_k24_b110_nothing_is_left_behind():
    model, batch = seeded(Net, 110).train(), points(110, 4)
    model.l1.bias.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)

    def state() -> list[Any]:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        hooks = [len(getattr(m, kind)) for m in model.modules() for kind in kinds]
        grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        values = [p.tolist() for p in model.parameters()]
        flags = [(p.requires_grad, len(p._backward_hooks or {})) for p in model.parameters()]
        modes = [(m.training, sorted(vars(m))) for m in model.modules()]
        return [hooks, grads, values, flags, modes, list(model.state_dict()), torch.get_rng_state().tolist()]

    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError(model(batch["x"]).shape)

    before = state()
    attrax.graddot(attrax.live(model, [batch], CLASSIFY), attrax.live(model, [batch], CLASSIFY))
    with pytest.raises(KeyError):
        grads_of(attrax.live(model, [batch], failing))
    with attrax.capture(model, loss="sum"), torch.no_grad():
        model(batch["x"])
    assert state() == before


def test_k24_b113_a_model_cast_after_the_source_was_made():
    model, right = seeded(Net, 114, torch.float32), seeded(Net, 113)
    batch = points(113, 5)
    source = attrax.live(model, [batch], CLASSIFY)
    model.double()
    model.load_state_dict({k: v.clone() for k, v in right.state_dict().items()})
    expected = brute(right, CLASSIFY, rows_of(batch))
    all_same(grads_of(source), expected)
    model.load_state_dict({k: 2 * v for k, v in right.state_dict().items()}, assign=True)
    model.requires_grad_(True)
    right.load_state_dict(model.state_dict())
    all_same(grads_of(source), brute(right, CLASSIFY, rows_of(batch)))


def test_k24_b113_a_model_cast_while_it_is_captured():
    model, right = seeded(Net, 114, torch.float32), seeded(Net, 113)
    batch, blocks = points(113, 5), []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"):
        model.double()
        model.load_state_dict({k: v.clone() for k, v in right.state_dict().items()})
        CLASSIFY(model, batch).sum().backward()
    all_same(grads_of(attrax.Blocks(blocks)), brute(right, CLASSIFY, rows_of(batch)))
