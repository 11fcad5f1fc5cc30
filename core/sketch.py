"""Structured random matrices that never need to be built: sparse (SJLT) and Hadamard (SRHT).

    SJLT   every input is added, with a random sign, to one random row in each of s blocks of k / s rows:  s additions
    SRHT   sqrt(n/k) R H D: random signs D, orthonormal Hadamard H, k of its n rows R without replacement: n log n

n is the width padded to a power of two.  Columns of both have length 1 exactly.  As in `attrax.core.random`, every
entry is a function of (key, position).  References: Kane and Nelson 2014 (SJLT), Tropp 2011 (SRHT).
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from attrax.core.random import permuted, random_rows, raw_words


def sparse_targets(
    key: int, columns: slice, dim: int, nonzeros: int
) -> tuple[Int[Tensor, "n s"], Float[Tensor, "n s"]]:
    """Where the SJLT sends inputs start:stop: rows [n, s], one per block of ``dim / s`` rows, and signs [n, s].

    Raises:
        ValueError: If `dim` is not a multiple of `nonzeros`.

    >>> rows, signs = sparse_targets(3, slice(0, 100), 8, 2)
    >>> int(rows[:, 0].max()), int(rows[:, 1].min())
    (3, 4)
    """
    if not 1 <= nonzeros <= dim or dim % nonzeros:
        raise ValueError(
            f"sjlt: {nonzeros} nonzeros a column need a dimension that is a multiple of it, got {dim}."
        )
    count, height = columns.stop - columns.start, dim // nonzeros
    words = raw_words(key, columns.start * nonzeros, count * nonzeros).reshape(count, nonzeros)
    within = ((words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * height).astype(np.int64)
    signs = (words & np.uint64(1)).astype(np.float32) * 2 - 1
    return torch.from_numpy(within + height * np.arange(nonzeros)), torch.from_numpy(signs)


def scatter(
    x: Float[Tensor, "B n"], rows: Int[Tensor, "n s"], signs: Float[Tensor, "n s"], dim: int
) -> Float[Tensor, "B k"]:
    """Apply the part of an SJLT that belongs to some inputs.

    >>> scatter(torch.ones(1, 3), torch.tensor([[0], [1], [1]]), torch.tensor([[1.0], [1.0], [-1.0]]), 2)
    tensor([[1., 0.]])
    """
    total = x.new_zeros(x.shape[0], dim)
    for target, sign in zip(rows.to(x.device).T, signs.to(x.device, x.dtype).T, strict=True):
        total = total.index_add(1, target, x * sign)
    return total * rows.shape[1] ** -0.5


def padded(width: int) -> int:
    """The next power of two.

    >>> padded(5), padded(8)
    (8, 8)
    """
    return 1 << max(width - 1, 0).bit_length()


def _hadamard_draws(key: int, columns: slice, width: int, dim: int) -> tuple[Tensor, Tensor]:
    """Rows [k] of the Hadamard matrix that are kept, signs [n] of some inputs."""
    chosen = permuted(key ^ 1, 0, dim, padded(width))
    return torch.from_numpy(chosen), random_rows(key, "rademacher", columns, 1).flatten()


def hadamard_rows(key: int, columns: slice, width: int, dim: int) -> Float[Tensor, "n k"]:
    """Rows start:stop of the transposed SRHT, in closed form: +-1 / sqrt(k).

    >>> P = hadamard_rows(3, slice(0, 8), 8, 8)
    >>> bool(torch.allclose(P.T @ P, torch.eye(8), atol=1e-6))
    True
    """
    chosen, signs = _hadamard_draws(key, columns, width, dim)
    common = torch.arange(columns.start, columns.stop).unsqueeze(1) & chosen
    for shift in (32, 16, 8, 4, 2, 1):
        common = common ^ (common >> shift)
    return signs.unsqueeze(1) * (1 - 2 * (common & 1)) * dim**-0.5


def hadamard(x: Float[Tensor, "B n"], key: int, dim: int) -> Float[Tensor, "B k"]:
    """Apply the SRHT by the fast Walsh-Hadamard transform.

    >>> x = torch.randn(2, 5)
    >>> bool(torch.allclose(hadamard(x, 3, 4), x @ hadamard_rows(3, slice(0, 5), 5, 4), atol=1e-5))
    True
    """
    B, width = x.shape
    n = padded(width)
    chosen, signs = _hadamard_draws(key, slice(0, width), width, dim)
    y = functional.pad(x * signs.to(x.device, x.dtype), [0, n - width])
    half = 1
    while half < n:
        pairs = y.reshape(B, n // (2 * half), 2, half)
        y = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return y.reshape(B, n)[:, chosen.to(x.device)] * dim**-0.5
