"""The command line: score, replay, look at results.

Everything heavy is imported inside the commands, so that help appears at once.  A mistake of the user's ends in one
line that names the remedy, and exit code 2; ``attrax --traceback …`` shows where it came from.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    sys.stderr.write(
        "attrax: the command line needs the package 'typer'. Install it: pip install 'attrax[cli]'\n"
    )
    raise SystemExit(2) from None

from attrax import options as o

if TYPE_CHECKING:
    from attrax.config import Config, Recorded
    from attrax.core import Scores
    from attrax.evaluate import Judged
    from attrax.pipeline import Track


class Guarded(TyperGroup):
    """Commands whose user errors are one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, BrokenPipeError):
            raise
        except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
            message = _message(error)
            if message is None or ctx.params.get("traceback"):
                raise
            typer.echo(f"attrax: error: {message}", err=True)
            raise typer.Exit(2) from error


def _message(error: Exception) -> str | None:
    """One line for a mistake of the user's; None for anything else."""
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    if type(error).__name__ == "OutOfMemoryError":
        return f"the device ran out of memory: {text:.200} Lower --tokens or --max-length."
    return None if isinstance(error, RuntimeError) else text


app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here:  attrax demo",
)


def _version(asked: bool) -> bool:
    if asked:
        from attrax.config import versions

        typer.echo(", ".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit
    return asked


@app.callback()
def attrax(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Which training examples made the model do that? Training data attribution for language models."""


@app.command(
    epilog="Example:  attrax score --model runs/my-model --train train.jsonl --query questions.jsonl --out result"
)
def score(
    model: o.Model,
    train: o.Train,
    out: o.Out,
    query: o.Query = None,
    train_split: o.TrainSplit = None,
    query_split: o.QuerySplit = None,
    form: o.Form = None,
    max_length: o.MaxLength = None,
    overlong: o.Overlong = "error",
    empty: o.Empty = "error",
    method: o.Method = "ekfac",
    projection_dim: o.ProjectionDim = None,
    query_rank: o.QueryRank = None,
    damping: o.Damping = None,
    fisher: o.Fisher = None,
    target: o.Target = "sum",
    include: o.Include = None,
    exclude: o.Exclude = None,
    strict: o.Strict = False,
    tokens: o.Tokens = 4096,
    on_nonfinite: o.OnNonfinite = "raise",
    dtype: o.Dtype = "float32",
    device: o.Device = "auto",
    seed: o.Seed = 0,
    quiet: o.Quiet = False,
    top: o.Top = 10,
    format: o.Format = "parquet",
    layout: o.Layout = "long",
    html: o.Html = True,
    overwrite: o.Overwrite = False,
) -> None:
    """Score every training example against every query and write a result folder.

    A positive score means that training more on the example would have made the answer more likely. What the numbers
    are, sign and unit included, is written into every file; config.yaml in the folder replays the run (attrax run).
    """
    settings = {k: v for k, v in locals().items() if k not in ("overwrite", "quiet")}
    from attrax.config import configured

    _run(configured(settings), None, overwrite=overwrite, allow_changed=False, quiet=quiet)


@app.command(epilog="Example:  attrax run result/config.yaml --out again")
def run(
    config: Annotated[Path, typer.Argument(help="A config.yaml beside a result, or one by hand.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Another result folder than the file's.")
    ] = None,
    overwrite: o.Overwrite = False,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Run even if model or data changed since.")
    ] = False,
    quiet: o.Quiet = False,
) -> None:
    """Run a config.yaml again: the same numbers from the same inputs.

    Settings have the names of attrax score's options, with underscores: model, train, query, out, method, damping, …
    """
    from dataclasses import replace

    from attrax.config import Recorded, changes, read_config, versions

    settings, before = read_config(config)
    settings = replace(settings, out=str(Path(out).resolve())) if out else settings
    _, packages = changes(before, Recorded(versions(), {}))
    if packages and not quiet:
        typer.echo(f"attrax: other versions than then, numbers may differ: {', '.join(packages)}", err=True)
    _run(settings, before, overwrite=overwrite, allow_changed=allow_changed, quiet=quiet)


def _run(
    config: "Config", before: "Recorded | None", *, overwrite: bool, allow_changed: bool, quiet: bool
) -> None:
    from attrax.results import run

    def announce(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    options = {"before": before, "overwrite": overwrite, "allow_changed": allow_changed}
    with _bars(quiet) as track:
        inputs, result = run(config, track, announce=announce, **options)
    if quiet:
        return
    scores = result.scores
    typer.echo(result.coverage.splitlines()[0])
    if result.skipped:
        typer.echo(
            f"left out: {len(result.skipped)} examples, listed in {Path(config.out) / 'skipped.jsonl'}"
        )
    for side in (inputs.train, inputs.query):
        if side is not None and side.empty:
            typer.echo(
                f"without a token to predict, scored 0: {', '.join(side.empty[:5])} ({len(side.empty)} in all)"
            )
    typer.echo(f"{len(scores)} train examples x {len(scores.query_ids)} queries, {scores.about['unit']}")
    _table(scores, {}, {}, list(scores.query_ids[:3]), 3, lowest=False)
    typer.echo(f"result: {config.out}   (look: attrax top {config.out})")


@contextmanager
def _bars(quiet: bool) -> "Iterator[Track]":
    """Progress bars with tokens per second and time left, on standard error."""
    if quiet:
        yield lambda label, total: lambda count: None
        return
    from attrax.frontends.data.records import needed

    needed("rich", "cli", "progress bars and tables")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    rate = "{task.fields[rate]}"
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TaskProgressColumn(), TextColumn(rate))
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as bar:

        def track(label: str, total: int) -> Any:
            task = bar.add_task(label, total=total, rate="")

            def advance(count: int) -> None:
                seconds = bar.tasks[task].elapsed or 0.0
                done = bar.tasks[task].completed + count
                bar.update(task, advance=count, rate=f"{done / max(seconds, 1e-9):,.0f} tokens/s")

            return advance

        yield track


@app.command(epilog="Example:  attrax top result --query q01 -k 5")
def top(
    result: Annotated[Path, typer.Argument(help="Result folder or scores file.")],
    query: Annotated[
        list[str] | None,
        typer.Option("--query", "-q", help="Query id; repeat for more. Default: the first 10."),
    ] = None,
    k: Annotated[int, typer.Option("-k", help="How many examples.")] = 10,
    lowest: Annotated[
        bool, typer.Option("--lowest", help="The most harmful instead of the most helpful.")
    ] = False,
) -> None:
    """Show the train examples that matter most for a query.

    Positive scores: training more on the example would have made the answer more likely.
    """
    from attrax.frontends.data.tables import read_joined

    joined = read_joined(_scores_file(result) or result)
    texts = dict(zip(joined.scores.ids, joined.train.get("preview", ()), strict=False))
    asked = dict(zip(joined.scores.query_ids, joined.query.get("preview", ()), strict=False))
    _table(joined.scores, texts, asked, query or list(joined.scores.query_ids[:10]), k, lowest=lowest)


def _scores_file(result: Path) -> Path | None:
    """The scores file of a result folder, or None."""
    found = [result / f"scores.{suffix}" for suffix in ("parquet", "csv", "h5")]
    return next((path for path in found if path.is_file()), None)


def _table(
    scores: "Scores",
    texts: dict[str, str],
    asked: dict[str, str],
    queries: list[str],
    k: int,
    *,
    lowest: bool,
) -> None:
    from attrax.frontends.data.records import needed

    needed("rich", "cli", "progress bars and tables")
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    unit = scores.about.get("unit", "")
    for name in queries:
        table = Table(box=box.SIMPLE, title=Text(f"{name}  {asked.get(name, '')}"), title_justify="left")
        table.add_column("", justify="right", style="dim")
        table.add_column(f"score ({unit})" if unit else "score", justify="right", no_wrap=True)
        table.add_column("example", no_wrap=True)
        if texts:
            table.add_column("text")
        for place, (example, value) in enumerate(scores.top(k, name, lowest=lowest), 1):
            color = "blue" if value > 0 else "dark_orange3"
            cells = [Text(f"{place}"), Text(f"{value:+.4g}", style=color), Text(example)]
            table.add_row(*cells, *([Text(texts[example])] if texts else []))
        Console().print(table)


@app.command(epilog="Example:  attrax inspect result")
def inspect(
    path: Annotated[Path, typer.Argument(help="Result folder, scores file, or gradient store.")],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read all of a store; name damaged shards and end with exit code 1."),
    ] = False,
) -> None:
    """Say what a result or a gradient store holds: method, sign, unit, size, settings and inputs."""
    file = path if path.is_file() else _scores_file(path)
    if file is None:
        from attrax.frontends.runs.stepfiles import recorded_steps
        from attrax.frontends.storage.damages import damages
        from attrax.frontends.storage.store import open_store

        found = damages(path) if verify else {}
        for name, problem in found.items():
            typer.echo(f"damaged: {name}: {problem}")
        if found:
            raise typer.Exit(1)
        typer.echo(open_store(path).summary())
        if steps := recorded_steps(path):
            typer.echo(f"optimizer steps recorded: {len(steps)}, from {min(steps)} to {max(steps)}")
        typer.echo("all shards are whole" if verify else "", nl=verify)
        return
    if verify:
        raise ValueError(f"inspect: {file} is a file of scores; --verify is for gradient stores.")
    from attrax.frontends.data.tables import read_scores

    scores = read_scores(file)
    values = scores.values.double().flatten()
    low, middle, high = (
        values.quantile(values.new_tensor([0.0, 0.5, 1.0])).tolist()
        if len(values) < 2**24
        else (values.min().item(), values.median().item(), values.max().item())
    )
    typer.echo(f"{file}: {len(scores)} rows x {len(scores.query_ids)} queries")
    typer.echo(f"scores: {low:.4g} to {high:.4g}, median {middle:.4g}")
    for name, value in scores.about.items():
        typer.echo(f"{name}: {value}")
    if (file.parent / "config.yaml").is_file():
        typer.echo("\n" + (file.parent / "config.yaml").read_text(encoding="utf-8").rstrip())


@app.command(
    epilog="Example:  attrax evaluate result-ekfac result-graddot --effects retrained/effects.parquet"
)
def evaluate(
    scores: Annotated[list[Path], typer.Argument(help="Result folders or scores files.")],
    effects: Annotated[
        Path,
        typer.Option(
            "--effects",
            "-e",
            help="Scores file of effects (attrax retrain, or attrax.write_scores): a row per removal, a column per "
            "query, numbers f_q(trained without) - f_q(trained).",
        ),
    ],
    groups: Annotated[
        Path | None,
        typer.Option(
            "--groups",
            "-g",
            help='Where rows of effects are named sets: a JSON file {"name": ["id", …], …}. Members\' scores are '
            "added up.",
        ),
    ] = None,
    lds: Annotated[
        bool,
        typer.Option(
            "--lds",
            help="Effects are losses of models that were trained on the groups alone (Park et al. 2023).",
        ),
    ] = False,
    export: Annotated[
        Path | None, typer.Option("--json", help="Write everything, each query's too, as JSON.")
    ] = None,
    resamples: Annotated[int, typer.Option("--resamples", min=100, help="Draws of the bootstrap.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the bootstrap.")] = 0,
) -> None:
    """Say how well scores foretell what training without examples does: 1 = in the same order, 0 = chance.

    Spearman's correlation of scores and effects over the removals, for every query, then the mean over queries. The
    95 % interval draws removals and queries anew. Without a helpful example the loss rises: effect and score are both
    positive. A query whose scores or effects are all equal has no correlation; it is named and left out of the mean.
    """
    import json

    from attrax.evaluate import judge, read_groups
    from attrax.frontends.data.tables import read_scores

    judged = judge(
        {str(path): read_scores(_scores_file(path) or path) for path in scores},
        read_scores(_scores_file(effects) or effects),
        read_groups(groups) if groups else None,
        lds=lds,
        resamples=resamples,
        seed=seed,
    )
    if export:
        content = {"effects": str(effects), "lds": lds, "results": [one.plain() for one in judged]}
        export.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    _judgement(judged)


def _judgement(judged: "list[Judged]") -> None:
    from attrax.frontends.data.records import needed

    needed("rich", "cli", "progress bars and tables")
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for name in ("scores", "method", "Spearman", "95 % interval", "removals", "queries", "constant"):
        numeric = name not in ("scores", "method")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    for one in judged:
        mean = "none" if one.mean is None else f"{one.mean:+.3f}"
        interval = "none" if one.interval is None else "{:+.3f} to {:+.3f}".format(*one.interval)
        counts = (one.removals, len(one.correlations), len(one.constant))
        table.add_row(Text(one.source), Text(one.method), mean, interval, *map(str, counts))
    Console().print(table)
    for one in judged:
        named = [f"{query} ({side})" for query, side in one.constant.items()]
        if named:
            typer.echo(f"{one.source}: constant, so without correlation: {', '.join(named)}")


@app.command(
    epilog="Example:  attrax retrain -m base -t train.jsonl -q questions.jsonl --lr 1e-4 --removals 50 -o retrained"
)
def retrain(
    model: Annotated[str, typer.Option("--model", "-m", help="The model before training, as a folder.")],
    train: o.Train,
    query: Annotated[str, typer.Option("--query", "-q", help="Whose losses to watch, in the same formats.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder; a second call goes on where one stopped.")],
    lr: Annotated[float, typer.Option(help="Highest learning rate of AdamW.")],
    batch_size: Annotated[int, typer.Option(help="Examples of a step.")] = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the train data, each shuffled.")] = 1,
    warmup: Annotated[
        float, typer.Option(help="Part of the steps whose rate rises; then it falls to 0.")
    ] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Not on biases and norms.")] = 0.0,
    clip: Annotated[float | None, typer.Option(help="Bound of the gradient norm. Default: none.")] = None,
    removals: Annotated[int, typer.Option(help="Examples to remove, one a training, drawn at random.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the order of data and of the removals.")] = 0,
    max_length: o.MaxLength = None,
    tokens: o.Tokens = 4096,
    device: o.Device = "auto",
    quiet: o.Quiet = False,
) -> None:
    """Train a model again and again without one example, to measure what that does to the losses of queries.

    Without = weight 0 of its loss: batches, order and denominators stay. Writes effects.parquet for attrax evaluate,
    the trained model (score this one: attrax score -m OUT/model), and precision.json: effects below ten times the
    noise_floor are rounding; linearity says how far partial removals are from proportional (0 = proportional).
    """
    given = {name: value for name, value in locals().items() if name not in ("removals", "quiet")}
    from dataclasses import fields

    from attrax.config import configured
    from attrax.retrain import Training
    from attrax.retrain import retrain as run

    training = Training(**{field.name: given.pop(field.name) for field in fields(Training)})
    with _bars(quiet) as track:
        precision = run(configured(given), training, removals, track)
    if not quiet:
        for name, value in precision.items():
            typer.echo(f"{name}: {value}")


@app.command(epilog="Example:  attrax compact grads")
def compact(
    path: Annotated[Path, typer.Argument(help="Gradient store that nobody is writing.")],
    shard_mib: Annotated[int, typer.Option("--shard-mib", min=1, help="Merge shards up to this size.")] = 64,
) -> None:
    """Merge the many small shards of a gradient store into few large ones; what it holds stays the same."""
    from attrax.frontends.storage.compaction import compact_store

    before, after = compact_store(path, shard_bytes=shard_mib * 2**20)
    typer.echo(f"{path}: {before} shards before, {after} now")


@app.command(epilog="Example:  attrax demo --out attrax-demo")
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the result.")] = Path("attrax-demo"),
    overwrite: o.Overwrite = False,
) -> None:
    """Train a small model on 392 passages, ask it questions, and find the passages it learned the answers from.

    Takes about a minute on a laptop, without network.
    """
    from attrax.demo import run

    run.main(out, overwrite=overwrite)


def main() -> None:
    """Entry point of the command `attrax`."""
    app(prog_name="attrax")
