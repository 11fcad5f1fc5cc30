"""HDF5 and torch: tensors of every dtype in and out, bfloat16 included, and nothing else that HDF5 can hold.

HDF5 keeps the description of an array and decides where its chunks lie.  Their bytes go from memory to the file and
back in as few system calls as possible: HDF5 would copy every chunk once more, and reads a cold file in small pieces.
Each array carries the XXH3 checksums of its chunks of rows in an attribute: computing HDF5's own fletcher32 takes
longer than reading from a disk.  Files are not trusted.  Only chunked, checksummed arrays of known types that lie in
the file itself are read: no links, external data, virtual datasets or filters, and never more bytes than the file
has.
"""

import itertools
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import h5py
import numpy as np
import torch
from h5py import h5a, h5d, h5g, h5i, h5l, h5o, h5p, h5s, h5t  # pyright: ignore[reportAttributeAccessIssue]
from jaxtyping import Int, UInt
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from attrax.core.schema import Memory, offsets_of, ranges, uninitialized

CHUNK_BYTES = 2**18
CHECKSUMS = b"xxh3"
_AT_ONCE = 1024  # pieces that the system takes in one call

Offsets: TypeAlias = tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"]]
"""Starts and counts of consecutive ranges."""
Node = TypeVar("Node", h5g.GroupID, h5d.DatasetID)
_WORDS: Mapping[type, str] = {h5g.GroupID: "group", h5d.DatasetID: "dataset"}


def _bfloat16() -> h5t.TypeFloatID:
    kind = h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    return kind


TYPES: Mapping[torch.dtype, h5t.TypeID] = {
    torch.float64: h5t.IEEE_F64LE,
    torch.float32: h5t.IEEE_F32LE,
    torch.float16: h5t.IEEE_F16LE,
    torch.bfloat16: _bfloat16(),
    torch.int64: h5t.STD_I64LE,
    torch.int32: h5t.STD_I32LE,
    torch.int16: h5t.STD_I16LE,
    torch.int8: h5t.STD_I8LE,
    torch.uint8: h5t.STD_U8LE,
}
"""File type of each dtype that a store can hold."""


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of whole rows of at most 256 KiB, about equally filled; a wider row is cut.

    >>> chunk_shape((20_000, 64), 4), chunk_shape((3, 4096, 4096), 4)
    ((1000, 64), (1, 16, 4096))
    """
    chunk = [max(1, n) for n in shape]
    for axis in range(len(chunk)):
        inner = itemsize * math.prod(chunk[axis + 1 :])
        most = max(1, CHUNK_BYTES // inner)
        chunk[axis] = -(-chunk[axis] // -(-chunk[axis] // most))
        if inner <= CHUNK_BYTES:
            break
    return tuple(chunk)


def _numpy(x: Tensor) -> np.ndarray:
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(_numpy(x).reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]


def _cut(pieces: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Pieces that follow one another, regrouped to groups of these sizes."""
    rest, data = iter(pieces), memoryview(b"")
    for size in sizes:
        group: list[memoryview] = []
        while size:
            data = data if len(data) else next(rest)
            group.append(data[:size])
            data, size = data[size:], size - len(group[-1])
        yield group


def _checksums(pieces: Sequence[memoryview], step: int) -> UInt[np.ndarray, " chunks"]:
    """XXH3 (64 bits) of every `step` bytes of pieces that follow one another."""
    total = sum(map(len, pieces))
    groups = _cut(pieces, (min(step, total - at) for at in range(0, total, max(1, step))))
    return np.array([_checksum(group) for group in groups], np.uint64)


def _checksum(group: Sequence[memoryview]) -> int:
    if len(group) == 1:
        return xxh3_64_intdigest(group[0])
    digest = xxh3_64()
    for data in group:
        digest.update(data)
    return digest.intdigest()


def _after(pieces: list[memoryview], done: int) -> list[memoryview]:
    """What is left of pieces after `done` bytes."""
    rest = sum(map(len, pieces)) - done
    return list(_cut(pieces, [done, rest]))[1]


def _extents(
    dataset: Any, shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, first: int, last: int
) -> list[tuple[int, int]]:
    """Where the rows of chunks `first` to `last` - 1 lie in the file: (place, bytes), neighbors as one."""
    starts = [range(first * chunk[0], min(last * chunk[0], shape[0]), chunk[0])]
    starts += [range(0, n, c) for n, c in zip(shape[1:], chunk[1:], strict=True)]
    full, found = itemsize * math.prod(chunk), list[tuple[int, int]]()
    for start in itertools.product(*starts):
        place, size = dataset.get_chunk_info_by_coord(start).byte_offset, full
        if any(map(operator.gt, map(operator.add, start, chunk), shape)):
            size = itemsize * math.prod(map(min, chunk, map(operator.sub, shape, start)))
        if found and sum(found[-1]) == place:
            place, size = found[-1][0], found.pop()[1] + size
        found.append((place, size))
    return found


class NewFile:
    """A new file for HDF5 to write, which keeps what goes wrong to itself until the file is closed.

    HDF5 cannot close a file after a failed write (a full disk), and a process that has one crashes when it ends.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._at = self._size = 0
        self._error: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; from the start, from here or from the end."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._at

    def read(self, size: int) -> bytes:
        """Read some bytes; those that could not be written are zero."""
        return os.pread(self._descriptor, size, self._at).ljust(size, b"\0")

    def readinto(self, out: Any) -> int:
        """Read into memory."""
        out[:] = self.read(len(out))
        return len(out)

    def write(self, data: Any) -> int:
        """Write; does nothing after the first error."""
        self.put(self._at, [memoryview(data)])
        self._at += len(data)
        return len(data)

    def put(self, at: int, pieces: Sequence[memoryview]) -> None:
        """Write pieces one after another at a place; does nothing after the first error."""
        rest = list(pieces)
        self._size = max(self._size, at + sum(map(len, rest)))
        while rest and not self._error:
            try:
                done = os.pwritev(self._descriptor, rest[:_AT_ONCE], at)
            except OSError as error:
                self._error = error
            else:
                at, rest = at + done, _after(rest, done)

    def truncate(self, size: int) -> int:
        """Set the length."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._error = self._error or error
        self._size = size
        return size

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: What went wrong with it.
        """
        os.close(self._descriptor)
        if self._error:
            raise self._error


def write_pieces(file: NewFile, group: h5py.Group, name: str, pieces: Sequence[Tensor]) -> None:
    """Write CPU tensors, one after another, as one chunked, checksummed dataset of their type."""
    parts = [_bytes(x.detach().contiguous()) for x in pieces]
    shape, dtype = (sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype
    chunk = chunk_shape(shape, dtype.itemsize)
    dataset = _create(group, name, shape, dtype, parts)
    places = (
        _extents(dataset, shape, chunk, dtype.itemsize, 0, -(-shape[0] // chunk[0])) if any(parts) else []
    )
    for (place, _), data in zip(places, _cut(parts, (size for _, size in places)), strict=True):
        file.put(place, data)


def write_array(group: h5py.Group, name: str, x: Tensor) -> None:
    """Write a CPU tensor as a chunked, checksummed dataset of its own type."""
    x = x.detach().contiguous()
    dataset = _create(group, name, tuple(x.shape), x.dtype, [_bytes(x)])
    if x.numel():
        dataset.write(h5s.ALL, h5s.ALL, _numpy(x), mtype=TYPES[x.dtype])


def _create(
    group: h5py.Group, name: str, shape: tuple[int, ...], dtype: torch.dtype, data: Sequence[memoryview]
) -> Any:
    """A dataset with the checksums of its data, whose chunks have their places."""
    chunk = chunk_shape(shape, dtype.itemsize)
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_chunk(chunk)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    most = shape if math.prod(shape) else (h5s.UNLIMITED,) * len(shape)
    dataset = h5d.create(group.id, name.encode(), TYPES[dtype], h5s.create_simple(shape, most), properties)
    sums = _checksums(data, dtype.itemsize * math.prod([chunk[0], *shape[1:]]))
    h5a.create(dataset, CHECKSUMS, h5t.STD_U64LE, h5s.create_simple(sums.shape)).write(sums)
    return dataset


def write_numbers(group: h5py.Group, name: str, values: Sequence[int] | np.ndarray) -> None:
    """Write integers as int64."""
    write_array(group, name, torch.from_numpy(np.array(values, np.int64)))


def write_strings(group: h5py.Group, strings: Sequence[str]) -> None:
    """Write strings as utf8 [bytes] and offsets [n + 1]."""
    encoded = [s.encode() for s in strings]
    write_array(group, "utf8", torch.from_numpy(np.frombuffer(b"".join(encoded), np.uint8).copy()))
    write_numbers(group, "offsets", offsets_of(np.array([len(e) for e in encoded], np.int64)))


def write_text(owner: h5py.Group, name: str, value: str) -> None:
    """Write a text attribute of fixed length: unlike variable-length text it is covered by a checksum."""
    data = np.array(value.encode())
    kind = h5t.py_create(h5py.string_dtype("utf-8", data.itemsize))
    h5a.create(owner.id, name.encode(), kind, h5s.create(h5s.SCALAR)).write(data, mtype=kind)


def open_file(path: Path) -> h5py.File:
    """Open a file for reading, without a lock unless HDF5_USE_FILE_LOCKING asks for one.

    A program may hold the file open through h5py under another locking rule, which HDF5 wants to be the same.

    Raises:
        OSError: If the file cannot be opened.
    """
    for locking in (False, "best-effort"):
        try:
            return h5py.File(path, "r", driver="sec2", locking=locking)
        except OSError as error:
            if "locking" not in str(error):
                raise
    return h5py.File(path, "r", driver="sec2", locking=True)


def read_ahead(file: h5py.File) -> None:
    """Let the system read all of a file from the disk while its descriptions are looked at."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.id.get_vfd_handle(), 0, 0, os.POSIX_FADV_WILLNEED)


def member(group: h5py.Group, name: str, kind: type[Node]) -> Node:
    """A group or dataset that lies in this file.

    Raises:
        ValueError: If it is missing, a link to elsewhere, or something else.
    """
    key, links = name.encode(), group.id.links
    hard = links.exists(key) and links.get_info(key).type == h5l.TYPE_HARD
    node = h5o.open(group.id, key) if hard else None
    if isinstance(node, kind):
        return node
    raise ValueError(f"'{group.name}/{name}' is not a {_WORDS[kind]} of this file")


def child(group: h5py.Group, *names: str) -> h5py.Group:
    """The group under `names`, each of them a group that lies in this file."""
    for name in names:
        group = h5py.Group(member(group, name, h5g.GroupID))
    return group


@dataclass(frozen=True, eq=False, slots=True)
class Checked:
    """A dataset that is safe to read.

    Attributes:
        dataset: The dataset.
        name: Its name.
        shape: Its shape.
        dtype: Its type.
        chunk: Shape of a chunk, a contiguous piece of the array; a chunk of rows shares a checksum.
        checksums: One for every ``chunk[0]`` rows, the last for what remains.
        descriptor: Of the file.
    """

    dataset: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: tuple[int, ...]
    checksums: UInt[np.ndarray, " chunks"]
    descriptor: int


def checked(group: h5py.Group, name: str) -> Checked:
    """A dataset that is safe to read.

    Raises:
        ValueError: If it is not one that attrax writes.
    """
    dataset = member(group, name, h5d.DatasetID)
    name, shape = f"{group.name}/{name}", tuple(dataset.shape)
    plist, kind, file = dataset.get_create_plist(), dataset.get_type(), h5i.get_file_id(dataset)
    dtype = next((d for d, t in TYPES.items() if t == kind), None)
    plain = plist.get_layout() == h5d.CHUNKED and plist.get_nfilters() == 0
    sums = h5a.open(dataset, CHECKSUMS) if h5a.exists(dataset, CHECKSUMS) else None
    if dtype is None or not plain or not shape or sums is None or sums.get_type() != h5t.STD_U64LE:
        raise ValueError(f"'{name}' is not a chunked array of a known type with checksums")
    claimed = math.prod(shape) * dtype.itemsize
    if claimed > min(dataset.get_storage_size(), file.get_filesize()):
        raise ValueError(f"'{name}' claims {claimed} bytes, which the file does not hold")
    chunk = plist.get_chunk()
    whole = [c >= n for c, n in zip(chunk, shape, strict=True)]
    if any(chunk[i] > 1 and not all(whole[i + 1 :]) for i in range(len(chunk))):
        raise ValueError(f"'{name}' has chunks of {chunk}, which are not contiguous in {shape}")
    checksums = np.zeros(-(-shape[0] // chunk[0]) if claimed else 0, np.uint64)
    if tuple(sums.shape) != checksums.shape:
        raise ValueError(f"'{name}' has {sums.shape} checksums for {shape[0]} rows")
    if claimed:
        sums.read(checksums)
    return Checked(dataset, name, shape, dtype, chunk, checksums, file.get_vfd_handle())


def _read_chunks(source: Checked, first: int, last: int, memory: Memory) -> Tensor:
    """The rows of chunks `first` to `last` - 1, compared with their checksums."""
    rows = source.chunk[0]
    start, stop = first * rows, min(last * rows, source.shape[0])
    out = memory((stop - start, *source.shape[1:]), source.dtype)
    if out.numel():
        data, done = _bytes(out), 0
        for place, size in _extents(source.dataset, source.shape, source.chunk, out.itemsize, first, last):
            _read_at(source, place, data[done : done + size])
            done += size
        wrong = np.flatnonzero(_checksums([data], rows * out[:1].nbytes) != source.checksums[first:last])
        if len(wrong):
            at = start + rows * int(wrong[0])
            raise ValueError(f"the checksum of '{source.name}' does not fit its rows from {at} on")
    return out


def _read_at(source: Checked, place: int, out: memoryview) -> None:
    while len(out):
        done = os.preadv(source.descriptor, [out], place)
        if not done:
            raise ValueError(f"'{source.name}' lies beyond the end of the file")
        place, out = place + done, out[done:]


def read_array(group: h5py.Group, name: str) -> Tensor:
    """All of a dataset."""
    source = checked(group, name)
    return _read_chunks(source, 0, -(-source.shape[0] // source.chunk[0]), uninitialized)


def read_numbers(group: h5py.Group, name: str) -> Int[np.ndarray, " n"]:
    """All of a list of int64.

    Raises:
        ValueError: If it is something else.
    """
    values = read_array(group, name).numpy()
    if values.ndim != 1 or values.dtype != np.int64:
        raise ValueError(f"'{group.name}/{name}' is no list of int64")
    return values


def read_ranges(
    group: h5py.Group,
    name: str,
    starts: Int[np.ndarray, " n"],
    counts: Int[np.ndarray, " n"],
    memory: Memory = uninitialized,
) -> Tensor:
    """Rows of ascending ranges ``[start, start + count)`` of a dataset, one range after another.

    Whole chunks are read, neighboring ones in one piece.

    Raises:
        ValueError: If a range reaches beyond the dataset, or a checksum does not fit.
    """
    source = checked(group, name)
    rows, length = source.chunk[0], source.shape[0]
    stops = starts + counts
    if len(starts) and not (starts[0] >= 0 and stops[-1] <= length):
        raise ValueError(f"'{source.name}' has {length} rows, fewer than its offsets say")
    used = counts > 0
    starts, stops, counts = starts[used], stops[used], counts[used]
    first, last = starts // rows, -(-stops // rows)
    breaks = np.flatnonzero(first[1:] > last[:-1]) + 1
    pieces: list[Tensor] = []
    for these in np.split(np.arange(len(starts)), breaks):
        begin, end = (int(first[these[0]]), int(last[these[-1]])) if len(these) else (0, 0)
        slab = _read_chunks(source, begin, end, memory)
        at = starts[these] - begin * rows
        pieces.append(_picked(slab, at, counts[these]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _picked(slab: Tensor, starts: np.ndarray, counts: np.ndarray) -> Tensor:
    """Rows of ascending ranges of a tensor; a view if they are one range."""
    total = int(counts.sum())
    if not total or total == starts[-1] + counts[-1] - starts[0]:
        begin = int(starts[0]) if total else 0
        return slab[begin : begin + total]
    return slab[torch.from_numpy(ranges(starts, counts))]


def read_offsets(group: h5py.Group, shared: dict[int, Offsets] | None = None) -> Offsets:
    """Starts and counts of consecutive ranges.

    Args:
        group: The group in which they are.
        shared: Those that were read from this file, by their place in it; groups may share them.

    Raises:
        ValueError: If they are not ascending from 0.
    """
    shared = {} if shared is None else shared
    links = group.id.links
    place = links.get_info(b"offsets").u if links.exists(b"offsets") else 0
    if place not in shared:
        offsets = read_numbers(group, "offsets")
        counts = np.diff(offsets)
        if not len(offsets) or offsets[0] != 0 or (counts < 0).any():
            raise ValueError(f"'{group.name}/offsets' do not ascend from 0")
        shared[place] = offsets[:-1], counts
    return shared[place]


def read_strings(group: h5py.Group) -> tuple[str, ...]:
    """What `write_strings` wrote.

    Raises:
        ValueError: If it is not that.
    """
    data = read_array(group, "utf8").numpy().tobytes()
    starts, counts = read_offsets(group)
    if counts.sum() != len(data):
        raise ValueError(f"'{group.name}' holds {len(data)} bytes, its offsets say {counts.sum()}")
    return tuple(data[a : a + n].decode() for a, n in zip(starts, counts, strict=True))


def read_text(owner: h5py.Group, name: str) -> str:
    """What `write_text` wrote."""
    value: Any = owner.attrs[name]
    return value if isinstance(value, str) else bytes(value).decode()


def read_number(owner: h5py.Group, name: str) -> int | float:
    """A numeric attribute."""
    value: Any = owner.attrs[name]
    return value.item()
