"""Identity of examples and of parameters, from their content.

An example's id is a hash of its declared inputs without padding, so the same example has the same id in any batch,
order, run or padding length.  A fingerprint identifies parameter values, so that gradients taken at different
parameters are never mixed.  Neither depends on Python's salted `hash`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attrax.core.transfers import fetched

_FEW, _WIDTH = 2**14, 2**10
_CACHED, _LAUNCHED = 2**17, 2**24  # words at a time: so many lie in a processor's cache, or keep a GPU busy


def content_ids(
    inputs: Mapping[str, Tensor],
    *,
    mask: Tensor | None = None,
    ignore: Iterable[str] = ("attention_mask",),
) -> tuple[str, ...]:
    """Content hash of each row of a batch.

    Args:
        inputs: Tensors with B rows; those of the mask's shape [B, T] are cut to the positions it marks.
        mask: Nonzero at real positions [B, T]; rows may be padded on either side.
        ignore: Names that say nothing about the example.

    Returns:
        One 16-digit hexadecimal id a row; equal rows have equal ids.

    >>> x = torch.tensor([[5, 6, 0], [5, 6, 7]])
    >>> a, b = content_ids({"input_ids": x}, mask=x != 0)
    >>> a == content_ids({"input_ids": x[:1, :2]})[0] != b
    True
    """
    skip = set(ignore)
    host = {n: x.detach().cpu() for n, x in sorted(inputs.items()) if n not in skip and x.ndim > 0}
    rows = next((x.shape[0] for x in host.values()), 0)
    real = None if mask is None else mask.detach().cpu() != 0
    ids: list[str] = []
    for row in range(rows):
        digest = hashlib.blake2b(digest_size=8)
        for name, x in host.items():
            if x.shape[0] != rows:
                continue
            cut = x[row] if real is None or x.shape != real.shape else x[row][real[row]]
            digest.update(f"{name}:{cut.dtype}:{tuple(cut.shape)};".encode())
            digest.update(_bytes(cut))
        ids.append(digest.hexdigest())
    return tuple(ids)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


@dataclass(frozen=True, slots=True)
class Content:
    """What a fingerprint knows of a tensor: its dtype, its shape and two sums of its bits, modulo 2^64."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sums: tuple[int, int]


def fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """Identify parameter values, exactly and cheaply: a hash over two exact 64-bit sums of each tensor's bits.

    The sums wrap modulo 2^64 and one weighs every element by its position, so any changed or moved element changes the
    fingerprint (up to 64-bit collisions), and the result does not depend on device, threads or summation order.

    Args:
        parameters: Tensors by name.

    >>> w = torch.arange(4.0)
    >>> fingerprint({"w": w}) == fingerprint({"w": w.clone()}) != fingerprint({"w": w.flip(0)})
    True
    """
    sums = counted({n: bit_sums(x) for n, x in parameters.items()})
    return combined({n: Content(x.dtype, tuple(x.shape), sums[n]) for n, x in parameters.items()})


def combined(contents: Mapping[str, Content]) -> str:
    """The fingerprint of tensors whose contents are known."""
    digest = hashlib.blake2b(digest_size=8)
    for name, known in sorted(contents.items()):
        digest.update(f"{name}:{known.dtype}:{known.shape};".encode())
        digest.update(b"".join((total % 2**64).to_bytes(8, "little") for total in known.sums))
    return digest.hexdigest()


def bit_sums(
    x: Tensor, place: Callable[[Tensor], Tensor] = lambda index: index, run: int | None = None
) -> Tensor:
    """The sum of a tensor's bit patterns, and their sum weighed by position; those of its pieces add up to it.

    Args:
        x: A tensor, or a piece of one.
        place: Flat positions in the whole tensor, of flat positions in the piece.
        run: How many entries of the piece that follow each other do so in the whole tensor, too; all by default.

    Returns:
        The sums [2], int64 modulo 2^64, where the tensor lies.

    >>> x = torch.arange(6)
    >>> bit_sums(x), bit_sums(x[:2]) + bit_sums(x[2:], lambda index: index + 2)
    (tensor([15, 70]), tensor([15, 70]))
    """
    bits = _words(x.detach().reshape(-1))
    width = _WIDTH if run is None else run
    even = 0 if bits.numel() < _FEW else bits.numel() - bits.numel() % width
    rest, at = bits[even:].to(torch.int64), torch.arange(even, bits.numel(), device=bits.device)
    sums = torch.stack([rest.sum(), (rest * (place(at) + 1)).sum()])
    return sums + _row_sums(bits[:even].view(-1, width), place) if even else sums


def _row_sums(words: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """Both sums of words [R, C], read once: from the sums over rows, which are runs, and those over columns."""
    (R, C), device = words.shape, words.device
    at_once = _CACHED if device.type == "cpu" else _LAUNCHED
    rows, columns = [], torch.zeros(C, dtype=torch.int64, device=device)
    for block in words.split(max(1, at_once // C)):
        wide = block.to(torch.int64)
        rows.append(wide.sum(1))
        columns += wide.sum(0)
    first = place(torch.arange(0, R * C, C, device=device)) + 1
    weighed = (torch.cat(rows) * first).sum() + (columns * torch.arange(C, device=device)).sum()
    return torch.stack([columns.sum(), weighed])


def counted(sums: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Sums of bits as numbers, read from the device together."""
    read = fetched(list(sums.values())).tolist()
    return {name: (int(plain), int(weighted)) for name, (plain, weighted) in zip(sums, read, strict=True)}


def _words(x: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(sizes[x.element_size()]) if x.dtype.is_floating_point else x.to(torch.int64)
