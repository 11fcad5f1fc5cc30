"""Captures of models that run differently from call to call, of compiled models, and of loops in which things fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attrax.core import Block
from attrax.frontends import capture, classification

from .loops import sum_ce
from .models import MLP, classes, seeded
from .oracle import assert_gradients, block_gradients, one_by_one

CLASSIFY = classification()
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def blocks() -> list[Block]:
    return []


@pytest.mark.parametrize("where", ["ids", "transform", "after_backward", "before_step", "sinks"])
def test_an_exception_in_a_function_of_the_callers_does_not_poison_the_next_step(where, blocks, rng):
    model, bad, good = seeded(MLP), classes(rng), classes(rng)
    failing = [True]

    def fail(*args: Any) -> Any:
        if failing[0]:
            raise KeyError(where)
        return list("abcd") if where == "ids" else args[-1]

    single = where in ("ids", "transform")
    how: dict[str, Any] = {where: fail if single else [fail, blocks.append][: 1 + (where == "sinks")]}
    moving = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        moving.zero_grad()
        sum_ce(model, batch).backward()
        moving.step()

    with capture(model, **{"sinks": [blocks.append], "loss": "sum", **how}):
        with pytest.raises(KeyError, match=where):
            step(bad)
        blocks.clear()
        failing[0] = False
        right = one_by_one(model, good, CLASSIFY)
        step(good)
    assert_gradients(block_gradients(blocks[-1]), right)


class Dynamic(nn.Module):
    """Layers are left out, called as often as the depth says, or chosen by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.depth, self.drop = 1, False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(self.depth):
            h = torch.tanh(self.a(h))
        return self.last(h if self.drop else torch.tanh(self.b(h)))


def test_layers_that_are_skipped_or_called_again(blocks, rng):
    model, batch = seeded(Dynamic), classes(rng)
    plans = [(1, False), (0, False), (3, True), (2, False)]
    rights = []
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        for model.depth, model.drop in plans:
            sum_ce(model, batch).backward()
            model.zero_grad()
    for model.depth, model.drop in plans:
        right = one_by_one(model, batch, CLASSIFY)
        unused = {name for name, on in (("a", model.depth), ("b", not model.drop)) if not on}
        rights.append({n: g for n, g in right.items() if n.split(".")[0] not in unused})
    for block, right in zip(blocks, rights, strict=True):
        assert_gradients(block_gradients(block), right)


class Pair(NamedTuple):
    logits: Tensor
    rest: list[Any]


@dataclass
class Record:
    logits: Tensor
    rest: dict[str, Any]


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "named tuple": (lambda y: Pair(y, [y * 2, None]), lambda out: out.logits + out.rest[0]),
    "dataclass": (lambda y: Record(y, {"twice": y * 2}), lambda out: out.logits + out.rest["twice"]),
    "nested": (lambda y: {"a": [(y,), {"b": y * 2}]}, lambda out: out["a"][0][0] + out["a"][1]["b"]),
    "views": (lambda y: y.T.chunk(3), lambda out: torch.cat([x * k for k, x in enumerate(out, 1)]).T),
    "changed in place": (lambda y: y, lambda out: out.mul_(2)[:, [2, 0, 1]].add_(out)),
}


class Returning(nn.Module):
    """A model with an output of some kind."""

    def __init__(self, kind: str, how: str | None) -> None:
        super().__init__()
        self.mlp, self.kind, self.how = MLP(), kind, how

    def forward(self, *, x: Tensor) -> Any:
        y = (
            self.mlp(x)
            if self.how is None
            else checkpoint(self.mlp, x, use_reentrant=self.how == "reentrant")
        )
        return OUTPUTS[self.kind][0](y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", [None, "nonreentrant", "reentrant"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_every_kind(kind, how, blocks, rng):
    """Called by keyword only; checkpointed or not."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return OUTPUTS[kind][1](model(x=batch["x"])).square().sum(1)

    batch = {"x": classes(rng)["x"].requires_grad_(how == "reentrant")}
    right = one_by_one(seeded(lambda: Returning(kind, None)), batch, loss)
    model = seeded(lambda: Returning(kind, how))
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        for _ in range(2):
            loss(model, batch).sum().backward()
    assert len(blocks) == 2
    for block in blocks:
        assert_gradients(block_gradients(block), right)


@pytest.mark.filterwarnings("ignore")
def test_a_part_compiled_inside_the_capture_keeps_its_names(blocks, rng):
    """Block by block, as accelerate and torchtitan compile."""
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(seeded(MLP), batch, CLASSIFY)
    torch._dynamo.reset()
    with capture(model, sinks=[blocks.append], loss="sum", strict=True):
        compiled: Any = torch.compile(model.second, backend="eager")
        model.second = compiled
        sum_ce(model, batch).backward()
    assert_gradients(block_gradients(blocks[0]), right)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_model_compiled_inside_the_capture(backend, blocks, rng):
    """Layers run as they are, between compiled regions: nothing is lost, but little is compiled."""
    model, batches = seeded(lambda: MLP(inplace=True)), [classes(rng) for _ in range(3)]
    alone = seeded(lambda: MLP(inplace=True))
    torch._dynamo.reset()
    with capture(model, sinks=[blocks.append], loss="sum", strict=True) as running:
        moving = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled: Any = torch.compile(model, backend=backend)
        for batch in batches:
            rights = one_by_one(alone, batch, CLASSIFY)
            sum_ce(compiled, batch).backward()
            moving.step()
            moving.zero_grad()
            assert_gradients(block_gradients(blocks[-1]), rights)
            alone.load_state_dict(model.state_dict())
    assert running.coverage.share == 1 and len(blocks) == 3
    torch._dynamo.reset()
