"""Train and query data: records from files, tokens and labels from records, padded batches from tokens.

    read_examples(path) -> records      encode(records, tokenizer) -> Encoded      batches(encoded) -> Batches

A record is a mapping with a unique string "id" and its file's own columns, which say what the example is:

    text                 loss on every token
    prompt, completion   loss on the completion's tokens
    messages             a chat in the tokenizer's own template; loss on the assistant's tokens
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attrax.frontends.records import read_rows
from attrax.frontends.tokens import FORMS, IGNORE, Form, forms_of, tokenize

Record: TypeAlias = dict[str, Any]

_EXPECTED = "'text', or 'prompt' and 'completion', or 'messages'"
_REMEDY = {
    "overlong": "Raise max_length, or pass overlong='truncate' or 'skip'.",
    "empty": "There is no token to predict: complete the examples, or pass empty='skip' or 'keep'.",
}


def read_examples(path: str | Path, *, split: str | None = None) -> list[Record]:
    """Read examples from a file, in its order.

    Args:
        path: A .jsonl, .json, .csv, .tsv or .parquet file, or a folder written by `datasets.Dataset.save_to_disk`.
        split: Which split of a folder that holds several.

    Returns:
        Records: the file's rows, each with a string "id".  Without a column "id" the id is a hash of the content,
        the same in every run; "-2", "-3", … tell equal contents apart.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If the format needs a package that is not installed.
        ValueError: If the file cannot be read, is empty, has no known columns, or its ids are not unique.
    """
    path = Path(path)
    rows = read_rows(path, split)
    if not rows:
        raise ValueError(f"read_examples: {path}: the file holds no examples.")
    for number, row in enumerate(rows, 1):
        if not forms_of(row):
            raise ValueError(
                f"read_examples: {path}: row {number} has the columns {sorted(row)}; expected {_EXPECTED}. "
                "Rename the columns that hold the text."
            )
    ids = _given_ids(path, rows) if any(row.get("id") is not None for row in rows) else _content_ids(rows)
    return [{**row, "id": name} for name, row in zip(ids, rows, strict=True)]


def _given_ids(path: Path, rows: Sequence[Record]) -> list[str]:
    ids: list[str] = []
    for number, row in enumerate(rows, 1):
        value = row.get("id")
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            raise ValueError(
                f"read_examples: {path}: row {number} has the id {value!r}; expected a non-empty string or an integer. "
                "Fill the column 'id', or drop it to name examples by their content."
            )
        ids.append(str(value))
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    if repeated:
        raise ValueError(
            f"read_examples: {path}: {len(repeated)} ids occur more than once, e.g. {repeated[:5]}. Make the column "
            "'id' unique, or drop it to name examples by their content."
        )
    return ids


def _content_ids(rows: Sequence[Record]) -> list[str]:
    seen: Counter[str] = Counter()
    ids: list[str] = []
    for row in rows:
        content = {c: row[c] for columns in FORMS.values() for c in columns if row.get(c) is not None}
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids


@dataclass(frozen=True, eq=False, slots=True)
class Skipped:
    """An example that was left out: its id and why."""

    id: str
    kind: Literal["overlong", "empty"]
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """Tokenized examples, and what was left out.

    Attributes:
        ids: Example ids.
        tokens: Token ids of each example, 1-D int32.
        labels: Labels of each example, -100 where there is no loss; not shifted.
        skipped: Examples left out, with the reason.
        truncated: Ids of examples that were cut to the maximal length.
    """

    ids: tuple[str, ...]
    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    skipped: tuple[Skipped, ...] = ()
    truncated: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        loss = sum(loss_tokens(labels) for labels in self.labels)
        size = sum(len(tokens) for tokens in self.tokens)
        kinds = Counter(skip.kind for skip in self.skipped)
        notes = [f"{count} skipped ({kind})" for kind, count in kinds.items()]
        notes += [f"{len(self.truncated)} truncated"] if self.truncated else []
        return ", ".join([f"{len(self)} examples, {size} tokens, {loss} with loss", *notes])

    def digest(self) -> str:
        """Hash of all tokens and labels: it changes with the tokenizer, its chat template and the maximal length."""
        state = hashlib.blake2b(digest_size=16)
        for row in (*self.tokens, *self.labels):
            state.update(len(row).to_bytes(8, "little") + row.numpy().tobytes())
        return f"blake2b:{state.hexdigest()}"

    def only(self, ids: Sequence[str]) -> "Encoded":
        """The examples of some ids, in the order asked.

        Raises:
            KeyError: If an id is unknown.
        """
        place = {name: i for i, name in enumerate(self.ids)}
        unknown = [name for name in ids if name not in place]
        if unknown:
            raise KeyError(
                f"only: {len(unknown)} ids are not among the {len(self)} examples, e.g. {unknown[:5]}."
            )
        rows = [place[name] for name in ids]
        return Encoded(tuple(ids), tuple(self.tokens[i] for i in rows), tuple(self.labels[i] for i in rows))


def loss_tokens(labels: Tensor) -> int:
    """Number of tokens that a causal model predicts: labels after the first that are not -100."""
    return int((labels[1:] != IGNORE).sum())


def encode(
    records: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_length: int,
    form: Form | None = None,
    overlong: Literal["error", "truncate", "skip"] = "error",
    empty: Literal["error", "skip", "keep"] = "error",
) -> Encoded:
    """Tokenize records; what each form becomes is said in `attrax.frontends.tokens`.

    Args:
        records: Records of `read_examples`.
        tokenizer: A Hugging Face tokenizer.
        max_length: Most tokens of an example.
        form: How to read records whose columns leave a choice.
        overlong: For examples with more tokens: raise, cut the end off, or leave them out by name.
        empty: For examples without a token to predict: raise, leave them out by name, or keep them (they score 0).

    Returns:
        The tokenized examples, in order.

    Raises:
        ValueError: If a record is not of its form, is overlong or empty, or none is left.
    """
    _check_choice("overlong", overlong, ("error", "truncate", "skip"))
    _check_choice("empty", empty, ("error", "skip", "keep"))
    kept: list[tuple[str, Tensor, Tensor]] = []
    skipped: list[Skipped] = []
    truncated: list[str] = []
    for record in records:
        name = record["id"]
        tokens, labels = tokenize(record, tokenizer, form)
        if len(tokens) > max_length and overlong != "truncate":
            skipped.append(Skipped(name, "overlong", f"{len(tokens)} tokens, {max_length} allowed"))
            continue
        if loss_tokens(labels[:max_length]) == 0 and (empty != "keep" or not len(tokens)):
            skipped.append(Skipped(name, "empty", _why_empty(tokens, labels, max_length)))
            continue
        truncated += [name] if len(tokens) > max_length else []
        kept.append((name, tokens[:max_length], labels[:max_length]))
    _refuse(skipped, len(records), {"overlong": overlong, "empty": empty})
    if not kept:
        reasons = "; ".join(f"'{skip.id}': {skip.reason}" for skip in skipped[:3])
        raise ValueError(f"encode: none of {len(records)} examples is left ({reasons}).")
    ids, tokens, labels = zip(*kept, strict=True)
    return Encoded(ids, tokens, labels, tuple(skipped), tuple(truncated))


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"encode: {name}: got {value!r}; expected one of {list(allowed)}.")


def _why_empty(tokens: Tensor, labels: Tensor, max_length: int) -> str:
    if loss_tokens(labels):
        return f"the prompt fills all {max_length} tokens"
    return "no text" if len(tokens) < 2 else "no answer"


def _refuse(skipped: Sequence[Skipped], total: int, choices: Mapping[str, str]) -> None:
    for kind, choice in choices.items():
        found = [skip for skip in skipped if skip.kind == kind]
        if found and choice != "skip":
            names = ", ".join(f"'{skip.id}' ({skip.reason})" for skip in found[:5])
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise ValueError(
                f"encode: {len(found)} of {total} examples are {kind}: {names}{more}. {_REMEDY[kind]}"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Batches:
    """Padded batches of encoded examples, as often as asked, always the same; made by `batches`.

    Attributes:
        encoded: The examples.
        rows: Positions of the examples of each batch.
        pad_id: Token id on padding.
    """

    encoded: Encoded
    rows: tuple[tuple[int, ...], ...]
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for rows in self.rows:
            tokens = [self.encoded.tokens[i].long() for i in rows]
            labels = [self.encoded.labels[i].long() for i in rows]
            yield {
                "input_ids": _padded(tokens, self.pad_id),
                "attention_mask": _padded([torch.ones_like(x) for x in tokens], 0),
                "labels": _padded(labels, IGNORE),
                "example_ids": tuple(self.encoded.ids[i] for i in rows),
            }


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def batches(encoded: Encoded, *, tokens: int = 4096, pad_id: int = 0) -> Batches:
    """Form batches of examples of similar length, the longest first.

    Args:
        encoded: Tokenized examples.
        tokens: Most tokens of a batch, padding included; a longer example is a batch of its own.
        pad_id: Token id on padding; its label is -100.

    Returns:
        Batches with `input_ids`, `attention_mask`, `labels` [B, T] and `example_ids`; every example once.

    Raises:
        ValueError: If `tokens` is not positive.
    """
    if tokens < 1:
        raise ValueError(f"batches: tokens: got {tokens}; expected a positive number of tokens a batch.")
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded.tokens[i]))
    rows: list[tuple[int, ...]] = []
    while order:
        count = max(1, tokens // max(1, len(encoded.tokens[order[0]])))
        rows.append(tuple(order[:count]))
        order = order[count:]
    return Batches(encoded, tuple(rows), pad_id)
