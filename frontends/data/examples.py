"""Train and query data: records from files, tokens and labels from records, padded batches from tokens.

    read_examples(path) -> records      encode(records, tokenizer) -> Encoded      batches(encoded) -> Batches

A record is a mapping with a unique string "id" and its file's own columns, which say what the example is:

    text                 loss on every token
    prompt, completion   loss on the completion's tokens
    messages             a chat in the tokenizer's own template; loss on the assistant's tokens

Two optional columns narrow it down:

    target     a substring of the text or completion, or its characters [start, end): loss on these tokens only
    contrast   another completion of the same prompt: the loss is loss(completion) - loss(contrast)
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attrax.frontends.data.records import read_rows
from attrax.frontends.data.tokens import FORMS, IGNORE, Form, forms_of, tokenize, tokenize_contrast

Record: TypeAlias = dict[str, Any]
Document: TypeAlias = tuple[Tensor, Tensor]
"""Tokens and labels of one row."""

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
        columns = [*(c for columns in FORMS.values() for c in columns), "target", "contrast"]
        content = {c: row[c] for c in columns if row.get(c) is not None}
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
        empty: Ids of examples that were kept without a token to predict: they score 0.
        contrasts: By example id, tokens and labels of the continuation whose loss is subtracted.
    """

    ids: tuple[str, ...]
    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    skipped: tuple[Skipped, ...] = ()
    truncated: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    contrasts: Mapping[str, Document] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        loss = sum(loss_tokens(labels) for i in range(len(self)) for _, labels in self.documents(i))
        kinds = Counter(skip.kind for skip in self.skipped)
        notes = [f"{len(self.contrasts)} with a contrast"] if self.contrasts else []
        notes += [f"{count} skipped ({kind})" for kind, count in kinds.items()]
        notes += [f"{len(self.truncated)} truncated"] if self.truncated else []
        notes += [f"{len(self.empty)} without a token to predict (they score 0)"] if self.empty else []
        return ", ".join([f"{len(self)} examples, {self.size} tokens, {loss} with loss", *notes])

    @property
    def size(self) -> int:
        """Number of tokens."""
        return sum(len(tokens) for i in range(len(self)) for tokens, _ in self.documents(i))

    def documents(self, i: int) -> tuple[Document, ...]:
        """Tokens and labels of the i-th example, and those of its contrast if it has one."""
        contrast = self.contrasts.get(self.ids[i])
        own = (self.tokens[i], self.labels[i])
        return (own,) if contrast is None else (own, contrast)

    def digest(self) -> str:
        """Hash of all tokens and labels: it changes with the tokenizer, its chat template and the maximal length."""
        state = hashlib.blake2b(digest_size=16)
        contrasts = (row for name in self.ids for row in self.contrasts.get(name, ()))
        for row in (*self.tokens, *self.labels, *contrasts):
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
        return Encoded(
            tuple(ids),
            tuple(self.tokens[i] for i in rows),
            tuple(self.labels[i] for i in rows),
            empty=tuple(name for name in ids if name in self.empty),
            contrasts={name: self.contrasts[name] for name in ids if name in self.contrasts},
        )


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
    """Tokenize records; what each form becomes is said in `attrax.frontends.data.tokens`.

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
    kept: list[tuple[str, list[Document]]] = []
    skipped: list[Skipped] = []
    truncated: list[str] = []
    without: list[str] = []
    for record in records:
        name, contrast = record["id"], tokenize_contrast(record, tokenizer, form)
        whole = [tokenize(record, tokenizer, form), *([contrast] if contrast else [])]
        longest = max(len(tokens) for tokens, _ in whole)
        if longest > max_length and overlong != "truncate":
            skipped.append(Skipped(name, "overlong", f"{longest} tokens, {max_length} allowed"))
            continue
        reasons = [_why_empty(*document, max_length) for document in whole]
        if any(reasons) and not (empty == "keep" and all(reasons) and len(whole[0][0])):
            skipped.append(Skipped(name, "empty", reasons[0] or f"contrast: {reasons[1]}"))
            continue
        without += [name] if any(reasons) else []
        truncated += [name] if longest > max_length else []
        kept.append((name, [(tokens[:max_length], labels[:max_length]) for tokens, labels in whole]))
    _refuse(skipped, len(records), {"overlong": overlong, "empty": empty})
    if not kept:
        reasons = "; ".join(f"'{skip.id}': {skip.reason}" for skip in skipped[:3])
        raise ValueError(f"encode: none of {len(records)} examples is left ({reasons}).")
    return Encoded(
        tuple(name for name, _ in kept),
        tuple(rows[0][0] for _, rows in kept),
        tuple(rows[0][1] for _, rows in kept),
        tuple(skipped),
        tuple(truncated),
        tuple(without),
        {name: rows[1] for name, rows in kept if len(rows) > 1},
    )


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"encode: {name}: got {value!r}; expected one of {list(allowed)}.")


def _why_empty(tokens: Tensor, labels: Tensor, max_length: int) -> str:
    """Why there is nothing to predict in the first `max_length` tokens; "" if there is."""
    if loss_tokens(labels[:max_length]):
        return ""
    if loss_tokens(labels):
        return f"what comes before the loss fills all {max_length} tokens"
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
            owned = [(k, row) for k, i in enumerate(rows) for row in self.encoded.documents(i)]
            tokens = [tokens.long() for _, (tokens, _) in owned]
            labels = [labels.long() for _, (_, labels) in owned]
            batch = {
                "input_ids": _padded(tokens, self.pad_id),
                "attention_mask": _padded([torch.ones_like(x) for x in tokens], 0),
                "labels": _padded(labels, IGNORE),
                "example_ids": tuple(self.encoded.ids[i] for i in rows),
            }
            if len(owned) > len(rows):
                batch |= _segments([k for k, _ in owned], batch["attention_mask"])
            yield batch


def _segments(owners: Sequence[int], mask: Tensor) -> dict[str, Tensor]:
    """Whose each row is, and its weight: 1 for an example, -1 for its contrast, which follows it."""
    owner = torch.tensor(owners)
    second = torch.cat([owner[:1] < 0, owner[1:] == owner[:-1]])
    segments = owner.unsqueeze(1).expand(mask.shape)
    weights = (1 - 2 * second.long()).unsqueeze(1).expand(mask.shape)
    return {"segment_ids": segments.masked_fill(mask == 0, -1), "token_weights": weights.clone()}


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def batches(encoded: Encoded, *, tokens: int = 4096, pad_id: int = 0) -> Batches:
    """Form batches of examples of similar length, the longest first.

    Args:
        encoded: Tokenized examples.
        tokens: Most tokens of a batch, padding included; a longer example is a batch of its own.
        pad_id: Token id on padding; its label is -100.

    Returns:
        Batches with `input_ids`, `attention_mask`, `labels` [R, T] and `example_ids`; every example once.  An example
        with a contrast has two rows: such a batch holds `segment_ids` and `token_weights` too (see `causal_lm`).

    Raises:
        ValueError: If `tokens` is not positive.
    """
    if tokens < 1:
        raise ValueError(f"batches: tokens: got {tokens}; expected a positive number of tokens a batch.")
    documents = [encoded.documents(i) for i in range(len(encoded))]
    lengths = [max(1, *(len(row) for row, _ in rows)) for rows in documents]
    made: list[list[int]] = []
    room = 0
    for i in sorted(range(len(encoded)), key=lambda i: -lengths[i]):
        count = len(documents[i])
        if count > room:
            made.append([])
            room = max(count, tokens // lengths[i])
        made[-1].append(i)
        room -= count
    return Batches(encoded, tuple(map(tuple, made)), pad_id)
