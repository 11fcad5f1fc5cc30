"""Data value embeddings, as the product of matrices that defines them, from both sides."""

from dataclasses import replace

import pytest
import torch

from attrax.core import Block, GradTree, Hardware, Mask, Projection
from attrax.core.trajectory import Recorded
from attrax.frontends import functional, live
from attrax.methods.dvemb import dvemb
from attrax.methods.embeddings import dvemb_embeddings, score_dvemb

from ..core.dense import assert_same
from ..core.toys import refused
from .runs import LOSS, at, batches, dense, query_matrix, recipe, run

RUN = run(recipe(lr=0.3, batches=batches(5, (3, 2)), scheduler=None))


def written_out(r, coupling="full", phi=5.0):
    """lr v^T (I - lr_T H_T) ... g, with H_k block-diagonal for "diagonal"."""
    like = r.trajectory.records[0].parameters
    sizes = [x.numel() for x in like.values()]
    mask = (
        torch.ones(sum(sizes), sum(sizes))
        if coupling == "full"
        else torch.block_diag(*[torch.ones(n, n) for n in sizes])
    )
    product, rows = torch.eye(sum(sizes), dtype=torch.float64), {}
    for record in reversed(r.trajectory.records):
        lr = torch.tensor(
            [record.optimizers[k].lr for k, x in like.items() for _ in range(x.numel())], dtype=torch.float64
        )
        blocks = [b for b in r.trajectory.blocks if b.examples.step == record.step]
        g = torch.cat([dense(b, like) for b in blocks])
        rows[record.step] = query_matrix(r) @ product @ (lr * g).T
        product = product @ (
            torch.eye(sum(sizes), dtype=torch.float64) - lr[:, None] * (mask * (phi * g.T @ g))
        )
    return torch.cat([rows[k].T for k in r.trajectory.steps])


@pytest.mark.parametrize("coupling", ["full", "diagonal"])
def test_both_sides_are_the_product_of_steps(coupling):
    s = dvemb(RUN.trajectory, RUN.query, coupling=coupling)
    expected = written_out(RUN, coupling)
    assert_same(s.values, expected)
    assert list(zip(s.ids, s.steps, strict=True)) == RUN.uses() and s.query_ids == ("p", "q", "r")
    embedded = score_dvemb(dvemb_embeddings(RUN.trajectory, coupling=coupling), RUN.query)
    assert_same(embedded.values, expected)
    assert (embedded.ids, embedded.steps, embedded.micros) == (s.ids, s.steps, s.micros)


def test_couplings_differ():
    assert (written_out(RUN) - written_out(RUN, "diagonal")).abs().max() > 1e-3 * written_out(RUN).abs().max()


def test_layers_captured_by_hooks_give_the_same_without_building_gradients():
    """Factors with folded biases against one leaf a parameter."""
    blocks = []
    for record in RUN.trajectory.records:
        model, data = at(RUN.model, record.parameters), RUN.recipe.batches[record.step]
        for micro, batch in enumerate(data):
            ((about, leaves),) = live(model, [batch], LOSS).map(lambda n, leaf, _: leaf)
            c = torch.full((len(about),), 0.2, dtype=torch.float64)
            scaled = {n: replace(x, g=x.g * 0.2) for n, x in leaves.items()}
            blocks.append(Block(GradTree(scaled), replace(about, step=record.step, micro=micro, weight=c)))
    hooked = Recorded(RUN.trajectory.records, blocks)
    query = live(RUN.model, RUN.queries, LOSS)
    assert_same(dvemb(hooked, query).values, written_out(RUN))
    assert_same(score_dvemb(dvemb_embeddings(hooked), query).values, written_out(RUN))


@pytest.mark.parametrize("projection", [Mask(3), Projection(2), Projection(9, sides="dense")])
@pytest.mark.parametrize("coupling", ["full", "diagonal"])
def test_both_sides_agree_in_fewer_coordinates(projection, coupling):
    s = dvemb(RUN.trajectory, RUN.query, coupling=coupling, projection=projection)
    embeddings = dvemb_embeddings(RUN.trajectory, coupling=coupling, projection=projection)
    assert_same(score_dvemb(embeddings, RUN.query, projection=projection).values, s.values)


def test_a_sum_over_examples_has_a_fisher_factor_of_one():
    r = run(recipe(lr=0.05, batches=batches(4, (3,)), reduction="sum"))
    assert_same(dvemb(r.trajectory, r.query).values, written_out(r, phi=1.0))
    assert_same(dvemb(r.trajectory, r.query, unit="tokens").values, written_out(r, phi=1.0))


def test_several_learning_rates():
    def groups(parameters, **_):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1)

    r = run(recipe(groups, batches=batches(4, (3,))))
    assert_same(dvemb(r.trajectory, r.query).values, written_out(r, phi=3.0))
    assert_same(score_dvemb(dvemb_embeddings(r.trajectory), r.query).values, written_out(r, phi=3.0))


def test_refusals():
    first = at(RUN.model, RUN.trajectory.records[-1].parameters)
    with refused("dvemb", "before step 4", "end of training"):
        dvemb(RUN.trajectory, functional(first, RUN.queries, LOSS))
    with refused("dvemb", "step 4", "'2.weight'", "one selection"):
        dvemb(RUN.trajectory, live(RUN.model, RUN.queries, LOSS, include=r"^0$"))
    with refused("coupling", "'layer'"):
        dvemb(RUN.trajectory, RUN.query, coupling="layer")
    with refused("dvemb_embeddings", "projection="):
        dvemb_embeddings(RUN.trajectory, hardware=Hardware(memory=100))
    unknown = [replace(b, examples=replace(b.examples, weight=None)) for b in RUN.trajectory.blocks]
    with refused("step 4", "weights that the loss put"):
        dvemb(Recorded(RUN.trajectory.records, unknown), RUN.query)
    with refused("dvemb", "no steps between 2 and 4"):
        dvemb(Recorded([x for x in RUN.trajectory.records if x.step != 3], RUN.trajectory.blocks), RUN.query)
    with refused("dvemb", "yielded no examples"):
        dvemb(Recorded([], []), RUN.query)
