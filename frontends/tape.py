"""The tape: taps on layers, and the bookkeeping that turns one backward pass into leaves.

A layer's forward hook returns ``Tap(output)``, an identity in autograd that sees the output's gradient whatever the
model does with the output (in-place activations, views, compiled regions) and keeps the layer's input the way
autograd does: it is recomputed under activation checkpointing, freed with the graph, and an in-place change of it is
an error instead of a wrong number.

State belongs to one autograd graph (`Pass`), opened at the outermost hooked call.  A forward pass that is never
differentiated (logging, evaluation, an exception) therefore leaves nothing behind.  During backward, calls that share a
parameter or an input form a group; a group's leaves are delivered the moment its last gradient arrives.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from attrax.core import Leaf
from attrax.core.factorization import Rule
from attrax.frontends.assemble import Piece, assemble, components


@dataclass(eq=False)
class Call:
    """One call of a tapped layer within a forward pass."""

    path: str
    module: nn.Module
    rule: Rule
    run: "Pass"
    index: int
    names: Mapping[str, str]
    input_key: tuple[object, ...]
    piece: Piece | None = None
    arrived: bool = False


@dataclass(eq=False)
class Pass:
    """One forward pass and what its backward has delivered so far.

    Attributes:
        rows: Number of examples B.
        inputs: Tensor inputs of the outermost call by name.
        rooted: Whether the outermost call was the model itself, so that all calls of the pass are known.
        calls: Tapped layer calls, in forward order.
        silent: Whether tapped layers ran without gradient (reentrant checkpointing runs them again in backward).
        notes: Free for the front-end (loss weight, ids).
    """

    rows: int | None
    inputs: dict[str, Any]
    rooted: bool
    calls: list[Call] = field(default_factory=list)
    silent: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    _groups: dict[int, list[Call]] | None = None

    def group_of(self, call: Call) -> list[Call]:
        """The calls that must all arrive before `call`'s parameters are complete."""
        if self._groups is None:
            edges = [[*c.names.values(), *([c.input_key] if c.rule.shares_input else [])] for c in self.calls]
            groups = [[self.calls[i] for i in members] for members in components(edges)]
            self._groups = {c.index: members for members in groups for c in members}
        return self._groups[call.index]

    def regroup(self) -> None:
        """Forget the grouping: calls were added while the backward ran."""
        self._groups = None

    def reset(self) -> None:
        """Forget arrivals, so that a repeated backward (retain_graph) is captured again."""
        for call in self.calls:
            call.piece, call.arrived = None, False


class Tap(torch.autograd.Function):
    """Identity whose backward hands the output gradient and the saved input to the tape."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, x: Tensor, call: Call, tape: "Tape") -> Tensor:  # noqa: D102
        ctx.save_for_backward(x)
        ctx.call, ctx.tape = call, tape
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        (g,) = grads
        if ctx.tape.listening:
            ctx.tape._arrive(ctx.call, _saved(ctx), g.detach())
        return g, None, None, None, None


def _saved(ctx: FunctionCtx) -> Tensor:
    try:
        return ctx.saved_tensors[0]  # type: ignore[attr-defined]
    except RuntimeError as error:
        call: Call = ctx.call  # type: ignore[attr-defined]
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            f"capture: the input of layer '{call.path}' was changed in place after the layer ran, so its gradient "
            "cannot be formed. Use an out-of-place operation after this layer, or exclude the layer."
        ) from error


@dataclass(eq=False)
class Tape:
    """Taps on a model's layers; only front-ends hold one.

    Attributes:
        model: The model.
        layers: (path, module, rule) to tap.
        deliver: Called with (pass, name, leaf) as leaves become complete.
        finish: Called with the passes of a backward once it is over, and the paths of calls that saw no gradient.
        open_pass: Called when a pass opens, with the module called and its arguments; may fill `Pass.notes`.
        close_pass: Called with the outermost call's output; returns the output to use instead.
    """

    model: nn.Module
    layers: Sequence[tuple[str, nn.Module, Rule]]
    deliver: Callable[[Pass, str, Leaf], None]
    finish: Callable[[list[Pass], list[str]], None]
    open_pass: Callable[[nn.Module, Pass], None] = lambda module, run: None
    close_pass: Callable[[Pass, Any], Any] = lambda run, output: output
    listening: bool = False

    def __post_init__(self) -> None:
        self._handles: list[Any] = []
        self._depth = 0
        self._current: Pass | None = None
        self._running: list[Pass] = []
        self._seen: set[str] = set()
        self._names: dict[int, str] = {}
        self._head = _output_head(self.model)
        self._wanted: set[str] = set()

    @contextlib.contextmanager
    def attached(self, wanted: set[str]) -> Iterator[None]:
        """Hooks on the model for the duration of the context; none of them survives it.

        Args:
            wanted: Canonical names of the parameters to capture.
        """
        self._wanted = wanted
        self._names = {id(p): n for n, p in self.model.named_parameters()}
        self._depth, self._current, self._running = 0, None, []
        try:
            for module in self.model.modules():
                self._handles.append(module.register_forward_pre_hook(self._enter(module), with_kwargs=True))
            for path, module, rule in self.layers:
                self._handles.append(module.register_forward_hook(self._tap(path, module, rule), with_kwargs=True))
            for module in self.model.modules():
                leave = self._leave(module)
                self._handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
            self.listening = True
            yield
        finally:
            self.listening = False
            for handle in self._handles:
                handle.remove()
            self._handles, self._current, self._running = [], None, []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore forward and backward passes inside the context, and forget nothing outside it."""
        state = (self.listening, self._depth, self._current, self._running)
        self.listening, self._depth, self._current, self._running = False, 0, None, []
        try:
            yield
        finally:
            self.listening, self._depth, self._current, self._running = state

    def never_called(self) -> list[str]:
        """Paths of tapped layers that no forward pass has called so far."""
        return [path for path, _, _ in self.layers if path not in self._seen]

    def _enter(self, module: nn.Module) -> Callable[..., None]:
        def hook(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is not module or not self.listening:
                return
            if self._depth == 0 and self._current is None and _in_backward() and self._recomputed():
                self._current = self._running[-1]
            elif self._depth == 0 and self._current is None:
                if not _in_backward():
                    self._running = []
                run = Pass(None, bind(module, args, kwargs), module is self.model)
                tensors = [x for x in run.inputs.values() if isinstance(x, Tensor) and x.ndim > 0]
                run.rows = tensors[0].shape[0] if tensors else None
                self._current = run
                if torch.is_grad_enabled():
                    self.open_pass(module, run)
            self._depth += 1

        return hook

    def _recomputed(self) -> bool:
        """Whether a forward inside backward re-runs layers that ran without gradient (reentrant checkpointing)."""
        return bool(self._running) and self._running[-1].silent

    def _leave(self, module: nn.Module) -> Callable[..., Any]:
        def hook(called: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if called is not module or not self.listening or self._current is None:
                return None
            self._depth -= 1
            if self._depth > 0:
                return None
            run, self._current, self._depth = self._current, None, 0
            if run in self._running:
                return None
            return self.close_pass(run, output) if torch.is_grad_enabled() and run.calls else None

        return hook

    def _tap(self, path: str, module: nn.Module, rule: Rule) -> Callable[..., Any]:
        def hook(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            run = self._current
            if called is not module or not self.listening or run is None:
                return None
            self._seen.add(path)
            if not torch.is_grad_enabled():
                run.silent = True
                return None
            x = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
            if not isinstance(x, Tensor) or not isinstance(output, Tensor):
                raise RuntimeError(
                    f"capture: layer '{path}' ({type(module).__name__}) was called with {type(x).__name__} and returned "
                    f"{type(output).__name__}; its rule '{rule.name}' needs one tensor in and one out. "
                    "Exclude it or pass rules= with a rule for it."
                )
            x, output = _batched(path, run, x.detach(), output)
            names = self._wanted_names(module)
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
            call = Call(path, module, rule, run, len(run.calls), names, key)
            run.calls.append(call)
            anchor = torch.empty((), device=output.device, dtype=output.dtype, requires_grad=True)
            return Tap.apply(output, anchor, x, call, self)

        return hook

    def _wanted_names(self, module: nn.Module) -> dict[str, str]:
        own = {a: self._names.get(id(p)) for a, p in module.named_parameters(recurse=False)}
        return {a: n for a, n in own.items() if n is not None and n in self._wanted}

    def _arrive(self, call: Call, x: Tensor, g: Tensor) -> None:
        run = call.run
        if not self._running:
            torch.autograd.Variable._execution_engine.queue_callback(self._finished)  # type: ignore[attr-defined]
        if run not in self._running:
            self._running.append(run)
        if call.arrived:
            raise RuntimeError(f"capture: layer '{call.path}' received two gradients for one call.")
        with torch.no_grad():
            with self.paused():
                leaves = call.rule.factorize(call.module, x, g)
            key = call.input_key if call.rule.shares_input else None
            call.piece = Piece(call.index, call.names, leaves, key, call.module is self._head)
            call.arrived = True
            if run.rooted and not run.silent:
                self._emit_group(run, run.group_of(call))

    def _emit_group(self, run: Pass, group: list[Call], *, partial: bool = False) -> None:
        pieces = [call.piece for call in group if call.piece is not None]
        if not pieces or (len(pieces) < len(group) and not partial):
            return
        for call in group:
            call.piece = None
        for name, leaf in assemble(pieces).items():
            self.deliver(run, name, leaf)

    def _finished(self) -> None:
        runs, self._running = self._running, []
        with torch.no_grad():
            for run in runs:
                run.regroup()
                groups = {id(g): g for g in (run.group_of(call) for call in run.calls)}
                for group in groups.values():
                    self._emit_group(run, group, partial=True)
            missed = sorted({call.path for run in runs for call in run.calls if not call.arrived})
            for run in runs:
                run.reset()
            self.finish(runs, missed)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _batched(path: str, run: Pass, x: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Give a broadcast call (position ids of shape [1, T]) one row per example; refuse other leading axes."""
    if run.rows is None or output.shape[0] == run.rows == x.shape[0]:
        return x, output
    if output.shape[0] == x.shape[0] == 1:
        return x.expand(run.rows, *x.shape[1:]), output.expand(run.rows, *output.shape[1:])
    raise RuntimeError(
        f"capture: layer '{path}' saw {x.shape[0]} rows in a batch of {run.rows} examples; its first axis is not the "
        "example axis (flattened or sequence-first input), so rows cannot be told apart. Exclude the layer."
    )


def _output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):
        return None
    return head if isinstance(head, nn.Module) else None


def bind(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by parameter name, so that positional and keyword calls look alike.

    >>> layer = nn.Linear(2, 2)
    >>> list(bind(layer, (torch.ones(1, 2),), {})), list(bind(layer, (), {"input": torch.ones(1, 2)}))
    (['input'], ['input'])
    """
    code = getattr(type(module).forward, "__wrapped__", type(module).forward)
    names = list(code.__code__.co_varnames[1 : code.__code__.co_argcount]) if hasattr(code, "__code__") else []
    named = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(args)}
    return {**named, **kwargs}
