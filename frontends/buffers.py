"""Memory for the rows of a shard in large pieces, used again where it can be: new pages cost more than a copy."""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from attrax.core.schema import uninitialized

BYTES = 2**25
_ALIGNED = 64


class Buffers:
    """Arrays cut from large buffers.

    >>> buffers = Buffers()
    >>> buffers.array((2, 3), torch.float32).shape, len(used := buffers.taken())
    (torch.Size([2, 3]), 1)
    >>> buffers.give_back(used)
    >>> buffers.array((4,), torch.int64).data_ptr() == used[0].data_ptr()
    True
    """

    def __init__(self) -> None:
        self._used: list[Tensor] = []
        self._spare: deque[Tensor] = deque(maxlen=4)
        self._at = 0

    def array(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory for an array."""
        size = math.prod(shape) * dtype.itemsize
        if size > BYTES:
            return uninitialized(shape, dtype)
        if not self._used or self._at + size > BYTES:
            spare = self._spare.pop() if self._spare else uninitialized((BYTES,), torch.uint8)
            self._used.append(spare)
            self._at = 0
        start = self._at
        self._at += -(-size // _ALIGNED) * _ALIGNED
        return self._used[-1][start : start + size].view(dtype).reshape(tuple(shape))

    def taken(self) -> list[Tensor]:
        """The buffers that the arrays made since the last call lie in."""
        used, self._used = self._used, []
        return used

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Use buffers again; nothing may use their arrays any more.  Some are kept, the others freed."""
        self._spare.extend(buffers)
