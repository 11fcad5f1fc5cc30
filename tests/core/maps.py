"""Explicit matrices of linear maps, and statistics of random ones."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from attrax.core import Diagonal, Grouped, Leaf, Materialized
from attrax.core.maps import LinearMap, projected

from .dense import gradient
from .toys import unchecked


def units(leaf: Leaf) -> Materialized:
    """One example per coordinate of the leaf's gradient, whose gradient is 1 there and 0 elsewhere."""
    if isinstance(leaf, Grouped):
        shape = (leaf.g.shape[1], leaf.g.shape[3], leaf.a.shape[3])
        return Materialized(torch.eye(prod(shape), dtype=torch.float64).reshape(-1, *shape), leaf.parts)
    if isinstance(leaf, Materialized):
        eye = torch.eye(prod(leaf.w.shape[1:]), dtype=torch.float64)
        return replace(leaf, w=eye.reshape(-1, *leaf.w.shape[1:]))
    No, Ni = gradient(leaf).shape[1:]
    eye = torch.eye(No * Ni, dtype=torch.float64)
    return Materialized(
        eye if isinstance(leaf, Diagonal) else eye.reshape(-1, No, Ni),
        leaf.parts,
        getattr(leaf, "bias", False),
    )


def matrix_of(spec: LinearMap, name: str, leaf: Leaf) -> Tensor:
    """P [k, d] of a map on one leaf: what it makes of the unit gradients."""
    return gradient(projected(spec)(name, units(leaf))).flatten(1).T


def draws(count: int, sample: Callable[[int], Any]) -> Tensor:
    """Values of a random map at seeds 0 … count - 1."""
    with unchecked():
        return torch.stack([torch.as_tensor(sample(seed), dtype=torch.float64) for seed in range(count)])


def assert_mean(values: Tensor, truth: float | Tensor) -> None:
    """The mean over the first axis is within 5 standard errors of the truth."""
    error = values.std(0) / len(values) ** 0.5
    off = (values.mean(0) - truth).abs()
    assert (off <= 5 * error + 1e-6 * values.abs().max()).all(), (
        f"off by {off.max():.3g}, standard error {error.max():.3g}"
    )


def assert_variance(values: Tensor, truth: float) -> None:
    """The variance is within 5 standard errors of the truth, and known to a tenth of it."""
    centred = values - values.mean()
    variance = float(centred.square().mean())
    error = float((centred.pow(4).mean() - variance**2) / len(values)) ** 0.5
    assert abs(variance - truth) <= 5 * error, f"variance {variance:.4g} is not {truth:.4g} (+- {error:.2g})"
    assert error < 0.1 * truth
