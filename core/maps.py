"""Linear maps of gradients to fewer numbers: every map is a value, and becomes a transform ``(name, leaf) -> leaf``.

    Projection   random matrices on both factors, elementwise on the factors, or on the flat gradient
    Mask         random coordinates of every parameter
    Grass        a mask, then a sparse projection; on the gradient or on both factors
    Subspace     leading eigenvectors of both factors' covariances (fitted)

Leaves carry the map's `basis`, so that gradients seen through different maps never meet.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from attrax.core.dense import dense
from attrax.core.gather import Positions, gradient_shape
from attrax.core.grass import Grass, check_grass, grass, grass_side
from attrax.core.leaves import Leaf, Part
from attrax.core.masks import Mask, check_mask, mask_positions, masked
from attrax.core.projection import Projection, check_projection, projection_matrix
from attrax.core.reduce import compact
from attrax.core.sides import cached, elementwise, on_sides
from attrax.core.subspace import Subspace
from attrax.core.tree import GradTree

LinearMap: TypeAlias = Projection | Mask | Grass | Subspace


def projected(spec: LinearMap, *, keep_rows: bool = False) -> Callable[[str, Leaf], Leaf]:
    """The map as a transform ``(name, leaf) -> leaf``; what it draws for a side or a mask is drawn once per transform.

    Args:
        spec: What to project to.
        keep_rows: Keep the rows of factored leaves (Kronecker statistics and token scores need them) even where the
            projected gradient would be smaller.  Dense maps have no rows.

    Returns:
        A transform whose leaves carry ``spec.basis``; leaves that carry it already pass unchanged.

    Raises:
        ValueError: If `spec` has no meaning; in use, if a leaf is in another basis.

    >>> from attrax.core import factorized
    >>> import torch
    >>> leaf = projected(Projection(2))("w", factorized("w", torch.ones(1, 9, 4), torch.ones(1, 9, 5)))
    >>> leaf.w.shape, leaf.basis
    (torch.Size([1, 2, 2]), 'two-rademacher-2-seed0')
    """
    apply = _apply(spec, keep_rows)

    def run(name: str, leaf: Leaf) -> Leaf:
        if leaf.basis == spec.basis:
            return leaf
        if leaf.basis:
            raise ValueError(
                f"project: leaf '{name}' is in basis '{leaf.basis}' already; '{spec.basis}' needs the layer's own. "
                "Apply one map to the captured gradients."
            )
        return apply(name, leaf)

    return run


def _apply(spec: LinearMap, keep_rows: bool) -> Callable[[str, Leaf], Leaf]:
    def rows(leaf: Leaf) -> Leaf:
        return leaf if keep_rows else compact(leaf)

    match spec:
        case Projection():
            check_projection(spec)
            if spec.sides == "dense":
                return partial(dense, spec)
            sides = cached(partial(projection_matrix, spec))
            if spec.sides == "two":
                return lambda name, leaf: rows(on_sides(sides, spec.basis, name, leaf))
            return lambda name, leaf: rows(elementwise(on_sides(sides, spec.basis, name, leaf), spec.dim))
        case Mask():
            check_mask(spec)
            at = _positions(spec)
            return lambda name, leaf: masked(spec, leaf, at(leaf), keep_rows=keep_rows)
        case Grass():
            check_grass(spec)
            return partial(grass, spec, at=_positions(spec.mask), sides=cached(partial(grass_side, spec)))
        case Subspace():
            return lambda name, leaf: rows(on_sides(spec.side, spec.basis, name, leaf))


def _positions(spec: Mask) -> Callable[[Leaf], Positions]:
    """`mask_positions`, found once for the parameters of a leaf."""
    found: dict[tuple[tuple[Part, ...], tuple[int, int]], Positions] = {}

    def get(leaf: Leaf) -> Positions:
        key = (leaf.parts, gradient_shape(leaf))
        if key not in found:
            found[key] = mask_positions(spec, leaf)
        return found[key]

    return get


def project(grads: GradTree, spec: LinearMap) -> GradTree:
    """Project every leaf of a tree; see the module docstring.

    >>> from attrax.core import GradTree, factorized
    >>> import torch
    >>> tree = GradTree({"w": factorized("w", torch.ones(1, 9, 4), torch.ones(1, 9, 5))})
    >>> project(tree, Projection(3, sides="dense"))["w"].w.shape
    torch.Size([1, 3])
    """
    return grads.map(projected(spec))
