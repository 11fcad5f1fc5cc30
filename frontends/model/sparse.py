"""Sparse gradients, those of embeddings with ``sparse=True``: optimizers may ask which rows they hold."""

import torch
from torch import Tensor


def rows_of(g: Tensor) -> Tensor:
    """Rows that a sparse gradient holds, Boolean [V]; also those that are zero.

    >>> rows_of(torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.zeros(2, 4), (3, 4), check_invariants=False))
    tensor([False,  True, False])
    """
    rows = torch.zeros(g.shape[0], dtype=torch.bool, device=g.device)
    rows[g._indices()[0]] = True
    return rows


def filled(g: Tensor) -> Tensor:
    """A gradient with all its rows.

    >>> filled(torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (2, 2), check_invariants=False))
    tensor([[0., 0.],
            [1., 1.]])
    """
    return g.to_dense() if g.is_sparse else g
