"""Time and memory of GradDot, K-FAC and EK-FAC as ratios to one forward and backward pass, and the routing ablation.

    python benchmarks/attribution.py results.json

The workload: a random Llama of 12 million parameters (hidden 384, 6 layers, 6 heads, MLP 1024, vocabulary 2048, untied,
eager attention), 64 training and 16 query sequences of 256 random tokens, all linear layers of the body, float32,
batches of 8.  The floor is a weight-gradient-free forward and backward of the 64 sequences.  Every method runs in a
process of its own between two floors, on one thread, and ratios are of CPU time, so that they hold on a machine that is
shared; peak memory is what the operating system counted for that process.  "capture" against "full_backward" is the
effect of never computing a weight gradient.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from workload import SMALL, body, llama, seconds, tokens, write

TRAIN, QUERY, LENGTH, BATCH = 64, 16, 256, 8
METHODS = ("graddot", "kfac", "ekfac")
ROUTES = (None, "factor", "materialize", "mixed", "mixed_train")
LENGTHS = (32, 128, 256, 512, 1024)


def floor(net: torch.nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> None:
    """Forward and backward to every activation, without any weight gradient and without attrax."""
    from attrax.frontends.model.losses import shifted, token_losses

    net.requires_grad_(False)
    for batch in batches:
        x = net.get_input_embeddings()(batch["input_ids"]).requires_grad_()
        logits = net(inputs_embeds=x, attention_mask=batch["attention_mask"]).logits
        token_losses(logits, shifted(batch["labels"])).sum().backward()
    net.requires_grad_(True)


def full_backward(net: torch.nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> None:
    """Forward and backward with weight gradients: what hooks on a training backward pay."""
    from attrax.frontends.model.losses import causal_lm

    for batch in batches:
        causal_lm()(net, batch).sum().backward()
    net.zero_grad()


def child(task: str) -> dict[str, Any]:
    """One process: the task between two floors, its ratio to their mean, and the peak memory of the process."""
    import attrax

    torch.set_num_threads(1)
    net = llama(SMALL)
    train, query = tokens(TRAIN, LENGTH, BATCH, 1), tokens(QUERY, LENGTH, BATCH, 2)
    floor(net, train[:1])
    sides = {
        "train": attrax.live(net, train, include=body, verify=False),
        "query": attrax.live(net, query, include=body, verify=False),
    }
    tasks: dict[str, Callable[[], Any]] = {
        "floor": lambda: floor(net, train),
        "full_backward": lambda: full_backward(net, train),
        "capture": lambda: list(sides["train"].map(lambda name, leaf, examples: None)),
        **{name: lambda name=name: getattr(attrax, name)(sides["train"], sides["query"]) for name in METHODS},
    }
    before = seconds(tasks["floor"])
    taken = seconds(tasks[task])
    after = seconds(tasks["floor"])
    mean = (before + after) / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"task": task, "seconds": taken, "floor": mean, "ratio": taken / mean, "peak_mib": peak}


def routing(length: int) -> dict[str, Any]:
    """The Gram matrix of one layer (384 -> 1024, 8 x 8 examples of `length` rows) by every route."""
    import attrax
    from attrax.core import factorized, gram_leaf
    from attrax.core.products import plan_leaf

    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = (
        factorized("w", torch.randn(8, length, SMALL["hidden"]), torch.randn(8, length, SMALL["inner"]))
        for _ in range(2)
    )
    hardware = attrax.measure_hardware()
    gram_leaf(x, y, hardware=hardware)
    times: dict[str, list[float]] = {str(route): [] for route in ROUTES}
    for _ in range(3):
        for route in ROUTES:
            times[str(route)].append(seconds(lambda r=route: gram_leaf(x, y, route=r, hardware=hardware)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(value for name, value in medians.items() if name != "None")
    return {
        "length": length,
        "chosen": plan_leaf("w", x, y, hardware=hardware)[0].route,
        "seconds": {("auto" if name == "None" else name): value for name, value in medians.items()},
        "auto_over_best": medians["None"] / best,
    }


def spawn(arguments: list[str]) -> dict[str, Any]:
    """Run this file in a fresh process and read its JSON."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--routing", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child or options.routing:
        print(json.dumps(child(options.child) if options.child else routing(options.routing)))
        return
    tasks = (*METHODS, "capture", "full_backward", "floor")
    runs: list[dict[str, Any]] = []
    for task in tasks * options.repeats:
        runs.append(spawn(["--child", task]))
        print(runs[-1], flush=True)
    summary = {}
    for task in tasks:
        mine = [run for run in runs if run["task"] == task]
        summary[task] = {
            "ratio_to_floor": statistics.median(run["ratio"] for run in mine),
            "seconds": statistics.median(run["seconds"] for run in mine),
            "peak_mib": statistics.median(run["peak_mib"] for run in mine),
        }
        print(f"{task:<14} {summary[task]}", flush=True)
    ablation: list[dict[str, Any]] = []
    for length in LENGTHS:
        ablation.append(spawn(["--routing", str(length)]))
        print(ablation[-1], flush=True)
    write(
        options.out,
        workload={**SMALL, "train": TRAIN, "query": QUERY, "length": LENGTH, "batch": BATCH},
        summary=summary,
        routing=ablation,
        runs=runs,
    )


if __name__ == "__main__":
    main()
