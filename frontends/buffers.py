"""Memory for arrays that is used again once nothing refers to it: touching new pages costs as much as a copy."""

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SPARES = 4
_SMALL = 2**16


class Buffers:
    """Uninitialized arrays; the memory of one whose last tensor is gone becomes that of a later one.

    >>> buffers = Buffers()
    >>> first = buffers.array((2**17,), torch.float32)
    >>> place, row = first.data_ptr(), first[3:]
    >>> del first
    >>> buffers.array((2**17,), torch.float32).data_ptr() == place
    False
    >>> del row
    >>> buffers.array((2**17,), torch.float32).data_ptr() == place
    True
    """

    def __init__(self) -> None:
        self._spare: dict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_SPARES))

    def array(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """CPU memory for an array."""
        size = math.prod(shape) * dtype.itemsize
        spare = self._spare[max(_SMALL, size).bit_length()]
        whole = spare.pop() if spare else np.empty(2 ** max(_SMALL, size).bit_length(), np.uint8)
        data = whole[:size]  # lives as long as a tensor of this memory
        weakref.finalize(data, spare.append, whole).atexit = False
        return torch.from_numpy(data).view(dtype).reshape(tuple(shape))
