"""Captures of losses whose examples are not the rows of one call: pairs, several calls, rows without padding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Block, content_ids, norms
from attrax.frontends import capture, causal_lm
from attrax.frontends.loop.owners import documents, stacked

from .llms import alone, llm
from .llms import in_float64 as in_float64
from .loops import known
from .models import MLP, LossLM, TinyLM, classes, seeded
from .models import documents as padded
from .oracle import assert_gradients, block_gradients, flat, gradients

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def blocks() -> list[Block]:
    return []


def preference(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """-log sigmoid(log p(chosen) - log p(rejected)) of each pair; all chosen rows come first."""
    likely = -causal_lm()(model, batch)
    chosen, rejected = likely.chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected))


def pair(batch: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    half = len(batch["input_ids"]) // 2
    return {k: v[[i, i + half]] for k, v in batch.items()}


@pytest.mark.parametrize("options", [{}, {"tied": True, "shared_norm": True}, {"how": "nonreentrant"}])
def test_a_pair_of_rows_is_one_example(options, blocks, rng):
    model, batch = seeded(lambda: TinyLM(**options)), padded(rng, [5, 3, 6, 4, 7, 2])
    right = gradients(model, preference, [pair(batch, i) for i in range(3)])
    with capture(model, sinks=[blocks.append], loss="example_mean", examples=stacked(2), strict=True):
        preference(model, batch).mean().backward()
    (block,) = blocks
    assert block.examples.weight is not None and block.examples.weight.tolist() == [1 / 3] * 3
    assert_gradients(block_gradients(block), {n: g / 3 for n, g in right.items()})
    assert torch.allclose(norms(block.grads), flat(right).norm(dim=1) / 3, rtol=1e-10)


def test_the_id_of_a_pair_is_its_content(blocks, rng):
    model, batch = seeded(MLP), classes(rng, 6)
    with capture(model, sinks=[blocks.append], examples=stacked(2)):
        model(batch["x"]).square().sum().backward()
        model(batch["x"][[1, 0, 4, 3]]).square().sum().backward()
        model(batch["x"][[4, 1]]).square().sum().backward()
    first, second, reverse = (b.examples.ids for b in blocks)
    assert second == (first[1], first[0]) and reverse[0] not in first


def test_rows_of_examples_of_several_sizes(blocks, rng):
    """A row that belongs to none, one alone, and three that are one example; modules without a rule as well."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.conv, self.scale = nn.Conv1d(4, 4, 3, groups=2), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.attention(x, x, x)[0] * self.scale
            return self.conv(h.transpose(1, 2)).flatten(1).sum(1)

    x, model = torch.randn(5, 4, 4, generator=rng, dtype=torch.float64), seeded(Model)
    owners = torch.tensor([1, -1, 0, 1, 1])
    loss = lambda m, rows: torch.tanh(m(x[rows]).sum())  # noqa: E731
    right = gradients(model, loss, [[2], [0, 3, 4]])
    with capture(model, sinks=[blocks.append], examples=lambda inputs, rows: owners, loss="sum"):
        out = model(x)
        (torch.tanh(out[2]) + torch.tanh(out[[0, 3, 4]].sum())).backward()
    assert blocks[0].examples.ids[0] == content_ids({"x": x})[2]
    assert_gradients(block_gradients(blocks[0]), right)


def test_documents_in_a_row_without_padding(blocks, rng, in_float64):
    """Hugging Face's models keep documents apart where positions begin anew; c and n are those of the documents."""
    model = llm("llama", "sdpa")
    tokens = [torch.randint(3, 17, (n,), generator=rng) for n in (4, 6, 3)]
    ids = torch.cat(tokens)[None]
    positions = torch.cat([torch.arange(len(t)) for t in tokens])[None]
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    right = gradients(model, causal_lm(), [alone(t) for t in tokens])
    with capture(model, sinks=[blocks.append], examples=documents):
        model(**batch, use_cache=False).loss.backward()
    c, n = known(blocks[0])
    assert n.tolist() == [3, 5, 2] and c.tolist() == pytest.approx([1 / 10] * 3)
    assert_gradients(block_gradients(blocks[0]), {k: g / 10 for k, g in right.items()}, within=1e-7)


def test_what_is_no_map_of_rows_is_refused(rng):
    model, x = seeded(MLP), classes(rng, 3)["x"]
    for wrong in (torch.zeros(2, dtype=torch.long), torch.zeros(3), [0, 1, 2]):
        with (
            capture(model, examples=lambda i, r, w=wrong: w),
            pytest.raises(ValueError, match="examples= retu"),
        ):  # type: ignore
            model(x)
    with capture(model, examples=stacked(2)), pytest.raises(ValueError, match="3 rows; expected a multiple"):
        model(x)
    with capture(model, examples=documents), pytest.raises(ValueError, match="expected position_ids"):
        model(x)


# Several calls before one backward.


def towers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model is called twice; each example's loss multiplies its outputs, so that cross terms count."""
    return (model(batch["x"]) * torch.tanh(model(batch["z"]))).sum(1).square()


@pytest.mark.parametrize("how", [None, "nonreentrant", "reentrant"])
def test_two_calls_of_the_same_examples_are_one_block(how, blocks, rng):
    model = seeded(lambda: MLP(how=how))
    batch = {"x": classes(rng)["x"], "z": classes(rng)["x"]}
    right = gradients(seeded(MLP), towers, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)])
    seen: list[int] = []
    with capture(
        model,
        sinks=[blocks.append],
        after_backward=[lambda event: seen.append(len(event.blocks))],
        ids=lambda inputs: list("abcd"),
        loss="sum",
    ):
        for _ in range(2):
            towers(model, batch).sum().backward()
    assert [b.examples.ids for b in blocks] == [tuple("abcd")] * 2 and seen == [1, 1]
    for block in blocks:
        assert_gradients(block_gradients(block), right)
        assert torch.allclose(norms(block.grads), flat(right).norm(dim=1), rtol=1e-10)


def test_calls_of_different_parts_of_a_model(blocks, rng):
    """Each tower has layers of its own and one that both share."""
    parts: Any = seeded(
        lambda: nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(4, 6), "top": nn.Linear(6, 3)})
    )

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        x, z = (model["top"](torch.tanh(model[k](batch[v]))) for k, v in (("a", "x"), ("b", "z")))
        return (x * z).sum(1)

    batch = {"x": classes(rng)["x"], "z": classes(rng)["x"]}
    right = gradients(parts, loss, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)])
    with capture(parts, sinks=[blocks.append], ids=lambda inputs: list("abcd"), loss="sum"):
        loss(parts, batch).sum().backward()
    assert len(blocks) == 1
    assert_gradients(block_gradients(blocks[0]), right)


def test_calls_of_different_examples_stay_apart(blocks, rng):
    model = seeded(MLP)
    batch = {"x": classes(rng)["x"], "z": classes(rng)["x"]}
    with capture(model, sinks=[blocks.append], loss="sum"):
        towers(model, batch).sum().backward()
        (model(batch["x"]).sum() + 3 * model(batch["x"]).sum()).backward()
    assert [len(b.examples) for b in blocks] == [4, 4, 4]
    assert (
        blocks[0].examples.ids != blocks[1].examples.ids and blocks[2].examples.ids == blocks[1].examples.ids
    )


def test_weights_of_calls_that_differ_are_unknown(blocks, rng):
    """R-Drop and the like: twice the same example. With one weight its counts add up; with two it has none."""
    model, batch = seeded(lambda: LossLM(layers=1)), padded(rng, [5, 3])
    with capture(model, sinks=[blocks.append]):
        for second in (1.0, 3.0):
            (model(**batch)["loss"] + second * model(**batch)["loss"]).backward()
    alike, other = (b.examples for b in blocks)
    assert known(blocks[0])[0].tolist() == pytest.approx([1 / 6] * 2)
    assert alike.tokens is not None and alike.tokens.tolist() == [8, 4] and other.weight is None
