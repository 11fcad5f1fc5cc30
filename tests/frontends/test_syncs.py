"""A captured step waits for the device a constant number of times, not once a layer or an example."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from attrax.core import Projection, projected
from attrax.frontends import capture, store

WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default"}


class Waits(TorchDispatchMode):
    """Counts operations whose result the host reads: on a GPU, each waits for all work before it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) in WAITS
        return func(*args, **(kwargs or {}))


def network(depth: int) -> nn.Module:
    torch.manual_seed(0)
    block = [m for _ in range(depth) for m in (nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())]
    return nn.Sequential(*block, nn.Linear(6, 3))


def waits(depth: int, examples: int, options: dict[str, Any]) -> int:
    """Waits of the third step: checks of the first are over."""
    model = network(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(examples, 6)
    with capture(model, loss="sum", ids=lambda inputs: [str(i) for i in range(examples)], **options):
        for step in range(3):
            with Waits() as counter:
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            last = counter.count if step == 2 else 0
    return last


KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "whole": lambda folder: {"sinks": [lambda block: None]},
    "projected": lambda folder: {"transform": projected(Projection(dim=2))},
    "stored": lambda folder: {"transform": projected(Projection(dim=2)), "sinks": [store(folder)]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_waits_of_a_step_do_not_grow_with_layers_or_examples(kind, tmp_path):
    few, many, more = (
        waits(depth, examples, KINDS[kind](tmp_path / f"{depth}-{examples}"))
        for depth, examples in ((2, 4), (12, 4), (2, 40))
    )
    assert few == many == more
    assert few <= 8, few
