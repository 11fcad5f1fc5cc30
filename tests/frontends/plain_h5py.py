"""A gradient store read with h5py and numpy alone: the gradients of one layer by example id."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def slabs(path: Path) -> Iterator[tuple[list[str], str, dict[str, Any], list[int], dict[str, Any]]]:
    """Of each leaf in each slab: example ids, its name, form, rows of each example, and arrays by name."""
    with h5py.File(path) as file:
        f: Any = file
        table, data = json.loads(f["table"][:].tobytes()), f["data"]
        block = first = 0
        for slab in table["slabs"]:
            examples = sum(table["sizes"][block : block + slab["blocks"]])
            ids, at = table["ids"][first : first + examples], slab["at"]
            rows = iter(table["layouts"][slab["layout"]])
            for number in table["signatures"][table["kinds"][block]]:
                name, form = table["leaves"][number]
                for group in form["uses"] or [form]:
                    lengths = [1] * examples if (n := next(rows)) is None else table["lengths"][n]
                    arrays: dict[str, Any] = {}
                    for array in group["arrays"]:
                        kind = np.dtype(
                            array["dtype"].replace("bfloat16", "uint16")
                        )  # the upper half of a float32
                        shape = (sum(lengths), *array["shape"])
                        at += -at % 64
                        end = at + prod(shape) * kind.itemsize
                        arrays[array["name"]], at = data[at:end].view(kind).reshape(shape), end
                    yield ids, name, group, lengths, arrays
            block, first = block + slab["blocks"], first + examples


def gradients(folder: Path, layer: str) -> dict[str, Any]:
    """Gradient of each example, [out, in] with the bias as a last column."""
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.shard.h5")):
        for ids, name, form, lengths, arrays in slabs(path):
            if name == layer and form["kind"] == "Materialized":
                found.update(zip(ids, arrays["w"], strict=True))
            elif name == layer:  # Factorized: the rows of the examples lie end to end
                a, g = arrays["a"], arrays["g"]
                a = np.c_[a, np.ones(len(a))] if form["bias"] else a
                ends = np.cumsum(lengths)
                found.update(
                    (i, g[e - n : e].T @ a[e - n : e]) for i, n, e in zip(ids, lengths, ends, strict=True)
                )
    return found
