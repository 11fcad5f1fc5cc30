"""A shard as an HDF5 file: two arrays of bytes, whose places HDF5 chooses and which are written and read without it.

HDF5 makes the descriptions in memory once the sizes are known, so that a full disk cannot leave it with a file that it
can neither write nor close.
"""

from functools import cache
from typing import Any

import h5py
from h5py import h5d, h5t  # pyright: ignore[reportAttributeAccessIssue]

from attrax.core.schema import FORMAT, SCHEMA, Places
from attrax.frontends.storage.h5types import (
    dense,
    member,
    place_of,
    read_checksum,
    read_number,
    read_text,
    write_checksum,
    write_text,
)

PAGE = 512
"""Slabs begin at multiples of this."""


class _Memory:
    """What HDF5 writes into a file that it takes to be empty."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self._at = self.size = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move; from the start, from here or from the end."""
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._at

    def read(self, size: int) -> bytes:
        """Read some bytes."""
        found = bytearray(size)
        for at, data in self.pieces:
            low, high = max(at, self._at), min(at + len(data), self._at + size)
            if low < high:
                found[low - self._at : high - self._at] = data[low - at : high - at]
        return bytes(found)

    def readinto(self, out: Any) -> int:
        """Read into memory."""
        out[:] = self.read(len(out))
        return len(out)

    def write(self, data: Any) -> int:
        """Write."""
        self.pieces.append((self._at, bytes(data)))
        self.truncate(max(self.size, self._at + len(data)))
        self._at += len(data)
        return len(data)

    def truncate(self, size: int) -> int:
        """Set the length."""
        self.size = size
        return size

    def flush(self) -> None:
        """Nothing is held back."""


def wrapped(size: int, table: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """All of a shard but its data: pieces by their place, and the size of the file.

    Args:
        size: Bytes of the data, a positive multiple of `PAGE`.
        table: The table.
    """
    memory, place, end = _made(size, table)
    if place != data_at():
        raise RuntimeError(f"HDF5 {h5py.version.hdf5_version} puts data at {place}, not at {data_at()}")
    return [*memory.pieces, (end, table)], max(memory.size, end + len(table))


@cache
def data_at() -> int:
    """Where the data of every shard begin: descriptions of one size lie before them."""
    return _made(PAGE, b"{}")[1]


def _made(size: int, table: bytes) -> tuple[_Memory, int, int]:
    """The descriptions, and the places of data and table."""
    memory = _Memory()
    with h5py.File(
        memory,  # pyright: ignore[reportArgumentType]
        "w",
        libver=("v110", "v110"),
        alignment_threshold=PAGE,
        alignment_interval=PAGE,
    ) as file:
        write_text(file, "format", FORMAT)
        file.attrs["schema"] = SCHEMA
        data, text = (
            dense(file, name, h5t.STD_U8LE, (n,)) for name, n in (("data", size), ("table", len(table)))
        )
        write_checksum(text, table)
        return memory, data.get_offset(), text.get_offset()


def places_in(file: h5py.File) -> Places:
    """Find data and table of a shard; nothing in it is trusted.

    Raises:
        ValueError: If it is of another format or schema, or damaged.
    """
    found = read_text(file, "format"), read_number(file, "schema")
    if found != (FORMAT, SCHEMA):
        raise OtherSchema(
            f"is of format {found[0]!r}, schema {found[1]}; this version of attrax reads {FORMAT!r}, schema {SCHEMA}. "
            "Open the store with the version that wrote it."
        )
    data, table = (member(file, name, h5d.DatasetID) for name in ("data", "table"))
    where, checksum = (*_place("data", data), *_place("table", table)), read_checksum(table)
    if checksum is None:
        raise ValueError("its table has no checksum")
    return Places(*where, checksum)


class OtherSchema(ValueError):
    """A file of another format or schema."""


def _place(name: str, dataset: Any) -> tuple[int, int]:
    if dataset.get_type() != h5t.STD_U8LE or len(dataset.shape) != 1:
        raise ValueError(f"'{name}' is not a list of bytes")
    _, at, size = place_of(dataset, 1)
    return at, size
