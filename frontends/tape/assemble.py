"""From layer calls to leaves: fold biases, join repeated calls, sum mixed uses, stack layers that share an input.

Everything here acts on finished pieces: what a layer rule made of each call of a layer during one forward pass.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attrax.core import Factorized, Leaf, Sum, concat_rows
from attrax.core.algebra import swap_roles
from attrax.core.leaves import Diagonal, Materialized
from attrax.core.packed import Memory


@dataclass(frozen=True, eq=False)
class Piece:
    """One call of one layer.

    Attributes:
        call: Position of the call in the forward pass.
        names: Canonical parameter name by attribute, for the parameters wanted.
        leaves: The rule's leaf by attribute.
        input_key: Identifies the input tensor if the layer can be stacked with others fed by it, else None.
        head: Whether this is the model's output head.
    """

    call: int
    names: Mapping[str, str]
    leaves: Mapping[str, Leaf]
    input_key: tuple[object, ...] | None
    head: bool = False


def components(edges: Sequence[Iterable[object]]) -> list[list[int]]:
    """Indices of `edges` grouped by shared elements, each group and the groups in order.

    >>> components([("w",), ("v",), ("w", "x")])
    [[0, 2], [1]]
    """
    parent = list(range(len(edges)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[object, int] = {}
    for i, elements in enumerate(edges):
        for element in elements:
            a, b = root(first.setdefault(element, i)), root(i)
            parent[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in range(len(edges)):
        groups[root(i)].append(i)
    return list(groups.values())


def assemble(pieces: Sequence[Piece], memory: Memory) -> dict[str, Leaf]:
    """Leaves of all parameters that a group of calls touches.

    Args:
        pieces: Calls in forward order, closed under sharing a parameter or an input.
        memory: Makes memory for what is stacked on the CPU.

    Returns:
        Leaf by canonical name (a stacked leaf goes by its first weight).
    """
    uses: dict[str, list[tuple[Piece, str]]] = defaultdict(list)
    for piece in pieces:
        for attribute, name in piece.names.items():
            uses[name].append((piece, attribute))
    leaves = {name: _join(name, found) for name, found in uses.items()}
    for name, found in uses.items():
        _fold_bias(name, found, uses, leaves)
    return _stack(leaves, uses, memory)


def _named(name: str, piece: Piece, attribute: str) -> Leaf:
    leaf = piece.leaves[attribute]
    part = replace(leaf.parts[0], weight=name, head=piece.head or leaf.parts[0].head)
    return replace(leaf, parts=(part,))


def _join(name: str, found: Sequence[tuple[Piece, str]]) -> Leaf:
    """One leaf from all uses of a parameter."""
    return joined([_named(name, piece, attribute) for piece, attribute in found])


def joined(leaves: Sequence[Leaf]) -> Leaf:
    """One leaf from the leaves of several uses of the same parameters by the same examples."""
    if len({isinstance(x, Factorized) and x.parts[0].transposed for x in leaves}) > 1:
        leaves = [swap_roles(x) if isinstance(x, Factorized) and x.parts[0].transposed else x for x in leaves]
    if len({type(x) for x in leaves}) > 1:
        leaves = [_as_matrix(x) if isinstance(x, Materialized) else x for x in leaves]
    kinds: dict[type, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        for use in leaf.uses if isinstance(leaf, Sum) else (leaf,):
            kinds[type(use)].append(use)
    uses = [concat_rows(same) for same in kinds.values()]
    return uses[0] if len(uses) == 1 else Sum(tuple(uses), uses[0].parts)


def _as_matrix(leaf: Materialized) -> Materialized:
    """A gradient of more than two axes (a convolution's) as the matrix that factored uses of the weight have."""
    if leaf.w.ndim <= 3:
        return leaf
    part = replace(leaf.parts[0], shape=tuple(leaf.w.shape[1:]))
    return replace(leaf, w=leaf.w.flatten(2), parts=(part,))


def _fold_bias(
    name: str,
    found: Sequence[tuple[Piece, str]],
    uses: Mapping[str, Sequence[tuple[Piece, str]]],
    leaves: dict[str, Leaf],
) -> None:
    """Fold a bias into its weight's leaf iff both are used in exactly the same calls."""
    if any(attribute != "bias" for _, attribute in found) or not isinstance(leaves.get(name), Diagonal):
        return
    weights = {piece.names.get("weight") for piece, _ in found}
    weight = next(iter(weights)) if len(weights) == 1 else None
    leaf = leaves.get(weight) if weight is not None else None
    if weight is None or not isinstance(leaf, Factorized):
        return
    same = [p.call for p, _ in uses[weight]] == [p.call for p, _ in found]
    if same and leaf.g.shape[-1] == leaves[name].parts[0].width:
        leaves[weight] = replace(leaf, bias=True, parts=(replace(leaf.parts[0], bias=name),))
        del leaves[name]


def _stack(
    leaves: dict[str, Leaf], uses: Mapping[str, Sequence[tuple[Piece, str]]], memory: Memory
) -> dict[str, Leaf]:
    groups: dict[object, list[str]] = defaultdict(list)
    for name, leaf in leaves.items():
        piece = uses[name][0][0]
        alone = len(uses[name]) == 1 and isinstance(leaf, Factorized) and piece.input_key is not None
        key = (piece.input_key, leaf.bias, piece.head) if alone and isinstance(leaf, Factorized) else (name,)
        groups[key].append(name)
    stacked: dict[str, Leaf] = {}
    for names in groups.values():
        members = [leaf for leaf in (leaves[n] for n in names) if isinstance(leaf, Factorized)]
        if len(names) == 1:
            stacked[names[0]] = leaves[names[0]]
            continue
        g = _side_by_side([leaf.g for leaf in members], memory)
        stacked[names[0]] = replace(members[0], g=g, parts=tuple(p for leaf in members for p in leaf.parts))
    return stacked


def _side_by_side(xs: Sequence[Tensor], memory: Memory) -> Tensor:
    if xs[0].device.type != "cpu" or len({x.dtype for x in xs}) > 1:
        return torch.cat(list(xs), -1)
    shape = (*xs[0].shape[:-1], sum(x.shape[-1] for x in xs))
    return torch.cat(list(xs), -1, out=memory(shape, xs[0].dtype))
