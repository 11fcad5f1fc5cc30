"""Do scores predict what training without an example does?  Methods against retraining, on a run of a real trainer.

    python benchmarks/fidelity_prepare.py work/fidelity
    python benchmarks/fidelity.py work/fidelity --out benchmarks/results/fidelity.json

An unmodified Hugging Face Trainer fine-tunes the model in work/fidelity/model on train.jsonl: one epoch, batches of 32
sequences, AdamW, warm-up of 10 %, linear decay, clipping at 1; one capture records the optimizer's steps.  Then the
same run is repeated with single sequences at weight zero (trajectory-specific leave-one-out: fixed denominator, same
batches, same order), and every method's scores of these sequences are compared with what the removal did to the loss
of each query: Spearman's correlation per query, then the mean over queries.  Intervals are bootstrapped over removals
and queries together.  MAGIC differentiates training once for every query, so that it takes by far the longest.

The learning rate is that of the paper's runs of GPT-2 (1e-5 at a width of 768), in proportion to one over the width.
Effects are trusted if they are far above what rounding does (the same run with the rows of every batch permuted), and
first-order methods can predict them if they are in proportion to the weight that is taken away: `precision`.

Everything is written as it is finished into the folder, and a second start goes on where the first stopped.  Any causal
language model in a folder can take the place of the small one, on any device (--device cuda).
"""

import argparse
import json
import math
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from workload import write

import attrax
from attrax.core import disjoint_masks
from attrax.frontends import Recipe, baselines, query_losses, train, without
from attrax.methods import above_floor, bootstrap

BATCH, RATE, DECAY, CLIP, WARMUP = 32, 4e-5, 0.01, 1.0, 0.1
MASKS, COUNTS = 10, (512, 8192)
REMOVALS, PARTIAL, PART, SEED, THREADS = 50, 5, 16, 0, 1


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Sequences of a JSON lines file."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf8").splitlines()]


def batch_of(rows: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any]:
    """A batch of sequences of equal length."""
    ids = torch.tensor([row["input_ids"] for row in rows], device=device)
    return {"input_ids": ids, "labels": ids, "example_ids": tuple(row["id"] for row in rows)}


def model_of(folder: Path, device: str) -> torch.nn.Module:
    """The model before fine-tuning, deterministic and without dropout."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.to(device).eval()


def fine_tune(folder: Path, device: str) -> None:
    """The run under study: an unmodified Trainer inside one capture, which records steps and batches."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows_of(folder, "train")]
    named = {tuple(row["input_ids"]): row["id"] for row in rows_of(folder, "train")}
    model = model_of(folder, device)
    arguments = TrainingArguments(
        str(folder / "trainer"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        warmup_steps=math.ceil(WARMUP * -(-len(data) // BATCH)),
        lr_scheduler_type="linear",
        seed=SEED,
        report_to=[],
        save_strategy="no",
        use_cpu=device == "cpu",
        logging_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    order: dict[int, list[str]] = {}
    capture = attrax.capture(
        model,
        transform=lambda name, leaf: None,
        sinks=[lambda block: order.setdefault(block.examples.step, []).extend(block.examples.ids)],
        ids=lambda inputs: [named[tuple(ids)] for ids in inputs["input_ids"].tolist()],
        trajectory=attrax.record(folder / "run", overwrite=True),
    )
    with capture:
        trainer.train()
    model.save_pretrained(folder / "trained")
    (folder / "order.json").write_text(json.dumps(order))


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Sequences of equal length to tensors."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def recipe_of(folder: Path, device: str) -> Recipe:
    """The same run as a loop that weighs examples: the order comes from what the capture saw of the Trainer's."""
    rows = {row["id"]: row for row in rows_of(folder, "train")}
    order = json.loads((folder / "order.json").read_text())
    batches = {int(step): [batch_of([rows[i] for i in ids], device)] for step, ids in order.items()}
    steps = len(batches)
    warm = math.ceil(steps * WARMUP)

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        decayed = {n for n, p in model.named_parameters() if p.ndim > 1}
        groups = [
            {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": DECAY},
            {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=RATE)

    def schedule(made: torch.optim.Optimizer) -> Any:
        from transformers import get_linear_schedule_with_warmup

        return get_linear_schedule_with_warmup(made, warm, steps)

    return Recipe(
        model_of(folder, device),
        batches,
        attrax.causal_lm(),
        optimizer,
        "token_mean",
        max_norm=CLIP,
        scheduler=schedule,
    )


def trained_of(folder: Path, device: str) -> torch.nn.Module:
    """The model after fine-tuning."""
    from transformers import AutoModelForCausalLM

    return (
        AutoModelForCausalLM.from_pretrained(folder / "trained", attn_implementation="eager")
        .to(device)
        .eval()
    )


def queries_of(folder: Path, device: str) -> list[dict[str, Any]]:
    """Batches of queries."""
    rows = rows_of(folder, "query")
    return [batch_of(rows[k : k + BATCH], device) for k in range(0, len(rows), BATCH)]


def removed_ids(folder: Path) -> list[str]:
    """The sequences that are removed, drawn once; not by torch's generator, which orders the Trainer's data."""
    return random.Random(SEED).sample([row["id"] for row in rows_of(folder, "train")], REMOVALS)


def retrain(folder: Path, device: str) -> None:
    """Losses of the queries after each repetition of the run; finished ones are not repeated."""
    recipe, queries = recipe_of(folder, device), queries_of(folder, device)
    path = folder / "retrained.jsonl"
    done = {json.loads(line)["run"] for line in path.read_text().splitlines()} if path.exists() else set()
    gone = removed_ids(folder)
    runs: dict[str, Callable[[str, int], float]] = {
        "all": lambda name, step: 1.0,
        "all again": lambda name, step: 1.0,
    }
    for name in gone[:PARTIAL]:
        for h in (0.5, 0.1):
            runs[f"{name} by {h}"] = lambda i, step, name=name, h=h: 1.0 - h * (i == name)
    runs |= {f"without {name}": without([name]) for name in gone}
    shuffled = {step: [shuffle(batch, step) for batch in batches] for step, batches in recipe.batches.items()}
    with path.open("a") as out:
        for run, weight in tqdm(
            {"all": runs["all"], "permuted": runs["all"], **runs}.items(), desc="retraining"
        ):
            if run in done:
                continue
            used = replace(recipe, batches=shuffled) if run == "permuted" else recipe
            losses = query_losses(train(used, weight), queries, recipe.loss)
            out.write(json.dumps({"run": run, "losses": losses.tolist()}) + "\n")
            out.flush()


def shuffle(batch: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A batch with its rows in another order: what rounding alone does to a run."""
    index = torch.randperm(len(batch["example_ids"]), generator=torch.Generator().manual_seed(seed))
    moved = {k: v[index] for k, v in batch.items() if isinstance(v, Tensor)}
    return {**moved, "example_ids": tuple(batch["example_ids"][i] for i in index.tolist())}


def scorers(folder: Path, device: str) -> dict[str, Callable[[], attrax.Scores]]:
    """Every method as a function that scores all sequences; higher = more helpful."""
    recipe, loss = recipe_of(folder, device), attrax.causal_lm()
    recorded = attrax.open_trajectory(folder / "run")
    run = attrax.replay(recipe.model, recipe.batches, loss, recorded, reduction="token_mean")
    data = [batch for batches in recipe.batches.values() for batch in batches]
    queries, model = queries_of(folder, device), trained_of(folder, device)
    texts = {name: {row["id"]: row["text"] for row in rows_of(folder, name)} for name in ("train", "query")}
    asking, ids = tuple(texts["query"]), tuple(texts["train"])
    after = partial(attrax.live, model, data, loss, verify=False)
    asked = partial(attrax.live, model, queries, loss, verify=False)

    rows = rows_of(folder, "query")
    parts = [batch_of(rows[k : k + PART], device) for k in range(0, len(rows), PART)]

    def influence(unit: str, masks: Sequence[attrax.Mask] = ()) -> attrax.Scores:
        return attrax.trajectory_influence(run, asked(), unit=unit, masks=masks)

    def masked(count: int) -> attrax.Scores:
        return influence("tokens", disjoint_masks(attrax.Mask(count, scale="none"), MASKS))

    return {
        "chance": lambda: baselines.chance(ids, asking),
        "train loss": lambda: baselines.train_losses(model, data, asking),
        "gradient norm": lambda: baselines.gradient_norms(after(), asking),
        "BM25": lambda: baselines.bm25(texts["train"], texts["query"]),
        "embedding similarity": lambda: baselines.similarity(model, data, queries),
        "GradDot": lambda: attrax.graddot(after(), asked()),
        "GradCos": lambda: attrax.gradcos(after(), asked()),
        "EK-FAC": lambda: attrax.ekfac(after(), asked()),
        "EK-FAC, projected to 64": lambda: attrax.ekfac(after(), asked(), projection=attrax.Projection(64)),
        "K-FAC": lambda: attrax.kfac(after(), asked()),
        "LoGRA": lambda: attrax.logra(after(), asked(), dim=64),
        "TracIn": lambda: attrax.tracin(run, run.queries(queries)),
        "LESS": lambda: attrax.less(run, run.queries(queries)),
        "DVEmb, examples": lambda: attrax.dvemb(run, asked(), unit="examples"),
        "DVEmb, tokens": lambda: attrax.dvemb(run, asked(), unit="tokens"),
        "AdamW-influence, examples": lambda: influence("examples"),
        "AdamW-influence, tokens": lambda: influence("tokens"),
        **{f"AdamW-influence, {MASKS} masks of {k}": partial(masked, k) for k in COUNTS},
        "MAGIC": lambda: beside(
            [attrax.magic(run, attrax.live(model, [part], loss, verify=False)) for part in parts]
        ),
    }


def beside(parts: Sequence[attrax.Scores]) -> attrax.Scores:
    """Scores of the same examples for several sets of queries."""
    ids = tuple(i for part in parts for i in part.query_ids)
    return replace(parts[0], values=torch.cat([part.values for part in parts], 1), query_ids=ids)


def score(folder: Path, device: str, name: str) -> None:
    """One method, in this process: its scores, its time and the process's largest memory, to files."""
    torch.set_num_threads(THREADS)
    method = scorers(folder, device)[name]
    start, used = time.perf_counter(), time.process_time()
    scores = method()
    taken = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - used,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if device != "cpu":
        taken["peak_device_mib"] = torch.cuda.max_memory_allocated() / 2**20
    folded = scores.per_example()[0] if len(set(scores.ids)) < len(scores.ids) else scores
    (folder / "scores").mkdir(exist_ok=True)
    attrax.write_scores(folded, folder / "scores" / f"{slug(name)}.parquet")
    (folder / "scores" / f"{slug(name)}.json").write_text(json.dumps({"method": name, **taken}))


def slug(name: str) -> str:
    """A file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def effects_of(folder: Path) -> tuple[attrax.Scores, dict[str, Any]]:
    """Effects of the removals, and what is known of their precision."""
    lines = (folder / "retrained.jsonl").read_text().splitlines()
    losses = {row["run"]: torch.tensor(row["losses"], dtype=torch.float64) for row in map(json.loads, lines)}
    gone = removed_ids(folder)
    asking = tuple(row["id"] for row in rows_of(folder, "query"))

    def effects(runs: Sequence[str], h: float = 1.0, ids: Sequence[str] = ()) -> attrax.Scores:
        values = torch.stack([(losses[run] - losses["all"]) / h for run in runs])
        return attrax.Scores(values, tuple(ids or runs), asking)

    whole = effects([f"without {i}" for i in gone], ids=gone)
    first = whole.in_order(gone[:PARTIAL])
    return whole, {
        "median_effect": float(whole.values.abs().median()),
        "median_loss": float(losses["all"].median()),
        "effect_over_rounding": above_floor(whole, effects(["permuted"])),
        "repeated_run_differs_by": float(effects(["all again"]).values.abs().max()),
        "partial_over_whole_removal": {
            str(h): {
                "spearman": float(attrax.agreement(part, first).mean()),
                "distance": float((part.values - first.values).norm() / first.values.norm()),
            }
            for h in (0.5, 0.1)
            for part in [effects([f"{i} by {h}" for i in gone[:PARTIAL]], h, gone[:PARTIAL])]
        },
    }


def mean(scores: attrax.Scores, effects: attrax.Scores) -> float:
    """Mean over queries of the correlation of scores and effects."""
    return float(attrax.agreement(scores, effects).nanmean())


def slope(scores: attrax.Scores, effects: attrax.Scores) -> float:
    """What a score of 1 amounts to: the effects' least squares fit through zero; 1 for a method that predicts them."""
    x = scores.in_order(effects.ids).query(*effects.query_ids).values.double()
    return float((x * effects.values).sum() / x.square().sum())


def summary(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Fidelity of every method that was run."""
    effects, precision = effects_of(folder)
    order = json.loads((folder / "order.json").read_text())
    steps = {k: gone for k, ids in order.items() if (gone := [i for i in ids if i in effects.ids])}
    rows = []
    for path in sorted((folder / "scores").glob("*.json")):
        taken = json.loads(path.read_text())
        scores = attrax.read_scores(path.with_suffix(".parquet"))
        asked = effects.query(*scores.query_ids)
        low, high = bootstrap(scores, asked, resamples=1000)
        rows.append(
            taken
            | {"queries": len(scores.query_ids), "spearman": mean(scores, asked), "interval": [low, high]}
            | {"effect_over_score": slope(scores, asked)}
            | {
                "effect_over_score_by_step": {
                    k: slope(scores, asked.in_order(ids)) for k, ids in steps.items()
                }
            }
        )
    return precision, sorted(rows, key=lambda row: -row["spearman"])


def main() -> None:
    """Run what has not been run, summarize, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with model/, train.jsonl and query.jsonl")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="*", help="only these; all by default")
    parser.add_argument("--score", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder: Path = options.folder
    if options.score:
        score(folder, options.device, options.score)
        return
    torch.set_num_threads(THREADS)
    if not (folder / "trained").exists():
        fine_tune(folder, options.device)
    retrain(folder, options.device)
    names = options.methods or list(scorers(folder, options.device))
    for name in tqdm(names, desc="scoring"):
        if not (folder / "scores" / f"{slug(name)}.json").exists():
            command = [sys.executable, __file__, str(folder), "--device", options.device, "--score", name]
            subprocess.run(command, check=True)
    precision, rows = summary(folder)
    for row in rows:
        low, high = row["interval"]
        print(f"{row['method']:<36}{row['spearman']:6.3f} [{low:.3f}, {high:.3f}]{row['cpu_seconds']:9.1f} s")
    print(precision)
    setting = {"rate": RATE, "decay": DECAY, "clip": CLIP, "batch": BATCH, "removals": REMOVALS}
    write(options.out, setting=setting, precision=precision, methods=rows)


if __name__ == "__main__":
    main()
