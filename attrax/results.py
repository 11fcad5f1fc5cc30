"""A result folder: scores, report, settings; made by `run`, read by `attrax top` and `attrax inspect`.

scores.parquet (or .csv, .h5)   scores with previews of the texts
report.html                     the same for people
config.yaml                     everything needed to run it again
skipped.jsonl                   examples that were left out and why, if any
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrax.config import Config, Recorded, changes, write_config
from attrax.frontends.data.examples import Record
from attrax.frontends.data.records import needed
from attrax.frontends.data.tables import write_scores
from attrax.frontends.data.tokens import Form, parts_of
from attrax.pipeline import Inputs, Result, Track, coverage, load, score
from attrax.questions import build_report
from attrax.report import write_report

PREVIEW = 120
_FILES = ("scores.parquet", "scores.csv", "scores.h5", "report.html", "config.yaml", "skipped.jsonl")


def run(
    config: Config,
    track: Track,
    *,
    before: Recorded | None = None,
    overwrite: bool = False,
    allow_changed: bool = False,
    announce: Callable[[str], object] = lambda text: None,
) -> tuple[Inputs, Result]:
    """Score and write a result folder.

    Args:
        config: Settings.
        track: Opens progress bars.
        before: What an earlier run started from; different inputs are refused.
        overwrite: Replace an existing result.
        allow_changed: Run even if inputs differ from `before`.
        announce: Called with the coverage report before anything is computed.

    Returns:
        What was loaded and what was found.

    Raises:
        FileExistsError: If the folder holds a result and `overwrite` is not set.
        FileNotFoundError: If an input is missing.
        ImportError: If an optional package is missing.
        ValueError: If settings or inputs cannot be used.
    """
    out = Path(config.out)
    old = [name for name in _FILES if (out / name).exists()]
    if old and not overwrite:
        raise FileExistsError(
            f"{out} holds a result ({', '.join(old)}). Choose another folder, or add --overwrite."
        )
    _require(config)
    inputs = load(config)
    changed, _ = changes(before, inputs.recorded) if before else ([], [])
    if changed and not allow_changed:
        raise ValueError(
            f"inputs: {', '.join(changed)} changed since the settings were written, so the numbers would too. Restore "
            "them, or add --allow-changed."
        )
    announce(str(coverage(config, inputs)))
    result = score(config, inputs, track)
    out.mkdir(parents=True, exist_ok=True)
    for name in old:
        (out / name).unlink()
    _write(config, inputs, result, out)
    if config.html:
        write_report(build_report(config, inputs, result, track), out / "report.html")
    return inputs, result


def _require(config: Config) -> None:
    """Fail before anything is computed if a package that the result needs is missing."""
    wanted = {"yaml": ("cli", "writing config.yaml")}
    wanted |= {"jinja2": ("report", "the HTML report")} if config.html else {}
    wanted |= {"pyarrow": ("report", "writing .parquet files")} if config.format == "parquet" else {}
    for module, (extra, purpose) in wanted.items():
        needed(module, extra, purpose)


def _write(config: Config, inputs: Inputs, result: Result, out: Path) -> None:
    write_scores(
        result.scores,
        out / f"scores.{config.format}",
        columns=_previews(inputs.train_records, config.form),
        queries=_previews(inputs.query_records, config.form)
        if config.query and config.layout == "long"
        else None,
        layout=config.layout,
    )
    if result.skipped:
        rows = [{"side": side, "id": name, "reason": reason} for side, name, reason in result.skipped]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / "skipped.jsonl").write_text(text, encoding="utf-8")
    write_config(config, inputs.recorded, out / "config.yaml")


def _previews(records: Sequence[Record], form: Form | None) -> list[dict[str, str]]:
    return [{"id": record["id"], "preview": preview(record, form)} for record in records]


def preview(record: Mapping[str, Any], form: Form | None = None, width: int = PREVIEW) -> str:
    """A record in one short line; a long prompt loses its beginning, so that the answer stays visible.

    >>> preview({"id": "a", "prompt": "one two three", "completion": " four"}, width=12)
    '… three four'
    """
    prompt, answer = (" ".join(part.split(" ")).replace("\n", " ") for part in parts_of(record, form))
    answer = answer if len(answer) <= width else answer[: width - 1] + "…"
    room = width - len(answer)
    return (
        prompt if len(prompt) <= room else "…" + prompt[len(prompt) - room + 1 :] if room > 1 else ""
    ) + answer
