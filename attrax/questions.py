"""The report of a run: for each question the passages that matter most, their tokens, and where known sources rank.

A query record may name the train examples that are its known sources in a column "source" (an id or a list of ids).
Then the method is compared with BM25 on the same texts and with chance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attrax.config import Config
from attrax.core import Scores
from attrax.frontends import baselines
from attrax.frontends.data.tablefiles import descending_ranks
from attrax.frontends.data.tokens import Form, aim_of, parts_of
from attrax.pipeline import Inputs, Result, Track, token_shares
from attrax.report import Passage, Question, Report, Retrieval

QUESTIONS = 50
HARMFUL = 3
CUTOFFS = (1, 5, 10)


def build_report(config: Config, inputs: Inputs, result: Result, track: Track) -> Report:
    """The report of a result, with token shares of the passages it shows.

    Args:
        config: Settings of the run.
        inputs: What it worked on.
        result: What it found.
        track: Opens progress bars.

    Returns:
        The report; at most `QUESTIONS` questions are shown.
    """
    whole = result.scores
    scores = whole.query(*whole.query_ids[:QUESTIONS])
    sources = known_sources(inputs, whole)
    shown = [_shown(column, config.top) for column in scores.values.T]
    rows = sorted({row for helpful, harmful in shown for row in (*helpful, *harmful)})
    ids = [scores.ids[row] for row in rows]
    shares = token_shares(config, inputs, replace(result, scores=scores), ids, track)
    passage = _passages(config, inputs, scores, shares, sources)
    queries = {record["id"]: record for record in inputs.query_records}
    ranks = _source_ranks(scores, sources)
    questions = []
    for q, (name, (helpful, harmful)) in enumerate(zip(scores.query_ids, shown, strict=True)):
        prompt, answer = _asked(queries[name], config.form) if name in queries else ("", "")
        both = [tuple(passage(row, q) for row in side) for side in (helpful, harmful)]
        questions.append(Question(name, prompt, answer, both[0], both[1], ranks.get(name, ())))
    return Report(
        f"Training data attribution: {Path(config.model).name}",
        dict(whole.about),
        tuple(questions),
        len(whole),
        len(whole.query_ids) - len(questions),
        result.coverage,
        _retrieval(config, inputs, whole, sources),
        _facts(config, inputs, result),
    )


def _asked(record: Mapping[str, Any], form: Form | None) -> tuple[str, str]:
    """Prompt and answer of a query; the answer says what of it is scored, if not all."""
    prompt, answer = parts_of(record, form)
    aim = aim_of(record)
    return prompt, f"{answer} ({aim})" if aim else answer


def known_sources(inputs: Inputs, scores: Scores) -> dict[str, tuple[str, ...]]:
    """Known sources of each query among the scored examples, from the column "source"."""
    there, sources = set(scores.ids), {}
    for record in inputs.query_records:
        value = record.get("source")
        names = value if isinstance(value, list | tuple) else [value]
        found = tuple(str(name) for name in names if name is not None and str(name) in there)
        if found and record["id"] in scores.query_ids:
            sources[record["id"]] = found
    return sources


def _shown(column: Tensor, top: int) -> tuple[list[int], list[int]]:
    """Rows of the most helpful and most harmful passages; none is both, and harmful ones score below zero."""
    order = torch.argsort(column, descending=True, stable=True).tolist()
    helpful = order[:top]
    worst = [row for row in order[: -1 - HARMFUL : -1] if float(column[row]) < 0 and row not in helpful]
    return helpful, worst


def _passages(
    config: Config,
    inputs: Inputs,
    scores: Scores,
    shares: Mapping[str, Tensor],
    sources: Mapping[str, Sequence[str]],
) -> Callable[[int, int], Passage]:
    ranks = descending_ranks(scores.values)
    records = {record["id"]: record for record in inputs.train_records}
    tokens = dict(zip(inputs.train.ids, inputs.train.tokens, strict=True))
    texts = {name: token_texts(inputs.tokenizer, tokens[name].tolist()) for name in shares}

    def passage(row: int, q: int) -> Passage:
        name = scores.ids[row]
        colored = zip(texts[name], shares[name][:, q].tolist(), strict=True) if name in shares else ()
        return Passage(
            name,
            float(scores.values[row, q]),
            float(ranks[row, q]),
            "".join(parts_of(records[name], config.form)),
            tuple(colored),
            name in sources.get(scores.query_ids[q], ()),
        )

    return passage


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; the pieces of one character all but the last add nothing.

    Args:
        tokenizer: A Hugging Face tokenizer.
        ids: Token ids.

    Returns:
        One text a token; joined, they are the decoded text.
    """
    texts: list[str] = []
    done, start = "", 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        whole = end == len(ids) or not text.endswith("\ufffd")
        texts.append(text[len(done) :] if whole else "")
        done = text if whole else done
        if whole and end - start > 32:
            start = end - 4
            done = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
    return texts


def _source_ranks(
    scores: Scores, sources: Mapping[str, Sequence[str]]
) -> dict[str, tuple[tuple[str, float], ...]]:
    ranks = descending_ranks(scores.values)
    row = {name: i for i, name in enumerate(scores.ids)}
    column = {name: q for q, name in enumerate(scores.query_ids)}
    return {
        query: tuple((name, float(ranks[row[name], column[query]])) for name in names)
        for query, names in sources.items()
        if query in column
    }


def recall(
    scores: Scores, sources: Mapping[str, Sequence[str]], cutoffs: Sequence[int] = CUTOFFS
) -> dict[int, float]:
    """Share of queries of which a known source is among the best k passages, for each cut-off k."""
    best = [min(rank for _, rank in found) for found in _source_ranks(scores, sources).values()]
    return {k: sum(rank <= k for rank in best) / len(best) for k in cutoffs}


def _retrieval(
    config: Config, inputs: Inputs, scores: Scores, sources: Mapping[str, Sequence[str]]
) -> tuple[Retrieval, ...]:
    if not sources:
        return ()
    some = scores.query(*sources)
    rows = [Retrieval(config.method, recall(some, sources))]
    words = bm25(config, inputs, some)
    rows += [Retrieval("BM25 (words in common)", recall(words, sources))] if words is not None else []
    chance = {k: min(1.0, k / len(scores)) for k in CUTOFFS}
    return (*rows, Retrieval("random order", chance))


def bm25(config: Config, inputs: Inputs, scores: Scores) -> Scores | None:
    """BM25 of the queries' words (prompt and answer) in the train texts; None if rank_bm25 is not installed."""

    def texts(records: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> dict[str, str]:
        place = {record["id"]: record for record in records}
        return {name: " ".join(parts_of(place[name], config.form)) for name in ids}

    try:
        return baselines.bm25(
            texts(inputs.train_records, scores.ids), texts(inputs.query_records, scores.query_ids)
        )
    except ImportError:
        return None


def _facts(config: Config, inputs: Inputs, result: Result) -> tuple[tuple[str, str], ...]:
    data = [("train data", f"{config.train} ({inputs.train})")]
    data += [("query data", f"{config.query} ({inputs.query})")] if inputs.query is not None else []
    if result.skipped:
        data.append(("left out", ", ".join(f"{name} ({reason})" for _, name, reason in result.skipped[:10])))
    versions = ", ".join(f"{name} {version}" for name, version in inputs.recorded.versions.items())
    return (("model", config.model), *data, ("dtype", config.dtype), ("versions", versions))
