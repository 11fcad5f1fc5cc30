"""Identity of examples and of parameters, from their content.

An example's id is a hash of its declared inputs without padding, so the same example has the same id in any batch,
order, run or padding length.  A fingerprint identifies parameter values, so that gradients taken at different
parameters are never mixed.  Neither depends on Python's salted `hash`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

_CHUNK = 2**20


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


def fingerprint(parameters: Mapping[str, Tensor], *, read: Callable[[Tensor], Tensor] = lambda x: x) -> str:
    """Identify parameter values, exactly and cheaply: a hash over two exact 64-bit sums of each tensor's bits.

    The sums wrap modulo 2^64 and one weighs every element by its position, so any changed or moved element changes the
    fingerprint (up to 64-bit collisions), and the result does not depend on device, threads or summation order.

    Args:
        parameters: Tensors by name.
        read: Makes the values of a tensor, one at a time (of one that is sharded over processes).

    >>> w = torch.arange(4.0)
    >>> fingerprint({"w": w}) == fingerprint({"w": w.clone()}) != fingerprint({"w": w.flip(0)})
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, held in sorted(parameters.items()):
        value = read(held.detach())
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        bits = _words(value.reshape(-1))
        plain, weighted = 0, 0
        for start in range(0, bits.numel(), _CHUNK):
            chunk = bits[start : start + _CHUNK].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            pair = torch.stack([chunk.sum(), (chunk * places).sum()]).tolist()
            plain, weighted = plain + int(pair[0]), weighted + int(pair[1])
        digest.update((plain % 2**64).to_bytes(8, "little") + (weighted % 2**64).to_bytes(8, "little"))
    return digest.hexdigest()


def _words(x: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(sizes[x.element_size()]) if x.dtype.is_floating_point else x.to(torch.int64)
