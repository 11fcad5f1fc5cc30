"""Which mean a model's own loss is, told batch by batch, and with it the gradients of sums."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Block, Blocks, targeted
from attrax.frontends import capture, causal_lm
from attrax.frontends.loop import ownloss
from attrax.frontends.model.losses import token_losses

from .loops import known
from .models import VOCAB, TinyLM, documents, seeded
from .oracle import assert_gradients, captured, gradients, unpadded

pytestmark = pytest.mark.usefixtures("unchecked")
KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tokens": lambda terms, n: terms.sum() / n.sum(),
    "rows": lambda terms, n: (terms.sum(1) / n).mean(),
    "sums": lambda terms, n: terms.sum(1).mean(),
    "sum": lambda terms, n: terms.sum(),
    "per position": lambda terms, n: terms.mean(),
}
EQUAL, UNEQUAL, ONE = [4, 4], [5, 3], [6]


class OwnLM(nn.Module):
    """A language model that returns a loss of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lm, self.kind = TinyLM(layers=1), kind

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.lm(input_ids, attention_mask)
        terms = F.cross_entropy(
            logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
        )
        return {"loss": KINDS[self.kind](terms, (labels[:, 1:] != -100).sum(1)), "logits": logits}


def blocks_of(model: nn.Module, batches: list[Any], **options: Any) -> list[Block]:
    blocks: list[Block] = []
    with capture(model, sinks=[blocks.append], **options):
        for batch in batches:
            (0.5 * model(**batch)["loss"]).backward()
            model.zero_grad()
    return blocks


def assert_sums(model: OwnLM, blocks: list[Block], batches: list[Any]) -> None:
    """Gradients of the target "sum" are those of each document's summed loss."""
    for block, batch in zip(blocks, batches, strict=True):
        right = gradients(model.lm, causal_lm(), [unpadded(batch, i) for i in range(len(batch["labels"]))])
        found = captured(targeted(Blocks([block]), "sum"))
        assert_gradients(found, {f"lm.{n}": g for n, g in right.items()})


@pytest.mark.parametrize("first", [EQUAL, UNEQUAL, ONE], ids=str)
@pytest.mark.parametrize("kind", ["tokens", "rows", "sums", "sum"])
def test_the_kind_is_told_by_every_batch(kind, first, rng):
    """A first batch of equal lengths, or of one document, fits several kinds; the next one tells them apart."""
    model = seeded(lambda: OwnLM(kind))
    batches = [documents(rng, lengths) for lengths in (first, [2, 6, 4], [3, 3], [7, 2])]
    assert_sums(model, blocks_of(model, batches), batches)


@pytest.mark.parametrize("declared", ["token_mean", "example_mean", "sum"])
@pytest.mark.parametrize("kind", ["tokens", "rows", "sums", "sum"])
def test_a_declaration_is_held_against_the_value(kind, declared, rng):
    model = seeded(lambda: OwnLM(kind))
    batches = [documents(rng, lengths) for lengths in (EQUAL, UNEQUAL)]
    fits = {"token_mean": ["tokens"], "example_mean": ["rows", "sums"], "sum": ["sum"]}[declared]
    if kind in fits:
        assert_sums(model, blocks_of(model, batches, loss=declared), batches)
        return
    with pytest.raises(ValueError, match="declares another one|so far, as declared"):
        blocks_of(model, batches, loss=declared)


def test_a_loss_that_turns_out_to_be_none_of_these(rng):
    """Padding is counted as well: a token mean for documents as long as the batch, and for no others."""
    model = seeded(lambda: OwnLM("per position"))
    batches = [documents(rng, lengths) for lengths in (EQUAL, UNEQUAL, EQUAL)]
    with pytest.warns(
        RuntimeWarning, match=r"was the mean over its loss terms so far.*as_trained.*Pass loss="
    ):
        blocks = blocks_of(model, batches)
    assert_sums(model, blocks[:1], batches[:1])
    assert [b.examples.weight for b in blocks[1:]] == [None, None]


def test_weights_that_were_a_guess_are_taken_back(rng):
    """All logits are zero, so that every mean has one value; then they are not."""
    model = seeded(lambda: OwnLM("rows"))
    head = model.lm.head.weight
    values = head.detach().clone()
    with capture(model):
        head.data = 0 * values
        model(**documents(rng, UNEQUAL))["loss"].backward()
        head.data = values
        loss = model(**documents(rng, UNEQUAL))["loss"]
        with pytest.raises(ValueError, match="taken for the mean over its loss terms.*it is the mean"):
            loss.backward()


@pytest.mark.parametrize("declared", [None, "token_mean"])
def test_a_coarse_loss_is_not_guessed_at(declared, rng):
    """In bfloat16, means whose values hardly differ have one."""
    model = seeded(lambda: OwnLM("tokens"), dtype=torch.bfloat16)
    model.lm.head.weight.data *= 1e-3
    batches = [documents(rng, UNEQUAL)]
    with capture(model, loss=declared, verify=False, sinks=[(blocks := []).append]):
        if declared is None:
            with pytest.warns(RuntimeWarning, match=r"bfloat16.*too coarse.*token_mean"):
                model(**batches[0])["loss"].backward()
        else:
            model(**batches[0])["loss"].backward()
    if declared is None:
        assert blocks[0].examples.weight is None
    else:
        assert [x.tolist() for x in known(blocks[0])] == [[1 / 6] * 2, [4, 2]]


def test_a_declared_mean_over_examples_of_several_tokens_is_refused(rng):
    """Of their sums, or of their means? Nothing tells, for a loss that is computed outside of the model."""

    def logits(model: Any, batch: Any) -> Tensor:
        return model(**batch)["logits"]

    model, batch = seeded(lambda: OwnLM("tokens")), documents(rng, UNEQUAL)
    with (
        capture(model, loss="example_mean"),
        pytest.raises(ValueError, match="up to 4 loss terms.*sums or of"),
    ):
        logits(model, batch)[:, :-1].logsumexp(-1).sum().backward()


def test_batches_that_tell_nothing_new_cost_nothing(monkeypatch, rng):
    calls: list[int] = []
    monkeypatch.setattr(ownloss, "token_losses", lambda *args: calls.append(1) or token_losses(*args))
    model = seeded(lambda: OwnLM("tokens"))
    blocks_of(model, [documents(rng, EQUAL) for _ in range(4)])
    assert len(calls) == 2, "one look at next-token labels, one at labels of their own position"
    calls.clear()
    blocks_of(model, [documents(rng, lengths) for lengths in (ONE, [4], [3], [5], [2])])
    assert len(calls) == 3
    calls.clear()
    blocks_of(model, [documents(rng, lengths) for lengths in (UNEQUAL, [2, 6], [3, 7], [5, 3])])
    assert len(calls) == 3


def test_classifiers(rng):
    """One label a row: every mean over terms is one over rows."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, VOCAB)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            logits = self.head(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    model, blocks = seeded(Classifier), []
    with capture(model, sinks=[blocks.append]):
        for rows in (1, 4):
            x = torch.randn(rows, 4, generator=rng, dtype=torch.float64)
            model(x=x, labels=torch.arange(rows))["loss"].backward()
            model.zero_grad()
    assert [[x.tolist() for x in known(b)] for b in blocks] == [[[1.0], [1]], [[0.25] * 4, [1] * 4]]


@dataclass
class Returned:
    """What some libraries' models return."""

    loss: Tensor
    logits: Tensor


class As(OwnLM):
    """Its mean loss and logits in some container."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__("tokens")
        self.make = make

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        found = super().forward(input_ids, attention_mask, labels)
        return self.make(found["loss"], found["logits"])


Step = Callable[[Any, Any], Tensor]


def captured_with(model: Any, batch: Any, step: Step, **options: Any) -> list[Block]:
    blocks: list[Block] = []
    with capture(model, sinks=[blocks.append], **options):
        step(model(**batch), batch).backward()
    return blocks


@pytest.mark.parametrize("options", [{}, {"loss": "token_mean"}], ids=str)
@pytest.mark.parametrize(
    "make", [Returned, lambda *x: list(x), lambda *x: x], ids=["dataclass", "list", "tuple"]
)
def test_what_divides_a_loss_is_seen_however_it_is_returned(make, options, rng):
    model, batch = seeded(lambda: As(make)), documents(rng, UNEQUAL)

    def step(out: Any, _: Any) -> Tensor:
        assert type(out) is type(make(out, out))
        return (out.loss if isinstance(out, Returned) else out[0]) / 4

    assert_sums(model, captured_with(model, batch, step, **options), [batch])


@pytest.mark.parametrize("by", [0.25, 8.0])
def test_a_loss_that_the_loop_scales_in_place(by, rng):
    """Times 8, the mean of two documents of 4 terms has the value of a sum."""
    model, batch = seeded(lambda: OwnLM("tokens")), documents(rng, [5, 5])
    blocks = captured_with(model, batch, lambda out, _: out["loss"].mul_(by))
    assert_sums(model, blocks, [batch])


def test_a_declared_loss_of_the_loop_beside_the_models_own(rng):
    """It is what the gradient is of; the model's own, times 0, changes nothing."""
    model, batch = seeded(lambda: OwnLM("sum")), documents(rng, UNEQUAL)

    def step(out: Any, batch: Any) -> Tensor:
        logits, wanted = out["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        return 0 * out["loss"] + F.cross_entropy(logits, wanted, ignore_index=-100)

    assert_sums(model, captured_with(model, batch, step, loss="token_mean"), [batch])


def test_the_logits_of_a_model_are_those_of_its_loss(rng):
    """Their gradient can be asked for and kept, as without a capture."""
    model, batch = seeded(lambda: OwnLM("tokens")), documents(rng, UNEQUAL)
    plain = model(**batch)
    (right,) = torch.autograd.grad(plain["loss"], plain["logits"])
    blocks: list[Block] = []
    with capture(model, sinks=[blocks.append]):
        out = model(**batch)
        (asked,) = torch.autograd.grad(out["loss"], out["logits"], retain_graph=True)
        out["logits"].retain_grad()
        out["loss"].backward()
    assert torch.equal(asked, right) and torch.equal(out["logits"].grad, right)
    assert_sums(model, blocks, [batch])


class TwiceLM(OwnLM):
    """Its logits go into its loss in two places."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.lm(input_ids, attention_mask)
        halves = [logits[:, :-1].transpose(1, 2) for _ in range(2)]
        wanted = labels[:, 1:]
        terms = [F.cross_entropy(x, wanted, ignore_index=-100, reduction="sum") for x in halves]
        return {"loss": (terms[0] + terms[1]) / (2 * (wanted != -100).sum()), "logits": logits}


@pytest.mark.parametrize("outside", [0.0, 0.5])
def test_all_uses_of_the_logits_in_a_loss_are_its_own(outside, rng):
    """And what the loop adds is not."""
    model, batch = seeded(lambda: TwiceLM("tokens")), documents(rng, UNEQUAL)
    (block,) = captured_with(
        model, batch, lambda out, _: out["loss"] + outside * out["logits"].square().sum()
    )
    if outside:
        assert block.examples.weight is None
    else:
        assert_sums(model, [block], [batch])
