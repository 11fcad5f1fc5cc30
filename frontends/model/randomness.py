"""All that a model may draw random numbers from: generators of torch, numpy and Python, and those of its modules."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (lambda x: x.get_state(legacy=False), np.random.RandomState.set_state),
    np.random.Generator: (lambda x: x.bit_generator.state, lambda x, s: setattr(x.bit_generator, "state", s)),
}
_TYPES = tuple(KINDS)
_PYTHON: Any = getattr(random.getstate, "__self__")  # noqa: B009
_NUMPY: Any = getattr(np.random.get_state, "__self__")  # noqa: B009


@dataclass(frozen=True, eq=False)
class Draws:
    """How far random generators have drawn; made by `draws`."""

    states: tuple[tuple[Any, Any], ...]

    def restore(self) -> None:
        """Put all of them where they were."""
        for generator, state in self.states:
            _kind(generator)[1](generator, state)

    @property
    def went_on(self) -> bool:
        """Whether any of them has drawn since; but for Python's own, from which libraries draw to check their types."""
        return not all(_same(_kind(x)[0](x), state) for x, state in self.states if x is not _PYTHON)


def draws(model: nn.Module) -> Draws:
    """How far all generators have drawn that a model may use.

    These are torch's own on all devices, numpy's, Python's, and those that are attributes of its modules or lie in
    a list, tuple or dictionary that is one.  Generators that it finds elsewhere are not known.

    >>> model = nn.Linear(1, 1)
    >>> model.noise = np.random.default_rng(0)
    >>> before = draws(model)
    >>> first = model.noise.random()
    >>> went_on = before.went_on
    >>> before.restore()
    >>> went_on, before.went_on, model.noise.random() == first
    (True, False, True)
    """
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    held = [x for m in model.modules() for x in _generators(vars(m).values())]
    every = {id(x): x for x in [torch.default_generator, *devices, _PYTHON, _NUMPY, *held]}.values()
    return Draws(tuple((x, _kind(x)[0](x)) for x in every))


@contextlib.contextmanager
def undrawn(model: nn.Module) -> Iterator[Draws]:
    """What the model draws inside the context is as if it had not been drawn, after it."""
    before = draws(model)
    try:
        yield before
    finally:
        before.restore()


def _generators(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        inside = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        )
        yield from (x for x in (value, *inside) if isinstance(x, _TYPES))


def _kind(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(how for kind, how in KINDS.items() if isinstance(generator, kind))


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return torch.equal(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(x[k], y[k]) for k in x)
    return bool(np.all(x == y))
