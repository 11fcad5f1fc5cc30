"""Query tokens as queries: their scores and gradients add up to those of their query."""

from typing import Any

import pytest
import torch

from attrax.core import collect
from attrax.frontends import causal_lm, live
from attrax.frontends.data.packing import packed
from attrax.frontends.sources.per_token import per_token
from attrax.methods import ekfac, graddot

from .llms import in_float64 as in_float64
from .llms import llm
from .models import TinyLM, documents, seeded
from .oracle import assert_gradients, gradients
from .test_packing import encoded, with_contrast

pytestmark = pytest.mark.usefixtures("unchecked")


def summed(scores, names):
    """Columns of tokens added up by query."""
    owner = [q.split("@")[0] for q in scores.query_ids]
    return torch.stack(
        [scores.values[:, [i for i, o in enumerate(owner) if o == n]].sum(1) for n in names], 1
    )


@pytest.mark.parametrize("method", [graddot, ekfac])
def test_scores_of_tokens_add_up_to_their_query(method, rng, assert_close):
    model = seeded(TinyLM)
    train = live(model, [documents(rng, [5, 7, 4])])
    asked = documents(rng, [6, 3, 5]) | {"example_ids": ("p", "q", "r")}
    asked["labels"][0, :3] = -100
    whole = method(train, live(model, [asked]))
    tokens = method(train, live(model, per_token([asked], rows=4)))
    assert tokens.query_ids == ("p@3", "p@4", "p@5", "q@1", "q@2", "r@1", "r@2", "r@3", "r@4")
    assert_close(summed(tokens, "pqr"), whole.values)


def test_one_token_has_the_gradient_of_its_loss(rng):
    model, asked = seeded(TinyLM), documents(rng, [6, 3]) | {"example_ids": ("p", "q")}
    made = list(per_token([asked]))
    assert [len(b["labels"]) for b in made] == [2, 2, 2, 1]
    single = next(b for b in made if "p@4" in b["example_ids"])
    place = single["example_ids"].index("p@4")
    logit = lambda m, b: -m(b["input_ids"]).log_softmax(-1)[0, 3, b["input_ids"][0, 4]]  # noqa: E731
    right = gradients(model, logit, [{"input_ids": asked["input_ids"][:1]}])
    assert_gradients(gradients(model, lambda m, b: causal_lm()(m, b)[place], [single]), right)


def test_tokens_of_packed_rows_and_contrasts(rng, in_float64):
    model, data = llm("llama"), with_contrast(encoded(rng, 4, 3, 5, prompt=2), encoded(rng, 5, prompt=2))
    (batch,) = packed(data, 10, tokens=20, dtype=torch.float64)
    split = list(per_token([batch], rows=3))
    names = [name for b in split for name in b["example_ids"]]
    assert sorted(names) == sorted(
        ["d0@2", "d0@3", "d0@2:2", "d0@2:3", "d0@2:4", "d1@2", "d2@2", "d2@3", "d2@4"]
    )
    assert all("segment_ids" not in b for b in split)
    whole = gradients(model, causal_lm(), [batch])
    parts: list[Any] = [gradients(model, causal_lm(), [b]) for b in split]
    assert_gradients({n: sum(p[n] for p in parts) for n in whole}, whole)
    assert collect(live(model, split)).examples.ids == tuple(names)


def test_places_are_counted_from_the_first_real_token(rng):
    asked = documents(rng, [4, 4])
    asked["attention_mask"][1, :2], asked["labels"][1, :2] = 0, -100
    asked["example_ids"] = ("p", "q")
    names = [name for b in per_token([asked]) for name in b["example_ids"]]
    assert names == ["p@1", "p@2", "p@3", "q@1"]


def test_ids_made_of_content_and_queries_without_loss(rng):
    asked = documents(rng, [4, 3])
    asked["labels"][1] = -100
    first, *rest = [name for b in per_token([asked]) for name in b["example_ids"]]
    assert len(rest) == 2 and first.endswith("@1") and len(first) == 18


def test_what_cannot_be_split(rng):
    with pytest.raises(ValueError, match="only once"):
        per_token(iter([documents(rng, [3])]))
    with pytest.raises(ValueError, match="rows: got 0"):
        per_token([documents(rng, [3])], rows=0)
