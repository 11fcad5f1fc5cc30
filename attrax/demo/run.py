"""The demonstration: train, capture, attribute, compare, and write a report.

An unmodified Hugging Face Trainer trains a small language model on passages about an invented archipelago.  One capture
records the run: TracIn is computed from that store alone.  A second capture at the final parameters is what GradDot and
EK-FAC score.  Held-out questions ask for facts that one known passage each states in other words.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import attrax
from attrax.config import Config, Recorded, versions, write_config
from attrax.core import Factorized, Leaf, Scores, content_ids
from attrax.demo import recipe
from attrax.frontends.data.examples import Batches, Encoded, batches, encode
from attrax.methods import descending_rank
from attrax.pipeline import Inputs, Result
from attrax.questions import bm25, build_report, known_sources, recall
from attrax.report import Retrieval, write_report

PROJECTION = attrax.Projection(16)
EPOCHS_APART = 3
CUTOFFS = (1, 5, 10)


def main(out: Path, *, overwrite: bool = False) -> None:
    """Run the demonstration and write its results.

    Args:
        out: Folder for model, stores, scores and report.
        overwrite: Replace a folder that exists.

    Raises:
        FileExistsError: If `out` exists and `overwrite` is not set.
    """
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists. Choose another folder (--out), or add --overwrite.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    console = Console()
    tokenizer, passages, questions = recipe.tokenizer(), recipe.passages(), recipe.questions()
    train, query = (encode(rows, tokenizer, max_length=96) for rows in (passages, questions))
    with _timed(console, f"training on {len(passages)} passages, recording the run"):
        model, coverage = record_run(out, tokenizer, passages, batches(query, tokens=8192))
    with _timed(console, "capturing every passage at the final parameters"):
        record_final(out / "final", model, train)
    with _timed(console, "TracIn from the recorded run, without the model"):
        tracin = score_run(out, train.ids)
    with _timed(console, "GradDot and EK-FAC from the second capture"):
        graddot, body, ekfac, linear = score_final(out / "final", model, query, train.ids)
    console.print(coverage)
    config = _config(out, model, tokenizer, passages, questions)
    inputs = Inputs(model, tokenizer, passages, questions, train, query, Recorded(versions(), {}))
    found = {"EK-FAC": ekfac, "EK-FAC without the output head": body, "GradDot": graddot, "TracIn": tracin}
    words = bm25(config, inputs, ekfac)
    if words is not None:
        found["BM25 (words in common)"] = words
    rows = retrieval(found, inputs)
    result = Result(ekfac, coverage, (), linear)
    report = build_report(config, inputs, result, _untracked)
    report = _with_retrieval(report, rows)
    write_report(report, out / "report.html")
    for name, scores in {"ekfac": ekfac, "graddot": graddot, "tracin": tracin}.items():
        attrax.write_scores(scores, out / f"{name}.parquet", columns=passages, queries=questions)
    write_config(config, inputs.recorded, out / "config.yaml")
    show(console, ekfac, inputs, rows)
    console.print(
        f"\n[bold]{out / 'report.html'}[/] has every question, ranked passages and token heat maps;"
    )
    console.print(f"scores are in {out}/ekfac.parquet, graddot.parquet and tracin.parquet;")
    console.print(f"[bold]attrax run {out / 'config.yaml'} --out …[/] scores the trained model again.")


def record_run(
    out: Path, tokenizer: Any, passages: Sequence[Mapping[str, Any]], questions: Batches
) -> tuple[torch.nn.Module, str]:
    """Train with an ordinary Trainer; one epoch in `EPOCHS_APART` is recorded, passages and questions alike."""
    dataset = recipe.encode_passages(tokenizer)
    model = recipe.model(tokenizer)
    names = {_content(example): row["id"] for example, row in zip(dataset, passages, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = recipe.trainer(model, tokenizer, folder, epochs=recipe.EPOCHS)
        steps = -(-len(dataset) // trainer.args.per_device_train_batch_size)
        recorded: Callable[[int], bool] = lambda step: step // steps % EPOCHS_APART == EPOCHS_APART - 1  # noqa: E731
        with attrax.store(out / "run") as run, attrax.store(out / "questions") as asked:
            capture = attrax.capture(
                model,
                sinks=[lambda block: run(block) if recorded(block.examples.step) else None],
                before_step=[attrax.probe(questions, asked, when=recorded)],
                transform=attrax.projected(PROJECTION),
                ids=lambda inputs: [names[i] for i in _contents(inputs)],
            )
            with capture:
                trainer.train()
    return model.eval(), str(capture.coverage)


def record_final(folder: Path, model: torch.nn.Module, train: Encoded) -> None:
    """Capture every passage's full gradient, factored, at the final parameters; nothing is trained."""
    waiting: list[tuple[str, ...]] = []
    sink = attrax.store(folder, keep_factored=True)
    with attrax.capture(model, sinks=[sink], ids=lambda inputs: waiting.pop()):
        for batch in batches(train):
            waiting.append(batch["example_ids"])
            model(**{k: batch[k] for k in ("input_ids", "attention_mask", "labels")}).loss.backward()
            model.zero_grad()


def score_run(out: Path, order: Sequence[str]) -> Scores:
    """TracIn along the recorded steps, summed per passage."""
    scores = attrax.tracin(attrax.open_store(out / "run"), attrax.open_store(out / "questions"))
    return scores.per_example()[0].in_order(order)


def score_final(
    folder: Path, model: torch.nn.Module, query: Encoded, order: Sequence[str]
) -> tuple[Scores, Scores, Scores, Callable[..., Scores]]:
    """GradDot, EK-FAC on the body, EK-FAC with the output head, and the last as a function of the train source.

    By default EK-FAC leaves the output head out, whose curvature is expensive in a large vocabulary.  This
    vocabulary is small, and the head knows which words were learned where.
    """
    train = attrax.open_store(folder)
    questions = attrax.live(model, batches(query, tokens=8192))
    linear = partial(attrax.influence, attrax.fit_ekfac(train, scope=every_matrix), query=questions)
    found = (attrax.graddot(train, questions), attrax.ekfac(train, questions), linear(train))
    graddot, body, ekfac = (scores.in_order(order).query(*query.ids) for scores in found)
    return graddot, body, ekfac, linear


def every_matrix(name: str, leaf: Leaf) -> bool:
    """Scope of all linear layers, the output head included."""
    return isinstance(leaf, Factorized)


def retrieval(found: Mapping[str, Scores], inputs: Inputs) -> tuple[Retrieval, ...]:
    """How often each method finds the passage that states the fact."""
    rows = []
    for name, scores in found.items():
        rows.append(Retrieval(name, recall(scores, known_sources(inputs, scores), CUTOFFS)))
    chance = {k: k / len(inputs.train_records) for k in CUTOFFS}
    return (*rows, Retrieval("random order", chance))


def show(
    console: Console, scores: Scores, inputs: Inputs, rows: Sequence[Retrieval], questions: int = 4
) -> None:
    """Print the top passages of some questions and the retrieval table."""
    texts = {row["id"]: row["text"] for row in inputs.train_records}
    for record in inputs.query_records[:: max(1, len(inputs.query_records) // questions)][:questions]:
        console.print(f"\n[bold]{record['prompt']}[/] [cyan]{record['completion'].strip()}[/]")
        for rank, (name, value) in enumerate(scores.top(3, record["id"]), 1):
            mark = "[green](states the fact)[/] " if name == record["source"] else ""
            console.print(
                f"  {rank}. {value:>9.3g}  {name}  {mark}{texts[name]}", no_wrap=True, overflow="ellipsis"
            )
        place = descending_rank(scores, record["id"], record["source"])
        console.print(f"     the passage that states it, {record['source']}, ranks {place:g}")
    table = Table(
        title=f"Share of {len(inputs.query_records)} questions whose stating passage is in the top k"
    )
    table.add_column("method")
    for k in CUTOFFS:
        table.add_column(f"top {k}", justify="right")
    for row in rows:
        table.add_row(row.method, *(f"{row.shares[k]:.0%}" for k in CUTOFFS))
    console.print()
    console.print(table)


def _content(example: recipe.Example) -> str:
    return _contents(recipe.collate([example]))[0]


def _contents(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    tensors: dict[str, Tensor] = {k: inputs[k] for k in ("input_ids", "labels")}
    return content_ids(tensors, mask=inputs["attention_mask"])


def _config(out: Path, model: Any, tokenizer: Any, passages: list[Any], questions: list[Any]) -> Config:

    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    for name, rows in (("passages", passages), ("questions", questions)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return Config(
        model=str(out / "model"),
        train=str(out / "passages.jsonl"),
        query=str(out / "questions.jsonl"),
        out=str(out / "again"),
        method="ekfac",
        max_length=96,
        top=5,
    )


def _with_retrieval(report: Any, rows: tuple[Retrieval, ...]) -> Any:
    return replace(report, title="What did the model learn it from?", retrieval=rows)


def _untracked(label: str, total: int) -> Callable[[int], None]:
    return lambda count: None


@contextmanager
def _timed(console: Console, what: str) -> Iterator[None]:
    start = time.perf_counter()
    console.print(f"[bold]•[/] {what} …")
    yield
    console.print(f"  {time.perf_counter() - start:.1f} s")
