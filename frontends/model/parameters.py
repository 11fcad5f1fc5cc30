"""Other tensors in the place of a model's parameters, for as long as a context lasts.

`torch.func.functional_call` does the same for most models, but leaves wrong parameters behind in those in which one
*module* is registered twice.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from attrax.core.pytree import tree_map
from attrax.frontends.model.sharding import is_flat

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
def own_attributes(model: nn.Module) -> Iterator[None]:
    """Copies in the place of the plain attributes of a model inside the context; the attributes are back after it.

    Plain are numbers, strings, tensors, and lists, tuples, sets and dictionaries of them: a module's call counters, its
    history, a hidden state that it carries on.  Other objects are the model's own inside the context too, and so are
    all attributes under FSDP1, which keeps its place in them.

    >>> layer = nn.Linear(1, 1)
    >>> layer.calls, layer.seen = 3, [1.0]
    >>> with own_attributes(layer):
    ...     layer.calls += 1
    ...     layer.seen.append(2.0)
    ...     layer.last = 2.0
    >>> layer.calls, layer.seen, hasattr(layer, "last")
    (3, [1.0], False)
    """
    spaces = [] if is_flat(model) else [vars(m) for m in model.modules()]
    before = [{n: x for n, x in space.items() if _plain(n, x)} for space in spaces]
    copies = {id(x): _copied(x) for kept in before for x in kept.values()}
    try:
        for space, kept in zip(spaces, before, strict=True):
            space.update({n: copies[id(x)] for n, x in kept.items()})
        yield
    finally:
        for space, kept in zip(spaces, before, strict=True):
            for name in [n for n, x in space.items() if _plain(n, x) and n not in kept]:
                del space[name]
            space.update(kept)


_CONTAINERS = (list, tuple, set, dict, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor, *_CONTAINERS)
_MODULE = frozenset(vars(nn.Module()))


def _plain(name: str, value: object) -> bool:
    return name not in _MODULE and isinstance(value, _PLAIN) and not isinstance(value, nn.Parameter)


def _copied(value: Any) -> Any:
    def copied(x: Any) -> Any:
        if isinstance(x, _CONTAINERS):
            return copy.copy(x)
        return x.clone() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) else x

    return tree_map(copied, value)


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
