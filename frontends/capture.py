"""Capture per-example gradients from a training loop that stays as it is.

    with attrax.capture(model, sinks=[attrax.store("grads/")]):
        trainer.train()

The end of a step is found by itself: every backward through the model makes one block, blocks wait for the optimizer
step that consumes them (its learning rate is recorded), and go to *sinks* (functions of a block).  *Callbacks* are
functions of a `StepEvent`, called before the optimizer moves the parameters.  Training is unchanged bit for bit, and
leaving the context leaves no trace on the model.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from attrax.core import (
    Block,
    Examples,
    GradTree,
    Leaf,
    Transform,
    aggregate,
    content_ids,
    fingerprint,
    stored,
    take,
)
from attrax.core.factorization import RULES, Rule
from attrax.core.leaves import dtype_of
from attrax.frontends.coverage import Coverage, Selection, Selector, select
from attrax.frontends.live import Live, nonfinite_examples
from attrax.frontends.losses import Loss, causal_lm
from attrax.frontends.normalization import (
    Declared,
    check_declared,
    declared_weights,
    detect,
    own_weights,
    tap_loss,
)
from attrax.frontends.tape import Pass, Tape
from attrax.frontends.verify import largest_entry, mismatch, raise_on

Sink = Callable[[Block], object]
_PATIENCE = 64


@dataclass(frozen=True, eq=False)
class StepEvent:
    """What a callback sees: the state of training right before the optimizer moves the parameters.

    Attributes:
        step: Number of optimizer steps taken so far.
        blocks: Blocks captured for this step.
        learning_rate: Learning rate of the step, None if parameter groups differ.
        model: The model.
        optimizer: The optimizer about to step.
        capture: The running capture (selection, transform, `paused()`).
    """

    step: int
    blocks: tuple[Block, ...]
    learning_rate: float | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    capture: "Capture"


class Capture:
    """A running capture; made by `capture`, used as a context manager.

    Attributes:
        coverage: Which parameters are captured, by which rule, and which are not and why.
        skipped: (example id, reason) of examples left out.
        unreached: Paths of layers whose call received no gradient in some backward.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sinks: Sequence[Sink],
        callbacks: Sequence[Callable[[StepEvent], object]],
        transform: Transform | None,
        selection: Selection,
        loss: Declared | None,
        ids: Callable[[Mapping[str, Any]], Sequence[str]] | None,
        on_nonfinite: Literal["skip", "raise"],
        verify: bool,
    ) -> None:
        self.model, self.selection, self.transform = model, selection, transform
        self.sinks, self.callbacks = tuple(sinks), tuple(callbacks)
        self.skipped: list[tuple[str, str]] = []
        self.unreached: set[str] = set()
        self._loss, self._ids, self._on_nonfinite, self._verify = loss, ids, on_nonfinite, verify
        self._wanted = {c.parameter for c in selection.coverage.captured}
        self._step, self._micro, self._stepped = 0, 0, False
        self._pending: list[Block] = []
        self._mark: str | None = None
        self._kind: str | None | Literal["unknown"] = "unknown"
        self._sums: dict[str, Tensor] | None = {} if verify else None
        self._stack = contextlib.ExitStack()
        self._tape = Tape(model, selection.layers, self._deliver, self._finish, self._open, self._close_pass)

    @property
    def coverage(self) -> Coverage:
        """Coverage of the selection."""
        return self.selection.coverage

    def __enter__(self) -> "Capture":
        self._stack.enter_context(self._tape.attached(self._wanted))
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before_step),
            (register_optimizer_step_post_hook, self._after_step),
        ):
            self._stack.callback(register(hook).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._flush(None)
        for sink in self.sinks:
            close = getattr(sink, "close", None)
            if callable(close):
                close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is captured inside: evaluation or probing within a step."""
        with self._tape.paused():
            yield

    # One backward: open -> deliver (leaf by leaf) -> finish.

    def _open(self, module: nn.Module, run: Pass) -> None:
        if self._sums is not None and not self._sums:
            fresh = [n for n, p in self.model.named_parameters() if p.grad is None or not bool(p.grad.any())]
            run.notes["fresh"] = set(fresh)

    def _close_pass(self, run: Pass, output: Any) -> Any:
        return tap_loss(output, run.notes) if run.rooted else output

    def _deliver(self, run: Pass, name: str, leaf: Leaf) -> None:
        if "leaves" not in run.notes:
            run.notes["examples"] = self._examples(run)
            run.notes["leaves"], run.notes["bad"] = {}, {}
        run.notes["bad"][name] = nonfinite_examples(leaf)
        if self._sums is not None:
            for parameter, total in stored(aggregate(GradTree({name: leaf}))).items():
                run.notes.setdefault("dtypes", {})[parameter] = dtype_of(leaf)
                self._sums[parameter] = self._sums.get(parameter, 0) + total[0]
        changed = leaf if self.transform is None else self.transform(name, leaf)
        if changed is not None:
            run.notes["leaves"][name] = changed

    def _examples(self, run: Pass) -> Examples:
        tensors = {k: v for k, v in run.inputs.items() if isinstance(v, Tensor) and v.ndim > 0}
        rows = run.rows or 0
        batched = {k: v for k, v in tensors.items() if v.shape[0] == rows}
        ids = self._ids(run.inputs) if self._ids else content_ids(batched, mask=tensors.get("attention_mask"))
        if len(ids) != rows:
            raise ValueError(f"capture: ids= returned {len(ids)} ids for a batch of {rows} examples.")
        if self._mark is None:
            self._mark = fingerprint(dict(self.model.named_parameters()) | dict(self.model.named_buffers()))
        if self._kind == "unknown":
            self._kind = detect(run.notes, run.inputs)
        run.notes.pop("logits", None)
        if "scale" in run.notes and self._kind is not None and self._loss is None:
            weight, tokens = own_weights(run.notes, run.inputs, self._kind)
        else:
            weight, tokens = declared_weights(self._loss, run.notes, run.inputs, rows)
        self._micro += 1
        return Examples(tuple(map(str, ids)), self._step, self._micro - 1, weight, tokens, self._mark)

    def _finish(self, runs: list[Pass], missed: list[str]) -> None:
        self.unreached.update(missed)
        if self._sums:
            self._check_sums(runs)
        for run in runs:
            if "leaves" not in run.notes:
                continue
            notes = {k: run.notes.pop(k) for k in ("leaves", "bad", "examples")}
            block = Block(GradTree(notes["leaves"]), notes["examples"])
            self._pending.append(self._without_nonfinite(block, notes["bad"]))
        if not self._stepped and len(self._pending) > _PATIENCE:
            self._flush(None)

    def _check_sums(self, runs: list[Pass]) -> None:
        """Once: the captured gradients of a backward must add up to what it put into `.grad`."""
        sums, self._sums = self._sums or {}, None
        fresh = set.intersection(*(run.notes.get("fresh", set()) for run in runs))
        errors: dict[str, str] = {}
        largest = largest_entry(p.grad for p in self.model.parameters())
        for n, p in self.model.named_parameters():
            if n not in self._wanted or n not in fresh or not p.requires_grad:
                continue
            found = sums.get(n)
            dtypes = [run.notes.get("dtypes", {}).get(n, p.dtype) for run in runs]
            if found is None:
                if p.grad is not None and bool(p.grad.any()):
                    errors[n] = "has a gradient but its layer was never captured"
                continue
            lowest = max(dtypes, key=lambda d: torch.finfo(d).eps)
            errors.update(mismatch(n, found, p.grad, largest=largest, dtype=lowest))
        raise_on(errors)

    def _without_nonfinite(self, block: Block, bad: Mapping[str, Tensor]) -> Block:
        flags = torch.stack(list(bad.values())).cpu()
        if not bool(flags.any()):
            return block
        examples = block.examples
        where = [name for name, row in zip(bad, flags, strict=True) if bool(row.any())]
        named = [examples.ids[i] for i in flags.any(0).nonzero().flatten().tolist()]
        text = f"capture: step {examples.step}: non-finite gradients of examples {named[:5]} in layers {where[:3]}"
        if self._on_nonfinite == "raise":
            raise ValueError(f"{text}. Pass on_nonfinite='skip' to leave such examples out.")
        warnings.warn(f"{text}; left out of the capture.", RuntimeWarning, stacklevel=2)
        self.skipped += [(name, f"non-finite gradient at step {examples.step}") for name in named]
        keep = ~flags.any(0)
        return Block(
            block.grads.map(lambda _, leaf: take(leaf, keep)),
            replace(
                examples,
                ids=tuple(i for i, k in zip(examples.ids, keep.tolist(), strict=True) if k),
                weight=None if examples.weight is None else examples.weight[keep],
                tokens=None if examples.tokens is None else examples.tokens[keep],
            ),
        )

    # One optimizer step.

    def _ours(self, optimizer: torch.optim.Optimizer) -> list[float]:
        mine = {id(p) for p in self.model.parameters()}
        return [float(g["lr"]) for g in optimizer.param_groups if any(id(p) in mine for p in g["params"])]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        rates = self._ours(optimizer)
        if not rates:
            return
        rate = rates[0] if len(set(rates)) == 1 else None
        self._stepped = True
        blocks = self._flush(rate)
        event = StepEvent(self._step, blocks, rate, self.model, optimizer, self)
        for callback in self.callbacks:
            callback(event)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._ours(optimizer):
            self._step, self._micro, self._mark = self._step + 1, 0, None

    def _flush(self, rate: float | None) -> tuple[Block, ...]:
        blocks = tuple(replace(b, examples=replace(b.examples, learning_rate=rate)) for b in self._pending)
        self._pending = []
        for block in blocks:
            for sink in self.sinks:
                sink(block)
        return blocks


def capture(
    model: nn.Module,
    *,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[Callable[[StepEvent], object]] = (),
    transform: Transform | None = None,
    include: Selector | None = None,
    exclude: Selector | None = None,
    rules: Sequence[Rule] = RULES,
    loss: Declared | None = None,
    ids: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
    strict: bool = False,
    on_nonfinite: Literal["skip", "raise"] = "skip",
    verify: bool = True,
) -> Capture:
    """Capture per-example gradients of every backward through `model` inside the context.

    Args:
        model: The model being trained (not compiled; put the context around `torch.compile` instead).
        sinks: Functions of a `Block`: a list's `append`, `attrax.store(path)`, your own.  Closed on exit if they can.
        callbacks: Functions of a `StepEvent`, called right before each optimizer step; see `probe`.
        transform: ``(name, leaf) -> leaf``, run inside the backward hooks (e.g. `attrax.projected`).
        include: Only these layers: regular expression on the module path, module type(s), or ``(name, module) -> bool``.
        exclude: Not these layers.
        rules: Layer rules.
        loss: How the loop's loss weighs examples: "sum", "token_mean", "example_mean", or a function
            ``(inputs, rows) -> (c, n)``.  Not needed where the model returns its own mean loss (Hugging Face).  If
            unknown, only the target "as_trained" can be scored.
        ids: ``inputs -> example ids`` from the model's inputs by name; content hashes by default.
        strict: Make uncovered trainable parameters an error.
        on_nonfinite: "skip" leaves examples with non-finite gradients out, with a warning; "raise" stops training.
        verify: On the first backward, check that captured gradients add up to `.grad`.

    Returns:
        The context manager.

    Raises:
        ValueError: If no layer is selected, a name is unknown, or BatchNorm is in training mode.
        RuntimeError: If the model is compiled.

    >>> net = nn.Linear(2, 1)
    >>> blocks = []
    >>> with capture(net, sinks=[blocks.append], loss="sum"):
    ...     net(torch.ones(3, 2)).sum().backward()
    >>> len(blocks[0].examples), list(blocks[0].grads)
    (3, ['weight'])
    """
    check_declared(loss)
    if on_nonfinite not in ("skip", "raise"):
        raise ValueError(f"capture: on_nonfinite: got {on_nonfinite!r}; expected 'skip' or 'raise'.")
    _check_compiled(model)
    _check_coupled(model)
    return Capture(
        model,
        sinks=sinks,
        callbacks=callbacks,
        transform=transform,
        selection=select(model, include=include, exclude=exclude, rules=rules, strict=strict),
        loss=loss,
        ids=ids,
        on_nonfinite=on_nonfinite,
        verify=verify,
    )


def _check_compiled(model: nn.Module) -> None:
    compiled = [n or "the model" for n, m in model.named_modules() if m._compiled_call_impl is not None]
    wrapped = [n or "the model" for n, m in model.named_modules() if hasattr(m, "_orig_mod")]
    if compiled or wrapped:
        raise RuntimeError(
            f"capture: {(compiled + wrapped)[0]} is already compiled, and hooks added now would never fire. Enter the "
            "capture before torch.compile, or capture the original module under "
            "torch.compiler.set_stance('force_eager')."
        )


def _check_coupled(model: nn.Module) -> None:
    coupled = [n for n, m in model.named_modules() if m.training and isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if coupled:
        raise ValueError(
            f"capture: '{coupled[0]}' is a BatchNorm in training mode: its examples depend on each other, so there is "
            "no per-example gradient. Put it in eval mode (frozen statistics)."
        )


def probe(
    data: Iterable[Mapping[str, Any]],
    sink: Sink,
    loss: Loss | None = None,
    *,
    when: Callable[[int], bool] = lambda step: True,
) -> Callable[[StepEvent], None]:
    """Callback that records query gradients during training, at the parameters of each step (what TracIn needs).

    Args:
        data: Batches of queries, re-iterable; as for `attrax.live`.
        sink: Where the query blocks go.
        loss: Query loss, ``(model, batch) -> [B]``; `causal_lm` by default.
        when: ``step -> bool``, which steps to record at; all of them by default.

    Returns:
        A callback for `capture`; queries pass through the capture's selection and transform, in eval mode.
    """
    checked: list[bool] = []

    def run(event: StepEvent) -> None:
        if not when(event.step):
            return
        source = Live(
            event.model,
            data,
            loss or causal_lm(),
            event.capture.selection,
            frozenset(c.parameter for c in event.capture.coverage.captured),
            verify=not checked,
        )
        checked.append(True)
        change = event.capture.transform or (lambda _, leaf: leaf)
        with event.capture.paused(), evaluating(event.model):
            for examples, leaves in source.map(lambda name, leaf, _: change(name, leaf)):
                tree = GradTree({n: leaf for n, leaf in leaves.items() if leaf is not None})
                sink(Block(tree, replace(examples, step=event.step, learning_rate=event.learning_rate)))

    return run


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the context, each module's own mode after it."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
