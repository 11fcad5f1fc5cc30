"""Packed rows: every document's loss and gradient are what they are alone; what goes where; what does not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attrax.frontends import causal_lm
from attrax.frontends.data.examples import Encoded
from attrax.frontends.data.packing import block_diagonal, first_fit, packed

from .llms import VOCAB, alone, llm
from .llms import in_float64 as in_float64
from .oracle import assert_gradients, gradients

pytestmark = pytest.mark.usefixtures("unchecked")


def encoded(rng, *lengths, prompt=0) -> Encoded:
    """Random documents "d0", "d1", …, without loss on the first `prompt` tokens."""
    tokens = [torch.randint(1, VOCAB, (n,), generator=rng, dtype=torch.int32) for n in lengths]
    labels = [torch.where(torch.arange(len(t)) < prompt, -100, t) for t in tokens]
    return Encoded(tuple(f"d{i}" for i in range(len(lengths))), tuple(tokens), tuple(labels))


def with_contrast(data: Encoded, other: Encoded) -> Encoded:
    """The first example, minus a document."""
    return replace(data, contrasts={data.ids[0]: (other.tokens[0], other.labels[0])})


def packed_gradients(model, made):
    """Losses and gradients by example id."""
    found = {}
    for batch in made:
        for i, name in enumerate(batch["example_ids"]):
            loss = lambda m, b, i=i: causal_lm()(m, b)[i]  # noqa: E731
            found[name] = (float(loss(model, batch).detach()), gradients(model, loss, [batch]))
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("attention", "dtype"), [("eager", torch.float64), ("sdpa", torch.float64), ("sdpa", torch.bool)]
)
def test_a_document_in_a_row_is_what_it_is_alone(family, attention, dtype, rng, in_float64):
    model, data = llm(family, attention), encoded(rng, 5, 3, 6, 2, 7)
    found = packed_gradients(model, packed(data, 12, tokens=24, dtype=dtype))
    assert found.keys() == set(data.ids)
    for name, tokens in zip(data.ids, data.tokens, strict=True):
        loss, grads = found[name]
        assert loss == pytest.approx(float(causal_lm()(model, alone(tokens)).detach()), rel=1e-12)
        assert_gradients(grads, gradients(model, causal_lm(), [alone(tokens)]))


def test_a_contrast_shares_the_row_and_is_subtracted(rng, in_float64):
    model, data = llm("llama"), encoded(rng, 5, 3)
    data = with_contrast(data, encoded(rng, 7))
    made = packed(data, 15, dtype=torch.float64)
    loss, grads = packed_gradients(model, made)["d0"]
    both = [alone(tokens) for tokens, _ in data.documents(0)]
    first, second = (float(causal_lm()(model, b).detach()) for b in both)
    assert loss == pytest.approx(first - second, rel=1e-12)
    right = {n: (g[0] - g[1])[None] for n, g in gradients(model, causal_lm(), both).items()}
    assert_gradients(grads, right)
    assert next(iter(made))["example_ids"] == ("d0", "d1") and causal_lm().tokens(
        next(iter(made))
    ).tolist() == [
        10,
        2,
    ]


def test_rows_say_what_they_hold(rng):
    data = encoded(rng, 3, 4, 2, prompt=1)
    batch = next(iter(packed(data, 6, pad_id=9)))
    assert batch["example_ids"] == ("d0", "d2", "d1") and "token_weights" not in batch
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, -1, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    t0, t1, t2 = (t.tolist() for t in data.tokens)
    assert batch["input_ids"].tolist() == [[*t0, *t2, 9], [*t1, 9, 9]]
    assert batch["labels"].tolist() == [[-100, *t0[1:], -100, t2[1], -100], [-100, *t1[1:], -100, -100]]
    assert batch["attention_mask"].shape == (2, 1, 6, 6) and batch["attention_mask"].dtype == torch.float32


def test_batches_keep_the_budget_and_every_example_and_repeat(rng):
    data = encoded(rng, *(1 + 7 * i % 11 for i in range(40)))
    made = packed(data, 12, tokens=40)
    seen = [batch["example_ids"] for batch in made]
    assert len(made) == len(seen) and seen == [batch["example_ids"] for batch in made]
    assert sorted(name for ids in seen for name in ids) == sorted(data.ids)
    assert max(batch["input_ids"].shape[0] for batch in made) == 3
    assert all(batch["input_ids"].shape[0] == 1 for batch in packed(data, 12, tokens=8))


@given(st.lists(st.integers(0, 9), max_size=30))
def test_first_fit(sizes):
    boxes = first_fit(sizes, 7)
    assert sorted(i for box in boxes for i in box) == [i for i, size in enumerate(sizes) if size <= 7]
    room = [7] * len(sizes)
    where = {i: k for k, box in enumerate(boxes) for i in box}
    for i in sorted(where):
        assert where[i] == next(k for k, left in enumerate(room) if left >= sizes[i])
        room[where[i]] -= sizes[i]


def test_attention_stays_within_documents():
    seen = block_diagonal(torch.tensor([[0, 0, 1, -1]]), torch.bool)[0, 0]
    assert seen.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]
    added = block_diagonal(torch.tensor([[0, 0, 1, -1]]), torch.bfloat16)[0, 0]
    assert added.dtype == torch.bfloat16 and torch.equal(added == 0, seen) and added.isfinite().all()


def test_what_no_row_can_hold(rng):
    data = encoded(rng, 3, 9, 4)
    with pytest.raises(
        ValueError, match=r"1 of 3 examples are overlong: 'd1' \(9 tokens, rows of 8\).*Raise length"
    ):
        packed(data, 8)
    made = packed(data, 8, overlong="skip")
    assert [(s.id, s.kind) for s in made.skipped] == [("d1", "overlong")]
    assert next(iter(made))["example_ids"] == ("d0", "d2")
    with pytest.raises(ValueError, match="3 of 3"):
        packed(data, 2, overlong="skip")
    with pytest.raises(ValueError, match=r"'d0' \(12 tokens"):
        packed(with_contrast(data, encoded(rng, 9)), 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 0}, "length=0"),
        ({"tokens": 0}, "tokens=0"),
        ({"dtype": torch.long}, "expected the model's dtype"),
        ({"overlong": "truncate"}, "expected 'error' or 'skip'"),
    ],
)
def test_options_without_sense(rng, options: Any, said):
    with pytest.raises(ValueError, match=said):
        packed(encoded(rng, 3), **{"length": 8} | options)
