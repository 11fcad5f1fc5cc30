"""PCA-initialised two-sided projection: the leading eigenvectors of each side's uncentred covariance.

    P_a = top k of A = E[a a^T] (bias column included),   P_g = top k of C = E[g g^T]      orthonormal rows, no scaling

A deterministic restriction to a subspace: ``<P_g G P_a^T, P_g H P_a^T>`` is <G, H> less the part outside it, so it is
biased but close where gradients concentrate.  Eigenvectors are only defined up to sign (and rotation of equal
eigenvalues), so gradients seen through two fits never mix: the basis label holds a hash of the matrices.

Reference: Choe et al. 2024 (LoGRA, arXiv:2405.13954), section 3 and appendix.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.kronecker import KroneckerSums


@dataclass(frozen=True, eq=False, slots=True)
class Subspace:
    """Leading eigenvectors of both sides of every layer of a fit.

    Attributes:
        dim: k.
        a: Per leaf, P_a^T [Ni (+1), k]; None where the side is no wider than k and stays exact.
        g: Per weight, P_g^T [No, k] or None.
        digest: Hash of the matrices.
    """

    dim: int
    a: Mapping[str, Float[Tensor, "_ _"] | None]
    g: Mapping[str, Float[Tensor, "_ _"] | None]
    digest: str

    @property
    def basis(self) -> str:
        """Label carried by projected leaves."""
        return f"pca-{self.dim}-{self.digest}"

    def side(self, name: str, side: str, width: int) -> Tensor | None:
        """The map of one side, for `attrax.core.sides.on_sides`.

        Raises:
            ValueError: If the fit did not see this layer, or at another width.
        """
        matrices = self.a if side == "a" else self.g
        if name not in matrices:
            raise ValueError(
                f"subspace: side {side} of '{name}' is not in the fit, which holds {sorted(matrices)[:5]}. "
                "Fit on it, or leave it out of the selection."
            )
        matrix = matrices[name]
        fitted = width if matrix is None else matrix.shape[0]
        if width != fitted or (matrix is None and width > self.dim):
            raise ValueError(
                f"subspace: side {side} of '{name}' has width {width}, the fit has {fitted}. "
                "Capture biases and stacked layers as in the fit."
            )
        return matrix


def fit_subspace(sums: Mapping[str, KroneckerSums], dim: int) -> Subspace:
    """Leading eigenvectors of Kronecker statistics.

    Args:
        sums: `kronecker_sums` of every leaf, merged over the fit set.
        dim: k, eigenvectors kept of each side.

    Returns:
        The subspace; a side that kept only its diagonal keeps its k coordinates of largest second moment.

    Raises:
        ValueError: If `dim` is not positive, or statistics are empty or not finite.

    >>> from attrax.core.leaves import factorized
    >>> from attrax.core.kronecker import kronecker_sums
    >>> sums = kronecker_sums(factorized("w", torch.randn(9, 1, 4), torch.randn(9, 1, 5), bias="b"))
    >>> fit_subspace({"w": sums}, 2).a["w"].shape
    torch.Size([5, 2])
    """
    if dim < 1:
        raise ValueError(f"subspace: got dim={dim}; expected dim >= 1.")
    a = {name: _leading(name, s.a, dim) for name, s in sums.items()}
    g = {
        part.weight: _leading(part.weight, moment, dim)
        for s in sums.values()
        for part, moment in zip(s.parts, s.g, strict=True)
    }
    digest = hashlib.blake2b(digest_size=8)
    for side, matrices in (("a", a), ("g", g)):
        for name, matrix in sorted(matrices.items()):
            digest.update(f"{side}:{name}:".encode())
            digest.update(b"" if matrix is None else matrix.double().cpu().contiguous().numpy().tobytes())
    return Subspace(dim, a, g, digest.hexdigest())


def _leading(name: str, moment: Float[Tensor, "*N"], dim: int) -> Float[Tensor, "N k"] | None:
    if not bool(torch.isfinite(moment).all()) or not bool((moment != 0).any()):
        raise ValueError(
            f"subspace: layer '{name}': the covariance is zero or holds non-finite values. "
            "Fit on examples with finite, non-zero gradients."
        )
    if len(moment) <= dim:
        return None
    if moment.ndim == 1:
        return moment.new_zeros(len(moment), dim).scatter(0, moment.topk(dim).indices.unsqueeze(0), 1.0)
    vectors = torch.linalg.eigh(moment.double()).eigenvectors
    return vectors[:, -dim:].flip(1).to(moment.dtype)
