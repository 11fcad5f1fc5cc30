"""Which parameters are captured, by which rule, and which are not and why: decided before anything runs.

A parameter that several layers share is captured only if all of them are: part of its gradient would be a gradient of
nothing.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from attrax.core.factorization import RULES, Rule, find_rule

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
class Selection:
    """Layers to tap: module paths with their rules, and the resulting coverage."""

    layers: tuple[tuple[str, nn.Module, Rule], ...]
    coverage: Coverage


def select(
    model: nn.Module,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    rules: Sequence[Rule] = RULES,
    strict: bool = False,
) -> Selection:
    """Decide which layers are captured: every trainable parameter a rule covers, unless told otherwise.

    Args:
        model: The model; parameters with `requires_grad` are trainable.
        include: Only modules that match: regular expression on the module path, type(s), or ``(name, module) -> bool``.
        exclude: Modules to leave out, likewise.
        rules: Layer rules, first match along the class hierarchy.
        strict: Make gaps an error.

    Returns:
        The selection.

    Raises:
        ValueError: If nothing is captured, or `strict` and something is not.
    """
    layers: list[tuple[str, nn.Module, Rule]] = []
    captured: dict[str, Captured] = {}
    gaps: dict[str, Gap] = {}
    names = {id(p): n for n, p in model.named_parameters()}
    for path, module in model.named_modules():
        own = {a: p for a, p in module.named_parameters(recurse=False) if p.requires_grad}
        rule = find_rule(module, rules) if own else None
        reason = _reason(path, module, rule, include, exclude)
        covered = [a for a in own if rule is not None and reason is None and a in rule.parameters]
        for attribute, p in own.items():
            name = names[id(p)]
            if rule is not None and attribute in covered:
                captured[name] = Captured(name, rule.name, p.numel())
                continue
            why = reason or f"the rule for {type(module).__name__} does not cover '{attribute}'"
            gaps[name] = Gap(name, f"{why} ('{path}.{attribute}')", p.numel())
        if rule is not None and covered:
            layers.append((path, module, rule))
    coverage = Coverage(tuple(c for n, c in captured.items() if n not in gaps), tuple(gaps.values()))
    _check(model, coverage, strict)
    return Selection(tuple(layers), coverage)


def _reason(
    path: str, module: nn.Module, rule: Rule | None, include: Selector | None, exclude: Selector | None
) -> str | None:
    if include is not None and not matches(include, path, module):
        return "not in include"
    if exclude is not None and matches(exclude, path, module):
        return "excluded"
    if rule is None:
        return f"no rule for {type(module).__name__}"
    return rule.refuse(module)


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
