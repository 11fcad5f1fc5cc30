"""From settings to scores: load model and data, tokenize, score, and say which tokens carry a score."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attrax.config import Config, Recorded, content_hash, versions
from attrax.core import (
    Leaf,
    Projection,
    Scores,
    Source,
    Transform,
    covers,
    fingerprint,
    has_factors,
    is_linear,
    projected,
    transformed,
)
from attrax.frontends.data.examples import Batches, Encoded, Record, batches, encode, read_examples
from attrax.frontends.data.records import needed
from attrax.frontends.model.coverage import Coverage, select
from attrax.frontends.sources.live import Live, live
from attrax.frontends.sources.positions import NoPositions, by_position
from attrax.methods import (
    fit_ekfac,
    fit_kfac,
    fit_logra,
    gradcos,
    graddot,
    influence,
    score_logra,
    self_influence,
)

Score: TypeAlias = Callable[[Source], Scores]
Advance: TypeAlias = Callable[[int], None]
Track: TypeAlias = Callable[[str, int], Advance]
"""``track(label, tokens)`` opens a progress bar and returns the function that advances it."""

DAMPING = 0.1
LOGRA_DIM = 16
_UNBOUNDED = 10**6
_PASSES = {
    "graddot": (1, 1),
    "gradcos": (2, 2),
    "kfac": (2, 1),
    "ekfac": (3, 1),
    "logra": (2, 1),
    "self_influence": (1, 0),
}
"""Passes of each method over train and query data."""


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """What a run works on: the model in eval mode, its tokenizer, records and tokens of both sides."""

    model: Any
    tokenizer: Any
    train_records: list[Record]
    query_records: list[Record]
    train: Encoded
    query: Encoded | None
    recorded: Recorded


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """What a run found.

    Attributes:
        scores: Scores, rows in the order of the train data.
        coverage: Which parameters took part, as text.
        skipped: Examples left out: (side, id, reason).
        linear: Scores another train source with the same fit, linearly in its gradients; None if there is no such.
    """

    scores: Scores
    coverage: str
    skipped: tuple[tuple[str, str, str], ...]
    linear: Score | None


@dataclass(frozen=True, eq=False, slots=True)
class Fed:
    """Batches moved to a device, reporting their tokens once each batch is done."""

    data: Batches
    device: torch.device
    advance: Advance

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.data:
            yield {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            self.advance(int(batch["attention_mask"].sum()))


def load(config: Config) -> Inputs:
    """Read the data, load the model and tokenize.

    Raises:
        FileNotFoundError: If a file is missing.
        ImportError: If transformers is not installed.
        ValueError: If the model cannot be loaded or the data cannot be used with it.
    """
    train_records = read_examples(config.train, split=config.train_split)
    query_records = read_examples(config.query, split=config.query_split) if config.query else []
    model, tokenizer = load_model(config)
    limit = _limit(config, model, tokenizer)

    def tokens(records: list[Record]) -> Encoded:
        made = encode(
            records,
            tokenizer,
            max_length=limit,
            form=config.form,
            overlong=config.overlong,
            empty=config.empty,
        )
        _check_vocabulary(model, made)
        return made

    train = tokens(train_records)
    if train.contrasts:
        raise ValueError(
            f"train: example '{next(iter(train.contrasts))}' has a contrast, which only queries have. Drop or rename "
            "the column 'contrast'."
        )
    query = tokens(query_records) if query_records else None
    inputs = {"model": f"fingerprint:{fingerprint(dict(model.named_parameters()))}"}
    inputs |= {
        name: content_hash(path) for name, path in (("train", config.train), ("query", config.query)) if path
    }
    inputs["tokens"] = " ".join(side.digest() for side in (train, query) if side)
    return Inputs(model, tokenizer, train_records, query_records, train, query, Recorded(versions(), inputs))


def load_model(config: Config) -> tuple[Any, Any]:
    """Model in eval mode on its device, and tokenizer.

    Raises:
        ImportError: If transformers is not installed.
        ValueError: If either cannot be loaded.
    """
    transformers = needed("transformers", "hf", "loading a model")
    transformers.utils.logging.disable_progress_bar()
    device = device_of(config)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(config.model)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model: cannot load '{config.model}': {reason:.300} Give a folder written by save_pretrained (model and "
            "tokenizer), or a hub name."
        ) from error
    model = model if config.dtype == "auto" else model.to(getattr(torch, config.dtype))
    return model.to(device).eval(), tokenizer


def device_of(config: Config) -> torch.device:
    """The device of the settings; "auto" is a GPU if there is one.

    Raises:
        ValueError: If there is no such device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: cannot use '{name}': {str(error).splitlines()[0]} Use device cpu."
        ) from error
    return device


def _limit(config: Config, model: Any, tokenizer: Any) -> int:
    """Most tokens of an example: as asked, at most what the model can read."""
    positions = getattr(model.config, "max_position_embeddings", None)
    known = [n for n in (positions, tokenizer.model_max_length) if isinstance(n, int) and 0 < n < _UNBOUNDED]
    if config.max_length is None and not known:
        raise ValueError(f"max_length: '{config.model}' states no maximal length. Give one (--max-length).")
    if config.max_length is not None and isinstance(positions, int) and config.max_length > positions:
        raise ValueError(f"max_length: got {config.max_length}; the model reads at most {positions} tokens.")
    return config.max_length or min(known)


def _check_vocabulary(model: Any, data: Encoded) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    rows = [tokens for i in range(len(data)) for tokens, _ in data.documents(i)]
    largest = max(int(tokens.max()) for tokens in rows)
    if largest >= size:
        raise ValueError(
            f"model: the tokenizer makes the token id {largest}, the model knows {size} tokens. Use the model's own "
            "tokenizer."
        )


def sources(config: Config, inputs: Inputs, track: Track) -> tuple[Live, Live | None]:
    """Live sources of both sides under one progress bar."""
    passes = _PASSES[config.method]
    sizes = [side.size if side else 0 for side in (inputs.train, inputs.query)]
    advance = track(config.method, sum(n * size for n, size in zip(passes, sizes, strict=True)))
    train = _live(config, inputs, inputs.train, advance)
    return train, train.on(_fed(config, inputs, inputs.query, advance)) if inputs.query else None


def coverage(config: Config, inputs: Inputs) -> Coverage:
    """Which parameters will be captured, by which rule, and which not and why.

    Raises:
        ValueError: If no layer is selected, or the settings are strict and there are gaps.
    """
    chosen = {"include": config.include, "exclude": config.exclude, "strict": config.strict}
    return select(inputs.model, **chosen).coverage


def _live(config: Config, inputs: Inputs, data: Encoded, advance: Advance) -> Live:
    return live(
        inputs.model,
        _fed(config, inputs, data, advance),
        include=config.include,
        exclude=config.exclude,
        strict=config.strict,
        on_nonfinite=config.on_nonfinite,
    )


def _fed(config: Config, inputs: Inputs, data: Encoded, advance: Advance) -> Fed:
    pad = inputs.tokenizer.pad_token_id
    made = batches(data, tokens=config.tokens, pad_id=0 if pad is None else pad)
    return Fed(made, device_of(config), advance)


def fit_and_score(config: Config, train: Source, query: Source | None) -> tuple[Scores, Score | None]:
    """Fit what the method fits and score.

    Returns:
        Scores, and a function that scores another train source, linear in its gradients (for gradcos, the products
        that it normalizes); None for self_influence, which is not linear.
    """
    damping = DAMPING if config.damping is None else config.damping
    projection = Projection(config.projection_dim, seed=config.seed) if config.projection_dim else None
    if query is None:
        return self_influence(train, target=config.target), None
    if config.method in ("graddot", "gradcos"):
        methods = {"graddot": graddot, "gradcos": gradcos}
        made = {name: _seen_through(projection, method, query, config) for name, method in methods.items()}
        return made[config.method](train), made["graddot"]
    if config.method == "logra":
        spec = projection or Projection(LOGRA_DIM, seed=config.seed)
        score: Score = partial(
            score_logra, fit_logra(train, projection=spec, target=config.target), query=query, damping=damping
        )
    else:
        fit = {"kfac": fit_kfac, "ekfac": fit_ekfac}[config.method]
        options = {"fisher": config.fisher or "empirical", "target": config.target, "seed": config.seed}
        curvature = fit(train, projection=projection, **options)
        rank = config.query_rank
        score = partial(influence, curvature, query=query, damping=damping, query_rank=rank)
    return score(train), score


def _seen_through(
    projection: Projection | None, method: Callable[..., Scores], query: Source, config: Config
) -> Score:
    if projection is None:
        return partial(method, query=query, target=config.target)
    view = projected(projection)

    def score(train: Source) -> Scores:
        found = method(transformed(train, view), transformed(query, view), target=config.target)
        return replace(found, about={**found.about, "projection": projection.basis})

    return score


def score(config: Config, inputs: Inputs, track: Track) -> Result:
    """Score all train examples against all queries.

    Args:
        config: Settings.
        inputs: What `load` made of them.
        track: Opens progress bars.

    Returns:
        The result.

    Raises:
        ValueError: If a gradient or loss is not finite, or no layer is selected.
    """
    train, query = sources(config, inputs, track)
    scored: set[str] = set()
    scores, linear = fit_and_score(config, train, query and transformed(query, _noted(config, scored)))
    skipped = _skipped("train", inputs.train, train)
    there = set(scores.ids)
    scores = scores.in_order([name for name in inputs.train.ids if name in there])
    if inputs.query is not None and query is not None:
        skipped |= _skipped("query", inputs.query, query)
        there = set(scores.query_ids)
        scores = scores.query(*(name for name in inputs.query.ids if name in there))
    missing = tuple((side, name, reason) for (side, name), reason in skipped.items())
    return Result(scores, _coverage(config, train, scored), missing, linear)


def _noted(config: Config, scored: set[str]) -> Transform:
    """The identity, which notes the parameters that the method scores."""
    scopes = {"kfac": has_factors, "ekfac": has_factors, "logra": is_linear}
    scope = scopes.get(config.method, lambda name, leaf: True)

    def note(name: str, leaf: Leaf) -> Leaf:
        if scope(name, leaf):
            scored.update(covers(leaf))
        return leaf

    return note


def _coverage(config: Config, train: Live, scored: set[str]) -> str:
    captured = train.coverage.captured
    left = [c for c in captured if c.parameter not in scored]
    if not scored or not left:
        return str(train.coverage)
    size = sum(c.entries for c in captured) - sum(c.entries for c in left)
    return (
        f"{train.coverage}\n{config.method} scores {len(captured) - len(left)} of them, {size:,} entries: weights of "
        f"linear layers. Not scored: {len(left)} parameters (of embeddings, norms, the output head, recomputed layers)."
    )


def _skipped(side: str, data: Encoded, source: Live) -> dict[tuple[str, str], str]:
    found = {(side, skip.id): f"{skip.kind}: {skip.reason}" for skip in data.skipped}
    return found | {(side, name): reason for name, reason in source.skipped}


def token_shares(
    config: Config, inputs: Inputs, result: Result, ids: Sequence[str], track: Track
) -> dict[str, Tensor]:
    """How much each token of some train examples contributes to their scores.

    Args:
        config: Settings of the run.
        inputs: Its inputs.
        result: Its result.
        ids: The examples.
        track: Opens progress bars.

    Returns:
        Shares [T, Q] by example id; a column adds up to the example's score for that query.  Empty for a method that
        is not linear in the train gradient, and where gradients exist only for the whole example.
    """
    if result.linear is None or not ids:
        return {}
    some = inputs.train.only(list(ids))
    lengths = {name: len(tokens) for name, tokens in zip(some.ids, some.tokens, strict=True)}
    source = _live(config, inputs, some, track("which tokens", sum(lengths.values())))
    try:
        split = result.linear(by_position(source, lengths)).query(*result.scores.query_ids)
    except NoPositions:
        return {}
    totals = dict(zip(result.scores.ids, result.scores.values, strict=True))
    starts = {name: row for row, name in reversed(list(enumerate(split.ids)))}
    shares = {name: split.values[starts[name] :][:length] for name, length in lengths.items()}
    if config.method == "gradcos":
        return {name: _adding_up(share, totals[name]) for name, share in shares.items()}
    return shares


def _adding_up(share: Tensor, total: Tensor) -> Tensor:
    sums = share.sum(0)
    return share * torch.where(sums != 0, total / torch.where(sums != 0, sums, 1.0), 0.0)
