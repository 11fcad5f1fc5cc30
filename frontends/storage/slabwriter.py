"""Write a slab: arrays go to the file from the memory of the blocks, with a checksum for every 256 KiB of a stretch.

A checksum is taken while its bytes are in the processor's cache.
"""

import os
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from attrax.core.leaves import Leaf
from attrax.core.packed import Packed, pack
from attrax.core.schema import Form
from attrax.frontends.storage.h5types import bytes_of
from attrax.frontends.storage.slabs import ALIGNED, PIECE, PIECES, is_whole

_AT_ONCE = 500  # pieces of memory, of which the system takes 1024 in one call
_ZEROS = memoryview(bytes(ALIGNED))


class _Stream:
    """Bytes that go to a file one after another, with a checksum for every 256 KiB or what is left where one ends."""

    def __init__(self, descriptor: int, at: int) -> None:
        self._descriptor, self._at, self._room = descriptor, at, PIECE
        self._piece: list[memoryview] = []
        self._waiting: list[memoryview] = []
        self.stretch = 0
        self.pieces: list[tuple[int, int]] = []

    def put(self, data: memoryview) -> None:
        """Add bytes, whose memory must stay as it is until they are written."""
        self.stretch += len(data)
        while len(data):
            part, data = data[: self._room], data[self._room :]
            self._piece.append(part)
            self._room -= len(part)
            if not self._room:
                self._sum()
            elif len(self._piece) == _AT_ONCE:
                self._piece = [memoryview(b"".join(self._piece))]

    def align(self) -> None:
        """Add zeros up to a place where an array may begin."""
        if missing := -self.stretch % ALIGNED:
            self.put(_ZEROS[:missing])

    def end(self) -> None:
        """End a stretch."""
        self.align()
        self._sum()
        self._write()
        self.stretch = 0

    def _sum(self) -> None:
        """End a piece."""
        if not self._piece:
            return
        self.pieces.append((PIECE - self._room, _checksum(self._piece)))
        self._waiting += self._piece
        self._piece, self._room = [], PIECE
        if len(self.pieces) % PIECES == 0 or len(self._waiting) > _AT_ONCE:
            self._write()

    def _write(self) -> None:
        rest, self._waiting = self._waiting, []
        while rest:
            done = os.pwritev(self._descriptor, rest, self._at)
            self._at += done
            while rest and done >= len(rest[0]):
                done -= len(rest.pop(0))
            rest[:1] = [data[done:] for data in rest[:1]]


def _checksum(pieces: Sequence[memoryview]) -> int:
    if len(pieces) == 1:
        return xxh3_64_intdigest(pieces[0])
    digest = xxh3_64()
    for data in pieces:
        digest.update(data)
    return digest.intdigest()


def _groups(packed: Packed) -> Iterator[Packed]:
    for use in packed.uses:
        yield from _groups(use)
    if not packed.uses:
        yield packed


def _runs(x: Tensor) -> list[memoryview]:
    """The bytes of a tensor, in pieces without gaps."""
    return [bytes_of(x)] if x.is_contiguous() else [run for part in x for run in _runs(part)]


def write_slab(
    descriptor: int, at: int, leaves: Sequence[tuple[Form, Sequence[Leaf]]]
) -> tuple[list[tuple[int, int]], list[list[Int[np.ndarray, " ends"]]]]:
    """Write a slab.

    Args:
        descriptor: The file.
        at: Where the slab begins in it.
        leaves: Form and blocks of each leaf, on the CPU.

    Returns:
        Sizes and checksums of its pieces, and for each group of arrays the offsets of every block.

    Raises:
        OSError: If it cannot be written.
    """
    stream = _Stream(descriptor, at)
    offsets: list[list[np.ndarray]] = []
    for form, same in leaves:
        packed = [list(_groups(pack(leaf, None, form))) for leaf in same]
        for number, first in enumerate(packed[0]):
            for array in range(len(first.form.arrays)):
                stream.align()
                for block in packed:
                    for run in _runs(block[number].arrays[array]):
                        stream.put(run)
            offsets.append([block[number].offsets for block in packed])
        stream.align()
        if is_whole(stream.stretch):
            stream.end()
    stream.end()
    return stream.pieces, offsets


class LostBytes(OSError):
    """What was written is gone, and nobody has it any more."""


def rewrite_slab(descriptor: int, at: int, pieces: Sequence[tuple[int, int]]) -> None:
    """Write a slab once more from what the system still has of it.

    Raises:
        OSError: If it cannot be written.
        LostBytes: If the system has lost some of it.
    """
    for size, checksum in pieces:
        data = os.pread(descriptor, size, at)
        if xxh3_64_intdigest(data) != checksum:
            raise LostBytes("the system has lost bytes that it had taken")
        os.pwrite(descriptor, data, at)
        at += size
