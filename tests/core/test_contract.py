"""The planner: every route and memory budget gives the same number, costs are those of the formulas."""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attrax.core import (
    CPU,
    Hardware,
    factorized,
    gram_leaf,
    lookup,
    materialize_leaf,
    plan_gram,
    sq_norms_leaf,
)
from attrax.core.contract import ROUTES, Plan, plan_contraction, problem, route_of
from attrax.core.execute import execute
from attrax.core.kernels import OneHot, Operand, contract_pair, in_common
from attrax.core.products import plan_leaf, token_scores_leaf

from .dense import assert_same, gradient, token_shares
from .toys import (
    FACTORED,
    KINDS,
    SMALL,
    SUMS,
    Sizes,
    generator,
    law,
    metric_for,
    normal,
    refused,
    sizes,
    tree,
    unchecked,
)

BUDGETS = (2**30, 4096, 600, 64)


def budget(memory: int) -> Hardware:
    return replace(CPU, memory=memory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_and_budget_gives_the_same_gram(kind, route):
    x, y = SMALL.pair(KINDS[kind])
    S, n = torch.einsum("boi,qoi->bq", gradient(x), gradient(y)), gradient(x).square().sum((1, 2))
    with unchecked():
        for memory in BUDGETS:
            forced = {"route": route, "hardware": budget(memory)}
            assert_same(gram_leaf(x, y, **forced), S)
            assert_same(gram_leaf(x, y, reuse=1000, **forced), S)
            assert_same(gram_leaf(x, x, **forced), torch.einsum("boi,qoi->bq", gradient(x), gradient(x)))
            assert_same(sq_norms_leaf(x, **forced), n)


@pytest.mark.parametrize(
    "kind", ["linear_bias", "stacked", "embedding", "norm", "bias", "built_matrix", "groups"]
)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_and_budget_gives_the_same_metric_gram(kind, route):
    x, y = SMALL.pair(KINDS[kind])
    m = metric_for(x)
    S = torch.einsum("boi,qoi->bq", gradient(x) * m.reshape(gradient(x).shape[1:]), gradient(y))
    with unchecked():
        for memory in (2**30, 600):
            assert_same(gram_leaf(x, y, metric=m, route=route, hardware=budget(memory)), S)


@pytest.mark.parametrize("kind", FACTORED)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_and_budget_gives_the_same_token_scores(kind, route):
    x, y = SMALL.pair(KINDS[kind])
    with unchecked():
        for memory in (2**30, 600):
            forced = {"route": route, "hardware": budget(memory)}
            assert_same(token_scores_leaf(x, y, **forced), token_shares(x, y))
            assert_same(token_scores_leaf(x, materialize_leaf(y), **forced), token_shares(x, y))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@law(100, size=sizes(empty=True), route=st.sampled_from(ROUTES), memory=st.integers(1, 2**12))
def test_every_route_and_budget_gives_the_same_gram_at_all_sizes(kind, size, route, memory):
    x, y = size.pair(KINDS[kind])
    forced = {"route": route, "hardware": budget(memory)}
    assert_same(gram_leaf(x, y, **forced), torch.einsum("boi,qoi->bq", gradient(x), gradient(y)))
    assert_same(sq_norms_leaf(x, **forced), gradient(x).square().sum((1, 2)))


@law(30, memory=st.integers(1, 2**14), size=sizes())
def test_plans_fit_the_budget_or_are_down_to_single_examples(memory, size):
    x, y = size.pair(FACTORED["linear"])
    for route in (None, *ROUTES):
        (plan,) = plan_leaf("w", x, y, route=route, hardware=budget(memory))
        assert plan.peak <= memory or plan.tile == (1, 1)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.bytes = max([self.bytes, *(x.numel() * x.element_size() for x in made)])
        return out


@pytest.mark.parametrize("route", ROUTES)
def test_a_budget_bounds_the_largest_temporary(route):
    x, y = Sizes(16, 16, 12, 12, 7, 9).pair(FACTORED["linear"])
    peak = {}
    for memory in (2**30, 20_000):
        with unchecked(), Largest() as largest:
            gram_leaf(x, y, route=route, hardware=budget(memory))
        peak[memory] = largest.bytes
    inputs = x.g.numel() * 8
    assert peak[20_000] <= max(20_000, inputs) < peak[2**30] or route == "materialize"


def test_a_forced_route_is_the_one_planned():
    x, y = SMALL.pair(FACTORED["linear"])
    assert [plan_leaf("w", x, y, route=route)[0].route for route in ROUTES] == list(ROUTES)


def test_a_route_that_does_not_exist_is_replaced_by_the_cheapest():
    x, y = SMALL.pair(KINDS["built_matrix"])
    assert plan_leaf("w", x, y, route="factor") == plan_leaf("w", x, y)
    assert plan_leaf("w", *SMALL.pair(FACTORED["embedding"]), route="factor")[0].route == "factor"


def test_routes_are_named_by_which_sides_are_built():
    names = {
        "factor": ((0, 2), (1, 3)),
        "materialize": ((0, 1), (2, 3)),
        "mixed": (0, (1, (2, 3))),
        "mixed_train": (2, ((0, 1), 3)),
        "chain": (0, (2, (1, 3))),
    }
    assert {name: route_of(t, 2) for name, t in names.items()} == {name: name for name in names}
    assert route_of((0, 1), 2) == "materialize"


def linear_plan(route, size, *, reuse=1, twins=False) -> Plan:
    x, y = size.pair(FACTORED["linear"])
    return plan_leaf("w", x, x if twins else y, route=route, reuse=reuse)[0]


def test_flops_are_those_of_the_routes():
    """R1 = B T and R2 = Q S rows: the published counts of the four orders."""
    size = Sizes(5, 3, 7, 11, 13, 17)
    R1, R2, B, Q, K, D = 5 * 7, 3 * 11, 5, 3, 13, 17
    expected = {
        "factor": 2 * R1 * R2 * (K + D) + 2 * R1 * R2,
        "materialize": 2 * R1 * K * D + 2 * R2 * K * D + 2 * B * Q * K * D,
        "mixed": 2 * R2 * K * D + 2 * R1 * Q * K * D + 2 * R1 * Q * min(K, D),
        "mixed_train": 2 * R1 * K * D + 2 * R2 * B * K * D + 2 * R2 * B * min(K, D),
    }
    assert {route: linear_plan(route, size).flops for route in expected} == expected


def test_a_self_product_pays_for_what_only_one_side_builds():
    """The mixed route never builds the train side, so there is nothing to share."""
    size = Sizes(5, 5, 7, 7, 13, 17)
    R, B, K, D = 35, 5, 13, 17
    flops = 2 * R * K * D + 2 * R * B * K * D + 2 * R * B * min(K, D)
    assert linear_plan("mixed", size, twins=True).flops == flops


def test_queries_that_are_reused_are_charged_once():
    size = Sizes(5, 3, 7, 11, 13, 17)
    building = 2 * 3 * 11 * 13 * 17
    for route in ("materialize", "mixed"):
        once, often = (linear_plan(route, size, reuse=reuse).flops for reuse in (1, 10))
        assert once - often == pytest.approx(0.9 * building)


def test_a_self_product_builds_each_gradient_once():
    size = Sizes(5, 5, 7, 7, 13, 17)
    R, B, K, D = 35, 5, 13, 17
    assert linear_plan("materialize", size, twins=True).flops == 2 * R * K * D + 2 * B * B * K * D


def test_the_planner_prefers_factors_for_short_rows_and_one_gemm_for_long_ones():
    chosen = {T: linear_plan(None, Sizes(32, 32, T, T, 256, 256)).route for T in (2, 1024)}
    assert chosen == {2: "factor", 1024: "materialize"}
    assert linear_plan(None, Sizes(32, 1, 64, 512, 256, 256), reuse=1000).route == "mixed"


def test_plans_read_shapes_only():
    x, y = SMALL.pair(FACTORED["linear_bias"])
    a, b = (replace(leaf, a=leaf.a.to("meta"), g=leaf.g.to("meta")) for leaf in (x, y))
    assert plan_leaf("w", a, b) == plan_leaf("w", x, y)


def test_plans_print_what_will_run():
    x, y = SMALL.trees({"linear": FACTORED["linear"], "tied": SUMS["tied"]})
    plan = plan_gram(x, y, route="factor")
    text = str(plan)
    assert "linear: bto,bti,qso,qsi->bq  route=factor  tile(b, q)=(3, 2)" in text
    assert text.count("tied: ") == 4
    assert text.endswith(f"total: {plan.flops:.3g} FLOPs, predicted {plan.seconds:.3g} s")
    assert "gemm" in text and "peak" in text and "bytes moved" in text


def test_a_plan_runs_on_other_sizes():
    x, y = SMALL.pair(FACTORED["linear"])
    wide, _ = replace(SMALL, B=8).pair(FACTORED["linear"])
    (plan,) = plan_leaf("w", x, y, hardware=budget(600))
    letters = ("bto", "bti", "qso", "qsi")
    operands = [Operand(c, v) for c, v in zip(letters, (wide.g, wide.a, y.g, y.a), strict=True)]
    assert_same(execute(plan, operands, train=2), torch.einsum("boi,qoi->bq", gradient(wide), gradient(y)))


def dense_form(operand: Operand) -> torch.Tensor:
    if isinstance(operand.data, OneHot):
        return (operand.data.ids.unsqueeze(-1) == torch.arange(operand.data.size)).to(operand.data.dtype)
    return operand.data


PAIRS = {
    "gemm": ("bto", "qso", "btqs"),
    "gemm over rows": ("bto", "bti", "boi"),
    "inner product": ("boi", "boi", "b"),
    "elementwise": ("btqs", "btqs", "bq"),
    "scaled": ("bti", "bt", "bi"),
    "scaled by a metric": ("boi", "oi", "ob"),
    "permuted": ("bto", "ob", "tb"),
    "match": ("bto!", "qso!", "btqs"),
    "match, summed": ("bto!", "qso!", "bq"),
    "gather": ("bto!", "qoi", "btqi"),
    "gather from own table": ("bto!", "bso", "bts"),
    "gather, summed": ("bto!", "qo", "bq"),
    "scatter": ("bto!", "bti", "boi"),
    "scatter over examples": ("bto!", "bti", "oi"),
    "scatter, permuted": ("bto!", "bti", "iob"),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("case", PAIRS)
@law(10, sizes_of=st.fixed_dictionaries({c: st.integers(0 if c in "bqts" else 1, 4) for c in "btqsoi"}))
def test_a_step_is_the_einsum_of_the_dense_forms(case, swapped, sizes_of):
    *inputs, out = PAIRS[case]
    gen = generator(5)
    operands = []
    for letters in inputs:
        if letters.endswith("!"):
            shape = [sizes_of[c] for c in letters[:-2]]
            ids = torch.randint(0, sizes_of["o"], shape, generator=gen)
            operands.append(Operand(letters[:-1], OneHot(ids, sizes_of["o"], torch.float64)))
        else:
            operands.append(Operand(letters, normal(gen, *(sizes_of[c] for c in letters))))
    x, y = reversed(operands) if swapped else operands
    expected = torch.einsum(f"{x.letters},{y.letters}->{out}", dense_form(x), dense_form(y))
    assert_same(contract_pair(x, y, out), expected)


@pytest.mark.parametrize("route", [None, *ROUTES])
def test_products_of_embeddings_hold_nothing_as_long_as_the_vocabulary(route):
    V, gen = 200_000, generator(3)
    ids = torch.tensor([[V - 1, 3, V - 1, 8], [8, 8, 0, 5], [3, 1, 2, 9]])
    x = lookup("e", ids, normal(gen, 3, 4, 5), rows=V)
    y = lookup("e", torch.tensor([[3, 8, 7], [V - 1, 0, 0]]), normal(gen, 2, 3, 5), rows=V)
    dense = [materialize_leaf(leaf).w for leaf in (x, y)]
    with unchecked(), Largest() as largest:
        found = [gram_leaf(x, y, route=route), gram_leaf(x, x, route=route), sq_norms_leaf(x, route=route)]
        shares = token_scores_leaf(x, y, route=route)
    S = torch.einsum("boi,qoi->bq", *dense)
    for value, right in zip(
        found,
        (S, torch.einsum("boi,qoi->bq", dense[0], dense[0]), dense[0].square().sum((1, 2))),
        strict=True,
    ):
        assert_same(value, right)
    assert_same(shares.sum(1), S)
    assert largest.bytes < 8 * 1000


def test_ids_of_any_layout_and_integer_dtype_meet():
    gen = generator(6)
    ids = torch.randint(0, 900, (1, 5), generator=gen)
    x = lookup("e", ids.expand(3, 5), normal(gen, 3, 5, 2), rows=1000)
    y = lookup("e", ids.int().flip(1), normal(gen, 1, 5, 2), rows=1000)
    with unchecked():
        assert_same(gram_leaf(x, y), torch.einsum("boi,qoi->bq", gradient(x), gradient(y)))
        assert_same(sq_norms_leaf(x), gradient(x).square().sum((1, 2)))


def test_plans_of_embeddings_read_shapes_only():
    x, y = replace(SMALL, No=500).pair(FACTORED["embedding"])
    far = [replace(leaf, ids=leaf.ids.to("meta"), g=leaf.g.to("meta")) for leaf in (x, y)]
    assert plan_leaf("e", *far) == plan_leaf("e", x, y)


@pytest.mark.parametrize("paired", [False, True])
def test_ids_in_common_keep_every_match(paired):
    gen = generator(4)
    x, y = (OneHot(torch.randint(0, 50, (3, n), generator=gen), 50, torch.float64) for n in (7, 5))
    few_x, few_y = in_common(x, y, paired=paired)
    assert few_x.size == few_y.size == (6 if paired else 16) and x.size == 50
    letters = ("bto", "bso", "bts") if paired else ("bto", "qso", "btqs")
    before, after = (
        contract_pair(Operand(letters[0], u), Operand(letters[1], v), letters[2])
        for u, v in ((x, y), (few_x, few_y))
    )
    assert before.any() and torch.equal(before, after)


@pytest.mark.parametrize("length", [2**15, 2**15 + 1])
def test_long_contractions_are_exact(length):
    """Few outputs over a long axis are summed in pieces."""
    gen = generator(1)
    x, y = normal(gen, 3, length), normal(gen, 2, length)
    assert_same(contract_pair(Operand("bi", x), Operand("qi", y), "bq"), x @ y.T)
    assert_same(contract_pair(Operand("ib", x.T), Operand("qi", y), "qb"), y @ x.T)


def test_one_letter_has_one_size():
    x, y = Operand("bi", torch.ones(2, 3)), Operand("qi", torch.ones(2, 4))
    with refused("axis 'i' has size 3 on one side and 4 on the other"):
        problem([x], [y], "bq", itemsize=4)


def test_a_lone_selection_has_no_dense_form():
    hot = Operand("bto", OneHot(torch.zeros(1, 1, dtype=torch.long), 3, torch.float32))
    plan = plan_contraction(problem([hot], [], "bo", itemsize=4))
    with refused("a lone one-hot operand 'bto' has no dense form"):
        execute(plan, [hot], train=1)


def test_ten_layers_of_one_shape_are_planned_once():
    leaves = {f"w{i}": factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5)) for i in range(10)}
    before = plan_contraction.cache_info().misses
    plans = plan_gram(tree(**leaves), tree(**leaves), hardware=budget(123_456)).leaves
    assert plan_contraction.cache_info().misses == before + 1
    assert len({id(plan) for (plan,) in plans.values()}) == 1
