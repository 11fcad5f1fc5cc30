"""Dense projections by dattri's random projectors, for comparisons with scores made there (extra: ``attrax[dattri]``).

    P vec(G) with P [k, d] of entries N(0, 1/k) or +-1/sqrt(k), drawn by torch's generator of the device

Use `attrax.core.Projection(sides="dense")` otherwise: matrices differ between devices here, so the basis label names
the device, and are drawn anew for every block.  Every leaf has its own seed, a hash of (seed, name): with one seed for
all, layers of one width would share their matrix and the errors of their scores would add up.

Not offered: "random_mask", which is not scaled by sqrt(d/k) and hides its coordinates (`attrax.core.Mask`), and "sjlt"
and "grass", which need CUDA (`Projection(kind="sjlt")`, `Grass`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core import Leaf, Materialized, Part
from attrax.core.dense import flattened
from attrax.core.random import stream_key


@dataclass(frozen=True, slots=True)
class DattriProjection:
    """What to project to.

    Attributes:
        dim: k, numbers kept of each leaf.
        kind: "normal" or "rademacher".
        seed: Seed of all matrices.
        device: Where to project: "cpu" or "cuda"; matrices of one are not those of the other.
    """

    dim: int
    kind: Literal["normal", "rademacher"] = "normal"
    seed: int = 0
    device: str = "cpu"

    @property
    def basis(self) -> str:
        """Label carried by projected leaves."""
        return f"dattri-{self.kind}-{self.dim}-{torch.device(self.device).type}-seed{self.seed}"


def dattri_projected(spec: DattriProjection) -> Callable[[str, Leaf], Leaf]:
    """The projection as a transform ``(name, leaf) -> leaf``, in float32; leaves no wider than k stay exact.

    Every matrix is checked when it is first used: the projector must be linear, repeat itself and keep the squared
    length of random vectors up to deviations of probability e^-20.

    Raises:
        ImportError: If dattri is not installed.
        ValueError: If `spec` has no meaning; in use, if a leaf is in another basis or the check fails.
    """
    if spec.dim < 1 or spec.kind not in ("normal", "rademacher"):
        raise ValueError(f"dattri: got {spec}; expected dim >= 1 and kind 'normal' or 'rademacher'.")
    make = _factory()
    checked: set[tuple[str, int]] = set()

    def run(name: str, leaf: Leaf) -> Leaf:
        if leaf.basis == spec.basis:
            return leaf
        if leaf.basis:
            raise ValueError(
                f"dattri: leaf '{name}' is in basis '{leaf.basis}' already. Apply one map to the captured gradients."
            )
        flat = flattened(leaf).to(spec.device, torch.float32)
        if flat.shape[1] > spec.dim:
            projector = _projector(make, spec, name, flat.shape[1])
            if (name, flat.shape[1]) not in checked:
                _check(projector, spec, name, flat.shape[1])
                checked.add((name, flat.shape[1]))
            flat = projector(flat)
        return Materialized(flat, (Part(name, flat.shape[1]),), False, spec.basis)

    return run


def _factory() -> Callable[..., Any]:
    try:
        from dattri.func.projection import random_project
    except ImportError:
        raise ImportError("dattri projections need dattri: pip install 'attrax[dattri]'.") from None
    return random_project


def _projector(
    make: Callable[..., Any], spec: DattriProjection, name: str, width: int
) -> Callable[[Tensor], Tensor]:
    seed = stream_key(spec.seed, name, "dattri", width, spec.dim, spec.kind) % 2**31
    like = torch.zeros(1, width, device=spec.device)
    return make(like, 1, spec.dim, 32, proj_seed=seed, proj_type=spec.kind, device=spec.device)


def _check(projector: Callable[[Tensor], Tensor], spec: DattriProjection, name: str, width: int) -> None:
    """Refuse a projector that is not one fixed, linear, unbiased map."""
    vectors = max(3, 512 // spec.dim)
    x = torch.randn(vectors, width, generator=torch.Generator().manual_seed(0)).to(spec.device)
    first, again, both = projector(x), projector(x), projector(x[:1] + x[1:2])
    ratio = (_squared(first) / _squared(x)).mean()
    freedom = spec.dim * min(vectors, width)
    allowed = 2 * (20 / freedom) ** 0.5 + 40 / freedom  # of a chi^2: Laurent and Massart 2000
    faults = {
        "does not repeat itself": not torch.equal(first, again),
        "is not linear": not torch.allclose(first[0] + first[1], both[0], rtol=1e-3, atol=1e-3),
        f"scales squared lengths by {float(ratio):.3g}": abs(float(ratio) - 1) > allowed,
        f"gives {tuple(first.shape)}": first.shape != (vectors, spec.dim),
    }
    found = [fault for fault, present in faults.items() if present]
    if found:
        raise ValueError(
            f"dattri: leaf '{name}': the {spec.kind} projector of {width} to {spec.dim} {', '.join(found)}. "
            "Use attrax.core.Projection(sides='dense')."
        )


def _squared(x: Float[Tensor, "B d"]) -> Float[Tensor, " B"]:
    return x.double().square().sum(1)
