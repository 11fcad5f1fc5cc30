"""Target spans and contrasts: what of a record carries the loss, the one gradient that comes out, and every mistake."""

from typing import Any

import pytest
import torch

from attrax.frontends import causal_lm
from attrax.frontends.data.examples import batches, encode, loss_tokens, read_examples
from attrax.frontends.data.tokens import IGNORE, aim_of, tokenize

from .llms import alone
from .models import TinyLM, seeded
from .oracle import assert_gradients, gradients
from .test_data import CHAT, answer, lines, make_tokenizer

MERGES = (("Ġ", "r"), ("Ġr", "o"), ("Ġro", "p"), ("Ġrop", "e"), ("i", "n"))


@pytest.fixture
def tokenizer():
    return make_tokenizer("<s> $A", merges=MERGES)


def asked(**columns) -> dict[str, Any]:
    return {"id": "q", "prompt": "they sell", "completion": " rope in coils"} | columns


@pytest.mark.parametrize(
    ("target", "carries"),
    [
        ("rope", " rope"),
        (" rope", " rope"),
        ("rope in", " rope in"),
        ("p", " rope"),
        ("coils", "coils"),
        ([1, 5], " rope"),
        ((6, 8), "in"),
        ([0, 14], " rope in coils"),
    ],
)
def test_only_the_tokens_of_the_target_carry_loss(tokenizer, target, carries):
    whole, all_labels = tokenize(asked(), tokenizer)
    tokens, labels = tokenize(asked(target=target), tokenizer)
    assert torch.equal(tokens, whole) and answer(tokenizer, tokens, labels) == carries
    assert ((labels == all_labels) | (labels == IGNORE)).all()


def test_targets_of_texts_and_beyond_ascii(tokenizer):
    tokens, labels = tokenize({"id": "a", "text": "näh rope 火 end", "target": "火"}, tokenizer)
    assert answer(tokenizer, tokens, labels) == "火" and loss_tokens(labels) == 3
    tokens, labels = tokenize({"id": "a", "text": "in in", "target": [3, 5]}, tokenizer)
    assert answer(tokenizer, tokens, labels) == "in"


def test_a_target_in_the_prompt_is_none(tokenizer):
    with pytest.raises(ValueError, match="'q': target 'sell' is not in ' rope in coils'"):
        tokenize(asked(target="sell"), tokenizer)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"target": "tar"}, "target 'tar' is not in"),
        ({"target": "o"}, "target 'o' occurs 2 times in"),
        ({"completion": "aaa", "target": "aa"}, "target 'aa' occurs 2 times in"),
        ({"target": ""}, "target is empty"),
        ({"target": [3, 3]}, r"target \[3, 3\] is not a part of 14 characters"),
        ({"target": [3, 15]}, "not a part of 14"),
        ({"target": [-2, 3]}, "not a part of 14"),
        ({"target": [1.0, 3]}, "not a part of 14"),
        ({"target": 7}, "target 7 is not a part of 14 characters.*rename it"),
        ({"contrast": ""}, "column 'contrast' is empty; a contrast compares two"),
        ({"contrast": " tar", "completion": ""}, "column 'completion' is empty"),
        ({"contrast": 7}, "column 'contrast' holds int 7; expected a string"),
        ({"contrast": " tar", "target": "rope"}, "there is a 'target' too"),
    ],
)
def test_mistakes_name_the_example(tokenizer, columns, said):
    with pytest.raises(ValueError, match=f"encode: example 'q': .*{said}"):
        encode([asked(**columns)], tokenizer, max_length=64)


def test_columns_of_another_form(tokenizer):
    with pytest.raises(ValueError, match="'contrast' is for records of prompt and completion"):
        encode([{"id": "q", "text": "x", "contrast": "y"}], tokenizer, max_length=64)
    with pytest.raises(ValueError, match="'target' is for records of .* not of a chat"):
        encode([{"id": "q", "messages": CHAT, "target": "yes"}], make_tokenizer(), max_length=64)


def test_a_target_needs_offsets(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match="Load the fast tokenizer"):
        tokenize(asked(target="rope"), tokenizer)


def test_ids_tell_targets_and_contrasts_apart(tmp_path):
    rows = [{"prompt": "a", "completion": "bc"} | more for more in ({}, {"target": "b"}, {"contrast": "d"})]
    ids = [record["id"] for record in read_examples(lines(tmp_path / "q.jsonl", rows))]
    assert len({name.split("-")[0] for name in ids}) == 3


def test_a_contrast_is_one_example_with_the_difference_of_two_losses():
    """Sides of unequal length, among examples without a contrast; the gradient is the difference of two gradients."""
    tokenizer, model = make_tokenizer("<s> $A"), seeded(lambda: TinyLM(d=4))
    records = [
        {"id": "plain", "prompt": "a", "completion": "bcd"},
        {"id": "q", "prompt": "ab", "completion": "c", "contrast": "defg"},
        {"id": "r", "prompt": "", "completion": "abcdef", "contrast": "g"},
    ]
    small = encode(records, tokenizer, max_length=12)
    fold = lambda x: torch.where(x < 0, x, x % 11)  # noqa: E731
    (batch,) = batches(small, tokens=64)
    batch |= {k: fold(batch[k]) for k in ("input_ids", "labels")}
    assert batch["example_ids"] == ("q", "r", "plain") and batch["input_ids"].shape[0] == 5
    losses = causal_lm()(model, batch)
    for e, name in enumerate(batch["example_ids"]):
        sides = [alone(fold(t), fold(y)) for t, y in small.documents(small.ids.index(name))]
        right = [causal_lm()(model, side).detach() for side in sides]
        torch.testing.assert_close(losses[e], (right[0] - sum(right[1:])).squeeze())
        grads = gradients(model, causal_lm(), sides)
        expected = {n: (g[0] - g[1:].sum(0))[None] for n, g in grads.items()}
        assert_gradients(gradients(model, lambda m, b, e=e: causal_lm()(m, b)[e], [batch]), expected)
    assert causal_lm().tokens(batch).tolist() == [5, 7, 3]


def test_batches_count_both_rows_of_a_contrast(tokenizer):
    records = [asked(id=str(i), contrast=" in" * i) if i % 2 else asked(id=str(i)) for i in range(12)]
    data = encode(records, tokenizer, max_length=64)
    made = list(batches(data, tokens=90))
    assert sorted(name for b in made for name in b["example_ids"]) == sorted(data.ids)
    for batch in made:
        rows, width = batch["input_ids"].shape
        assert rows * width <= 90 or len(batch["example_ids"]) == 1
        if "segment_ids" in batch:
            owners = [int(row[row >= 0].unique()) for row in batch["segment_ids"]]
            assert owners == sorted(owners) and set(owners) == set(range(len(batch["example_ids"])))
            assert torch.equal(batch["segment_ids"] >= 0, batch["attention_mask"] == 1)
    assert any("segment_ids" not in batch for batch in batches(data.only(["0", "2"]), tokens=90))
    assert [len(b["input_ids"]) for b in batches(data, tokens=1)].count(2) == 6


def test_sides_that_do_not_fit(tokenizer):
    records = [asked(contrast=" and" * 20), asked(id="p")]
    with pytest.raises(ValueError, match=r"'q' \(\d+ tokens, 40 allowed\)"):
        encode(records, tokenizer, max_length=40)
    assert encode(records, tokenizer, max_length=40, overlong="skip").ids == ("p",)
    cut = encode(records, tokenizer, max_length=40, overlong="truncate")
    assert cut.truncated == ("q",) and len(cut.contrasts["q"][0]) == 40


def test_half_a_contrast_is_never_scored():
    """A first token without a token before it is not predicted; then the other side would be scored alone."""
    bare = make_tokenizer("")
    for sides in ({"completion": "x", "contrast": "xyz"}, {"completion": "xyz", "contrast": "x"}):
        with pytest.raises(ValueError, match="1 of 1 examples are empty: 'q'"):
            encode([asked(prompt="", **sides)], bare, max_length=9, empty="keep")
    kept = encode([asked(prompt="", completion="x", contrast="y")], bare, max_length=9, empty="keep")
    assert kept.empty == ("q",) and "1 without a token to predict (they score 0)" in repr(kept)
    assert kept.only(["q"]).empty == ("q",)


def test_a_prompt_that_fills_the_length_leaves_no_contrast(tokenizer):
    start = int((tokenize(asked(), tokenizer)[1] != IGNORE).nonzero()[0])

    def cut(**more):
        return encode([asked(contrast=" in")], tokenizer, max_length=start, overlong="truncate", **more)

    assert cut(empty="keep").empty == ("q",)
    with pytest.raises(ValueError, match=f"'q' \\(what comes before the loss fills all {start} tokens"):
        cut()


def test_what_is_said_and_remembered_of_contrasts(tokenizer):
    data = encode([asked(contrast=" in"), asked(id="p")], tokenizer, max_length=64)
    assert "1 with a contrast" in repr(data) and data.size == sum(map(len, data.tokens)) + len(
        data.contrasts["q"][0]
    )
    other = encode([asked(contrast=" on"), asked(id="p")], tokenizer, max_length=64)
    assert data.digest() != other.digest() != data.only(["p"]).digest()
    assert data.only(["q"]).contrasts.keys() == {"q"} and not data.only(["p"]).contrasts
    assert aim_of(asked(target="rope")) == "target: 'rope'" and aim_of(asked()) == ""
