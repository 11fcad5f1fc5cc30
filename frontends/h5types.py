"""HDF5 and torch: tensors of every dtype in and out, bfloat16 included, and nothing else that HDF5 can hold.

Arrays are written and read with the type of the file as the type in memory: HDF5 converts bfloat16 some 25 times slower
than it copies it.  Files are not trusted.  Only chunked, checksummed arrays of known types that lie in the file itself
are read: no links, external data, virtual datasets or other filters, and never more bytes than the file has.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import torch
from h5py import h5d, h5p, h5s, h5t, h5z  # pyright: ignore[reportAttributeAccessIssue]
from jaxtyping import Int
from torch import Tensor

from attrax.core.schema import offsets_of, ranges

CHUNK_BYTES = 2**18
GAP_BYTES = 2**16

Node = TypeVar("Node", h5py.Group, h5py.Dataset)


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


def write_array(group: h5py.Group, name: str, x: Tensor) -> None:
    """Write a CPU tensor as a chunked, checksummed dataset of its own type."""
    x = x.detach().contiguous()
    shape = tuple(x.shape)
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_chunk(chunk_shape(shape, x.element_size()))
    properties.set_fletcher32()
    most = shape if x.numel() else (h5s.UNLIMITED,) * len(shape)
    kind = TYPES[x.dtype]
    dataset = h5d.create(group.id, name.encode(), kind, h5s.create_simple(shape, most), properties)
    if x.numel():
        dataset.write(h5s.ALL, h5s.ALL, _numpy(x), mtype=kind)


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
    data = value.encode()
    owner.attrs.create(name, np.array(data), dtype=h5py.string_dtype("utf-8", max(1, len(data))))


def open_file(path: Path) -> h5py.File:
    """Open a file for reading, without a lock unless HDF5_USE_FILE_LOCKING asks for one.

    A program may hold the file open through h5py under another locking rule, which HDF5 wants to be the same.

    Raises:
        OSError: If the file cannot be opened.
    """
    for locking in (False, "best-effort"):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if "locking" not in str(error):
                raise
    return h5py.File(path, "r", locking=True)


def member(group: h5py.Group, name: str, kind: type[Node]) -> Node:
    """A group or dataset that lies in this file.

    Raises:
        ValueError: If it is missing, a link to elsewhere, or something else.
    """
    link = group.get(name, getlink=True)
    node = group[name] if type(link) is h5py.HardLink else None
    if not isinstance(node, kind):
        raise ValueError(f"'{group.name}/{name}' is not a {kind.__name__.lower()} of this file")
    return node


def child(group: h5py.Group, *names: str) -> h5py.Group:
    """The group under `names`, each of them a group that lies in this file."""
    for name in names:
        group = member(group, name, h5py.Group)
    return group


def array(group: h5py.Group, name: str) -> tuple[h5py.Dataset, torch.dtype]:
    """A dataset that is safe to read, and its dtype.

    Raises:
        ValueError: If it is not one that attrax writes.
    """
    dataset = member(group, name, h5py.Dataset)
    plist = dataset.id.get_create_plist()
    kind = dataset.id.get_type()
    dtype = next((d for d, t in TYPES.items() if t == kind), None)
    plain = plist.get_layout() == h5d.CHUNKED and plist.get_nfilters() == 1
    if dtype is None or not plain or plist.get_filter(0)[0] != h5z.FILTER_FLETCHER32:
        raise ValueError(f"'{dataset.name}' is not a chunked array with fletcher32 checksums of a known type")
    claimed = math.prod(dataset.shape) * dtype.itemsize
    if claimed > min(dataset.id.get_storage_size(), dataset.file.id.get_filesize()):
        raise ValueError(f"'{dataset.name}' claims {claimed} bytes, which the file does not hold")
    return dataset, dtype


def _read_slab(dataset: h5py.Dataset, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    out = torch.empty((stop - start, *dataset.shape[1:]), dtype=dtype, device="cpu")
    if out.numel():
        file_space = dataset.id.get_space()
        file_space.select_hyperslab((start, *[0] * (out.ndim - 1)), tuple(out.shape))
        kind = dataset.id.get_type()
        try:
            dataset.id.read(h5s.create_simple(tuple(out.shape)), file_space, _numpy(out), mtype=kind)
        except OSError as error:
            raise OSError(f"the checksum of '{dataset.name}' does not fit its data ({error})") from error
    return out


def read_array(group: h5py.Group, name: str) -> Tensor:
    """All of a dataset."""
    dataset, dtype = array(group, name)
    return _read_slab(dataset, dtype, 0, dataset.shape[0])


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
    group: h5py.Group, name: str, starts: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]
) -> Tensor:
    """Rows of ascending ranges ``[start, start + count)`` of a dataset, one range after another.

    Ranges with small gaps are read in one piece: one row a time would read a chunk a time.

    Raises:
        ValueError: If a range reaches beyond the dataset.
    """
    dataset, dtype = array(group, name)
    stops = starts + counts
    if len(starts) and not (starts[0] >= 0 and stops[-1] <= dataset.shape[0]):
        raise ValueError(f"'{dataset.name}' has {dataset.shape[0]} rows, fewer than its offsets say")
    gap = GAP_BYTES // max(1, dtype.itemsize * math.prod(dataset.shape[1:]))
    breaks = np.flatnonzero(starts[1:] - stops[:-1] > gap) + 1
    pieces: list[Tensor] = []
    for these, those in zip(np.split(starts, breaks), np.split(counts, breaks), strict=True):
        begin, end = (int(these[0]), int(these[-1] + those[-1])) if len(these) else (0, 0)
        slab = _read_slab(dataset, dtype, begin, end)
        whole = those.sum() == end - begin
        pieces.append(slab if whole else slab[torch.from_numpy(ranges(these - begin, those))])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def read_offsets(group: h5py.Group) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Starts and counts of consecutive ranges.

    Raises:
        ValueError: If they are not ascending from 0.
    """
    offsets = read_numbers(group, "offsets")
    counts = np.diff(offsets)
    if not len(offsets) or offsets[0] != 0 or (counts < 0).any():
        raise ValueError(f"'{group.name}/offsets' do not ascend from 0")
    return offsets[:-1], counts


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
