"""Random projections of gradients: two-sided on the factors, or dense on the flattened gradient.

    two-sided   P_g G P_a^T = sum_t (P_g g_t)(P_a a_t)^T      Ki x Ko numbers a layer; rows stay factored while shorter
    dense       P vec(G)                                      K numbers a leaf

Entries are +-1/sqrt(k) or N(0, 1/k), so E[P^T P] = I and inner products stay unbiased whatever the layer's shape, which
sums over layers need.  A side no wider than k is left exact.  Layers that share an input share P_a (their errors are
then correlated, their estimates unbiased).  Reference: Choe et al. 2024 (LoGRA, arXiv:2405.13954), section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.algebra import concat_rows, wide
from attrax.core.leaves import Diagonal, Factorized, Leaf, Lookup, Materialized, Part, Sum
from attrax.core.random import Kind, random_rows, stream_key
from attrax.core.reduce import compact, materialize_leaf
from attrax.core.terms import with_bias_column
from attrax.core.tree import GradTree

_CHUNK = 2**22


@dataclass(frozen=True, slots=True)
class Projection:
    """What to project to; a value, so that two sides can be checked to have used the same one.

    Attributes:
        dim: k, the projected width of each side (two-sided) or of the whole leaf (dense).
        kind: "rademacher" or "gaussian".
        sides: "two" or "dense".
        seed: Seed of every matrix; each is drawn from a stream named by (seed, parameter, side, shape, kind).
    """

    dim: int
    kind: Kind = "rademacher"
    sides: Literal["two", "dense"] = "two"
    seed: int = 0

    @property
    def basis(self) -> str:
        """Label carried by projected leaves."""
        return f"{self.sides}-{self.kind}-{self.dim}-seed{self.seed}"


def projection_matrix(
    spec: Projection, name: str, side: str, width: int, rows: slice | None = None
) -> Float[Tensor, "width k"] | None:
    """Transposed projection of one side, ``P^T [width, k]`` (or some of its rows); None where the side is kept exact.

    >>> projection_matrix(Projection(4), "w", "a", 10).shape, projection_matrix(Projection(4), "w", "a", 3)
    (torch.Size([10, 4]), None)
    """
    if width <= spec.dim and side != "dense":
        return None
    key = stream_key(spec.seed, name, side, width, spec.dim, spec.kind)
    return random_rows(key, spec.kind, rows or slice(0, width), spec.dim) * spec.dim**-0.5


def _apply(x: Tensor, matrix: Tensor | None) -> Tensor:
    x = x.to(wide(x.dtype))
    return x if matrix is None else x @ matrix.to(x.device, x.dtype)


def _columns(ids: Tensor, matrix: Tensor | None, rows: int, like: Tensor) -> Tensor:
    table = torch.eye(rows) if matrix is None else matrix
    return table.to(like.device, wide(like.dtype))[ids]


def projected(spec: Projection, *, keep_rows: bool = False) -> Callable[[str, Leaf], Leaf]:
    """The projection as a transform ``(name, leaf) -> leaf``; two-sided matrices are drawn once per transform.

    Args:
        spec: What to project to.
        keep_rows: Keep the projected rows of linear layers (Kronecker statistics and token scores need them) even
            where the K x K gradient would be smaller.

    Returns:
        A transform whose leaves carry ``spec.basis``.

    Raises:
        ValueError: If `spec` has no meaning.

    >>> from attrax.core import factorized
    >>> leaf = projected(Projection(2))("w", factorized("w", torch.ones(1, 9, 4), torch.ones(1, 9, 5)))
    >>> leaf.w.shape, leaf.basis
    (torch.Size([1, 2, 2]), 'two-rademacher-2-seed0')
    """
    if spec.dim < 1 or spec.sides not in ("two", "dense"):
        raise ValueError(f"project: got {spec}; expected dim >= 1 and sides 'two' or 'dense'.")
    if spec.sides == "dense":
        return lambda name, leaf: _dense(spec, name, leaf)
    drawn: dict[tuple[str, str, int], Tensor | None] = {}

    def matrix(name: str, side: str, width: int) -> Tensor | None:
        key = (name, side, width)
        if key not in drawn:
            drawn[key] = projection_matrix(spec, name, side, width)
        return drawn[key]

    if keep_rows:
        return lambda name, leaf: _two_sided(spec, matrix, name, leaf)
    return lambda name, leaf: compact(_two_sided(spec, matrix, name, leaf))


_Matrix = Callable[[str, str, int], Tensor | None]


def _parts(spec: Projection, leaf: Leaf) -> tuple[Part, ...]:
    return tuple(replace(part, width=min(part.width, spec.dim)) for part in leaf.parts)


def _two_sided(spec: Projection, matrix: _Matrix, name: str, leaf: Leaf) -> Leaf:
    parts = _parts(spec, leaf)
    match leaf:
        case Factorized():
            width = leaf.a.shape[-1] + leaf.bias
            a = _apply(with_bias_column(leaf.a, leaf.bias), matrix(name, "a", width))
            pieces = leaf.g.split([part.width for part in leaf.parts], -1)
            g = [_apply(x, matrix(p.weight, "g", p.width)) for p, x in zip(leaf.parts, pieces, strict=True)]
            return Factorized(a, torch.cat(g, -1), parts, False, leaf.calls, spec.basis)
        case Lookup():
            a = _apply(leaf.g, matrix(name, "a", leaf.g.shape[-1]))
            g = _columns(leaf.ids, matrix(leaf.parts[0].weight, "g", leaf.rows), leaf.rows, leaf.g)
            return Factorized(a, g, parts, False, leaf.calls, spec.basis)
        case Sum():
            uses = [_two_sided(spec, matrix, name, use) for use in leaf.uses]
            factored = [use for use in uses if isinstance(use, Factorized)]
            if len(factored) == len(uses):
                return concat_rows(factored)
            return Sum(tuple(uses), parts, spec.basis)
        case Diagonal():
            return replace(materialize_leaf(leaf), basis=spec.basis)
        case Materialized() if leaf.w.ndim == 3:
            w = _apply(leaf.w, matrix(name, "a", leaf.w.shape[-1]))
            pieces = w.split([part.width for part in leaf.parts], 1)
            rows = [
                _apply(x.transpose(1, 2), matrix(p.weight, "g", p.width)).transpose(1, 2)
                for p, x in zip(leaf.parts, pieces, strict=True)
            ]
            return Materialized(torch.cat(rows, 1), parts, False, spec.basis)
        case _:
            return replace(leaf, basis=spec.basis)


def _dense(spec: Projection, name: str, leaf: Leaf) -> Leaf:
    """P vec(G) in row chunks of P^T, so that memory stays bounded; the result does not depend on the chunk."""
    w = materialize_leaf(leaf).w
    flat = w.reshape(w.shape[0], prod(w.shape[1:])).to(wide(w.dtype))
    width, step = flat.shape[1], max(1, _CHUNK // spec.dim)
    if width <= spec.dim:
        total = flat
    else:
        total = flat.new_zeros(flat.shape[0], spec.dim)
        for start in range(0, width, step):
            rows = slice(start, min(start + step, width))
            block = projection_matrix(spec, name, "dense", width, rows)
            assert block is not None
            total = total + flat[:, rows] @ block.to(flat.device, flat.dtype)
    return Materialized(total, (Part(name, total.shape[1]),), False, spec.basis)


def project(grads: GradTree, spec: Projection) -> GradTree:
    """Project every leaf of a tree; see the module docstring.

    >>> from attrax.core import GradTree, factorized
    >>> tree = GradTree({"w": factorized("w", torch.ones(1, 9, 4), torch.ones(1, 9, 5))})
    >>> project(tree, Projection(3, sides="dense"))["w"].w.shape
    torch.Size([1, 3])
    """
    return grads.map(projected(spec))
