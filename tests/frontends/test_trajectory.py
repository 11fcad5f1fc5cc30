"""Recorded runs: replaying a step gives the next one, and the examples add up to what the optimizer used."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor, nn, optim

from attrax.core import Block, Clip, GradTree, Recorded, Step, Trajectory, aggregate, step, stored
from attrax.frontends import capture, open_store, open_trajectory, read_optimizer, record, store
from attrax.frontends.runs.stepfiles import read_step, step_path, write_step
from attrax.frontends.runs.trajectory import Recorder

from .loops import mean_ce, own_loss, sum_ce
from .models import MLP, LossLM, classes, documents, seeded

pytestmark = pytest.mark.usefixtures("unchecked")
STEPS = 5
Make = Callable[[nn.Module], Any]


def two_groups(model: nn.Module, kind: Any = optim.AdamW) -> Any:
    """No weight decay, and another rate, for vectors: as trainers do."""
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) is m] for m in (True, False))
    return kind([{"params": vectors, "weight_decay": 0.0, "lr": 0.01}, {"params": matrices}], lr=0.05)


OPTIMIZERS: dict[str, Make] = {
    "adamw": two_groups,
    "amsgrad": lambda m: optim.AdamW(m.parameters(), lr=0.05, amsgrad=True, betas=(0.9, 0.7)),
    "momentum": lambda m: optim.SGD(m.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01),
    "fused": lambda m: optim.Adam(m.parameters(), lr=0.05, fused=True, weight_decay=0.1),
    "nadam": lambda m: optim.NAdam(m.parameters(), lr=0.05),
    "rprop": lambda m: optim.Rprop(m.parameters(), lr=0.05),
    "asgd": lambda m: optim.ASGD(m.parameters(), lr=0.05, lambd=0.01),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.05),
}


def loop(
    model: nn.Module,
    batches: list[Any],
    make: Make,
    *,
    loss: Any = mean_ce,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    spoil: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """A training loop as people write it."""
    moving = make(model)
    schedule = optim.lr_scheduler.LambdaLR(moving, lambda step: 0.8**step)
    for k, batch in enumerate(batches, 1):
        value = loss(model, batch) / accumulate
        (value if scaler is None else scaler.scale(value)).backward()
        if k % accumulate:
            continue
        if scaler is not None and clip is not None:
            scaler.unscale_(moving)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        spoil(model)
        if scaler is None:
            moving.step()
        else:
            scaler.step(moving)
            scaler.update()
        schedule.step()
        moving.zero_grad()


def batches(count: int, seed: int = 1) -> list[Any]:
    gen = torch.Generator().manual_seed(seed)
    return [classes(gen) for _ in range(count)]


def run(
    folder: Path, make: Make, data: list[Any], *, model: Any = None, how: Any = None, **options: Any
) -> tuple[Any, nn.Module]:
    """A recorded run and the model after it; training is as without recording, bit for bit."""
    model = seeded(MLP) if model is None else model
    alone = copy.deepcopy(model)
    alone_options = copy.deepcopy(options)
    loop(alone, data, make, **alone_options)
    how = {"loss": "example_mean", "scaler": options.get("scaler")} | (how or {})
    with (
        store(folder, keep_factored=True) as sink,
        capture(model, sinks=[sink], trajectory=record(folder), **how),
    ):
        loop(model, data, make, **options)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q), f"{name}: trained otherwise"
    return open_trajectory(folder), model


def assert_replays(found: Trajectory, model: nn.Module, within: float = 1e-12) -> None:
    """`step` of what was recorded is what was recorded next."""
    steps = [found.step(n) for n in found.steps]
    for now, after in zip(steps, [*steps[1:], None], strict=True):
        assert now.optimizers.keys() == now.states.keys() == now.gradients.keys() <= now.parameters.keys()
        for name, rule in now.optimizers.items():
            theta, state = step(rule, now.parameters[name], now.gradients[name], now.states[name])
            right = model.get_parameter(name) if after is None else after.parameters[name]
            assert (theta - right).abs().max() <= within * right.abs().max(), (now.step, name)
            for key, x in state.items() if after is not None else ():
                recorded = after.states[name][key]  # pyright: ignore[reportOptionalMemberAccess]
                assert (x - recorded).abs().max() <= within * recorded.abs().max(), (now.step, name, key)


def sums(found: Trajectory, number: int) -> dict[str, Tensor]:
    """Sum of the examples' gradients of a step by parameter."""
    totals: dict[str, Tensor] = {}
    for _, leaves in found.gradients(number).map(lambda name, leaf, _: leaf):
        for name, g in stored(aggregate(GradTree(leaves))).items():
            totals[name] = totals.get(name, 0) + g[0]
    return totals


def assert_adds_up(found: Trajectory, within: float = 1e-10, **clipping: bool) -> None:
    """Clipped, the examples are the gradient that the optimizer used; the norm is that of their sum."""
    for number in found.steps:
        now, total = found.step(number), sums(found, number)
        assert now.clip is not None
        for name, g in now.gradients.items():
            assert (now.clip.coefficient * total[name] - g).abs().max() <= within * g.abs().max() + 1e-15
        norm = float(torch.stack([x.norm() for x in total.values()]).norm())
        assert now.clip.norm == pytest.approx(norm, rel=max(within, 1e-7))
        if "active" in clipping:
            assert (now.clip.coefficient < 0.99) is clipping["active"]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_plain_loop(make: Make, tmp_path: Path) -> None:
    found, model = run(tmp_path, make, batches(STEPS))
    assert isinstance(found, Trajectory) and found.steps == tuple(range(STEPS))
    assert_replays(found, model)
    assert_adds_up(found, active=False)
    assert all(found.step(n).clip == Clip(1.0, found.step(n).clip.norm) for n in found.steps)


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], OPTIMIZERS["momentum"]], ids=["adamw", "momentum"])
def test_accumulation_and_clipping(make: Make, tmp_path: Path) -> None:
    halved = lambda inputs, rows: (torch.full((rows,), 0.5 / rows, dtype=torch.float64), None)  # noqa: E731
    found, model = run(tmp_path, make, batches(2 * STEPS), accumulate=2, clip=0.05, how={"loss": halved})
    assert_replays(found, model)
    assert_adds_up(found, active=True)
    examples = [e for e, _ in found.gradients(1).map(lambda *_: None)]
    assert sum(len(e) for e in examples) == 8 and all(float(e.weight[0]) == 0.125 for e in examples)


def test_rates_and_groups_are_those_of_the_step(tmp_path: Path) -> None:
    found, _ = run(tmp_path, two_groups, batches(3))
    rules = found.step(2).optimizers
    assert rules["first.weight"].lr == 0.05 * 0.8**2 and rules["first.bias"].lr == 0.01 * 0.8**2
    assert rules["first.weight"].decay == 0.01 and rules["first.bias"].decay == 0.0


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling_is_divided_out(clip: float | None, fused: bool, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=2)
    make = lambda m: optim.AdamW(m.parameters(), lr=0.05, fused=fused)  # noqa: E731
    found, model = run(tmp_path, make, batches(STEPS), clip=clip, scaler=scaler)
    assert [found.step(n).share for n in found.steps] == [2.0**-k for k in (7, 7, 8, 8, 9)]
    assert_replays(found, model)
    assert_adds_up(found, active=clip is not None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:capture.*non-finite:RuntimeWarning")
def test_steps_that_a_scaler_leaves_out_leave_no_record(fused: bool, tmp_path: Path) -> None:
    data = batches(4)
    data[1]["x"][0, 0] = float("inf")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    make = lambda m: optim.AdamW(m.parameters(), lr=0.05, fused=fused)  # noqa: E731
    found, model = run(tmp_path, make, data, scaler=scaler)
    assert [found.step(n).unused for n in found.steps] == [(), (0,), ()]
    assert_replays(found, model)
    assert_adds_up(found)


def scaled_loop(model: nn.Module, data: Any, scaler: torch.amp.GradScaler, loss: Any) -> None:
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss(model, data)).backward()
    scaler.unscale_(moving)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(moving)
    scaler.update()


def test_a_scaler_that_nobody_mentioned_is_seen(rng: torch.Generator) -> None:
    """Where the model's own loss carries the scale it is divided out; else the loop is stopped."""
    steps, blocks = list[Step](), list[Block]()
    model, scaler = seeded(LossLM), torch.amp.GradScaler("cpu", init_scale=64.0)
    with capture(model, sinks=[blocks.append], trajectory=record(steps.append)):
        scaled_loop(model, documents(rng, [5, 3]), scaler, own_loss)
    assert steps[0].share == 1 / 64
    assert_adds_up(Recorded(steps, blocks), active=True)
    model = seeded(MLP)
    with (
        capture(model, loss="example_mean"),
        pytest.raises(RuntimeError, match="GradScaler multiplies the loss by 64"),
    ):
        scaled_loop(model, classes(rng), scaler, mean_ce)


def test_clipping_by_value_is_not_taken_for_clipping_by_norm(tmp_path: Path) -> None:
    found, model = run(
        tmp_path,
        OPTIMIZERS["adamw"],
        batches(2),
        spoil=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    )
    assert [found.step(n).clip for n in found.steps] == [None, None]
    assert_replays(found, model)


def test_norms_and_replays_include_parameters_that_are_not_captured(tmp_path: Path) -> None:
    model = seeded(MLP)
    found, model = run(
        tmp_path, OPTIMIZERS["adamw"], batches(3), model=model, clip=0.05, how={"include": "second"}
    )
    assert_replays(found, model)
    for number in found.steps:
        now, total = found.step(number), sums(found, number)
        assert set(total) == {"second.weight", "second.bias"} < set(now.gradients)
        assert now.clip is not None and now.clip.coefficient < 0.99
        for name, g in total.items():
            assert torch.allclose(now.clip.coefficient * g, now.gradients[name], rtol=1e-10, atol=1e-15)
        clipped = float(torch.stack([g.norm() for g in now.gradients.values()]).norm())
        assert now.clip.coefficient * now.clip.norm == pytest.approx(clipped, rel=1e-12)


def test_parameters_without_gradient_have_values_and_no_optimizer_in_a_step(tmp_path: Path) -> None:
    model = seeded(lambda: nn.Sequential(MLP(), nn.Linear(2, 2)))
    loss = lambda model, batch: mean_ce(model[0], batch)  # noqa: E731
    found, model = run(tmp_path, OPTIMIZERS["adamw"], batches(2), model=model, loss=loss)
    for names, there in ((found.step(0).optimizers, False), (found.step(0).parameters, True)):
        assert any(name.startswith("1.") for name in names) == there
    assert_replays(found, model)


def test_a_model_with_its_own_loss_and_tied_weights(tmp_path: Path) -> None:
    gen = torch.Generator().manual_seed(1)
    data = [documents(gen, [5, 3]) for _ in range(3)]
    model = seeded(lambda: LossLM(d=4, layers=1, tied=True))
    found, model = run(tmp_path, two_groups, data, model=model, loss=own_loss, clip=0.1, how={"loss": None})
    assert_replays(found, model)
    assert_adds_up(found, active=True)


def test_the_clipping_of_an_empty_batch_is_unknown(rng: torch.Generator) -> None:
    """What the backward before left in `.grad` says nothing about it."""
    model, steps = seeded(MLP), list[Step]()
    moving = optim.SGD(model.parameters(), lr=0.1)
    with capture(model, loss="sum", trajectory=record(steps.append)):
        for rows in (3, 0, 3):
            moving.zero_grad()
            sum_ce(model, classes(rng, rows)).backward()
            moving.step()
    assert [step.clip is None for step in steps] == [False, True, False]


def test_several_optimizers_make_one_step() -> None:
    model, steps, blocks = seeded(MLP), list[Step](), list[Any]()
    first = optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
    rest = optim.AdamW([*model.second.parameters(), *model.last.parameters()], lr=0.05)
    with capture(model, sinks=[blocks.append], loss="example_mean", trajectory=record(steps.append)):
        for batch in batches(3):
            mean_ce(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            first.step()
            rest.step()
            model.zero_grad()
    found = Recorded(steps, blocks)
    assert found.steps == (0, 1, 2)
    assert {n: rule.kind for n, rule in steps[0].optimizers.items()} == {
        n: "sgd" if n.startswith("first") else "adamw" for n, _ in model.named_parameters()
    }
    assert_replays(found, model)
    assert_adds_up(found, active=True)


def test_a_step_with_a_closure() -> None:
    """How Lightning runs a step: backward and clipping inside ``optimizer.step``."""
    model, steps, blocks = seeded(MLP), list[Step](), list[Any]()
    moving = two_groups(model)

    def closure(batch: Any) -> float:
        moving.zero_grad()
        loss = mean_ce(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss.item()

    with capture(model, sinks=[blocks.append], loss="example_mean", trajectory=record(steps.append)):
        for batch in batches(3):
            moving.step(lambda batch=batch: closure(batch))
    found = Recorded(steps, blocks)
    assert found.steps == (0, 1, 2)
    assert_replays(found, model)
    assert_adds_up(found, active=True)


def test_some_steps_and_some_parts() -> None:
    model, steps = seeded(MLP), list[Step]()
    recorder = record(steps.append, parameters=False, gradients=False, when=lambda step: step % 2 == 1)
    with capture(model, loss="example_mean", trajectory=recorder):
        loop(model, batches(4), OPTIMIZERS["adamw"], clip=0.05)
    assert [s.step for s in steps] == [1, 3]
    assert not steps[0].parameters and not steps[0].gradients
    assert steps[0].clip is not None and steps[0].clip.coefficient < 0.99
    assert steps[0].states["first.weight"]["step"] == 1


def test_records_are_copies() -> None:
    model, steps = seeded(MLP), list[Step]()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with capture(model, loss="example_mean", trajectory=record(steps.append)):
        loop(model, batches(2), OPTIMIZERS["momentum"])
    assert all(torch.equal(steps[0].parameters[n], p) for n, p in before.items())
    assert steps[0].states["first.weight"] == {}


def test_an_optimizer_without_rule_is_refused_before_it_moves() -> None:
    model = seeded(MLP)
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(ValueError, match="optimizer 'adafactor': it divides by row and column means"),
        capture(model, loss="example_mean", trajectory=record(list[Step]().append)),
    ):
        loop(model, batches(1), lambda m: optim.Adafactor(m.parameters()))
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


# Files.


def a_step(dtype: torch.dtype = torch.float32) -> Step:
    model = seeded(MLP, dtype=dtype)
    steps: list[Step] = []
    data = [{"x": b["x"].to(dtype), "y": b["y"]} for b in batches(2)]
    with capture(model, loss="example_mean", trajectory=record(steps.append)):
        loop(model, data, two_groups, clip=0.05)
    return steps[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_is_read_as_it_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    written = a_step(dtype)
    written = replace(written, unused=(0, 2))
    write_step(tmp_path, written)
    found = open_trajectory(tmp_path).step(1)
    same = ("step", "optimizers", "clip", "share", "unused")
    assert all(getattr(found, name) == getattr(written, name) for name in same)
    for name in written.optimizers:
        assert found.states[name].keys() == written.states[name].keys()
        pairs = [(x, found.states[name][key]) for key, x in written.states[name].items()]
        pairs += [(written.parameters[name], found.parameters[name])]
        pairs += [(written.gradients[name], found.gradients[name])]
        assert all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


def test_plain_h5py_reads_a_step(tmp_path: Path) -> None:
    written = a_step()
    write_step(tmp_path, written)
    with h5py.File(step_path(tmp_path, 1)) as file:
        group = next(g for g in file["parameters"].values() if g.attrs["name"] == b"first.weight")
        assert group["state/exp_avg"].shape == group["value"].shape == (6, 4)
        assert file.attrs["coefficient"] == written.clip.coefficient  # pyright: ignore[reportOptionalMemberAccess]


def test_nothing_is_left_of_a_step_that_cannot_be_written(tmp_path: Path) -> None:
    written = a_step()
    bad = {n: {"seen": torch.ones(2, dtype=torch.bool)} for n in written.optimizers}
    with pytest.raises(ValueError, match="'state/seen' of parameter"):
        write_step(tmp_path, Step(1, written.optimizers, bad))
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="record: '.*file' cannot be made: .* Give a directory"):
        record(tmp_path / "file")


def test_a_damaged_step_is_refused(tmp_path: Path) -> None:
    write_step(tmp_path, a_step())
    path = step_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4000] = b"\x55" * 4000
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="cannot be read as a step"):
        read_step(path)


def test_a_run_is_not_written_over_by_accident(tmp_path: Path) -> None:
    write_step(tmp_path, a_step())
    with pytest.raises(ValueError, match="holds 1 steps of another run"):
        record(tmp_path)
    assert isinstance(record(tmp_path, overwrite=True), Recorder) and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds no recorded steps"):
        open_trajectory(tmp_path)


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Steps after the checkpoint are superseded, in the record and in the store alike."""
    model, data = seeded(MLP), batches(6)
    moving = optim.AdamW(model.parameters(), lr=0.05)

    def train(some: list[Any], **done: int) -> None:
        with (
            store(tmp_path, run="r", **done) as sink,
            capture(model, sinks=[sink], loss="example_mean", trajectory=record(tmp_path, **done)),
        ):
            for batch in some:
                moving.zero_grad()
                mean_ce(model, batch).backward()
                moving.step()

    train(data[:3])
    saved = copy.deepcopy((model.state_dict(), moving.state_dict()))
    train(data[3:], steps_done=3)
    model.load_state_dict(saved[0])
    moving.load_state_dict(saved[1])
    train(data[:2], steps_done=3)
    found = open_trajectory(tmp_path)
    assert found.steps == (0, 1, 2, 3, 4)
    assert_adds_up(found)
    moving.zero_grad()
    chosen: list[int] = []
    with capture(model, trajectory=record([].append, when=lambda k: bool(chosen.append(k)), steps_done=7)):
        mean_ce(model, data[0]).backward()
        moving.step()
    assert set(chosen) == {7}
    with pytest.raises(ValueError, match="steps_done=-1"):
        record(tmp_path, steps_done=-1)


def test_two_captures_do_not_share_a_record(tmp_path: Path) -> None:
    model, recording = seeded(MLP), record(tmp_path)
    with capture(model, trajectory=recording):
        loop(model, batches(1), two_groups)
    with pytest.raises(ValueError, match="has recorded steps of another capture"):
        capture(model, trajectory=recording)


def test_steps_and_gradients_may_lie_apart(tmp_path: Path) -> None:
    model = seeded(MLP)
    with (
        store(tmp_path / "grads") as sink,
        capture(model, sinks=[sink], loss="example_mean", trajectory=record(tmp_path / "steps")),
    ):
        loop(model, batches(2), two_groups)
    assert_adds_up(open_trajectory(tmp_path / "steps", open_store(tmp_path / "grads")))
    with pytest.raises(KeyError, match="has no step 7"):
        open_trajectory(tmp_path / "steps").step(7)
    with pytest.raises(ValueError, match="holds no shards"):
        open_trajectory(tmp_path / "steps").gradients(0)


# Trainers.


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer(accumulate: int, tmp_path: Path) -> None:
    """Weight decay for matrices only, clipping, a schedule, accumulation over unequal numbers of tokens; float64."""
    from .test_trainer import STEPS as COUNT
    from .test_trainer import doubled, trainer

    def train(model: nn.Module) -> nn.Module:
        running = trainer(model, tmp_path / "run", accumulate, weight_decay=0.1)
        running.args.max_grad_norm = 0.5
        running.train()
        return model

    alone, model = train(doubled()), doubled()
    with (
        store(tmp_path / "kept", keep_factored=True) as sink,
        capture(model, sinks=[sink], trajectory=record(tmp_path / "kept")),
    ):
        train(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    found = open_trajectory(tmp_path / "kept")
    assert len(found.steps) == COUNT
    assert {rule.decay for rule in found.step(0).optimizers.values()} == {0.0, 0.1}
    assert_replays(found, model)
    assert_adds_up(found, active=True)


def test_read_optimizer_after_a_step_is_the_state_of_the_next() -> None:
    model, steps = seeded(MLP), list[Step]()
    moving = two_groups(model)
    with capture(model, loss="example_mean", trajectory=record(steps.append)):
        loop(model, batches(2), lambda _: moving)
    _, states = read_optimizer(moving, model)
    now = steps[1]
    for name, rule in now.optimizers.items():
        after = step(rule, now.parameters[name], now.gradients[name], now.states[name])[1]
        assert torch.allclose(after["exp_avg_sq"], states[name]["exp_avg_sq"], rtol=1e-12)
