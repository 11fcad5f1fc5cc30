"""Other tensors in the place of a model's parameters, for as long as a context lasts.

`torch.func.functional_call` does the same for most models, but leaves wrong parameters behind in those in which one
*module* is registered twice.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

Slot: TypeAlias = tuple[nn.Module, str]


def slots(model: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> dict[Slot, Tensor]:
    """Everywhere in a model where some parameters are held, with the value each is to have.

    >>> layer = nn.Linear(2, 2)
    >>> list(slots(nn.Sequential(layer, layer), {layer.weight: layer.weight * 2})) == [(layer, "weight")]
    True
    """
    held = [(m, name, p) for m in model.modules() for name, p in m._parameters.items()]
    return {(m, name): values[p] for m, name, p in held if p is not None and p in values}


@contextlib.contextmanager
def own_buffers(model: nn.Module, values: Mapping[Slot, Tensor | None] | None = None) -> Iterator[None]:
    """Copies in the place of a model's buffers inside the context (its running statistics, its counters).

    Args:
        model: The model.
        values: What to copy; the buffers as they are if None.

    >>> norm = nn.BatchNorm1d(2)
    >>> with own_buffers(norm):
    ...     _ = norm.num_batches_tracked.add_(1)
    >>> int(norm.num_batches_tracked)
    0
    """
    before = buffers(model)
    given = before if values is None else values
    copies = {id(b): b.clone() for b in given.values() if b is not None}
    try:
        for (module, name), b in given.items():
            module._buffers[name] = None if b is None else copies[id(b)]
        yield
    finally:
        for (module, name), b in before.items():
            module._buffers[name] = b


def buffers(model: nn.Module) -> dict[Slot, Tensor | None]:
    """Every buffer of a model, by where it is held."""
    return {(m, name): b for m in model.modules() for name, b in m._buffers.items()}


@contextlib.contextmanager
def replaced(values: Mapping[Slot, Tensor]) -> Iterator[None]:
    """Put tensors in the place of parameters inside the context; the parameters are back after it.

    >>> import torch
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> with replaced({(layer, "weight"): torch.eye(2)}):
    ...     layer(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> isinstance(layer.weight, nn.Parameter)
    True
    """
    held = [(where, name, value) for (m, name), value in values.items() for where in _holding(m, name)]
    before = [where[name] for where, name, _ in held]
    try:
        for where, name, value in held:
            where[name] = value
        yield
    finally:
        for (where, name, _), p in zip(held, before, strict=True):
            where[name] = p


def _holding(module: nn.Module, name: str) -> list[dict[str, Any]]:
    """Where a module holds a parameter: between forward and backward, FSDP1 may keep a view of it in both places."""
    return [where for where in (module._parameters, vars(module)) if name in where] or [vars(module)]
