"""The demonstration's data: every question has one passage that states its fact, in other words."""

import re
from collections import Counter

import pytest
import torch

from attrax.demo import recipe

PASSAGES = recipe.passages()
QUESTIONS = recipe.questions()
BY_ID = {row["id"]: row for row in PASSAGES}


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def runs(text: str, n: int) -> set[tuple[str, ...]]:
    tokens = words(text)
    return set(zip(*(tokens[i:] for i in range(n)), strict=False))


def test_sizes() -> None:
    assert 300 <= len(PASSAGES) <= 400
    assert 40 <= len(QUESTIONS) <= 60
    assert all(15 <= len(row["text"].split()) <= 45 for row in PASSAGES)


def test_columns_and_unique_ids() -> None:
    assert all(set(row) == {"id", "text", "topic", "fact"} for row in PASSAGES)
    assert all(set(row) == {"id", "prompt", "completion", "fact", "source"} for row in QUESTIONS)
    for rows, column in ((PASSAGES, "id"), (PASSAGES, "text"), (QUESTIONS, "id"), (QUESTIONS, "prompt")):
        assert len({row[column] for row in rows}) == len(rows)


def test_many_facts_are_stated_once() -> None:
    stated = Counter(row["fact"] for row in PASSAGES if row["fact"] is not None)
    assert 60 <= sum(count == 1 for count in stated.values()) <= 100


@pytest.mark.parametrize("question", QUESTIONS, ids=[row["id"] for row in QUESTIONS])
def test_question_has_one_source(question: dict[str, str]) -> None:
    source = BY_ID[question["source"]]
    assert [row["id"] for row in PASSAGES if row["fact"] == question["fact"]] == [source["id"]]
    assert question["completion"].startswith(" ")
    assert question["completion"] == " " + question["completion"].strip()
    assert not question["prompt"].endswith(" ")
    assert question["completion"].strip() in source["text"]


@pytest.mark.parametrize("question", QUESTIONS, ids=[row["id"] for row in QUESTIONS])
def test_question_is_in_other_words(question: dict[str, str]) -> None:
    text = question["prompt"] + question["completion"]
    assert all(text not in row["text"] for row in PASSAGES)
    assert not runs(text, 4) & runs(BY_ID[question["source"]]["text"], 4)


def test_labels_cover_the_completion_alone() -> None:
    vocabulary = recipe.tokenizer()
    for row, example in zip(QUESTIONS[:10], recipe.encode_questions(vocabulary), strict=False):
        answer = [label for label in example["labels"] if label != recipe.IGNORE]
        assert vocabulary.decode(answer) == row["completion"]
        assert example["input_ids"][-len(answer) :] == answer
        assert example["input_ids"][0] == vocabulary.bos_token_id


def test_padding_has_no_loss() -> None:
    examples = recipe.encode_passages(recipe.tokenizer())[:8]
    batch = recipe.collate(examples)
    padding = batch["attention_mask"] == 0
    assert padding.any()
    assert (batch["labels"][padding] == recipe.IGNORE).all()
    assert torch.equal(batch["labels"][~padding], batch["input_ids"][~padding])


def test_tokenizer_and_model_are_deterministic() -> None:
    first, second = recipe.tokenizer(), recipe.tokenizer()
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == recipe.VOCAB_SIZE
    one, two = (recipe.model(first, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
