"""Leaves: the per-example gradient of one weight parameter, kept in the cheapest exact form.

A leaf stands for a batch of per-example gradients ``G [B, No, Ni]`` of the *sum* of an example's loss terms (or a
stated multiple of it), but rarely stores that tensor:

    Factorized    G_b = sum_t g_bt a_bt^T             linear-type layers: inputs `a`, output gradients `g`
    Lookup        G_b = sum_t onehot(ids_bt) g_bt^T   embeddings: the one-hot factor is never built
    Diagonal      G_b = sum_t x_bt * g_bt             norm layers, biases, elementwise parameters
    Grouped       G_bu = sum_t g_but a_but^T          grouped convolutions, fused expert tensors: blocks u
    Materialized  G_b itself                          projected, preconditioned or fallback gradients
    Sum           G_b = sum of the above              one weight used in several ways (tied embedding and head)

Letters: B examples, T rows (positions) of an example, Ni input width, No output width, V vocabulary, E embedding
width, U groups.  Rows beyond an example's length are zero in `g` and therefore change nothing; their id is -1, none.

`parts` lists the parameters a leaf covers.  Layers fed by the *same* input (query/key/value, gate/up) are one
Factorized leaf: one `a`, their `g` stacked along the output axis, one `Part` each.  With `bias=True` a constant
column of ones is understood at the end of `a`, so that the last column of G is the bias gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attrax.core.pytree import register_value


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter inside a leaf: `width` output rows of G belong to `weight` (and to `bias`, if folded).

    Attributes:
        weight: Canonical parameter name, e.g. ``"model.layers.0.mlp.up_proj.weight"``.
        width: Number of output rows of G, No of this layer.
        bias: Name of the folded bias parameter, or None.
        transposed: Whether the stored weight is [Ni, No] (Hugging Face `Conv1D`), unlike torch's [No, Ni].
        head: Whether the layer maps to the vocabulary or from it (excluded from Kronecker curvature unless asked), so
            that this is known of embeddings that are projected or built, too.
        shape: Stored shape of a parameter whose gradient has another one here (a kernel kept as a matrix, a scale
            kept as a vector), reached by a reshape after `transposed`; () where the leaf's own shape is the stored one.
    """

    weight: str
    width: int
    bias: str | None = None
    transposed: bool = False
    head: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Factorized:
    """G_b = sum_t g_bt a_bt^T for `a` [B, T, Ni] and `g` [B, T, No]; see the module docstring.

    Attributes:
        a: Layer inputs.
        g: Gradients of the loss with respect to the layer outputs, stacked over `parts`.
        parts: The layers that share `a`; their widths sum to No.
        bias: Whether a column of ones is understood at the end of `a`.
        calls: How often the layer ran per example; rows are ordered call by call.
        basis: Label of the coordinates `a` and `g` are expressed in; "" for the layer's own.
    """

    a: Float[Tensor, "B T Ni"]
    g: Float[Tensor, "B T No"]
    parts: tuple[Part, ...]
    bias: bool = False
    calls: int = 1
    basis: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Lookup:
    """G_b = sum_t onehot(ids_bt) g_bt^T, a [V, E] gradient with V = `rows`; `g` [B, T, E], `ids` [B, T].

    `sparse`: the optimizer is told which entries of the vocabulary an example touches, with whatever gradient, so that
    ids count where `g` is zero too.
    """

    ids: Int[Tensor, "B T"]
    g: Float[Tensor, "B T E"]
    parts: tuple[Part, ...]
    rows: int
    calls: int = 1
    basis: str = ""
    sparse: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Diagonal:
    """G_b = sum_t x_bt * g_bt, a [d] gradient; `g` [B, T, d], and `x` [B, T, d] or [B, T, 1] (a bias has x = 1)."""

    x: Float[Tensor, "B T _"]
    g: Float[Tensor, "B T d"]
    parts: tuple[Part, ...]
    calls: int = 1
    basis: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Grouped:
    """G_bu = sum_t g_but a_but^T: U blocks of one parameter, a [U, No, Ni] gradient.

    Attributes:
        a: Layer inputs by group.
        g: Gradients of the loss with respect to the layer outputs by group.
        parts: The parameter, its width U No.
        calls: How often the layer ran per example; rows are ordered call by call.
        basis: See `Factorized`.
        positions: Whether row t of every group is position t of the example; experts pack the rows routed to them.
    """

    a: Float[Tensor, "B U T Ni"]
    g: Float[Tensor, "B U T No"]
    parts: tuple[Part, ...]
    calls: int = 1
    basis: str = ""
    positions: bool = True


@dataclass(frozen=True, eq=False, slots=True)
class Materialized:
    """G_b stored as it is.

    `w` is [B, No, Ni (+1 with bias)] for linear-type leaves, [B, U, No, Ni] for grouped ones, else
    [B, *shape of the parameter].
    """

    w: Float[Tensor, "B *shape"]
    parts: tuple[Part, ...]
    bias: bool = False
    basis: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """G_b = the sum of the uses' gradients: one weight used in several ways.  Cross terms are exact everywhere."""

    uses: "tuple[Leaf, ...]"
    parts: tuple[Part, ...]
    basis: str = ""


Leaf: TypeAlias = Factorized | Lookup | Diagonal | Grouped | Materialized | Sum

register_value(Factorized, arrays=("a", "g"), static=("parts", "bias", "calls", "basis"))
register_value(Lookup, arrays=("ids", "g"), static=("parts", "rows", "calls", "basis", "sparse"))
register_value(Diagonal, arrays=("x", "g"), static=("parts", "calls", "basis"))
register_value(Grouped, arrays=("a", "g"), static=("parts", "calls", "basis", "positions"))
register_value(Materialized, arrays=("w",), static=("parts", "bias", "basis"))
register_value(Sum, arrays=("uses",), static=("parts", "basis"))


def _check_rows(kind: str, name: str, first: Tensor, second: Tensor, dims: int) -> None:
    if first.ndim != dims or second.ndim != 3 or first.shape[:2] != second.shape[:2]:
        raise ValueError(
            f"{kind}: leaf '{name}': expected factors that agree in [B, T], got {tuple(first.shape)} and "
            f"{tuple(second.shape)}. Give a 2-D activation a T axis of length 1."
        )


def factorized(
    parts: str | Sequence[Part],
    a: Float[Tensor, "B T Ni"],
    g: Float[Tensor, "B T No"],
    *,
    bias: str | bool | None = None,
    transposed: bool = False,
) -> Factorized:
    """Build a checked Factorized leaf.

    Args:
        parts: The weight's parameter name, or the list of `Part`s stacked in `g`.
        a: Layer inputs [B, T, Ni].
        g: Output gradients [B, T, No].
        bias: Parameter name of a folded bias (single weight), or whether the given parts fold theirs.
        transposed: For a single weight: whether it is stored [Ni, No].

    Returns:
        The leaf.

    Raises:
        ValueError: If shapes or part widths disagree.

    >>> leaf = factorized("fc.weight", torch.ones(2, 5, 3), torch.ones(2, 5, 4), bias="fc.bias")
    >>> leaf.parts[0].width, leaf.bias
    (4, True)
    """
    if isinstance(parts, str):
        name = bias if isinstance(bias, str) else None
        parts = (Part(parts, g.shape[-1], bias=name, transposed=transposed),)
        bias = name is not None
    label = parts[0].weight if parts else "?"
    _check_rows("factorized", label, a, g, 3)
    if sum(part.width for part in parts) != g.shape[-1]:
        raise ValueError(
            f"factorized: leaf '{label}': part widths {[p.width for p in parts]} do not sum to No={g.shape[-1]}."
        )
    return Factorized(a, g, tuple(parts), bool(bias))


def lookup(name: str, ids: Int[Tensor, "B T"], g: Float[Tensor, "B T E"], *, rows: int) -> Lookup:
    """Build a checked Lookup leaf for an embedding of `rows` entries.

    Raises:
        ValueError: If `ids` and `g` disagree in [B, T].

    >>> lookup("wte.weight", torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, 3), rows=11).rows
    11
    """
    _check_rows("lookup", name, ids, g, 2)
    return Lookup(ids, g, (Part(name, rows, head=True),), rows)


def diagonal(name: str, x: Float[Tensor, "B T _"], g: Float[Tensor, "B T d"]) -> Diagonal:
    """Build a checked Diagonal leaf; `x` may have a last axis of 1 (a bias: ``x = 1``).

    Raises:
        ValueError: If `x` and `g` disagree.

    >>> diagonal("ln.bias", torch.ones(2, 5, 1), torch.ones(2, 5, 3)).parts[0].width
    3
    """
    _check_rows("diagonal", name, x, g, 3)
    if x.shape[-1] not in (1, g.shape[-1]):
        raise ValueError(f"diagonal: leaf '{name}': x has width {x.shape[-1]}, g has {g.shape[-1]}.")
    return Diagonal(x, g, (Part(name, g.shape[-1]),))


def grouped(
    name: str,
    a: Float[Tensor, "B U T Ni"],
    g: Float[Tensor, "B U T No"],
    *,
    shape: tuple[int, ...] = (),
    transposed: bool = False,
    positions: bool = True,
) -> Grouped:
    """Build a checked Grouped leaf.

    Args:
        name: The parameter's name.
        a: Layer inputs by group [B, U, T, Ni].
        g: Output gradients by group [B, U, T, No].
        shape: Stored shape of the parameter if it is not [U, No, Ni].
        transposed: Whether the parameter is stored as blocks [Ni, No].
        positions: See `Grouped`.

    Returns:
        The leaf.

    Raises:
        ValueError: If the factors disagree in [B, U, T].

    >>> leaf = grouped("conv.weight", torch.ones(2, 3, 5, 4), torch.ones(2, 3, 5, 1), shape=(3, 1, 2, 2))
    >>> leaf.parts[0].width
    3
    """
    if a.ndim != 4 or g.ndim != 4 or a.shape[:3] != g.shape[:3]:
        raise ValueError(
            f"grouped: leaf '{name}': expected factors that agree in [B, U, T], got {tuple(a.shape)} and "
            f"{tuple(g.shape)}. Give every group the same number of rows, the missing ones zero."
        )
    part = Part(name, g.shape[1] * g.shape[3], transposed=transposed, shape=shape)
    return Grouped(a, g, (part,), positions=positions)


def materialized(name: str, w: Float[Tensor, "B *shape"]) -> Materialized:
    """Build a Materialized leaf from per-example gradients in the parameter's stored shape.

    >>> materialized("scale", torch.ones(2, 3)).parts[0].width
    3
    """
    return Materialized(w, (Part(name, w.shape[1] if w.ndim > 1 else 1),))


def batch_size(leaf: Leaf) -> int:
    """Number of examples B in a leaf."""
    match leaf:
        case Sum():
            return batch_size(leaf.uses[0])
        case Materialized():
            return leaf.w.shape[0]
        case _:
            return leaf.g.shape[0]


def dtype_of(leaf: Leaf) -> torch.dtype:
    """Floating dtype of the gradients in a leaf."""
    match leaf:
        case Sum():
            return dtype_of(leaf.uses[0])
        case Materialized():
            return leaf.w.dtype
        case _:
            return leaf.g.dtype


def covers(leaf: Leaf) -> tuple[str, ...]:
    """Names of all parameters whose gradient the leaf holds, weights first.

    >>> covers(factorized("fc.weight", torch.ones(1, 1, 3), torch.ones(1, 1, 4), bias="fc.bias"))
    ('fc.weight', 'fc.bias')
    """
    weights = tuple(part.weight for part in leaf.parts)
    biases = tuple(part.bias for part in leaf.parts if part.bias is not None)
    return weights + (biases if getattr(leaf, "bias", False) else ())
