"""Between two layouts of one tensor: as its parameter is stored, and as a leaf lays the parameter's gradient out.

Optimizer states and updates go by parameter; contractions go by leaf, which stacks parts, folds biases and transposes.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.leaves import Factorized, Grouped, Leaf, Lookup, Materialized, Sum
from attrax.core.reduce import stored
from attrax.core.tree import GradTree


def arranged(leaf: Leaf, values: Mapping[str, Float[Tensor, "Q *shape"]]) -> Materialized:
    """Tensors of the parameters of a leaf, laid out as the leaf's gradient: the inverse of `by_parameter`.

    Args:
        leaf: A leaf in its own basis, or masked.
        values: Q tensors of each parameter, as it is stored.

    Returns:
        A Materialized leaf of Q examples that any leaf of these parameters can be contracted with.

    Raises:
        KeyError: If a parameter is missing.
        ValueError: If the leaf is projected, so that parameters have no place in it.

    >>> from attrax.core.leaves import factorized
    >>> leaf = factorized("w", torch.ones(2, 1, 3), torch.ones(2, 1, 5), bias="b", transposed=True)
    >>> arranged(leaf, {"w": torch.zeros(4, 3, 5), "b": torch.ones(4, 5)}).w.shape
    torch.Size([4, 5, 4])
    """
    _check_basis("arranged", leaf)
    first = leaf.uses[0] if isinstance(leaf, Sum) else leaf
    tensors = [values[part.weight] for part in leaf.parts]
    if leaf.basis:
        return Materialized(torch.cat(tensors, -1), leaf.parts, False, leaf.basis)
    bias = isinstance(first, Factorized | Materialized) and first.bias
    match first:
        case Grouped():
            w = _blocks(tensors[0], (first.g.shape[1], first.g.shape[3]), leaf.parts[0].transposed)
        case Materialized() if first.w.ndim == 4:
            w = _blocks(tensors[0], (first.w.shape[1], first.w.shape[2]), leaf.parts[0].transposed)
        case Factorized() | Lookup() | Materialized() if not _is_vector(first):
            pairs = zip(tensors, leaf.parts, strict=True)
            w = torch.cat([_blocks(x, (part.width,), part.transposed) for x, part in pairs], 1)
        case _:
            return Materialized(tensors[0].flatten(1) if tensors[0].ndim > 1 else tensors[0], leaf.parts)
    if bias:
        columns = [w.new_zeros(len(w), p.width) if p.bias is None else values[p.bias] for p in leaf.parts]
        w = torch.cat([w, torch.cat(columns, 1).to(w.dtype).unsqueeze(-1)], -1)
    return Materialized(w, leaf.parts, bias)


def by_parameter(grads: GradTree) -> dict[str, Float[Tensor, "B *shape"]]:
    """Gradients by parameter: as `stored`, and of masked leaves the entries that each parameter keeps, [B, k].

    Raises:
        ValueError: If a leaf is projected.

    >>> from attrax.core.leaves import Part
    >>> leaf = Materialized(torch.ones(2, 5), (Part("w", 3), Part("b", 2)), False, "mask-none-3-0of1-seed0")
    >>> {name: tuple(x.shape) for name, x in by_parameter(GradTree({"w": leaf})).items()}
    {'w': (2, 3), 'b': (2, 2)}
    """
    out: dict[str, Tensor] = {}
    for name, leaf in grads.items():
        _check_basis("by_parameter", leaf)
        if leaf.basis and isinstance(leaf, Materialized):
            pieces = leaf.w.split([part.width for part in leaf.parts], -1)
            out |= {part.weight: piece for part, piece in zip(leaf.parts, pieces, strict=True)}
        else:
            out |= stored(GradTree({name: leaf}))
    return out


def _blocks(x: Tensor, lead: tuple[int, ...], transposed: bool) -> Tensor:
    """[Q, *stored shape] as [Q, *lead, Ni]."""
    if not transposed:
        return x.reshape(len(x), *lead, -1)
    return x.reshape(len(x), *lead[:-1], -1, lead[-1]).transpose(-1, -2)


def _is_vector(leaf: Factorized | Lookup | Materialized) -> bool:
    return isinstance(leaf, Materialized) and leaf.w.ndim != 3


def _check_basis(operation: str, leaf: Leaf) -> None:
    if leaf.basis and not (leaf.basis.startswith("mask-none") and isinstance(leaf, Materialized)):
        raise ValueError(
            f"{operation}: leaf '{leaf.parts[0].weight}' is in basis '{leaf.basis}', in which parameters have no "
            "place. Use the captured gradients, or Mask(scale='none')."
        )
