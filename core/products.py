"""Products of gradients: Gram matrices, norms and token scores, each one planned contraction.

For gradients G (train, examples b) and H (query, examples q) and an optional diagonal metric M,

    gram          S[b, q]     = <G_b, M * H_q>
    norms         n[b]        = <G_b, M * G_b>
    token_scores  s[b, t, q]  = the share of row t of example b in S[b, q];  sum_t s = S

summed over leaves.  Results are in float32 or better.  Any route of `contract` can be forced and gives the same number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core.algebra import wide
from attrax.core.contract import CPU, Hardware, Plan, Route, plan_contraction, problem
from attrax.core.execute import execute
from attrax.core.kernels import OneHot, Operand, in_common
from attrax.core.leaves import Grouped, Leaf, Materialized, Sum, batch_size, dtype_of
from attrax.core.terms import Term, rename, terms
from attrax.core.tree import GradTree

QUERY = {"b": "q", "t": "s"}
TWIN = {"t": "s"}


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Plans per leaf (one per pair of terms); ``print(plan)`` shows every leaf and the total."""

    leaves: Mapping[str, tuple[Plan, ...]]

    @property
    def seconds(self) -> float:
        """Predicted time of all leaves."""
        return sum(plan.seconds for plans in self.leaves.values() for plan in plans)

    @property
    def flops(self) -> float:
        """Total operations of all leaves."""
        return sum(plan.flops for plans in self.leaves.values() for plan in plans)

    def __str__(self) -> str:
        body = [f"{name}: {plan}" for name, plans in self.leaves.items() for plan in plans]
        return "\n".join([*body, f"total: {self.flops:.3g} FLOPs, predicted {self.seconds:.3g} s"])


def _check_pair(operation: str, name: str, x: Leaf, y: Leaf) -> None:
    if x.basis != y.basis:
        raise ValueError(
            f"{operation}: leaf '{name}': train is in basis '{x.basis}', query in basis '{y.basis}'. "
            "Apply the same transform to both sides."
        )
    if [(p.weight, p.width) for p in x.parts] != [(p.weight, p.width) for p in y.parts]:
        raise ValueError(
            f"{operation}: leaf '{name}': train covers {[p.weight for p in x.parts]}, query covers "
            f"{[p.weight for p in y.parts]}. Capture both from the same model with the same selection."
        )


def _pairs(
    operation: str, name: str, x: Leaf, y: Leaf, output: str, metric: Tensor | None
) -> list[tuple[Term, Term, str, bool]]:
    """(train operands with metric, query operands, output, twins) for every pair of terms."""
    _check_pair(operation, name, x, y)
    dtype = wide(torch.promote_types(dtype_of(x), dtype_of(y)))
    letters = QUERY if "q" in output else TWIN
    twins = x is y and "t" not in output
    left, right = terms(x, dtype), terms(y, dtype)
    pairs: list[tuple[Term, Term, str, bool]] = []
    for i, u in enumerate(left):
        extra = () if metric is None else (Operand("uoi"[3 - metric.ndim :], metric.to(dtype)),)
        for j, v in enumerate(right):
            ours, theirs = (u, v) if extra else _few_ids(u, v, paired="q" not in output)
            pairs.append(((*ours, *extra), rename(theirs, letters), output, twins and i == j))
    return pairs


def _few_ids(u: Term, v: Term, *, paired: bool) -> tuple[Term, Term]:
    """Two embedding terms over the ids they hold: no step then makes anything as long as the vocabulary."""
    x, y = u[0].data, v[0].data
    if not (isinstance(x, OneHot) and isinstance(y, OneHot)):
        return u, v
    x, y = in_common(x, y, paired=paired)
    return (replace(u[0], data=x), *u[1:]), (replace(v[0], data=y), *v[1:])


def _contract_pairs(
    operation: str,
    name: str,
    pairs: list[tuple[Term, Term, str, bool]],
    hardware: Hardware,
    route: Route | None,
    reuse: int,
) -> Tensor:
    total: Tensor | None = None
    for left, right, output, twins in pairs:
        plan = _plan_pair(operation, name, left, right, output, twins, hardware, route, reuse)
        value = execute(plan, (*left, *right), train=len(left), twins=twins)
        total = value if total is None else total + value
    assert total is not None
    return total


def _plan_pair(
    operation: str,
    name: str,
    left: Term,
    right: Term,
    output: str,
    twins: bool,
    hardware: Hardware,
    route: Route | None,
    reuse: int,
) -> Plan:
    dense = [o.data for o in (*left, *right) if isinstance(o.data, Tensor)]
    try:
        shape = problem(left, right, output, itemsize=dense[0].element_size(), twins=twins, reuse=reuse)
    except ValueError as error:
        raise ValueError(
            f"{operation}: leaf '{name}': {error}. Capture both sides from the same model."
        ) from None
    return plan_contraction(shape, hardware, route)


def gram_leaf(
    x: Leaf,
    y: Leaf,
    *,
    name: str = "?",
    metric: Float[Tensor, "*shape"] | None = None,
    route: Route | None = None,
    hardware: Hardware = CPU,
    reuse: int = 1,
) -> Float[Tensor, "B Q"]:
    """Inner products of two leaves of one parameter; see `gram`."""
    pairs = _pairs("gram", name, x, y, "bq", metric)
    return _contract_pairs("gram", name, pairs, hardware, route, reuse)


def _same_names(operation: str, x: GradTree, y: GradTree) -> None:
    if set(x) != set(y):
        only = sorted(set(x) ^ set(y))
        raise ValueError(
            f"{operation}: the trees hold different leaves; only on one side: {only[:5]}"
            f"{' …' if len(only) > 5 else ''}. Capture both sides with the same layer selection."
        )


def gram(
    train: GradTree,
    query: GradTree,
    *,
    metric: Mapping[str, Tensor] | None = None,
    route: Route | None = None,
    hardware: Hardware = CPU,
    reuse: int = 1,
) -> Float[Tensor, "B Q"]:
    """Inner products of all train with all query gradients, ``S[b, q] = sum_leaves <G_b, M * H_q>``.

    Args:
        train: Gradients of B examples.
        query: Gradients of Q examples, same leaves.
        metric: Optional diagonal metric per leaf, in the leaf's [No, Ni] (or [U, No, Ni] or [d]) coordinates.
        route: Force a contraction route for every leaf (see `attrax.core.contract`).
        hardware: Roofline figures and memory budget.
        reuse: Number of train blocks these queries will meet; their preparation is charged once.

    Returns:
        S [B, Q], float32 or better.

    Raises:
        ValueError: If the trees hold different leaves, bases or shapes.

    >>> from attrax.core import GradTree, factorized
    >>> x = GradTree({"w": factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))})
    >>> gram(x, x)
    tensor([[180., 180.],
            [180., 180.]])
    """
    _same_names("gram", train, query)
    if not train:
        raise ValueError("gram: the trees hold no leaves.")
    metric = metric or {}
    return torch.stack(
        [
            gram_leaf(x, query[n], name=n, metric=metric.get(n), route=route, hardware=hardware, reuse=reuse)
            for n, x in train.items()
        ]
    ).sum(0)


def self_gram(
    grads: GradTree,
    *,
    metric: Mapping[str, Tensor] | None = None,
    route: Route | None = None,
    hardware: Hardware = CPU,
) -> Float[Tensor, "B B"]:
    """All inner products within one tree; each gradient that a route builds is built once.

    >>> from attrax.core import GradTree, factorized
    >>> self_gram(GradTree({"w": factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))})).shape
    torch.Size([2, 2])
    """
    return gram(grads, grads, metric=metric, route=route, hardware=hardware)


def plan_gram(
    train: GradTree, query: GradTree, *, route: Route | None = None, hardware: Hardware = CPU, reuse: int = 1
) -> TreePlan:
    """What `gram` would do, from shapes only (meta tensors work).

    >>> from attrax.core import GradTree, factorized
    >>> a, g = torch.ones(8, 4, 256, device="meta"), torch.ones(8, 4, 256, device="meta")
    >>> tree = GradTree({"w": factorized("w", a, g)})
    >>> plan_gram(tree, tree).leaves["w"][0].route
    'factor'
    """
    _same_names("plan_gram", train, query)

    return TreePlan(
        {n: plan_leaf(n, x, query[n], route=route, hardware=hardware, reuse=reuse) for n, x in train.items()}
    )


def plan_leaf(
    name: str, x: Leaf, y: Leaf, *, route: Route | None = None, hardware: Hardware = CPU, reuse: int = 1
) -> tuple[Plan, ...]:
    """What `gram_leaf` would do: one plan per pair of terms."""
    return tuple(
        _plan_pair("plan_gram", name, left, right, output, twins, hardware, route, reuse)
        for left, right, output, twins in _pairs("plan_gram", name, x, y, "bq", None)
    )


def sq_norms_leaf(
    leaf: Leaf,
    *,
    name: str = "?",
    metric: Float[Tensor, "*shape"] | None = None,
    route: Route | None = None,
    hardware: Hardware = CPU,
) -> Float[Tensor, " B"]:
    """Squared norms of one leaf's gradients, ``<G_b, M * G_b>``; uses of a tied weight include their cross terms."""
    pairs = _pairs("norms", name, leaf, leaf, "b", metric)
    return _contract_pairs("norms", name, pairs, hardware, route, 1)


def sq_norms(
    grads: GradTree,
    *,
    metric: Mapping[str, Tensor] | None = None,
    route: Route | None = None,
    hardware: Hardware = CPU,
) -> Float[Tensor, " B"]:
    """Squared gradient norms over all leaves, ``n[b] = sum_leaves <G_b, M * G_b>``.

    >>> from attrax.core import GradTree, factorized
    >>> sq_norms(GradTree({"w": factorized("w", torch.ones(2, 3, 4), torch.ones(2, 3, 5))}))
    tensor([180., 180.])
    """
    metric = metric or {}
    return torch.stack(
        [
            sq_norms_leaf(x, name=n, metric=metric.get(n), route=route, hardware=hardware)
            for n, x in grads.items()
        ]
    ).sum(0)


def norms(grads: GradTree, *, route: Route | None = None, hardware: Hardware = CPU) -> Float[Tensor, " B"]:
    """Gradient norms ``||G_b||`` over all leaves.

    >>> from attrax.core import GradTree, factorized
    >>> norms(GradTree({"w": factorized("w", torch.ones(1, 1, 4), torch.ones(1, 1, 4))}))
    tensor([4.])
    """
    return sq_norms(grads, route=route, hardware=hardware).clamp_min(0).sqrt()


def token_scores_leaf(
    x: Leaf, y: Leaf, *, name: str = "?", route: Route | None = None, hardware: Hardware = CPU
) -> Float[Tensor, "B T Q"]:
    """Per-row shares of one leaf's Gram matrix, ``s[b, t, q] = g_bt^T H_q a_bt``.

    Raises:
        ValueError: If the train leaf has no rows (materialized), rows that are no positions (experts), or uses with
            different numbers of them.
    """
    if isinstance(x, Sum):
        _check_pair("token_scores", name, x, y)
        shares = [token_scores_leaf(use, y, name=name, route=route, hardware=hardware) for use in x.uses]
        positions = [share.shape[1] for share in shares]
        if len(set(positions)) > 1:
            raise ValueError(
                f"token_scores: leaf '{name}': its uses have different numbers of positions: {positions}. "
                "Leave it out of the selection."
            )
        return torch.stack(shares).sum(0)
    if isinstance(x, Materialized):
        raise ValueError(
            f"token_scores: leaf '{name}': the train side is materialized and has no rows. "
            "Score factored gradients (no dense projection, no compaction)."
        )
    if isinstance(x, Grouped) and not x.positions:
        raise ValueError(
            f"token_scores: leaf '{name}': its rows are those routed to each expert, not positions of the example. "
            "Leave it out of the selection."
        )
    pairs = _pairs("token_scores", name, x, y, "btq", None)
    rows = _contract_pairs("token_scores", name, pairs, hardware, route, 1)
    return rows.unflatten(1, (x.calls, -1)).sum(1)


def token_scores(
    train: GradTree, query: GradTree, *, route: Route | None = None, hardware: Hardware = CPU
) -> Float[Tensor, "B T Q"]:
    """Which training positions carry the score: ``sum_t token_scores = gram`` (math: s_t = g_t^T H a_t).

    A score is split over the positions at which the gradient enters each layer, not over loss tokens.

    Args:
        train: Factored gradients of B examples, all leaves with the same number of positions T.
        query: Gradients of Q examples.
        route: Force a contraction route.
        hardware: Roofline figures and memory budget.

    Returns:
        s [B, T, Q].

    Raises:
        ValueError: If a train leaf is materialized, or leaves have different numbers of positions.

    >>> from attrax.core import GradTree, factorized
    >>> x = GradTree({"w": factorized("w", torch.ones(1, 3, 2), torch.ones(1, 3, 2))})
    >>> token_scores(x, x)[0, :, 0]
    tensor([12., 12., 12.])
    """
    _same_names("token_scores", train, query)
    values = {
        n: token_scores_leaf(x, query[n], name=n, route=route, hardware=hardware) for n, x in train.items()
    }
    lengths = {name: value.shape[1] for name, value in values.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"token_scores: leaves have different numbers of positions: {lengths}. Score them apart."
        )
    return torch.stack(list(values.values())).sum(0)


def examples_in(grads: GradTree) -> int:
    """Number of examples in a tree."""
    return batch_size(next(iter(grads.values())))
