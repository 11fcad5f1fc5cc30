"""Counter-based random matrices: entry (r, c) is a pure function of (key, r, c).

The stream is numpy's Philox4x64-10 addressed by counter, drawn on the host and moved where it is needed, so every
device, rank and chunk sees the same matrix.  Keys are hashes of what the matrix is for, never of call order.
Reference: Salmon et al. 2011 (Random123).
"""

import hashlib
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Kind: TypeAlias = Literal["rademacher", "gaussian"]
_SORTED, _ROUNDS = 2**14, 8


def stream_key(*words: object) -> int:
    """128-bit key of a random stream, a stable hash of its description.

    >>> stream_key(0, "fc.weight", "a", 3) == stream_key(0, "fc.weight", "a", 3) != stream_key(1, "fc.weight", "a", 3)
    True
    """
    text = "\x1f".join(["attrax-v1", *map(str, words)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def raw_words(key: int, start: int, count: int) -> np.ndarray:
    """Words `start` … `start + count - 1` of the stream of `key`, uint64."""
    generator = np.random.Philox(key=key)
    generator.advance(start // 4)
    skip = start % 4
    return np.asarray(generator.random_raw(skip + count)[skip:], dtype=np.uint64)


def uniform(key: int, start: int, count: int) -> np.ndarray:
    """`count` uniform numbers in [0, 1) with 53 bits, entries `start` … of the stream.

    >>> bool((uniform(7, 2, 3) == uniform(7, 0, 5)[2:]).all())
    True
    """
    return (raw_words(key, start, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _signs(key: int, start: int, count: int) -> np.ndarray:
    first = start // 64
    words = raw_words(key, first, (start + count - 1) // 64 - first + 1 if count else 0)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")
    return bits[start - 64 * first :][:count].astype(np.float32) * 2 - 1


def _normals(key: int, start: int, count: int) -> np.ndarray:
    first = start // 2 * 2
    u = uniform(key, first, (count + (start - first) + 1) // 2 * 2).reshape(-1, 2)
    radius, angle = np.sqrt(-2 * np.log1p(-u[:, 0])), 2 * np.pi * u[:, 1]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)
    return pairs[start - first :][:count].astype(np.float32)


def random_rows(key: int, kind: Kind, rows: slice, columns: int) -> Float[Tensor, "rows columns"]:
    """Rows of a random matrix with unit-variance entries, float32 on the host.

    Args:
        key: Stream key.
        kind: "rademacher" (+-1) or "gaussian".
        rows: Row range start:stop.
        columns: Width of the matrix.

    Raises:
        ValueError: If `kind` is unknown.

    >>> whole = random_rows(3, "gaussian", slice(0, 10), 5)
    >>> bool((random_rows(3, "gaussian", slice(4, 7), 5) == whole[4:7]).all())
    True
    """
    draw = {"rademacher": _signs, "gaussian": _normals}.get(kind)
    if draw is None:
        raise ValueError(f"projection kind: got {kind!r}; expected 'rademacher' or 'gaussian'.")
    values = draw(key, rows.start * columns, (rows.stop - rows.start) * columns)
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(-1, columns)


def permuted(key: int, start: int, count: int, size: int) -> np.ndarray:
    """Entries `start` … of a random permutation of ``range(size)``, at the cost of these entries alone.

    A short permutation is the order of as many random words.  A long one is a Feistel network on the next power of
    four, whose round functions are tables of random words; values that fall outside the range are sent through again
    until they fall inside.  Reference: Black and Rogaway 2002.

    Args:
        key: Stream key.
        start: First entry.
        count: Number of entries.
        size: Length of the permutation.

    Returns:
        int64 [count], all different.

    Raises:
        ValueError: If the entries are not all within the permutation.

    >>> sorted(permuted(7, 0, 5, 5).tolist()), bool((permuted(7, 2, 3, 5) == permuted(7, 0, 5, 5)[2:]).all())
    ([0, 1, 2, 3, 4], True)
    """
    if not 0 <= start <= start + count <= size:
        raise ValueError(
            f"permuted: entries {start} to {start + count} of a permutation of {size}; take fewer."
        )
    if size <= _SORTED:
        return np.argsort(raw_words(key, 0, size), kind="stable")[start : start + count]
    bits = (size.bit_length() + 1) // 2
    tables = raw_words(key, 0, _ROUNDS << bits).reshape(_ROUNDS, -1) >> np.uint64(64 - bits)
    values = _shuffled(np.arange(start, start + count, dtype=np.uint64), tables, bits)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = _shuffled(values[outside], tables, bits)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _shuffled(values: np.ndarray, tables: np.ndarray, bits: int) -> np.ndarray:
    left, right = values >> np.uint64(bits), values & np.uint64((1 << bits) - 1)
    for table in tables:
        left, right = right, left ^ table[right]
    return left << np.uint64(bits) | right
