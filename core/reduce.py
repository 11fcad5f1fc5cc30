"""Reductions of gradients: build them, sum them, hand them back in the parameters' own layout."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.algebra import wide
from attrax.core.contract import CPU, Hardware, plan_contraction, problem
from attrax.core.execute import execute
from attrax.core.kernels import Operand
from attrax.core.leaves import (
    Factorized,
    Grouped,
    Leaf,
    Lookup,
    Materialized,
    Part,
    Sum,
    batch_size,
    dtype_of,
)
from attrax.core.terms import kept_by, terms
from attrax.core.tree import GradTree


def _build(leaf: Leaf, hardware: Hardware, weights: Tensor | None) -> Tensor:
    """Dense gradients [B, ...] of a leaf, or their weighted sums [...] or [Q, ...]."""
    dtype = wide(dtype_of(leaf))
    total: Tensor | None = None
    for term in terms(leaf, dtype):
        letters = "b" if weights is None else "bq"[: weights.ndim]
        extra = () if weights is None else (Operand(letters, weights.to(term_device(term), dtype)),)
        output = ("b" if weights is None else letters[1:]) + kept_by(term)
        operands = (*term, *extra)
        plan = plan_contraction(problem(operands, (), output, itemsize=dtype.itemsize), hardware)
        value = execute(plan, operands, train=len(operands))
        total = value if total is None else total + value
    assert total is not None
    return total


def term_device(term: tuple[Operand, ...]) -> torch.device:
    """Device of a term's operands."""
    data = term[0].data
    return data.device if isinstance(data, Tensor) else data.ids.device


def materialize_leaf(leaf: Leaf, *, hardware: Hardware = CPU) -> Materialized:
    """Build the per-example gradients of a leaf: ``w [B, No, Ni (+1)]``, [B, U, No, Ni] or [B, d], float32 or better.

    >>> from attrax.core import factorized
    >>> materialize_leaf(factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))).w.shape
    torch.Size([2, 5, 4])
    """
    if isinstance(leaf, Materialized):
        return replace(leaf, w=leaf.w.to(wide(leaf.w.dtype)))
    return Materialized(_build(leaf, hardware, None), leaf.parts, getattr(leaf, "bias", False), leaf.basis)


def materialize(grads: GradTree, *, hardware: Hardware = CPU) -> GradTree:
    """Build every leaf's per-example gradients.

    >>> from attrax.core import GradTree, factorized
    >>> tree = GradTree({"w": factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))})
    >>> materialize(tree)["w"].w.shape
    torch.Size([2, 5, 4])
    """
    return grads.map(lambda _, leaf: materialize_leaf(leaf, hardware=hardware))


def aggregate(
    grads: GradTree, weights: Float[Tensor, "B *Q"] | None = None, *, hardware: Hardware = CPU
) -> GradTree:
    """Weighted sums of the examples' gradients, ``sum_b w_b G_b``, without any per-example tensor.

    Args:
        grads: Gradients of B examples.
        weights: w [B], or [B, Q] for Q sums; ones if omitted.
        hardware: Roofline figures and memory budget.

    Returns:
        A tree of Materialized leaves holding one example, or Q.

    >>> from attrax.core import GradTree, factorized
    >>> tree = GradTree({"w": factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))})
    >>> aggregate(tree)["w"].w[0, 0, 0]
    tensor(6.)
    """

    def total(_: str, leaf: Leaf) -> Leaf:
        device = term_device(terms(leaf, wide(dtype_of(leaf)))[0])
        w = torch.ones(batch_size(leaf), device=device) if weights is None else weights
        value = _build(leaf, hardware, w)
        value = value.unsqueeze(0) if w.ndim == 1 else value
        if isinstance(leaf, Materialized):
            value = value.reshape(len(value), *leaf.w.shape[1:])
        return Materialized(value, leaf.parts, getattr(leaf, "bias", False), leaf.basis)

    return grads.map(total)


def compact(leaf: Leaf) -> Leaf:
    """The smaller exact form of a leaf: factored iff T (Ni + No) < Ni No (per group); norm layers are always built.

    >>> from attrax.core import factorized
    >>> type(compact(factorized("w", torch.ones(2, 9, 4), torch.ones(2, 9, 4)))).__name__
    'Materialized'
    """
    if isinstance(leaf, Materialized | Sum | Lookup):
        return leaf
    if isinstance(leaf, Factorized | Grouped):
        rows, No, Ni = *leaf.g.shape[-2:], leaf.a.shape[-1]
        if rows * (Ni + No) < Ni * No:
            return leaf
    return materialize_leaf(leaf)


def stored(grads: GradTree) -> dict[str, Float[Tensor, "B *shape"]]:
    """Per-example gradients by parameter, in each parameter's stored layout: parts, biases and transposes undone.

    Raises:
        ValueError: If a leaf is in another basis (projected), which has no stored layout.

    >>> from attrax.core import GradTree, factorized
    >>> leaf = factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5), bias="b")
    >>> {name: tuple(x.shape) for name, x in stored(GradTree({"w": leaf})).items()}
    {'w': (2, 5, 4), 'b': (2, 5)}
    """
    out: dict[str, Tensor] = {}
    for name, leaf in grads.items():
        if leaf.basis:
            raise ValueError(
                f"stored: leaf '{name}' is in basis '{leaf.basis}', not in the parameter's own layout."
            )
        built = materialize_leaf(leaf)
        if built.w.ndim != 3:
            out[leaf.parts[0].weight] = _layout(built.w, leaf.parts[0])
            continue
        for part, rows in zip(leaf.parts, built.w.split([p.width for p in leaf.parts], 1), strict=True):
            out[part.weight] = _layout(rows[..., :-1] if built.bias else rows, part)
            if built.bias and part.bias is not None:
                out[part.bias] = rows[..., -1]
    return out


def _layout(w: Tensor, part: Part) -> Tensor:
    """A parameter's gradient as the parameter is stored."""
    w = w.transpose(-1, -2) if part.transposed else w
    return w.reshape(w.shape[0], *part.shape) if part.shape else w
