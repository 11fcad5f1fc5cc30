"""What capture costs a training loop, as ratios to the plain step.

    python benchmarks/overhead.py benchmarks/results/overhead.json

Two random Llamas in float32: 12 million parameters (width 384, 6 layers, batch 8 x 256) and width 1024 (2 layers,
batch 8 x 128), AdamW.  Steps of a loop, plain and with each kind of capture, take turns in one process on one thread:
what else the machine does meets them alike.  Ratios are of the medians of their CPU seconds; a step enters its capture
and leaves it.  The first step of each kind, which draws the matrices of projections, is given apart.  The captured
layers are all linear layers of the body.

    hooks        capture of whole gradients, given to a sink that drops them
    projected    factors projected to 64 x 64 inside the hooks
    offload      the same, written to an HDF5 store, a shard a step, flushed to the disk
    kfac         K-FAC statistics summed inside the hooks
    kfac 64      the same, of projected factors
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from workload import SMALL, WIDE, body, llama, seconds, tokens, write

import attrax
from attrax.core import Block, KroneckerSums, Leaf, kronecker_sums, merge

Sink = Callable[[Block], object]
SHAPES = {"12M": (SMALL, 8, 256), "1024": (WIDE, 8, 128)}
KINDS = ("hooks", "projected", "offload", "kfac", "kfac 64")
PROJECTION = attrax.Projection(dim=64, seed=0)


def statistics_of(states: dict[str, KroneckerSums]) -> Any:
    """A transform that adds every leaf to its layer's statistics and keeps nothing else."""

    def fold(name: str, leaf: Leaf) -> None:
        new = kronecker_sums(leaf)
        states[name] = merge(states[name], new) if name in states else new

    return fold


class Kind:
    """A kind of capture, entered for one step at a time."""

    def __init__(self, kind: str, net: torch.nn.Module, folder: Path) -> None:
        change = {
            "hooks": None,
            "projected": attrax.projected(PROJECTION),
            "offload": attrax.projected(PROJECTION),
            "kfac": statistics_of({}),
            "kfac 64": attrax.chain(attrax.projected(PROJECTION, keep_rows=True), statistics_of({})),
        }[kind]
        self.files = attrax.store(folder) if kind == "offload" else None
        sink: Sink = (lambda block: None) if self.files is None else self.files.__call__
        self.capture = attrax.capture(net, transform=change, sinks=[sink], include=body, verify=False)

    def step(self, plain: Callable[[], None]) -> None:
        """A step of the loop; all that it has captured is where it belongs."""
        with self.capture:
            plain()
        if self.files is not None:
            self.files.flush()


def measure(name: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Interleaved medians at one shape."""
    shape, batch, length = SHAPES[name]
    net = llama(shape).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    (inputs,) = tokens(batch, length, batch, 1)

    def plain() -> None:
        net(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    steps: dict[str, Callable[[], None]] = {"plain": plain}
    for kind in KINDS:
        steps[kind] = partial(Kind(kind, net, folder / kind).step, plain)
    first = {kind: seconds(step) for kind, step in steps.items()}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(repeats):
        for kind, step in steps.items():
            times[kind].append(seconds(step))
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    ratios = {kind: medians[kind] / medians["plain"] for kind in KINDS}
    print(name, {kind: round(ratio, 3) for kind, ratio in ratios.items()}, flush=True)
    return {
        "shape": shape,
        "batch": batch,
        "length": length,
        "ratios": ratios,
        "median_seconds": medians,
        "first_step_seconds": first,
        "seconds": times,
    }


def main() -> None:
    """Measure both shapes and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(name, options.repeats, Path(folder) / name) for name in SHAPES}
    write(options.out, repeats=options.repeats, shapes=results)


if __name__ == "__main__":
    main()
