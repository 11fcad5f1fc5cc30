"""Layers that are not called in some batches: their gradients are zero there, and zero is what every method sees."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Recorded, collect
from attrax.frontends import capture, live, open_store, open_trajectory, record, replay, store
from attrax.frontends.storage.compaction import compact_store
from attrax.methods import Less, dvemb, ekfac, gradcos, graddot, less, trajectory_influence

from ..core.dense import assert_same
from ..core.toys import generator, normal, unchecked
from ..frontends.oracle import flat, gradients

GEN = generator(11)


class Routed(nn.Module):
    """A batch goes through one of two experts, or through none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.double().eval()

    def forward(self, x: Tensor, expert: int | None) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h if expert is None else h + self.experts[expert](h).tanh())


def batch(rows: int, expert: int | None) -> dict[str, Any]:
    x, y = normal(GEN, rows, 4), torch.randint(0, 3, (rows,), generator=GEN)
    return {"x": x, "y": y, "expert": expert}


def loss(model: nn.Module, each: Any) -> Tensor:
    return F.cross_entropy(model(each["x"], each["expert"]), each["y"], reduction="none")


TRAIN = [batch(3, 0), batch(2, None), batch(3, 1)]
MIXED, ONE = [batch(2, 1), batch(2, None)], [batch(2, 1)]
QUERIES = pytest.mark.parametrize("queries", [MIXED, ONE], ids=["mixed", "one expert"])


@pytest.fixture(autouse=True)
def quick():
    with unchecked():
        yield


def dense(model: nn.Module, batches: list[Any]) -> Tensor:
    """Gradients of the examples one at a time [N, P]."""
    examples = [
        {**each, "x": each["x"][i : i + 1], "y": each["y"][i : i + 1]}
        for each in batches
        for i in range(len(each["x"]))
    ]
    return flat(gradients(model, loss, examples))


@QUERIES
def test_products_and_cosines(queries):
    model = Routed()
    G, V = dense(model, TRAIN), dense(model, queries)
    train, query = live(model, TRAIN, loss), live(model, queries, loss)
    assert_same(graddot(train, query).values, G @ V.T)
    norms = G.norm(dim=1)[:, None] * V.norm(dim=1)
    assert_same(gradcos(train, query).values, G @ V.T / norms)


def stored(path: Any, model: nn.Module, batches: list[Any], **options: Any) -> Any:
    with store(path) as sink, capture(model, sinks=[sink], loss="sum"):
        for each in batches:
            loss(model, each).sum().backward()
    return open_store(path, **options)


@QUERIES
@pytest.mark.parametrize("train", [TRAIN, TRAIN[:1], TRAIN[1:2]], ids=["all", "one expert", "no expert"])
def test_products_from_stores(queries, train, tmp_path):
    model = Routed()
    values = graddot(stored(tmp_path / "train", model, train), stored(tmp_path / "query", model, queries))
    assert_same(values.values, dense(model, train) @ dense(model, queries).T)


def absent(source: Any) -> list[tuple[str, ...]]:
    return [examples.absent for examples, _ in source.map(lambda *_: None)]


def test_a_store_knows_the_layers_that_were_not_called(tmp_path):
    model = Routed()
    source = stored(tmp_path, model, TRAIN)
    right = absent(live(model, TRAIN, loss))
    assert absent(source) == right and len(set(right)) == 3
    assert source.block([source.ids[0], source.ids[1]]).examples.absent == right[0]
    stored(tmp_path, model, TRAIN)
    compact_store(tmp_path)
    assert absent(open_store(tmp_path)) == right


@QUERIES
def test_ekfac_is_that_of_gradients_that_are_zero(queries):
    """Against a model that calls every expert with rows of zeros, which is what a layer that is not called adds."""

    class Called(Routed):
        def forward(self, x: Tensor, expert: int | None) -> Tensor:
            idle = sum(e(torch.zeros(len(x), 5, dtype=x.dtype)).sum(1) for e in self.experts) * 0
            return super().forward(x, expert) + idle[:, None]

    found, right = (
        ekfac(live(m, TRAIN, loss), live(m, queries, loss), damping=0.1) for m in (Routed(), Called())
    )
    assert_same(found.values, right.values)


def trained(path: Any) -> tuple[nn.Module, Any, list[Tensor]]:
    """An SGD run over the batches, with its dense gradients and rates."""
    model, grads = Routed(), []
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with store(path) as sink, capture(model, sinks=[sink], loss="sum", trajectory=record(path)):
        for each in TRAIN * 2:
            grads.append(dense(model, [each]))
            loss(model, each).sum().backward()
            moving.step()
            moving.zero_grad()
    return model, open_trajectory(path), grads


@QUERIES
@pytest.mark.parametrize("method", [dvemb, trajectory_influence])
def test_along_a_run(queries, method, tmp_path):
    """Against s = lr <w, g>, w <- w - phi sum s g with all parameters in one vector."""
    model, run, grads = trained(tmp_path)
    w, right = dense(model, queries), []
    for G in reversed(grads):
        s = 0.1 * G @ w.T
        right.append(s)
        w = w - s.T @ G
    assert_same(method(run, live(model, queries, loss)).values, torch.cat(right[::-1]))
    other = Routed()
    for p in other.parameters():
        p.data.add_(1.0)
    again = replay(other, {k: [each] for k, each in enumerate(TRAIN * 2)}, loss, run, reduction="sum")
    assert_same(method(again, live(model, queries, loss)).values, torch.cat(right[::-1]))


def test_queries_along_a_run_see_layers_that_a_step_did_not_call(tmp_path):
    """The first step trains the first expert; a query may ask the other one, whose values the step has to tell."""
    _, run, _ = trained(tmp_path)
    start, other = Routed(), Routed()
    for p in other.parameters():
        p.data.add_(1.0)
    again = replay(other, {k: [each] for k, each in enumerate(TRAIN * 2)}, loss, run, reduction="sum")
    products = graddot(live(start, TRAIN, loss), again.queries(ONE).at(0)).values
    assert_same(products, dense(start, TRAIN) @ dense(start, ONE).T)


class Along:
    """Queries at the parameters of every step."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models

    @property
    def reiterable(self) -> bool:
        return True

    def steps(self) -> tuple[int, ...]:
        return tuple(range(len(self.models)))

    def at(self, step: int) -> Any:
        return live(self.models[step], ONE, loss)

    def map(self, visit: Any) -> Any:
        raise NotImplementedError


def test_less():
    """Cosines along an SGD run, whose directions are gradients."""
    model, steps, blocks, parts, models = Routed(), [], [], [], []
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, sinks=[blocks.append], loss="sum", trajectory=record(steps.append)) as running:
        for each in TRAIN:
            models.append(copy.deepcopy(model))
            with running.paused():
                G, V = dense(model, [each]), dense(model, ONE)
            parts.append(0.1 * G @ V.T / G.norm(dim=1)[:, None] / V.norm(dim=1))
            loss(model, each).sum().backward()
            moving.step()
            moving.zero_grad()
    values = less(Recorded(steps, blocks), Along(models), Less(target="sum")).values
    assert_same(values, torch.cat(parts))


def test_layers_that_a_side_does_not_know_are_errors(tmp_path):
    """A selection that differs is no layer that is not called."""
    model = Routed()
    train, some = live(model, TRAIN, loss), live(model, MIXED, loss, include="first|last")
    with pytest.raises(ValueError, match="has no query gradient"):
        graddot(train, some)
    with pytest.raises(ValueError, match="leaves that no train block has"):
        graddot(live(model, TRAIN, loss, include="first|last"), live(model, MIXED, loss))
    model, run, _ = trained(tmp_path)
    for method in (dvemb, trajectory_influence):
        with pytest.raises(ValueError, match="only the train gradients hold"):
            method(run, live(model, MIXED, loss, include="first|last"))
    assert collect(live(model, MIXED, loss)).examples.absent == ("experts.0.bias", "experts.0.weight")
