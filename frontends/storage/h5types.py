"""HDF5 and torch: tensors of every dtype in and out, bfloat16 included, and nothing else that HDF5 can hold.

HDF5 keeps the description of an array; its bytes are read without it, and compared with their XXH3, an attribute.
Files are not trusted.  Only dense arrays of known types that lie in the file itself are read: no links, external data,
virtual datasets or filters, and never more bytes than the file has.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import torch
from h5py import h5a, h5d, h5g, h5i, h5l, h5o, h5p, h5s, h5t  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from xxhash import xxh3_64_intdigest

from attrax.core.packed import uninitialized

CHECKSUM = b"xxh3"

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


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(_numpy(x)).cast("B") if x.numel() else memoryview(b"")  # pyright: ignore[reportArgumentType]


def _numpy(x: Tensor) -> np.ndarray:
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def read_bytes(descriptor: int, at: int, out: memoryview) -> None:
    """Fill memory from a place in a file.

    Raises:
        ValueError: If the file ends before.
    """
    while len(out):
        done = os.preadv(descriptor, [out], at)
        if not done:
            raise ValueError("the file ends before its data")
        at, out = at + done, out[done:]


def dense(owner: h5py.Group, name: str, kind: h5t.TypeID, shape: tuple[int, ...]) -> Any:
    """A new dataset in one piece, which has its place in the file and is not written yet."""
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.CONTIGUOUS)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    return h5d.create(owner.id, name.encode(), kind, h5s.create_simple(shape), properties)


def write_checksum(dataset: Any, data: bytes | memoryview) -> None:
    """Note the XXH3 (64 bits) of the bytes of a dataset."""
    value = np.array(xxh3_64_intdigest(data), np.uint64)
    h5a.create(dataset, CHECKSUM, h5t.STD_U64LE, h5s.create(h5s.SCALAR)).write(value)


def read_checksum(dataset: Any) -> int | None:
    """The checksum of a dataset, if it has one."""
    value = np.zeros((), np.uint64)
    if not h5a.exists(dataset, CHECKSUM) or h5a.open(dataset, CHECKSUM).shape != ():
        return None
    h5a.open(dataset, CHECKSUM).read(value)
    return int(value)


def write_array(group: h5py.Group, name: str, x: Tensor) -> None:
    """Write a CPU tensor as a dense, checksummed dataset of its own type."""
    x = x.detach().contiguous()
    dataset = dense(group, name, TYPES[x.dtype], tuple(x.shape))
    write_checksum(dataset, bytes_of(x))
    if x.numel():
        dataset.write(h5s.ALL, h5s.ALL, _numpy(x), mtype=TYPES[x.dtype])


def place_of(dataset: Any, itemsize: int) -> tuple[int, int, int]:
    """Where a dataset lies: descriptor of the file, first byte and bytes.

    Raises:
        ValueError: If it is not in one piece, not in this file, or the file does not hold it.
    """
    plist, file = dataset.get_create_plist(), h5i.get_file_id(dataset)
    size = math.prod(dataset.shape) * itemsize
    if plist.get_layout() != h5d.CONTIGUOUS or plist.get_external_count():
        raise ValueError("it is not an array in one piece in this file")
    descriptor, at = file.get_vfd_handle(), dataset.get_offset() or 0
    if (size and not at) or at + size > os.fstat(descriptor).st_size:
        raise ValueError(f"it claims {size} bytes, which the file does not hold")
    return descriptor, at, size


def read_array(group: h5py.Group, name: str) -> Tensor:
    """What `write_array` wrote.

    Raises:
        ValueError: If it is not that.
    """
    dataset = member(group, name, h5d.DatasetID)
    try:
        dtype = next((d for d, t in TYPES.items() if t == dataset.get_type()), None)
        if dtype is None:
            raise ValueError("it is of no known type")
        descriptor, at, _ = place_of(dataset, dtype.itemsize)
        out = uninitialized(dataset.shape, dtype)
        read_bytes(descriptor, at, bytes_of(out))
        if read_checksum(dataset) != xxh3_64_intdigest(bytes_of(out)):
            raise ValueError("its checksum does not fit")
    except ValueError as error:
        raise ValueError(f"'{group.name}/{name}': {error}") from error
    return out


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


def read_text(owner: h5py.Group, name: str) -> str:
    """What `write_text` wrote."""
    return bytes(_attribute(owner, name)).decode()


def read_number(owner: h5py.Group, name: str) -> int | float:
    """A numeric attribute."""
    return _attribute(owner, name).item()


def _attribute(owner: h5py.Group, name: str) -> np.ndarray:
    found = h5a.open(owner.id, name.encode())
    if found.shape != () or found.dtype.kind not in "iufS":
        raise ValueError(f"'{owner.name}': attribute '{name}' is neither a number nor a text of fixed length")
    out = np.empty((), found.dtype)
    found.read(out)
    return out
