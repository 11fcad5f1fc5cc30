"""Per-example gradients of any module's parameters, by running the module once more beside the user's graph.

For modules without a rule (attention, recurrent layers, routers, bare parameters): the inputs the module saw and the
gradients of its outputs are enough, ``vmap(vjp)`` of the module's own forward gives one gradient an example.  Modules
that `vmap` cannot trace, or that draw random numbers (dropout in training), run once as they ran, followed by one
backward an example that only this example's output gradients enter.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from attrax.core import Leaf, materialized
from attrax.core.pytree import tree_map
from attrax.frontends.model.parameters import Slot, own_attributes, own_buffers, replaced
from attrax.frontends.model.randomness import Draws, undrawn
from attrax.frontends.tape.layout import Layout


@dataclass(frozen=True)
class Moment:
    """The state around a module's call that its forward depends on.

    Attributes:
        device: Device type of the module.
        random: How far random generators had drawn before the call, if it is to draw the same again.
        drew: Whether the call drew random numbers.
        autocast: Whether autocast was on, and its dtype.
        buffers: Buffers before the call, if the call changed them (running statistics, power iterations).
    """

    device: str
    random: Draws | None
    drew: bool
    autocast: tuple[bool, torch.dtype]
    buffers: Mapping[Slot, Tensor | None] | None = None

    @staticmethod
    def of(
        module: nn.Module, random: Draws | None, buffers: Mapping[Slot, Tensor | None] | None = None
    ) -> "Moment":
        """The state now."""
        device = next((p.device.type for p in module.parameters()), "cpu")
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        return Moment(device, random, random is not None and random.went_on, autocast, buffers)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same state, with gradients on."""
        enabled, dtype = self.autocast
        with (
            torch.enable_grad(),
            slow_attention(),
            sdpa_kernel(SDPBackend.MATH),
            torch.autocast(self.device, dtype=dtype, enabled=enabled),
        ):
            yield


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Torch's own attention layers call their sublayers, instead of one kernel that no hook sees."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Parametrized weights are computed anew, inside of `torch.nn.utils.parametrize.cached` too."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call of a module: its arguments without their tensors, and where examples lie in each tensor.

    Attributes:
        module: The module.
        names: Its parameters to differentiate, by attribute path.
        arguments: (args, kwargs) with every tensor replaced by its position.
        moment: The state around the call.
        layouts: Where examples lie in every input tensor, then in every tapped output.
        rows: Number of examples B.
    """

    module: nn.Module
    names: tuple[str, ...]
    arguments: tuple[Any, Any]
    moment: Moment
    layouts: tuple[Layout, ...]
    rows: int

    def leaves(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Leaf]:
        """Materialized leaves by attribute.

        Args:
            tensors: Input tensors of the call, in the order of their positions.
            grads: Gradients of the outputs that were tapped, in order.

        """
        with undrawn(self.module), self.moment.again():
            found = None if self.moment.drew else self._vmapped(tensors, grads)
            found = self._repeated(tensors, grads) if found is None else found
        return {name: materialized(name, w.detach()) for name, w in found.items()}

    def _forward(self, parameters: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = tree_map(lambda x: tensors[x.index] if isinstance(x, Place) else x, self.arguments)
        held = {owner(self.module, name): p for name, p in parameters.items()}
        if self.moment.random is not None:
            self.moment.random.restore()
        with (
            own_attributes(self.module),
            own_buffers(self.module, self.moment.buffers),
            replaced(held),
            uncached(),
        ):
            return tapped(self.module(*args, **kwargs))

    def _parameters(self) -> dict[str, Tensor]:
        return {name: getattr(*owner(self.module, name)).detach() for name in self.names}

    def _vmapped(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor] | None:
        places, made = self.layouts[: len(tensors)], self.layouts[len(tensors) :]

        def one(each: list[Tensor], g: list[Tensor]) -> dict[str, Tensor]:
            inputs = [p.alone(x) for x, p in zip(each, places, strict=True)]
            run = vjp(lambda parameters: self._forward(parameters, inputs), self._parameters())
            outputs, back = run[0], run[1]
            cotangents = [p.alone(x).to(y.dtype) for x, p, y in zip(g, made, outputs, strict=True)]
            return back(cotangents)[0]

        split = [p.split(x, self.rows) for x, p in zip([*tensors, *grads], self.layouts, strict=True)]
        axes = [p.axis for p in self.layouts]
        n = len(tensors)
        try:
            return vmap(one, in_dims=(axes[:n], axes[n:]))(split[:n], split[n:])
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return None

    def _repeated(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor]:
        made = self.layouts[len(tensors) :]
        parameters = {n: p.requires_grad_() for n, p in self._parameters().items()}
        outputs = self._forward(parameters, [x.detach() for x in tensors])
        used = [
            (y, g.to(y.dtype), p) for y, g, p in zip(outputs, grads, made, strict=True) if y.requires_grad
        ]
        rows: list[list[Tensor]] = []
        for i in range(self.rows):
            only = [p.only(g, self.rows, i) for _, g, p in used]
            found = torch.autograd.grad(
                [y for y, _, _ in used], list(parameters.values()), only, retain_graph=True, allow_unused=True
            )
            pairs = zip(parameters.values(), found, strict=True)
            rows.append([torch.zeros_like(p) if g is None else g for p, g in pairs])
        return {n: torch.stack([row[k] for row in rows]) for k, n in enumerate(parameters)}


@dataclass(frozen=True)
class Place:
    """Stands for the tensor at `index` in recorded arguments."""

    index: int


def without_tensors(arguments: Any) -> tuple[Any, list[Tensor]]:
    """Nested arguments with a `Place` for every tensor, and the tensors."""
    tensors: list[Tensor] = []

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tensors.append(x)
        return Place(len(tensors) - 1)

    return tree_map(place, arguments), tensors


def tapped(output: Any) -> list[Tensor]:
    """The tensors of an output that can carry gradients."""
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) if _floats(x) else None, output)
    return found


def with_tapped(output: Any, replacements: Sequence[Tensor]) -> Any:
    """An output with its tensors that can carry gradients replaced, in order."""
    following: Iterator[Tensor] = iter(replacements)
    swap: Callable[[Any], Any] = lambda x: next(following) if _floats(x) else x  # noqa: E731
    return tree_map(swap, output)


def _floats(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the name it has there, by attribute path."""
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name
