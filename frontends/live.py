"""A live source: per-example gradients straight from a model and data, leaf by leaf inside the backward pass.

Parameters are frozen while a batch runs and restored bitwise afterwards, so no weight gradient is ever computed; hooks
exist only while a batch runs.  Transforms and reducers run inside the hooks: a layer is projected, scored or folded the
moment its gradient exists, and its factors are freed.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from attrax.core import Examples, Leaf, Materialized, content_ids, fingerprint
from attrax.core.algebra import wide
from attrax.core.factorization import RULES, Rule
from attrax.core.source import Visit
from attrax.frontends.coverage import Coverage, Selection, Selector, select
from attrax.frontends.losses import Loss, causal_lm
from attrax.frontends.progress import tracked
from attrax.frontends.tape import Pass, Tape
from attrax.frontends.verify import verify_gradients

T = TypeVar("T")
Batch = Mapping[str, Any]


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
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def coverage(self) -> Coverage:
        """Which parameters are captured, by which rule, and which are not and why."""
        return self.selection.coverage

    @property
    def reiterable(self) -> bool:
        """True unless `data` is a one-shot iterator."""
        return not isinstance(self.data, Iterator)

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
        return replace(self, loss=sampled(seed), verify=False)

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `attrax.core.source.Source.map`; `visit` runs inside the backward hooks."""
        check_mode(self.model)
        mark = fingerprint(dict(self.model.named_parameters()) | dict(self.model.named_buffers()))
        pending = self.verify
        for batch in tracked(self.data, self.progress):
            kept = self._finite(with_ids(batch))
            if kept is None or not kept["example_ids"]:
                continue
            if pending:
                verify_gradients(self, first_example(kept))
                pending = False
            yield self.run(kept, visit, mark)

    def run(self, batch: Batch, visit: Visit[T], mark: str) -> tuple[Examples, dict[str, T]]:
        """Forward and backward of one batch; `visit` sees every leaf."""
        tokens = getattr(self.loss, "tokens", None)
        weight = torch.ones(len(batch["example_ids"]), dtype=torch.float64)
        examples = Examples(tuple(batch["example_ids"]), 0, 0, weight, tokens(batch).cpu() if tokens else None, mark)
        values: dict[str, T] = {}
        bad: dict[str, Tensor] = {}

        def deliver(_: Pass, name: str, leaf: Leaf) -> None:
            bad[name] = nonfinite_examples(leaf)
            values[name] = visit(name, leaf, examples)

        tape = Tape(self.model, self.selection.layers, deliver, lambda runs, missed: None)
        with running(self.model, tape, self.wanted):
            losses = self.loss(self.model, batch)
            if losses.shape != (len(batch["example_ids"]),):
                raise ValueError(
                    f"live: the loss returned shape {tuple(losses.shape)} for {len(batch['ids'])} examples; expected "
                    "one summed loss per example, [B]."
                )
            losses.sum().backward()
        _check_leaves(bad, examples, values)
        return examples, values

    def _finite(self, batch: Batch) -> Batch | None:
        """The batch without examples whose loss is not finite, or an error that names them."""
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            losses = self.loss(self.model, batch) if self.on_nonfinite == "skip" else None
        if losses is None or bool(torch.isfinite(losses).all()):
            return batch
        keep = torch.isfinite(losses).cpu()
        for name, fine in zip(batch["example_ids"], keep.tolist(), strict=True):
            if not fine:
                self.skipped.append((name, "non-finite loss"))
        return pick(batch, keep)


def live(
    model: nn.Module,
    data: Iterable[Batch],
    loss: Loss | None = None,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    rules: Sequence[Rule] = RULES,
    strict: bool = False,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    progress: str | None = None,
    verify: bool = True,
) -> Live:
    """Per-example gradients of a model at its present parameters.

    Args:
        model: The model, in eval mode (dropout and batch statistics make per-example gradients undefined).  It is
            left as it was: parameters, `.grad`, `requires_grad`, hooks, random state, train/eval mode.
        data: Batches, a re-iterable of mappings passed to `loss`.  Tensors whose first axis is the batch; ``example_ids``
            may hold their ids (strings), else ids are content hashes.
        loss: ``(model, batch) -> [B]`` summed loss per example; `causal_lm` by default.
        include: Only these layers: regular expression on the module path, module type(s), or ``(name, module) -> bool``.
        exclude: Not these layers.
        rules: Layer rules.
        strict: Make uncovered trainable parameters an error; otherwise they are listed in `coverage`.
        on_nonfinite: "raise" names the examples; "skip" leaves them out and lists them in `skipped` (one more
            forward pass a batch).
        progress: Label of a progress bar, or None for no bar.
        verify: Compare the first example's captured gradients with autograd before anything else, once a pass.

    Returns:
        The source.

    Raises:
        ValueError: If no layer is selected.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    >>> from attrax.frontends.losses import classification
    >>> data = [{"x": torch.ones(2, 2), "y": torch.tensor([0, 1])}]
    >>> [list(leaves) for _, leaves in live(net, data, classification()).map(lambda name, leaf, examples: None)]
    [['2.weight', '0.weight']]
    """
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f"live: on_nonfinite: got {on_nonfinite!r}; expected 'raise' or 'skip'.")
    model = getattr(model, "_orig_mod", model)
    selection = select(model, include=include, exclude=exclude, rules=rules, strict=strict)
    wanted = frozenset(c.parameter for c in selection.coverage.captured)
    return Live(model, data, loss or causal_lm(), selection, wanted, on_nonfinite, progress, verify)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Parameters without `requires_grad` inside the context, as they were after it."""
    trainable = [p for p in model.parameters() if p.requires_grad]
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
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with (
        torch.random.fork_rng(devices=devices),
        torch.enable_grad(),
        frozen(model),
        tape.attached(set(wanted)),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*requires_grad=True.*checkpoint.*")
        yield


def check_mode(model: nn.Module) -> None:
    """Refuse modules in training mode whose examples depend on each other or on chance.

    Raises:
        ValueError: Naming the modules.
    """
    coupled = nn.modules.batchnorm._BatchNorm
    dropouts = nn.modules.dropout._DropoutNd
    found = [
        f"'{n}' ({type(m).__name__})"
        for n, m in model.named_modules()
        if m.training and (isinstance(m, coupled) or (isinstance(m, dropouts) and m.p > 0))
    ]
    if found:
        raise ValueError(
            f"live: {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''} in training mode: batch "
            "statistics or dropout make per-example gradients undefined. Call model.eval() first."
        )


def with_ids(batch: Batch) -> Batch:
    """The batch with example ids: its own, or content hashes without padding.

    Raises:
        ValueError: If the batch has no tensor, or ids and rows disagree.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim > 0}
    if not tensors:
        raise ValueError(f"live: a batch holds no tensor with a batch axis; it has {sorted(batch)}.")
    rows = next(iter(tensors.values())).shape[0]
    mask = tensors.get("attention_mask")
    ids = tuple(map(str, batch["example_ids"])) if "example_ids" in batch else content_ids(tensors, mask=mask)
    if len(ids) != rows:
        raise ValueError(f"live: a batch has {len(ids)} ids for {rows} rows.")
    return {**batch, "example_ids": ids}


def pick(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch: every tensor with the batch axis, and the ids."""
    B = len(batch["example_ids"])
    index = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
    out: dict[str, Any] = {}
    for k, v in batch.items():
        out[k] = v[index.to(v.device)] if isinstance(v, Tensor) and v.ndim and v.shape[0] == B else v
    return out | {"example_ids": tuple(batch["example_ids"][i] for i in index.tolist())}


def first_example(batch: Batch) -> Batch:
    """The first row of a batch."""
    return pick(batch, torch.tensor([0]))


def nonfinite_examples(leaf: Leaf) -> Tensor:
    """Boolean [B]: examples whose gradient in this leaf is not finite.

    A sum is finite only if all its terms are; it costs one read of `g` where an elementwise test costs three passes.
    """
    uses = getattr(leaf, "uses", (leaf,))
    gradients = [u.w if isinstance(u, Materialized) else u.g for u in uses]
    sums = [g.flatten(1).sum(1, dtype=wide(g.dtype)) for g in gradients]
    return ~torch.isfinite(torch.stack(sums)).all(0)


def _check_leaves(bad: Mapping[str, Tensor], examples: Examples, values: Mapping[str, object]) -> None:
    """One host sync a batch: name the examples and layers with non-finite gradients."""
    if not bad:
        raise ValueError("live: no layer received a gradient. Does the loss depend on the selected layers?")
    flags = torch.stack(list(bad.values()))
    if not bool(flags.any()):
        return
    names = [examples.ids[i] for i in flags.any(0).nonzero().flatten().tolist()]
    layers = [name for name, row in zip(bad, flags, strict=True) if bool(row.any())]
    raise ValueError(
        f"live: non-finite gradients of examples {names[:5]} in layers {layers[:3]}. "
        "Remove these examples, or pass on_nonfinite='skip' to leave out examples with a non-finite loss."
    )


