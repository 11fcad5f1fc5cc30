"""In-run Shapley values against all coalitions of a step's game."""

from itertools import combinations
from math import factorial

import pytest
import torch
from torch import Tensor

from attrax.core import Blocks
from attrax.frontends import functional, live
from attrax.frontends.runs.replay import replay
from attrax.methods.shapley import shapley
from attrax.methods.tracin import tracin

from ..core.dense import assert_same
from ..core.toys import refused
from .runs import LOSS, QUERIES, at, batches, dense, flat, recipe, run


def groups(parameters, **_):
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.2)


RUN = run(recipe(groups, batches=batches(3, (3, 2))))
LIKE = RUN.trajectory.records[0].parameters


def again(source=functional):
    return replay(RUN.recipe.model, RUN.recipe.batches, LOSS, RUN.trajectory, source=source)


def expansion(record) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Learning rates [P], gradients [B, P], query gradients [Q, P] and Hessians [Q, P, P] of a step, written out."""
    rates = torch.cat([torch.full_like(x.flatten(), record.optimizers[n].lr) for n, x in LIKE.items()])
    G = torch.cat([dense(b, LIKE) for b in RUN.trajectory.blocks if b.examples.step == record.step])
    theta, pieces = flat(record.parameters, LIKE), [x.numel() for x in LIKE.values()]

    def loss(vector, q):
        parts = zip(LIKE, vector.split(pieces), strict=True)
        values = {n: x.view_as(LIKE[n]) for n, x in parts}
        logits = torch.func.functional_call(RUN.model, values, (QUERIES[0]["x"][q],))
        return torch.nn.functional.cross_entropy(logits, QUERIES[0]["y"][q])

    v = [torch.autograd.functional.jacobian(lambda t, q=q: loss(t, q), theta) for q in range(3)]
    H = [torch.autograd.functional.hessian(lambda t, q=q: loss(t, q), theta) for q in range(3)]
    return rates, G, torch.stack(v), torch.stack(H)


def coalitions(record, order: int) -> Tensor:
    """Shapley values [B, Q] of the expanded game, from its definition."""
    rates, G, v, H = expansion(record)
    n = len(G)

    def utility(S):
        move = rates * G[list(S)].sum(0)
        return v @ move - (0.5 * torch.einsum("p,qpr,r->q", move, H, move) if order == 2 else 0)

    values = torch.zeros(n, 3, dtype=torch.float64)
    for i in range(n):
        for size in range(n):
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            for S in combinations([j for j in range(n) if j != i], size):
                values[i] += weight * (utility((*S, i)) - utility(S))
    return values


@pytest.mark.parametrize("source", [functional, live])
@pytest.mark.parametrize("order", [1, 2])
def test_values_are_averages_over_all_coalitions(order, source):
    queries = again(source).queries(QUERIES)
    s = shapley(again(source), queries, hvp=queries.hvp if order == 2 else None)
    assert_same(s.values, torch.cat([coalitions(record, order) for record in RUN.trajectory.records]))
    assert list(zip(s.ids, s.steps, strict=True)) == RUN.uses() and s.query_ids == ("p", "q", "r")
    assert s.about["order"] == str(order)


def test_values_of_a_step_add_up_to_what_its_batch_did():
    """To third order in the learning rate."""
    queries = again().queries(QUERIES)
    s = shapley(again(), queries, hvp=queries.hvp)
    after = [LOSS(at(RUN.model, x.parameters), QUERIES[0]) for x in RUN.trajectory.records]
    for step in (0, 1):
        rows = torch.tensor([k == step for k in s.steps])
        assert_same(s.values[rows].sum(0), (after[step] - after[step + 1]).detach(), 0.1)


def test_first_order_values_are_tracin():
    """With one learning rate; examples weigh what their step gave them."""
    r = run(recipe(torch.optim.SGD, lr=0.3, batches=batches(3, (3, 2))))
    along = replay(r.recipe.model, r.recipe.batches, LOSS, r.trajectory, source=functional)
    queries = along.queries(QUERIES)
    values = shapley(along, queries).values
    assert_same(values, tracin(Blocks(r.trajectory.blocks), queries).values)
    assert_same(values, tracin(r.trajectory, queries).values)
    assert_same(values, tracin(along, queries).values)
    one_model = replay(r.recipe.model, r.recipe.batches, LOSS, r.trajectory)
    assert_same(values, tracin(one_model, one_model.queries(QUERIES)).values)


def test_refusals():
    queries = again().queries(QUERIES)
    none = queries.__class__(again(), [])
    with refused("shapley", "no query gradients at step 0"):
        few = replay(RUN.recipe.model, {}, LOSS, RUN.trajectory.__class__([], [])).queries(QUERIES)
        shapley(RUN.trajectory, few)
    with refused("shapley: the query source does not know its optimizer steps", "(Replay.queries)."):
        shapley(RUN.trajectory, RUN.query)
    with refused("no examples"):
        shapley(RUN.trajectory, none)
    with refused("shapley", "different parameters"):
        other = [*RUN.trajectory.records[1:], RUN.trajectory.records[0]]
        moved = [
            x.__class__(k, x.optimizers, x.states, x.gradients, x.parameters, x.clip)
            for k, x in enumerate(other)
        ]
        late = replay(RUN.recipe.model, RUN.recipe.batches, LOSS, RUN.trajectory.__class__(moved, []))
        shapley(again(), late.queries(QUERIES))
