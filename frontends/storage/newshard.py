"""A shard that is written: blocks go into its file as they come, the table that describes them when it is complete.

The layout is that of `attrax.core.schema`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attrax.core.schema import Form, Places, ShardInfo, info_to_json, json_of
from attrax.core.tree import Examples
from attrax.frontends.storage.envelope import PAGE, data_at, wrapped
from attrax.frontends.storage.recording import Column, Record
from attrax.frontends.storage.slabs import SLAB_BYTES, all_groups
from attrax.frontends.storage.slabwriter import rewrite_slab, write_slab


@dataclass(frozen=True, eq=False, slots=True)
class _Written:
    """A slab in the file: its place, and what the table says of it."""

    at: int
    pieces: Sequence[tuple[int, int]]
    forms: tuple[tuple[str, Form], ...]
    examples: Sequence[Examples]
    columns: Sequence[Mapping[str, Column]]
    rows: Sequence[tuple[int, ...] | None]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(size for size, _ in self.pieces)


class NewShard:
    """A shard that is being written.  What a call does happens whole or not at all, and may be tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._slabs: list[_Written] = []
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
        pieces, offsets = write_slab(self._descriptor, data_at() + at, leaves)
        rows: list[tuple[int, ...] | None] = [
            None
            if form.kind == "Materialized"
            else tuple(np.concatenate([np.diff(o) for o in same]).tolist())
            for form, same in zip(all_groups(form for _, form in first.forms), offsets, strict=True)
        ]
        examples, columns = [r.examples for r in these], [r.columns for r in these]
        self._slabs.append(_Written(at, pieces, first.forms, examples, columns, rows))
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
                rewrite_slab(self._descriptor, data_at() + slab.at, slab.pieces)
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
    absences: dict[tuple[str, ...], int] = {}
    kinds: list[int] = []
    places: list[dict[str, Any]] = []
    for slab in slabs:
        numbers = tuple(leaves.setdefault(leaf, len(leaves)) for leaf in slab.forms)
        kinds += [signatures.setdefault(numbers, len(signatures))] * len(slab.examples)
        rows = tuple(None if r is None else lengths.setdefault(r, len(lengths)) for r in slab.rows)
        place = {"at": slab.at, "size": slab.size, "blocks": len(slab.examples)}
        sums = "".join(f"{checksum:016x}" for _, checksum in slab.pieces)
        places.append({**place, "layout": layouts.setdefault(rows, len(layouts)), "xxh3": sums})
    blocks = [e for slab in slabs for e in slab.examples]
    columns = [c for slab in slabs for c in slab.columns]
    info = ShardInfo(
        name="",
        size=0,
        places=Places(),
        ids=tuple(i for e in blocks for i in e.ids),
        steps=tuple(e.step for e in blocks),
        micros=tuple(e.micro for e in blocks),
        sizes=tuple(len(e) for e in blocks),
        fingerprints=tuple(e.fingerprint for e in blocks),
        rates=tuple(e.learning_rate for e in blocks),
        kinds=tuple(kinds),
        absent=tuple(absences.setdefault(e.absent, len(absences)) for e in blocks),
        signatures=tuple(signatures),
        leaves=tuple(leaves),
        absences=tuple(absences),
        columns=tuple(columns[0]),
        **header,
    )
    described = {
        name: value for name, value in info_to_json(info).items() if name not in ("name", "size", "places")
    }
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
