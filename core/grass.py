"""GraSS: a coordinate mask to k' numbers, then a sparse projection (SJLT) of these k' numbers to k.

    dense   S mask(vec G)                                          k' reads and s k' additions an example
    two     S vec(sum_t g_t[m_g] a_t[m_a]^T),  |m_a| |m_g| = k'    factorized GraSS: masks on both factors

Both are unbiased with the default scaling sqrt(d/k') of the masks, per parameter: k numbers each, whatever it is
stacked with; fewer numbers than k stay as they are.  Vector parameters take the dense form.

Reference: Hu et al. 2025 (GraSS, arXiv:2505.18976).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.gather import Positions, gathered
from attrax.core.leaves import Leaf, Materialized, Part
from attrax.core.masks import Mask, Scale, mask_scale
from attrax.core.random import permuted, stream_key
from attrax.core.reduce import materialize_leaf
from attrax.core.sides import Selection, Sides, is_matrix, on_sides
from attrax.core.sketch import scatter, sparse_targets


@dataclass(frozen=True, slots=True)
class Grass:
    """Mask, then project.

    Attributes:
        dim: k, numbers kept of each parameter.
        sides: "dense" masks the gradient, "two" masks both factors (layers with factors only).
        blowup: k' / k.
        nonzeros: s, nonzeros a column of the projection.
        scale: Scale of the masks; see `attrax.core.masks.Mask`.
        seed: Seed of masks and projections.
    """

    dim: int
    sides: Literal["dense", "two"] = "dense"
    blowup: int = 4
    nonzeros: int = 1
    scale: Scale = "unbiased"
    seed: int = 0

    @property
    def basis(self) -> str:
        """Label carried by projected leaves."""
        return f"grass-{self.sides}-{self.scale}-{self.dim}x{self.blowup}s{self.nonzeros}-seed{self.seed}"

    @property
    def mask(self) -> Mask:
        """The mask of the first stage, of k' coordinates."""
        return Mask(self.blowup * self.dim, self.seed, self.scale)

    @property
    def kept(self) -> int:
        """Coordinates kept of each side, ``ceil(sqrt(k'))``."""
        return ceil((self.blowup * self.dim) ** 0.5)


def check_grass(spec: Grass) -> None:
    """Refuse a specification without meaning.

    Raises:
        ValueError: If a number is not positive, `dim` is no multiple of `nonzeros`, or a word is unknown.
    """
    numbers = min(spec.dim, spec.blowup, spec.nonzeros) >= 1 and spec.dim % max(1, spec.nonzeros) == 0
    if not numbers or spec.sides not in ("dense", "two") or spec.scale not in ("unbiased", "none"):
        raise ValueError(
            f"grass: got {spec}; expected positive numbers, dim a multiple of nonzeros, sides 'dense' or 'two' and "
            "scale 'unbiased' or 'none'."
        )


def grass_side(spec: Grass, name: str, side: str, width: int) -> Selection | None:
    """The mask of one side, for `on_sides`; a side no wider than `kept` stays whole.

    >>> grass_side(Grass(4, "two"), "w", "a", 16).scale
    2.0
    """
    if width <= spec.kept:
        return None
    key = stream_key(spec.seed, name, "mask", side, width)
    index = torch.from_numpy(permuted(key, 0, spec.kept, width)).sort().values
    return Selection(index, 1.0 if spec.scale == "none" else (width / spec.kept) ** 0.5)


def grass(
    spec: Grass, name: str, leaf: Leaf, *, at: Callable[[Leaf], Positions], sides: Sides
) -> Materialized:
    """Mask and project a leaf.

    Args:
        spec: What to do.
        name: Name of the leaf.
        leaf: Gradients in their own basis.
        at: Positions of the mask in a leaf.
        sides: `grass_side` of `spec`.

    Returns:
        w [B, sum of k], one `Part` per parameter (sides "two": per stacked weight with its folded bias).

    >>> from functools import partial
    >>> from attrax.core.masks import mask_positions
    >>> from attrax.core.leaves import factorized
    >>> leaf, spec = factorized("w", torch.ones(1, 2, 30), torch.ones(1, 2, 50)), Grass(8)
    >>> at = partial(mask_positions, spec.mask)
    >>> grass(spec, "w", leaf, at=at, sides=partial(grass_side, spec)).w.shape
    torch.Size([1, 8])
    """
    if spec.sides == "two" and is_matrix(leaf):
        built = materialize_leaf(on_sides(sides, spec.basis, name, leaf))
        blocks = built.w.split([part.width for part in built.parts], 1)
        pieces = [(part.weight, block.flatten(1)) for part, block in zip(built.parts, blocks, strict=True)]
    else:
        where = at(leaf)
        w = gathered(leaf, where)
        scaled = w * mask_scale(spec.mask, where).to(w.device, w.dtype)
        columns = scaled.split([part.width for part in where.parts], 1)
        pieces = [(part.weight, x) for part, x in zip(where.parts, columns, strict=True)]
    reduced = [_sparse(spec, parameter, x) for parameter, x in pieces]
    parts = tuple(Part(parameter, x.shape[1]) for (parameter, _), x in zip(pieces, reduced, strict=True))
    return Materialized(torch.cat(reduced, 1), parts, False, spec.basis)


def _sparse(spec: Grass, parameter: str, x: Float[Tensor, "B n"]) -> Float[Tensor, "B k"]:
    """SJLT of the k' numbers kept of one parameter."""
    n = x.shape[1]
    if n <= spec.dim:
        return x
    key = stream_key(spec.seed, parameter, "grass", n, spec.dim, spec.nonzeros)
    rows, signs = sparse_targets(key, slice(0, n), spec.dim, spec.nonzeros)
    return scatter(x, rows, signs, spec.dim)
