"""Tokens and labels of one record: a text, a prompt with its completion, or a chat.

Tokens are those of the tokenizer and of its chat template, unchanged.  A completion is tokenized together with its
prompt, as the model reads it, and no end-of-text token follows it unless the data spell one out.  Labels are not
shifted; -100 marks tokens without a loss.

Two more columns say what of an example carries the loss:

    target     with a text or completion: only this part of it, as a substring or as characters [start, end)
    contrast   with prompt and completion: another completion, whose loss is subtracted
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Form: TypeAlias = Literal["text", "completion", "chat"]

IGNORE = -100
FORMS: Mapping[Form, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "chat": ("messages",),
}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def forms_of(record: Mapping[str, Any]) -> list[Form]:
    """The forms in which a record can be read, by its columns.

    >>> forms_of({"prompt": "2 + 2 =", "completion": " 4", "source": "p7"})
    ['completion']
    """
    return [form for form, columns in FORMS.items() if all(record.get(c) is not None for c in columns)]


def aim_of(record: Mapping[str, Any]) -> str:
    """What the columns `target` and `contrast` ask for, in words; "" without them.

    >>> aim_of({"prompt": "2 + 2 =", "completion": " 4", "contrast": " 5"})
    "rather than ' 5'"
    """
    if record.get("contrast") is not None:
        return f"rather than {record['contrast']!r}"
    return "" if record.get("target") is None else f"target: {record['target']!r}"


def parts_of(record: Mapping[str, Any], form: Form | None = None) -> tuple[str, str]:
    """What the model is given and what it is trained or asked to say, as plain text.

    Args:
        record: A record of `read_examples`.
        form: How to read it; needed only if its columns leave a choice.

    Returns:
        Prompt and answer; a text has an empty prompt, a chat ends in its last assistant message.

    Raises:
        ValueError: If the columns do not determine the form or hold something else than text.

    >>> parts_of({"id": "a", "prompt": "2 + 2 =", "completion": " 4"})
    ('2 + 2 =', ' 4')
    """
    match form_of(record, form):
        case "text":
            return "", _text(record, "text")
        case "completion":
            return _text(record, "prompt"), _text(record, "completion")
        case _:
            messages = _messages(record)
            last = _last_assistant(messages)
            before = "".join(f"{m['role']}: {m['content']}\n" for m in messages[:last])
            if last == len(messages):
                return before, ""
            return f"{before}assistant: ", messages[last]["content"]


def form_of(record: Mapping[str, Any], form: Form | None) -> Form:
    """The form in which a record is read: the given one, or the only one its columns allow.

    Raises:
        ValueError: If the columns leave a choice, or do not allow the given form.
    """
    found = forms_of(record)
    if form is None and len(found) > 1:
        raise ValueError(
            f"encode: example '{record['id']}' can be read as {found}. Say which: form= (on the command line, --form)."
        )
    if form is not None and form not in found:
        raise ValueError(
            f"encode: example '{record['id']}': form='{form}' needs the columns {list(FORMS[form])}; it has "
            f"{sorted(record)}."
        )
    return form or found[0]


def _text(record: Mapping[str, Any], column: str) -> str:
    value = record[column]
    if not isinstance(value, str):
        raise ValueError(
            f"encode: example '{record['id']}': column '{column}' holds {type(value).__name__} {value!r:.60}; expected "
            "a string."
        )
    return value


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = record["messages"]
    try:
        value = json.loads(value) if isinstance(value, str) else value
        messages = [{k: v for k, v in message.items() if v is not None} for message in value]
        good = messages and all(isinstance(m.get(k), str) for m in messages for k in ("role", "content"))
    except (AttributeError, TypeError, ValueError):
        messages, good = [], False
    if not good:
        raise ValueError(
            f"encode: example '{record['id']}': column 'messages' holds {record['messages']!r:.60}; expected a "
            "non-empty list of {'role': string, 'content': string}."
        )
    return messages


def _last_assistant(messages: Sequence[Mapping[str, Any]]) -> int:
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return places[-1] if places else len(messages)


def tokenize(record: Mapping[str, Any], tokenizer: Any, form: Form | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a record.

    Chats are rendered by the tokenizer's chat template, which puts every special token itself.  If the template marks
    the assistant's turns (``{% generation %}``), they all carry the loss; otherwise the last assistant message does: it
    is found as what follows the rendering of the messages before it.

    Args:
        record: A record of `attrax.frontends.data.examples.read_examples`.
        tokenizer: A Hugging Face tokenizer.
        form: How to read the record; needed only if its columns leave a choice.

    Returns:
        Token ids and labels, 1-D int32.

    Raises:
        ValueError: If the record is not of its form, the chat template fails or hides where the answer begins, or the
            target is not one part of the answer.
    """
    match form_of(record, form):
        case "text":
            text = _text(record, "text")
            ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int32)
            return ids, _within_target(record, tokenizer, "", text, ids)
        case "completion":
            prompt, completion = _text(record, "prompt"), _text(record, "completion")
            ids, labels = _tokenize_completion(prompt, completion, tokenizer)
            return ids, _within_target(record, tokenizer, prompt, completion, labels)
        case _:
            if record.get("target") is not None:
                raise _misplaced(record, "target", "a text, or of prompt and completion, not of a chat")
            return _tokenize_chat(record, tokenizer)


def tokenize_contrast(
    record: Mapping[str, Any], tokenizer: Any, form: Form | None = None
) -> tuple[Tensor, Tensor] | None:
    """Tokens and labels of the prompt with the completion under `contrast`; None if the record has no contrast.

    Args:
        record: A record of `attrax.frontends.data.examples.read_examples`.
        tokenizer: A Hugging Face tokenizer.
        form: How to read the record; needed only if its columns leave a choice.

    Returns:
        Token ids and labels, 1-D int32, or None.

    Raises:
        ValueError: If there is no completion to compare with, one of the two is empty, or the record has a target too.
    """
    if record.get("contrast") is None:
        return None
    if form_of(record, form) != "completion":
        raise _misplaced(record, "contrast", "prompt and completion")
    if record.get("target") is not None:
        raise _misplaced(record, "contrast", "a whole completion, but there is a 'target' too")
    sides = {column: _text(record, column) for column in ("completion", "contrast")}
    for column, text in sides.items():
        if not text:
            raise ValueError(
                f"encode: example '{record['id']}': column '{column}' is empty; a contrast compares two continuations. "
                "Write both, or leave the contrast out (null)."
            )
    return _tokenize_completion(_text(record, "prompt"), sides["contrast"], tokenizer)


def _misplaced(record: Mapping[str, Any], column: str, place: str) -> ValueError:
    return ValueError(
        f"encode: example '{record['id']}': a column '{column}' is for records of {place}; it has {sorted(record)}. "
        "Drop or rename a column."
    )


def _tokenize_completion(prompt: str, completion: str, tokenizer: Any) -> tuple[Tensor, Tensor]:
    ids = _unended(prompt + completion, tokenizer)
    return _labeled(ids, _common(ids, _unended(prompt, tokenizer)), len(ids))


def _within_target(
    record: Mapping[str, Any], tokenizer: Any, prompt: str, answer: str, labels: Tensor
) -> Tensor:
    """Labels of the tokens that hold characters of the target; all labels if there is no target."""
    if record.get("target") is None:
        return labels.clone()
    start, end = (len(prompt) + place for place in target_span(record, answer))
    if not tokenizer.is_fast:
        raise ValueError(
            f"encode: example '{record['id']}': a target needs a tokenizer that says which characters a token stands "
            f"for; {type(tokenizer).__name__} does not. Load the fast tokenizer (use_fast=True)."
        )
    places = tokenizer(prompt + answer, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    inside = [first < end and last > start for first, last in places[: len(labels)]]
    return labels.masked_fill(~torch.tensor(inside, dtype=torch.bool), IGNORE)


def target_span(record: Mapping[str, Any], answer: str) -> tuple[int, int]:
    """Where in the answer the record's target is, as characters [start, end).

    Raises:
        ValueError: If the target is not in the answer, or more than once.

    >>> target_span({"id": "a", "target": "4"}, " 2 + 2 = 4")
    (9, 10)
    """
    target = record["target"]
    if isinstance(target, str):
        places = (
            [found.start() for found in re.finditer(f"(?={re.escape(target)})", answer)] if target else []
        )
        if len(places) == 1:
            return places[0], places[0] + len(target)
        found = f"occurs {len(places)} times in" if places else "is not in"
        wrong = f"{target!r} {found} {answer!r:.60}" if target else "is empty"
    else:
        pair = isinstance(target, list | tuple) and len(target) == 2 and all(type(x) is int for x in target)
        if pair and 0 <= target[0] < target[1] <= len(answer):
            return target[0], target[1]
        wrong = f"{target!r} is not a part of {len(answer)} characters"
    raise ValueError(
        f"encode: example '{record['id']}': target {wrong}; expected one part of the text or completion: a substring "
        "that occurs once, or characters [start, end). If the column 'target' means something else, rename it."
    )


def _unended(text: str, tokenizer: Any) -> list[int]:
    """Tokens of a text that goes on: without the special tokens that the tokenizer itself puts at the end."""
    out = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    end = len(list(takewhile(bool, reversed(out["special_tokens_mask"]))))
    return list(out["input_ids"][: len(out["input_ids"]) - end])


def _tokenize_chat(record: Mapping[str, Any], tokenizer: Any) -> tuple[Tensor, Tensor]:
    messages = _messages(record)
    try:
        if _GENERATION.search(tokenizer.get_chat_template()):
            out = _render(messages, tokenizer, return_assistant_tokens_mask=True)
            ids, mask = (
                torch.tensor(out["input_ids"], dtype=torch.int32),
                torch.tensor(out["assistant_masks"]),
            )
            return ids, torch.where(mask.bool(), ids, IGNORE)
        return _last_turn(messages, tokenizer, record["id"])
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"encode: example '{record['id']}': the chat template failed: {type(error).__name__}: {error}"
        ) from error


def _last_turn(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> tuple[Tensor, Tensor]:
    ids = _render(messages, tokenizer)["input_ids"]
    last = _last_assistant(messages)
    if last == len(messages):
        return _labeled(ids, len(ids), len(ids))
    prefixes = [
        _render(messages[:last], tokenizer, add_generation_prompt=prompt)["input_ids"] if last else []
        for prompt in (True, False)
    ]
    starts = [_common(ids, prefix) for prefix in prefixes]
    if all(start < len(prefix) for start, prefix in zip(starts, prefixes, strict=True)):
        raise ValueError(
            f"encode: example '{name}': the chat template renders the messages before the answer differently once the "
            "answer follows. Mark the assistant's turns in the template with {% generation %} … {% endgeneration %}."
        )
    end = (
        len(ids)
        if last == len(messages) - 1
        else _common(ids, _render(messages[: last + 1], tokenizer)["input_ids"])
    )
    return _labeled(ids, max(starts), end)


def _render(messages: list[dict[str, Any]], tokenizer: Any, **options: bool) -> Mapping[str, Any]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


def _common(x: Sequence[int], y: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(x, y, strict=False))))


def _labeled(ids: Sequence[int], start: int, end: int) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(ids, dtype=torch.int32)
    place = torch.arange(len(tokens))
    return tokens, torch.where((place >= start) & (place < end), tokens, IGNORE)
