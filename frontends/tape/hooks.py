"""Hooks that belong to one module and to one process."""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn


class Hook:
    """A module hook that runs for its own module only.

    A copy of the module, made while it is hooked, keeps the hook and must not feed it; a module that is pickled takes
    no more than an empty hook along.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def run(self, called: nn.Module, *values: Any) -> Any:
        """Call the function, if it is the hook's own module that was called."""
        return self._function(called, *values) if called is self._module else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Nothing, ()


class Nothing:
    """A hook that does nothing."""

    def run(self, called: nn.Module, *values: Any) -> None:
        """Do nothing."""


def hook(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook to register on a module; it runs as it is, between compiled regions."""
    return MethodType(_eager(), Hook(module, function))


@cache
def _eager() -> Any:
    return torch.compiler.disable(Hook.run)
