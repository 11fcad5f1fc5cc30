"""Live sources on packed rows: each document is its own example, whatever it shares a row with."""

import pytest
import torch

from attrax.core import Factorized, collect, norms
from attrax.frontends import causal_lm, live
from attrax.frontends.data.packing import packed
from attrax.methods import graddot

from .llms import alone, llm
from .llms import in_float64 as in_float64
from .oracle import assert_gradients, captured, flat, gradients
from .test_packing import encoded, with_contrast

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [7, 12, 30])
def test_documents_in_rows_are_what_they_are_alone(family, length, rng, in_float64):
    model, data = llm(family), encoded(rng, 5, 3, 6, 2, 7)
    source = live(model, packed(data, length, tokens=64, dtype=torch.float64), strict=True)
    block = collect(source)
    singles = {name: alone(t) for name, t in zip(data.ids, data.tokens, strict=True)}
    right = gradients(model, causal_lm(), [singles[name] for name in block.examples.ids])
    assert_gradients(captured(source), right)
    assert torch.allclose(norms(block.grads), flat(right).norm(dim=1), rtol=1e-10)
    assert max(leaf.g.shape[1] for leaf in block.grads.values() if isinstance(leaf, Factorized)) <= 8


def test_a_contrast_is_one_example(rng, in_float64):
    model, data = llm("llama", tied=False), with_contrast(encoded(rng, 5, 3), encoded(rng, 7))
    source = live(model, packed(data, 15, dtype=torch.float64))
    first, second = (gradients(model, causal_lm(), [alone(t)]) for t, _ in data.documents(0))
    other = gradients(model, causal_lm(), [alone(data.tokens[1])])
    assert_gradients(captured(source), {n: torch.cat([first[n] - second[n], other[n]]) for n in first})


def test_scores_do_not_depend_on_packing(rng, in_float64):
    model, data = llm("gpt2"), encoded(rng, 5, 3, 6, 2, 7)
    found = [graddot(s, s) for s in (live(model, packed(data, n, dtype=torch.float64)) for n in (7, 23))]
    order = [found[1].ids.index(i) for i in found[0].ids]
    assert torch.allclose(found[0].values, found[1].values[order][:, order], rtol=1e-10)
