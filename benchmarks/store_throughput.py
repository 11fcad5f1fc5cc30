"""Writing and reading a gradient store against the same bytes written and read as one plain file.

    python benchmarks/store_throughput.py benchmarks/results/store_throughput.json

The gradients are those of a Llama of 12 million parameters (6 layers, width 384, 1024 in the feed-forward part) in
blocks of 8 examples, as capture delivers them: `factored`, the bfloat16 rows of its four linear leaves a layer
(query, key and value share their input, as do gate and up) at 128 positions, of which the last has no gradient; and
`projected`, float32 [64, 64] an example and leaf.  `attrax.store` gets no options.

Each repetition writes them twice, in alternating order: as a store (shards of 64 MiB in the background, each flushed
to the disk and renamed), and raw: as many bytes in one file, from memory in one sequence, flushed once at the end.
Both clocks stop when everything is on the disk.

Then both are read, first cold (their pages dropped from the page cache) and then warm: the raw file in one sequence
into fresh memory, as much at a time as a shard has; the store through `Store.map`, checksums compared, every leaf
handed out. The ratio is raw seconds / store seconds, medians over the repetitions; 1 is the speed of a plain file.
`raw, memory used again` reads the file a mebibyte at a time into the same memory, and throws the bytes away: what the
system alone takes for copying them.
Processor seconds of the process (user and system) are given beside those of the clock: on a machine with other work,
the clock mostly counts the turns that others had (`load` says how many wanted to run).
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from attrax.core import Block, Examples, GradTree, Leaf, Materialized, factorized, materialized
from attrax.frontends.storage.store import open_store, store

TRANSFER = 2**22
BATCH, LAYERS = 8, 6
LINEAR = {"qkv": (384, 1152), "o": (384, 384), "gate_up": (384, 2048), "down": (1024, 384)}


def blocks(total: int, kind: str) -> list[Block]:
    """Blocks of 8 examples of together about `total` bytes: projected gradients, or the factors of rows."""
    gen = torch.Generator().manual_seed(0)
    found, done = [], 0
    while done < total:
        made: dict[str, Leaf] = {}
        for layer, (name, (wide, out)) in itertools.product(range(LAYERS), LINEAR.items()):
            label = f"layers.{layer}.{name}.weight"
            if kind == "projected":
                made[label] = materialized(label, torch.randn(BATCH, 64, 64, generator=gen))
            else:
                a, g = (torch.randn(BATCH, 128, n, generator=gen).bfloat16() for n in (wide, out))
                g[:, -1] = 0
                made[label] = factorized(label, a, g)
        ids = tuple(f"{len(found)}-{n}" for n in range(BATCH))
        found.append(Block(GradTree(made), Examples(ids)))
        done += sum(x.nbytes for x in tree_leaves(found[-1].grads))
    return found


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds that something takes, by the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}


def write_raw(path: Path, size: int, data: memoryview) -> None:
    """One file of `size` bytes, those of `data` over and over, flushed at the end."""
    descriptor, done = os.open(path, os.O_CREAT | os.O_WRONLY), 0
    while done < size:
        at = done % len(data)
        done += os.write(descriptor, data[at : at + min(TRANSFER, size - done)])
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(path: Path, piece: int) -> None:
    """The file in pieces into fresh memory."""
    descriptor, left = os.open(path, os.O_RDONLY), path.stat().st_size
    while left:
        out = memoryview(np.empty(min(piece, left), np.uint8))  # type: ignore[arg-type]
        while len(out):
            done = os.readv(descriptor, [out[:TRANSFER]])
            out, left = out[done:], left - done
    os.close(descriptor)


def read_raw_again(path: Path) -> None:
    """The file a mebibyte at a time, into the same memory."""
    descriptor, out = os.open(path, os.O_RDONLY), memoryview(np.empty(2**20, np.uint8))  # type: ignore[arg-type]
    while os.readv(descriptor, [out]):
        pass
    os.close(descriptor)


def write_store(folder: Path, made: list[Block]) -> None:
    """All blocks through a sink."""
    with store(folder) as sink:
        for block in made:
            sink(block)


def read_store(folder: Path, prefetch: int) -> int:
    """All leaves of all blocks; returns their bytes."""
    source, total = open_store(folder, prefetch=prefetch), 0
    for _, leaves in source.map(lambda name, leaf, _: leaf_bytes(leaf)):
        total += sum(leaves.values())
    return total


def leaf_bytes(leaf: Any) -> int:
    """Bytes of the arrays of a leaf."""
    return leaf.w.nbytes if isinstance(leaf, Materialized) else leaf.a.nbytes + leaf.g.nbytes


def forget(paths: Iterable[Path]) -> None:
    """Drop the pages of files from the page cache."""
    os.sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def repetition(where: Path, made: list[Block], sizes: list[int], number: int) -> dict[str, dict[str, float]]:
    """Seconds of every part, store and raw in alternating order."""
    data = memoryview(np.random.default_rng(0).bytes(max(sizes)))
    turn = slice(None, None, 1 if number % 2 else -1)
    writers: dict[str, Callable[[], object]] = {
        "raw": lambda: write_raw(where / "raw", sum(sizes), data),
        "store": lambda: write_store(where / "store", made),
    }
    readers: dict[str, Callable[[], object]] = {
        "raw": lambda: read_raw(where / "raw", max(sizes)),
        "raw, memory used again": lambda: read_raw_again(where / "raw"),
        "store": lambda: read_store(where / "store", 0),
        "store, prefetch=2": lambda: read_store(where / "store", 2),
    }
    found = {f"write {name}": timed(writers[name]) for name in list(writers)[turn]}
    open_store(where / "store")
    for state in ("cold", "warm"):
        for name in list(readers)[turn]:
            if state == "cold":
                forget([where / "raw"] if name.startswith("raw") else (where / "store").iterdir())
            found[f"read {state} {name}"] = timed(readers[name])
    return found


def measure(where: Path, kind: str, total: int, repetitions: int) -> dict[str, Any]:
    """Medians and ratios for one kind of gradients."""
    made = blocks(total, kind)
    payload = sum(x.nbytes for b in made for x in tree_leaves(b.grads))
    write_store(where / "sizes", made)
    sizes = [path.stat().st_size for path in (where / "sizes").glob("*.shard.h5")]
    shutil.rmtree(where / "sizes")
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(repetitions):
        with tempfile.TemporaryDirectory(dir=where) as folder:
            runs.append(repetition(Path(folder), made, sizes, number))
    seconds = {
        name: {unit: statistics.median(run[name][unit] for run in runs) for unit in ("clock", "processor")}
        for name in runs[0]
    }
    ratios = {
        name: {unit: seconds[f"{name.split(' store')[0]} raw"][unit] / x for unit, x in value.items()}
        for name, value in seconds.items()
        if "store" in name
    }
    return {
        "blocks": len(made),
        "payload_bytes": payload,
        "file_bytes": sum(sizes),
        "shards": len(sizes),
        "median_seconds": seconds,
        "raw_seconds_over_store_seconds": ratios,
        "repetitions": runs,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "versions": {name: version(name) for name in ("torch", "h5py", "numpy", "xxhash")},
        },
    }
    for kind in ("projected", "factored"):
        with tempfile.TemporaryDirectory(dir=asked.where) as folder:
            result[kind] = measure(Path(folder), kind, asked.mib * 2**20, asked.repetitions)
        for name, ratio in result[kind]["raw_seconds_over_store_seconds"].items():
            rate = result[kind]["file_bytes"] / result[kind]["median_seconds"][name]["clock"] / 2**20
            both = ", ".join(f"{value:.2f} of raw ({unit})" for unit, value in ratio.items())
            print(f"{kind} {name}: {rate:.0f} MiB/s, {both}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
