"""Other tensors in the place of a model's parameters, for as long as a context lasts.

`torch.func.functional_call` does the same for most models, but leaves wrong parameters behind in those in which one
*module* is registered twice.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TypeAlias

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
    before = {(module, name): module._parameters[name] for module, name in values}
    try:
        for (module, name), value in values.items():
            module._parameters[name] = value  # type: ignore[assignment]
        yield
    finally:
        for (module, name), p in before.items():
            module._parameters[name] = p
