"""Rows that a model picked out of a batch: whether they are still the examples, in order.

A model that runs a layer on some of its positions only (masked tokens, tokens routed to an expert, examples sorted by
length) may by chance give it as many rows as there are examples.  The indices that autograd keeps say which these are.
"""

from typing import Any

import torch
from torch import Tensor

_ASIDE = ("AccumulateGrad", "TBackward0")


def in_order(x: Tensor, B: int) -> bool:
    """Whether rows that were picked by index are as many of every example, in the order of the examples.

    Indices are read where the rows go from the pick to the layer through operations on them alone.
    """
    node: Any = x.grad_fn
    while node is not None:
        try:
            rows, size = _picked(node)
        except RuntimeError:  # a graph that was freed, and that no backward of this pass goes through
            return True
        if rows is not None:
            return _one_each(rows, size, B)
        parents = [p for p, _ in node.next_functions if p is not None and p.name() not in _ASIDE]
        node = parents[0] if len(parents) == 1 else None
    return True


def _picked(node: Any) -> tuple[Tensor | None, int]:
    """Indices into the first axis that an operation took rows from, and that axis' length."""
    if node.name() == "IndexBackward0":
        index = node._saved_indices[0]
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            index = index.nonzero()[:, 0]
        return index, node._saved_self_sym_sizes[0]
    if node.name() == "IndexSelectBackward0" and node._saved_dim == 0:
        return node._saved_index, node._saved_self_sym_sizes[0]
    return None, 0


def _one_each(rows: Tensor, size: int, B: int) -> bool:
    n = rows.shape[0] if rows.ndim else 1
    if size % B or n % B:
        return False
    examples = rows.reshape(n, -1) % size // (size // B)
    return bool((examples == torch.arange(n, device=rows.device).unsqueeze(1) // (n // B)).all())
