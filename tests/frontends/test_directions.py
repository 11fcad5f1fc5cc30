"""Recorded directions against literal steps of `torch.optim` with one example's gradient, on copies, in the loop."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from attrax.core import Block, Directions, Projection, project, projected, stored, targeted
from attrax.frontends import StepEvent, capture, open_store, store
from attrax.frontends.runs.optimizers import read_optimizer

from .loops import known, mean_ce, own_loss
from .models import MLP, LossLM, classes, documents, seeded
from .oracle import assert_gradients, block_gradients, row, unpadded
from .test_trajectory import OPTIMIZERS, loop, two_groups

pytestmark = pytest.mark.usefixtures("unchecked")
Make = Callable[[nn.Module], Any]
Grads = Mapping[str, Tensor]


def literal(model: nn.Module, moving: optim.Optimizer, grads: Grads) -> dict[str, Tensor]:
    """What a step with these gradients moves by, decoupled decay and rate factored out; coupled decay taken back."""
    rules, _ = read_optimizer(moving, model)
    found: dict[str, Tensor] = {}
    copied, again = copy.deepcopy((model, moving))
    for name, p in copied.named_parameters():
        p.grad = None if name not in grads else grads[name] - rules[name].coupled * p.detach()
    before = {n: p.detach().clone() for n, p in copied.named_parameters()}
    again.step()
    for name, p in copied.named_parameters():
        if name in grads:
            rule = rules[name]
            found[name] = ((1 - rule.lr * rule.decay) * before[name] - p.detach()) / rule.lr
    return found


class Oracle:
    """Called before each step: the directions of all examples of the step, one at a time."""

    def __init__(self, scale: Callable[[Block, int], float], centered: bool = False) -> None:
        self.found: list[dict[str, Tensor]] = []
        self._scale, self._centered = scale, centered

    def __call__(self, event: StepEvent) -> None:
        with event.capture.paused():
            for block in event.blocks:
                grads = block_gradients(block)
                origin = literal(event.model, event.optimizer, {n: 0 * g[0] for n, g in grads.items()})
                rows = []
                for i in range(len(block.examples)):
                    scale = self._scale(block, i)
                    own = literal(event.model, event.optimizer, {n: scale * g[i] for n, g in grads.items()})
                    rows.append({n: D - origin[n] if self._centered else D for n, D in own.items()})
                self.found.append({n: torch.stack([r[n] for r in rows]) for n in grads})


def alone(block: Block, i: int) -> float:
    """From c G to G / n."""
    c, n = known(block)
    return 1 / (float(c[i]) * float(n[i]))


def weight_of(block: Block) -> Tensor:
    assert block.examples.weight is not None
    return block.examples.weight


def summed(block: Block, i: int) -> float:
    """From c G to G."""
    return 1 / float(weight_of(block)[i])


def recorded(
    model: nn.Module, data: list[Any], make: Make, oracle: Oracle, how: dict[str, Any], **options: Any
) -> list[Block]:
    """Blocks of directions; training is as without them."""
    blocks: list[Block] = []
    untouched = copy.deepcopy(model)
    loop(untouched, data, make, **options)
    with capture(model, sinks=[blocks.append], before_step=[oracle], **how):
        loop(model, data, make, **options)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), untouched.parameters(), strict=True))
    assert len(oracle.found) == len(blocks)
    assert all(block.examples.weight is None for block in blocks)
    return blocks


def assert_directions(blocks: list[Block], oracle: Oracle, within: float = 1e-9) -> None:
    for block, right in zip(blocks, oracle.found, strict=True):
        assert_gradients(block_gradients(block), right, within)


def batches(count: int) -> list[Any]:
    gen = torch.Generator().manual_seed(1)
    return [classes(gen) for _ in range(count)]


KINDS = {**OPTIMIZERS, "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.05, lambd=0.0)}
"""The decay of ASGD is no part of a direction, whatever the gradient is."""


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_directions_are_literal_steps(make: Make) -> None:
    oracle = Oracle(summed)
    how = {"loss": "example_mean", "directions": Directions("sum")}
    assert_directions(recorded(seeded(MLP), batches(4), make, oracle, how), oracle)


def test_of_the_token_mean_with_weights_used_twice() -> None:
    """Gradients of a document's own mean loss; a tied weight's direction is that of its whole gradient."""
    gen = torch.Generator().manual_seed(1)
    data = [documents(gen, [5, 3, 4]) for _ in range(3)]
    oracle = Oracle(alone)
    model = seeded(lambda: LossLM(d=4, layers=1, tied=True, bias=False))
    blocks = recorded(model, data, two_groups, oracle, {"directions": Directions()}, loss=own_loss, clip=0.1)
    assert_directions(blocks, oracle)


def test_the_gradient_of_a_direction_is_the_examples_own() -> None:
    """Independent of the capture: autograd of one document's mean loss, then one literal step from the start."""
    batch = documents(torch.Generator().manual_seed(1), [5, 3, 4])
    model = seeded(lambda: LossLM(d=4, layers=1, bias=False))
    right: list[dict[str, Tensor]] = []
    for i in range(3):
        fresh = copy.deepcopy(model)
        own = own_loss(fresh, unpadded(batch, i))
        named = dict(fresh.named_parameters())
        grads = torch.autograd.grad(own, list(named.values()))
        right.append(literal(fresh, two_groups(fresh), dict(zip(named, grads, strict=True))))
    blocks: list[Block] = []
    with capture(model, sinks=[blocks.append], directions=Directions()):
        loop(model, [batch], two_groups, loss=own_loss)
    expected = {n: torch.stack([r[n] for r in right]) for n in right[0]}
    found = block_gradients(blocks[0])
    for name, D in expected.items():
        assert torch.allclose(found[name], D, rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("clip", [None, 0.05])
def test_as_trained_is_the_share_in_what_the_optimizer_uses(clip: float | None) -> None:
    """Accumulation, clipping and loss scaling: shares of a step add up to the gradient that is used."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    used: list[Grads] = []

    def grads(event: StepEvent) -> None:
        used.append({n: p.grad.clone() for n, p in event.model.named_parameters() if p.grad is not None})

    model, blocks = seeded(MLP), list[Block]()
    make = lambda m: optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    declared = lambda inputs, rows: (torch.full((rows,), 64.0 / rows, dtype=torch.float64), None)  # noqa: E731
    with capture(
        model,
        sinks=[blocks.append],
        before_step=[grads],
        loss=declared,
        scaler=scaler,
        directions=Directions("as_trained"),
    ):
        loop(model, batches(6), make, accumulate=2, clip=clip, scaler=scaler)
    assert len(blocks) == 6 and len(used) == 3
    for step, right in enumerate(used):
        parts = [block_gradients(b) for b in blocks if b.examples.step == step]
        total = {n: sum(part[n].sum(0) for part in parts)[None] for n in right}
        assert_gradients(total, {n: g[None] for n, g in right.items()}, 1e-10)


@pytest.mark.parametrize("centered", [False, True])
def test_centered(centered: bool) -> None:
    oracle = Oracle(summed, centered)
    how = {"loss": "example_mean", "directions": Directions("sum", centered=centered)}
    assert_directions(recorded(seeded(MLP), batches(3), OPTIMIZERS["adamw"], oracle, how), oracle)


def test_the_transform_sees_directions() -> None:
    """Projected after, not before: a direction is no linear function of the gradient."""
    spec, oracle, blocks = Projection(2, seed=3), Oracle(summed), list[Block]()
    model = seeded(MLP)
    whole = recorded(
        copy.deepcopy(model),
        batches(2),
        two_groups,
        oracle,
        {"loss": "example_mean", "directions": Directions("sum")},
    )
    with capture(
        model,
        sinks=[blocks.append],
        loss="example_mean",
        directions=Directions("sum"),
        transform=projected(spec),
    ):
        loop(model, batches(2), two_groups)
    for block, full in zip(blocks, whole, strict=True):
        for name, leaf in project(full.grads, spec).items():
            assert leaf.basis == block.grads[name].basis != ""
            assert torch.allclose(leaf.w, block.grads[name].w, rtol=1e-10)


def test_several_optimizers_each_turn_their_own() -> None:
    model, blocks = seeded(MLP), list[Block]()
    first = optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
    rest = optim.AdamW([*model.second.parameters(), *model.last.parameters()], lr=0.05)
    expected: list[dict[str, Tensor]] = []

    def look(event: StepEvent) -> None:
        own = read_optimizer(event.optimizer, event.model)[0]
        for block in event.blocks:
            grads = {n: g / weight_of(block)[0] for n, g in block_gradients(block).items() if n in own}
            rows = [
                literal(event.model, event.optimizer, {n: g[i] for n, g in grads.items()}) for i in range(4)
            ]
            expected.append({n: torch.stack([r[n] for r in rows]) for n in grads})

    with capture(
        model,
        sinks=[blocks.append],
        loss="example_mean",
        before_step=[look],
        directions=Directions("sum"),
    ):
        for batch in batches(3):
            mean_ce(model, batch).backward()
            first.step()
            rest.step()
            model.zero_grad()
    assert len(blocks) == 3
    for k, block in enumerate(blocks):
        assert_gradients(block_gradients(block), expected[2 * k] | expected[2 * k + 1], 1e-9)


def test_a_layer_divided_between_optimizers_is_refused_before_it_moves() -> None:
    model = seeded(MLP)
    before = copy.deepcopy(model.state_dict())
    first = optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1)
    with capture(model, loss="example_mean", directions=Directions("sum")):
        mean_ce(model, batches(1)[0]).backward()
        with pytest.raises(ValueError, match=r"moves \['last.weight'\] but not \['last.bias'\]"):
            first.step()
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def test_within_a_closure() -> None:
    """The state is that before the step also where the backward runs inside of it."""
    model, blocks, right = seeded(MLP), list[Block](), list[dict[str, Tensor]]()
    moving = two_groups(model)

    def closure(batch: Any) -> float:
        moving.zero_grad()
        loss = mean_ce(model, batch)
        loss.backward()
        return loss.item()

    with capture(model, sinks=[blocks.append], loss="example_mean", directions=Directions("sum")) as running:
        for batch in batches(3):
            with running.paused():
                rows = []
                for i in range(4):
                    own = mean_ce(model, row(batch, i))
                    grads = torch.autograd.grad(own, list(model.parameters()))
                    names = [n for n, _ in model.named_parameters()]
                    rows.append(literal(model, moving, dict(zip(names, grads, strict=True))))
            right.append({n: torch.stack([r[n] for r in rows]) for n in rows[0]})
            moving.step(lambda batch=batch: closure(batch))
    assert len(blocks) == 3
    for block, expected in zip(blocks, right, strict=True):
        assert_gradients(block_gradients(block), expected, 1e-8)


def test_switched_from_pass_to_pass() -> None:
    model, blocks = seeded(MLP), list[Block]()
    moving = two_groups(model)
    with capture(model, sinks=[blocks.append], loss="example_mean") as running:
        for k, batch in enumerate(batches(4)):
            running.directions = Directions("sum") if k % 2 else None
            moving.zero_grad()
            mean_ce(model, batch).backward()
            moving.step()
    assert [b.examples.weight is None for b in blocks] == [False, True, False, True]


def test_directions_carry_no_loss_weight(tmp_path: Path) -> None:
    """Through a store; a scale that would be meaningless is refused."""
    model = seeded(MLP)
    with (
        store(tmp_path) as sink,
        capture(model, sinks=[sink], loss="example_mean", directions=Directions("sum")),
    ):
        loop(model, batches(2), two_groups)
    source = open_store(tmp_path)
    assert source.examples == 8
    with pytest.raises(ValueError, match="unknown loss weight"):
        list(targeted(source, "sum").map(lambda *_: None))


def test_gradients_that_no_optimizer_used_have_no_direction() -> None:
    model, blocks = seeded(MLP), list[Block]()
    with capture(model, sinks=[blocks.append], loss="example_mean", directions=Directions("sum")) as running:
        loop(model, batches(1), two_groups)
        mean_ce(model, batches(1)[0]).backward()
    assert len(blocks) == 1 and len(running.skipped) == 4
    assert running.skipped[0][1] == "no optimizer used its gradient at step 1"


def test_loops_without_an_optimizer_are_told() -> None:
    model, blocks = seeded(MLP), list[Block]()
    with (
        pytest.warns(RuntimeWarning, match="but none stepped"),
        capture(model, sinks=[blocks.append], loss="example_mean", directions=Directions("sum")),
    ):
        mean_ce(model, batches(1)[0]).backward()
    assert not blocks


def test_less_is_a_variant_of_adam() -> None:
    model, blocks, right = seeded(MLP), list[Block](), list[dict[str, Tensor]]()

    def look(event: StepEvent) -> None:
        grads = {n: g / weight_of(event.blocks[0])[0] for n, g in block_gradients(event.blocks[0]).items()}
        found = {}
        for name, g in grads.items():
            state = event.optimizer.state[event.model.get_parameter(name)]
            m, v = state.get("exp_avg", 0 * g[0]), state.get("exp_avg_sq", 0 * g[0])
            found[name] = (0.9 * m + 0.1 * g) / (0.999 * v + 0.001 * g * g + 1e-8).sqrt()
        right.append(found)

    how = {"loss": "example_mean", "directions": Directions("sum", variant="official")}
    with capture(model, sinks=[blocks.append], before_step=[look], **how):
        loop(model, batches(3), two_groups)
    for block, expected in zip(blocks, right, strict=True):
        assert_gradients(block_gradients(block), expected, 1e-10)
    with pytest.raises(ValueError, match="variant 'official' is one of Adam"), capture(model, **how):
        loop(model, batches(1), lambda m: optim.SGD(m.parameters(), lr=0.1))


def test_shares_are_refused_where_gradients_were_changed_otherwise() -> None:
    model = seeded(MLP)
    with (
        pytest.raises(ValueError, match="not one multiple of the backward's"),
        capture(model, loss="example_mean", directions=Directions("as_trained")),
    ):
        loop(
            model,
            batches(1),
            two_groups,
            spoil=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_trainer(tmp_path: Path) -> None:
    """AdamW with groups with and without decay, clipping, accumulation; documents' own mean losses."""
    from .test_trainer import llama, trainer

    model, blocks, oracle = llama(), list[Block](), Oracle(alone)
    with capture(model, sinks=[blocks.append], before_step=[oracle], directions=Directions()):
        running = trainer(model, tmp_path, 2, weight_decay=0.1)
        running.args.max_grad_norm = 0.5
        running.args.max_steps = 3
        running.train()
    assert len(blocks) == 6
    for block, right in zip(blocks, oracle.found, strict=True):
        for name, D in stored(block.grads).items():
            # (theta - theta') / lr in float32: rounding of theta, divided by the rate.
            assert torch.allclose(D, right[name], rtol=1e-3, atol=2e-5), name
