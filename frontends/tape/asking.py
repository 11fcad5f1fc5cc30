"""Asking a model where the examples lie in the calls of its layers.

It runs twice more, in eval mode: on its inputs as they are and on the same examples in another order.  A layer that all
examples share (a table of positions) is followed further: the model has to stay the same with one output of that layer
for each example, and a change of some of them must not reach the others.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attrax.frontends.model.coverage import Layer
from attrax.frontends.model.parameters import own_attributes, own_buffers
from attrax.frontends.model.randomness import Draws, undrawn
from attrax.frontends.model.sharding import whole
from attrax.frontends.tape.forms import recompute_tensors, rule_inputs
from attrax.frontends.tape.layout import SHARED, Layout, compared, doubtless, shared, unmoved
from attrax.frontends.tape.passes import Pass, flatten
from attrax.frontends.tape.recompute import slow_attention


class Asking:
    """What a model has told.

    Args:
        model: The model.
        known: Layouts beyond doubt, by layer; filled as the model is asked.
        aside: Context in which the model runs without being listened to.

    Attributes:
        lost: Layers whose rows did not move with the examples.
        draws: Whether the model drew random numbers, in eval mode.
    """

    def __init__(
        self,
        model: nn.Module,
        known: dict[str, Layout],
        aside: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.known = known
        self.lost: set[str] = set()
        self.draws = False
        self._model, self._aside = model, aside
        self._guessed: dict[str, Layout] = {}
        self._noted: list[tuple[str, Tensor]] | None = None
        self._spread: tuple[str, Callable[[Tensor], Tensor]] | None = None

    @property
    def now(self) -> bool:
        """Whether the model is being asked; calls are then answers, and nothing else."""
        return self._noted is not None

    def answer(self, layer: Layer, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call of a model that is being asked.

        Returns:
            The output for the model to go on with.
        """
        assert self._noted is not None
        self._noted += _placeable(layer, args, kwargs, output)
        spread = self._spread is not None and self._spread[0] == layer.key and layer.rule is not None
        return self._spread[1](output) if spread and self._spread is not None else output

    @property
    def doubt(self) -> str:
        """Why the answer may be wrong, to end a message with; empty if nothing says so."""
        text = (
            " The model draws random numbers in its forward pass, also in eval mode, and these do not move with the "
            "examples: draw them outside and pass them in, or draw them in training mode only."
        )
        return text if self.draws else ""

    def found(self, key: str) -> Layout | None:
        """The layout of a layer's tensors, if the model has told it."""
        return self.known.get(key) or self._guessed.get(key)

    def ask(self, run: Pass) -> None:
        """Run the model as it is and on reordered examples, to learn the layouts of all layers."""
        again, run.again = run.again, None
        if again is None or run.rows is None:
            return
        before, after = self.run_once(again, False), self.run_once(again, True)
        found = compared(before, after, run.rows)
        common = {key for key, layout in found.items() if layout is SHARED}
        found |= {key: None for key in common if not self._spreads(again, key, before, found, run.rows)}
        sure = doubtless(before, after, run.rows)
        placed = {key: layout for key, layout in found.items() if layout is not None}
        self.known.update({key: layout for key, layout in placed.items() if key in sure})
        self._guessed = placed
        self.lost |= {key for key, layout in found.items() if layout is None} | common

    def run_once(self, again: Callable[[bool], object], reorder: bool) -> list[tuple[str, Tensor]]:
        """What the layers of the model see, and what it returns."""
        self._noted = []
        try:
            with self._aside(), evaluated(self._model) as before:
                output = again(reorder)
                self.draws |= self._spread is None and before.went_on
            made = [whole(x) for x in flatten((output,)).values() if isinstance(x, Tensor)]
            return [*self._noted, *((f"output {i}", x) for i, x in enumerate(made))]
        finally:
            self._noted = None

    def _spreads(
        self,
        again: Callable[[bool], object],
        key: str,
        before: Sequence[tuple[str, Tensor]],
        found: Mapping[str, Layout | None],
        B: int,
    ) -> bool:
        """Whether the model is the same with one output of a shared layer for each example, and keeps them apart."""
        if any(key == f"output {i}" for i in range(len(before))) or " (recomputed) " in key:
            return True
        first = torch.arange(B) == 0
        for changed in (torch.zeros(B, dtype=torch.bool), first, ~first):
            self._spread = key, partial(_perturbed, B=B, examples=changed)
            try:
                now = self.run_once(again, False)
            except (RuntimeError, ValueError, IndexError, TypeError):
                return False
            finally:
                self._spread = None
            if not unmoved(before, now, found, B, ~changed):
                return False
        return True


def numbered(layer: Layer, index: int) -> str:
    """Key of one of several tensors of a layer's call."""
    return f"{layer.key} {index}"


def _placeable(
    layer: Layer, args: Sequence[Any], kwargs: dict[str, Any], output: Any
) -> list[tuple[str, Tensor]]:
    """The tensors of a call by which the model tells where its examples lie."""
    if layer.rule is not None:
        first = rule_inputs(layer.rule, layer.module, args, kwargs)[0]
        return [] if first is None else [(layer.path, whole(first.detach()))]
    tensors = recompute_tensors(args, kwargs, output)
    return [(numbered(layer, i), x.detach()) for i, x in enumerate(tensors)]


def _perturbed(output: Tensor, *, B: int, examples: Tensor) -> Tensor:
    """What all examples share, once for each, and something else for some of them."""
    each = shared(output, B)
    change = torch.randn_like(each) * output.abs().mean()
    return each + change * examples.to(each).reshape(-1, *[1] * (each.ndim - 1))


@contextlib.contextmanager
def evaluated(model: nn.Module) -> Iterator[Draws]:
    """A model in eval mode, with all that it may change set aside and nothing compiled, inside the context.

    Yields:
        How far random generators have drawn.
    """
    training = [m for m in model.modules() if m.training]
    with (
        undrawn(model) as before,
        torch.compiler.set_stance("force_eager"),
        slow_attention(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            for module in training:
                module.training = False
            with own_attributes(model), own_buffers(model):
                yield before
        finally:
            for module in training:
                module.training = True
