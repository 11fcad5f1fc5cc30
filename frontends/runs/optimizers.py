"""Torch optimizers as values: kind, hyperparameters and state of every parameter, by the parameter's name.

Never by position: a parameter's place in the groups of an optimizer is not its place in the model (weight decay splits
them), and an optimizer's state dict counts through the groups.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from attrax.core import Optimizer, State, Step
from attrax.core.optimizers import check_optimizer
from attrax.frontends.model.modes import check_sharding
from attrax.frontends.model.sharding import Piece, canonical, named, part, pieces, whole

Optimizers: TypeAlias = dict[str, Optimizer]
States: TypeAlias = dict[str, State]

_PAIRS = {
    "betas": ("beta1", "beta2"),
    "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
}
_OTHER = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


def read_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[Optimizers, States]:
    """Kind, hyperparameters and state of the parameters of a model that an optimizer moves.

    Args:
        optimizer: An optimizer of `torch.optim`, possibly wrapped (Accelerate); `foreach`, `fused` and `capturable`
            ones are alike.
        model: The model, possibly wrapped in DistributedDataParallel, or sharded by `fully_shard`: then all processes
            must call this together.

    Returns:
        By parameter name, the model's order: `Optimizer` and state.  A state's tensors are the optimizer's own (clone
        them to keep them), sharded ones are gathered; a parameter that was never moved has an empty one.

    Raises:
        ValueError: If the optimizer does not act coordinate by coordinate or is not known.

    >>> layer = nn.Linear(2, 1)
    >>> groups = [{"params": [layer.bias], "weight_decay": 0.0}, {"params": [layer.weight]}]
    >>> rules, states = read_optimizer(torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5), layer)
    >>> rules["weight"].decay, rules["bias"].decay, states["bias"]
    (0.5, 0.0, {})
    """
    optimizer, model = unwrapped(optimizer), _inner(model)
    check_sharding(model)
    kind = _kind(optimizer)
    rules = [_rule(kind, group) for group in optimizer.param_groups]
    own = {
        id(p): (p, rule) for g, rule in zip(optimizer.param_groups, rules, strict=True) for p in g["params"]
    }
    moved = {n: own[id(p)] for n, p in named(model).items() if id(p) in own}
    flat = pieces(model)
    cuts = {n: flat[id(p)] for n, (p, _) in moved.items() if id(p) in flat and flat[id(p)].groups}
    held = _agreed({n: dict(optimizer.state.get(p, {})) for n, (p, _) in moved.items()}, cuts)
    states = {n: _state(values, cuts.get(n)) for n, values in held.items()}
    return {n: rule for n, (_, rule) in moved.items()}, states


def read_saved_optimizer(
    saved: Mapping[str, Any], model: nn.Module, kind: str, groups: Sequence[Iterable[str]] | None = None
) -> tuple[Optimizers, States]:
    """The same of the state dict of an optimizer, such as ``optimizer.pt`` of a Hugging Face checkpoint.

    Args:
        saved: ``optimizer.state_dict()``, loaded with ``torch.load(path, weights_only=True)``.
        model: The model.
        kind: Lower-case name of the optimizer's class, which a state dict does not tell: "adamw".
        groups: Names of the parameters of each group, in order.  Not needed if the optimizer was given names, or has
            one group of all trainable parameters; see `decay_groups`.

    Returns:
        By parameter name, `Optimizer` and state.

    Raises:
        ValueError: If the groups do not fit the file or a state does not fit its parameter.

    >>> layer = nn.Linear(2, 1)
    >>> saved = torch.optim.SGD(layer.parameters(), lr=0.1).state_dict()
    >>> read_saved_optimizer(saved, layer, "sgd")[0]["bias"].lr
    0.1
    """
    check_optimizer(kind, "read_saved_optimizer")
    trained = {n: p for n, p in named(_inner(model)).items() if p.requires_grad}
    found: Sequence[Mapping[str, Any]] = saved["param_groups"]
    if groups is None:
        groups = [g["param_names"] for g in found] if all("param_names" in g for g in found) else [trained]
    names = [list(group) for group in groups]
    sizes = [len(g["params"]) for g in found]
    if [len(group) for group in names] != sizes:
        raise ValueError(
            f"read_saved_optimizer: the file has groups of {sizes} parameters, got names for "
            f"{[len(group) for group in names]}. Pass groups=, the names of each group in the order of training."
        )
    rules: Optimizers = {}
    states: States = {}
    for group, members in zip(found, names, strict=True):
        for index, name in zip(group["params"], members, strict=True):
            rules[name], states[name] = _rule(kind, group), _state(saved["state"].get(index, {}))
            _check_fits(name, states[name], trained)
    order = [n for n in trained if n in rules]
    return {n: rules[n] for n in order}, {n: states[n] for n in order}


def decay_groups(model: nn.Module) -> list[list[str]]:
    """Names of the two groups of parameters that a Hugging Face Trainer makes: with and without weight decay."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    groups = [[n for n in names if n in decayed], [n for n in names if n not in decayed]]
    return [[canonical(n) for n in group] for group in groups]


def restore(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a model and its optimizer where they were before a recorded step: parameters, states, learning rates.

    Args:
        step: A step recorded with its parameters.
        model: The model; its buffers are not in a step and stay as they are.
        optimizer: An optimizer of the same class and groups.

    Raises:
        ValueError: If the step holds no parameters, or the optimizer is of another class.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> moving = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> rule, w = Optimizer("sgd", {"lr": 0.5}), torch.ones(1, 1)
    >>> restore(Step(3, {"weight": rule}, {"weight": {}}, parameters={"weight": w}), net, moving)
    >>> net.weight.item(), moving.param_groups[0]["lr"]
    (1.0, 0.5)
    """
    optimizer, parameters = unwrapped(optimizer), named(_inner(model))
    flat = pieces(_inner(model))
    kinds = {rule.kind for rule in step.optimizers.values()}
    if not step.parameters or kinds != {_kind(optimizer)}:
        raise ValueError(
            f"restore: step {step.step} holds {len(step.parameters)} parameters, moved by {sorted(kinds)}; the "
            f"optimizer is '{_kind(optimizer)}'. Record parameters, and restore into the same optimizer."
        )
    with torch.no_grad():
        for name, value in step.parameters.items():
            p = parameters[name]
            p.copy_(_placed(value, p, flat.get(id(p))))
    names = {id(p): n for n, p in parameters.items()}
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            if (name := names.get(id(p), "")) not in step.optimizers:
                continue
            rate = step.optimizers[name].lr
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
            state = step.states.get(name, {})
            count = (
                int if step.optimizers[name].sparse else Tensor.clone
            )  # SparseAdam counts its steps with a number
            optimizer.state[p] = {
                key: _placed(x, p, flat.get(id(p))) if x.ndim or on_device else count(x)
                for key, x in state.items()
            }


def _placed(x: Tensor, p: Tensor, cut: Piece | None) -> Tensor:
    """A copy of a whole tensor where a parameter lies, sharded as it is."""
    x = x.to(p.device, copy=True)
    if cut is not None and x.ndim:
        return part(x, cut)
    return distribute_tensor(x, p.device_mesh, p.placements) if isinstance(p, DTensor) and x.ndim else x


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Name of the class of `torch.optim` whose step the optimizer runs."""
    own = type(optimizer)
    for base in own.__mro__:
        if base.__module__.startswith("torch.optim"):
            inherited = inspect.unwrap(own.step) is inspect.unwrap(getattr(base, "step"))  # noqa: B009
            kind = base.__name__.lower() if inherited else f"{own.__module__}.{own.__qualname__}"
            check_optimizer(kind, "read_optimizer")
            return kind
    raise ValueError(f"read_optimizer: {own.__qualname__} is no optimizer of torch.optim.")


def _rule(kind: str, group: Mapping[str, Any]) -> Optimizer:
    hyper: dict[str, float] = {}
    for name, value in group.items():
        if name in _PAIRS:
            hyper |= dict(zip(_PAIRS[name], map(float, value), strict=True))
        elif name not in _OTHER and isinstance(value, float | int | Tensor):
            hyper[name] = float(value)
    return Optimizer(kind, hyper)


def _state(values: Mapping[str, Any], cut: Piece | None = None) -> State:
    """Tensors of a state; an older torch counts steps with plain numbers."""
    known = {name: x for name, x in values.items() if isinstance(x, Tensor | float | int)}
    return {
        n: whole(x, cut).detach() if isinstance(x, Tensor) else torch.tensor(float(x))
        for n, x in known.items()
    }


def _agreed(held: dict[str, dict[str, Any]], cuts: Mapping[str, Piece]) -> dict[str, dict[str, Any]]:
    """States with the entries that other processes have: an optimizer keeps none of an empty piece (FSDP1)."""
    if not cuts:
        return held
    (group,) = next(iter(cuts.values())).groups
    own = {n: {k: None if _is_array(x) else float(x) for k, x in held[n].items()} for n in cuts}
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group)
    for name, cut in cuts.items():
        for entries in (other[name] for other in found):
            for key, value in entries.items():
                missing = (
                    cut.local.new_zeros(0) if value is None else torch.tensor(value, dtype=torch.float64)
                )
                held[name].setdefault(key, missing)
        held[name] = {key: held[name][key] for key in sorted(held[name])}
    return held


def _is_array(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _check_fits(name: str, state: State, trained: Mapping[str, Tensor]) -> None:
    if name not in trained:
        raise ValueError(f"read_saved_optimizer: the model has no trainable parameter '{name}'.")
    shape = tuple(trained[name].shape)
    wrong = {k: tuple(x.shape) for k, x in state.items() if x.ndim and tuple(x.shape) != shape}
    if wrong:
        raise ValueError(
            f"read_saved_optimizer: parameter '{name}' of shape {shape} would get states of shapes {wrong}: the names "
            "are not in the order of training. Pass groups=; for a Hugging Face Trainer attrax.decay_groups(model)."
        )
