"""Faults that users of such libraries have reported, and what attrax does instead: layouts, types, batches, traces.

Each test names the kind of fault (K) and the report (B) it rebuilds; the right answers are brute force.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import config
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import attrax
from attrax.core import aggregate, factorized

from .case_models import (
    Net,
    all_same,
    brute,
    grads_of,
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


def test_k10_b47_transposed_weights():
    """The real GPT-2 layer; a square weight, so that a transposed gradient has its shape; A is in x in."""
    model = seeded(lambda: nn.Sequential(Conv1D(4, 4), nn.Tanh(), Conv1D(3, 4)), 47)
    batch = points(47, 5)
    source = attrax.live(model, [batch], CLASSIFY)
    right = brute(model, CLASSIFY, rows_of(batch))
    all_same(grads_of(source), right)
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


def test_k17_b81_a_batch_without_examples():
    model, batch = seeded(Net, 81), points(81, 5)
    pieces = [part(batch, 0, 3), part(batch, 3, 3), part(batch, 3, 5)]
    right = brute(model, CLASSIFY, rows_of(batch))
    source = attrax.live(model, pieces, CLASSIFY)
    all_same(grads_of(source), right)
    fit, whole = attrax.fit_ekfac(source), attrax.fit_ekfac(attrax.live(model, [batch], CLASSIFY))
    assert fit.examples == whole.examples == 5
    for name in fit.eigenvalues:
        same(fit.eigenvalues[name], whole.eigenvalues[name])
    blocks: list[Any] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum"):
        for piece in pieces:
            CLASSIFY(model, piece).sum().backward()
    all_same(grads_of(attrax.Blocks(blocks)), right)


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
    all_same(grads_of(source), brute(right, CLASSIFY, rows_of(batch)))
