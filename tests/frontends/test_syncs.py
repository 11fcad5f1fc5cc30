"""A captured step waits for the device a constant number of times, not once a layer or an example."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attrax
from attrax.core import Block, Projection, Step, kronecker, projected
from attrax.frontends import capture, record, select, store

pytestmark = pytest.mark.usefixtures("unchecked")
READS = ("tolist", "cpu", "item", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
SIZED_BY_VALUES = ("aten.nonzero", "aten.masked_select", "aten.repeat_interleave", "aten._unique2")


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: values it reads, copies it gets, and sizes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.copies = self.bytes = 0
        self._host: list[Tensor] = []  # what `cpu()` gave: reading it does not wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        self.count += masked or str(func).startswith(SIZED_BY_VALUES)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts inside the context; calls within counted calls are one."""
        inside = False

        def watched(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
            def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                copies = name == "to" and any(isinstance(a, str) and a == "cpu" for a in args)
                here = any(x is copy for copy in self._host)
                if inside or here or (name == "to" and not copies):
                    return plain(x, *args, **kwargs)
                self.count += not copies
                self.copies += copies
                self.bytes += copies * x.nbytes
                inside = True
                try:
                    if name != "cpu":
                        return plain(x, *args, **kwargs)
                    self._host.append(plain(x, *args, **kwargs).clone())
                    return self._host[-1]
                finally:
                    inside = False

            return call

        with pytest.MonkeyPatch.context() as patch, self:
            for name in (*READS, "to"):
                patch.setattr(Tensor, name, watched(getattr(Tensor, name), name))
            yield


def network(depth: int) -> nn.Module:
    torch.manual_seed(0)
    block = [m for _ in range(depth) for m in (nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())]
    return nn.Sequential(*block, nn.Linear(6, 3))


def third_step(depth: int, examples: int, options: dict[str, Any] | None) -> Waits:
    """What waits in the third step, with a capture or without one: checks of the first are over."""
    model = network(depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, last = torch.randn(examples, 6), Waits()
    how = {"loss": "sum", "ids": lambda inputs: [str(i) for i in range(examples)]} | (options or {})
    with contextlib.nullcontext() if options is None else capture(model, **how):
        for step in range(3):
            with last.counting() if step == 2 else contextlib.nullcontext():
                model(x).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return last


def waits(depth: int, examples: int, options: dict[str, Any]) -> int:
    """Those that the capture adds to the loop's own."""
    return third_step(depth, examples, options).count - third_step(depth, examples, None).count


def statistics() -> Callable[[Block], None]:
    """A sink that fits Kronecker factors as training goes on."""
    states: dict[str, kronecker.KroneckerSums] = {}

    def add(block: Block) -> None:
        for name, leaf in block.grads.items():
            if kronecker.has_factors(name, leaf):
                states[name] = kronecker.update(states.get(name), leaf)

    return add


def selection() -> Callable[[Any], None]:
    target = {"x": torch.ones(2, 6), "example_ids": ("p", "q")}
    half = lambda scores, interactions: torch.arange(len(scores)) % 2 == 0  # noqa: E731
    return select(target, half, loss=lambda model, batch: model(batch["x"]).square().sum(1))


KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "whole": lambda folder: {"sinks": [lambda block: None]},
    "projected": lambda folder: {"transform": projected(Projection(dim=2))},
    "stored": lambda folder: {"transform": projected(Projection(dim=2)), "sinks": [store(folder)]},
    "statistics": lambda folder: {"sinks": [statistics()]},
    "selection": lambda folder: {"after_backward": [selection()]},
    "directions": lambda folder: {"directions": attrax.Directions("sum"), "sinks": [lambda block: None]},
    "directions as trained": lambda folder: {"directions": attrax.Directions("as_trained")},
    "trajectory": lambda folder: {"trajectory": record(lambda step: None)},
}

FOUND_ON_HOST = {
    "selection": 1
}  # for each leaf, the rows that were dropped: no wait, but not told from one here


@pytest.mark.parametrize("kind", KINDS)
def test_waits_of_a_step_do_not_grow_with_layers_or_examples(kind, tmp_path):
    few, many, more = (
        waits(depth, examples, KINDS[kind](tmp_path / f"{depth}-{examples}"))
        for depth, examples in ((2, 4), (12, 4), (2, 40))
    )
    leaves = FOUND_ON_HOST.get(kind, 0) * 30  # more of them in the deeper network
    assert few == more
    assert few <= many <= few + leaves
    assert few <= 24


@pytest.mark.parametrize("depth", [2, 12])
def test_a_recorded_step_copies_what_it_holds_and_nothing_else(depth):
    """Copies of a trajectory grow with the model: one of each tensor of the step."""
    steps: list[Step] = []
    found, loop = third_step(depth, 4, {"trajectory": record(steps.append)}), third_step(depth, 4, None)
    step = steps[-1]
    held = [*step.parameters.values(), *step.gradients.values()]
    held += [x for state in step.states.values() for x in state.values()]
    copied = (found.copies - loop.copies, found.bytes - loop.bytes)
    assert copied == (len(held), sum(x.nbytes for x in held))
