"""The gradient file: how leaves become plain arrays, and what one shard of a store holds.

A store is a directory of HDF5 files ``*.shard.h5``, each complete in itself and never changed once it has its name.
A shard has the attributes format and schema and two contiguous datasets of bytes.  `data` holds the arrays; `table`
says in JSON what they are, and has the attribute xxh3, the XXH3-64 of its bytes.  HDF5 checks its own descriptions.

N examples lie one after another in K blocks, and these in slabs: neighboring blocks that have the same leaves in the
same forms, about 1 MiB together or one block if that is larger.  The table has these keys:

    run, rank, sequence, first, writer, created, steps_done, replaces, ids [N], steps, micros, sizes, fingerprints,
    rates, kinds, absent [K], signatures, leaves, absences, columns
                  the fields of `ShardInfo`; block b has the leaves ``signatures[kinds[b]]``, numbers of entries of
                  `leaves`, each a name and a form; gradients of the parameters ``absences[absent[b]]`` are zero
    weight, tokens
                  by example, null where unknown; weight_bits by block (precision of its weights)
    values        of each further column, its dtype (null for texts) and values by example
    slabs         each {at, size, blocks, layout, xxh3}: it is ``data[at : at + size]``, holds so many blocks, and xxh3
                  has 16 hexadecimal digits for each of its pieces: their XXH3-64
    layouts       for each group of arrays in a slab a number of `lengths`, or null
    lengths       lists of numbers of rows by example of a slab

The leaves of a slab follow one another in the order of their signature, the uses of a Sum in the place of the leaf;
each is a group of arrays in the order of its form.  An array is dense, in C order and little-endian, and begins at the
next multiple of 64 bytes.  It holds the rows of all examples of the slab end to end, as many as `lengths` says:

    Factorized        a [R, Ni], g [R, No]
    Lookup            ids [R], g [R, E]
    Diagonal          x [R, d or 1], g [R, d]
    Grouped           a [R, U, Ni], g [R, U, No]
    Materialized      w [n, *shape]: one row an example, no lengths

A slab is made of stretches, which can be read alone.  A stretch begins and ends at a multiple of 64 bytes; it ends with
the leaf that makes it 4 MiB or longer, or the last one.  It has a piece for each 256 KiB of it, the last one for what
remains.

An id is -1 where a row has none.  The trailing rows in which an example's g is zero are not stored (with several calls:
those of every call); of a sparse Lookup, those without an id.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attrax.core.leaves import (
    Grouped,
    Leaf,
    Materialized,
    Part,
    Sum,
)

FORMAT = "attrax gradient shard"
SCHEMA = 4
SUFFIX = ".shard.h5"

ARRAYS: Mapping[str, tuple[str, ...]] = {
    "Factorized": ("a", "g"),
    "Lookup": ("ids", "g"),
    "Diagonal": ("x", "g"),
    "Grouped": ("a", "g"),
    "Materialized": ("w",),
    "Sum": (),
}
"""Names of the arrays of each kind of leaf."""
_STATIC: Mapping[str, tuple[str, ...]] = {
    "Factorized": ("bias", "calls"),
    "Lookup": ("calls", "rows", "sparse"),
    "Diagonal": ("calls",),
    "Grouped": ("calls", "positions"),
    "Materialized": ("bias",),
}


@dataclass(frozen=True, slots=True)
class Array:
    """One packed array: its name, dtype ("float32") and the shape of a row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.shape))}] {self.dtype}"


@dataclass(frozen=True, slots=True)
class Form:
    """What all records of a leaf in one group of a shard share; hashable.

    Attributes:
        kind: Name of the leaf type.
        parts: The leaf's parts.
        arrays: Its arrays.
        bias: See `Factorized`.
        calls: See `Factorized`.
        basis: See `Factorized`.
        rows: Vocabulary size of a `Lookup`.
        positions: See `Grouped`.
        uses: Forms of the uses of a `Sum`.
        sparse: See `Lookup`.
    """

    kind: str
    parts: tuple[Part, ...]
    arrays: tuple[Array, ...] = ()
    bias: bool = False
    calls: int = 1
    basis: str = ""
    rows: int = 0
    positions: bool = True
    uses: tuple["Form", ...] = ()
    sparse: bool = False

    def __str__(self) -> str:
        inner = " + ".join(map(str, self.uses)) or ", ".join(map(str, self.arrays))
        return f"{self.kind}({inner})" + (f" in {self.basis}" if self.basis else "")


class Places(NamedTuple):
    """Where data and table of a shard lie in its file, in bytes.

    Attributes:
        data: Where the data begin.
        size: How long they are.
        table: Where the table begins.
        length: How long it is.
        checksum: XXH3-64 of the table.
    """

    data: int = 0
    size: int = 0
    table: int = 0
    length: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """All of a shard but its arrays; the sequences over blocks have K entries.

    The table tells all but the first three.

    Attributes:
        name: File name.
        size: File size in bytes.
        places: Where data and table lie; two descriptions are equal without it.
        run: Run id: one pass of a program over data.
        rank: Number of the process within the run.
        sequence: Number of the shard within (run, rank).
        first: Number of the first of the shards it was compacted from; `sequence` otherwise.
        writer: Identifies the sink that wrote it.
        created: Seconds since 1970.
        steps_done: Optimizer steps that were done at the checkpoint from which its writer went on, or None.
        replaces: Names of the shards it was compacted from: they do not count where this one is.
        ids: Example ids [N].
        steps: Optimizer step of each block.
        micros: Block number within its step.
        sizes: Examples of each block.
        fingerprints: Parameter fingerprint of each block.
        rates: Learning rate of each block, or None.
        kinds: Signature number of each block.
        absent: Number of each block's list of selected parameters that it did not reach: they have no leaf.
        signatures: Leaf numbers of each signature.
        leaves: (name, form) of each leaf number.
        absences: Lists of parameters.
        columns: Names of further columns.
    """

    name: str
    size: int
    places: Places = field(compare=False)
    run: str
    rank: int
    sequence: int
    first: int
    writer: str
    created: float
    steps_done: int | None
    replaces: tuple[str, ...]
    ids: tuple[str, ...]
    steps: tuple[int, ...]
    micros: tuple[int, ...]
    sizes: tuple[int, ...]
    fingerprints: tuple[str, ...]
    rates: tuple[float | None, ...]
    kinds: tuple[int, ...]
    absent: tuple[int, ...]
    signatures: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[str, Form], ...]
    absences: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()


def form_of(leaf: Leaf) -> Form:
    """The form of a leaf.

    >>> from attrax.core import diagonal
    >>> print(form_of(diagonal("b", torch.ones(2, 3, 1), torch.ones(2, 3, 4))))
    Diagonal(x[1] float32, g[4] float32)
    """
    kind = type(leaf).__name__
    if isinstance(leaf, Sum):
        return Form(kind, leaf.parts, basis=leaf.basis, uses=tuple(form_of(use) for use in leaf.uses))
    lead = 1 if isinstance(leaf, Materialized) else 2
    arrays = tuple(_array(name, rows_first(leaf, name), lead) for name in ARRAYS[kind])
    extra = {name: getattr(leaf, name) for name in _STATIC[kind]}
    return Form(kind, leaf.parts, arrays, basis=leaf.basis, **extra)


def rows_first(leaf: Leaf, name: str) -> Tensor:
    """An array of a leaf with the axis of rows, if it has one, right after that of examples."""
    x: Tensor = getattr(leaf, name)
    return x.transpose(1, 2) if isinstance(leaf, Grouped) else x


def groups(form: Form) -> Iterator[Form]:
    """The forms that have arrays: the form itself, or the uses of a Sum.

    >>> form = Form("Materialized", (Part("b", 3),), (Array("w", "float32", (3,)),))
    >>> list(groups(Form("Sum", form.parts, uses=(form,)))) == [form]
    True
    """
    for use in form.uses:
        yield from groups(use)
    if not form.uses:
        yield form


def _array(name: str, x: Tensor, lead: int) -> Array:
    return Array(name, _name_of(x.dtype), tuple(x.shape[lead:]))


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def form_from_json(value: Mapping[str, Any]) -> Form:
    """Read a form from parsed JSON of ``dataclasses.asdict``; nothing in it is trusted.

    Raises:
        ValueError: If a field is missing, of the wrong type, or inconsistent with the others.

    >>> from dataclasses import asdict
    >>> form = Form("Materialized", (Part("b", 3),), (Array("w", "float32", (3,)),))
    >>> form_from_json(asdict(form)) == form
    True
    """
    try:
        form = Form(
            kind=str(value["kind"]),
            parts=tuple(map(_part, value["parts"])),
            arrays=tuple(Array(a["name"], a["dtype"], tuple(map(int, a["shape"]))) for a in value["arrays"]),
            bias=bool(value["bias"]),
            calls=int(value["calls"]),
            basis=str(value["basis"]),
            rows=int(value["rows"]),
            positions=bool(value.get("positions", True)),
            uses=tuple(form_from_json(use) for use in value["uses"]),
            sparse=bool(value.get("sparse", False)),
        )
        valid = _is_valid(form)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the form of a leaf is malformed: {error!r}") from error
    if not valid:
        raise ValueError(f"the form of a leaf is inconsistent: {form}")
    return form


def _part(value: Mapping[str, Any]) -> Part:
    fields: dict[str, Any] = {
        n: tuple(map(int, v)) if isinstance(v, list | tuple) else v for n, v in value.items()
    }
    part = Part(**fields)
    if not (
        isinstance(part.weight, str) and isinstance(part.bias, str | None) and isinstance(part.width, int)
    ):
        raise TypeError(f"parts of a leaf have names and widths, not {value}")
    return part


def _is_valid(form: Form) -> bool:
    names = tuple(array.name for array in form.arrays)
    shapes = [array.shape for array in form.arrays]
    right = {
        "Factorized": lambda: [len(s) for s in shapes] == [1, 1],
        "Lookup": lambda: [len(s) for s in shapes] == [0, 1],
        "Diagonal": lambda: [len(s) for s in shapes] == [1, 1] and shapes[0] in ((1,), shapes[1]),
        "Grouped": lambda: [len(s) for s in shapes] == [2, 2] and shapes[0][0] == shapes[1][0],
        "Materialized": lambda: True,
        "Sum": lambda: bool(form.uses),
    }
    bounded = 0 <= form.rows < 2**31 and 1 <= form.calls < 2**31 and math.prod(map(math.prod, shapes)) >= 0
    known = form.kind in right and names == ARRAYS[form.kind]
    return known and bounded and bool(form.parts) and right[form.kind]()


@lru_cache(64)
def _cached_leaves(text: str) -> tuple[tuple[str, Form], ...]:
    return tuple((str(name), form_from_json(form)) for name, form in json.loads(text))


@lru_cache(4096)
def _plain(part: Form | Part | Array) -> dict[str, Any]:
    return asdict(part)


def info_to_json(info: ShardInfo) -> dict[str, Any]:
    """A description as `json_of` takes it."""
    return {f.name: getattr(info, f.name) for f in fields(info)}


def json_of(value: Any, **options: Any) -> str:
    """JSON without spaces of plain values, forms among them."""
    return json.dumps(value, separators=(",", ":"), default=_plain, **options)


def info_from_json(entry: Mapping[str, Any]) -> ShardInfo:
    """Read a description from parsed JSON; nothing in it is trusted.

    Raises:
        ValueError: If its parts do not agree; a TypeError or KeyError if they are missing or of the wrong type.
    """

    def items(name: str, *kinds: type) -> tuple[Any, ...]:
        if not all(type(value) in kinds for value in entry[name]):
            raise TypeError(f"'{name}' holds values of another type")
        return tuple(entry[name])

    info = ShardInfo(
        name=str(entry["name"]),
        size=int(entry["size"]),
        places=Places(*items("places", int)),
        run=str(entry["run"]),
        rank=int(entry["rank"]),
        sequence=int(entry["sequence"]),
        first=int(entry["first"]),
        writer=str(entry["writer"]),
        created=float(entry["created"]),
        steps_done=None if entry["steps_done"] is None else int(entry["steps_done"]),
        replaces=items("replaces", str),
        ids=items("ids", str),
        steps=items("steps", int),
        micros=items("micros", int),
        sizes=items("sizes", int),
        fingerprints=items("fingerprints", str),
        rates=items("rates", float, type(None)),
        kinds=items("kinds", int),
        absent=items("absent", int),
        signatures=tuple(tuple(int(number) for number in signature) for signature in entry["signatures"]),
        leaves=_cached_leaves(json.dumps(entry["leaves"])),
        absences=tuple(tuple(str(name) for name in names) for names in entry["absences"]),
        columns=items("columns", str),
    )
    _check(info)
    return info


def _check(info: ShardInfo) -> None:
    K, S, L = len(info.sizes), len(info.signatures), len(info.leaves)
    columns = (info.steps, info.micros, info.fingerprints, info.rates, info.kinds, info.absent)
    if any(len(column) != K for column in columns) or any(size < 0 for size in info.sizes):
        raise ValueError("its lists of blocks have different lengths")
    if sum(info.sizes) != len(info.ids):
        raise ValueError(f"it has {len(info.ids)} ids, its blocks have {sum(info.sizes)} examples")
    if any(not 0 <= n < len(info.absences) for n in info.absent):
        raise ValueError("its blocks have lists of absent parameters that it does not have")
    if any(not 0 <= k < S for k in info.kinds) or any(not 0 <= n < L for s in info.signatures for n in s):
        raise ValueError("its blocks name leaves that it does not have")
    names = [[info.leaves[n][0] for n in signature] for signature in info.signatures]
    if any(len(set(group)) != len(group) for group in names):
        raise ValueError("a block names a leaf twice")
