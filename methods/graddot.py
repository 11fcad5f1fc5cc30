"""Gradient similarity at fixed parameters: GradDot and GradCos (Charpiat et al. 2019, arXiv:2102.05262).

    GradDot  s = <g_i, v_q>          GradCos  s = <g_i, v_q> / (|g_i| |v_q|)

Norms run over all leaves before dividing, once.  An example without a gradient scores 0.
"""

from dataclasses import replace

import torch

from attrax.core import CPU, Hardware, Scores, Source, Target, collect, sq_norms_leaf, targeted
from attrax.core.source import row_sums, several_passes
from attrax.methods.pairwise import cosines, pairwise


def graddot(train: Source, query: Source, *, target: Target = "sum", hardware: Hardware = CPU) -> Scores:
    """Inner products of train and query gradients.

    Args:
        train: Train gradients.
        query: Query gradients at the same parameters.
        target: Loss whose gradients are compared: "sum" over an example's tokens, "mean", or "as_trained".
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [N, Q]; higher = more helpful.

    Raises:
        ValueError: If sources are empty or taken at different parameters.

    >>> import torch
    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2))})
    >>> source = Blocks([Block(grads, Examples(("x",), weight=torch.ones(1)))])
    >>> graddot(source, source).values
    tensor([[4.]])
    """
    queries = collect(targeted(query, target), operation="graddot")
    about = {"method": "graddot", "target": target, "unit": "loss"}
    return pairwise(targeted(train, target), queries, about=about, hardware=hardware, operation="graddot")


def gradcos(train: Source, query: Source, *, target: Target = "sum", hardware: Hardware = CPU) -> Scores:
    """Cosines of train and query gradients, norms over all leaves.

    Args:
        train: Re-iterable train gradients (one pass for products, one for norms).
        query: Re-iterable query gradients at the same parameters.
        target: See `graddot`; a cosine does not depend on an example's positive scale.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [N, Q] in [-1, 1]; 0 where a gradient is zero.

    Raises:
        ValueError: If sources are empty, can be read once only, or were taken at different parameters.

    >>> import torch
    >>> from attrax.core import Block, Blocks, Examples, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2))})
    >>> source = Blocks([Block(grads, Examples(("x",), weight=torch.ones(1)))])
    >>> gradcos(source, source).values
    tensor([[1.]])
    """
    for side in (train, query):
        several_passes(side, "gradcos")
    dots = graddot(train, query, target=target, hardware=hardware)
    n, q = (_norms(targeted(side, target), hardware).to(dots.values.dtype) for side in (train, query))
    values = cosines(dots.values, n, q)
    return replace(dots, values=values, about={**dots.about, "method": "gradcos", "unit": "cosine"})


def _norms(source: Source, hardware: Hardware) -> torch.Tensor:
    blocks = row_sums(lambda name, leaf, _: sq_norms_leaf(leaf, name=name, hardware=hardware), source)
    found = [torch.zeros(len(examples)) if value is None else value for examples, value in blocks]
    return torch.cat(found).clamp_min(0).sqrt()
