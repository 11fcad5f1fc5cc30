"""LESS against literal torch optimizer steps on copies of the model, one example at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attrax.core import Mask, Projection, collect, materialized, projected
from attrax.frontends import functional, live
from attrax.frontends.runs.replay import replay
from attrax.methods.less import Less, less, less_checkpoints

from ..core.dense import assert_same, vectors
from ..core.toys import refused
from .runs import LOSS, QUERIES, Run, at, batches, recipe, run, warm

MAKERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.2)),
    "momentum": (torch.optim.SGD, dict(lr=0.2, momentum=0.9, dampening=0.1)),
    "nesterov": (torch.optim.SGD, dict(lr=0.2, momentum=0.9, nesterov=True)),
    "adam": (torch.optim.Adam, dict(lr=0.05)),
    "amsgrad": (torch.optim.Adam, dict(lr=0.05, amsgrad=True)),
    "adamw": (torch.optim.AdamW, dict(lr=0.05, weight_decay=0.1, scheduler=warm)),
    "adamax": (torch.optim.Adamax, dict(lr=0.05)),
    "nadam": (torch.optim.NAdam, dict(lr=0.05)),
    "radam": (torch.optim.RAdam, dict(lr=0.05)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.05, centered=True, momentum=0.5)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.05, lr_decay=0.1)),
    "adadelta": (torch.optim.Adadelta, dict(lr=0.5)),
    "rprop": (torch.optim.Rprop, dict(lr=0.05)),
    "asgd": (torch.optim.ASGD, dict(lr=0.05, lambd=0.0)),
}
MADE: dict[str, Run] = {}


def made(name: str) -> Run:
    make, about = MAKERS[name]
    if name not in MADE:
        MADE[name] = run(recipe(make, batches=batches(4, (2, 1)), **about))
    return MADE[name]


def again(r: Run, source=functional):
    return replay(r.recipe.model, r.recipe.batches, LOSS, r.trajectory, source=source)


def literal_direction(name: str, r: Run, step: int, batch, row: int) -> Tensor:
    """(theta_base - theta_after) / lr after one torch step on one example, from the recorded state."""
    record, (make, about) = r.trajectory.records[step], MAKERS[name]
    model = at(r.model, record.parameters)
    kept = {k: v for k, v in about.items() if k != "scheduler"}
    optimizer = make(model.parameters(), **kept)
    lr = next(iter(record.optimizers.values())).lr
    optimizer.param_groups[0]["lr"] = lr
    for n, p in model.named_parameters():
        state = record.states.get(n)
        if state:
            optimizer.state[p] = {k: v.clone() for k, v in state.items()}
    one = {"x": batch["x"][row : row + 1], "y": batch["y"][row : row + 1]}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    LOSS(model, one).sum().backward()
    optimizer.step()
    shrink = 1 - lr * (about.get("weight_decay", 0) if make is torch.optim.AdamW else 0)
    return torch.cat(
        [((shrink * before[n] - p) / lr).detach().flatten() for n, p in model.named_parameters()]
    )


def query_vectors(r: Run, step: int) -> Tensor:
    grads = collect(functional(at(r.model, r.trajectory.records[step].parameters), QUERIES, LOSS)).grads
    return vectors(grads)


def written_out(name: str, r: Run) -> Tensor:
    rows = []
    for step, data in r.recipe.batches.items():
        lr = next(iter(r.trajectory.records[step].optimizers.values())).lr
        moves = [literal_direction(name, r, step, batch, i) for batch in data for i in range(len(batch["y"]))]
        v = query_vectors(r, step)
        rows += [lr * torch.cosine_similarity(move, v, dim=1, eps=0) for move in moves]
    return torch.stack(rows)


@pytest.mark.parametrize("name", MAKERS)
def test_scores_are_cosines_with_literal_steps(name):
    r = made(name)
    s = less(r.trajectory, again(r).queries(QUERIES))
    assert_same(s.values, written_out(name, r), 1e-8)
    assert list(zip(s.ids, s.steps, strict=True)) == r.uses() and s.query_ids == ("p", "q", "r")


def test_layers_captured_by_hooks():
    r = made("adamw")
    hooked = again(r, live)
    assert_same(less(hooked, hooked.queries(QUERIES)).values, written_out("adamw", r), 1e-8)


def test_the_official_variant():
    """m' / sqrt(v' + eps), no bias correction; weights add up to one."""
    r = made("adamw")
    rates = [x.optimizers["0.weight"].lr for x in r.trajectory.records]
    rows = []
    for step, record in enumerate(r.trajectory.records):
        for _, grads in again(r).gradients(step).map(lambda n, leaf, _: leaf.w * 3):
            moves = []
            for n, g in grads.items():
                state = {
                    "exp_avg": torch.zeros(()),
                    "exp_avg_sq": torch.zeros(()),
                    **record.states.get(n, {}),
                }
                m, v = 0.9 * state["exp_avg"] + 0.1 * g, 0.999 * state["exp_avg_sq"] + 0.001 * g * g
                moves.append((m / (v + 1e-8).sqrt()).flatten(1))
            cosines = torch.cosine_similarity(
                torch.cat(moves, 1)[:, None], query_vectors(r, step)[None], dim=2, eps=0
            )
            rows.append(rates[step] / sum(rates) * cosines)
    s = less(r.trajectory, again(r).queries(QUERIES), Less("official"))
    assert_same(s.values, torch.cat(rows), 1e-8)


@pytest.mark.parametrize("spec", [Mask(3), Projection(2), Projection(5, sides="dense")])
def test_projections_come_after_directions(spec):
    r = made("adam")
    s = less(r.trajectory, again(r).queries(QUERIES), Less(projection=spec))
    shapes = {n: p.shape for n, p in r.model.named_parameters()}
    through = projected(spec)

    def seen(rows: Tensor) -> Tensor:
        parts = rows.split([x.numel() for x in shapes.values()], 1)
        leaves = [
            through(n, materialized(n, x.view(-1, *shapes[n]))) for n, x in zip(shapes, parts, strict=True)
        ]
        return torch.cat([leaf.w.flatten(1) for leaf in leaves], 1)

    (batch, *_) = r.recipe.batches[2]
    moves = torch.stack([literal_direction("adam", r, 2, batch, i) for i in range(2)])
    cosines = torch.cosine_similarity(seen(moves)[:, None], seen(query_vectors(r, 2))[None], dim=2, eps=0)
    assert_same(s.values[6:8], 0.05 * cosines, 1e-8)


def test_checkpoints():
    """All examples at every checkpoint, its state given; rates of the epochs."""
    r = made("adamw")
    records = [r.trajectory.records[1], r.trajectory.records[3]]
    everything = [b for data in r.recipe.batches.values() for b in data]
    sides = [
        [functional(at(r.model, x.parameters), data, LOSS) for data in (everything, QUERIES)] for x in records
    ]
    checkpoints = [(train, query, record) for (train, query), record in zip(sides, records, strict=True)]
    s = less_checkpoints(checkpoints, learning_rates=[0.3, 0.1])
    expected = torch.zeros(12, 3, dtype=torch.float64)
    for step, rate in ((1, 0.3), (3, 0.1)):
        moves = [literal_direction("adamw", r, step, b, i) for b in everything for i in range(len(b["y"]))]
        v = query_vectors(r, step)
        expected += torch.stack([rate * torch.cosine_similarity(move, v, dim=1, eps=0) for move in moves])
    assert_same(s.values, expected, 1e-8)
    assert s.ids == tuple(i for b in everything for i in b["example_ids"]) and not s.steps
    shares = less_checkpoints(checkpoints, Less("official"), learning_rates=[3.0, 1.0])
    assert_same(
        shares.values, less_checkpoints(checkpoints, Less("official"), learning_rates=[0.3, 0.1]).values
    )


def test_directions_depend_on_the_scale_and_the_momentum():
    r = made("adamw")
    queries = again(r).queries(QUERIES)
    scores = [
        less(r.trajectory, queries, how).values
        for how in (Less(), Less(target="as_trained"), Less(centered=True))
    ]
    assert (scores[0] - scores[1]).abs().max() > 1e-3 and (scores[0] - scores[2]).abs().max() > 1e-3


def test_refusals():
    r = made("sgd")
    queries = again(r).queries(QUERIES)
    with refused("variant", "'mine'"):
        less(r.trajectory, queries, Less("mine"))
    with refused("no checkpoints"):
        less_checkpoints([])
    with refused("less", "different parameters"):
        record = r.trajectory.records[0]
        train = functional(at(r.model, record.parameters), r.recipe.batches[0], LOSS)
        less_checkpoints([(train, r.query, record)])
    record = r.trajectory.records[0]
    slow = replace(record.optimizers["0.weight"], hyper={"lr": 0.1})
    mixed = replace(record, optimizers={**record.optimizers, "0.weight": slow})
    with refused("learning rates [0.1, 0.2]", "learning_rates="):
        less_checkpoints([(r.query, r.query, mixed)])
