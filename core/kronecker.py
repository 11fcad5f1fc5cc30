"""Kronecker-factored curvature of linear-type layers: statistics, eigenbasis, spectrum, inverse.

For a layer with rows (a_r, g_r) over all gradient-carrying positions of the fit set,

    A = (1/N) sum_r a_r a_r^T,   C = (1/N) sum_r g_r g_r^T          (K-FAC, Martens and Grosse 2015)
    A = U_A S_A U_A^T,           C = U_C S_C U_C^T
    L = (1/n) sum_i (U_C^T G_i U_A)^2                               (EK-FAC, George et al. 2018, per example)
    H^-1 V = U_C [ (U_C^T V U_A) / (L + damping) ] U_A^T            (Grosse et al. 2023, eq. 21)

with N positions and n examples.  Statistics form a commutative monoid: `init` / `update` / `merge`, so any split of
the data gives the same sums.  A row is gradient-carrying iff its g is not exactly zero: padding and positions that no
loss term can see count nowhere, and the constant bias column is 1 on those rows only.  Layers stacked in one leaf
share A (accumulated and decomposed once) and keep their own C.  A side wider than `max_dim` is kept diagonal.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.algebra import wide
from attrax.core.leaves import Factorized, Leaf, Materialized, Part
from attrax.core.pytree import register_value
from attrax.core.reduce import materialize_leaf
from attrax.core.terms import with_bias_column

MAX_DIM = 16_384
_BLOCK = 256


@dataclass(frozen=True, eq=False, slots=True)
class KroneckerSums:
    """Sums over rows; a side wider than the limit holds only its diagonal (1-D).

    Attributes:
        a: sum_r a_r a_r^T [Ni, Ni] (bias column included) or its diagonal [Ni].
        g: Per part, sum_r g_r g_r^T [No, No] or its diagonal.
        rows: N, number of gradient-carrying rows.
        examples: n, number of examples.
        parts: The leaf's parts.
    """

    a: Float[Tensor, "*Ni"]
    g: tuple[Float[Tensor, "..."], ...]
    rows: Tensor
    examples: Tensor
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Eigenbasis:
    """Eigenvectors and eigenvalues of both factors; None for the vectors of a diagonal side.

    Attributes:
        ua: U_A [Ni, Ni] or None.
        ug: Per part, U_C [No, No] or None.
        la: Eigenvalues of A [Ni].
        lg: Per part, eigenvalues of C [No].
        positions: Mean number of gradient-carrying rows per example, N / n.
        parts: The leaf's parts.
    """

    ua: Tensor | None
    ug: tuple[Tensor | None, ...]
    la: Float[Tensor, " Ni"]
    lg: tuple[Float[Tensor, " _"], ...]
    positions: Tensor
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Spectrum:
    """Sum over examples of the squared rotated gradients, ``sum_i (U_C^T G_i U_A)^2`` [No, Ni], and their number."""

    total: Float[Tensor, "No Ni"]
    examples: Tensor


register_value(KroneckerSums, arrays=("a", "g", "rows", "examples"), static=("parts",))
register_value(Eigenbasis, arrays=("ua", "ug", "la", "lg", "positions"), static=("parts",))
register_value(Spectrum, arrays=("total", "examples"))


def is_linear(name: str, leaf: Leaf) -> bool:
    """Default Kronecker scope: factored linear-type leaves, without embeddings and the output head.

    >>> from attrax.core import factorized
    >>> is_linear("w", factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2)))
    True
    """
    matrix = isinstance(leaf, Factorized) or (isinstance(leaf, Materialized) and leaf.w.ndim == 3)
    return matrix and not any(part.head for part in leaf.parts)


def has_factors(name: str, leaf: Leaf) -> bool:
    """Default scope of K-FAC: `is_linear` with rows; gradients that exist only built have no factors to correlate.

    >>> from attrax.core import factorized, materialized
    >>> has_factors("w", factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2)))
    True
    >>> has_factors("lstm.weight_ih_l0", materialized("lstm.weight_ih_l0", torch.ones(1, 8, 2)))
    False
    """
    return isinstance(leaf, Factorized) and is_linear(name, leaf)


def _second_moment(x: Float[Tensor, "R N"], max_dim: int) -> Tensor:
    return _symmetric(x) if x.shape[1] <= max_dim else x.square().sum(0)


def _symmetric(x: Float[Tensor, "R N"]) -> Float[Tensor, "N N"]:
    """``x.T @ x`` by blocks, those above the diagonal copied: half of the FLOPs where N is large."""
    width = x.shape[1]
    if width <= _BLOCK:
        return x.T @ x
    half = _BLOCK * -(-width // (2 * _BLOCK))
    left, right = x[:, :half], x[:, half:]
    out = x.new_empty(width, width)
    out[:half, :half], out[half:, half:] = _symmetric(left), _symmetric(right)
    out[half:, :half] = right.T @ left
    out[:half, half:] = out[half:, :half].T
    return out


def kronecker_sums(leaf: Leaf, *, dtype: torch.dtype | None = None, max_dim: int = MAX_DIM) -> KroneckerSums:
    """Statistics of one leaf; the `init` and the increment of the monoid.

    Args:
        leaf: Factored gradients (of the summed loss) of some examples.
        dtype: Accumulation dtype, float32 or better by default.
        max_dim: A side wider than this keeps only its diagonal.

    Returns:
        The sums.

    Raises:
        TypeError: If the leaf is not factored.

    >>> from attrax.core import factorized
    >>> kronecker_sums(factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))).rows
    tensor(6)
    """
    if not isinstance(leaf, Factorized):
        raise TypeError(
            f"kronecker_sums: leaf '{leaf.parts[0].weight}' is {type(leaf).__name__}; Kronecker factors need the rows "
            "of a linear-type layer. Leave it out of the scope, capture it factored (store(..., keep_factored=True)), "
            "or give each group of a Grouped leaf its own factors (attrax.core.split_groups)."
        )
    dtype = dtype or wide(leaf.g.dtype)
    g = leaf.g.reshape(-1, leaf.g.shape[-1]).to(dtype)
    carries = (g != 0).any(-1)
    a = with_bias_column(leaf.a.reshape(-1, leaf.a.shape[-1]).to(dtype), leaf.bias) * carries.unsqueeze(-1)
    pieces = g.split([part.width for part in leaf.parts], -1)
    return KroneckerSums(
        _second_moment(a, max_dim),
        tuple(_second_moment(piece, max_dim) for piece in pieces),
        carries.sum(),
        torch.tensor(leaf.g.shape[0], device=g.device),
        leaf.parts,
    )


def merge(x: KroneckerSums, y: KroneckerSums) -> KroneckerSums:
    """Sums over two sets of examples: commutative and associative.

    Raises:
        ValueError: If the sums belong to different layers.

    >>> from attrax.core import factorized
    >>> s = kronecker_sums(factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5)))
    >>> merge(s, s).examples
    tensor(4)
    """
    if x.parts != y.parts:
        raise ValueError(
            f"merge: statistics of {[p.weight for p in x.parts]} and {[p.weight for p in y.parts]}."
        )
    g = tuple(u + v for u, v in zip(x.g, y.g, strict=True))
    return KroneckerSums(x.a + y.a, g, x.rows + y.rows, x.examples + y.examples, x.parts)


def update(state: KroneckerSums | None, leaf: Leaf, *, max_dim: int = MAX_DIM) -> KroneckerSums:
    """Add a leaf to a state (None to start)."""
    new = kronecker_sums(leaf, max_dim=max_dim)
    return new if state is None else merge(state, new)


def _decompose(name: str, moment: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    if not bool(torch.isfinite(moment).all()):
        raise ValueError(
            f"eigenbasis: layer '{name}': the covariance holds non-finite values. "
            "Find the examples with non-finite gradients (on_nonfinite='skip' drops them) before fitting."
        )
    if moment.ndim == 1:
        return None, moment.clamp_min(0)
    values, vectors = torch.linalg.eigh(moment.to(dtype))
    return vectors.to(moment.dtype), values.clamp_min(0).to(moment.dtype)


def eigenbasis(sums: KroneckerSums, *, dtype: torch.dtype = torch.float64) -> Eigenbasis:
    """Decompose both factors (finalize of the monoid).

    Args:
        sums: Statistics over the fit set.
        dtype: Precision of the decomposition; results return in the statistics' dtype.

    Returns:
        The eigenbasis; negative eigenvalues from rounding are 0.

    Raises:
        ValueError: If the statistics are empty or not finite.

    >>> from attrax.core import factorized
    >>> b = eigenbasis(kronecker_sums(factorized("w", torch.randn(9, 1, 4), torch.randn(9, 1, 5))))
    >>> b.ua.shape, b.lg[0].shape
    (torch.Size([4, 4]), torch.Size([5]))
    """
    name = sums.parts[0].weight
    if not int(sums.rows):
        raise ValueError(
            f"eigenbasis: layer '{name}' saw no row with a gradient; fit on examples with a loss."
        )
    ua, la = _decompose(name, sums.a / sums.rows, dtype)
    sides = [_decompose(p.weight, g / sums.rows, dtype) for p, g in zip(sums.parts, sums.g, strict=True)]
    positions = sums.rows.to(sums.a.dtype) / sums.examples
    return Eigenbasis(ua, tuple(u for u, _ in sides), la, tuple(v for _, v in sides), positions, sums.parts)


def eigen_cost(sums: KroneckerSums) -> float:
    """Cost of `eigenbasis` up to a factor: the cubes of the sides that are decomposed.

    >>> from attrax.core import factorized
    >>> eigen_cost(kronecker_sums(factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))))
    189.0
    """
    return float(sum(len(side) ** 3 for side in (sums.a, *sums.g) if side.ndim == 2))


def _times(x: Tensor, vectors: Tensor | None) -> Tensor:
    return x if vectors is None else x @ vectors.to(x.dtype)


def _rotate_out(g: Tensor, basis: Eigenbasis) -> Tensor:
    pieces = g.split([part.width for part in basis.parts], -1)
    return torch.cat([_times(x, u) for x, u in zip(pieces, basis.ug, strict=True)], -1)


def _factors_first(leaf: Factorized, basis: Eigenbasis) -> bool:
    """Rotate factors iff T (Ni^2 + sum No^2) < Ni No_total Ni + Ni sum No^2 (flop counts of the two orders)."""
    rows, ni = leaf.g.shape[1], basis.la.shape[0]
    squares = sum(v.shape[0] ** 2 for v in basis.lg)
    out = leaf.g.shape[2]
    return rows * (ni**2 + squares) < ni * out * ni + ni * squares


def rotate(leaf: Leaf, basis: Eigenbasis) -> Factorized | Materialized:
    """Gradients in the eigenbasis, ``U_C^T G U_A``, factored if that is the cheaper order.

    >>> from attrax.core import factorized
    >>> leaf = factorized("w", torch.randn(9, 1, 4), torch.randn(9, 1, 5))
    >>> type(rotate(leaf, eigenbasis(kronecker_sums(leaf)))).__name__
    'Factorized'
    """
    _check(leaf, basis)
    label = leaf.basis + "/eigen"
    if isinstance(leaf, Factorized) and _factors_first(leaf, basis):
        dtype = torch.promote_types(wide(leaf.g.dtype), basis.la.dtype)
        a = _times(with_bias_column(leaf.a.to(dtype), leaf.bias), basis.ua)
        return Factorized(a, _rotate_out(leaf.g.to(dtype), basis), leaf.parts, False, leaf.calls, label)
    built = materialize_leaf(leaf)
    w = _times(built.w, basis.ua)
    w = _rotate_out(w.transpose(1, 2), basis).transpose(1, 2)
    return replace(built, w=w, bias=False, basis=label)


def _check(leaf: Leaf, basis: Eigenbasis) -> None:
    if [(p.weight, p.width) for p in leaf.parts] != [(p.weight, p.width) for p in basis.parts]:
        raise ValueError(
            f"curvature: leaf covers {[p.weight for p in leaf.parts]}, the fit {[p.weight for p in basis.parts]}. "
            "Score with the layer selection and projection of the fit."
        )


def spectrum(leaf: Leaf, basis: Eigenbasis, *, memory: int = 2**28) -> Spectrum:
    """Squared rotated gradients summed over the examples of a leaf (init and increment of a monoid).

    Args:
        leaf: Gradients of some examples.
        basis: The eigenbasis of the fit.
        memory: Bytes for the rotated gradients; examples are processed in groups that fit.

    Returns:
        The sum and the number of examples.

    >>> from attrax.core import factorized
    >>> leaf = factorized("w", torch.randn(9, 2, 4), torch.randn(9, 2, 5))
    >>> spectrum(leaf, eigenbasis(kronecker_sums(leaf))).total.shape
    torch.Size([5, 4])
    """
    turned = rotate(leaf, basis)
    if isinstance(turned, Factorized) and turned.g.shape[1] == 1:
        total = turned.g.squeeze(1).square().T @ turned.a.squeeze(1).square()
        return Spectrum(total, torch.tensor(turned.g.shape[0], device=total.device))
    if isinstance(turned, Materialized):
        return Spectrum(turned.w.square().sum(0), torch.tensor(turned.w.shape[0], device=turned.w.device))
    B, _, No = turned.g.shape
    group = max(1, memory // max(1, No * turned.a.shape[-1] * turned.a.element_size()))
    total = turned.a.new_zeros(No, turned.a.shape[-1])
    for start in range(0, B, group):
        g, a = turned.g[start : start + group], turned.a[start : start + group]
        total = total + torch.bmm(g.transpose(1, 2), a).square_().sum(0)
    return Spectrum(total, torch.tensor(B, device=total.device))


def merge_spectrum(x: Spectrum, y: Spectrum) -> Spectrum:
    """Sum of two spectra: commutative and associative."""
    return Spectrum(x.total + y.total, x.examples + y.examples)


def kfac_eigenvalues(basis: Eigenbasis) -> Float[Tensor, "No Ni"]:
    """K-FAC spectrum ``positions * S_C x S_A`` per part: on the scale of an example's Fisher, as EK-FAC's."""
    return torch.cat([torch.outer(lg, basis.la) for lg in basis.lg]) * basis.positions


def ekfac_eigenvalues(total: Spectrum) -> Float[Tensor, "No Ni"]:
    """EK-FAC spectrum ``L = (1/n) sum_i (U_C^T G_i U_A)^2`` (George et al. 2018, eq. 5)."""
    return total.total / total.examples


def relative_damping(
    eigenvalues: Float[Tensor, "No Ni"], parts: tuple[Part, ...], factor: float
) -> Float[Tensor, "No 1"]:
    """``factor`` times the mean eigenvalue of each part, one number per output row.

    >>> relative_damping(torch.tensor([[1.0, 3.0]]), (Part("w", 1),), 0.1)
    tensor([[0.2000]])
    """
    rows = eigenvalues.split([part.width for part in parts])
    return torch.cat([(factor * block.mean()).expand(block.shape[0], 1) for block in rows])


def precondition(
    leaf: Leaf, basis: Eigenbasis, eigenvalues: Float[Tensor, "No Ni"], *, damping: Tensor | float
) -> Materialized:
    """Apply the damped inverse curvature, ``H^-1 V = U_C [(U_C^T V U_A) / (L + damping)] U_A^T``.

    Args:
        leaf: Gradients V, usually the queries'.
        basis: Eigenbasis of the fit.
        eigenvalues: L [No, Ni].
        damping: Absolute damping, a number or [No, 1] (see `relative_damping`).

    Returns:
        The preconditioned gradients in the leaf's own coordinates, materialized.

    >>> from attrax.core import factorized
    >>> leaf = factorized("w", torch.randn(9, 1, 4), torch.randn(9, 1, 5))
    >>> b = eigenbasis(kronecker_sums(leaf))
    >>> precondition(leaf, b, kfac_eigenvalues(b), damping=0.1).w.shape
    torch.Size([9, 5, 4])
    """
    turned = materialize_leaf(rotate(leaf, basis))
    w = turned.w / (eigenvalues + damping).to(turned.w.dtype)
    back = replace(basis, ua=_transpose(basis.ua), ug=tuple(_transpose(u) for u in basis.ug))
    w = _rotate_out(_times(w, back.ua).transpose(1, 2), back).transpose(1, 2)
    return Materialized(w, leaf.parts, getattr(leaf, "bias", False), leaf.basis)


def _transpose(u: Tensor | None) -> Tensor | None:
    return None if u is None else u.T
