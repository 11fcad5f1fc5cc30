"""A live source: per-example gradients straight from a model and data, leaf by leaf inside the backward pass.

Parameters are frozen while a batch runs and restored bitwise afterwards, so no weight gradient is ever computed; hooks
exist only while a batch runs.  Transforms and reducers run inside the hooks: a layer is projected, scored or folded the
moment its gradient exists, and its factors are freed.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attrax.core import Examples, Leaf, covers, materialized
from attrax.core.factorization import RULES, Rule
from attrax.core.source import Visit
from attrax.frontends.model.coverage import Coverage, Selection, Selector, select
from attrax.frontends.model.distributed import in_step
from attrax.frontends.model.fingerprints import Fingerprints
from attrax.frontends.model.losses import Loss, causal_lm
from attrax.frontends.model.modes import check_mode, check_selection, check_sharding
from attrax.frontends.model.randomness import undrawn
from attrax.frontends.model.rows import Batch, for_loss, pick, with_ids
from attrax.frontends.model.sharding import is_flat, is_sharded, spared
from attrax.frontends.progress import tracked
from attrax.frontends.sources.apart import gradients_apart, run_apart, settle
from attrax.frontends.sources.nonfinite import nonfinite_examples
from attrax.frontends.tape.layout import Layout, packing, permuted, reordered
from attrax.frontends.tape.passes import Pass, flatten
from attrax.frontends.tape.placing import LayoutError
from attrax.frontends.tape.recompute import slow_attention
from attrax.frontends.tape.tape import Tape
from attrax.frontends.tape.tensor_parallel import Holds
from attrax.frontends.tape.tensor_parallel import tensor_parallel as cut_layers

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Live:
    """Per-example gradients of ``loss(model, batch)`` over `data`; made by `live`."""

    model: nn.Module
    data: Iterable[Batch]
    loss: Loss
    selection: Selection
    wanted: frozenset[str]
    on_nonfinite: Literal["raise", "skip"] = "raise"
    progress: str | None = None
    verify: bool = True
    strict: bool = False
    skipped: list[tuple[str, str]] = field(default_factory=list)
    verified: set[str] = field(default_factory=set)
    apart: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    holds: Holds = "whole"

    @property
    def coverage(self) -> Coverage:
        """Which parameters are captured, by which rule, and which are not and why."""
        rules = {name: f"autograd of each example ({why})" for name, why in self.apart.items()}
        coverage = self.selection.coverage
        return replace(
            coverage,
            captured=tuple(replace(c, rule=rules.get(c.parameter, c.rule)) for c in coverage.captured),
        )

    @property
    def tapped(self) -> frozenset[str]:
        """Parameters whose gradients come from the hooks."""
        return self.wanted.difference(self.apart)

    @property
    def reiterable(self) -> bool:
        """True unless `data` is a one-shot iterator."""
        return not isinstance(self.data, Iterator)

    def on(self, data: Iterable[Batch]) -> "Live":
        """The same source of other data; what was verified and learned about the layers holds for both."""
        return replace(self, data=data, skipped=[])

    def resample(self, seed: int) -> "Live":
        """The same inputs with labels drawn from the model (sampled Fisher).

        Raises:
            ValueError: If the loss does not say how to sample labels.
        """
        sampled = getattr(self.loss, "sampled", None)
        if not callable(sampled):
            raise ValueError(
                "live: this loss has no sampled(seed); use causal_lm() or classification(), give your loss that "
                "method, or fit with fisher='empirical'."
            )
        return replace(self, loss=sampled(seed))

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `attrax.core.source.Source.map`; `visit` runs inside the backward hooks."""
        check_mode(self.model)
        check_selection(self.model, self.coverage)
        marks = Fingerprints(self.model)
        if is_sharded(self.model):
            yield from self._in_step(visit, marks)
            return
        for batch in tracked(self.data, self.progress):
            kept = self._finite(with_ids(batch))
            if not kept["example_ids"]:
                continue
            mark = marks.now()
            if self.verify and mark not in self.verified and settle(self, kept):
                self.verified.add(mark)
            yield run_apart(self, kept, visit, mark) if self.verify else self.run(kept, visit, mark)

    def _in_step(self, visit: Visit[T], marks: Fingerprints) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """As `map`, together with the processes that hold the other pieces of the parameters."""
        for batch, mine in in_step(tracked(self.data, self.progress)):
            kept, mark = with_ids(batch), marks.now()
            if mine:
                yield self.run(kept, visit, mark)
            else:
                self.run(kept, lambda *_: None, mark)

    def run(
        self, batch: Batch, visit: Visit[T], mark: str, *, apart: bool = True
    ) -> tuple[Examples, dict[str, T]]:
        """Forward and backward of one batch; `visit` sees every leaf.

        Args:
            batch: The batch, with ids.
            visit: Function of each leaf.
            mark: Fingerprint of the parameters.
            apart: Whether to differentiate one example at a time what cannot be tapped.
        """
        B = len(batch["example_ids"])
        tokens = getattr(self.loss, "tokens", None)
        counts = tokens(batch).cpu() if tokens else None
        examples = Examples(
            tuple(batch["example_ids"]), 0, 0, torch.ones(B, dtype=torch.float64), counts, mark
        )
        values: dict[str, T] = {}
        bad: dict[str, Tensor] = {}
        reached: set[str] = set()

        def deliver(_: Pass | None, name: str, leaf: Leaf) -> None:
            reached.update(covers(leaf))
            bad[name] = nonfinite_examples(leaf)
            values[name] = visit(name, leaf, examples)

        if self.tapped:
            self._backward(batch, deliver, check=not apart)
        if self.apart and apart:
            for name, w in gradients_apart(self, batch, self.apart).items():
                deliver(None, name, materialized(name, w))
        _check_leaves(bad, examples)
        return replace(examples, absent=tuple(sorted(self.wanted - reached))), values

    def _backward(
        self, batch: Batch, deliver: Callable[[Pass | None, str, Leaf], None], *, check: bool
    ) -> None:
        B, segments = len(batch["example_ids"]), batch.get("segment_ids")
        rows = B if segments is None else len(segments)
        lost: list[LayoutError] = []
        tape = Tape(
            self.model,
            self.selection.layers,
            deliver,
            unplaced=lost.append,
            layouts=self.layouts,
            together=is_sharded(self.model),
            holds=self.holds,
        )

        def again(reorder: bool) -> Tensor:
            changed = pick(batch, reordered(B)) if segments is None else permuted(batch, rows)
            return self.loss(self.model, for_loss(changed if reorder else batch, self.loss))

        with running(self.model, tape, self.tapped):
            packed = None if segments is None else packing(segments, B)
            with tape.spanning(rows, flatten(batch), again, packed):
                losses = self.loss(self.model, for_loss(batch, self.loss))
            if check and B > 1 and segments is None:
                tape.check_rows()
            if lost:
                raise LayoutError(set().union(*(e.parameters for e in lost)), str(lost[0])) from lost[0]
            _check_losses(losses, B, tape.seen)
            tape.differentiate(losses.sum(), everything=is_flat(self.model))

    def _finite(self, batch: Batch) -> Batch:
        """The batch, without examples whose loss is not finite if these are to be skipped."""
        if self.on_nonfinite == "raise":
            return batch
        with undrawn(self.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            keep = torch.isfinite(self.loss(self.model, for_loss(batch, self.loss))).cpu()
        for name, fine in zip(batch["example_ids"], keep.tolist(), strict=True):
            if not fine:
                self.skipped.append((name, "non-finite loss"))
        return batch if bool(keep.all()) else pick(batch, keep)


def live(
    model: nn.Module,
    data: Iterable[Batch],
    loss: Loss | None = None,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    rules: Sequence[Rule] = RULES,
    recompute: Selector | None = None,
    strict: bool = False,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    progress: str | None = None,
    verify: bool = True,
    tensor_parallel: Holds = "whole",
) -> Live:
    """Per-example gradients of a model at its present parameters.

    Args:
        model: The model, in eval mode (dropout and batch statistics make per-example gradients undefined).  It is
            left as it was: parameters, `.grad`, `requires_grad`, hooks, random state, train/eval mode.
        data: Batches, a re-iterable of mappings passed to `loss`.  Tensors (and lists) whose first axis is the batch;
            ``example_ids`` may hold their ids (strings), else ids are content hashes.
        loss: ``(model, batch) -> [B]`` summed loss per example; `causal_lm` by default.  One with a method
            ``sampled(seed)``, for labels drawn from the model, finds ids under ``example_ids`` in every batch.
        include: Only these layers: regular expression on the module path, type(s), or ``(name, module) -> bool``.
        exclude: Not these layers.
        rules: Layer rules.
        recompute: Modules to run once more in backward and differentiate as a whole (selected like `include`), where
            layers inside do not show what their parameters do: weights used past their layer, tables of positions.
        strict: Make uncovered trainable parameters an error; otherwise they are listed in `coverage`.
        on_nonfinite: "raise" names the examples; "skip" leaves them out and lists them in `skipped` (one more
            forward pass a batch).
        progress: Label of a progress bar, or None for no bar.
        verify: Before anything else, compare captured gradients of the first batch with autograd: those of one example,
            alone and beside another, and the sum of up to sixteen.
            Parameters that a layer rule gets wrong (a weight used outside its layer) or cannot place (no example axis)
            are then differentiated one example at a time, with a warning; an error if `strict`.
        tensor_parallel: What leaves hold of layers that are cut over processes; see `capture`.  All of the processes
            that share them run the same batches and get the same whole leaves (pass ``ranks=`` of processes with
            different examples to methods, or none), or each its shards.

    A model whose parameters are spread over processes (FSDP1, FSDP2) runs in all of them together, each on its own
    data; gradients are not compared with autograd there.  FSDP1 allows no freezing: weight gradients are computed and
    discarded, with a warning.

    Returns:
        The source.

    Raises:
        ValueError: If no layer is selected, or an option is not possible with a sharded model.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    >>> from attrax.frontends.model.losses import classification
    >>> data = [{"x": torch.ones(2, 2), "y": torch.tensor([0, 1])}]
    >>> [list(leaves) for _, leaves in live(net, data, classification()).map(lambda name, leaf, examples: None)]
    [['2.weight', '0.weight']]
    """
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f"live: on_nonfinite: got {on_nonfinite!r}; expected 'raise' or 'skip'.")
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    check_sharding(model)
    selection = select(
        model, include=include, exclude=exclude, rules=rules, recompute=recompute, strict=strict
    )
    wanted = frozenset(c.parameter for c in selection.coverage.captured)
    cut_layers(model, selection.layers, tensor_parallel, "live")
    found = Live(
        model,
        data,
        loss or causal_lm(),
        selection,
        wanted,
        on_nonfinite,
        progress,
        verify,
        strict,
        holds=tensor_parallel,
    )
    whole = [layer for layer in selection.layers if layer.rule is None and not layer.path]
    found.apart.update({n: "a parameter of the model itself" for x in whole for n in x.names.values()})
    return _sharded(found) if is_sharded(model) else found


def _sharded(source: Live) -> Live:
    """A source whose passes all processes can make together."""
    if source.on_nonfinite == "skip" or source.apart:
        what = (
            "on_nonfinite='skip'"
            if source.on_nonfinite == "skip"
            else f"parameters {sorted(source.apart)[:3]}"
        )
        raise ValueError(
            f"live: {what} would make this process run the model without the others that hold pieces of it. Exclude "
            "such parameters (exclude=) and use on_nonfinite='raise', or do not shard the model (DDP)."
        )
    if is_flat(source.model):
        warnings.warn(
            "live: the parameters of FullyShardedDataParallel cannot be frozen, so weight gradients are computed and "
            "discarded. fully_shard (FSDP2) needs none.",
            RuntimeWarning,
            stacklevel=3,
        )
    return replace(source, verify=False)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Parameters without `requires_grad` inside the context, as they were after it; FSDP1's only get back `.grad`."""
    trainable = [] if is_flat(model) else [p for p in model.parameters() if p.requires_grad]
    with spared(model) if is_sharded(model) else contextlib.nullcontext():
        try:
            for p in trainable:
                p.requires_grad_(False)
            yield
        finally:
            for p in trainable:
                p.requires_grad_(True)


@contextlib.contextmanager
def running(model: nn.Module, tape: Tape, wanted: frozenset[str]) -> Iterator[None]:
    """A frozen, hooked model with gradients enabled and the random state set aside."""
    with (
        undrawn(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        frozen(model),
        slow_attention(),
        tape.attached(set(wanted)),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*requires_grad=True.*checkpoint.*")
        yield


def _check_losses(losses: Tensor, rows: int, seen: set[str]) -> None:
    """Refuse anything but one loss per example that depends on a selected layer."""
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"live: the loss returned {got} for {rows} examples; expected one summed loss per example, [B]."
        )
    if not losses.requires_grad:
        called = (
            "none of them was called" if not seen else f"{len(seen)} of them were called without gradient"
        )
        raise ValueError(
            f"live: the loss does not depend on any selected layer ({called}). Does it run the model under no_grad or "
            "detach its output? Under reentrant checkpointing, include the layer before the first block as well."
        )


def _check_leaves(bad: Mapping[str, Tensor], examples: Examples) -> None:
    """One host sync a batch: name the examples and layers with non-finite gradients."""
    if not bad:
        raise ValueError(
            "live: no selected layer received a gradient. Does the loss depend on the selected layers?"
        )
    flags = torch.stack(list(bad.values()))
    if not bool(flags.any()):
        return
    names = [examples.ids[i] for i in flags.any(0).nonzero().flatten().tolist()]
    layers = [name for name, row in zip(bad, flags, strict=True) if bool(row.any())]
    raise ValueError(
        f"live: non-finite gradients of examples {names[:5]} in layers {layers[:3]}. "
        "Remove these examples, or pass on_nonfinite='skip' to leave out examples with a non-finite loss."
    )
