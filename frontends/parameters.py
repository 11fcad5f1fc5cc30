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
    held: dict[Slot, dict[str, Any]] = {
        (m, n): m._parameters if n in m._parameters else m.__dict__ for m, n in values
    }
    before = {(module, name): where[name] for (module, name), where in held.items()}
    try:
        for (module, name), value in values.items():
            held[module, name][name] = value
        yield
    finally:
        for (module, name), p in before.items():
            held[module, name][name] = p
