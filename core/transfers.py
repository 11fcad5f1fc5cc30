"""Values that change between host and device: each transfer waits for the work before it, so there is one for all."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor


def fetched(values: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape and dtype stacked on the host, in one transfer from each device they lie on.

    Args:
        values: n tensors [...].

    Returns:
        [n, ...]; empty if there are none.

    >>> fetched([torch.tensor(1.0), torch.tensor(2.0)])
    tensor([1., 2.])
    """
    devices = list(dict.fromkeys(x.device for x in values))
    if len(devices) <= 1:
        return torch.stack([x.detach() for x in values]).cpu() if values else torch.empty(0)
    found = torch.empty(len(values), *values[0].shape, dtype=values[0].dtype)
    for device in devices:
        here = [i for i, x in enumerate(values) if x.device == device]
        found[here] = fetched([values[i] for i in here])
    return found


def near(value: Tensor) -> Callable[[torch.device], Tensor]:
    """A tensor of the host for each device that asks, copied there once.

    >>> index = near(torch.tensor([1, 0]))
    >>> index(torch.device("cpu")) is index(torch.device("cpu"))
    True
    """
    return cache(lambda device: value.to(device))
