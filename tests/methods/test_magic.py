"""Exact metagradients against central differences of literal retraining, for every optimizer and way to record."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from attrax.core import Scores
from attrax.core.trajectory import Recorded
from attrax.frontends import functional
from attrax.frontends.runs.replay import Replay, replay
from attrax.methods.magic import magic
from attrax.methods.trajectory_influence import trajectory_influence

from ..core.dense import assert_same
from ..core.toys import generator, refused, unchecked
from .runs import Run, batches, recipe, run, thinned, warm


def groups(parameters, **_):
    """Weight decay, learning rate and momenta by group, as no-decay groups have them."""
    w1, b1, w2, b2 = parameters
    many = [
        {"params": [w1, w2], "weight_decay": 0.2},
        {"params": [b1], "lr": 0.02},
        {"params": [b2], "betas": (0.5, 0.9)},
    ]
    return torch.optim.AdamW(many, lr=0.05, betas=(0.9, 0.99), weight_decay=0.0)


ADAM = dict(lr=0.05, betas=(0.9, 0.99))
RUNS = {
    "adamw": dict(make=torch.optim.AdamW, **ADAM, weight_decay=0.0),
    "decay": dict(make=torch.optim.AdamW, **ADAM, weight_decay=0.1),
    "clipped": dict(make=torch.optim.AdamW, **ADAM, max_norm=0.3),
    "clipped, decay, schedule": dict(
        make=torch.optim.AdamW, **ADAM, weight_decay=0.05, max_norm=0.2, scheduler=warm
    ),
    "coupled decay": dict(make=torch.optim.Adam, **ADAM, weight_decay=0.1),
    "coupled decay, clipped": dict(make=torch.optim.Adam, **ADAM, weight_decay=0.1, max_norm=0.2),
    "amsgrad": dict(make=torch.optim.Adam, lr=0.05, betas=(0.9, 0.7), amsgrad=True),
    "sgd": dict(make=torch.optim.SGD, lr=0.3),
    "momentum": dict(make=torch.optim.SGD, lr=0.2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": dict(make=torch.optim.SGD, lr=0.2, momentum=0.9, nesterov=True, max_norm=0.4),
    "groups": dict(make=groups, max_norm=0.4, scheduler=warm),
    "accumulation": dict(make=torch.optim.AdamW, **ADAM, batches=batches(4, (2, 3, 1)), max_norm=0.3),
    "several epochs": dict(make=torch.optim.AdamW, **ADAM, batches=batches(6, (3,), repeated=True)),
    "sum": dict(make=torch.optim.SGD, lr=0.1, momentum=0.5, reduction="sum"),
    "nadam": dict(make=torch.optim.NAdam, **ADAM, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": dict(make=torch.optim.RAdam, lr=0.05, betas=(0.9, 0.7)),
    "rmsprop": dict(make=torch.optim.RMSprop, lr=0.02, centered=True, momentum=0.5),
    "adagrad": dict(make=torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "maximize": dict(make=torch.optim.Adam, **ADAM, maximize=True, weight_decay=0.1),
}
MADE: dict[str, Run] = {}
SCORED: dict[str, Scores] = {}


@pytest.fixture(autouse=True)
def quick():
    """Without the run-time type checker, whose cost is most of a small run's."""
    with unchecked():
        yield


def made(name: str) -> Run:
    if name not in MADE:
        MADE[name] = run(recipe(**RUNS[name]))
    return MADE[name]


def again(r: Run, trajectory: Recorded | None = None) -> Replay:
    reduction = r.recipe.reduction
    data = r.recipe.batches
    return replay(
        r.recipe.model,
        data,
        r.recipe.loss,
        trajectory or r.trajectory,
        reduction=reduction,
        source=functional,
    )


def scored(name: str) -> Scores:
    if name not in SCORED:
        SCORED[name] = magic(again(made(name)), made(name).query)
    return SCORED[name]


def differences(r: Run, key: tuple[str, int], h: float = 1e-4) -> Tensor:
    """-df_q / dw of one use of one example, by differences of trained models' losses, of fourth order in h."""

    def slope(h: float) -> Tensor:
        up, down = (r.losses(lambda i, s, d=d: 1.0 + d if (i, s) == key else 1.0) for d in (h, -h))
        return (up - down) / (2 * h)

    return -(4 * slope(h) - slope(2 * h)) / 3


@pytest.mark.parametrize("name", RUNS)
def test_metagradients_are_differences_of_retrained_models(name):
    r = made(name)
    s = scored(name)
    keys = list(zip(s.ids, s.steps, strict=True))
    assert keys == r.uses() and s.query_ids == r.query_ids
    chosen = torch.randperm(len(keys), generator=generator(3))[:2].tolist()
    expected = torch.stack([differences(r, keys[k]) for k in chosen])
    assert_same(s.values[chosen], expected, 1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_influence_with_exact_hessians_is_the_metagradient(name):
    r = made(name)
    exact, s = trajectory_influence(r.trajectory, r.query, curvature=again(r).hvp), scored(name)
    assert_same(exact.values, s.values)
    assert (exact.ids, exact.steps, exact.micros) == (s.ids, s.steps, s.micros)


@pytest.mark.parametrize(
    "name", ["clipped, decay, schedule", "coupled decay", "momentum", "accumulation", "groups"]
)
@pytest.mark.parametrize("every", [2, 3, 100])
def test_steps_between_recorded_ones_are_trained_again(name, every):
    r = made(name)
    few = magic(again(r, thinned(r.trajectory, every)), r.query)
    assert_same(few.values, scored(name).values)


@pytest.mark.parametrize("every", [1, 3])
def test_parts_that_run_again_in_backward_do_so_at_the_parameters_of_the_step(every):
    r = made("clipped")
    recorded = thinned(r.trajectory, every)
    model = copy.deepcopy(r.recipe.model)
    assert isinstance(model, nn.Sequential)
    model[2] = checkpoint_wrapper(model[2])
    checkpointed, plain = replace(again(r, recorded), model=model), again(r, recorded)
    assert_same(magic(checkpointed, r.query).values, scored("clipped").values)
    vectors = r.trajectory.step(1).parameters
    for found, right in (
        (x.queries(r.queries).hvp(0, vectors) for x in (checkpointed, plain)),
        (x.gradient(0, vectors) for x in (checkpointed, plain)),
    ):
        for name, value in right.items():
            assert_same(found[name], value)


def test_at_most_a_segment_of_states_is_held():
    r = made("adamw")
    held: list[int] = []

    class Watched(Replay):
        def pull(self, number, parameters, rho):
            held.append(number)
            return super().pull(number, parameters, rho)

        def gradient(self, number, parameters):
            held.append(-number)
            return super().gradient(number, parameters)

    few = thinned(r.trajectory, 3)
    watched = Watched(r.recipe.model, r.recipe.batches, r.recipe.loss, few, "example_mean", functional)
    magic(watched, r.query)
    assert held == [-3, -4, -5, 5, 4, 3, 0, -1, -2, 2, 1, 0]


def test_a_removed_example_that_shrinks_its_batch():
    for removal in ("example_mean", "token_mean"):
        r = run(
            recipe(torch.optim.AdamW, lr=0.05, reduction=removal, renormalized=True, batches=batches(4, (3,)))
        )
        s = magic(again(r), r.query, removal=removal)
        expected = torch.stack([differences(r, key) for key in r.uses()[:3]])
        assert_same(s.values[:3], expected, 1e-6)
        exact = trajectory_influence(r.trajectory, r.query, curvature=again(r).hvp, removal=removal)
        assert_same(exact.values, s.values)


def test_refusals():
    r = made("adamw")
    with refused("magic: got", "a run without a model", "attrax.replay(model", error=TypeError):
        magic(r.trajectory, r.query)  # type: ignore[arg-type]
    with refused("magic", "step 0", "no parameters"):
        magic(again(r, thinned(r.trajectory, 2, first=1)), r.query)
    unknown = Recorded([replace(x, clip=None) for x in r.trajectory.records], [])
    with refused("magic", "step 5", "clipped", "Clip(1.0, norm)"):
        magic(again(r, unknown), r.query)
    with refused("magic", "no steps between 1 and 3"):
        magic(again(r, Recorded([x for x in r.trajectory.records if x.step != 2], [])), r.query)
    with refused("replay", "step 2 holds no parameters"):
        again(r, thinned(r.trajectory, 3)).hvp(2, {})
    with refused("replay", "no batches", "step 5"):
        magic(replay(r.recipe.model, {}, r.recipe.loss, r.trajectory), r.query)
    with refused("removal", "'gone'"):
        magic(again(r), r.query, removal="gone")
    with refused("dropout"):
        replay(nn.Sequential(nn.Dropout(0.5)), {}, r.recipe.loss, r.trajectory)
