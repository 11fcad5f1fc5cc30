"""Capture per-example gradients from a training loop that stays as it is.

    with attrax.capture(model, sinks=[attrax.store("grads/")]):
        trainer.train()

The end of a step is found by itself: every backward that adds to `.grad` makes one block, blocks wait for the optimizer
step that consumes them (its learning rate is recorded), and go to *sinks* (functions of a block).  Functions of a
`BackwardEvent` run when a backward is over and may change `.grad`; functions of a `StepEvent` run right before the
optimizer moves the parameters.  Training is unchanged bit for bit unless one of these changes it, and leaving the
context leaves no trace on the model.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from attrax.core import Block, Directions, Examples, GradTree, Leaf, Transform
from attrax.core.factorization import RULES, Rule
from attrax.core.leaves import covers
from attrax.core.transfers import near
from attrax.frontends.loop.arguments import check_functions, check_steps
from attrax.frontends.loop.doubts import (
    hooked,
    refuse_uncaptured,
    warn_of_changes,
    warn_of_early,
    warn_of_hooks,
    warn_of_leftovers,
    warn_of_moves,
    warn_of_nothing,
    warn_of_writes,
)
from attrax.frontends.loop.events import BackwardEvent, StepEvent
from attrax.frontends.loop.kept import Writes, kept, memory
from attrax.frontends.loop.losstaps import look_at_rows, tap_loss
from attrax.frontends.loop.merging import merged
from attrax.frontends.loop.moves import Moves
from attrax.frontends.loop.normalization import Declared, Normalization
from attrax.frontends.loop.owners import Owners, checked, count, pass_ids, places, together
from attrax.frontends.loop.present import Present
from attrax.frontends.loop.reweighing import Factors, rescaled, reweighed
from attrax.frontends.loop.steps import Discards, Leftovers, Steps
from attrax.frontends.loop.sums import GradientSums
from attrax.frontends.model.averaging import averaging
from attrax.frontends.model.coverage import Coverage, Selection, Selector, select, without
from attrax.frontends.model.modes import check_compiled, check_coupled, check_sharding
from attrax.frontends.model.rows import as_ids
from attrax.frontends.model.sharding import is_flat, is_sharded
from attrax.frontends.runs.observed import overflows
from attrax.frontends.runs.trajectory import Recorder
from attrax.frontends.sources.nonfinite import nonfinite_examples, without_nonfinite
from attrax.frontends.storage.sink import Sink as Files
from attrax.frontends.tape.notes import Delivered
from attrax.frontends.tape.passes import Pass
from attrax.frontends.tape.placing import LayoutError
from attrax.frontends.tape.tape import Tape
from attrax.frontends.tape.taps import in_backward
from attrax.frontends.tape.tensor_parallel import Holds

Sink = Callable[[Block], object]
Ids = Callable[[Mapping[str, Any]], Sequence[str]]
Weighed = Callable[[Sequence[Factors], Mapping[str, float]], None]
_PATIENCE = 64


class Capture:
    """A running capture; made by `capture`, used as a context manager.

    Attributes:
        directions: What blocks hold in place of gradients; may be changed between forward passes.
        skipped: (example id, reason) of examples left out.
        unreached: Paths of layers whose call received no gradient in some backward.
        holds: What blocks hold of layers that are cut over processes.
        hands_out: Whether this process hands blocks to sinks: of those that hold the same whole ones, the first does.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sinks: Sequence[Sink],
        after_backward: Sequence[Callable[[BackwardEvent], object]],
        before_step: Sequence[Callable[[StepEvent], object]],
        transform: Transform | None,
        reselect: Callable[[], Selection],
        loss: Declared | None,
        scaler: torch.amp.GradScaler | None,
        ids: Ids | None,
        owners: Owners | None,
        on_nonfinite: Literal["skip", "raise"],
        verify: bool,
        strict: bool,
        directions: Directions | None,
        trajectory: Recorder | None,
        holds: Holds,
    ) -> None:
        self.model, self.transform, self.selection = model, transform, reselect()
        self._present = Present(model, self.selection.layers)
        self.directions = directions
        self._moves = Moves(model, trajectory, scaler)
        self.sinks = tuple(sinks)
        self.after_backward, self.before_step = tuple(after_backward), tuple(before_step)
        self.skipped: list[tuple[str, str]] = []
        self.unreached: set[str] = set()
        self._covers: dict[str, tuple[str, ...]] = {}
        self._reselect, self._on_nonfinite = reselect, on_nonfinite
        self._ids, self._owners = ids, owners
        self._normalization = Normalization(loss, scaler)
        self._wanted = {c.parameter for c in self.coverage.captured}
        self._known = self.coverage.known
        self._steps, self._discards = Steps(model, self._present), Discards()
        self._leftovers, self._changed = Leftovers(), False
        self._told: set[str] = set()
        self._writes = Writes()
        self._pending: list[Block] = []
        self._discarded: list[Block] = []
        self._begun, self._first, self._early, self._handed = False, True, 0, 0
        self._sums = GradientSums(model, self._wanted) if verify and holds == "whole" else None
        self._stack = contextlib.ExitStack()
        self._tape = Tape(
            model,
            self.selection.layers,
            self._deliver,
            finish=self._finish,
            start=self._start,
            open_pass=self._open,
            close_pass=self._close,
            unplaced=None if strict else self._leave_out,
            check=verify,
            together=is_sharded(model),
            holds=holds,
            parameters={} if is_flat(model) else self._present.captured,
        )
        self.holds: Holds = holds
        self.hands_out = self._tape.parallel is None or self._tape.parallel.hands_out

    @property
    def coverage(self) -> Coverage:
        """Which parameters are captured, by which rule, and which are not and why."""
        return self.selection.coverage

    def __enter__(self) -> "Capture":
        self._stack.enter_context(self._tape.attached(self._wanted))
        if self._sums is not None:
            self._stack.callback(self._sums.close)
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._begun and self.sinks and error[0] is None:
            warn_of_nothing()
        with _closing(self.sinks):
            self._stack.close()
            self._flush(self._steps.rate())

    def __repr__(self) -> str:
        return (
            f"Capture(step {self._steps.step}, {self._handed} examples handed on, {len(self.skipped)} skipped, "
            f"{self.coverage.share:.1%} of trainable parameters)"
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is captured inside: evaluation or probing within a step."""
        with self._tape.paused():
            yield

    def _leave_out(self, error: LayoutError) -> None:
        """Parameters of a layer whose examples cannot be told apart become gaps."""
        names = error.parameters
        self.selection = without(self.selection, names, "its examples cannot be told apart")
        self._wanted -= names
        if not self._wanted:
            raise error
        if self._sums is not None:
            self._sums.leave_out(names)
        warnings.warn(f"{error} Its parameters are left out.", RuntimeWarning, stacklevel=2)

    def _look(self) -> None:
        """Follow the parameters of the model; new ones are checked again."""
        if self._steps.look() and self._sums is not None:
            self._sums = GradientSums(self.model, self._wanted)
        self._check_selection(self._present.added)

    # One backward: start -> deliver (leaf by leaf) -> finish.

    def _open(self, run: Pass) -> None:
        self._look()
        self._moves.look()
        if self._discards.touched(self._steps.parameters()):
            self._steps.forget()
        if self._sums is not None:
            self._sums.again(self._present.stand_ins)
        run.notes.mark, run.notes.averaging = self._steps.mark(), averaging()
        if self._sums is not None:
            run.notes.fresh = self._sums.fresh()
        if self._owners is not None and run.rows:
            run.owners = checked(self._owners(run.inputs, run.rows), run.rows)
            where = places(run.owners)
            if run.owners.ndim == 2:
                run.packed = where
            else:
                run.notes.together = where

    def _close(self, run: Pass, output: Any) -> Any:
        tapped = tap_loss(output, run.notes)
        if self._normalization.unsure and run.notes.loss is None:
            look_at_rows(output, run.notes)
        return tapped

    def _start(self) -> None:
        self._begun = True
        if self._sums is not None:
            self._sums.clear()
        if self._steps.over or self._steps.by_hand():
            self._end_step()
        elif not self._thrown_away() and not self._tape.together:
            self._changed |= self._discards.touched(self._steps.parameters())
        if self._first:
            self._leftovers.look(self._steps.parameters())

    def _thrown_away(self) -> bool:
        """Whether the gradients of the step's backwards so far are gone; no optimizer will use their blocks."""
        if not self._discards.happened(self._steps.parameters()):
            return False
        self._discards.forget()
        self._discarded, self._pending = self._discarded + self._pending, []
        self._leave_unused(self._moves.waiting.clear())
        self._first, self._changed = True, False
        return True

    def _deliver(self, run: Pass, name: str, leaf: Leaf) -> None:
        if run.delivered is None:
            if run.recomputed and self._owners is not None:
                raise RuntimeError(
                    "capture: examples= was given, but the model as a whole runs under reentrant activation "
                    "checkpointing. Use checkpoint(..., use_reentrant=False)."
                )
            run.delivered = Delivered(self._examples(run), self.directions)
        found = run.delivered
        if run.notes.together is not None:
            leaf = together(leaf, run.notes.together)
        found.bad[name] = nonfinite_examples(leaf)
        self._covers[name] = covers(leaf)
        if self._sums is not None:
            self._sums.add(name, leaf)
        late = found.directions is not None or self.after_backward
        changed = leaf if late or self.transform is None else self.transform(name, leaf)
        if changed is not None:
            found.leaves[name] = changed

    def _examples(self, run: Pass) -> Examples:
        number = run.rows or 0 if run.owners is None else count(run.owners)
        ids = self._ids(run.inputs) if self._ids else pass_ids(run)
        if len(ids) != number:
            raise ValueError(
                f"capture: got {len(ids)} ids for a batch of {number} examples; ids= gives one an example."
            )
        weight, tokens = self._normalization.weights(run.notes, run.inputs, number, run.owners)
        self._steps.micro += 1
        mark = run.notes.mark or self._steps.mark()
        return Examples(as_ids(ids), self._steps.step, self._steps.micro - 1, weight, tokens, mark)

    def _finish(self, runs: list[Pass], missed: list[str]) -> None:
        self.unreached.update(missed)
        if self._sums is not None:
            self._check(self._sums, runs)
        found = merged([run.delivered for run in runs if run.delivered is not None])
        written = self._written(runs) if found else set[int]()
        for x in found:
            x.examples, x.leaves = self._with_absent(x), kept(x.leaves, written)
        blocks = self._called(runs, found)
        self._first = False
        self._discards.remember(self._steps.parameters())
        for block, x in zip(blocks, found, strict=True):
            block = self._without_nonfinite(block, x.bad)
            late = x.directions is None and self.after_backward and len(block.examples)
            if late and self.transform is not None:
                block = replace(block, grads=block.grads.map(self.transform))
            self._writes.watch(block.grads)
            if x.directions is not None:
                self._moves.waiting.add(block, x.directions)
            elif len(block.examples):
                self._pending.append(block)
        self._moves.left_behind(self._steps.step, self.transform)
        if not self._steps.seen and len(self._pending) + len(self._discarded) > _PATIENCE:
            self._early += len(self._pending) + len(self._discarded)
            self._flush(None)

    def _written(self, runs: list[Pass]) -> set[int]:
        """Memory that training writes to before the blocks of a backward are handed on."""
        parameters = self._present.parameters.values()
        grads = [p.grad for p in parameters if p.is_leaf]
        given = [x for run in runs for x in run.given]
        return memory([*parameters, *grads, *self.model.buffers(), *given])

    def _with_absent(self, found: Delivered) -> Examples:
        """The examples of a backward; the direction of a parameter that it did not reach need not be zero."""
        if found.directions is not None:
            return found.examples
        reached = {parameter for name in found.bad for parameter in self._covers[name]}
        return replace(found.examples, absent=tuple(sorted(self._wanted - reached)))

    def _check(self, sums: GradientSums, runs: list[Pass]) -> None:
        try:
            sums.check([run.notes.fresh for run in runs], runs[0].notes.averaging)
        except RuntimeError:
            self._pending = []  # of earlier backwards of the step, which were checked with this one
            self._moves.waiting.clear()
            raise

    def _called(self, runs: list[Pass], found: list[Delivered]) -> list[Block]:
        """The blocks of a backward, as the callbacks have left their examples in `.grad`."""
        blocks = [Block(GradTree(x.leaves), x.examples) for x in found]
        changes: list[tuple[Sequence[Factors], Mapping[str, float]]] = []
        if self.after_backward and found:
            event = self._event(runs, blocks, lambda now, earlier: changes.append((now, earlier)))
            for callback in self.after_backward:
                callback(event)
            if self._sums is not None:
                self._sums.spoiled()
        if not (self.sinks or self.before_step or self.transform):  # nobody receives what they hold
            blocks = [Block(GradTree({} if x.directions is None else x.leaves), x.examples) for x in found]
        if len(changes) > 1:
            raise RuntimeError(
                "capture: two functions of after_backward= have changed the gradients of one backward, each as if it "
                "were the only one. Pass one, with a rule that decides for both."
            )
        for now, earlier in changes:
            if any(r != 1 for r in earlier.values()):
                self._pending = [rescaled(block, earlier) for block in self._pending]
                self._moves.waiting.rescale(earlier)
            for i, (x, factors) in enumerate(zip(found, now, strict=True)):
                blocks[i], used = reweighed(blocks[i], factors)
                rows = near(used.nonzero().flatten())
                x.bad = {name: flags[rows(flags.device)] for name, flags in x.bad.items()}
        return blocks

    def _event(self, runs: list[Pass], blocks: list[Block], weighed: Weighed) -> BackwardEvent:
        return BackwardEvent(
            self._steps.step,
            tuple(blocks),
            self.model,
            self,
            self._first,
            any(run.inputs.get("num_items_in_batch") is not None for run in runs),
            runs[0].notes.averaging,
            weighed,
        )

    def _without_nonfinite(self, block: Block, bad: Mapping[str, Tensor]) -> Block:
        kept, names, text = without_nonfinite(block, bad)
        if text and self._on_nonfinite == "raise":
            raise ValueError(f"{text}. Pass on_nonfinite='skip' to leave such examples out.")
        if text:
            warnings.warn(f"{text}; left out of the capture.", RuntimeWarning, stacklevel=2)
        self.skipped += [(name, f"non-finite gradient at step {block.examples.step}") for name in names]
        return kept

    # One step: its backwards, then the optimizers that use their gradients.

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._look()
        rates = self._steps.rates(optimizer)
        if not rates or overflows(optimizer):
            return
        if not self._steps.seen and self._steps.step > 0:
            warn_of_moves(self._steps.step)
        if self._steps.moves(rates):
            self._end_step()
            if not any(x is not None for x in (*args[1:], *kwargs.values())):  # no closure makes others first
                self._leftovers.look(self._steps.parameters())
        elif not self._tape.together:  # a process alone cannot tell that the others' pieces are zero as well
            self._thrown_away()
        trained = {n: p for n, p in self._present.parameters.items() if p.requires_grad}
        self._check_selection({n for n, p in trained.items() if p.grad is not None})
        self._doubts(rates)
        rate = next(iter(rates.values())) if len(set(rates.values())) == 1 else None
        waiting = [*self._pending, *self._moves.waiting.blocks]
        blocks = tuple(_with_rate(block, rate) for block in waiting)
        event = StepEvent(self._steps.step, blocks, rate, self.model, optimizer, self)
        for callback in self.before_step:
            callback(event)
        self._moves.before(self._steps.step, optimizer, self.transform)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        rates = self._steps.rates(optimizer)
        if not rates or overflows(optimizer):
            return
        self._moves.after(optimizer)
        self._discards.forget()
        if self._steps.moved(optimizer, rates):
            self._flush(self._steps.rate())

    def _end_step(self) -> None:
        self._flush(self._steps.rate())
        self._steps.advance()
        self._moves.begin()
        self._first, self._changed = True, False

    def _flush(self, rate: float | None) -> None:
        self._tell_once("writes", warn_of_writes, self._writes.found())
        ready, left = self._moves.flush(self._steps.step, self._discarded)
        self._pending += ready
        self._leave_unused(left)
        unused = 0.0 if self._steps.seen else None
        blocks = [_with_rate(b, unused) for b in self._discarded] + [
            _with_rate(b, rate) for b in self._pending
        ]
        self._pending, self._discarded = [], []
        for block in blocks if self.hands_out else ():
            self._handed += len(block.examples)
            for sink in self.sinks:
                sink(block)

    def _leave_unused(self, blocks: list[Block]) -> None:
        """Gradients that no optimizer used have no direction."""
        if blocks and not self._steps.seen:
            text = "capture: directions are those of an optimizer of torch, but none stepped: nothing is recorded."
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        self.skipped += [
            (i, f"no optimizer used its gradient at step {block.examples.step}")
            for block in blocks
            for i in block.examples.ids
        ]

    def _doubts(self, moved: Mapping[str, float | None]) -> None:
        """Whether the blocks of a step explain the gradients that an optimizer is about to use."""
        if not self._begun and any(p.grad is not None for p in self._steps.parameters().values()):
            refuse_uncaptured([x.path for x in self.selection.layers if x.path not in self._tape.seen])
        self._normalization.check_scale()
        if self._early:
            warn_of_early(self._early)
            self._early = 0
        leftovers = self._leftovers.of(moved)
        if leftovers or self._changed:
            self._moves.unexplained()
        self._tell_once("leftovers", warn_of_leftovers, leftovers)
        self._tell_once("changes", warn_of_changes, list(moved) if self._changed else [])
        own = set[str]() if self._sums is None else self._sums.hooked
        names = [] if in_backward() else [n for n in hooked(self._steps.parameters()) if n not in own]
        self._tell_once("hooks", warn_of_hooks, names)

    def _tell_once(self, what: str, warn: Callable[[int, Sequence[str]], None], names: Sequence[str]) -> None:
        if names and what not in self._told:
            self._told.add(what)
            warn(self._steps.step, names)

    def _check_selection(self, trained: set[str]) -> None:
        """A parameter that became trainable after the capture began would be missing."""
        new = trained - self._known
        if not new:
            return
        found = {c.parameter for c in self._reselect().coverage.captured} & new
        if found:
            raise RuntimeError(
                f"capture: parameters became trainable, or part of the model, after the capture began, e.g. "
                f"{sorted(found)[:3]}. Enter a new capture after such a change, or exclude their layers."
            )
        self._known |= new


@contextlib.contextmanager
def _closing(sinks: Sequence[Sink]) -> Iterator[contextlib.ExitStack]:
    """Close all sinks that can be, whatever one of them raises."""
    with contextlib.ExitStack() as stack:
        for sink in reversed(sinks):
            close = getattr(sink, "close", None)
            if callable(close):
                stack.callback(close)
        yield stack


def _with_rate(block: Block, rate: float | None) -> Block:
    return replace(block, examples=replace(block.examples, learning_rate=rate))


def capture(
    model: nn.Module,
    *,
    sinks: Sequence[Sink] = (),
    after_backward: Sequence[Callable[[BackwardEvent], object]] = (),
    before_step: Sequence[Callable[[StepEvent], object]] = (),
    transform: Transform | None = None,
    include: Selector | None = None,
    exclude: Selector | None = None,
    rules: Sequence[Rule] = RULES,
    recompute: Selector | None = None,
    loss: Declared | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ids: Ids | None = None,
    examples: Owners | None = None,
    strict: bool = False,
    on_nonfinite: Literal["skip", "raise"] = "skip",
    verify: bool = True,
    directions: Directions | None = None,
    trajectory: Recorder | None = None,
    tensor_parallel: Holds = "whole",
) -> Capture:
    """Capture per-example gradients of every backward through `model` inside the context.

    Args:
        model: The model being trained (not compiled; put the context around `torch.compile` instead).  In data parallel
            training, each process captures its own examples; names are those of the model inside the wrapper.
        sinks: Functions of a `Block`: a list's `append`, `attrax.store(path)`, your own.  Closed on exit if they can.
        after_backward: Functions of a `BackwardEvent`, called when a backward is over; they hold its whole gradients,
            which are transformed only then.
        before_step: Functions of a `StepEvent`, called right before each optimizer step; see `probe`.
        transform: ``(name, leaf) -> leaf``, run inside the backward hooks (e.g. `attrax.projected`).
        include: Only these layers: regular expression on the module path, type(s), or ``(name, module) -> bool``.
        exclude: Not these layers.
        rules: Layer rules.
        recompute: Modules to run once more in backward and differentiate as a whole (selected like `include`), where
            layers inside do not show what their parameters do: weights used past their layer, tables of positions.
        loss: How the loop's loss weighs examples: "sum", "token_mean", "example_mean", or a function
            ``(inputs, examples) -> (c, n)``.  Not needed where the model returns its own mean loss (Hugging Face).  If
            unknown, only the target "as_trained" can be scored.  A name that is contradicted by the cross entropy
            which the loop computes of the model's logits stops the first backward.  A loop that computes its loss
            outside of the model and divides it (gradient accumulation) passes the function, its scale in c, or what
            ``trainer_options(accelerator, loss=...)`` makes of a name.
        scaler: The `GradScaler` of a loop that computes its loss outside of the model: its scale is divided out.  A
            loop that has one and does not pass it is stopped at its first step.
        ids: ``inputs -> example ids`` from the model's inputs by name; content hashes by default.  Calls of the model
            in one backward whose ids agree, all of them in order, are of the same examples: one block, gradients added.
        examples: ``(inputs, rows) -> example of each row`` [rows] or of each position [rows, positions], -1 for none,
            where a row is not one example: `stacked` (preference pairs), `documents` (rows without padding).
        strict: Make uncovered trainable parameters an error.
        on_nonfinite: "skip" leaves examples with non-finite gradients out, with a warning; "raise" stops training.
        verify: On the first backward that reaches a parameter, check that captured gradients add up to its `.grad`; of
            sharded parameters, that their mean over processes does, for which all processes enter the capture.  Once,
            check that rows of layers are examples and keep apart (five forwards in eval mode without gradient; two of a
            sharded model).
        directions: Record each example's optimizer direction in place of its gradient; see `Directions`.  Gradients
            wait whole (in the form in which they are captured) until the optimizer steps; then, with the state before
            the step, they are built, turned and transformed, leaf by leaf.  Without a transform that makes them small
            (`attrax.projected`) that is the size of the model for every example of the step.
        trajectory: What to record of every optimizer step; see `record`.  Gradients are read once more after each
            backward, for their norm.
        tensor_parallel: What blocks hold of layers that are cut over processes (`parallelize_module`, Hugging Face's
            ``tp_plan``).  "whole": their gradients as on one process; factors are gathered in backward, and the first
            of the processes that share layers hands blocks to the sinks (callbacks run in all of them).  "shards":
            each process hands on what it holds, every entry once; `sum_scores` adds up products of these.

    What cannot be told: whether a loss that the loop computes outside of the model compares examples with each other
    (a contrastive loss over the batch).  Its rows are the exact share of each example's forward pass in `.grad`, but
    not gradients of losses of single examples, and weights that `loss` declares mean nothing.  `live` refuses them.
    Nor what hooks on parameters make of gradients, which are captured before these.  Blocks refer to what layers have
    computed until they are handed on: a loop may write to inputs, parameters, gradients and buffers of the model
    meanwhile, but not to hidden states that it has kept, nor to the gradient that it gave to ``backward``: a warning
    says so.

    Returns:
        The context manager.

    To learn where examples lie in layers, the model is run again without gradient and in eval mode: twice at a batch of
    the training or several, until all layers are known, and some modules without a rule in every backward.  Random
    generators (torch's, numpy's, Python's, and those that are attributes of modules), buffers and plain attributes of
    modules are put back after such a run.  What a forward pass changes elsewhere (fields of other objects, globals,
    files) is changed by these runs too.

    Raises:
        ValueError: If no layer is selected, a name is unknown, or BatchNorm is in training mode; if a store's run has
            gradients already and `steps_done` was not given, or is not that of `trajectory`.  Sinks are closed then.
        TypeError: If a function is none.
        RuntimeError: If the model is compiled.

    >>> net = nn.Linear(2, 1)
    >>> blocks = []
    >>> with capture(net, sinks=[blocks.append], loss="sum"):
    ...     net(torch.ones(3, 2)).sum().backward()
    >>> len(blocks[0].examples), list(blocks[0].grads)
    (3, ['weight'])
    """
    if on_nonfinite not in ("skip", "raise"):
        raise ValueError(f"capture: on_nonfinite: got {on_nonfinite!r}; expected 'skip' or 'raise'.")
    transforms = () if transform is None else (transform,)
    check_functions(
        trajectory, sinks=sinks, after_backward=after_backward, before_step=before_step, transform=transforms
    )
    with _closing(sinks) as failed:
        check_steps([x for x in sinks if isinstance(x, Files)], trajectory)
        model = model.module if isinstance(model, DistributedDataParallel) else model
        check_compiled(model)
        check_sharding(model)
        check_coupled(model)
        if tensor_parallel == "shards" and (
            directions is not None or any(isinstance(x, Files) for x in sinks)
        ):
            raise ValueError(
                "capture: tensor_parallel='shards': directions are those of whole gradients, and a store takes what "
                "two processes write of one example for repetitions. Use tensor_parallel='whole'."
            )

        def reselect() -> Selection:
            return select(
                model, include=include, exclude=exclude, rules=rules, recompute=recompute, strict=strict
            )

        made = Capture(
            model,
            sinks=sinks,
            after_backward=after_backward,
            before_step=before_step,
            transform=transform,
            reselect=reselect,
            loss=loss,
            scaler=scaler,
            ids=ids,
            owners=examples,
            on_nonfinite=on_nonfinite,
            verify=verify,
            strict=strict,
            directions=directions,
            trajectory=trajectory,
            holds=tensor_parallel,
        )
        failed.pop_all()
    return made
