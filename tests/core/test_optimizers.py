"""Update rules against literal steps of `torch.optim`, and their properties and derivatives."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Part, factorized, grouped, lookup, materialized
from attrax.core.directions import directed
from attrax.core.leaves import Factorized, Leaf
from attrax.core.optimizer_rules import REFUSED, RULES
from attrax.core.optimizers import Optimizer, State, direction, shrinkage, step
from attrax.core.reduce import materialize_leaf, stored
from attrax.core.tree import GradTree

from .toys import generator, normal

Case = tuple[str, dict[str, Any]]
CASES: list[Case] = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.2}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("Adam", {"amsgrad": True, "betas": (0.8, 0.6)}),
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "betas": (0.8, 0.6), "eps": 0.01}),
    ("Adamax", {"weight_decay": 0.1, "betas": (0.8, 0.7)}),
    ("NAdam", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
    ("RAdam", {}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.95)}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "alpha": 0.8}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    ("Adadelta", {"weight_decay": 0.1, "eps": 0.01}),
    ("Rprop", {"etas": (0.4, 1.3), "step_sizes": (1e-4, 0.1)}),
    ("ASGD", {"weight_decay": 0.1, "lambd": 0.05}),
]
LABELS = ["-".join([name.lower(), *options]) for name, options in CASES]
PAIRS = {"betas": ("beta1", "beta2"), "etas": ("etaminus", "etaplus")}
PAIRS["step_sizes"] = ("step_size_min", "step_size_max")
cases = pytest.mark.parametrize(("name", "options"), CASES, ids=LABELS)
warmups = pytest.mark.parametrize("warmup", [0, 1, 3, 11])


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rule(moving: torch.optim.Optimizer) -> Optimizer:
    """An optimizer's hyperparameters, read off by hand."""
    hyper: dict[str, float] = {}
    for key, value in moving.param_groups[0].items():
        if key in PAIRS:
            hyper |= dict(zip(PAIRS[key], map(float, value), strict=True))
        elif isinstance(value, float | int):
            hyper[key] = float(value)
    hyper |= {k: float(moving.defaults[k]) for k in ("initial_accumulator_value",) if k in moving.defaults}
    return Optimizer(type(moving).__name__.lower(), hyper)


def warm(name: str, options: dict[str, Any], steps: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter and its optimizer after some steps at rates that change."""
    gen = generator(7)
    p = nn.Parameter(normal(gen, 20))
    moving: torch.optim.Optimizer = getattr(torch.optim, name)([p], lr=0.02, **options)
    for k in range(steps):
        p.grad = normal(gen, 20)
        moving.step()
        moving.param_groups[0]["lr"] = 0.02 / (k + 2)
    return p, moving


def state_of(p: nn.Parameter, moving: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {k: x.detach().clone() for k, x in moving.state[p].items() if isinstance(x, Tensor)}


def literal(
    p: nn.Parameter, moving: torch.optim.Optimizer, g: Tensor, steps: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """What torch makes of a gradient, on copies."""
    q, again = copy.deepcopy((p, moving))
    again.param_groups[0]["params"] = [q]
    for _ in range(steps):
        q.grad = g.clone()
        again.step()
    return q.detach(), state_of(q, again)


def close(actual: Tensor, expected: Tensor, within: float = 1e-12) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= within * expected.abs().max()


@cases
@warmups
@pytest.mark.parametrize("maximize", [False, True])
def test_step_is_torchs_step(name: str, options: dict[str, Any], warmup: int, maximize: bool) -> None:
    p, moving = warm(name, options | {"maximize": maximize}, warmup)
    g = normal(generator(8), 20)
    theta, after = step(rule(moving), p.detach(), g, state_of(p, moving))
    right, state = literal(p, moving, g)
    close(theta, right)
    for key, value in after.items():
        close(value.reshape(state[key].shape), state[key])
    assert set(state) - set(after) <= ({"ax", "mu"} if name == "ASGD" else {"step"})


@warmups
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_sparse_adam_is_torchs(warmup: int, maximize: bool, eps: float) -> None:
    """Of a gradient with rows that are repeated, zero, and missing; the state of missing rows stays."""
    gen = generator(7)

    def gradient(*rows: int) -> Tensor:
        values = normal(gen, len(rows), 3)
        values[0] = 0
        return torch.sparse_coo_tensor(torch.tensor([rows]), values, (6, 3), check_invariants=False)

    p = nn.Parameter(normal(gen, 6, 3))
    moving = torch.optim.SparseAdam([p], lr=0.02, betas=(0.8, 0.95), eps=eps, maximize=maximize)
    for _ in range(warmup):
        p.grad = gradient(0, 1, 2, 4, 4)
        moving.step()
    g, before = gradient(1, 2, 2, 3), p.detach().clone()
    count = {"step": torch.tensor(float(warmup))} if warmup else {}
    state = state_of(p, moving) | count
    rows = torch.tensor([False, True, True, True, False, False])
    theta, after = step(rule(moving), before, g.to_dense(), state, rows)
    D, _ = direction(rule(moving), torch.stack([g.to_dense()] * 2), state, torch.stack([rows, ~rows]))
    p.grad = g
    moving.step()
    close(theta, p.detach())
    close(D[0], (before - p.detach()) / 0.02, 1e-11)
    assert not D[1, rows].any() and bool(D[1, 4].any()) == (warmup > 0)
    for key, value in state_of(p, moving).items():
        close(after[key], value)
    with pytest.raises(ValueError, match="SparseAdam .* unknown which"):
        direction(rule(moving), g.to_dense(), state)


@cases
def test_steps_follow_each_other(name: str, options: dict[str, Any]) -> None:
    p, moving = warm(name, options, 0)
    g = normal(generator(8), 20)
    theta, state = p.detach(), dict[str, Tensor]()
    for _ in range(9):
        theta, state = step(rule(moving), theta, g, state)
    close(theta, literal(p, moving, g, steps=9)[0])


@cases
@warmups
def test_direction_is_what_a_step_moves_by(name: str, options: dict[str, Any], warmup: int) -> None:
    p, moving = warm(name, options, warmup)
    optimizer, state, g = rule(moving), state_of(p, moving), normal(generator(8), 20)
    D, _ = direction(optimizer, g, state)
    base = shrinkage(optimizer, state) * p.detach()
    right, _ = literal(p, moving, g - optimizer.coupled * p.detach())
    close(D, (base - right) / optimizer.lr, 1e-11)


@cases
def test_directions_of_examples_broadcast_and_vmap(name: str, options: dict[str, Any]) -> None:
    p, moving = warm(name, options, 9)
    optimizer, state, g = rule(moving), state_of(p, moving), normal(generator(8), 5, 20)
    one_by_one = torch.stack([direction(optimizer, x, state)[0] for x in g])
    assert torch.equal(direction(optimizer, g, state)[0], one_by_one)
    close(torch.vmap(lambda x: direction(optimizer, x, state)[0])(g), one_by_one)


@cases
def test_float32_keeps_float32_and_its_precision(name: str, options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float32)
    p, moving = warm(name, options, 0)
    p.data = p.data.float()
    gen = generator(9)
    for _ in range(9):
        p.grad = normal(gen, 20).float()
        moving.step()
    g = normal(gen, 20).float()
    theta, after = step(rule(moving), p.detach(), g, state_of(p, moving))
    assert theta.dtype == torch.float32
    assert all(after[k].dtype == x.dtype for k, x in state_of(p, moving).items() if k in after)
    close(theta, literal(p, moving, g)[0], 1e-6)


def test_a_parameter_without_axes_keeps_its_dtype() -> None:
    optimizer = Optimizer("adamw", {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8})
    theta = torch.tensor(1.0, dtype=torch.float32)
    after, state = step(optimizer, theta, theta, {})
    assert after.dtype == state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", [*REFUSED, "lion8bit"])
def test_others_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer '{kind}'"):
        direction(Optimizer(kind, {"lr": 0.1}), torch.ones(2), {})


def test_every_optimizer_of_torch_has_a_rule_or_a_reason() -> None:
    names = {n.lower() for n in dir(torch.optim) if n[0].isupper()} - {"optimizer"}
    assert names == (RULES.keys() - {"less"}) | REFUSED.keys()


@pytest.mark.parametrize("kind", ["rprop", "asgd"])
def test_own_step_sizes_have_no_direction_at_rate_zero(kind: str) -> None:
    p, moving = warm("Rprop" if kind == "rprop" else "ASGD", {}, 3)
    moving.param_groups[0]["lr"] = 0.0
    with pytest.raises(ValueError, match=f"{kind} moves parameters by step sizes of its own"):
        direction(rule(moving), torch.ones(20), state_of(p, moving))


# Properties.

ADAM = Optimizer("adam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3})


def test_adam_without_past_is_nearly_a_sign() -> None:
    g = normal(generator(1), 20)
    optimizer = replace(ADAM, hyper=ADAM.hyper | {"beta1": 0.0, "beta2": 0.0})
    close(direction(optimizer, g, {})[0], g / (g.abs() + 1e-3))


def test_no_gradient_still_follows_the_momentum() -> None:
    p, moving = warm("Adam", {"eps": 1e-3}, 9)
    state = state_of(p, moving)
    t = int(state["step"]) + 1
    m, v = 0.9 * state["exp_avg"] / (1 - 0.9**t), 0.999 * state["exp_avg_sq"] / (1 - 0.999**t)
    close(direction(ADAM, torch.zeros(20), state)[0], m / (v.sqrt() + 1e-3))


def test_linearization_at_the_gradient() -> None:
    p, moving = warm("Adam", {"eps": 1e-3}, 9)
    state, g = state_of(p, moving), normal(generator(2), 20)
    after = direction(ADAM, g, state)[1]
    b1, b2 = 1 - 0.9 ** float(after["step"]), 1 - 0.999 ** float(after["step"])
    m, v = after["exp_avg"] / b1, after["exp_avg_sq"] / b2
    D, S = 1 / (v.sqrt() + 1e-3), m / (2 * v.sqrt() * (v.sqrt() + 1e-3) ** 2)
    _, slope = torch.func.jvp(lambda x: direction(ADAM, x, state)[0], (g,), (torch.ones(20),))
    close(slope, 0.1 * D / b1 - 2 * 0.001 * S * g / b2)


def test_directions_do_not_commute_with_projection() -> None:
    g, P = normal(generator(3), 20), normal(generator(4), 8, 20)
    state = {k: x[:20].abs() for k, x in {"exp_avg": g, "exp_avg_sq": g}.items()} | {
        "step": torch.tensor(3.0)
    }
    projected = {k: P @ x if x.ndim else x for k, x in state.items()}
    projected["exp_avg_sq"] = projected["exp_avg_sq"].abs()
    outer, inner = P @ direction(ADAM, g, state)[0], direction(ADAM, P @ g, projected)[0]
    assert (outer - inner).abs().max() > 0.1 * outer.abs().max()


def test_less_has_no_bias_correction_and_epsilon_inside_the_root() -> None:
    p, moving = warm("Adam", {"eps": 1e-3}, 9)
    state, g = state_of(p, moving), normal(generator(2), 20)
    m, v = 0.9 * state["exp_avg"] + 0.1 * g, 0.999 * state["exp_avg_sq"] + 0.001 * g * g
    close(direction(replace(ADAM, kind="less"), g, state)[0], m / (v + 1e-3).sqrt())


# Derivatives.


def floating(state: State) -> dict[str, Tensor]:
    return {k: x for k, x in state.items() if x.ndim}


@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c[0] != "Rprop"])
def test_derivatives_of_a_step(name: str, options: dict[str, Any]) -> None:
    """Of the parameter and the state after it, with respect to parameter, gradient and state before."""
    p, moving = warm(name, options, 9)
    optimizer, state, g = rule(moving), state_of(p, moving), normal(generator(8), 20)
    names = [k for k in floating(step(optimizer, p, g, state)[1]) if k in state]

    def after(theta: Tensor, g: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        moved, then = step(optimizer, theta, g, state | dict(zip(names, values, strict=True)))
        return moved, *(then[k] for k in names)

    inputs = [x.clone().requires_grad_() for x in (p.detach(), g, *(state[k] for k in names))]
    assert torch.autograd.gradcheck(after, inputs, eps=1e-7, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "less"]
)
def test_derivatives_are_finite_where_nothing_ever_moved(name: str) -> None:
    optimizer = rule(warm("Adam" if name == "less" else name, {}, 0)[1])
    optimizer = replace(optimizer, kind=name.lower())
    g = torch.zeros(3, requires_grad=True)
    theta = torch.ones(3, requires_grad=True)
    moved, after = step(optimizer, theta, g, {})
    for x in (moved, *(x for x in after.values() if x.requires_grad)):
        for slope in torch.autograd.grad(x.sum(), (g, theta), retain_graph=True, allow_unused=True):
            assert slope is None or bool(slope.isfinite().all())


def test_unrolled_adamw_is_differentiated_as_a_whole() -> None:
    """d theta_3 / d g_1 through three steps against finite differences: the past enters through both moments."""
    optimizer = Optimizer("adamw", {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1})
    gs = normal(generator(5), 3, 4)

    def run(first: Tensor) -> Tensor:
        theta, state = torch.ones(4), dict[str, Tensor]()
        for g in (first, gs[1] + 0.3 * first, gs[2]):
            theta, state = step(optimizer, theta, g, state)
        return theta

    assert torch.autograd.gradcheck(run, gs[0].clone().requires_grad_())


# Leaves.

LeafOf = Callable[[Any], Leaf]
B = 3


def stacked(gen: Any) -> Factorized:
    parts = (Part("q.weight", 2, bias="q.bias"), Part("k.weight", 3, bias="k.bias"))
    return factorized(parts, normal(gen, B, 4, 5), normal(gen, B, 4, 5), bias=True)


def transposed(gen: Any) -> Factorized:
    return factorized("c.weight", normal(gen, B, 4, 5), normal(gen, B, 4, 2), bias="c.bias", transposed=True)


def table(gen: Any) -> Leaf:
    return lookup("wte.weight", torch.tensor([[0, 1], [1, 1], [6, 2]]), normal(gen, B, 2, 3), rows=7)


def convolution(gen: Any) -> Leaf:
    return grouped("conv.weight", normal(gen, B, 2, 4, 6), normal(gen, B, 2, 4, 3), shape=(6, 2, 3))


def experts(gen: Any) -> Leaf:
    return grouped("experts.up", normal(gen, B, 2, 4, 5), normal(gen, B, 2, 4, 3), transposed=True)


def vector(gen: Any) -> Leaf:
    return materialized("scale", normal(gen, B, 6))


leaves = pytest.mark.parametrize("leaf_of", [stacked, transposed, table, convolution, experts, vector])


def moments(leaf: Leaf, gen: Any) -> tuple[dict[str, Optimizer], dict[str, State], dict[str, Tensor]]:
    """Per-example gradients by parameter, with a hyperparameter and a state of its own for each."""
    grads = stored(GradTree({leaf.parts[0].weight: leaf}))
    rules, states = dict[str, Optimizer](), dict[str, State]()
    for k, (name, g) in enumerate(grads.items()):
        rules[name] = replace(ADAM, hyper=ADAM.hyper | {"beta1": 0.5 + 0.1 * k})
        shape = g.shape[1:]
        states[name] = {
            "step": torch.tensor(3.0 + k),
            "exp_avg": normal(gen, *shape),
            "exp_avg_sq": normal(gen, *shape).abs(),
        }
    return rules, states, grads


@leaves
@pytest.mark.parametrize("centered", [False, True])
def test_directed_leaves_by_parameter(leaf_of: LeafOf, centered: bool) -> None:
    gen = generator(6)
    leaf = leaf_of(gen)
    rules, states, grads = moments(leaf, gen)
    found = directed(rules, states, centered=centered)(leaf.parts[0].weight, leaf)
    assert found is not None and found.parts == leaf.parts
    moved = stored(GradTree({leaf.parts[0].weight: found}))
    assert set(moved) == set(grads)
    for name, g in grads.items():
        one = lambda x, name=name: direction(rules[name], x, states[name])[0]  # noqa: E731
        shift = one(torch.zeros_like(g[0])) if centered else 0.0
        close(moved[name], torch.stack([one(x) - shift for x in g]))


def test_directed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = stacked(generator(6))
    rules, states, _ = moments(leaf, generator(7))
    whole = materialize_leaf(leaf)
    change = directed(rules, states)
    at_once = change("q.weight", whole)
    monkeypatch.setattr("attrax.core.directions._AT_ONCE", 1)
    one_by_one = change("q.weight", whole)
    assert at_once is not None and one_by_one is not None
    assert torch.equal(materialize_leaf(at_once).w, materialize_leaf(one_by_one).w)


def test_directed_takes_no_projected_leaf() -> None:
    leaf = replace(transposed(generator(1)), basis="two-rademacher-4-seed0")
    with pytest.raises(ValueError, match="project after, not before"):
        directed({}, {})("c.weight", leaf)


def test_directed_needs_an_optimizer_for_every_parameter() -> None:
    with pytest.raises(ValueError, match="no optimizer moves parameter 'c.bias'"):
        directed({"c.weight": ADAM}, {})("c.weight", transposed(generator(1)))
