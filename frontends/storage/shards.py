"""Read one shard of a store: its description, some of its examples.

Whatever is wrong with a file is reported with the shard and the leaf.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from errno import EMFILE, ENFILE
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from xxhash import xxh3_64_intdigest

from attrax.core.packed import Memory, Packed, take_packed, uninitialized, unpack
from attrax.core.schema import Places, ShardInfo
from attrax.core.tree import Examples
from attrax.frontends.storage.envelope import OtherSchema, data_at, places_in
from attrax.frontends.storage.folder import forget_index
from attrax.frontends.storage.h5types import open_file
from attrax.frontends.storage.recording import Column, Record
from attrax.frontends.storage.shardtable import Table, parsed
from attrax.frontends.storage.slabreader import lazily, read_stretch
from attrax.frontends.storage.slabs import DTYPES, Stretch

_DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError)


@contextmanager
def _explained(shard: str, part: str) -> Iterator[None]:
    try:
        yield
    except OtherSchema as error:
        raise ValueError(f"open_store: shard '{shard}' {error}") from error
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(
            f"open_store: shard '{shard}' is gone or may not be read: {error}. Open the store again."
        ) from error
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno in (EMFILE, ENFILE):
            raise ValueError(
                f"open_store: shard '{shard}' cannot be opened, too many files are open: {error}. Allow more "
                "(ulimit -n), read smaller blocks, or merge the shards (attrax compact)."
            ) from error
        raise ValueError(
            f"open_store: shard '{shard}': {part} cannot be read: {error}. The file is damaged or not written by "
            "attrax. Move it out of the store to use the other shards, and capture its examples again."
        ) from error


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """A shard that is open for reading."""

    info: ShardInfo
    descriptor: int
    table: Table

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def _opened(path: Path, places: Places) -> Shard:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, min(places.length, size), places.table)
        if xxh3_64_intdigest(text) != places.checksum:
            raise ValueError("the checksum of its table does not fit")
        table = parsed(text)
        room = min(places.size, size - places.data)
        if any(slab.at + slab.size > room for slab in table.slabs):
            raise ValueError(f"its slabs reach beyond its {room} bytes of data")
        return Shard(replace(table.info, name=path.name, size=size, places=places), descriptor, table)
    except BaseException:
        os.close(descriptor)
        raise


def _described(path: Path) -> Shard:
    with open_file(path) as file:
        places = places_in(file)
    return _opened(path, places)


def read_info(path: Path) -> ShardInfo:
    """Describe a shard without reading its arrays.

    Raises:
        ValueError: If the file is damaged, of another schema, or not a shard.
    """
    with _explained(path.name, "the description"), closing(_described(path)) as shard:
        return shard.info


def open_shard(folder: Path, info: ShardInfo) -> Shard:
    """Open a shard to read examples of it; close it afterwards.

    Raises:
        ValueError: If the file is not what `info` says.
    """
    path = folder / info.name
    with _explained(info.name, "the description"):
        try:  # what the index says of the places is not trusted, and the table does not say where the data begin
            shard = _opened(path, info.places) if info.places.data == data_at() else _described(path)
        except _DAMAGE:
            shard = _described(path)
    if shard.info != info:
        shard.close()
        forget_index(folder)
        raise ValueError(
            f"open_store: shard '{info.name}' is not what it was when the store was opened. Open the store again."
        )
    return shard


@dataclass(frozen=True, eq=False, slots=True)
class Loaded:
    """Some examples of a slab.

    Attributes:
        rows: Their positions in the shard [n], ascending.
        names: Names of its leaves.
        leaf: Gives the packed leaf of a name.
    """

    rows: Int[np.ndarray, " n"]
    names: tuple[str, ...]
    leaf: Callable[[str], Packed]


def read_rows(
    shard: Shard, number: int, rows: Int[np.ndarray, " n"], memory: Memory, *, keep: bool = True
) -> Loaded:
    """Read examples of a slab; its leaves are read when they are asked for, and a damaged one raises then.

    Args:
        shard: The shard.
        number: Which of its slabs.
        rows: Positions in the shard, ascending and distinct, within the slab.
        memory: Makes memory for what is read.
        keep: Whether leaves are kept when others are asked for.
    """
    slab, info = shard.table.slabs[number], shard.info
    here = rows - int(shard.table.starts[number])

    def read(stretch: Stretch) -> dict[str, Packed]:
        with _explained(info.name, "its data"):
            return read_stretch(shard.descriptor, info.places.data + slab.at, slab, stretch, here, memory)

    return Loaded(rows, tuple(slab.layout.stretch_of), lazily(slab.layout, read, keep=keep))


def read_column(folder: Path, info: ShardInfo, name: str) -> Column:
    """All values of a further column of a shard.

    Raises:
        ValueError: If the column cannot be read.
    """
    with closing(open_shard(folder, info)) as shard, _explained(info.name, f"column '{name}'"):
        found = shard.table.values[info.columns.index(name)]
        values = found["values"]
        if len(values) != len(info.ids):
            raise ValueError(f"it has {len(values)} values for {len(info.ids)} examples")
        return (
            tuple(map(str, values))
            if found["dtype"] is None
            else torch.tensor(values, dtype=DTYPES[found["dtype"]], device="cpu")
        )


def read_whole(folder: Path, info: ShardInfo) -> Iterator[Record]:
    """All blocks of a shard as they were written, every checksum compared.

    Raises:
        ValueError: If something cannot be read.
    """
    columns = {name: read_column(folder, info, name) for name in info.columns}
    block, start = 0, 0
    with closing(open_shard(folder, info)) as shard:
        for number, slab in enumerate(shard.table.slabs):
            loaded = read_rows(shard, number, np.arange(start, start + slab.examples), uninitialized)
            for size in info.sizes[block : block + slab.blocks]:
                yield _record(shard, loaded, block, start, size, columns)
                block, start = block + 1, start + size


def _record(
    shard: Shard, loaded: Loaded, block: int, start: int, size: int, columns: Mapping[str, Column]
) -> Record:
    info, table = shard.info, shard.table
    bits = table.weight_bits[block]
    weight = torch.from_numpy(table.weight[start : start + size]).to(
        torch.float64 if bits > 32 else torch.float32
    )
    examples = Examples(
        info.ids[start : start + size],
        info.steps[block],
        info.micros[block],
        weight if bits else None,
        torch.from_numpy(table.tokens[start : start + size]) if table.has_tokens[block] else None,
        info.fingerprints[block],
        info.rates[block],
        info.absences[info.absent[block]],
    )
    place = slice(start - int(loaded.rows[0]), start - int(loaded.rows[0]) + size)
    leaves = {name: unpack(take_packed(loaded.leaf(name), place)) for name in loaded.names}
    return Record(examples, leaves, {name: v[start : start + size] for name, v in columns.items()})
