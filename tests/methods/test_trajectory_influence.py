"""Influence along a run with the Fisher matrix, against its equations written out on dense vectors."""

from collections import Counter
from dataclasses import replace
from itertools import product as cross

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attrax.core import Block, Examples, GradTree, Mask, coordinates, disjoint_masks
from attrax.core.trajectory import Recorded
from attrax.frontends import functional, live
from attrax.frontends.runs.replay import replay
from attrax.methods.trajectory_influence import trajectory_influence
from attrax.methods.weighing import fisher_factor

from ..core.dense import assert_same
from ..core.toys import generator, normal, refused
from .runs import LOSS, Run, batches, dense, flat, query_matrix, recipe, run, warm

ABOUT = dict(lr=0.05, betas=(0.9, 0.99), max_norm=0.3, scheduler=warm, batches=batches(5, (2, 2)))
ADAMW = run(recipe(torch.optim.AdamW, weight_decay=0.1, **ABOUT))
ADAM = run(recipe(torch.optim.Adam, weight_decay=0.1, **ABOUT))


def written_out(r: Run, phi: float = 4.0, keep: Tensor | None = None, renormalized: bool = False) -> Tensor:
    """Equations 4.19 to 4.23 on vectors: U = (U_theta, U_m, U_v) from the last step to the first."""
    like = r.trajectory.records[0].parameters
    keep = torch.ones(len(flat(like, like)), dtype=torch.bool) if keep is None else keep
    U_t = query_matrix(r)[:, keep]
    U_m, U_v, rows = torch.zeros_like(U_t), torch.zeros_like(U_t), {}
    for t, record in reversed(list(enumerate(r.trajectory.records, 1))):
        o = next(iter(record.optimizers.values()))
        b1, b2, eps, lr = o.hyper["beta1"], o.hyper["beta2"], o.hyper["eps"], o.lr
        theta, g0 = flat(record.parameters, like)[keep], flat(record.gradients, like)[keep]
        g = g0 + o.coupled * theta
        zeros = {n: torch.zeros_like(x) for n, x in like.items()}
        m, v = (
            flat({n: record.states.get(n, {}).get(k, zeros[n]) for n in like}, like)[keep]
            for k in ("exp_avg", "exp_avg_sq")
        )
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c1, c2 = 1 - b1**t, 1 - b2**t
        root = (v / c2).sqrt()
        D, S = 1 / (root + eps), (m / c1) / (2 * root * (root + eps) ** 2)
        E_m, E_v = U_m - lr / c1 * D * U_t, U_v + lr / c2 * S * U_t
        consumed = (1 - b1) * E_m + 2 * (1 - b2) * g * E_v
        rho, clip = consumed, record.clip
        if clip.coefficient < 1:
            whole = g0 / clip.coefficient
            along = (rho @ whole)[:, None] * whole / (clip.norm * (clip.norm + 1e-6))
            rho = clip.coefficient * (rho - along)
        G = torch.cat(
            [dense(b, like)[:, keep] for b in r.trajectory.blocks if b.examples.step == record.step]
        )
        alpha = rho @ G.T
        rows[record.step] = -(rho @ (G - G.mean(0)).T if renormalized else alpha).T
        U_m, U_v = b1 * E_m, b2 * E_v
        U_t = (1 - lr * o.decay) * U_t + phi * alpha @ G + o.coupled * consumed
    return torch.cat([rows[k] for k in r.trajectory.steps])


@pytest.mark.parametrize("r", [ADAMW, ADAM])
def test_scores_are_the_equations(r):
    assert any(x.clip.coefficient < 1 for x in r.trajectory.records)
    s = trajectory_influence(r.trajectory, r.query)
    assert_same(s.values, written_out(r))
    assert list(zip(s.ids, s.steps, strict=True)) == r.uses() and s.query_ids == ("p", "q", "r")
    assert s.micros == (0, 0, 1, 1) * 5 and s.about["curvature"] == "fisher of examples"


def test_removal_from_a_renormalized_batch():
    s = trajectory_influence(ADAMW.trajectory, ADAMW.query, removal="example_mean")
    assert_same(s.values, written_out(ADAMW, renormalized=True))
    tokens = trajectory_influence(ADAMW.trajectory, ADAMW.query, removal="token_mean")
    assert_same(tokens.values, s.values)


def test_positive_scores_are_helpful():
    """Against retraining without each use; the Fisher matrix only approximates."""
    r = run(recipe(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99), batches=batches(4, (8,))))
    s = trajectory_influence(r.trajectory, r.query)
    before = r.losses(lambda i, step: 1.0)
    really = [r.losses(lambda i, step, k=key: float((i, step) != k)) - before for key in r.uses()]
    for column, effect in zip(s.values.T, torch.stack(really).T, strict=True):
        assert torch.corrcoef(torch.stack([column, effect]))[0, 1] > 0.8


def test_gradients_that_were_not_recorded_are_summed_from_the_examples():
    light = Recorded([replace(x, gradients={}) for x in ADAM.trajectory.records], ADAM.trajectory.blocks)
    assert_same(trajectory_influence(light, ADAM.query).values, written_out(ADAM))


def hooked(r: Run) -> tuple[Recorded, object]:
    """The same run with layers captured by hooks: factors, biases folded."""
    data, loss = r.recipe.batches, r.recipe.loss
    again = replay(r.recipe.model, data, loss, r.trajectory)
    blocks = [
        Block(GradTree(leaves), examples)
        for k in r.trajectory.steps
        for examples, leaves in again.gradients(k).map(lambda name, leaf, _: leaf)
    ]
    return Recorded(r.trajectory.records, blocks), live(r.model, r.queries, LOSS)


def test_layers_captured_by_hooks_and_one_contraction_a_leaf_and_step(monkeypatch):
    trajectory, query = hooked(ADAMW)
    count: Counter[str] = Counter()
    import attrax.core.products as products

    def counted(x, y, *, name, **rest):
        count[name] += 1
        return inner(x, y, name=name, **rest)

    inner = products.gram_leaf
    monkeypatch.setattr(products, "gram_leaf", counted)
    assert_same(trajectory_influence(trajectory, query).values, written_out(ADAMW))
    assert count == {"0.weight": 10, "2.weight": 10}, "five steps of two micro-batches"


def kept(mask: Mask) -> Tensor:
    like, out = ADAMW.trajectory.records[0].parameters, []
    for name, x in like.items():
        chosen = torch.zeros(x.numel(), dtype=torch.bool)
        chosen[coordinates(mask, name, tuple(x.shape))] = True
        out.append(chosen)
    return torch.cat(out)


@pytest.mark.parametrize("form", ["functional", "hooks"])
@pytest.mark.parametrize("r", [ADAMW, ADAM])
def test_masks_are_runs_of_fewer_coordinates(form, r):
    trajectory, query = (r.trajectory, r.query) if form == "functional" else hooked(r)
    masks = disjoint_masks(Mask(2, scale="none"), 2)
    each = [trajectory_influence(trajectory, query, masks=[mask]).values for mask in masks]
    for mask, values in zip(masks, each, strict=True):
        assert_same(values, written_out(r, keep=kept(mask)))
    both = trajectory_influence(trajectory, query, masks=masks)
    assert_same(both.values, torch.stack(each).mean(0))
    everything = trajectory_influence(trajectory, query, masks=[Mask(1000, scale="none")])
    assert_same(everything.values, written_out(r))


def test_all_masks_read_a_step_once():
    counted: Counter[int] = Counter()

    class Read(Recorded):
        def gradients(self, number):
            counted[number] += 1
            return super().gradients(number)

    run = Read(ADAMW.trajectory.records, ADAMW.trajectory.blocks)
    trajectory_influence(run, ADAMW.query, masks=disjoint_masks(Mask(1, scale="none"), 2))
    assert counted == dict.fromkeys(run.steps, 1)


def test_the_fisher_factor_of_a_token_mean_is_the_number_of_tokens():
    """Over all labels that a softmax model may draw, phi sum ghat ghat^T is the Hessian."""
    gen = generator(0)
    h, W = normal(gen, 2, 2, 2), normal(gen, 3, 2)
    p = (h @ W.T).softmax(-1)
    tokens = torch.tensor([2, 2])

    def mean_loss(w):
        return F.cross_entropy((h @ w.view(3, 2).T).flatten(0, 1), torch.zeros(4, dtype=torch.long))

    hessian = torch.autograd.functional.hessian(mean_loss, W.flatten())
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for i in range(2):
        for labels in cross(range(3), repeat=2):
            chance = torch.stack([p[i, t, y] for t, y in enumerate(labels)]).prod()
            hot = F.one_hot(torch.tensor(labels), 3).double()
            g = ((p[i] - hot).T @ h[i]).flatten() / 4
            expected += chance * torch.outer(g, g)
    about = Examples(("a", "b"), weight=torch.full((2,), 0.25), tokens=tokens)
    block = Block(GradTree({}), about)
    assert_same(fisher_factor([block], "tokens") * expected, hessian)
    assert fisher_factor([block], "examples") == 2
    assert fisher_factor([block, block], "examples") == 2, "micro-batches of one sum of losses"
    summed = replace(about, weight=torch.ones(2))
    assert fisher_factor([Block(GradTree({}), summed)], "tokens") == 1


def test_a_last_step_whose_learning_rate_is_zero_ends_where_it_began():
    """Schedules end at zero; queries after training are then at the parameters before the last step."""
    decay = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 3)  # noqa: E731
    r = run(recipe(torch.optim.AdamW, batches=batches(4), lr=0.05, scheduler=decay))
    assert [x.optimizers["0.weight"].lr == 0 for x in r.trajectory.records] == [False] * 3 + [True]
    again = replay(r.recipe.model, r.recipe.batches, LOSS, r.trajectory)
    for form in (r.trajectory, again):
        assert_same(trajectory_influence(form, live(r.model, r.queries, LOSS)).values, written_out(r))
    moved = [
        replace(x, optimizers={n: replace(o, hyper=o.hyper | {"lr": 0.1}) for n, o in x.optimizers.items()})
        for x in r.trajectory.records
    ]
    with refused("the parameters before step 3", "end of training"):
        trajectory_influence(replace(again, trajectory=Recorded(moved, [])), live(r.model, r.queries, LOSS))


def test_refusals():
    r = ADAMW
    bare = nn.Sequential(nn.Linear(3, 2)).double().eval()
    with refused("step 4", "knows no optimizer", "'0.weight'"):
        records = [replace(x, optimizers={}) for x in r.trajectory.records]
        trajectory_influence(Recorded(records, r.trajectory.blocks), r.query)
    with refused("step 4", "'2.bias', '2.weight'", "one selection"):
        fewer = live(r.model, r.queries, LOSS, include=r"^0$")
        trajectory_influence(r.trajectory, fewer)
    with refused("only the query gradients hold", "'2.bias', '2.weight'", "one selection"):
        first = [
            Block(GradTree({n: b.grads[n] for n in ("0.weight", "0.bias")}), b.examples)
            for b in r.trajectory.blocks
        ]
        trajectory_influence(Recorded(r.trajectory.records, first), r.query)
    with refused("weight decay of '0.weight'", "Record the parameters"):
        records = [replace(x, parameters={}) for x in ADAM.trajectory.records]
        trajectory_influence(Recorded(records, ADAM.trajectory.blocks), ADAM.query)
    with refused("unknown whether the gradients of step 4 were clipped"):
        records = [replace(x, clip=None) for x in r.trajectory.records]
        trajectory_influence(Recorded(records, r.trajectory.blocks), r.query)
    with refused("trajectory_influence", "no steps between 1 and 3"):
        records = [x for x in r.trajectory.records if x.step != 2]
        trajectory_influence(Recorded(records, r.trajectory.blocks), r.query)
    with refused("masked_runs", "unbiased", "scale='none'"):
        trajectory_influence(r.trajectory, r.query, masks=[Mask(3)])
    with refused("masks=", "fisher"):
        trajectory_influence(r.trajectory, r.query, masks=[Mask(3)], curvature=lambda k, v: v)
    with refused("unit", "'layers'"):
        trajectory_influence(r.trajectory, r.query, unit="layers")
    with refused("no examples"):
        trajectory_influence(r.trajectory, functional(bare, [], LOSS))
