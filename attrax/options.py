"""Options of the command line with their help; names and defaults are those of `attrax.config.Config`."""

from typing import Annotated, Any, TypeAlias

import typer

_DATA = "Model and data"
_METHOD = "Method"
_RUN = "Computing"
_RESULT = "Result"


def _option(names: str, text: str, panel: str) -> Any:
    return typer.Option(*names.split(), help=text, rich_help_panel=panel)


Model: TypeAlias = Annotated[
    str, _option("--model -m", "Folder written by save_pretrained, or hub name.", _DATA)
]
Train: TypeAlias = Annotated[
    str,
    _option(
        "--train -t",
        "Train data: .jsonl, .json, .csv, .tsv, .parquet or a save_to_disk folder. Columns: text, or prompt and "
        "completion, or messages; optionally id, and target: the only part of the text or completion (a substring, or "
        "characters [start, end)) that carries loss.",
        _DATA,
    ),
]
Query: TypeAlias = Annotated[
    str | None,
    _option(
        "--query -q",
        "What to explain, in the same formats. A column 'contrast' with another completion of the same prompt asks why "
        "the one rather than the other: loss(completion) - loss(contrast). A column 'source' with the ids of known "
        "sources adds a comparison with BM25 to the report.",
        _DATA,
    ),
]
TrainSplit: TypeAlias = Annotated[
    str | None, _option("--train-split", "Split of a train folder that has several.", _DATA)
]
QuerySplit: TypeAlias = Annotated[
    str | None, _option("--query-split", "Split of a query folder that has several.", _DATA)
]
Form: TypeAlias = Annotated[
    str | None, _option("--form", "text, completion or chat, where the columns leave a choice.", _DATA)
]
MaxLength: TypeAlias = Annotated[
    int | None, _option("--max-length", "Most tokens of an example. Default: what the model can read.", _DATA)
]
Overlong: TypeAlias = Annotated[
    str, _option("--overlong", "Longer examples: error, truncate (cut the end) or skip.", _DATA)
]
Empty: TypeAlias = Annotated[
    str,
    _option("--empty", "Examples without a token to predict: error, skip, or keep (they score 0).", _DATA),
]

Method: TypeAlias = Annotated[
    str,
    _option(
        "--method",
        "ekfac, kfac: influence functions. logra: the same on projected gradients. graddot, gradcos: products and "
        "cosines of gradients. self_influence: each train example on itself, without queries.",
        _METHOD,
    ),
]
ProjectionDim: TypeAlias = Annotated[
    int | None,
    _option(
        "--projection-dim",
        "Project each side of a layer to this width: less memory, approximate scores. Default: none (logra: 16).",
        _METHOD,
    ),
]
QueryRank: TypeAlias = Annotated[
    int | None,
    _option(
        "--query-rank",
        "Keep the preconditioned queries of each layer at this rank: much less memory for many queries on a large "
        "model; the error is written into the scores. Default: none (kfac, ekfac).",
        _METHOD,
    ),
]
Damping: TypeAlias = Annotated[
    float | None,
    _option(
        "--damping",
        "Added to the curvature, as a factor of each layer's mean eigenvalue. Default: 0.1 (kfac, ekfac, logra).",
        _METHOD,
    ),
]
Fisher: TypeAlias = Annotated[
    str | None,
    _option(
        "--fisher",
        "Curvature from the labels in the data (empirical) or drawn from the model (sampled). Default: empirical "
        "(kfac, ekfac).",
        _METHOD,
    ),
]
Target: TypeAlias = Annotated[
    str, _option("--target", "Loss of an example: the sum or mean over its tokens.", _METHOD)
]
Include: TypeAlias = Annotated[
    str | None, _option("--include", "Only layers whose path matches this regular expression.", _METHOD)
]
Exclude: TypeAlias = Annotated[
    str | None, _option("--exclude", "No layers whose path matches this regular expression.", _METHOD)
]
Strict: TypeAlias = Annotated[
    bool,
    _option(
        "--strict",
        "Stop if a parameter is left out, or has to be differentiated one example at a time.",
        _METHOD,
    ),
]

Tokens: TypeAlias = Annotated[
    int, _option("--tokens", "Tokens per batch, padding included. Lower it if memory runs out.", _RUN)
]
OnNonfinite: TypeAlias = Annotated[
    str, _option("--on-nonfinite", "Examples with an infinite or NaN loss: raise or skip.", _RUN)
]
Dtype: TypeAlias = Annotated[
    str, _option("--dtype", "float32, float64, bfloat16, float16, or auto (as stored).", _RUN)
]
Device: TypeAlias = Annotated[
    str, _option("--device", "cpu, cuda, cuda:1, …, or auto (a GPU if there is one).", _RUN)
]
Seed: TypeAlias = Annotated[int, _option("--seed", "Seed of projections and sampled labels.", _RUN)]
Quiet: TypeAlias = Annotated[bool, _option("--quiet", "No progress bar and no summary.", _RUN)]

Out: TypeAlias = Annotated[
    str, _option("--out -o", "New folder for scores, report.html and config.yaml.", _RESULT)
]
Top: TypeAlias = Annotated[int, _option("--top", "Passages per question in the report.", _RESULT)]
Format: TypeAlias = Annotated[str, _option("--format", "Scores file: parquet, csv or h5.", _RESULT)]
Layout: TypeAlias = Annotated[
    str,
    _option("--layout", "Scores table: a row per example and query (long), or per example (wide).", _RESULT),
]
Html: TypeAlias = Annotated[bool, _option("--html/--no-html", "Write report.html.", _RESULT)]
Overwrite: TypeAlias = Annotated[
    bool, _option("--overwrite", "Replace the result that is in the folder.", _RESULT)
]
