"""A gradient store read with h5py and numpy alone: the gradients of one layer by example id."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def gradients(folder: Path, layer: str) -> dict[str, Any]:
    """Gradient of each example, [out, in] with the bias as a last column."""
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.shard.h5")):
        with h5py.File(path) as file:
            f: Any = file
            text, ends = f["ids/utf8"][:].tobytes(), f["ids/offsets"][:]
            ids = np.array([text[a:b].decode() for a, b in zip(ends[:-1], ends[1:], strict=True)], object)
            kind = np.repeat(f["blocks/signature"][:], f["blocks/size"][:])  # which leaves an example has
            members = np.split(f["signatures/leaf"][:], f["signatures/offsets"][1:-1])
            for number, leaf in f["leaves"].items():
                if leaf.attrs["name"].decode() != layer:
                    continue
                form = json.loads(leaf.attrs["form"])
                having = ids[np.array([int(number) in leaves for leaves in members])[kind]]
                if form["kind"] == "Materialized":
                    built = leaf["w"][:]
                else:  # Factorized: the rows of an example lie between its offsets
                    a, g, rows = leaf["a"][:], leaf["g"][:], leaf["offsets"][:]
                    a = np.c_[a, np.ones(len(a))] if form["bias"] else a
                    built = [g[i:j].T @ a[i:j] for i, j in zip(rows[:-1], rows[1:], strict=True)]
                found.update(zip(having, built, strict=True))
    return found
