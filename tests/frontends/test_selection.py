"""Online selection: `.grad` is what a backward on the kept examples alone gives, and decisions follow the scores."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Block, Directions, GradTree, Projection, Recorded, projected, stored
from attrax.frontends import (
    capture,
    causal_lm,
    classification,
    record,
    select,
    selections,
    to_pandas,
)
from attrax.frontends.loop.selection import Decision
from attrax.methods import drop_fraction, drop_negative, greats

from .llms import alone, in_float64, llm  # noqa: F401
from .loops import lm_loss, mean_ce, own_loss, sum_ce
from .models import MLP, LossLM, classes, documents, seeded
from .oracle import assert_gradients, flat, one_by_one, row
from .test_trainer import QUERIES, STEPS, doubled, trainer

pytestmark = pytest.mark.usefixtures("unchecked")
HALF = drop_fraction(0.5)
CLASSIFY = classification()


class WindowLM(LossLM):
    """The mean is over the documents of a whole accumulation window, as Hugging Face's Trainer asks for."""

    def forward(self, num_items_in_batch: int | None = None, **batch: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits, labels = self.lm(batch["input_ids"], batch["attention_mask"]), batch["labels"]
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": total / (num_items_in_batch or (labels[:, 1:] != -100).sum()), "logits": logits}


def only(batch: dict[str, Any], keep: Iterable[bool]) -> dict[str, Any]:
    """Some rows of a batch."""
    rows = torch.tensor(list(keep))
    return {k: v[rows] if isinstance(v, Tensor) else v for k, v in batch.items()}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def backward(model: nn.Module, total: Callable[[], Tensor]) -> dict[str, Tensor]:
    """What `.grad` holds after one backward."""
    model.zero_grad()
    total().backward()
    found = grads(model)
    model.zero_grad()
    return found


def selecting(
    model: nn.Module,
    target: Any,
    loss: Any,
    rule: Any = HALF,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, list[Decision]]:
    """A capture that selects, and its decisions."""
    decisions: list[Decision] = []
    keep = select(target, rule, loss=loss, sink=decisions.append, **options)
    return capture(model, after_backward=[keep], **how or {}), decisions


class InLM:
    """The library's loss of documents for the model inside a `LossLM`, which counts its loss terms."""

    def __init__(self) -> None:
        self.tokens = causal_lm().tokens

    def __call__(self, model: Any, batch: Any) -> Tensor:
        return causal_lm()(model.lm, batch)


def terms(batch: dict[str, Tensor]) -> int:
    """Number of loss terms."""
    return int((batch["labels"][:, 1:] != -100).sum())


def kept_of(decisions: list[Decision]) -> list[bool]:
    (decision,) = decisions
    return list(decision.keep)


def test_scores_are_products_with_the_gradient_of_the_mean_target_loss(rng):
    model, batch, target = (
        seeded(lambda: LossLM(tied=True)),
        documents(rng, [5, 3, 6, 4]),
        documents(rng, [4, 6]),
    )
    g, v = (flat(one_by_one(model, b, lm_loss)) for b in (batch, target))
    right = g @ v.sum(0) / terms(batch) / terms(target)
    running, decisions = selecting(model, target, InLM())
    with running:
        own_loss(model, batch).backward()
    assert torch.tensor(decisions[0].scores).double() == pytest.approx(right, rel=1e-6)
    expected = torch.ones(4, dtype=torch.bool)
    expected[right.argsort()[:2]] = False
    assert kept_of(decisions) == expected.tolist()
    assert set(decisions[0].kept) | set(decisions[0].dropped) == set(decisions[0].ids)


LOOPS = {
    "sum_fixed": (MLP, sum_ce, "sum", "fixed", lambda B, k: 1.0),
    "mean_fixed": (MLP, mean_ce, "example_mean", "fixed", lambda B, k: k / B),
    "mean_examples": (MLP, mean_ce, "example_mean", "examples", lambda B, k: 1.0),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_batch_of_classes(kind, rng):
    build, loss, how, denominator, share = LOOPS[kind]
    model, batch, target = seeded(build), classes(rng, 6), classes(rng, 1)
    running, decisions = selecting(model, target, CLASSIFY, how={"loss": how}, denominator=denominator)
    with running:
        loss(model, batch).backward()
    got, keep = grads(model), kept_of(decisions)
    right = backward(model, lambda: loss(model, only(batch, keep)) * share(6, sum(keep)))
    assert_gradients(got, right)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1, 40], ids=["factored", "built"])
def test_a_token_mean_counts_the_kept_tokens(tied, rows, rng):
    """Lengths differ, so that the number of examples is not the number of tokens; every form of leaf is met."""
    model, batch = seeded(lambda: LossLM(tied=tied)), documents(rng, [5, 2, 6, 3, 2])
    target = documents(rng, [8] * rows)
    running, decisions = selecting(model, target, lm_loss, denominator="tokens")
    with running:
        own_loss(model, batch).backward()
    got = grads(model)
    assert_gradients(got, backward(model, lambda: own_loss(model, only(batch, kept_of(decisions)))))


@pytest.mark.parametrize("denominator", ["fixed", "tokens"])
def test_other_losses_and_regularizers_stay_whole(denominator, rng):
    """One loss with a penalty, on top of the gradient of another batch."""
    model, target = seeded(lambda: LossLM(tied=True)), documents(rng, [6])
    batch, other = documents(rng, [5, 2, 6, 3]), documents(rng, [4, 4])
    running, decisions = selecting(model, target, lm_loss, how={"verify": False}, denominator=denominator)

    def penalty() -> Any:
        return sum(p.square().sum() for p in model.parameters())

    own_loss(model, other).backward()
    with running:
        (own_loss(model, batch) + penalty()).backward()
    got, kept = grads(model), only(batch, kept_of(decisions))
    share = terms(kept) / terms(batch) if denominator == "fixed" else 1.0
    right = lambda: own_loss(model, kept) * share + penalty() + own_loss(model, other)  # noqa: E731
    assert_gradients(got, backward(model, right))


def accumulated(model: nn.Module, parts: list[Any], loss: Any) -> dict[str, Tensor]:
    return backward(model, lambda: sum(loss(model, part) for part in parts))  # type: ignore[arg-type, return-value]


def test_accumulated_means_are_each_of_their_own_batch(rng):
    """A loop that divides every batch's mean by the number of batches."""
    model, target = seeded(LossLM), documents(rng, [6])
    batches = [documents(rng, [5, 2, 6, 3]), documents(rng, [3, 7])]
    running, decisions = selecting(model, target, lm_loss, denominator="tokens")
    half = lambda m, b: own_loss(m, b) / 2  # noqa: E731
    with running:
        for batch in batches:
            half(model, batch).backward()
    got = grads(model)
    kept = [only(b, d.keep) for b, d in zip(batches, decisions, strict=True)]
    assert_gradients(got, accumulated(model, kept, half))


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_mean_over_the_window_counts_what_the_whole_window_keeps(scope, rng):
    """Twice, so that the second window starts anew; gradients are thrown away before the first."""
    model, target = seeded(lambda: WindowLM(layers=1)), documents(rng, [6])
    windows = [[documents(rng, x) for x in ([5, 2, 6, 3], [3, 7, 2], [9, 2])] for _ in range(3)]
    running, decisions = selecting(model, target, lm_loss, denominator="tokens", scope=scope)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with running:
        for k, window in enumerate(windows):
            decisions.clear()
            for batch in window:
                model(**batch, num_items_in_batch=sum(map(terms, window)))["loss"].backward()
            got = grads(model)
            if k == 0:
                model.zero_grad()
                continue
            kept = [
                {d.layer: only(b, d.keep) for d in decisions if d.micro == m} for m, b in of_micro(k, window)
            ]
            for layer in kept[0]:
                total = sum(terms(part[layer]) for part in kept)
                with running.paused():
                    spanned = lambda m, b, total=total: m(**b, num_items_in_batch=total)["loss"]  # noqa: E731
                    right = rerun(model, [part[layer] for part in kept], spanned)
                assert_layer(layer, got, right)
            moving.step()
            moving.zero_grad()


def of_micro(k: int, window: list[Any]) -> list[tuple[int, Any]]:
    """The first step holds the window that was thrown away as well."""
    return list(enumerate(window, len(window) if k == 1 else 0))


def rerun(model: nn.Module, parts: list[Any], loss: Any) -> dict[str, Tensor]:
    """The gradient on parts of the data, by a copy that no hook sees."""
    return accumulated(copy.deepcopy(model), parts, loss)


def assert_layer(layer: str, got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The gradients of one layer ("": of all)."""
    mine = lambda n: not layer or n.rpartition(".")[0] == layer  # noqa: E731
    assert any(mine(n) for n in right)
    assert_gradients({n: g for n, g in got.items() if mine(n)}, {n: g for n, g in right.items() if mine(n)})


@pytest.mark.parametrize("denominator", ["fixed", "tokens"])
def test_each_layer_keeps_its_own_set(denominator, rng):
    model, batch = seeded(lambda: LossLM(tied=True, layers=1)), documents(rng, [5, 2, 6, 3, 4, 7])
    target = documents(rng, [8])
    g, v = one_by_one(model, batch, lm_loss), one_by_one(model, target, lm_loss)
    running, decisions = selecting(model, target, InLM(), denominator=denominator, scope="layer")
    with running:
        own_loss(model, batch).backward()
    got = grads(model)
    assert len({d.keep for d in decisions}) > 1
    assert {d.layer for d in decisions} == {n.rpartition(".")[0] for n in got}
    for d in decisions:
        mine = [n for n in g if n.rpartition(".")[0] == d.layer]
        scores = sum((g[n].flatten(1) @ v[n].flatten(1).T)[:, 0] for n in mine) / terms(batch) / terms(target)
        assert torch.tensor(d.scores).double() == pytest.approx(scores, rel=1e-5, abs=1e-12)
        kept = only(batch, d.keep)
        share = terms(kept) / terms(batch) if denominator == "fixed" else 1.0
        assert_layer(d.layer, got, backward(model, lambda k=kept, s=share: own_loss(model, k) * s))


def test_clipping_comes_after(rng):
    model, batch = seeded(MLP), classes(rng, 6)
    running, decisions = selecting(model, classes(rng, 1), CLASSIFY, how={"loss": "sum"})
    with running:
        sum_ce(model, batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    got, right = grads(model), backward(model, lambda: sum_ce(model, only(batch, kept_of(decisions))))
    assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in right.values()]).norm()))
    assert_gradients(got, {n: g * 0.01 / (norm + 1e-6) for n, g in right.items()})


@pytest.mark.parametrize("scaled", [False, True])
def test_recorded_steps_use_the_kept_examples_of_the_blocks(scaled, rng):
    """Selection, accumulation, loss scaling, clipping and records at once."""
    model, steps, blocks = seeded(MLP), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1, enabled=scaled)
    moving = torch.optim.AdamW(model.parameters(), lr=0.05)

    def weigh(inputs: Any, rows: int) -> Any:
        return torch.full((rows,), scaler.get_scale() / rows / 2, dtype=torch.float64), None

    how = {"sinks": [blocks.append], "loss": weigh, "scaler": scaler, "trajectory": record(steps.append)}
    running, decisions = selecting(model, classes(rng, 3), CLASSIFY, how=how)
    norms: list[float] = []
    with running:
        for k in range(6):
            scaler.scale(mean_ce(model, classes(rng, 6)) / 2).backward()
            if k % 2:
                scaler.unscale_(moving)
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
                scaler.step(moving)
                scaler.update()
                moving.zero_grad()
    run = Recorded(steps, blocks)
    for number, norm in zip(run.steps, norms, strict=True):
        step, total = run.step(number), dict[str, Tensor]()
        assert step.clip is not None and step.clip.norm == pytest.approx(norm) and step.clip.coefficient < 1
        for examples, leaves in run.gradients(number).map(lambda name, leaf, _: leaf):
            (kept,) = (d.kept for d in decisions if (d.step, d.micro) == (number, examples.micro))
            assert examples.ids == kept
            for n, g in stored(GradTree(leaves)).items():
                total[n] = total.get(n, 0) + step.clip.coefficient * g.sum(0)
        assert_gradients(total, step.gradients, 1e-9)


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("loop", ["fixed", "examples", "tokens", "window"])
def test_blocks_add_up_to_the_gradient_that_is_used(loop, scope, rng):
    """Two backwards a step; a mean over the window weighs the first anew when the second is over."""
    build, how = (WindowLM if loop == "window" else LossLM), "tokens" if loop == "window" else loop
    model, steps, blocks = seeded(build), [], []
    decisions: list[Decision] = []
    target = documents(rng, [6])
    keep = select(target, HALF, loss=InLM(), scope=scope, denominator=how, sink=decisions.append)  # type: ignore
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, sinks=[blocks.append], after_backward=[keep], trajectory=record(steps.append)):
        for _ in range(2):
            batches = [documents(rng, [5, 2, 6, 3]), documents(rng, [4, 6])]
            count = sum(terms(batch) for batch in batches)
            for batch in batches:
                own_loss(
                    model, batch | ({"num_items_in_batch": count} if loop == "window" else {})
                ).backward()
            moving.step()
            moving.zero_grad()
    run = Recorded(steps, blocks)
    for number in run.steps:
        of_step = [d for d in decisions if d.step == number]
        total, weight = dict[str, Tensor](), 0.0
        for examples, leaves in run.gradients(number).map(lambda name, leaf, _: leaf):
            used = {i for d in of_step if d.micro == examples.micro for i in d.kept}
            assert set(examples.ids) == used
            if scope == "global":
                weight += float((examples.weight * examples.tokens).sum())
            alike = scope == "global" or len({d.keep for d in of_step if d.micro == examples.micro}) == 1
            assert alike or examples.weight is None
            for n, g in stored(GradTree(leaves)).items():
                total[n] = total.get(n, 0) + g.sum(0)
        assert_gradients(total, run.step(number).gradients)
        if scope == "global" and how == "tokens":
            assert weight == pytest.approx(1 if loop == "window" else 2)


def test_what_a_transform_makes_of_the_examples_that_are_kept(rng):
    """Layers with one input decide apart, and are projected together."""
    model, batch, target = seeded(LossLM), documents(rng, [5, 2, 6, 3]), documents(rng, [6])
    change = projected(Projection(4, seed=0))

    def blocks(**how: Any) -> Block:
        found: list[Block] = []
        keep = select(target, HALF, loss=InLM(), scope="layer")
        with capture(model, sinks=[found.append], after_backward=[keep], **how):
            own_loss(model, batch).backward()
        model.zero_grad()
        return found[0]

    whole, small = blocks(), blocks(transform=change)
    for name, leaf in whole.grads.items():
        assert torch.equal(change(name, leaf).w, small.grads[name].w)  # type: ignore[union-attr]


def test_two_selections_of_one_backward_are_refused(rng):
    model, keep = seeded(MLP), select(classes(rng, 1), HALF, loss=CLASSIFY)
    with capture(model, after_backward=[keep, keep]), pytest.raises(RuntimeError, match="two functions"):
        mean_ce(model, classes(rng)).backward()


def test_directions_of_a_selected_run(rng):
    """Directions as trained of the examples that are kept."""
    model, blocks, decisions = seeded(MLP), [], []
    keep = select(classes(rng, 1), HALF, loss=CLASSIFY, denominator="examples", sink=decisions.append)
    how = {"loss": "example_mean", "directions": Directions("as_trained")}
    moving, before = torch.optim.SGD(model.parameters(), lr=0.1), copy.deepcopy(model.state_dict())
    with capture(model, sinks=[blocks.append], after_backward=[keep], **how):  # type: ignore[arg-type]
        mean_ce(model, classes(rng, 6)).backward()
        moving.step()
    moved = {n: (before[n] - p.detach()) / 0.1 for n, p in model.named_parameters()}
    assert_gradients({n: g.sum(0) for n, g in stored(blocks[0].grads).items()}, moved)
    assert blocks[0].examples.ids == decisions[0].kept


def test_a_loss_that_is_scaled(rng):
    """The scale changes between the steps, and both `.grad` and what is taken out of it carry it."""
    model, target = seeded(LossLM), documents(rng, [6])
    alone, batches = copy.deepcopy(model), [documents(rng, [5, 2, 6, 3]) for _ in range(3)]
    running, decisions = selecting(model, target, lm_loss, denominator="tokens")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with running:
        for batch in batches:
            scaler.scale(own_loss(model, batch)).backward()
            scaler.unscale_(moving)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(moving)
            scaler.update()
            moving.zero_grad()
    assert scaler.get_scale() > 256
    moving = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch, decision in zip(batches, decisions, strict=True):
        own_loss(alone, only(batch, decision.keep)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        moving.step()
        moving.zero_grad()
    assert_gradients(dict(model.state_dict()), dict(alone.state_dict()))


def test_gradients_in_low_precision_are_changed_in_float32(rng):
    """What is taken out of a bfloat16 gradient is summed and subtracted in float32, and rounded once."""
    model = seeded(MLP, dtype=torch.bfloat16)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in classes(rng, 16).items()}
    before: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}

    def look(event: Any) -> None:
        before.update(grads(model))
        rows.update(stored(event.blocks[0].grads))

    decisions: list[Decision] = []
    keep = select(row(batch, 0), HALF, loss=CLASSIFY, sink=decisions.append)
    with capture(model, after_backward=[look, keep], loss="sum"):
        sum_ce(model, batch).backward()
    gone = ~torch.tensor(kept_of(decisions))
    for name, g in grads(model).items():
        exact = before[name].double() - rows[name][gone].double().sum(0)
        assert rows[name].dtype == torch.float32 and g.dtype == torch.bfloat16
        assert ((g.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * before[name].abs().max()).all(), (
            name
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters(rng, in_float64):  # noqa: F811
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    model: Any = peft.get_peft_model(llm("llama"), config).double()
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p) if "lora_B" in n else 0)
    model.train()
    batch, target = documents(rng, [5, 2, 6, 3]), documents(rng, [7])

    def counted(inputs: Any, rows: int) -> tuple[Tensor, Tensor]:
        n = inputs["attention_mask"].sum(1) - 1
        return torch.ones(rows).double() / n.sum(), n

    loss = lambda m, b: causal_lm()(m, b).sum() / terms(b)  # noqa: E731
    running, decisions = selecting(model, target, causal_lm(), how={"loss": counted}, denominator="tokens")
    with running:
        loss(model, batch).backward()
    got = grads(model)
    assert got and all("lora" in n for n in got)
    assert_gradients(got, backward(model, lambda: loss(model, only(batch, kept_of(decisions)))))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_with_dropout(rng, in_float64):  # noqa: F811
    """In training mode, dropout makes the inputs of adapters differ where the target's are one tensor."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
    model: Any = peft.get_peft_model(llm("llama"), config).double().train()
    decisions: list[Decision] = []
    keep = select(documents(rng, [7]), HALF, sink=decisions.append)
    with capture(model, after_backward=[keep]):
        model(**documents(rng, [5, 2, 6, 3])).loss.backward()
    assert sum(kept_of(decisions)) == 2 and model.training


def test_the_target_is_read_once_for_each_step_and_cycles(rng):
    model, seen = seeded(MLP), []
    targets = [classes(rng, 1), classes(rng, 2)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(batch["y"]))
        return CLASSIFY(model, batch)

    decisions: list[Decision] = []
    keep = select(targets, HALF, loss=loss, sink=decisions.append)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, after_backward=[keep], loss="sum"):
        for step in range(5):
            if step == 2:
                seen.clear()
            for _ in range(2):
                sum_ce(model, classes(rng)).backward()
            moving.step()
            moving.zero_grad()
    assert seen == [1, 2, 1]
    assert [(d.step, d.micro) for d in decisions] == [(s, m) for s in range(5) for m in range(2)]


def test_negative_scores_and_greats(rng):
    model, batch = seeded(MLP), classes(rng, 6)
    target = row(batch, 2)
    g, v = (flat(one_by_one(model, b, CLASSIFY)) for b in (batch, target))
    s, h = (g @ v.T)[:, 0], g @ g.T
    for rule in (drop_negative, greats(0.5, 0.2)):
        running, decisions = selecting(model, target, CLASSIFY, rule, {"loss": "sum"})
        with running:
            sum_ce(model, batch).backward()
        assert kept_of(decisions) == rule(s, lambda: h).tolist()
        got = grads(model)
        assert_gradients(got, backward(model, lambda d=decisions: sum_ce(model, only(batch, kept_of(d)))))


def test_nothing_kept_and_everything_kept(rng):
    model, batch = seeded(MLP), classes(rng)
    for share, right in ((1.0, 0.0), (0.0, 1.0)):
        running, _ = selecting(
            model,
            classes(rng, 1),
            CLASSIFY,
            drop_fraction(share),
            {"loss": "example_mean"},
            denominator="examples",
        )
        whole = backward(model, lambda: mean_ce(model, batch))
        with running:
            mean_ce(model, batch).backward()
        for name, g in grads(model).items():
            assert (g - right * whole[name]).abs().max() <= 1e-12
        model.zero_grad()


def test_parameters_without_example_gradients_are_named_once(rng):
    model = seeded(MLP)
    keep = select(classes(rng, 1), HALF, loss=CLASSIFY)
    with capture(model, after_backward=[keep], loss="sum", exclude="last"):
        with pytest.warns(RuntimeWarning, match=r"2 parameters have no per-example.*last.weight"):
            sum_ce(model, classes(rng)).backward()
        sum_ce(model, classes(rng)).backward()


def test_decisions_are_a_table(rng):
    pytest.importorskip("pandas")
    model = seeded(MLP)
    for scope, columns in (("global", 2), ("layer", 6)):
        running, decisions = selecting(model, classes(rng, 1), CLASSIFY, how={"loss": "sum"}, scope=scope)
        with running:
            for _ in range(2):
                sum_ce(model, classes(rng)).backward()
        table = to_pandas(selections(decisions), layout="wide")
        assert len(table) == 8 and len(table.columns) == 3 + columns
        assert table.iloc[:, -1].tolist() == [
            float(k) for d in decisions if d.layer in ("", "second") for k in d.keep
        ]


def test_what_cannot_be_is_refused(rng):
    model, target = seeded(MLP), classes(rng, 1)
    with pytest.raises(ValueError, match="scope: got 'all'"):
        select(target, HALF, scope="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="denominator: got 'rows'"):
        select(target, HALF, denominator="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rule: got 0\.5; expected a function, such as"):
        select(target, 0.5)  # type: ignore[arg-type]
    empty = {k: v[:0] for k, v in target.items()}
    cases = [
        (target, lambda s, h: s, "fixed", "returned .* torch.float64 for 4 examples"),
        (target, HALF, "tokens", "number of loss terms of each example, which is unknown"),
        (target, lambda s, h: s.tolist(), "fixed", "returned list for 4 examples"),
        ([], HALF, "fixed", "yields no batch"),
        (empty, HALF, "fixed", "a batch of the target has no rows"),
    ]
    for target, rule, denominator, message in cases:
        running, _ = selecting(model, target, CLASSIFY, rule, {"loss": "sum"}, denominator=denominator)
        with running, pytest.raises(ValueError, match=message):
            sum_ce(model, classes(rng)).backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_unmodified_trainer(accumulate, tmp_path, in_float64):  # noqa: F811
    """Every step's gradient is that of the mean over the loss terms of the documents its window keeps."""
    model, decisions, steps = doubled(), [], []
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0

    def look(event: Any) -> None:
        kept = [[int(t) for t in i.split()] for d in decisions if d.step == event.step for i in d.kept]
        twin = copy.deepcopy(event.model)
        totals = [causal_lm()(twin, alone(torch.tensor(ids))).sum() for ids in kept]
        mean = sum(totals) / sum(len(ids) - 1 for ids in kept)
        steps.append(len(kept))
        assert_gradients(grads(event.model), backward(twin, lambda: mean))  # type: ignore[arg-type]

    def ids(inputs: Any) -> list[str]:
        pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        return [" ".join(str(int(t)) for t in row[mask.bool()]) for row, mask in pairs]

    keep = select(QUERIES, HALF, denominator="tokens", sink=decisions.append)
    with capture(model, after_backward=[keep], before_step=[look], ids=ids):
        trainer(model, tmp_path, accumulate).train()
    assert steps == [accumulate] * STEPS
