"""What a capture records from loops that stay as they are: gradients, weights, counts, ids, steps."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attrax.core import Blocks, Projection, collect, project, projected
from attrax.core.tree import Target, target_scale
from attrax.frontends import capture, causal_lm, classification, live
from attrax.methods import graddot

from .loops import known, mean_ce, own_loss, recorded, sum_ce, summed, train
from .models import MLP, LossLM, TinyLM, classes, documents, seeded
from .oracle import assert_gradients, block_gradients, gradients, one_by_one, unpadded

CLASSIFY = classification()


def assert_sums(block: Any, grads: dict[str, Tensor]) -> None:
    """sum_i c_i G_i is what the backward added to `.grad`."""
    assert_gradients({n: g[None] for n, g in summed(block).items()}, {n: g[None] for n, g in grads.items()})


@pytest.mark.parametrize("how", [None, "reentrant", "nonreentrant"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_with_its_own_loss(accumulate, how, rng):
    """c_i, n_i, steps, learning rates; sums equal to `.grad`; gradients of each document alone."""
    model = seeded(lambda: LossLM(layers=1, tied=True, how=how)).train()
    batches = [documents(rng, lengths) for lengths in ([5, 3], [2, 4, 6], [3, 3], [7, 2])]
    start = copy.deepcopy(model)
    blocks, seen, _ = recorded(model, batches, own_loss, {}, accumulate=accumulate)
    assert [(b.examples.step, b.examples.micro) for b in blocks] == [divmod(k, accumulate) for k in range(4)]
    assert {b.examples.learning_rate for b in blocks} == {0.1}
    for block, batch in zip(blocks, batches, strict=True):
        counts = (batch["labels"][:, 1:] != -100).sum(1)
        weight = torch.full((len(counts),), 1 / (accumulate * counts.sum().item()), dtype=torch.float64)
        c, n = known(block)
        assert torch.equal(n, counts)
        torch.testing.assert_close(c, weight, rtol=1e-12, atol=0)
    parts = [summed(block) for block in blocks[:accumulate]]
    total = {n: torch.stack([part[n] for part in parts]).sum(0, keepdim=True) for n in seen[0]}
    assert_gradients(total, {n: g[None] for n, g in seen[0].items()})
    plain = start.lm
    plain.how = None
    right = gradients(plain, causal_lm(), [unpadded(batches[0], i) for i in range(2)])
    scaled = {f"lm.{n}": g * known(blocks[0])[0][0] for n, g in right.items()}
    assert_gradients(block_gradients(blocks[0]), scaled)


@pytest.mark.parametrize("declared", ["sum", "example_mean", "function"])
def test_declared_losses(declared, rng):
    def twice(inputs: Any, rows: int) -> tuple[Tensor, Tensor]:
        return torch.full((rows,), 2.0), torch.ones(rows, dtype=torch.long)

    losses = {
        "sum": (sum_ce, "sum", 1.0),
        "example_mean": (mean_ce, "example_mean", 0.25),
        "function": (lambda m, b: 2 * sum_ce(m, b), twice, 2.0),
    }
    loss, how, c = losses[declared]
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    blocks, seen, _ = recorded(model, [batch], loss, {"loss": how})
    weight = blocks[0].examples.weight
    assert weight is not None and weight.tolist() == [c] * 4
    assert_gradients(block_gradients(blocks[0]), {n: c * g for n, g in right.items()})
    assert_sums(blocks[0], seen[0])


def test_a_declared_token_mean(rng):
    """A loop that computes its loss from logits; labels go through the model only to be counted."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**batch)["logits"]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    class LogitsOnly(LossLM):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return super().forward(input_ids, attention_mask)

    model, batch = seeded(lambda: LogitsOnly(layers=1)), documents(rng, [5, 3])
    blocks, seen, _ = recorded(model, [batch], loss, {"loss": "token_mean"})
    assert [x.tolist() for x in known(blocks[0])] == [[1 / 6] * 2, [4, 2]]
    assert_sums(blocks[0], seen[0])


def test_undeclared_losses_are_offered_as_trained_only(rng):
    blocks, seen, _ = recorded(seeded(MLP), [classes(rng)], mean_ce, {})
    examples = blocks[0].examples
    assert examples.weight is None and target_scale(examples, "as_trained") is None
    assert_sums(blocks[0], seen[0])
    targets: list[Target] = ["sum", "mean"]
    for target in targets:
        with pytest.raises(ValueError, match="Declare the loss at capture"):
            target_scale(examples, target)


def test_unknown_and_unfit_declarations(unchecked, rng):
    model, batch = seeded(MLP), classes(rng)
    with pytest.raises(ValueError, match=r"'average'.*token_mean"):
        capture(model, loss="average")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="needs the labels"), capture(model, loss="token_mean"):
        mean_ce(model, batch).backward()
    with (
        pytest.raises(ValueError, match=r"shape \(1,\) for 4"),
        capture(model, loss=lambda i, r: (torch.ones(1), None)),
    ):
        mean_ce(model, batch).backward()


def test_a_loss_beside_the_models_own_is_not_taken_for_it(rng):
    """Where the loop also uses the logits, the weight of the model's own loss says nothing about the total."""

    def distilled(model: nn.Module, batch: Any) -> Tensor:
        output = model(**batch)
        return output["loss"] + output["logits"].square().mean()

    model, batch = seeded(lambda: LossLM(layers=1)), documents(rng, [4, 3])
    blocks, seen, _ = recorded(model, [batch], distilled, {})
    assert blocks[0].examples.weight is None
    assert_sums(blocks[0], seen[0])


def test_loss_scaling_and_items_in_batch(rng):
    """What arrives at the model's loss carries the loop's factors; a given number of items is the denominator."""

    class Items(LossLM):
        def forward(
            self,
            input_ids: Any,
            attention_mask: Any = None,
            labels: Any = None,
            num_items_in_batch: Any = None,
        ) -> Any:
            output = super().forward(input_ids, attention_mask, labels)
            if num_items_in_batch is not None:
                output["loss"] = output["loss"] * (labels[:, 1:] != -100).sum() / num_items_in_batch
            return output

    model, batch = seeded(lambda: Items(layers=1)), documents(rng, [5, 3])
    for items, scale, c in ((None, 1024.0, 1024 / 6), (24, 1.0, 1 / 24), (24, 8.0, 1 / 3)):
        blocks: list[Any] = []
        with capture(model, sinks=[blocks.append]):
            (scale * model(**batch, num_items_in_batch=items)["loss"]).backward()
        torch.testing.assert_close(blocks[0].examples.weight, torch.full((2,), c, dtype=torch.float64))
        model.zero_grad()


def test_a_grad_scaler_with_the_models_own_loss(rng):
    """Rows are unscaled by their weight; a step that the scaler skips has a learning rate of zero."""
    model, batch = seeded(lambda: LossLM(layers=1)), documents(rng, [5, 3])
    right = gradients(copy.deepcopy(model).lm, causal_lm(), [unpadded(batch, i) for i in range(2)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10)
    moving, blocks = torch.optim.SGD(model.parameters(), lr=0.5), []
    with capture(model, sinks=[blocks.append]):
        for k in range(3):
            moving.zero_grad()
            scaler.scale(own_loss(model, batch)).backward()
            if k == 1:
                next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("inf"))
            scaler.step(moving)
            scaler.update()
    assert [b.examples.learning_rate for b in blocks] == [0.5, 0.0, 0.5]
    c = known(blocks[0])[0][0]
    unscaled = {n.removeprefix("lm."): g / c for n, g in block_gradients(blocks[0]).items()}
    assert_gradients(unscaled, right)


def test_scores_do_not_depend_on_how_the_loop_batches(rng):
    """Sum targets are the same for every batch size, accumulation and loss scale."""
    model, batch = seeded(MLP), classes(rng, 6)
    query = collect(live(model, [classes(rng, 2)], CLASSIFY))
    found = []
    for size, accumulate in ((6, 1), (2, 1), (3, 2)):
        cuts = [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, 6, size)]
        blocks: list[Any] = []
        weigh = lambda inputs, rows, a=accumulate: (torch.full((rows,), 1 / (a * rows)), None)  # noqa: E731
        with capture(model, sinks=[blocks.append], loss=weigh):
            for piece in cuts:
                (mean_ce(model, piece) / accumulate).backward()
        model.zero_grad()
        found.append(graddot(Blocks(blocks), Blocks([query])).values)
    for values in found[1:]:
        torch.testing.assert_close(values, found[0], rtol=1e-6, atol=1e-9)


def test_ids_are_the_content_of_the_example(rng):
    """In any batch, padded or not, called by position or by keyword, whatever stands beside it."""
    model, batch = seeded(lambda: LossLM(layers=1)), documents(rng, [5, 3, 4], width=8)
    calls = [
        lambda: model(**batch),
        lambda: model(batch["input_ids"], batch["attention_mask"], batch["labels"]),
        lambda: model(batch["input_ids"], labels=batch["labels"], attention_mask=batch["attention_mask"]),
        lambda: model(**{k: v[:, :5] for k, v in batch.items()}),
    ]
    blocks: list[Any] = []
    with capture(model, sinks=[blocks.append]):
        for call in calls:
            call()["loss"].backward()
        for i in (2, 0, 1):
            model(**unpadded(batch, i))["loss"].backward()
    ids = blocks[0].examples.ids
    assert len(set(ids)) == 3 and all(b.examples.ids == ids for b in blocks[:4])
    assert [b.examples.ids for b in blocks[4:]] == [(ids[2],), (ids[0],), (ids[1],)]
    live_ids = collect(live(model.lm.eval(), [batch])).examples.ids
    assert live_ids == ids


def test_inputs_shared_by_the_batch_are_not_content(rng):
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = TinyLM(layers=1)

        def forward(self, input_ids: Tensor, position_ids: Tensor, cache_position: Tensor) -> Tensor:
            return self.lm(input_ids, position_ids=position_ids)

    model, ids = seeded(Positions), torch.randint(1, 11, (5, 5), generator=rng)
    shared = {"position_ids": torch.arange(5)[None], "cache_position": torch.arange(5)}
    blocks: list[Any] = []
    with capture(model, sinks=[blocks.append], loss="sum"):
        for rows in (ids, ids[:1], ids[:2]):
            model(rows, **shared).sum().backward()
    whole = blocks[0].examples.ids
    assert blocks[1].examples.ids == whole[:1] and blocks[2].examples.ids == whole[:2]


def test_ids_given_by_the_caller(rng):
    model, batch = seeded(MLP), classes(rng)
    blocks: list[Any] = []
    with capture(
        model,
        sinks=[blocks.append],
        loss="sum",
        ids=lambda inputs: [f"{v:.0f}" for v in inputs["x"][:, 0] * 1e6],
    ):
        sum_ce(model, batch).backward()
    assert blocks[0].examples.ids[1] == f"{batch['x'][1, 0] * 1e6:.0f}"
    with (
        pytest.raises(ValueError, match="3 ids for a batch of 4"),
        capture(model, loss="sum", ids=lambda inputs: "abc"),
    ):
        sum_ce(model, batch).backward()


def test_inputs_in_containers(rng):
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MLP()

        def forward(self, batch: Any) -> Tensor:
            return self.net(batch["parts"][0])

    model, batch = seeded(Packed), classes(rng)
    blocks: list[Any] = []
    with capture(model, sinks=[blocks.append], loss="sum"):
        model({"parts": [batch["x"]], "name": "first"}).sum().backward()
    assert len(set(blocks[0].examples.ids)) == 4

    class Opaque:
        x = batch["x"]

    class Unpacking(Packed):
        def forward(self, batch: Any) -> Tensor:
            return self.net(batch.x)

    model = seeded(Unpacking)
    with pytest.raises(ValueError, match="hold no tensor.*Pass ids="), capture(model, loss="sum"):
        model(Opaque()).sum().backward()
    with capture(model, sinks=[blocks.append], loss="sum", ids=lambda inputs: list("abcd")):
        model(Opaque()).sum().backward()
    assert blocks[-1].examples.ids == tuple("abcd")


def test_a_transform_runs_inside_the_hooks(rng):
    """Projected at once or afterwards: the same numbers, and nothing larger is ever kept."""
    spec = Projection(3, seed=5)
    model, batch = seeded(lambda: LossLM(layers=1)), documents(rng, [5, 3])
    other = copy.deepcopy(model)
    full, _, _ = recorded(other, [batch], own_loss, {})
    small, _, _ = recorded(model, [batch], own_loss, {"transform": projected(spec)})
    after = project(full[0].grads, spec)
    assert list(small[0].grads) == list(after)
    for x, y in zip(tree_leaves(small[0].grads), tree_leaves(after), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_a_transform_may_drop_leaves(rng):
    drop = lambda name, leaf: leaf if "first" in name else None  # noqa: E731
    blocks, _, _ = recorded(seeded(MLP), [classes(rng)], sum_ce, {"loss": "sum", "transform": drop})
    assert list(blocks[0].grads) == ["first.weight"]


def test_examples_that_are_not_finite_are_left_out_and_named(rng):
    model, batch = seeded(MLP), classes(rng)
    right = one_by_one(model, batch, CLASSIFY)
    batch["x"][1, 0] = float("inf")
    named = {"loss": "sum", "ids": lambda inputs: list("abcd"), "verify": False}
    blocks: list[Any] = []
    with (
        capture(model, sinks=[blocks.append], **named) as running,
        pytest.warns(RuntimeWarning, match=r"\['b'\].*'first"),
    ):
        sum_ce(model, batch).backward()
    examples = blocks[0].examples
    assert examples.ids == ("a", "c", "d") and len(examples.weight) == 3
    assert running.skipped == [("b", "non-finite gradient at step 0")]
    assert_gradients(block_gradients(blocks[0]), {n: g[[0, 2, 3]] for n, g in right.items()})
    with pytest.raises(ValueError, match=r"\['b'\]"), capture(model, **named, on_nonfinite="raise"):
        sum_ce(model, batch).backward()


def test_an_empty_batch_makes_no_block(rng):
    batch = classes(rng)
    empty = {k: v[:0] for k, v in batch.items()}
    blocks, _, _ = recorded(seeded(MLP), [batch, empty, batch], sum_ce, {"loss": "sum"})
    assert [len(b.examples) for b in blocks] == [4, 4]


def test_selection_is_the_same_as_for_live(rng):
    model, batch = seeded(lambda: LossLM(layers=1)), documents(rng, [4, 3])
    blocks, seen, running = recorded(model, [batch], own_loss, {"include": r"\.(q|k|down)$"})
    names = {c.parameter for c in running.coverage.captured}
    assert names == {f"lm.blocks.0.{n}.{w}" for n in ("q", "k", "down") for w in ("weight", "bias")}
    assert_sums(blocks[0], {n: seen[0][n] for n in names})
    assert running.unreached == set()


def test_training_options_of_the_loop_do_not_matter(rng):
    """Adam, and a layer whose output goes nowhere."""

    class Spare(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.second(x.new_ones(len(x), 6))
            return self.last(self.act(self.first(x)))

    blocks, _, running = recorded(
        seeded(Spare), [classes(rng), classes(rng)], sum_ce, {"loss": "sum"}, optimizer=torch.optim.AdamW
    )
    assert [list(b.grads) for b in blocks] == [["last.weight", "first.weight"]] * 2
    assert running.unreached == {"second"}
    train(seeded(Spare), [classes(rng)], sum_ce)
