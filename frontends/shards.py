"""One shard of a store: write blocks into a file, describe the file, read some of its examples.

The layout is that of `attrax.core.schema`.  Whatever is wrong with a file is reported with the shard and the leaf.
"""

import json
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import h5py
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attrax.core.schema import (
    FORMAT,
    SCHEMA,
    Array,
    Form,
    Memory,
    Packed,
    Record,
    ShardInfo,
    form_from_json,
    offsets_of,
    take_packed,
)
from attrax.core.tree import Examples
from attrax.frontends.buffers import Buffers
from attrax.frontends.h5types import (
    NewFile,
    Offsets,
    child,
    open_file,
    read_ahead,
    read_array,
    read_number,
    read_numbers,
    read_offsets,
    read_ranges,
    read_strings,
    read_text,
    write_array,
    write_numbers,
    write_pieces,
    write_strings,
    write_text,
)

_DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)


_WRITING = threading.Lock()
# A process forked while a file is open for writing would write into it once more when it ends.
os.register_at_fork(
    before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release
)


def write_shard(
    path: Path,
    header: Mapping[str, str | int | float],
    records: Sequence[Record],
    replaces: Sequence[str] = (),
) -> None:
    """Write blocks into a new file.

    Args:
        path: File to create.
        header: Attributes of the file beside `format`, `schema` and `attrax`.
        records: At least one block.
        replaces: Names of the shards that hold the same blocks.

    Raises:
        OSError: If the file cannot be written.
    """
    with (
        _WRITING,
        closing(NewFile(path)) as target,
        h5py.File(target, "w", libver=("v110", "v110")) as file,  # pyright: ignore[reportArgumentType]
    ):
        for name, value in {"format": FORMAT, "schema": SCHEMA, "attrax": _version(), **header}.items():
            if isinstance(value, str):
                write_text(file, name, value)
            else:
                file.attrs[name] = value
        write_strings(file.create_group("ids"), [i for r in records for i in r.examples.ids])
        if replaces:
            write_strings(file.create_group("replaces"), replaces)
        _write_examples(file, records)
        _write_leaves(target, file, records)
        for number, name in enumerate(records[0].columns):
            _write_column(file.create_group(f"columns/{number}"), name, [r.columns[name] for r in records])


def _version() -> str:
    try:
        return version("attrax")
    except PackageNotFoundError:
        return "unknown"


def _write_examples(file: h5py.File, records: Sequence[Record]) -> None:
    examples = [r.examples for r in records]
    weight = [np.full(len(e), math.nan) if e.weight is None else e.weight.double().numpy() for e in examples]
    tokens = [np.full(len(e), -1) if e.tokens is None else e.tokens.long().numpy() for e in examples]
    write_array(file, "weight", torch.from_numpy(np.concatenate(weight)))
    write_numbers(file, "tokens", np.concatenate(tokens))
    blocks = file.create_group("blocks")
    integers = {
        "step": [e.step for e in examples],
        "micro": [e.micro for e in examples],
        "size": [len(e) for e in examples],
        "weight_bits": [0 if e.weight is None else 8 * e.weight.element_size() for e in examples],
        "has_tokens": [int(e.tokens is not None) for e in examples],
    }
    for name, values in integers.items():
        write_numbers(blocks, name, values)
    rates = [math.nan if e.learning_rate is None else e.learning_rate for e in examples]
    write_array(blocks, "learning_rate", torch.from_numpy(np.array(rates, np.float64)))
    write_strings(blocks.create_group("fingerprint"), [e.fingerprint for e in examples])


def _write_leaves(target: NewFile, file: h5py.File, records: Sequence[Record]) -> None:
    pieces: dict[tuple[str, Form], list[Packed]] = {}
    signatures: dict[tuple[tuple[str, Form], ...], int] = {}
    kinds: list[int] = []
    for record in records:
        keys = tuple((name, packed.form) for name, packed in record.leaves)
        kinds.append(signatures.setdefault(keys, len(signatures)))
        for key, (_, packed) in zip(keys, record.leaves, strict=True):
            pieces.setdefault(key, []).append(packed)
    numbers = {key: number for number, key in enumerate(pieces)}
    write_numbers(child(file, "blocks"), "signature", kinds)
    group = file.create_group("signatures")
    flat = [numbers[key] for keys in signatures for key in keys]
    write_numbers(group, "leaf", flat)
    write_numbers(group, "offsets", offsets_of(np.array([len(keys) for keys in signatures], np.int64)))
    leaves = file.create_group("leaves")
    written: dict[bytes, h5py.Group] = {}
    for (name, form), number in numbers.items():
        leaf = leaves.create_group(str(number))
        write_text(leaf, "name", name)
        write_text(leaf, "form", _json(form))
        _write_packed(target, leaf, pieces[name, form], written)


@lru_cache(4096)
def _json(form: Form) -> str:
    return json.dumps(asdict(form), ensure_ascii=False)


def _write_packed(
    target: NewFile, group: h5py.Group, pieces: Sequence[Packed], written: dict[bytes, h5py.Group]
) -> None:
    form = pieces[0].form
    for number, described in enumerate(form.arrays):
        write_pieces(target, group, described.name, [piece.arrays[number] for piece in pieces])
    if form.kind not in ("Materialized", "Sum"):
        offsets = offsets_of(np.concatenate([np.diff(p.offsets) for p in pieces]))
        same = written.setdefault(offsets.tobytes(), group)
        if same is group:
            write_numbers(group, "offsets", offsets)
        else:
            group.id.links.create_hard(b"offsets", same.id, b"offsets")
    for number in range(len(form.uses)):
        use = group.create_group(f"uses/{number}")
        _write_packed(target, use, [piece.uses[number] for piece in pieces], written)


def _write_column(group: h5py.Group, name: str, values: Sequence[Tensor | tuple[str, ...]]) -> None:
    write_text(group, "name", name)
    numbers = [v for v in values if isinstance(v, Tensor)]
    if len(numbers) == len(values):
        write_array(group, "values", torch.cat(numbers))
    else:
        write_strings(group, [str(text) for texts in values for text in texts])


@contextmanager
def _explained(shard: str, part: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(
            f"open_store: shard '{shard}' is gone or may not be read: {error}. Open the store again."
        ) from error
    except _DAMAGE as error:
        raise ValueError(
            f"open_store: shard '{shard}': {part} cannot be read: {error}. The file is damaged or not written by "
            "attrax. Move it out of the store to use the other shards, and capture its examples again."
        ) from error


def read_info(path: Path) -> ShardInfo:
    """Describe a shard without reading its arrays.

    Raises:
        ValueError: If the file is damaged, of another schema, or not a shard.
    """
    with _explained(path.name, "the description"):
        file = open_file(path)
    with file:
        _check_version(path.name, file)
        with _explained(path.name, "the description"):
            return _info(path, file)


def _check_version(shard: str, file: h5py.File) -> None:
    with _explained(shard, "the description"):
        found = read_text(file, "format"), read_number(file, "schema")
    if found != (FORMAT, SCHEMA):
        raise ValueError(
            f"open_store: shard '{shard}' is of format {found[0]!r}, schema {found[1]}; this version of attrax reads "
            f"{FORMAT!r}, schema {SCHEMA}. Open the store with the version that wrote it."
        )


def _info(path: Path, file: h5py.File) -> ShardInfo:
    blocks, leaves = child(file, "blocks"), child(file, "leaves")
    integers = ("step", "micro", "size", "signature")
    steps, micros, sizes, kinds = (tuple(read_numbers(blocks, name).tolist()) for name in integers)
    rates = tuple(None if math.isnan(r) else r for r in read_array(blocks, "learning_rate").tolist())
    signatures = child(file, "signatures")
    starts, counts = read_offsets(signatures)
    flat = read_numbers(signatures, "leaf").tolist()
    columns = child(file, "columns") if "columns" in file else ()
    sequence, done = int(read_number(file, "sequence")), int(read_number(file, "steps_done"))
    info = ShardInfo(
        name=path.name,
        size=path.stat().st_size,
        run=read_text(file, "run"),
        rank=int(read_number(file, "rank")),
        sequence=sequence,
        first=int(read_number(file, "first")) if "first" in file.attrs else sequence,
        writer=read_text(file, "writer"),
        created=float(read_number(file, "created")),
        steps_done=None if done < 0 else done,
        replaces=read_strings(child(file, "replaces")) if "replaces" in file else (),
        ids=read_strings(child(file, "ids")),
        steps=steps,
        micros=micros,
        sizes=sizes,
        fingerprints=read_strings(child(blocks, "fingerprint")),
        rates=rates,
        kinds=kinds,
        signatures=tuple(
            tuple(flat[a : a + n]) for a, n in zip(starts.tolist(), counts.tolist(), strict=True)
        ),
        leaves=tuple(_described(leaves, str(number)) for number in range(len(leaves))),
        columns=tuple(
            read_text(child(file, "columns", str(number)), "name") for number in range(len(columns))
        ),
    )
    check_info(info)
    return info


def _described(leaves: h5py.Group, number: str) -> tuple[str, Form]:
    group = child(leaves, number)
    return read_text(group, "name"), form_from_json(json.loads(read_text(group, "form")))


def check_info(info: ShardInfo) -> None:
    """Check that the parts of a description agree.

    Raises:
        ValueError: If they do not.
    """
    K, S, L = len(info.sizes), len(info.signatures), len(info.leaves)
    columns = (info.steps, info.micros, info.fingerprints, info.rates, info.kinds)
    if any(len(column) != K for column in columns) or any(size < 0 for size in info.sizes):
        raise ValueError("its lists of blocks have different lengths")
    if sum(info.sizes) != len(info.ids):
        raise ValueError(f"it has {len(info.ids)} ids, its blocks have {sum(info.sizes)} examples")
    if any(not 0 <= k < S for k in info.kinds) or any(not 0 <= n < L for s in info.signatures for n in s):
        raise ValueError("its blocks name leaves that it does not have")
    names = [[info.leaves[n][0] for n in signature] for signature in info.signatures]
    if any(len(set(group)) != len(group) for group in names):
        raise ValueError("a block names a leaf twice")


@dataclass(frozen=True, eq=False, slots=True)
class Loaded:
    """Some examples of a shard.

    Attributes:
        rows: Their positions in the shard [n], ascending.
        weight: Loss weights [n].
        tokens: Token counts [n].
        weight_bits: Per block of the shard, the precision its weights had; 0 if they are unknown.
        has_tokens: Per block of the shard, whether token counts are known.
        leaves: By name, for each form: the positions of the examples that have it, and its packed rows.
    """

    rows: Int[np.ndarray, " n"]
    weight: Float[Tensor, " n"]
    tokens: Int[Tensor, " n"]
    weight_bits: Int[np.ndarray, " K"]
    has_tokens: Int[np.ndarray, " K"]
    leaves: Mapping[str, Sequence[tuple[Int[np.ndarray, " _"], Packed]]]


def read_rows(folder: Path, info: ShardInfo, rows: Int[np.ndarray, " n"]) -> Loaded:
    """Read examples of a shard.

    Args:
        folder: The store.
        info: The shard.
        rows: Positions in the shard, ascending and distinct.

    Returns:
        The examples.

    Raises:
        ValueError: If a checksum fails or the file is not what `info` says; names the shard and the leaf.
    """
    with _explained(info.name, "the file"):
        file = open_file(folder / info.name)
    with file:
        if len(rows) == len(info.ids):
            read_ahead(file)
        with _explained(info.name, "weights and tokens"):
            ones = np.ones_like(rows)
            blocks = child(file, "blocks")
            weight, tokens = (read_ranges(file, name, rows, ones) for name in ("weight", "tokens"))
            leaf_groups = child(file, "leaves")
            bits, known = (read_numbers(blocks, name) for name in ("weight_bits", "has_tokens"))
            if not len(bits) == len(known) == len(info.sizes):
                raise ValueError("the lists of blocks have different lengths")
        kind_of_row = np.repeat(info.kinds, info.sizes)
        shared: dict[int, Offsets] = {}
        memory = Buffers().array
        leaves: dict[str, list[tuple[np.ndarray, Packed]]] = defaultdict(list)
        for number, (name, form) in enumerate(info.leaves):
            owners = np.array([number in signature for signature in info.signatures])[kind_of_row]
            place = owners.cumsum() - 1
            having = rows[owners[rows]]
            if len(having):
                with _explained(info.name, f"leaf '{name}' (leaves/{number})"):
                    packed = _read_packed(
                        child(leaf_groups, str(number)),
                        form,
                        place[having],
                        int(owners.sum()),
                        shared,
                        memory,
                    )
                    leaves[name].append((having, packed))
    return Loaded(rows, weight, tokens, bits, known, leaves)


def _read_packed(
    group: h5py.Group,
    form: Form,
    index: Int[np.ndarray, " n"],
    examples: int,
    shared: dict[int, Offsets],
    memory: Memory,
) -> Packed:
    starts, counts = index, np.ones_like(index)
    if form.kind not in ("Materialized", "Sum"):
        all_starts, all_counts = read_offsets(group, shared)
        if len(all_counts) != examples:
            raise ValueError(f"it has {len(all_counts)} examples, its blocks have {examples}")
        starts, counts = all_starts[index], all_counts[index]
    arrays = tuple(_read_rows(group, described, starts, counts, memory) for described in form.arrays)
    if form.kind == "Lookup" and arrays[0].numel():
        low, high = (int(x) for x in arrays[0].aminmax())
        if low < 0 or high >= form.rows:
            raise ValueError(f"its ids reach from {low} to {high}, its vocabulary has {form.rows} entries")
    uses = tuple(
        _read_packed(child(group, "uses", str(n)), u, index, examples, shared, memory)
        for n, u in enumerate(form.uses)
    )
    return Packed(form, arrays, offsets_of(counts), uses)


def _read_rows(
    group: h5py.Group,
    described: Array,
    starts: Int[np.ndarray, " n"],
    counts: Int[np.ndarray, " n"],
    memory: Memory,
) -> Tensor:
    rows = read_ranges(group, described.name, starts, counts, memory)
    found = Array(described.name, str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))
    if found != described:
        raise ValueError(f"its array is {found}, it should be {described}")
    return rows


def read_column(folder: Path, info: ShardInfo, name: str) -> Tensor | tuple[str, ...]:
    """All values of a further column of a shard.

    Raises:
        ValueError: If the column cannot be read.
    """
    with _explained(info.name, f"column '{name}'"), open_file(folder / info.name) as file:
        group = child(file, "columns", str(info.columns.index(name)))
        values = read_array(group, "values") if "values" in group else read_strings(group)
        if len(values) != len(info.ids):
            raise ValueError(f"it has {len(values)} values for {len(info.ids)} examples")
        return values


def read_whole(folder: Path, info: ShardInfo) -> list[Record]:
    """All blocks of a shard as they were written, every checksum compared.

    Raises:
        ValueError: If something cannot be read.
    """
    loaded = read_rows(folder, info, np.arange(len(info.ids)))
    columns = {name: read_column(folder, info, name) for name in info.columns}
    forms = {
        (name, packed.form): (rows, packed) for name, same in loaded.leaves.items() for rows, packed in same
    }
    records: list[Record] = []
    ends = np.cumsum(info.sizes).tolist()
    for b, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        bits, known = loaded.weight_bits[b], loaded.has_tokens[b]
        weight = loaded.weight[start:stop].to(torch.float64 if bits > 32 else torch.float32)
        examples = Examples(
            info.ids[start:stop],
            info.steps[b],
            info.micros[b],
            weight if bits else None,
            loaded.tokens[start:stop] if known else None,
            info.fingerprints[b],
            info.rates[b],
        )
        leaves: list[tuple[str, Packed]] = []
        for number in info.signatures[info.kinds[b]]:
            rows, packed = forms[info.leaves[number]]
            place = slice(*np.searchsorted(rows, [start, stop]).tolist())
            leaves.append((info.leaves[number][0], take_packed(packed, place)))
        records.append(Record(examples, tuple(leaves), {n: v[start:stop] for n, v in columns.items()}))
    return records
