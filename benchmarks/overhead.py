"""What capture costs a training loop, as ratios to the plain step.

    python benchmarks/overhead.py benchmarks/results/overhead.json

Two random Llamas in float32: 12 million parameters (width 384, 6 layers, batch 8 x 256) and width 1024 (2 layers,
batch 8 x 128), AdamW.  Each step of the loop is run plain and with each kind of capture, in turn, on one thread; ratios
are of the medians of CPU seconds.  The captured layers are all linear layers of the body.

    hooks        capture of whole gradients, given to a sink that drops them
    projected    factors projected to 64 x 64 inside the hooks
    offload      the same, written to an HDF5 store
    kfac         K-FAC statistics summed inside the hooks
    kfac 64      the same, of projected factors
"""

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from workload import SMALL, WIDE, body, llama, seconds, tokens, write

import attrax
from attrax.core import KroneckerSums, Leaf, kronecker_sums, merge

SHAPES = {"12M": (SMALL, 8, 256), "1024": (WIDE, 8, 128)}
KINDS = ("hooks", "projected", "offload", "kfac", "kfac 64")
PROJECTION = attrax.Projection(dim=64, seed=0)


def statistics_of(states: dict[str, KroneckerSums]) -> Any:
    """A transform that adds every leaf to its layer's statistics and keeps nothing else."""

    def fold(name: str, leaf: Leaf) -> None:
        new = kronecker_sums(leaf)
        states[name] = merge(states[name], new) if name in states else new

    return fold


def capture_of(kind: str, net: torch.nn.Module, folder: str) -> Any:
    """The context that a kind of capture puts around a step."""
    change = {
        "hooks": None,
        "projected": attrax.projected(PROJECTION),
        "offload": attrax.projected(PROJECTION),
        "kfac": statistics_of({}),
        "kfac 64": attrax.chain(attrax.projected(PROJECTION, keep_rows=True), statistics_of({})),
    }[kind]
    sink = attrax.store(folder) if kind == "offload" else (lambda block: None)
    return attrax.capture(net, transform=change, sinks=[sink], include=body, verify=False)


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """The plain step's context."""
    yield


def loop(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], context: Any) -> None:
    """An ordinary training loop."""
    with context:
        for batch in batches:
            net(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def measure(name: str, repeats: int, steps: int) -> dict[str, Any]:
    """Interleaved medians at one shape; opening and closing the capture is counted."""
    shape, batch, length = SHAPES[name]
    net = llama(shape).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    batches = tokens(batch * steps, length, batch, 1)
    loop(net, optimizer, batches[:1], nothing())
    times: dict[str, list[float]] = {kind: [] for kind in ("plain", *KINDS)}
    for repeat in range(repeats):
        for kind in times:
            with tempfile.TemporaryDirectory() as folder:
                context = nothing() if kind == "plain" else capture_of(kind, net, folder)
                times[kind].append(seconds(lambda c=context: loop(net, optimizer, batches, c)) / steps)
        print(name, {kind: round(found[repeat], 3) for kind, found in times.items()}, flush=True)
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    ratios = {kind: medians[kind] / medians["plain"] for kind in KINDS}
    print(name, {kind: round(ratio, 3) for kind, ratio in ratios.items()}, flush=True)
    return {"shape": shape, "batch": batch, "length": length, "ratios": ratios, "seconds": times}


def main() -> None:
    """Measure both shapes and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps in one measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(name, options.repeats, options.steps) for name in SHAPES}
    write(options.out, repeats=options.repeats, steps=options.steps, shapes=results)


if __name__ == "__main__":
    main()
