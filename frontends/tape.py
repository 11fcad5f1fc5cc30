"""The tape: hooks on layers, and the bookkeeping that turns one backward into leaves.

A layer's forward hook puts a `Tap` on its output.  During backward, calls that share a parameter or an input form a
group; a group's leaves are delivered the moment its last gradient arrives.  A capture listens to the backwards of a
training loop and counts those that add to `.grad`: asking for the gradient of an input (adversarial examples, gradient
penalties, Hessian products) delivers nothing.  A live source runs its own backward, with frozen parameters.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from attrax.core import Leaf, tree_map
from attrax.core.factorization import Rule
from attrax.frontends.assemble import Piece, assemble
from attrax.frontends.hooks import hook
from attrax.frontends.passes import Call, Pass, batched, flatten, input_key, open_pass
from attrax.frontends.taps import Mark, Tap, origins, saved_input


@dataclass(eq=False)
class Tape:
    """Taps on a model's layers; only front-ends hold one.

    Attributes:
        model: The model.
        layers: (path, module, rule) to tap.
        deliver: Called with (pass, name, leaf) as leaves become complete.
        finish: Called with the passes of a backward once it is over, and the paths of calls that saw no gradient.
        start: Called when a backward begins.
        open_pass: Called when a pass opens; may fill `Pass.notes`.
        close_pass: Called with the outermost call's output; returns the output to use instead.
    """

    model: nn.Module
    layers: Sequence[tuple[str, nn.Module, Rule]]
    deliver: Callable[[Pass, str, Leaf], None]
    finish: Callable[[list[Pass], list[str]], None] = lambda runs, missed: None
    start: Callable[[], None] = lambda: None
    open_pass: Callable[[Pass], None] = lambda run: None
    close_pass: Callable[[Pass, Any], Any] = lambda run, output: output

    def __post_init__(self) -> None:
        self.listening = False
        self.seen: set[str] = set()
        self._handles: list[Any] = []
        self._names: dict[str, dict[str, str]] = {}
        self._accumulators: dict[str, dict[str, torch.autograd.graph.Node]] = {}
        self._head = _output_head(self.model)
        self._depth, self._task = 0, -1
        self._current: Pass | None = None
        self._running: list[Pass] = []
        self._own: Pass | None = None

    @contextlib.contextmanager
    def attached(self, wanted: set[str]) -> Iterator[None]:
        """Hooks on the model for the duration of the context; none of them survives it.

        Args:
            wanted: Canonical names of the parameters to capture.

        Raises:
            RuntimeError: If the tape is attached already.
        """
        if self._handles:
            raise RuntimeError("capture: this capture is already running; leave it before entering it again.")
        names = {id(p): n for n, p in self.model.named_parameters()}
        for path, module, _ in self.layers:
            own = {a: names.get(id(p)) for a, p in module.named_parameters(recurse=False)}
            self._names[path] = {a: n for a, n in own.items() if n in wanted and n is not None}
        self._depth, self._current, self._running, self._accumulators = 0, None, [], {}
        try:
            for module in self.model.modules():
                enter = hook(module, self._enter)
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            for path, module, rule in self.layers:
                ready = hook(module, partial(self._ready, path))
                self._handles.append(module.register_forward_pre_hook(ready, with_kwargs=True))
                tap = hook(module, partial(self._tap, path, rule))
                self._handles.append(module.register_forward_hook(tap, with_kwargs=True))
            for module in self.model.modules():
                leave = hook(module, self._leave)
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

    @contextlib.contextmanager
    def spanning(self, rows: int) -> Iterator[Pass]:
        """One pass of `rows` examples for everything inside the context, however often the model is called."""
        self._own = self._current = Pass(rows, {}, complete=True)
        self._depth = 1
        try:
            yield self._own
        finally:
            self._current, self._depth = None, 0

    def differentiate(self, total: Tensor) -> None:
        """Backward of the pass of `spanning`, leaf by leaf; no parameter's `.grad` is touched."""
        run = self._own
        assert run is not None
        inputs = None if run.silent else list(run.anchors.values())
        self._running = [run]
        torch.autograd.backward(total, inputs=inputs)
        self._finished()
        self._own = None

    # Forward: a pass opens at the outermost hooked call and records the calls of tapped layers.

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.listening:
            return
        if self._current is None:
            self._depth, self._current = 0, self._opened(module, args, kwargs)
        self._depth += 1

    def _opened(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
        """The pass that an outermost call belongs to: the one recomputed, the one it continues, or a new one."""
        if _in_backward() and self._running and self._running[-1].silent:
            return self._running[-1]
        inputs = [x for x in flatten((args, kwargs)).values() if isinstance(x, Tensor)]
        earlier = origins(inputs, self) if torch.is_grad_enabled() and not _in_backward() else []
        if len(earlier) > 1:
            raise RuntimeError(
                f"capture: {type(module).__name__} was called with outputs of {len(earlier)} parts of the model that "
                "were called one by one, so it is unknown which examples belong together. Call them inside the forward "
                "of one module, and that module as a whole: model(...), not model.forward(...)."
            )
        if earlier:
            earlier[0].complete = False
            return earlier[0]
        run = open_pass(module, args, kwargs, complete=module is self.model)
        run.recomputed = _in_backward()
        if torch.is_grad_enabled() and not run.recomputed:
            self.open_pass(run)
        return run

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        run = self._current
        if not self.listening or run is None:
            return None
        self._depth -= 1
        if self._depth > 0:
            return None
        self._current, self._depth = None, 0
        if run in self._running or not torch.is_grad_enabled():
            return None
        output = self.close_pass(run, output) if run.calls and run.complete else output
        return tree_map(partial(self._marked, run), output) if run.silent else output

    def _marked(self, run: Pass, x: Any) -> Any:
        return Mark.apply(x, run, self) if isinstance(x, Tensor) and x.requires_grad else x

    def _tap(
        self,
        path: str,
        rule: Rule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        run = self._current
        if not self.listening or run is None or run.rows == 0:
            return None
        self.seen.add(path)
        if not torch.is_grad_enabled():
            run.silent = True
            return None
        accumulators = self._accumulators.pop(path, {})
        names = (
            self._names[path] if self._own is not None else {a: self._names[path][a] for a in accumulators}
        )
        if not names:
            return None
        x = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            raise RuntimeError(
                f"capture: layer '{path}' ({type(module).__name__}) was called with {type(x).__name__} and returned "
                f"{type(output).__name__}; its rule '{rule.name}' needs one tensor in and one out. "
                "Exclude it or pass rules= with a rule for it."
            )
        x, output = batched(path, run, x.detach(), output)
        call = Call(path, module, rule, len(run.calls), names, accumulators, input_key(x))
        run.add(call)
        anchor = run.anchor(output.device) if self._own is not None else None
        return Tap.apply(output, anchor, x, call, run, self)

    def _ready(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a tapped layer runs: find the nodes that add to the `.grad` of its trained parameters.

        Not after it: sharded training holds the parameter that autograd sees in the module only while the layer runs.
        """
        if self._own is not None or not self.listening or not torch.is_grad_enabled():
            return
        own = {a: getattr(module, a) for a in self._names[path]}
        trained = {a: p for a, p in own.items() if isinstance(p, nn.Parameter) and p.requires_grad}
        self._accumulators[path] = {
            a: torch.autograd.graph.get_gradient_edge(p).node for a, p in trained.items()
        }

    # Backward: gradients arrive, groups are delivered, and the end of the backward finishes its passes.

    def arrive(self, run: Pass, call: Call, ctx: FunctionCtx, g: Tensor) -> None:
        """The gradient of a call's output; called by its tap."""
        names = self._counted(run, call)
        if not names:
            return
        self.begin(run)
        if call.arrived:
            raise RuntimeError(f"capture: layer '{call.path}' received two gradients for one call.")
        with torch.no_grad():
            x = saved_input(ctx, call.path)
            with self.paused():
                leaves = call.rule.factorize(call.module, x, g)
            key = call.input_key if call.rule.shares_input else None
            call.piece = Piece(call.index, names, leaves, key, call.module is self._head)
            call.arrived = True
            if run.complete and not run.silent:
                self._emit_group(run, run.group_of(call))

    def begin(self, run: Pass) -> None:
        """The backward of a pass begins, if it has not yet; called by its marks and taps."""
        if not self.listening or self._own is not None:
            return
        task = torch._C._current_graph_task_id()
        if run.recomputed and run not in self._running and (self._running or not run.complete):
            raise RuntimeError(
                "capture: a part of the model was recomputed in backward (reentrant activation checkpointing) that did "
                "not run inside a call of the model, so its examples are unknown. Call the model as a whole, or use "
                "checkpoint(..., use_reentrant=False)."
            )
        if task != self._task and self._running and not (run in self._running and run.silent):
            self._abandon()
        if run in self._running:
            return
        if not self._running:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finished)
            self.start()
        self._running.append(run)

    def refuse_twice(self, run: Pass, call: Call) -> None:
        """Called when a backward differentiates a gradient; such contributions do not pass the taps.

        Raises:
            RuntimeError: If they would be missing.
        """
        if not self._counted(run, call):
            return
        raise RuntimeError(
            f"capture: the loss contains a gradient of layer '{call.path}' (create_graph=True: a gradient penalty, a "
            "force, a derivative of the output), whose own gradient does not factor by layer. Leave such steps out "
            "with paused(), or use attrax.functional."
        )

    def _counted(self, run: Pass, call: Call) -> dict[str, str]:
        """Which of a call's parameters the running backward is for, by attribute."""
        if not self.listening:
            return {}
        if self._own is not None:
            return dict(call.names) if run is self._own and self._running else {}
        return {a: n for a, n in call.names.items() if _accumulates(call.accumulators[a])}

    def _emit_group(self, run: Pass, group: list[Call], *, partial: bool = False) -> None:
        pieces = [call.piece for call in group if call.piece is not None]
        if not pieces or (len(pieces) < len(group) and not partial):
            return
        for call in group:
            call.piece = None
        for name, leaf in assemble(pieces).items():
            self.deliver(run, name, leaf)

    def _finished(self) -> None:
        runs, self._running, self._task = self._running, [], -1
        with torch.no_grad():
            for run in runs:
                for group in run.groups():
                    self._emit_group(run, group, partial=True)
            missed = sorted({call.path for run in runs for call in run.calls if not call.arrived})
            self.finish(runs, missed)
            for run in runs:
                run.reset()

    def _abandon(self) -> None:
        """Forget a backward that did not end."""
        for run in self._running:
            run.reset()
        self._running = []


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _accumulates(node: torch.autograd.graph.Node) -> bool:
    """Whether the running backward adds to the parameter's `.grad`; `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return False


def _output_head(model: nn.Module) -> nn.Module | None:
    model = getattr(model, "module", model)
    getter = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):
        return None
    return head if isinstance(head, nn.Module) else None
