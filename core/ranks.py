"""Several processes that share the examples of a fit: all that a method asks of them.

Methods know nothing of communication: they are given a value with three functions, which front-ends make, or `ALONE`.
All processes call the same functions in the same order, and all of them get the same results.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

S = TypeVar("S")
T = TypeVar("T")


@runtime_checkable
class Ranks(Protocol):
    """Processes that hold a share of the examples each."""

    def listed(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks."""
        ...

    def total(self, states: Mapping[str, S]) -> dict[str, S]:
        """Sums over processes of states by leaf: values whose tensors add up.  Some processes may lack some of them."""
        ...

    def dealt(
        self, function: Callable[[S], T], tasks: Mapping[str, S], cost: Callable[[S], float]
    ) -> dict[str, T]:
        """``function(task)`` of every task, each computed by one process; the costs of the processes are balanced."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process that holds all examples.

    >>> Alone().dealt(abs, {"x": -2}, float), Alone().listed(3)
    ({'x': 2}, [3])
    """

    def listed(self, value: T) -> list[T]:
        """See `Ranks.listed`."""
        return [value]

    def total(self, states: Mapping[str, S]) -> dict[str, S]:
        """See `Ranks.total`."""
        return dict(states)

    def dealt(
        self, function: Callable[[S], T], tasks: Mapping[str, S], cost: Callable[[S], float]
    ) -> dict[str, T]:
        """See `Ranks.dealt`."""
        return {name: function(task) for name, task in tasks.items()}


ALONE = Alone()
