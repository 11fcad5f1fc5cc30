"""Two-operand kernels: what a step of a contraction plan runs.

An operand is a tensor or a one-hot selection that is never built.  The kernels know three pairs of operand kinds,
dense x dense (a GEMM or an elementwise product), one-hot x dense (a gather or an index_add) and one-hot x one-hot (an
equality mask), and each equals the einsum of the dense forms.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class OneHot:
    """One-hot vectors of width `size` at `ids`; an operand of letters (*axes of ids, vocabulary)."""

    ids: Tensor
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Operand:
    """A factor of a contraction: its einsum letters and its data."""

    letters: str
    data: Tensor | OneHot

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of `letters`."""
        return (
            (*self.data.ids.shape, self.data.size)
            if isinstance(self.data, OneHot)
            else tuple(self.data.shape)
        )


def in_common(x: OneHot, y: OneHot, *, paired: bool) -> tuple[OneHot, OneHot]:
    """The same two selections over the ids of one of them instead of the whole vocabulary.

    Products of the two are unchanged: ids that only one side has meet nothing.  Reads no data on the host.

    Args:
        x: Selection with ids [B, T].
        y: Selection with ids [Q, S].
        paired: Whether only rows of the same example meet (B = Q); every example then has its own vocabulary.

    >>> ids = torch.tensor([[7, 3, 7]])
    >>> hot, _ = in_common(*[OneHot(ids, 1000, torch.float32)] * 2, paired=True)
    >>> hot.ids, hot.size
    (tensor([[1, 0, 1]]), 4)
    """
    few = min((x.ids, y.ids), key=lambda ids: ids.numel())
    known = (few if paired else few.reshape(1, -1)).sort(-1).values
    size = known.shape[-1]
    if not 0 < size < min(x.size, y.size) - 1:
        return x, y

    def label(hot: OneHot) -> OneHot:
        ids = (hot.ids if paired else hot.ids.reshape(1, -1)).to(known.dtype).contiguous()
        place = torch.searchsorted(known, ids).clamp_max(size - 1)
        found = torch.where(known.gather(1, place) == ids, place, size)
        return OneHot(found.reshape(hot.ids.shape), size + 1, hot.dtype)

    return label(x), label(y)


def contract_pair(x: Operand, y: Operand, out: str) -> Tensor:
    """Contract two operands to the letters `out`; equals einsum of the dense forms."""
    if isinstance(x.data, OneHot) and isinstance(y.data, OneHot):
        return _match(x, y, out)
    if isinstance(x.data, OneHot):
        return _select(x, y, out)
    if isinstance(y.data, OneHot):
        return _select(y, x, out)
    if set(y.letters) <= set(x.letters):
        return _elementwise(x, y, out)
    if set(x.letters) <= set(y.letters):
        return _elementwise(y, x, out)
    return _gemm(x, y, out)


_SPLIT = 16


def _gemm(x: Operand, y: Operand, out: str) -> Tensor:
    """torch.einsum of two dense operands as one (batched) GEMM on views wherever the axes already lie so.

    A product with few outputs and a very long contraction is split along it: BLAS runs those on one core.
    """
    batch = [c for c in x.letters if c in y.letters and c in out]
    summed = [c for c in x.letters if c in y.letters and c not in out]
    left, rows = _matrix(x, batch, summed)
    right, columns = _matrix(y, batch, summed)
    few = left.shape[0] == 1 and left.shape[1] * right.shape[1] <= 4096
    if few and left.shape[2] >= 2**15 and left.shape[2] % _SPLIT == 0:
        left, right = (m.unflatten(2, (_SPLIT, -1)).squeeze(0).transpose(0, 1) for m in (left, right))
        product = torch.bmm(left, right.transpose(1, 2)).sum(0)
    else:
        product = torch.bmm(left, right.transpose(1, 2))
    sizes = dict(zip(x.letters, x.shape, strict=True)) | dict(zip(y.letters, y.shape, strict=True))
    letters = [*batch, *rows, *columns]
    return product.reshape([sizes[c] for c in letters]).permute([letters.index(c) for c in out])


def _matrix(operand: Operand, batch: list[str], summed: list[str]) -> tuple[Tensor, list[str]]:
    """[batch, free, summed] view of an operand and its free letters."""
    assert isinstance(operand.data, Tensor)
    free = [c for c in operand.letters if c not in batch and c not in summed]
    sizes = dict(zip(operand.letters, operand.shape, strict=True))
    count = [prod(sizes[c] for c in group) for group in (batch, free, summed)]
    order = operand.letters
    if summed and free and order.index(summed[0]) < order.index(free[0]):
        data = operand.data.permute([order.index(c) for c in (*batch, *summed, *free)])
        return data.reshape(count[0], count[2], count[1]).transpose(1, 2), free
    data = operand.data.permute([order.index(c) for c in (*batch, *free, *summed)])
    return data.reshape(count), free


def _align(data: Tensor, letters: str, target: str) -> Tensor:
    """Permute to the order of `target`, with axes of length 1 for its other letters."""
    data = data.permute([letters.index(c) for c in target if c in letters])
    for position, c in enumerate(target):
        if c not in letters:
            data = data.unsqueeze(position)
    return data


def _elementwise(x: Operand, y: Operand, out: str) -> Tensor:
    """`y`'s letters lie within `x`'s: multiply and sum, without the copies that a batched GEMM would make."""
    assert isinstance(x.data, Tensor) and isinstance(y.data, Tensor)
    summed = [c for c in x.letters if c not in out]
    if x.letters == y.letters and x.letters.startswith(out) and summed:
        shape = x.data.shape[: len(out)]
        rows = (*shape, -1) if x.data.numel() else (*shape, 0)
        return torch.linalg.vecdot(x.data.reshape(rows), y.data.reshape(rows))
    product = x.data * _align(y.data, y.letters, x.letters)
    result = product.sum([x.letters.index(c) for c in summed]) if summed else product
    remaining = [c for c in x.letters if c in out]
    return result.permute([remaining.index(c) for c in out])


def _match(x: Operand, y: Operand, out: str) -> Tensor:
    """One-hot x one-hot: 1 where the ids agree.  einsum 'btv,qsv->btqs'."""
    assert isinstance(x.data, OneHot) and isinstance(y.data, OneHot)
    left, right = x.letters[:-1], y.letters[:-1]
    every = left + "".join(c for c in right if c not in left)
    equal = _align(x.data.ids, left, every) == _align(y.data.ids, right, every)
    result = equal.to(x.data.dtype)
    extra = [every.index(c) for c in every if c not in out]
    result = result.sum(extra) if extra else result
    remaining = [c for c in every if c in out]
    return result.permute([remaining.index(c) for c in out])


def _select(hot: Operand, other: Operand, out: str) -> Tensor:
    """One-hot x dense: a gather if the dense operand has the vocabulary axis, else a scatter-add into it."""
    assert isinstance(hot.data, OneHot) and isinstance(other.data, Tensor)
    ids, v = hot.data.ids, hot.letters[-1]
    index = hot.letters[:-1]
    if v in other.letters:
        batch = [c for c in index if c in other.letters]
        rest = [c for c in other.letters if c != v and c not in batch]
        table = other.data.permute([other.letters.index(c) for c in (*batch, v, *rest)])
        if batch:
            # einsum 'btv,bsv->bts': each example gathers from its own table.
            flat = table.reshape(*table.shape[:2], prod(table.shape[2:]))
            rows = flat.gather(1, ids.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
            letters = index + "".join(rest)
            picked = rows.reshape(*ids.shape, *table.shape[2:])
        else:
            picked = table[ids]
            letters = index + "".join(rest)
        extra = [letters.index(c) for c in letters if c not in out]
        picked = picked.sum(extra) if extra else picked
        remaining = [c for c in letters if c in out]
        return picked.permute([remaining.index(c) for c in out])
    # einsum 'btv,bte->bve' (b may be summed too): rows of the dense operand are added into their vocabulary entry.
    rest = [c for c in other.letters if c not in index]
    source = other.data.permute([other.letters.index(c) for c in (*index, *rest)])
    width = source.shape[len(index) :]
    size = hot.data.size
    kept = [c for c in index if c in out]
    if kept:
        offset = torch.arange(ids.shape[0], device=ids.device).reshape(-1, *[1] * (ids.ndim - 1))
        flat_ids, lead = (offset * size + ids).reshape(-1), (ids.shape[0], size)
    else:
        flat_ids, lead = ids.reshape(-1), (size,)
    flat = source.reshape(flat_ids.shape[0], prod(width))
    total = flat.new_zeros(prod(lead), flat.shape[1]).index_add(0, flat_ids, flat)
    letters = "".join(kept) + v + "".join(rest)
    return total.reshape(*lead, *width).permute([letters.index(c) for c in out])
