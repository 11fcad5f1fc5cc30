"""What a block holds until it is handed on is its own: training goes on writing to what it was captured from.

Leaves are views where they can be.  A loop fills the memory of its inputs with the next batch, an optimizer writes to
parameters that were the input of a layer, modules to their buffers; and autograd makes the gradient that arrives at a
layer the `.grad` of a parameter if it is the same up to its shape (``x + self.position[None]`` in a batch of one), to
which later backwards are added.  These are copied; a write to anything else that a block holds is noticed.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from attrax.core import Leaf, tree_map


def memory(tensors: Iterable[object]) -> set[int]:
    """Where tensors lie.

    >>> import torch
    >>> x = torch.ones(2)
    >>> memory([x]) == memory([x[1:], None])
    True
    """
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if isinstance(x, Tensor)]
    dense = [x._values() if x.is_sparse else x for x in local]
    return {x.untyped_storage().data_ptr() for x in dense} - {0}


def kept(leaves: Mapping[str, Leaf], others: set[int]) -> dict[str, Leaf]:
    """Leaves with copies in the place of what lies in the memory of others."""
    return {
        n: tree_map(lambda x: x.clone() if memory([x]) & others else x, leaf) for n, leaf in leaves.items()
    }


class Writes:
    """Notices writes to what blocks hold, until they are handed on."""

    def __init__(self) -> None:
        self._held: list[tuple[str, Tensor, int]] = []

    def watch(self, leaves: Mapping[str, Leaf]) -> None:
        """Note what leaves hold now."""
        for name, leaf in leaves.items():
            arrays: list[Tensor] = []
            tree_map(arrays.append, leaf)
            self._held += [(name, x, x._version) for x in arrays if not x.is_inference()]

    def found(self) -> list[str]:
        """Names of leaves that something has written to since; they are watched no more."""
        held, self._held = self._held, []
        return sorted({name for name, x, version in held if x._version != version})
