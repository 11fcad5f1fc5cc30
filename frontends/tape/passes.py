"""One forward pass as the tape sees it: its examples, its inputs, and the calls of tapped layers.

State belongs to a pass, never to the model: a forward pass that is never differentiated (logging, evaluation, an
exception) leaves nothing behind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from attrax.core import Leaf
from attrax.frontends.model.sharding import unwrapped
from attrax.frontends.tape.assemble import Piece, components
from attrax.frontends.tape.layout import Packing, copied, permuted
from attrax.frontends.tape.notes import Delivered, Notes

Repeat: TypeAlias = Callable[[Callable[[Any], Any]], object]


@dataclass(eq=False)
class Call:
    """One call of a tapped layer within a forward pass.

    Attributes:
        path: Module path of the layer.
        index: Position among the calls of the pass.
        names: Canonical name by attribute, for the parameters to capture.
        accumulators: Autograd node that adds to the parameter's `.grad`, by attribute.
        leaves: Makes the leaves of the examples, by attribute, of the saved inputs and the output gradients.
        input_key: Identifies the memory of the layer's input, if layers fed by it can be stacked.
        head: Whether the layer is the model's output head.
        piece: The layer's leaves, between their arrival and their delivery.
        arrived: Whether this call's gradient has arrived in the running backward.
    """

    path: str
    index: int
    names: Mapping[str, str]
    accumulators: Mapping[str, torch.autograd.graph.Node]
    leaves: Callable[[Sequence[Tensor], Sequence[Tensor]], Mapping[str, Leaf]]
    input_key: tuple[object, ...] | None = None
    head: bool = False
    piece: Piece | None = None
    arrived: bool = False


class Extent(NamedTuple):
    """How many rows a pass has, and the examples in them where a row is not one example."""

    rows: int
    packed: Packing | None

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.rows if self.packed is None else self.packed.index.shape[0]


@dataclass(eq=False)
class Pass:
    """One forward pass and what its backward has delivered so far.

    Attributes:
        rows: Number of rows along the first axis of the inputs; None until known.
        packed: Where the examples lie, if a row is not one example.
        owners: The example of every row or position, if a row is not one example and the front-end was told.
        again: Runs the model once more on the inputs of the pass, as they are or with their rows reordered.
        repeat: Runs the outermost call once more on arguments that a function has changed; None where it cannot be.
        inputs: Inputs of the outermost call by name, tensors detached.
        complete: Whether all calls of the pass are known when its backward starts: it was one call of the model.
        recomputed: Whether it was opened inside a backward, by activation checkpointing.
        derived: Whether its inputs depend on parameters that ran outside of it.
        given: The tensors that its outermost calls were given.
        calls: Tapped layer calls, in forward order (of what reentrant checkpointing runs again, in that of backward).
        order: The order in which layers were first called in the forward pass, by path.
        silent: Whether tapped layers ran without gradient (reentrant checkpointing runs them again in backward).
        anchors: By device, a leaf that makes tapped outputs require gradients where parameters are frozen.
        notes: What the forward pass has told.
        delivered: What the running backward has delivered.
    """

    rows: int | None
    inputs: dict[str, Any]
    complete: bool
    packed: Packing | None = None
    owners: Tensor | None = None
    again: Callable[[bool], object] | None = None
    repeat: Repeat | None = None
    recomputed: bool = False
    derived: bool = False
    given: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    silent: bool = False
    anchors: dict[torch.device, Tensor] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    delivered: Delivered | None = None
    _groups: dict[int, list[Call]] | None = None

    @property
    def extent(self) -> Extent:
        """Its rows and examples, as far as calls need to know them."""
        return Extent(self.rows or 0, self.packed)

    def group_of(self, call: Call) -> list[Call]:
        """The calls that must all arrive before `call`'s parameters are complete."""
        if self._groups is None:
            edges = [[*c.names.values(), *([] if c.input_key is None else [c.input_key])] for c in self.calls]
            groups = [[self.calls[i] for i in members] for members in components(edges)]
            self._groups = {c.index: members for members in groups for c in members}
        return self._groups[call.index]

    def groups(self) -> list[list[Call]]:
        """All groups of calls."""
        return list({id(g): g for g in (self.group_of(call) for call in self.calls)}.values())

    def met(self, path: str) -> None:
        """A layer is called, with gradient or without."""
        self.order.setdefault(path, len(self.order))

    def add(self, call: Call) -> None:
        """Record a call; groups are formed anew."""
        self.met(call.path)
        self.calls.append(call)
        self._groups = None

    def anchor(self, device: torch.device) -> Tensor:
        """The pass's anchor on a device."""
        if device not in self.anchors:
            self.anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self.anchors[device]

    def reset(self) -> None:
        """Forget arrivals, so that a repeated backward (retain_graph) is captured again."""
        for call in self.calls:
            call.piece, call.arrived = None, False
        self.delivered = None


def open_pass(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, complete: bool) -> Pass:
    """A pass that starts with this call; how many rows it has is not known yet."""
    found = flatten(bind(module, args, kwargs))
    tensors = [x for x in found.values() if isinstance(x, Tensor)]
    inputs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in found.items()}
    derived = any(x.grad_fn is not None for x in tensors)
    return Pass(None, inputs, complete, derived=derived, given=[x.detach() for x in tensors])


def input_key(x: Tensor) -> tuple[object, ...]:
    """Identifies the memory and layout of a tensor, for as long as the key is held.

    An address alone would not do: under activation checkpointing the inputs of layers are freed and their memory is
    used again.  The weak reference keeps the identity of a storage, but not its memory.
    """
    memory = StorageWeakRef(x.untyped_storage())
    return (memory, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)


def has_axis(run: "Pass", length: int) -> bool:
    """Whether some input has a further axis of this length."""
    return any(isinstance(x, Tensor) and length in x.shape[1:] for x in run.inputs.values())


def bind(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by parameter name, so that positional and keyword calls look alike.

    >>> layer = nn.Linear(2, 2)
    >>> list(bind(layer, (torch.ones(1, 2),), {})), list(bind(layer, (), {"input": torch.ones(1, 2)}))
    (['input'], ['input'])
    """
    forward = type(unwrapped(module)).forward
    code = getattr(forward, "__wrapped__", forward)
    names = (
        list(code.__code__.co_varnames[1 : code.__code__.co_argcount]) if hasattr(code, "__code__") else []
    )
    named = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(args)}
    return {**named, **kwargs}


def flatten(values: object, name: str = "") -> dict[str, Any]:
    """Everything in nested mappings, lists and tuples, by dotted path.

    >>> list(flatten({"batch": {"x": torch.ones(1), "y": [torch.ones(1)]}, "flag": True}))
    ['batch.x', 'batch.y.0', 'flag']
    """
    if not isinstance(values, Mapping | list | tuple):
        return {name: values}
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    found: dict[str, Any] = {}
    for key, value in items:
        found |= flatten(value, f"{name}.{key}" if name else str(key))
    return found


def again(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, reorder: bool
) -> object:
    """Run a module once more on copies of its arguments, or with their rows reordered."""
    return repeat(module, args, kwargs, partial(permuted, B=rows) if reorder else copied)


def repeat(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
) -> object:
    """Run a module once more, without gradient, on arguments that a function has changed."""
    args, kwargs = change((args, kwargs))
    with torch.no_grad():
        return module(*args, **kwargs)
