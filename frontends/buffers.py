"""Memory for arrays that is used again once nothing refers to it: touching new pages costs as much as a copy."""

import math
from collections.abc import Sequence
from sys import getrefcount

import numpy as np
import torch
from torch import Tensor

_KEPT = 4
_SMALL = 2**16


def _references(arrays: list[np.ndarray], n: int) -> int:
    return getrefcount(arrays[n])


_UNUSED = _references([np.empty(0)], 0)


class Buffers:
    """Uninitialized arrays; the memory of one whose last tensor is gone becomes that of a later one.

    >>> buffers = Buffers()
    >>> first = buffers.array((2**17,), torch.float32)
    >>> place, row = first.data_ptr(), first[3:]
    >>> del first
    >>> second = buffers.array((2**17,), torch.float32)
    >>> second.data_ptr() == place
    False
    >>> del row
    >>> buffers.array((2**17,), torch.float32).data_ptr() == place
    True
    """

    def __init__(self) -> None:
        self._made: list[np.ndarray] = []

    def array(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """CPU memory for an array."""
        size = math.prod(shape) * dtype.itemsize
        room = 1 << max(_SMALL, size).bit_length()
        for n in range(len(self._made)):
            if len(self._made[n]) == room and _references(self._made, n) == _UNUSED:
                whole = self._made[n]
                break
        else:
            whole = np.empty(room, np.uint8)
            self._made = [whole, *self._made[: _KEPT - 1]]
        return torch.from_numpy(whole[:size]).view(dtype).reshape(tuple(shape))
