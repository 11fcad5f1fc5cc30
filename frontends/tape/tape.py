"""The tape: hooks on layers, and the bookkeeping that turns one backward into leaves.

A layer's forward hook puts a `Tap` on its output.  During backward, calls that share a parameter or an input form a
group; a group's leaves are delivered the moment its last gradient arrives.  A capture listens to the backwards of a
training loop and counts those that add to `.grad`: asking for the gradient of an input (adversarial examples, gradient
penalties, Hessian products) delivers nothing.  A live source runs its own backward, with frozen parameters.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule

from attrax.core import Leaf
from attrax.frontends.buffers import Buffers
from attrax.frontends.model.coverage import Layer
from attrax.frontends.tape.assemble import Piece, assemble
from attrax.frontends.tape.batchaxis import BatchAxis
from attrax.frontends.tape.before import Before
from attrax.frontends.tape.forms import cached, rule_form
from attrax.frontends.tape.fused import fused_heads, in_rows, logit_gradients, output_head
from attrax.frontends.tape.hooks import hook
from attrax.frontends.tape.layout import EXAMPLES, Layout, Packing
from attrax.frontends.tape.passes import Call, Pass, again, flatten, input_key, open_pass, repeat
from attrax.frontends.tape.placing import LayoutError, Placing
from attrax.frontends.tape.recompute import with_tapped
from attrax.frontends.tape.taps import (
    Tap,
    accumulates,
    in_backward,
    marked,
    origins,
    refuse_transforms,
    saved_inputs,
)
from attrax.frontends.tape.tensor_parallel import Holds, tensor_parallel


@dataclass(eq=False)
class Tape:
    """Taps on a model's layers; only front-ends hold one.

    Attributes:
        model: The model.
        layers: Layers to tap.
        deliver: Called with (pass, name, leaf) as leaves become complete.
        finish: Called with the passes of a backward once it is over, and the paths of calls that saw no gradient.
        start: Called when a backward begins.
        open_pass: Called when a pass opens; may fill `Pass.notes`.
        close_pass: Called with the outermost call's output; returns the output to use instead.
        unplaced: Called with the error where a layer's examples cannot be told apart; it is left out if that returns.
        layouts: Where the examples lie in the layers that were asked, by path; filled as models run.
        check: Whether to check once that rows of layers are examples.
        together: Whether forward passes of the model wait for other processes: its parameters are spread over them.
        holds: What leaves are of layers that are cut over processes.
        parameters: The model's parameters by name, as far as modules may hold other tensors in their place.
    """

    model: nn.Module
    layers: Sequence[Layer]
    deliver: Callable[[Pass, str, Leaf], None]
    finish: Callable[[list[Pass], list[str]], None] = lambda runs, missed: None
    start: Callable[[], None] = lambda: None
    open_pass: Callable[[Pass], None] = lambda run: None
    close_pass: Callable[[Pass, Any], Any] = lambda run, output: output
    unplaced: Callable[[LayoutError], None] | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)
    check: bool = False
    together: bool = False
    holds: Holds = "whole"
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parallel = tensor_parallel(self.model, self.layers, self.holds)
        self.listening = False
        self.seen: set[str] = set()
        self._handles: list[Any] = []
        self._names: dict[str, dict[str, str]] = {}
        self._before: dict[str, Before] = {}
        self._dropped: set[str] = set()
        self._placing = Placing(self.model, self.layouts, self.paused, self.parallel)
        self._axis = BatchAxis(self.model, self.paused)
        self._head = output_head(self.model)
        self._memory = Buffers().array
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
        for layer in self.layers:
            self._names[layer.key] = {a: n for a, n in layer.names.items() if n in wanted}
        self._depth, self._current, self._running, self._before = 0, None, [], {}
        try:
            for module in self.model.modules():
                enter = hook(module, self._enter)
                early = self.together  # before sharding gathers the parameters
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=early))
            for layer in self.layers:
                ready = hook(layer.module, partial(self._ready, layer))
                self._handles.append(layer.module.register_forward_pre_hook(ready, with_kwargs=True))
                tap = hook(layer.module, partial(self._tap, layer))
                first = self.parallel is not None and layer.path in self.parallel.layers
                first = first or isinstance(layer.module, FSDPModule)  # inside of what gathers it in backward
                self._handles.append(layer.module.register_forward_hook(tap, with_kwargs=True, prepend=first))
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
            self._memory = Buffers().array

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
    def spanning(
        self,
        rows: int,
        inputs: dict[str, Any],
        again: Callable[[bool], object] | None = None,
        packed: Packing | None = None,
    ) -> Iterator[Pass]:
        """One pass for everything inside the context, however often the model is called; see `Pass` for arguments."""
        self._own = self._current = Pass(rows, inputs, True, packed, again=again)
        self._depth = 1
        if self.together:
            self._placing.ask_together(self._own)
        try:
            yield self._own
        finally:
            self._current, self._depth = None, 0

    def check_rows(self) -> None:
        """Check that rows of layers are examples, in the pass of `spanning`.

        Raises:
            LayoutError: If they are not.
        """
        assert self._own is not None
        self._placing.check(self._own)

    def differentiate(self, total: Tensor, *, everything: bool = False) -> None:
        """Backward of the pass of `spanning`, leaf by leaf; parameters' `.grad` too if `everything` is."""
        run = self._own
        assert run is not None
        inputs = None if run.silent or everything else list(run.anchors.values())
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
        if in_backward() and self._running and self._running[-1].silent:
            return self._running[-1]
        inputs = [x for x in flatten((args, kwargs)).values() if isinstance(x, Tensor)]
        earlier = origins(inputs, self) if torch.is_grad_enabled() and not in_backward() else []
        if len(earlier) > 1:
            raise RuntimeError(
                f"capture: {type(module).__name__} was called with outputs of {len(earlier)} parts of the model that "
                "were called one by one, so it is unknown which examples belong together. Call them inside the forward "
                "of one module, and that module as a whole: model(...), not model.forward(...)."
            )
        if earlier:
            earlier[0].complete = False
            earlier[0].given += [x.detach() for x in inputs]
            return earlier[0]
        run = open_pass(module, args, kwargs, complete=module is self.model)
        run.recomputed = in_backward()
        asks = torch.is_grad_enabled() and not (run.recomputed or self.together or cached(args, kwargs))
        run.repeat = partial(repeat, module, args, kwargs) if asks else None
        run.rows = self._axis.rows(module, run.inputs, run.repeat)
        if not run.recomputed and run.rows and not cached(args, kwargs):
            run.again = partial(again, module, args, kwargs, run.rows)
        if torch.is_grad_enabled() and not run.recomputed:
            if self.together:
                self._placing.ask_together(run)
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
        if self.check and run.calls and (run.rows or 0) > 1 and not run.silent:
            self.check = False
            self._placing.check(run)
        run.again = run.repeat = None
        if run in self._running or not torch.is_grad_enabled():
            return None
        if self._own is None and run.calls:
            self._axis.check(run, output)
        if run.complete:
            for node in fused_heads(output):
                self._tap_fused(run, node, output["label_mask"])
        output = self.close_pass(run, output) if run.calls and run.complete else output
        return marked(output, run, self) if run.silent else output

    def _tap(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self._placing.asking.now:
            return self._placing.asking.answer(layer, args, kwargs, output)
        run = self._current
        if not self.listening or run is None or run.rows == 0:
            return None
        self.seen.add(layer.path)
        if not torch.is_grad_enabled():
            run.silent = True
            run.met(layer.path)
            if module.training:
                self._placing.learn(layer, run, args, kwargs, output)
            return None
        before = self._before.pop(layer.key, Before({}))
        names = self._names[layer.key]
        names = (
            names if self._own is not None else {a: n for a, n in names.items() if a in before.accumulators}
        )
        names = {a: n for a, n in names.items() if n not in self._dropped}
        if not names:
            return None
        try:
            moment = before.moment(layer, args, kwargs) if layer.rule is None else None
            form = self._placing.form(layer, run, args, kwargs, output, tuple(names), moment)
        except LayoutError as error:
            if self.unplaced is None:
                raise
            self.unplaced(error)
            self._dropped.update(error.parameters)
            return None
        key = input_key(form.saved[0]) if layer.rule is not None and layer.rule.shares_input else None
        call = Call(
            layer.path,
            len(run.calls),
            names,
            before.accumulators,
            form.leaves,
            key,
            layer.module is self._head,
        )
        run.add(call)
        anchor = run.anchor(form.outputs[0].device) if self._own is not None else None
        outputs = Tap.apply(call, run, self, anchor, len(form.saved), *form.saved, *form.outputs)
        return with_tapped(output, outputs)

    def _tap_fused(self, run: Pass, node: Any, mask: Tensor) -> None:
        """Listen to an output head that was fused with the loss, as if it had been called."""
        layer = next((x for x in self.layers if x.module is self._head and x.rule is not None), None)
        if layer is None or layer.rule is None:
            return
        parents = [parent for parent, _ in node.next_functions[1:3]]
        accumulators = {a: p for a, p in zip(("weight", "bias"), parents, strict=True) if p is not None}
        names = {
            a: n for a, n in self._names[layer.key].items() if a in accumulators and n not in self._dropped
        }
        if not names:
            return
        self.seen.add(layer.path)
        hidden = in_rows(node.saved_tensors[0].detach(), mask)
        ruled = rule_form(layer.rule, layer.module, (hidden,), hidden, EXAMPLES, run.extent).leaves
        how = dict(node.kernel_args)

        def leaves(saved: Sequence[Tensor], grads: Sequence[Tensor]) -> Mapping[str, Leaf]:
            return ruled([in_rows(saved[0], mask)], [in_rows(logit_gradients(how, saved, grads), mask)])

        call = Call(layer.path, len(run.calls), names, accumulators, leaves, head=True)
        run.add(call)
        known = weakref.ref(node)

        def arrive(grads: Sequence[Tensor]) -> None:
            ctx = known()
            assert ctx is not None
            if grads[0] is not None:
                run.notes.log_probs = (grads[0], mask)
            self.arrive(run, call, ctx, grads)

        node.register_prehook(arrive)

    def _ready(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.listening and torch.is_grad_enabled():
            refuse_transforms(layer.path)
            names = {} if self._own is not None else self._names[layer.key]
            self._before[layer.key] = Before.of(layer, module, args, kwargs, names, self.parameters)

    # Backward: gradients arrive, groups are delivered, and the end of the backward finishes its passes.

    def arrive(self, run: Pass, call: Call, ctx: FunctionCtx, grads: Sequence[Tensor]) -> None:
        """The gradients of a call's outputs; called by its tap."""
        names = self._counted(run, call)
        if not names:
            return
        self.begin(run)
        if call.arrived:
            raise RuntimeError(f"capture: layer '{call.path}' received two gradients for one call.")
        with torch.no_grad():
            saved = saved_inputs(ctx, call.path)
            with self.paused():
                leaves = call.leaves(saved, grads)
            if self.parallel is not None:
                leaves = self.parallel.counted(call.path, leaves)
                names = {a: n for a, n in names.items() if a in leaves}
            call.piece = Piece(call.index, names, leaves, call.input_key, call.head)
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
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
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
        kept = {a: n for a, n in call.names.items() if n not in self._dropped}
        return {a: n for a, n in kept.items() if accumulates(call.accumulators[a])}

    def _emit_group(self, run: Pass, group: list[Call], *, partial: bool = False) -> None:
        ordered = sorted(group, key=lambda call: run.order[call.path])
        pieces = [call.piece for call in ordered if call.piece is not None]
        if not pieces or (len(pieces) < len(group) and not partial):
            return
        for call in group:
            call.piece = None
        for name, leaf in assemble(pieces, self._memory).items():
            self.deliver(run, name, leaf)

    def _ended(self) -> None:
        """Data parallel training writes averaged gradients in callbacks queued meanwhile; one queued now runs last."""
        torch.autograd.Variable._execution_engine.queue_callback(self._finished)

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
                run.notes.scale, run.notes.outside = None, False

    def _abandon(self) -> None:
        """Forget a backward that did not end."""
        for run in self._running:
            run.reset()
        self._running = []
