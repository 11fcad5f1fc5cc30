"""Random coordinate masks: ``x_j = sqrt(d/k) G[coordinate_j]``, k coordinates of each parameter without replacement.

    Var (d/k) <x_M, y_M> = d (d - k) / (k (d - 1)) (sum_c x_c^2 y_c^2 - <x, y>^2 / d)

which is 0 at k = d.  A parameter's masks are consecutive pieces of one random permutation of its entries, so masks of
one seed are nested in k, and the R masks of `disjoint_masks` never share a coordinate: the mean of their inner products
is that of the one mask of R k coordinates.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attrax.core.algebra import on_gradient
from attrax.core.gather import Positions, gathered, gathered_rows, positions
from attrax.core.leaves import Leaf, Materialized
from attrax.core.random import permuted, stream_key

Scale: TypeAlias = Literal["unbiased", "none"]


@dataclass(frozen=True, slots=True)
class Mask:
    """A random subset of every parameter's coordinates.

    Attributes:
        count: k, coordinates kept of each parameter (weights and biases alike); all of a smaller one.
        seed: Seed; each parameter has its own stream, named by (seed, parameter, size).
        scale: "unbiased" multiplies by sqrt(d/k); "none" leaves the entries as they are, which makes a layer weigh k/d
            in sums over layers.
        masks: R, number of disjoint masks that this one is one of; each keeps at most d // R coordinates.
        index: Which of them.
    """

    count: int
    seed: int = 0
    scale: Scale = "unbiased"
    masks: int = 1
    index: int = 0

    @property
    def basis(self) -> str:
        """Label carried by masked leaves."""
        return f"mask-{self.scale}-{self.count}-{self.index}of{self.masks}-seed{self.seed}"


def check_mask(spec: Mask) -> None:
    """Refuse a specification without meaning.

    Raises:
        ValueError: If count, masks, index or scale have no meaning.
    """
    if spec.count < 1 or not 0 <= spec.index < spec.masks or spec.scale not in ("unbiased", "none"):
        raise ValueError(
            f"mask: got {spec}; expected count >= 1, 0 <= index < masks and scale 'unbiased' or 'none'."
        )


def disjoint_masks(spec: Mask, masks: int) -> tuple[Mask, ...]:
    """R masks of one seed that share no coordinate.

    >>> [mask.index for mask in disjoint_masks(Mask(8), 3)]
    [0, 1, 2]
    """
    return tuple(replace(spec, masks=masks, index=index) for index in range(masks))


def coordinates(spec: Mask, name: str, shape: tuple[int, ...]) -> Int[Tensor, " k"]:
    """The coordinates a mask keeps of one parameter.

    Args:
        spec: The mask.
        name: Parameter name.
        shape: Shape the parameter is stored in.

    Returns:
        Flat indices into the stored layout, ascending.

    Raises:
        ValueError: If the parameter has fewer entries than there are disjoint masks.

    >>> coordinates(Mask(100), "fc.bias", (4,))
    tensor([0, 1, 2, 3])
    """
    size = prod(shape)
    count = min(spec.count, size // spec.masks)
    if not count:
        raise ValueError(
            f"mask: parameter '{name}' of {size} entries has no {spec.masks} disjoint masks. "
            "Ask for fewer masks, or leave it out of the selection."
        )
    chosen = permuted(stream_key(spec.seed, name, "mask", size), spec.index * count, count, size)
    return torch.from_numpy(chosen).sort().values


def mask_positions(spec: Mask, leaf: Leaf) -> Positions:
    """Where the mask's coordinates lie in a leaf."""
    return positions(leaf, lambda name, shape: coordinates(spec, name, shape))


def mask_scale(spec: Mask, at: Positions) -> Float[Tensor, " k"]:
    """Factor of every coordinate, float64."""
    ratios = [
        1.0 if spec.scale == "none" else (size / part.width) ** 0.5
        for part, size in zip(at.parts, at.sizes, strict=True)
    ]
    widths = torch.tensor([part.width for part in at.parts])
    return torch.tensor(ratios, dtype=torch.float64).repeat_interleave(widths)


def masked(spec: Mask, leaf: Leaf, at: Positions, *, keep_rows: bool) -> Leaf:
    """Read the mask's coordinates off a leaf.

    Args:
        spec: The mask.
        leaf: Gradients in their own basis.
        at: `mask_positions` of the leaf.
        keep_rows: Keep the rows of factored leaves (2 T k numbers), as token scores need them.

    Returns:
        A leaf with one `Part` per parameter, w [B, k] or rows [B, T, k].

    >>> from attrax.core.leaves import factorized
    >>> leaf = factorized("w", torch.ones(1, 2, 3), torch.ones(1, 2, 5))
    >>> mask = Mask(4, scale="none")
    >>> masked(mask, leaf, mask_positions(mask, leaf), keep_rows=False).w
    tensor([[2., 2., 2., 2.]])
    """
    picked = gathered_rows(leaf, at) if keep_rows else Materialized(gathered(leaf, at), at.parts)
    scale = mask_scale(spec, at)
    scaled = on_gradient(picked, lambda g: g * scale.to(g.device, g.dtype))
    return replace(scaled, basis=spec.basis)
