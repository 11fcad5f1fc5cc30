"""Which optimizer step a backward belongs to, with which learning rate, at which parameters.

A step is one round of the loop: the backwards whose gradients are summed, and then the optimizers that consume them,
each at most once.  Where no torch optimizer is seen (a loop that moves parameters by hand), a step ends when the
parameters move.
"""

from collections.abc import Iterable
from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from attrax.core.transfers import fetched
from attrax.frontends.loop.present import Present
from attrax.frontends.model.fingerprints import Fingerprints

Rates: TypeAlias = dict[str, float | None]


class Steps:
    """Counts steps and blocks within a step.

    Attributes:
        step: Number of steps completed.
        micro: Number of blocks in this step so far.
    """

    def __init__(self, model: nn.Module, present: Present) -> None:
        self.step, self.micro = 0, 0
        self._present = present
        self._marks = Fingerprints(model)
        self._movers: dict[int, Rates] = {}
        self._seen = False
        self._place: str | None = None

    def parameters(self) -> dict[str, Tensor]:
        """The captured parameters that are trained."""
        return {n: p for n, p in self._present.captured.items() if p.requires_grad}

    def look(self) -> bool:
        """Look the parameters up again; whether some were replaced."""
        replaced = self._present.look()
        if replaced:
            self._marks.forget()
        return replaced

    def rates(self, optimizer: Optimizer) -> Rates:
        """Learning rate of the captured parameters that an optimizer moves, by name; None if it makes its own."""
        groups = {id(p): group.get("lr") for group in optimizer.param_groups for p in group["params"]}
        own = {n: groups[id(p)] for n, p in self.parameters().items() if id(p) in groups}
        return {n: None if rate is None else float(rate) for n, rate in own.items()}

    def moves(self, rates: Rates) -> bool:
        """An optimizer is about to move some parameters; whether one has in this step already."""
        self._seen = True
        return not self._moving().isdisjoint(rates)

    def moved(self, optimizer: Optimizer, rates: Rates) -> bool:
        """An optimizer has stepped; whether all captured parameters have moved now."""
        self._seen = True
        self._marks.forget()
        self._movers[id(optimizer)] = rates
        return self._moving() >= self.parameters().keys()

    @property
    def over(self) -> bool:
        """Whether an optimizer has consumed the gradients, so that the next backward begins another step."""
        return bool(self._movers)

    @property
    def seen(self) -> bool:
        """Whether any optimizer has stepped so far."""
        return self._seen

    def rate(self) -> float | None:
        """The learning rate of this step, if all captured parameters moved with one."""
        found = {rate for rates in self._movers.values() for rate in rates.values()}
        complete = self._moving() >= self.parameters().keys()
        return found.pop() if len(found) == 1 and complete else None

    def _moving(self) -> set[str]:
        return {name for rates in self._movers.values() for name in rates}

    def advance(self) -> None:
        """Begin the next step."""
        self.step, self.micro = self.step + 1, 0
        self._movers.clear()

    def by_hand(self) -> bool:
        """Whether the parameters have moved since the last backward without any optimizer."""
        if self._seen:
            return False
        before, self._place = self._place, self._marks.of(self.parameters())
        return before is not None and before != self._place

    def forget(self) -> None:
        """Something may have written to the parameters uncounted."""
        self._marks.forget()

    def mark(self) -> str:
        """The model's fingerprint now."""
        return self._marks.now(self._present.parameters, exact=not self._seen)


class Discards:
    """Notices that gradients were changed, or thrown away, before an optimizer used them."""

    def __init__(self) -> None:
        self._state: dict[str, tuple[int, int]] | None = None

    def touched(self, parameters: dict[str, Tensor]) -> bool:
        """Whether gradients are not as the backward before has left them."""
        return bool(self._state) and _state(parameters) != self._state

    def remember(self, parameters: dict[str, Tensor]) -> None:
        """Note the gradients as a backward has left them."""
        self._state = _state(parameters)

    def forget(self) -> None:
        """Expect nothing: an optimizer has used the gradients."""
        self._state = None

    def happened(self, parameters: dict[str, Tensor]) -> bool:
        """Whether all gradients of the backward before are gone: None, or written to and zero now."""
        if not self._state or not self.touched(parameters):
            return False
        grads = [p.grad for n, p in parameters.items() if n in self._state and p.grad is not None]
        return not any(bool(_any(g)) for g in grads)


class Leftovers:
    """Notices gradients of earlier steps that a step uses once more (momentum by hand)."""

    def __init__(self) -> None:
        self._there: dict[str, Tensor] = {}

    def look(self, parameters: dict[str, Tensor]) -> None:
        """The first backward of a step begins: note which parameters have a gradient already."""
        grads = {n: p.grad for n, p in parameters.items()}
        self._there = {n: _any(g) for n, g in grads.items() if g is not None}

    def of(self, names: Iterable[str]) -> list[str]:
        """Which of some parameters had one."""
        there = {n: self._there[n] for n in names if n in self._there}
        flags = fetched(list(there.values())).tolist()
        return [n for n, flag in zip(there, flags, strict=True) if flag]


def _any(g: Tensor) -> Tensor:
    """Whether this process holds an entry of a gradient that is not zero."""
    g = g.to_local() if isinstance(g, DTensor) else g
    return g.coalesce().values().any() if g.is_sparse else g.any()


def _state(parameters: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return {n: (id(g), g._version) for n, g in grads.items()}
