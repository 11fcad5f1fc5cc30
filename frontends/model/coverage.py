"""Which parameters are captured, by which rule, and which are not and why: decided before anything runs.

Parameters of modules without a rule are captured by recomputing the module that uses them.  A parameter that several
layers share is captured only if all of them are: part of its gradient would be a gradient of nothing.  One that also
lies bare on another module is taken to be another name of it (checks against autograd tell otherwise).
"""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from attrax.core.factorization import RULES, Rule, find_rule
from attrax.frontends.model.sharding import canonical, is_flat, sizes, submodules

Selector: TypeAlias = str | type[nn.Module] | Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Captured:
    """A parameter that is captured: its name, the layer's rule and its number of entries."""

    parameter: str
    rule: str
    entries: int


@dataclass(frozen=True)
class Gap:
    """A trainable parameter that is not captured: its name, the reason and its number of entries."""

    parameter: str
    reason: str
    entries: int


@dataclass(frozen=True)
class Coverage:
    """Captured parameters and gaps; ``print(coverage)`` shows the report."""

    captured: tuple[Captured, ...]
    gaps: tuple[Gap, ...]

    @property
    def known(self) -> set[str]:
        """Names of all trainable parameters it speaks of."""
        return {c.parameter for c in self.captured} | {gap.parameter for gap in self.gaps}

    @property
    def share(self) -> float:
        """Captured share of all trainable parameter entries."""
        inside = sum(c.entries for c in self.captured)
        return inside / max(1, inside + sum(g.entries for g in self.gaps))

    def __str__(self) -> str:
        rules: dict[str, list[int]] = {}
        for c in self.captured:
            rules.setdefault(c.rule, []).append(c.entries)
        lines = [
            f"captured {self.share:.1%} of trainable parameters ({sum(c.entries for c in self.captured):,})"
        ]
        lines += [
            f"  {rule}: {len(sizes)} parameters, {sum(sizes):,} entries" for rule, sizes in rules.items()
        ]
        if self.gaps:
            lines.append(
                f"not captured: {len(self.gaps)} parameters, {sum(g.entries for g in self.gaps):,} entries"
            )
            lines += [f"  {gap.parameter}: {gap.reason}" for gap in self.gaps]
        return "\n".join(lines)


def matches(selector: Selector, name: str, module: nn.Module) -> bool:
    """Whether a module path is selected: regular expression (searched), module type(s), or callable."""
    if isinstance(selector, str):
        return re.search(selector, name) is not None
    if isinstance(selector, type):
        return isinstance(module, selector)
    if callable(selector):
        return bool(selector(name, module))
    return isinstance(module, tuple(selector))


@dataclass(frozen=True)
class Layer:
    """A module to tap.

    Attributes:
        path: Module path.
        module: The module.
        rule: Its rule; None if it is recomputed.
        names: Canonical names of the parameters to capture, by attribute path within the module.
    """

    path: str
    module: nn.Module
    rule: Rule | None
    names: Mapping[str, str]

    @property
    def key(self) -> str:
        """Tells it from the same module's layer of the other kind."""
        return self.path if self.rule is not None else f"{self.path} (recomputed)"


@dataclass(frozen=True)
class Selection:
    """Layers to tap, and the resulting coverage."""

    layers: tuple[Layer, ...]
    coverage: Coverage


RECOMPUTED = "recomputed"


def select(
    model: nn.Module,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    rules: Sequence[Rule] = RULES,
    recompute: Selector | None = None,
    strict: bool = False,
) -> Selection:
    """Decide which layers are captured: every trainable parameter, unless told otherwise.

    Args:
        model: The model; parameters with `requires_grad` are trainable.
        include: Only modules that match: regular expression on the module path, type(s), or ``(name, module) -> bool``.
        exclude: Modules to leave out, likewise.
        rules: Layer rules, first match along the class hierarchy.
        recompute: Modules to recompute as a whole, with all parameters inside.
        strict: Make gaps an error.

    Returns:
        The selection.

    Raises:
        ValueError: If nothing is captured, or `strict` and something is not, or a pattern is no regular expression.
    """
    ruled: dict[str, Layer] = {}
    recomputed: dict[str, Layer] = {}
    captured: dict[str, Captured] = {}
    gaps: dict[str, Gap] = {}
    bare: list[tuple[str, str]] = []
    modules, entries = submodules(model), sizes(model)
    _check_patterns(modules, include=include, exclude=exclude, recompute=recompute)
    names = {id(p): canonical(n) for n, p in model.named_parameters()}
    whole = _outermost(modules, recompute)
    for path, module in modules.items():
        own = {a: p for a, p in module.named_parameters(recurse=False) if p.requires_grad}
        inside = _around(path, whole) is not None
        rule = _rule(module, path, rules) if own and not inside else None
        left_out = _left_out(path, module, include, exclude)
        for attribute, p in own.items():
            name = names[id(p)]
            if left_out is not None:
                gaps[name] = Gap(name, f"{left_out} ('{path}.{attribute}')", entries[name])
            elif rule is not None and attribute in rule.parameters:
                layer = ruled.get(path, Layer(path, module, rule, {}))
                ruled[path] = replace(layer, names={**layer.names, attribute: name})
                captured[name] = Captured(name, rule.name, entries[name])
            else:
                bare.append((f"{path}.{attribute}" if path else attribute, name))
    for full, name in bare:
        owner = full.rpartition(".")[0]
        chosen = _around(owner, whole)
        if name in captured and chosen is None:
            continue
        path, module = _user(modules, owner) if chosen is None else (chosen, modules[chosen])
        layer = recomputed.get(path, Layer(path, module, None, {}))
        local = full[len(path) :].lstrip(".")
        recomputed[path] = replace(layer, names={**layer.names, local: name})
    for path in [path for path, layer in recomputed.items() if is_flat(layer.module)]:
        lost = recomputed.pop(path)
        reason = f"{type(lost.module).__name__} cannot run once more: parts of it are wrapped in FSDP1"
        gaps |= {n: Gap(n, reason, entries[n]) for n in lost.names.values()}
    for layer in recomputed.values():
        how = f"{RECOMPUTED} {type(layer.module).__name__}"
        captured |= {n: Captured(n, how, entries[n]) for n in layer.names.values()}
    coverage = Coverage(tuple(c for n, c in captured.items() if n not in gaps), tuple(gaps.values()))
    _check(model, coverage, strict)
    return Selection((*ruled.values(), *recomputed.values()), coverage)


def _check_patterns(modules: Mapping[str, nn.Module], **selectors: Selector | None) -> None:
    """Refuse what is no regular expression; warn of one that leaves out or recomputes nothing: it is misspelt."""
    for name, given in selectors.items():
        if not isinstance(given, str):
            continue
        try:
            re.compile(given)
        except re.error as error:
            raise ValueError(f"capture: {name}: {given!r} is no regular expression: {error}.") from error
        if name != "include" and not any(matches(given, path, module) for path, module in modules.items()):
            warnings.warn(
                f"capture: {name}={given!r} matches no module. Paths are those of model.named_modules(), such as "
                f"{list(modules)[-3:]}.",
                UserWarning,
                stacklevel=4,
            )


def _outermost(modules: Mapping[str, nn.Module], recompute: Selector | None) -> list[str]:
    """Paths of the modules to recompute that are in no other of them."""
    found: list[str] = []
    for path, module in modules.items():
        if recompute is not None and matches(recompute, path, module) and _around(path, found) is None:
            found.append(path)
    return found


def _around(path: str, modules: Sequence[str]) -> str | None:
    """The first of some modules that is, or contains, the one at a path."""
    return next((m for m in modules if not m or path == m or path.startswith(f"{m}.")), None)


def _rule(module: nn.Module, path: str, rules: Sequence[Rule]) -> Rule | None:
    """The rule of a module that is called itself."""
    if type(module).__name__ in UNCALLED or PARAMETRIZED in path.split("."):
        return None
    rule = find_rule(module, rules)
    return None if rule is None or rule.refuse(module) else rule


def without(selection: Selection, parameters: Collection[str], reason: str) -> Selection:
    """A selection in which some parameters are gaps."""
    captured, gaps = selection.coverage.captured, selection.coverage.gaps
    lost = tuple(Gap(c.parameter, reason, c.entries) for c in captured if c.parameter in parameters)
    kept = tuple(c for c in captured if c.parameter not in parameters)
    layers = tuple(
        replace(layer, names={a: n for a, n in layer.names.items() if n not in parameters})
        for layer in selection.layers
    )
    return Selection(tuple(layer for layer in layers if layer.names), Coverage(kept, gaps + lost))


def _left_out(path: str, module: nn.Module, include: Selector | None, exclude: Selector | None) -> str | None:
    if include is not None and not matches(include, path, module):
        return "not in include"
    if exclude is not None and matches(exclude, path, module):
        return "excluded"
    return None


UNCALLED = ("NonDynamicallyQuantizableLinear", "ParameterList", "ParameterDict", "ModuleList", "ModuleDict")
"""Classes whose parameters are used by the module around them, past their own forward."""
PARAMETRIZED = "parametrizations"
"""Where torch keeps what the weight of the module around it is computed from."""


def _user(modules: Mapping[str, nn.Module], path: str) -> tuple[str, nn.Module]:
    """The nearest module, at a path or around it, that is called with examples."""
    parts = path.split(".") if path else []
    parts = parts[: parts.index(PARAMETRIZED)] if PARAMETRIZED in parts else parts
    while parts and type(modules[".".join(parts)]).__name__ in UNCALLED:
        parts.pop()
    return ".".join(parts), modules[".".join(parts)]


def _check(model: nn.Module, coverage: Coverage, strict: bool) -> None:
    if not coverage.captured:
        trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        found = (
            f"trainable parameters: {trainable[:3]} …" if trainable else "no parameter has requires_grad=True"
        )
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            f"capture: no layer is selected ({found}; module types: {kinds[:12]}). "
            "Check include/exclude against model.named_modules(), or call model.requires_grad_(True). A weight that "
            "two layers share is captured only if both are selected."
        )
    if strict and coverage.gaps:
        raise ValueError(f"capture: strict=True and some trainable parameters have no rule.\n{coverage}")
