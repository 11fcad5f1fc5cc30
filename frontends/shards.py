"""One shard of a store: blocks go into its file as they come, a table of them at the end; examples are read from it.

The layout is that of `attrax.core.schema`.  Whatever is wrong with a file is reported with the shard and the leaf.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import index
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attrax.core.leaves import Leaf, Sum
from attrax.core.packed import Memory, Packed, offsets_of, take_packed, uninitialized, unpack
from attrax.core.schema import ARRAYS, Form, ShardInfo, form_of, info_from_json, info_to_json, json_of
from attrax.core.tree import Examples
from attrax.frontends.buffers import Buffers
from attrax.frontends.envelope import PAGE, Envelope, OtherSchema, data_at, opened, wrapped
from attrax.frontends.h5types import open_file
from attrax.frontends.slabs import (
    ALIGNED,
    DTYPES,
    PIECE,
    SLAB_BYTES,
    Place,
    Slab,
    all_groups,
    places_of,
    read_slab,
    rewrite_slab,
    write_slab,
)

_MOST_ROWS = 2**40
_DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError)
Column: TypeAlias = Tensor | tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """A block on its way to the disk.

    Attributes:
        examples: Its examples.
        leaves: Its leaves, on the CPU, by name.
        columns: Further columns.
    """

    examples: Examples
    leaves: Mapping[str, Leaf]
    columns: Mapping[str, Column]

    @cached_property
    def size(self) -> int:
        """Bytes of its leaves."""
        return sum(map(_size, self.leaves.values()))

    @cached_property
    def forms(self) -> tuple[tuple[str, Form], ...]:
        """Names and forms of its leaves: what the blocks of a slab share."""
        return tuple((name, form_of(leaf)) for name, leaf in self.leaves.items())


def _size(leaf: Leaf) -> int:
    arrays: list[Tensor] = [getattr(leaf, name) for name in ARRAYS[type(leaf).__name__]]
    uses = leaf.uses if isinstance(leaf, Sum) else ()
    return sum(x.nbytes for x in arrays) + sum(map(_size, uses))


@dataclass(frozen=True, eq=False, slots=True)
class _Written:
    """A slab in the file: its place, and what the table says of it."""

    at: int
    size: int
    checksums: Sequence[int]
    forms: tuple[tuple[str, Form], ...]
    examples: Sequence[Examples]
    columns: Sequence[Mapping[str, Column]]
    rows: Sequence[tuple[int, ...] | None]


class NewShard:
    """A shard that is being written.  What a call does happens whole or not at all, and may be tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._slabs: list[_Written] = []
        self._memory = Buffers().array
        self._tried = False

    @property
    def examples(self) -> int:
        """Examples in the file."""
        return sum(len(e) for slab in self._slabs for e in slab.examples)

    def put(self, records: Sequence[Record]) -> int:
        """Write the first blocks: as many as have equal leaves, and together no more than a slab holds.

        Returns:
            How many blocks were written; their memory is not needed any more.

        Raises:
            OSError: If they cannot be written.
        """
        sizes = accumulate(record.size for record in records)
        first = records[0]
        fit = (r.forms == first.forms and s <= SLAB_BYTES for r, s in zip(records, sizes, strict=True))
        count = next((n for n, fits in enumerate(fit) if n and not fits), len(records))
        these = records[:count]
        leaves = [(form, [record.leaves[name] for record in these]) for name, form in first.forms]
        at = -(-self._end // PAGE) * PAGE
        size, checksums, offsets = write_slab(self._descriptor, data_at() + at, leaves, self._memory)
        rows: list[tuple[int, ...] | None] = [
            None
            if form.kind == "Materialized"
            else tuple(np.concatenate([np.diff(o) for o in same]).tolist())
            for form, same in zip(all_groups(form for _, form in first.forms), offsets, strict=True)
        ]
        examples, columns = [r.examples for r in these], [r.columns for r in these]
        self._slabs.append(_Written(at, size, checksums, first.forms, examples, columns, rows))
        return count

    @property
    def _end(self) -> int:
        return self._slabs[-1].at + self._slabs[-1].size if self._slabs else 0

    def finish(self, header: Mapping[str, Any]) -> None:
        """Write the table and close the file.

        Args:
            header: The fields of `ShardInfo` that its blocks do not tell.

        Raises:
            OSError: If it cannot be written.
        """
        if self._tried:
            for slab in self._slabs:
                rewrite_slab(self._descriptor, data_at() + slab.at, slab.size, slab.checksums)
        self._tried = True
        table = json_of(_table(self._slabs, header), ensure_ascii=False).encode()
        pieces, size = wrapped(max(1, -(-self._end // PAGE)) * PAGE, table)
        for at, data in pieces:
            _write_all(self._descriptor, data, at)
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


def _table(slabs: Sequence[_Written], header: Mapping[str, Any]) -> dict[str, Any]:
    leaves: dict[tuple[str, Form], int] = {}
    signatures: dict[tuple[int, ...], int] = {}
    layouts: dict[tuple[int | None, ...], int] = {}
    lengths: dict[tuple[int, ...], int] = {}
    kinds: list[int] = []
    places: list[dict[str, Any]] = []
    for slab in slabs:
        numbers = tuple(leaves.setdefault(leaf, len(leaves)) for leaf in slab.forms)
        kinds += [signatures.setdefault(numbers, len(signatures))] * len(slab.examples)
        rows = tuple(None if r is None else lengths.setdefault(r, len(lengths)) for r in slab.rows)
        place = {"at": slab.at, "size": slab.size, "blocks": len(slab.examples)}
        sums = "".join(f"{checksum:016x}" for checksum in slab.checksums)
        places.append({**place, "layout": layouts.setdefault(rows, len(layouts)), "xxh3": sums})
    blocks = [e for slab in slabs for e in slab.examples]
    columns = [c for slab in slabs for c in slab.columns]
    info = ShardInfo(
        name="",
        size=0,
        ids=tuple(i for e in blocks for i in e.ids),
        steps=tuple(e.step for e in blocks),
        micros=tuple(e.micro for e in blocks),
        sizes=tuple(len(e) for e in blocks),
        fingerprints=tuple(e.fingerprint for e in blocks),
        rates=tuple(e.learning_rate for e in blocks),
        kinds=tuple(kinds),
        signatures=tuple(signatures),
        leaves=tuple(leaves),
        columns=tuple(columns[0]),
        **header,
    )
    described = {name: value for name, value in info_to_json(info).items() if name not in ("name", "size")}
    return {
        **described,
        "weight": [w for e in blocks for w in _listed(e.weight, len(e))],
        "weight_bits": [0 if e.weight is None else 8 * e.weight.element_size() for e in blocks],
        "tokens": [n for e in blocks for n in _listed(e.tokens, len(e))],
        "values": [_values([block[name] for block in columns]) for name in info.columns],
        "slabs": places,
        "layouts": list(layouts),
        "lengths": list(lengths),
    }


def _listed(values: Tensor | None, count: int) -> list[Any]:
    return [None] * count if values is None else values.tolist()


def _values(pieces: Sequence[Column]) -> dict[str, Any]:
    numbers = [piece for piece in pieces if isinstance(piece, Tensor)]
    if len(numbers) < len(pieces):
        return {"dtype": None, "values": [str(text) for piece in pieces for text in piece]}
    whole = torch.cat(numbers)
    return {"dtype": str(whole.dtype).removeprefix("torch."), "values": whole.tolist()}


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """What the table of a shard says.

    Attributes:
        info: Its description, but for name and size of the file.
        weight: Loss weights [N], NaN where unknown.
        tokens: Token counts [N], -1 where unknown.
        weight_bits: Per block, the precision its weights had; 0 if they are unknown.
        has_tokens: Per block, whether token counts are known.
        slabs: The slabs.
        starts: First example of each slab.
        values: Of each further column, its dtype and values.
    """

    info: ShardInfo
    weight: Float[np.ndarray, " N"]
    tokens: Int[np.ndarray, " N"]
    weight_bits: Int[np.ndarray, " K"]
    has_tokens: Int[np.ndarray, " K"]
    slabs: Sequence[Slab]
    starts: Int[np.ndarray, " S"]
    values: Sequence[Mapping[str, Any]]


@lru_cache(8)
def _parsed(text: bytes) -> Table:
    """A table; nothing in it is trusted."""
    table: dict[str, Any] = json.loads(text)
    info = info_from_json({**table, "name": "", "size": 0})
    weight = np.array([math.nan if w is None else float(w) for w in table["weight"]], np.float64)
    tokens = np.array([-1 if n is None else n for n in table["tokens"]], np.int64)
    if not len(weight) == len(tokens) == len(info.ids) or len(table["weight_bits"]) != len(info.sizes):
        raise ValueError("its lists of examples have different lengths")
    slabs = _slabs(info, table)
    first = np.cumsum([0, *info.sizes])
    starts = first[np.cumsum([0, *(slab.blocks for slab in slabs)])][:-1]
    known = np.array([n is not None for n in table["tokens"]], np.int64)
    has_tokens = np.array([known[a:b].all() for a, b in pairwise(first.tolist())], np.int64)
    bits = np.array(table["weight_bits"], np.int64)
    return Table(info, weight, tokens, bits, has_tokens, slabs, starts, table["values"])


def _slabs(info: ShardInfo, table: Mapping[str, Any]) -> list[Slab]:
    lengths = [_offsets(rows) for rows in table["lengths"]]
    known: dict[tuple[int, int, int], tuple[list[Place], int]] = {}
    slabs: list[Slab] = []
    block = 0
    for entry in table["slabs"]:
        at, size, blocks, layout = (index(entry[name]) for name in ("at", "size", "blocks", "layout"))
        kinds, sizes = info.kinds[block : block + blocks], info.sizes[block : block + blocks]
        if not len(kinds) == blocks > 0 or len(set(kinds)) > 1 or at < 0 or at % ALIGNED or size < 0:
            raise ValueError("its slabs are not those of its blocks")
        key = (kinds[0], sum(sizes), layout)
        if key not in known:
            forms = [info.leaves[n][1] for n in info.signatures[kinds[0]]]
            known[key] = places_of(forms, _rows(forms, sum(sizes), table["layouts"][layout], lengths))
        places, end = known[key]
        sums = np.frombuffer(bytes.fromhex(entry["xxh3"]), ">u8").astype(np.uint64)
        if end > size or len(sums) != -(-size // PIECE):
            raise ValueError(f"a slab of {size} bytes and {len(sums)} checksums has arrays of {end} bytes")
        slabs.append(Slab(at, size, blocks, sum(sizes), sums, places))
        block += blocks
    if block != len(info.sizes):
        raise ValueError(f"its slabs hold {block} blocks, it has {len(info.sizes)}")
    return slabs


def _offsets(lengths: Sequence[int]) -> Int[np.ndarray, " ends"]:
    counts = np.array(lengths, np.int64)
    offsets = offsets_of(counts)
    if counts.ndim != 1 or (counts < 0).any() or (offsets < 0).any() or offsets[-1] > _MOST_ROWS:
        raise ValueError("its numbers of rows make no sense")
    return offsets


def _rows(
    forms: Sequence[Form],
    examples: int,
    layout: Sequence[int | None],
    lengths: Sequence[Int[np.ndarray, " _"]],
) -> list[Int[np.ndarray, " ends"]]:
    """The offsets of each group of arrays."""
    found: list[np.ndarray] = []
    for form, number in zip(all_groups(forms), layout, strict=True):
        single = form.kind == "Materialized"
        rows = np.arange(examples + 1) if single else lengths[index(number)]
        if len(rows) != examples + 1:
            raise ValueError(f"it has {len(rows) - 1} examples, its blocks have {examples}")
        found.append(rows)
    return found


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
        raise ValueError(
            f"open_store: shard '{shard}': {part} cannot be read: {error}. The file is damaged or not written by "
            "attrax. Move it out of the store to use the other shards, and capture its examples again."
        ) from error


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """A shard that is open for reading."""

    info: ShardInfo
    file: h5py.File
    envelope: Envelope
    table: Table

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _opened(path: Path) -> Shard:
    with _explained(path.name, "the description"):
        file = open_file(path)
        try:
            envelope = opened(file)
            table = _parsed(envelope.table)
            if any(slab.at + slab.size > envelope.size for slab in table.slabs):
                raise ValueError(f"its slabs reach beyond its {envelope.size} bytes of data")
            size = os.fstat(envelope.descriptor).st_size
            return Shard(replace(table.info, name=path.name, size=size), file, envelope, table)
        except BaseException:
            file.close()
            raise


def read_info(path: Path) -> ShardInfo:
    """Describe a shard without reading its arrays.

    Raises:
        ValueError: If the file is damaged, of another schema, or not a shard.
    """
    with closing(_opened(path)) as shard:
        return shard.info


def open_shard(folder: Path, info: ShardInfo) -> Shard:
    """Open a shard to read examples of it; close it afterwards.

    Raises:
        ValueError: If the file is not what `info` says.
    """
    shard = _opened(folder / info.name)
    if shard.info != info:
        shard.close()
        raise ValueError(
            f"open_store: shard '{info.name}' is not what it was when the store was opened. Open the store again."
        )
    return shard


@dataclass(frozen=True, eq=False, slots=True)
class Loaded:
    """Some examples of a slab.

    Attributes:
        rows: Their positions in the shard [n], ascending.
        weight: Loss weights [n].
        tokens: Token counts [n].
        weight_bits: Per block of the shard, the precision its weights had; 0 if they are unknown.
        has_tokens: Per block of the shard, whether token counts are known.
        leaves: Packed leaves by name.
    """

    rows: Int[np.ndarray, " n"]
    weight: Float[Tensor, " n"]
    tokens: Int[Tensor, " n"]
    weight_bits: Int[np.ndarray, " K"]
    has_tokens: Int[np.ndarray, " K"]
    leaves: Mapping[str, Packed]


def read_rows(shard: Shard, number: int, rows: Int[np.ndarray, " n"], memory: Memory) -> Loaded:
    """Read examples of a slab.

    Args:
        shard: The shard.
        number: Which of its slabs.
        rows: Positions in the shard, ascending and distinct, within the slab.
        memory: Makes memory for the slab.

    Raises:
        ValueError: If a checksum fails; names the shard and the leaf.
    """
    table, slab, info = shard.table, shard.table.slabs[number], shard.info
    start = int(table.starts[number])
    block = int(np.searchsorted(np.cumsum(info.sizes), start, "right"))
    names = [info.leaves[n] for n in info.signatures[info.kinds[block]]]
    with _explained(info.name, "its data"):
        envelope = shard.envelope
        leaves = read_slab(envelope.descriptor, envelope.at, slab, names, rows - start, memory)
    weight, tokens = (torch.from_numpy(x[rows]) for x in (table.weight, table.tokens))
    return Loaded(rows, weight, tokens, table.weight_bits, table.has_tokens, leaves)


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
    )
    place = slice(start - int(loaded.rows[0]), start - int(loaded.rows[0]) + size)
    leaves = {name: unpack(take_packed(packed, place)) for name, packed in loaded.leaves.items()}
    return Record(examples, leaves, {name: v[start : start + size] for name, v in columns.items()})
