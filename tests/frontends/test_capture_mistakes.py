"""What a capture says when its options are not what they should be, and that a mistake costs nothing."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from attrax.core import Block, Directions, Projection
from attrax.frontends import capture, live, open_store, record, select, store, trainer_callback

from .loops import mean_ce, sum_ce
from .models import MLP, classes, seeded


def step(model: nn.Module, batch: Any) -> None:
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    moving.zero_grad()
    sum_ce(model, batch).backward()
    moving.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": print}, "sinks: got .* expected a list of functions"),
        ({"sinks": ["grads/"]}, r"sinks: 'grads/' is no function, such as attrax.store\(path\)"),
        ({"transform": Projection(4)}, r"transform: .* is no function, such as attrax.projected"),
        ({"trajectory": "run/"}, r"trajectory: got 'run/'; expected attrax.record\('run/'\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_function_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        capture(seeded(MLP), **options)


def test_examples_below_none_are_refused(rng):
    model, x = seeded(MLP), classes(rng, 3)["x"]
    how: Any = lambda inputs, rows: -torch.arange(rows) - 2  # noqa: E731
    with capture(model, examples=how), pytest.raises(ValueError, match="int64, from -4 for 3 rows; expected"):
        model(x)


def test_directions_name_what_the_loss_does_not_tell(rng):
    model, batch = seeded(MLP), classes(rng)
    moving = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"directions=Directions\(target='mean'.*Declare the loss at capture"
    with capture(model, sinks=[print], directions=Directions(), loss="example_mean"):
        mean_ce(model, batch).backward()
        with pytest.raises(ValueError, match=message):
            moving.step()


def test_a_capture_of_nothing_warns(rng):
    model, other = seeded(MLP), seeded(MLP)
    blocks: list[Block] = []
    with (
        pytest.warns(RuntimeWarning, match="nothing was captured.*another copy"),
        capture(model, sinks=[blocks.append], loss="sum"),
    ):
        step(other, classes(rng))
    assert not blocks


def test_a_capture_tells_how_far_it_is(rng):
    model, batch = seeded(MLP), classes(rng)
    with capture(model, sinks=[lambda block: None], loss="sum") as running:
        step(model, batch)
        step(model, batch)
    assert repr(running) == "Capture(step 1, 8 examples handed on, 0 skipped, 100.0% of trainable parameters)"


def test_a_mistake_leaves_no_writer_behind(tmp_path, rng):
    model = seeded(MLP)
    with pytest.raises(ValueError, match="no layer is selected"):
        capture(model, include="no such layer", sinks=[store(tmp_path, run="job")])
    with capture(model, sinks=[store(tmp_path, run="job")], loss="sum"):
        step(model, classes(rng))
    assert len(open_store(tmp_path, run="job")) == 4


def test_a_run_that_goes_on_says_where(tmp_path, rng):
    """Else its steps are numbered from 0 again, and replace those of the same examples."""
    model, batch = seeded(MLP), classes(rng)
    with capture(model, sinks=[store(tmp_path, run="job")], loss="sum"):
        step(model, batch)
    with pytest.raises(ValueError, match=r"run 'job' .* has gradients already.*steps_done=n"):
        capture(model, sinks=[store(tmp_path, run="job")], loss="sum")
    with capture(model, sinks=[store(tmp_path, run="job", steps_done=1)], loss="sum"):
        step(model, batch)
    assert open_store(tmp_path).steps() == (0, 1)


def test_store_and_trajectory_go_on_at_one_step(tmp_path):
    sinks = [store(tmp_path, run="job", steps_done=0)]
    with pytest.raises(ValueError, match=r"go on from different steps, \[0, 3\]"):
        capture(seeded(MLP), sinks=sinks, trajectory=record(tmp_path, steps_done=3))


@pytest.mark.parametrize("name", ["exclude", "recompute", "include"])
def test_a_pattern_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: 'a\\(' is no regular expression"):
        capture(seeded(MLP), **{name: "a("})


@pytest.mark.parametrize("made", [capture, lambda model, **options: live(model, [], **options)])
@pytest.mark.parametrize("name", ["exclude", "recompute"])
def test_a_pattern_that_matches_nothing_is_told(made, name):
    with pytest.warns(UserWarning, match=f"{name}='lm_haed' matches no module.*such as"):
        made(seeded(MLP), **{name: "lm_haed"})


@pytest.mark.usefixtures("unchecked")
def test_a_selection_among_sinks_says_where_it_belongs(rng):
    model, batch = seeded(MLP), classes(rng)
    keep = select(batch, lambda scores, _: scores > 0, loss=lambda model, batch: model(batch["x"])[:, 0])
    with (
        pytest.raises(TypeError, match=r"select: got a Block.*capture\(after_backward="),
        capture(model, sinks=[keep], loss="sum"),
    ):
        step(model, batch)


@pytest.mark.parametrize("given", [torch.ones(4), (torch.ones(4),), None, (0.25, 1)])
def test_weights_that_are_no_pair_are_refused(rng, given):
    model, batch = seeded(MLP), classes(rng, 4)
    how: Any = lambda inputs, examples: given  # noqa: E731
    with (
        capture(model, sinks=[print], loss=how),
        pytest.raises(ValueError, match=r"loss= returned .*; expected \(c, n\), tensors"),
    ):
        step(model, batch)


def test_a_recorded_run_tells_of_steps_that_it_lost(tmp_path, rng):
    model, batch = seeded(MLP), classes(rng)
    with capture(model, loss="sum", trajectory=record(tmp_path)):
        for _ in range(3):
            step(model, batch)
    with pytest.warns(
        RuntimeWarning, match=r"goes on at step 6 but is recorded up to step 2: steps \[3, 4, 5\]"
    ):
        record(tmp_path, steps_done=6)
    record(tmp_path, steps_done=6, when=lambda step: step % 6 == 0)
    record(tmp_path / "new", steps_done=6)
    record(tmp_path, steps_done=3)


def test_a_framework_that_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "olmo_core", None)
    with pytest.raises(ImportError, match="olmo_core cannot be imported.*pip install ai2-olmo-core"):
        trainer_callback("olmo_core")
