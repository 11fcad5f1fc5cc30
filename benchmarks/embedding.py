"""Gram matrix of embedding gradients at a vocabulary of 152 thousand, against token matching written in plain torch.

    python benchmarks/embedding.py benchmarks/results/embedding.json

8 x 8 examples of `rows` random ids, half of them in common, and output gradients of width 896.  The plain
version compares all ids of two examples and sums the products of output gradients where they agree; it never makes
anything of the size of the vocabulary, and neither must the library.  Runs alternate, on one thread, and medians of
CPU seconds are compared.
"""

import argparse
import resource
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workload import seconds, write

from attrax.core import gram_leaf, lookup

VOCABULARY, WIDTH, B = 151_936, 896, 8
LENGTHS = (64, 256, 512)


def matched(ids: Tensor, g: Tensor, other_ids: Tensor, other_g: Tensor) -> Tensor:
    """sum_ts [id_bt = id_qs] <g_bt, h_qs>."""
    B, Q = len(ids), len(other_ids)
    equal = (ids.reshape(-1, 1) == other_ids.reshape(1, -1)).to(g.dtype)
    products = g.flatten(0, 1) @ other_g.flatten(0, 1).T
    return (equal * products).reshape(B, ids.shape[1], Q, other_ids.shape[1]).sum((1, 3))


def compare(rows: int, repeats: int) -> dict[str, Any]:
    """Interleaved medians of both at one length, and how far apart their results are."""
    gen = torch.Generator().manual_seed(0)
    sides = [
        (torch.randint(VOCABULARY, (B, rows), generator=gen), torch.randn(B, rows, WIDTH, generator=gen))
        for _ in range(2)
    ]
    sides[1][0][:, : rows // 2] = sides[0][0][:, : rows // 2]
    x, y = (lookup("wte.weight", ids, g, rows=VOCABULARY) for ids, g in sides)
    tasks = {"attrax": lambda: gram_leaf(x, y), "plain": lambda: matched(*sides[0], *sides[1])}
    results = {name: run().double() for name, run in tasks.items()}
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, run in tasks.items():
            times[name].append(seconds(run))
    medians = {name: statistics.median(values) for name, values in times.items()}
    difference = (results["attrax"] - results["plain"]).abs().max() / results["plain"].abs().max()
    ratio = medians["attrax"] / medians["plain"]
    return {"rows": rows, "seconds": medians, "ratio": ratio, "difference": float(difference)}


def main() -> None:
    """Compare at every length, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [compare(rows, options.repeats) for rows in LENGTHS]
    for run in runs:
        print(run)
    write(
        options.out,
        workload={"vocabulary": VOCABULARY, "width": WIDTH, "examples": B, "repeats": options.repeats},
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        runs=runs,
    )


if __name__ == "__main__":
    main()
