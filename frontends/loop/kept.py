"""What a block holds until it is handed on is its own: training goes on writing to what it was captured from.

Leaves are views where they can be.  A loop fills the memory of its inputs with the next batch, an optimizer writes to
parameters that were the input of a layer, modules to their buffers; and autograd makes the gradient that arrives at a
layer the `.grad` of a parameter if it is the same up to its shape (``x + self.position[None]`` in a batch of one), to
which later backwards are added.
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
