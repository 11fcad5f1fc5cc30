"""Online selection: every step of a training loop leaves out the examples that do not serve a target.

    keep = attrax.select(target, attrax.drop_fraction(0.5), sink=decisions.append)
    with attrax.capture(model, after_backward=[keep]):
        trainer.train()

When a backward is over, each example's gradient is scored against the gradient of the target at the same parameters, a
rule (`attrax.methods.selection`) says which examples stay, and the others are taken out of `.grad` before anything uses
it: clipping, unscaling and the optimizer see the gradient of the kept examples (see `attrax.frontends.loop.removal`).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Block,
    Factorized,
    Hardware,
    Leaf,
    Scores,
    compact,
    concat_rows,
    gram_leaf,
    materialize_leaf,
    scale_examples,
    take,
    unstack,
)
from attrax.core.algebra import wide
from attrax.core.directions import touched
from attrax.core.leaves import batch_size, dtype_of
from attrax.core.products import plan_leaf
from attrax.core.scores import SIGN
from attrax.frontends.loop.events import BackwardEvent
from attrax.frontends.loop.probe import evaluating
from attrax.frontends.loop.removal import (
    change,
    check_reduction,
    factor,
    groups,
    is_pending,
    summed,
    weighted,
)
from attrax.frontends.model.losses import Loss, causal_lm
from attrax.frontends.model.rows import with_ids
from attrax.frontends.model.sharding import is_sharded, named, unreduced
from attrax.frontends.sources.apart import run_apart, settle
from attrax.frontends.sources.live import Live

Rule: TypeAlias = Callable[[Tensor, Callable[[], Tensor]], Tensor]
Leaves: TypeAlias = dict[str, Leaf]
Window: TypeAlias = dict[str, tuple[float, float, float]]
SCOPES, DENOMINATORS = ("global", "layer"), ("fixed", "examples", "tokens")


@dataclass(frozen=True)
class Decision:
    """Which examples of a batch a layer kept (layer "": all layers).

    Attributes:
        step: Optimizer step.
        micro: Block within the step.
        layer: Module path of the layer.
        ids: Example ids.
        scores: Their scores, as trained: with the loss weights of the batch (and the scale of a `GradScaler`).
        keep: Whether each was kept.
    """

    step: int
    micro: int
    layer: str
    ids: tuple[str, ...]
    scores: tuple[float, ...]
    keep: tuple[bool, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Ids of the kept examples."""
        return tuple(i for i, k in zip(self.ids, self.keep, strict=True) if k)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Ids of the dropped examples."""
        return tuple(i for i, k in zip(self.ids, self.keep, strict=True) if not k)


def select(
    target: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    rule: Rule,
    *,
    loss: Loss | None = None,
    scope: Literal["global", "layer"] = "global",
    denominator: Literal["fixed", "examples", "tokens"] = "fixed",
    sink: Callable[[Decision], object] = lambda decision: None,
    hardware: Hardware = CPU,
) -> Callable[[BackwardEvent], None]:
    """Callback for ``capture(model, after_backward=[...])`` that trains on the examples a rule keeps.

    Each forward pass of a backward is a batch of its own.  In data parallel training each process applies the rule to
    its own batch (W processes drop half of theirs), all must take part in every backward, and give the same target.
    Parameters without per-example gradients are trained on all examples, with a warning.

    The capture's blocks hold what the optimizer uses: an example that was dropped is not in them (in some layers: its
    gradient is zero there), and gradients and loss weights of the others are renormalized as the loss is.  Where layers
    decided apart, loss weights are unknown, and methods that need them refuse.  *sink* says which were dropped.

    Args:
        target: A batch (as for `attrax.live`), or a re-iterable of batches: one for each step, again and again.
        rule: ``(scores [B], interactions) -> keep [B]``; see `attrax.methods.selection`.
        loss: Target loss, ``(model, batch) -> [B]``; `causal_lm` by default.  The target's gradient is that of its mean
            over loss terms (over examples where the loss does not count them).
        scope: "global": one decision for all layers, on scores summed over them; "layer": each layer its own.
        denominator: What the loss divides by.  "fixed": it stays (kept gradients as they were); "examples" or "tokens":
            the batch's examples or loss terms, of which only the kept ones count, on all processes together.  A mean
            over a whole accumulation window (Hugging Face's `num_items_in_batch`) is recognized with "tokens".
        sink: Receives a `Decision` for every batch (and layer).
        hardware: Roofline figures and memory budget.

    Returns:
        The callback.

    Raises:
        ValueError: If an option is unknown.

    >>> net, batch = torch.nn.Linear(2, 1, bias=False), {"x": torch.ones(1, 2)}
    >>> decisions = []
    >>> half = lambda scores, interactions: scores >= scores.median()
    >>> keep = select(batch, half, loss=lambda model, b: model(b["x"])[:, 0], sink=decisions.append)
    >>> from attrax.frontends import capture
    >>> with capture(net, after_backward=[keep], loss="sum", ids=lambda inputs: ["a", "b", "c"]):
    ...     net(torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])).sum().backward()
    >>> decisions[0].dropped, net.weight.grad
    (('a',), tensor([[5., 5.]]))
    """
    if not callable(rule):
        raise ValueError(
            f"select: rule: got {rule!r}; expected a function, such as attrax.drop_fraction(0.5)."
        )
    if scope not in SCOPES:
        raise ValueError(f"select: scope: got {scope!r}; expected one of {list(SCOPES)}.")
    if denominator not in DENOMINATORS:
        raise ValueError(f"select: denominator: got {denominator!r}; expected one of {list(DENOMINATORS)}.")
    layer_of = _module if scope == "layer" else lambda _: ""
    target_gradient = _following(target, loss or causal_lm())
    window: Window = {}
    looked: dict[str, Tensor] = {}
    warned = False

    def run(event: BackwardEvent) -> None:
        nonlocal warned
        if not isinstance(event, BackwardEvent):
            raise TypeError(
                f"select: got a {type(event).__name__}; it is a function of backwards. Pass it to "
                "capture(after_backward=[...])."
            )
        check_reduction(event.model)
        warned = warned or _warn_of_gaps(event)
        if event.first:
            window.clear()
            looked.clear()
        captured = {c.parameter for c in event.capture.coverage.captured}
        parameters = {n: p for n, p in named(event.model).items() if n in captured}
        layers = sorted({layer_of(n) for n in captured})
        query = target_gradient(event)
        with torch.no_grad():
            batches = [_ready(_parts(block), query, hardware) for block in event.blocks]
            kept = [
                _decide(block, leaves, query, rule, layer_of, sink)
                for block, leaves in zip(event.blocks, batches, strict=True)
            ]
            phi, r = _factors(event, kept, denominator, layers, groups(event, parameters), window)
            added: dict[str, Tensor] = {}
            shares: list[dict[str, Tensor]] = []
            for i, leaves in enumerate(batches):
                own = {n: phi[layer_of(n)][i] * kept[i][layer_of(n)].to(torch.float64) for n in leaves}
                shares.append(own)
                for name, leaf in leaves.items():
                    for parameter, total in weighted(leaf, own[name] - r[layer_of(name)]).items():
                        added[parameter] = added[parameter] + total if parameter in added else total
            earlier = {n: r[layer_of(n)] for n in parameters}
            gone = _gone(event, parameters, batches, shares, looked)
            change(event, parameters, added, earlier, gone)
            event.weighed(shares, earlier)

    return run


def selections(decisions: Sequence[Decision]) -> Scores:
    """Decisions as a table of scores, for `to_pandas` and `write_scores`.

    Returns:
        A row for each example and block; columns "score" and "kept" (1 or 0), for each layer where layers decided.

    Raises:
        ValueError: If there are no decisions, or layers decided in some blocks only.

    >>> made = selections([Decision(3, 0, "", ("a", "b"), (1.5, -2.0), (True, False))])
    >>> made.query_ids, made.values, made.steps
    (('score', 'kept'), tensor([[ 1.5000,  1.0000],
            [-2.0000,  0.0000]]), (3, 3))
    """
    blocks: dict[tuple[int, int], dict[str, Decision]] = {}
    for d in decisions:
        blocks.setdefault((d.step, d.micro), {})[d.layer] = d
    layers = sorted({d.layer for d in decisions})
    if not layers or any(len(block) != len(layers) for block in blocks.values()):
        raise ValueError(
            f"selections: {len(decisions)} decisions over the layers {layers[:3]} do not fill a table."
        )
    ids, steps, micros, rows = [], [], [], []
    for (step, micro), block in blocks.items():
        first = block[layers[0]]
        ids += first.ids
        steps += [step] * len(first.ids)
        micros += [micro] * len(first.ids)
        columns = [column for layer in layers for column in (block[layer].scores, block[layer].keep)]
        rows += [[float(x) for x in row] for row in zip(*columns, strict=True)]
    names = [f"{what}:{layer}" if layer else what for layer in layers for what in ("score", "kept")]
    about = {"method": "online selection", "target": "as_trained", "unit": "loss", "sign": SIGN}
    return Scores(torch.tensor(rows), tuple(ids), tuple(names), tuple(steps), tuple(micros), about)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _warn_of_gaps(event: BackwardEvent) -> bool:
    """Name the parameters that keep all examples; whether that was done."""
    trained = {n for n, p in named(event.model).items() if p.grad is not None} | unreduced(event.model).keys()
    names = [g.parameter for g in event.capture.coverage.gaps if g.parameter in trained]
    if names:
        warnings.warn(
            f"select: {len(names)} parameters have no per-example gradients and are trained on all examples: "
            f"{names[:5]}{' …' if len(names) > 5 else ''}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return True


# The target: the gradient of one batch, summed over its examples, wherever the parameters are now.


def _following(
    target: Mapping[str, Any] | Iterable[Mapping[str, Any]], loss: Loss
) -> Callable[[BackwardEvent], Leaves]:
    """The target's gradient at the parameters of an event, by parameter; computed when these have moved."""
    batches: Any = [target] if isinstance(target, Mapping) else target
    coming = _cycled(batches)
    source: Live | None = None
    checked = False
    known: tuple[str, Leaves] | None = None

    def gradient(event: BackwardEvent) -> Leaves:
        nonlocal source, checked, known
        mark = event.blocks[0].examples.fingerprint
        if known is not None and known[0] == mark:
            return known[1]
        selection = event.capture.selection
        if source is None or source.model is not event.model or source.selection is not selection:
            wanted = frozenset(c.parameter for c in selection.coverage.captured)
            source, checked = Live(event.model, (), loss, selection, wanted), False
        batch, found = with_ids(next(coming)), dict[str, Leaf]()
        if not len(batch["example_ids"]):
            raise ValueError("select: a batch of the target has no rows. Leave such batches out.")
        with event.capture.paused(), evaluating(event.model):
            checked = checked or is_sharded(event.model) or settle(source, batch)
            visit = lambda _, leaf, examples: found.update(_mean(leaf, examples.tokens))  # noqa: E731
            run_apart(source, batch, visit, mark)
        known = (mark, found)
        return found

    return gradient


def _cycled(batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "select: the target yields no batch (any more). Pass a batch or a re-iterable of batches."
            )


def _mean(leaf: Leaf, tokens: Tensor | None) -> Leaves:
    """The mean gradient as one example, its rows kept factored where that is smaller; by parameter."""
    count = batch_size(leaf) if tokens is None else max(1, int(tokens.sum()))
    scaled = scale_examples(leaf, torch.full((batch_size(leaf),), 1 / count, dtype=torch.float64))
    one = concat_rows([take(scaled, slice(i, i + 1)) for i in range(batch_size(leaf))])
    return {name: compact(part) for name, part in _apart(one).items()}


def _apart(leaf: Leaf) -> Leaves:
    """Stacked layers one by one: a training pass may stack others than the target's (dropout between them)."""
    return dict(unstack(leaf)) if isinstance(leaf, Factorized) else {leaf.parts[0].weight: leaf}


def _parts(block: Block) -> Leaves:
    return {name: part for leaf in block.grads.values() for name, part in _apart(leaf).items()}


# One batch: scores, the decision, and how many loss terms it leaves.


def _ready(leaves: Leaves, query: Leaves, hardware: Hardware) -> Leaves:
    """Leaves whose examples are scored and removed at less cost once their gradients are built, built."""
    spent, out = 0, dict[str, Leaf]()
    for name, leaf in leaves.items():
        out[name] = leaf
        if not isinstance(leaf, Factorized) or name not in query:
            continue
        B, rows, No = leaf.g.shape
        entries = B * No * (leaf.a.shape[-1] + leaf.bias)
        build, size = 2.0 * rows * entries, entries * wide(dtype_of(leaf)).itemsize
        scoring = sum(plan.flops for plan in plan_leaf(name, leaf, query[name], hardware=hardware))
        if scoring + build / 2 > build and spent + size <= hardware.memory:
            out[name], spent = materialize_leaf(leaf, hardware=hardware), spent + size
    return out


def _gone(
    event: BackwardEvent,
    parameters: Mapping[str, Tensor],
    batches: Sequence[Leaves],
    shares: Sequence[Mapping[str, Tensor]],
    looked: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Rows [V] of sparse gradients that dropped examples alone look up; `looked` has those of the step's kept ones.

    A layer whose leaf does not tell the rows (see `attrax.core.directions.touched`) loses none.
    """
    found: dict[str, Tensor] = {}
    over = [] if is_pending(event) else groups(event, parameters)
    for name, p in parameters.items():
        if p.grad is None or not p.grad.is_sparse:
            continue
        dropped = torch.zeros(p.shape[0], dtype=torch.bool, device=p.device)
        kept = looked.setdefault(name, dropped.clone())
        for leaves, share in zip(batches, shares, strict=True):
            rows = touched(leaves[name]) if name in leaves else None
            if rows is not None:
                used = share[name].to(rows.device) != 0
                kept |= rows[used].any(0)
                dropped |= rows[~used].any(0)
        dropped, stay = (summed(rows.long(), over) > 0 for rows in (dropped, kept))
        found[name] = dropped & ~stay
    return found


def _decide(
    block: Block,
    leaves: Leaves,
    query: Leaves,
    rule: Rule,
    layer_of: Callable[[str], str],
    sink: Callable[[Decision], object],
) -> dict[str, Tensor]:
    """Which examples each layer keeps [B]."""
    members: dict[str, Leaves] = {}
    for name, leaf in leaves.items():
        members.setdefault(layer_of(name), {})[name] = leaf
    kept: dict[str, Tensor] = {}
    e = block.examples
    for layer, own in members.items():
        met = [gram_leaf(leaf, query[n], name=n)[:, 0] for n, leaf in own.items() if n in query]
        scores = torch.stack(met).sum(0) if met else torch.zeros(len(e))

        def interactions(own: Leaves = own) -> Tensor:
            return torch.stack([gram_leaf(leaf, leaf, name=n) for n, leaf in own.items()]).sum(0)

        keep = rule(scores, interactions)
        if not isinstance(keep, Tensor) or keep.shape != scores.shape or keep.dtype != torch.bool:
            got = f"{tuple(keep.shape)} {keep.dtype}" if isinstance(keep, Tensor) else type(keep).__name__
            raise ValueError(
                f"select: the rule returned {got} for {len(scores)} examples; expected a tensor of one boolean an "
                "example."
            )
        kept[layer] = keep.cpu()
        sink(Decision(e.step, e.micro, layer, e.ids, tuple(scores.tolist()), tuple(keep.tolist())))
    return kept


def _sizes(block: Block, denominator: str) -> Tensor:
    """What each example adds to the denominator of its batch's loss [B]."""
    if denominator == "examples":
        return torch.ones(len(block.examples), dtype=torch.float64)
    if block.examples.tokens is None:
        raise ValueError(
            "select: denominator='tokens' needs the number of loss terms of each example, which is unknown. Declare "
            "the loss at capture: loss='token_mean', or a function (inputs, rows) -> (c, n)."
        )
    return block.examples.tokens.double().cpu()


def _counts(sizes: Sequence[Tensor], kept: Sequence[Mapping[str, Tensor]], layers: Sequence[str]) -> Tensor:
    """[blocks, layers, 2]: a batch's denominator, and the part of it that a layer dropped."""
    counts = torch.zeros(len(sizes), len(layers), 2, dtype=torch.float64)
    for b, (size, keeps) in enumerate(zip(sizes, kept, strict=True)):
        counts[b, :, 0] = size.sum()
        for i, layer in enumerate(layers):
            if layer in keeps:
                counts[b, i, 1] = size[~keeps[layer]].sum()
    return counts


def _factors(
    event: BackwardEvent,
    kept: Sequence[Mapping[str, Tensor]],
    denominator: str,
    layers: Sequence[str],
    over: Sequence[Any],
    window: Window,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Phi by layer and batch, and r by layer; see `attrax.frontends.loop.removal`."""
    if denominator == "fixed":
        return {layer: [1.0] * len(kept) for layer in layers}, dict.fromkeys(layers, 1.0)
    sizes = [_sizes(block, denominator) for block in event.blocks]
    device = next(event.model.parameters()).device
    counts = summed(_counts(sizes, kept, layers).to(device), over).cpu()
    if event.spanning and denominator == "tokens":
        return _over_window(counts.sum(0), event, window, layers)
    phi = {layer: [factor(*pair) for pair in counts[:, i].tolist()] for i, layer in enumerate(layers)}
    return phi, dict.fromkeys(layers, 1.0)


def _over_window(
    counts: Tensor,
    event: BackwardEvent,
    window: Window,
    layers: Sequence[str],
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Phi and r by layer for a mean over the backwards of a step; `window` holds total, dropped and phi so far."""
    pending = is_pending(event)
    phis: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for layer, (total, dropped) in zip(layers, counts.tolist(), strict=True):
        before = window.get(layer)
        if before is not None:
            total, dropped = total + before[0], dropped + before[1]
        earlier = 1.0 if before is None else before[2]
        phi = earlier if pending else factor(total, dropped)
        ratios[layer] = 1.0 if before is None else phi / earlier
        phis[layer], window[layer] = [phi] * len(event.blocks), (total, dropped, phi)
    return phis, ratios
