"""What a layer rule is, and how the rule of a module is found.

A rule is a pure function ``(module, x, g) -> {parameter attribute: leaf}`` of the layer's input `x` [B, ..., Ni] and
the gradient `g` [B, ..., No] of the loss with respect to its (first) output.  It knows nothing of hooks, names or other
layers: folding biases, joining calls, tying and stacking happen afterwards and alike for every rule.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from attrax.core.leaves import Leaf

Factorize: TypeAlias = Callable[[nn.Module, Any, Tensor], Mapping[str, Leaf]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One layer type.

    Attributes:
        name: Shown in coverage reports.
        match: The module class, or a regular expression its class name must match in full.
        factorize: The rule.
        shares_input: Whether `a` is the layer's input unchanged, so that layers fed by one tensor can be stacked.
        parameters: Attributes the rule may return a leaf for; others of the layer are not captured.
        refuse: ``module -> reason`` for configurations the rule does not cover (they are recomputed), else None.
        inputs: Names of the forward arguments the rule takes: `x` is then a tuple with a Tensor or None for each.
            Empty for the first tensor argument, `x` being that Tensor.
        rows: Whether further axes between the first and the last are rows, however many there are.
    """

    name: str
    match: type[nn.Module] | str
    factorize: Factorize
    shares_input: bool = False
    parameters: tuple[str, ...] = ("weight", "bias")
    refuse: Callable[[nn.Module], str | None] = lambda module: None
    inputs: tuple[str, ...] = ()
    rows: bool = True


def find_rule(module: nn.Module, rules: Sequence[Rule]) -> Rule | None:
    """The rule of the nearest class in the module's hierarchy, or None; among rules for one class, the first.

    >>> mine = Rule("Mine", nn.Linear, lambda module, x, g: {})
    >>> rule = find_rule(nn.Linear(2, 3), [mine])
    >>> rule.name if rule else None
    'Mine'
    """
    for cls in type(module).__mro__:
        for rule in rules:
            named = isinstance(rule.match, str) and re.fullmatch(rule.match, cls.__name__)
            if named or rule.match is cls:
                return rule
    return None


def overrides(base: type[nn.Module], *methods: str) -> Callable[[nn.Module], str | None]:
    """A `refuse` that says why a subclass of `base` may compute something else than `base` does.

    >>> class Clipped(nn.Conv1d):
    ...     def forward(self, input):
    ...         return super().forward(input).clamp(0)
    >>> overrides(nn.Conv1d, "forward")(Clipped(1, 1, 1))
    "Clipped overrides Conv1d.forward; pass a rule for it if its parameters' gradients are still those of Conv1d"
    """

    def reason(module: nn.Module) -> str | None:
        for method in methods:
            if getattr(type(module), method) is not getattr(base, method):
                mine, its = type(module).__name__, base.__name__
                return (
                    f"{mine} overrides {its}.{method}; pass a rule for it if its parameters' gradients are still "
                    f"those of {its}"
                )
        return None

    return reason


def own(module: nn.Module, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The leaves of parameters that the module has."""
    return {name: leaf for name, leaf in leaves.items() if getattr(module, name, None) is not None}
