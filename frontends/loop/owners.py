"""Which example each row of a batch belongs to, where rows are not examples.

A preference pair is two rows, a question with many sampled answers a row each; a row without padding holds several
documents.  Gradients of all rows (or positions) of an example are those of one example: their rows lie one after the
other, so that cross terms are exact.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attrax.core import Leaf, content_ids, tree_map
from attrax.core.leaves import Materialized, Sum
from attrax.frontends.model.rows import POSITIONAL
from attrax.frontends.tape.layout import Packing, packing, regrouped, regrouped_rows
from attrax.frontends.tape.passes import Pass

Owners: TypeAlias = Callable[[Mapping[str, Any], int], Tensor]


def stacked(parts: int = 2) -> Owners:
    """Examples of several rows, stacked part by part: row i of every part is example i.

    This is how preference pairs are batched: all chosen answers, then all rejected ones.

    >>> stacked(2)({}, 6)
    tensor([0, 1, 2, 0, 1, 2])
    """

    def owners(inputs: Mapping[str, Any], rows: int) -> Tensor:
        if rows % parts:
            raise ValueError(f"stacked: got a batch of {rows} rows; expected a multiple of {parts}.")
        return torch.arange(rows // parts).repeat(parts)

    return owners


def documents(inputs: Mapping[str, Any], rows: int) -> Int[Tensor, "R T"]:
    """Each document of rows that hold several: where `position_ids` begin anew, an example does.

    >>> documents({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, 1)
    tensor([[0, 0, 0, 1, 1]])
    """
    places = inputs.get("position_ids")
    if not isinstance(places, Tensor) or places.ndim != 2:
        raise ValueError(
            f"documents: the model was called with {sorted(inputs)}; expected position_ids [rows, positions] that "
            "begin anew with every document."
        )
    begins = places == 0
    begins[:, 0] = True
    return (begins.flatten().cumsum(0) - 1).view_as(places)


def checked(owners: object, rows: int) -> Int[Tensor, "R *T"]:
    """What a function of the user returned.

    Raises:
        ValueError: If it is no example index of every row, or of every position.
    """
    shape = tuple(owners.shape) if isinstance(owners, Tensor) else type(owners).__name__
    if (
        not isinstance(owners, Tensor)
        or owners.is_floating_point()
        or owners.ndim not in (1, 2)
        or len(owners) != rows
        or bool((owners < -1).any())
    ):
        kind = (
            f" {owners.dtype}, from {owners.min()}" if isinstance(owners, Tensor) and owners.numel() else ""
        )
        raise ValueError(
            f"capture: examples= returned {shape}{kind} for {rows} rows; expected an integer tensor [rows] or "
            "[rows, positions]: the example that each belongs to, -1 for none."
        )
    return owners


def count(owners: Tensor) -> int:
    """Number of examples.

    >>> count(torch.tensor([0, 1, -1, 1]))
    2
    """
    return int(owners.max()) + 1 if owners.numel() else 0


def places(owners: Tensor) -> Packing:
    """Where the rows, or the positions, of every example lie."""
    return packing(owners if owners.ndim == 2 else owners.unsqueeze(1), count(owners))


def together(leaf: Leaf, packed: Packing) -> Leaf:
    """A leaf of rows as one of examples.

    >>> from attrax.core import diagonal
    >>> leaf = diagonal("b", torch.ones(3, 2, 1), torch.ones(3, 2, 4))
    >>> together(leaf, places(torch.tensor([0, 1, 0]))).g.shape
    torch.Size([2, 4, 4])
    """
    if isinstance(leaf, Sum):
        return replace(leaf, uses=tuple(together(use, packed) for use in leaf.uses))
    if isinstance(leaf, Materialized):
        return replace(leaf, w=_grouped(leaf.w, packed).sum(1))
    axis = leaf.g.ndim - 2

    def joined(x: Tensor) -> Tensor:
        x = _grouped(x, packed).unflatten(axis + 1, (leaf.calls, -1))
        return x.movedim(1, axis + 1).flatten(axis, axis + 2)

    return tree_map(joined, leaf)


def _grouped(x: Tensor, packed: Packing) -> Tensor:
    at = Packing(packed.index.to(x.device), packed.valid.to(x.device), packed.length)
    return regrouped_rows(x.unsqueeze(1), at)


def pass_ids(run: Pass) -> Sequence[str]:
    """Content ids of the examples of a forward pass, from the inputs of the call that opened it.

    Raises:
        ValueError: If these do not identify examples.
    """
    tensors = {k: v for k, v in run.inputs.items() if isinstance(v, Tensor) and v.ndim > 0}
    named = {k: v for k, v in tensors.items() if v.shape[0] == run.rows and k not in POSITIONAL}
    if not named or run.derived:
        why = "depend on parameters outside of it" if run.derived else "hold no tensor with a batch axis"
        raise ValueError(
            f"capture: the inputs of the call that opened this forward pass {why}, so their content does not "
            "identify examples. Pass ids=, a function of the inputs that returns one id an example."
        )
    mask = tensors.get("attention_mask")
    return content_ids(named, mask=mask) if run.owners is None else owned_ids(named, mask, run.owners)


def owned_ids(tensors: Mapping[str, Tensor], mask: Tensor | None, owners: Tensor) -> Sequence[str]:
    """Content ids of examples: of their positions, or of their rows in order; that of a row which is one is its own."""
    packed = places(owners)
    if owners.ndim == 2:
        own = {
            k: regrouped(v.cpu(), places(owners.cpu()))
            for k, v in tensors.items()
            if v.shape[:2] == owners.shape
        }
        return content_ids(own, mask=packed.valid)
    ids = content_ids(tensors, mask=mask)
    groups = [[ids[i] for i in row[valid].tolist()] for row, valid in zip(*packed[:2], strict=True)]
    return [row[0] if len(row) == 1 else _hash(row) for row in groups]


def _hash(ids: Sequence[str]) -> str:
    return hashlib.blake2b("+".join(ids).encode(), digest_size=8).hexdigest()


def counted(terms: Bool[Tensor, "R *T"], owners: Tensor | None) -> Int[Tensor, " E"]:
    """Number of loss terms of each example.

    >>> counted(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 0]))
    tensor([3])
    """
    if owners is None:
        return terms.reshape(terms.shape[0], -1).sum(1).cpu()
    by = owners.cpu() if owners.ndim == 2 else owners.cpu().unsqueeze(1).expand(len(owners), terms[0].numel())
    found, by = terms.reshape(by.shape).cpu().long(), by.where(by >= 0, count(owners))
    return torch.zeros(count(owners) + 1, dtype=torch.long).index_add(0, by.flatten(), found.flatten())[:-1]
