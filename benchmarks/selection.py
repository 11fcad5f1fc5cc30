"""CPU time of a training step with online selection, as a ratio to the plain step.

    OMP_NUM_THREADS=1 python benchmarks/selection.py results.json

Two random Llamas in float32 (vocabulary 2048, eager attention): (a) 12 million parameters (width 384, 6 layers),
batches of 8 x 256 tokens; (b) width 1024, 2 layers, batches of 8 x 128.  Half of a batch is dropped; the target is one
sequence of the same length.  In units of F, a forward pass of the linear layers, a plain step costs 3; the target's
pass 1/4 (forward and activation gradients of 1/8 of the batch); scores and removal at most 1 together (gradients of the
examples are built once) and 1/8 for the target's dense gradient, less where factors are smaller than weights: 1.46
times the plain step at most, and more where time is not spent in linear layers.  Steps of each kind alternate in one
process; ratios are of medians of CPU time, which hold on a machine that is shared.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from workload import SMALL, WIDE, llama, seconds, tokens, write

import attrax
from attrax.frontends import Capture

SHAPES: dict[str, dict[str, Any]] = {
    "a": {"model": SMALL, "length": 256},
    "b": {"model": WIDE, "length": 128},
}
BATCH = 8


def measure(shape: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds of a plain step, one under a capture without sinks, and one that selects, for each scope."""
    net = llama(shape["model"]).train()
    batch, target = tokens(BATCH + 1, shape["length"], BATCH, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> None:
        net(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds: dict[str, Capture | None] = {"plain": None, "capture": attrax.capture(net)}
    for scope in ("global", "layer"):
        keep = attrax.select(target, attrax.drop_fraction(0.5), scope=scope)
        kinds[scope] = attrax.capture(net, after_backward=[keep])

    def once(running: Capture | None) -> float:
        if running is None:
            return seconds(step)
        with running:
            return seconds(step)

    for running in kinds.values():  # checks of the first steps
        once(running)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, running in kinds.items():
            times[kind].append(once(running))
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    ratios = {kind: value / medians["plain"] for kind, value in medians.items()}
    return {**shape, "batch": BATCH, "seconds": medians, "ratio_to_plain": ratios, "runs": times}


def main() -> None:
    """Measure both shapes and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in options.shapes:
        found[name] = measure(SHAPES[name], options.repeats)
        print(name, found[name]["ratio_to_plain"], flush=True)
    write(options.out, repeats=options.repeats, shapes=found)


if __name__ == "__main__":
    main()
