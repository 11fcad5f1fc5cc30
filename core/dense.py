"""Dense random projections ``P vec(G)`` of a leaf's flattened gradient, in bounded memory."""

from math import prod

from jaxtyping import Float
from torch import Tensor

from attrax.core.algebra import wide
from attrax.core.leaves import Leaf, Materialized, Part
from attrax.core.projection import Projection, projection_key, projection_matrix
from attrax.core.reduce import materialize_leaf
from attrax.core.sketch import hadamard, scatter, sparse_targets

_CHUNK = 2**22


def flattened(leaf: Leaf) -> Float[Tensor, "B d"]:
    """Built gradients of a leaf, one row an example, float32 or better.

    >>> import torch
    >>> from attrax.core.leaves import factorized
    >>> flattened(factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))).shape
    torch.Size([2, 20])
    """
    w = materialize_leaf(leaf).w
    return w.reshape(w.shape[0], prod(w.shape[1:])).to(wide(w.dtype))


def dense(spec: Projection, name: str, leaf: Leaf) -> Materialized:
    """P vec(G); exact if no wider than k.

    >>> import torch
    >>> from attrax.core.leaves import factorized
    >>> leaf = factorized("w", torch.ones(1, 9, 4), torch.ones(1, 9, 5))
    >>> dense(Projection(3, "srht", "dense"), "w", leaf).w.shape
    torch.Size([1, 3])
    """
    flat = flattened(leaf)
    total = flat if flat.shape[1] <= spec.dim else _project(spec, name, flat)
    return Materialized(total, (Part(name, total.shape[1]),), False, spec.basis)


def _project(spec: Projection, name: str, flat: Float[Tensor, "B d"]) -> Float[Tensor, "B k"]:
    """In chunks of inputs, which do not change the result beyond rounding; the Hadamard transform needs all of them."""
    width = flat.shape[1]
    key = projection_key(spec, name, "dense", width)
    if spec.kind == "srht":
        return hadamard(flat, key, spec.dim)
    step = max(1, _CHUNK // (spec.nonzeros if spec.kind == "sjlt" else spec.dim))
    total = flat.new_zeros(flat.shape[0], spec.dim)
    for start in range(0, width, step):
        rows = slice(start, min(start + step, width))
        if spec.kind == "sjlt":
            targets, signs = sparse_targets(key, rows, spec.dim, spec.nonzeros)
            total = total + scatter(flat[:, rows], targets, signs, spec.dim)
        else:
            block = projection_matrix(spec, name, "dense", width, rows)
            assert block is not None
            total = total + flat[:, rows] @ block.to(flat.device, flat.dtype)
    return total
