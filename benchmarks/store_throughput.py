"""Writing and reading a gradient store against the same bytes written and read as plain files.

    python benchmarks/store_throughput.py benchmarks/results/store_throughput.json

Each repetition writes the same gradients twice, in turn first: as a store (`store`, shards of 64 MiB in the background,
each flushed to the disk and renamed), and raw: one file of the same size per shard, written from memory in one go,
flushed and renamed, the directory flushed.  Both clocks stop when everything is on the disk.  The raw writer writes the
bytes it has; the store takes blocks, whose arrays it copies first, because a training loop goes on to change them.

Then both are read, first cold (their pages dropped from the page cache, which is checked with mincore where it can be)
and then warm: the raw files each into fresh memory, the store through `Store.map`, checksums compared, every leaf
handed out.  The ratio is raw seconds / store seconds, medians over the repetitions; 1 is the speed of the files.
Processor seconds of the process (user and system) are given beside those of the clock: on a machine with other work,
the clock mostly counts the turns that others had (`load` says how many wanted to run).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from attrax.core import Block, Examples, GradTree, factorized, materialized
from attrax.frontends.store import open_store, store

TRANSFER = 2**22


def blocks(total: int, kind: str) -> list[Block]:
    """Blocks of 32 examples of together about `total` bytes: projected gradients, or the factors of rows."""
    gen = torch.Generator().manual_seed(0)
    layers, found, done = [f"layers.{n}.weight" for n in range(8)], [], 0
    while done < total:
        if kind == "projected":
            leaves = {n: materialized(n, torch.randn(32, 64, 64, generator=gen)) for n in layers}
            size = sum(leaf.w.nbytes for leaf in leaves.values())
        else:
            made = {n: [torch.randn(32, 64, 256, generator=gen).bfloat16() for _ in "ag"] for n in layers}
            leaves = {n: factorized(n, a, g) for n, (a, g) in made.items()}
            size = sum(x.nbytes for pair in made.values() for x in pair)
        ids = tuple(f"{len(found)}-{n}" for n in range(32))
        found.append(Block(GradTree(leaves), Examples(ids)))
        done += size
    return found


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds that something takes, by the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}


def flushed(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_raw(folder: Path, sizes: list[int], data: memoryview) -> None:
    """One file a shard, under a temporary name, flushed and renamed."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        temporary = folder / "tmp"
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY)
        done = 0
        while done < size:
            done += os.write(descriptor, data[done : min(size, done + TRANSFER)])
        os.fsync(descriptor)
        os.close(descriptor)
        temporary.rename(folder / f"{number}")
        flushed(folder)


def read_raw(folder: Path) -> None:
    """Every file into fresh memory."""
    for path in sorted(folder.iterdir()):
        out = memoryview(np.empty(path.stat().st_size, np.uint8))  # type: ignore[arg-type]
        descriptor, done = os.open(path, os.O_RDONLY), 0
        while done < len(out):
            done += os.readv(descriptor, [out[done : done + TRANSFER]])
        os.close(descriptor)


def write_store(folder: Path, made: list[Block]) -> None:
    """All blocks through a sink."""
    with store(folder, keep_factored=True) as sink:
        for block in made:
            sink(block)


def read_store(folder: Path, prefetch: int) -> int:
    """All leaves of all blocks; returns their bytes."""
    source, total = open_store(folder, prefetch=prefetch), 0
    for _, leaves in source.map(lambda name, leaf, _: sum(x.nbytes for x in tree_leaves(leaf))):
        total += sum(leaves.values())
    return total


def forget(folder: Path) -> None:
    """Drop the pages of a folder's files from the page cache."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def repetition(
    where: Path, made: list[Block], data: memoryview, sizes: list[int], first: int
) -> dict[str, dict[str, float]]:
    """Seconds of every part, store and raw in alternating order."""
    both = {
        "store": lambda: write_store(where / "store", made),
        "raw": lambda: write_raw(where / "raw", sizes, data),
    }
    order = ["store", "raw"][:: 1 if first % 2 else -1]
    found = {f"write {name}": timed(both[name]) for name in order}
    readers: dict[str, Callable[[], object]] = {
        "raw": lambda: read_raw(where / "raw"),
        "store": lambda: read_store(where / "store", 0),
        "store, prefetch=2": lambda: read_store(where / "store", 2),
    }
    for state in ("cold", "warm"):
        for name in list(readers)[:: 1 if first % 2 else -1]:
            if state == "cold":
                forget(where / name.split(",")[0])
            found[f"read {state} {name}"] = timed(readers[name])
    return found


def measure(where: Path, kind: str, total: int, repetitions: int) -> dict[str, Any]:
    """Medians and ratios for one kind of gradients."""
    made = blocks(total, kind)
    payload = sum(x.nbytes for b in made for x in tree_leaves(b.grads))
    write_store(where / "sizes", made)
    sizes = [path.stat().st_size for path in (where / "sizes").glob("*.shard.h5")]
    data = memoryview(np.random.default_rng(0).bytes(max(sizes)))
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(repetitions):
        with tempfile.TemporaryDirectory(dir=where) as folder:
            runs.append(repetition(Path(folder), made, data, sizes, number))
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
