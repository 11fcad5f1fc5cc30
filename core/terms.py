"""Leaves as einsum terms: the one place that says what each leaf *is* to a contraction.

The gradient of a leaf is a sum of terms, each a product of operands over letters

    b example · u group · t row · o output (the vocabulary, for an embedding) · i input (bias column last)

so every operation is written once, for terms, instead of once per pair of leaf types.  The two uses of a tied
embedding and head agree in `o` and `i`: there the one-hot factor of the first meets the dense one of the second.
"""

from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from attrax.core.kernels import OneHot, Operand
from attrax.core.leaves import Diagonal, Factorized, Grouped, Leaf, Lookup, Materialized, Sum

Term: TypeAlias = tuple[Operand, ...]


def with_bias_column(a: Tensor, bias: bool) -> Tensor:
    """Append the constant column of a folded bias: [.., Ni] -> [.., Ni + 1].

    >>> with_bias_column(torch.zeros(1, 2, 3), True).shape
    torch.Size([1, 2, 4])
    """
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1) if bias else a


def terms(leaf: Leaf, dtype: torch.dtype) -> tuple[Term, ...]:
    """The terms of a leaf, dense operands in `dtype`; each term's output letters are 'uoi', 'oi' or 'i'.

    >>> from attrax.core import factorized
    >>> leaf = factorized("fc.weight", torch.ones(2, 5, 3), torch.ones(2, 5, 4), bias="fc.bias")
    >>> [[operand.letters for operand in term] for term in terms(leaf, torch.float32)]
    [['bto', 'bti']]
    """
    match leaf:
        case Factorized():
            a = with_bias_column(leaf.a.to(dtype), leaf.bias)
            return ((Operand("bto", leaf.g.to(dtype)), Operand("bti", a)),)
        case Lookup():
            hot = OneHot(leaf.ids.clamp_min(0), leaf.rows, dtype)
            return ((Operand("bto", hot), Operand("bti", leaf.g.to(dtype))),)
        case Diagonal():
            g = Operand("bti", leaf.g.to(dtype))
            if leaf.x.shape[-1] == 1 != leaf.g.shape[-1]:
                return ((g, Operand("bt", leaf.x.squeeze(-1).to(dtype))),)
            return ((g, Operand("bti", leaf.x.to(dtype))),)
        case Grouped():
            return ((Operand("buto", leaf.g.to(dtype)), Operand("buti", leaf.a.to(dtype))),)
        case Materialized():
            w = leaf.w.to(dtype)
            if w.ndim in (3, 4):
                return ((Operand("boi" if w.ndim == 3 else "buoi", w),),)
            return ((Operand("bi", w.reshape(w.shape[0], prod(w.shape[1:]))),),)
        case Sum():
            return tuple(term for use in leaf.uses for term in terms(use, dtype))


def kept_by(term: Term) -> str:
    """Letters of the gradient that a term stands for.

    >>> kept_by((Operand("bto", torch.ones(1, 1, 1)), Operand("bti", torch.ones(1, 1, 1))))
    'oi'
    """
    found = {c for operand in term for c in operand.letters}
    return "".join(c for c in "uoi" if c in found)


def rename(term: Term, letters: dict[str, str]) -> Term:
    """The same term under other letters.

    >>> rename((Operand("bt", torch.ones(1, 1)),), {"b": "q", "t": "s"})[0].letters
    'qs'
    """
    return tuple(Operand("".join(letters.get(c, c) for c in o.letters), o.data) for o in term)
