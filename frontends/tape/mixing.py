"""Whether the rows of a model's inputs keep apart on their way through it, as examples do.

Told by three runs: on the inputs as they are, in another order, and with one row in the place of another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from attrax.core.pytree import tree_map
from attrax.frontends.tape.layout import SHARED, Layout, compared

T = TypeVar("T")
Seen = Sequence[tuple[str, Tensor]]


def replaced(values: T, B: int) -> T:
    """Every tensor in nested arguments whose first axis is the examples', with the second one in place of the first."""

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.clone()
        if x.ndim and x.shape[0] == B:
            x[0] = x[1].clone()
        return x

    return tree_map(change, values)


def ordered(before: Seen, reordered: Seen, B: int) -> tuple[dict[str, Layout | None], set[str]]:
    """Where rows lie in what was seen, and what depends on their order, by name.

    Args:
        before: Tensors of a run by name, those of a name in order; outputs of the model begin with "output ".
        reordered: Those of a run on the same rows in another order.
        B: Number of rows.

    >>> x = torch.tensor([[1.0], [2.0], [4.0]])
    >>> layouts, wrong = ordered(*([("rows", v), ("sums", v.cumsum(0))] for v in (x, x.roll(-1, 0))), 3)
    >>> wrong
    {'sums'}
    """
    layouts = compared(before, reordered, B)
    pairs = [(name, x, y) for name, x, y in _together(before, reordered) if _is_seen(x)]
    return layouts, {name for name, x, y in pairs if layouts.get(name) is None and _differs(x, y)}


def coupled(before: Seen, changed: Seen, layouts: Mapping[str, Layout | None], B: int) -> set[str]:
    """What depends on more than one row, by name.

    Args:
        before: See `ordered`.
        changed: Those of a run with the second row in place of the first.
        layouts: Where rows lie in them.
        B: Number of rows.
    """
    pairs = [(name, x, y) for name, x, y in _together(before, changed) if _is_seen(x) and x.shape == y.shape]
    return {name for name, x, now in pairs if _mixes(name, x, now, layouts.get(name), B)}


def unsteady(before: Seen, again: Seen) -> set[str]:
    """What two runs on the same rows do not agree on, by name: the model counts its calls, or draws numbers."""
    pairs = _together(before, again)
    return {n for n, _ in before} - {n for n, *_ in pairs} | {n for n, x, y in pairs if not torch.equal(x, y)}


def _is_seen(x: Tensor) -> bool:
    return x.is_floating_point() and x.ndim > 0


def _differs(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold other numbers, and not the same ones in other places."""
    sizes = [v.flatten().sort()[0] for v in (x, other)]
    return x.shape == other.shape and _distance(*sizes) > max(0.01 * _distance(x, other), _rounding(x))


def _mixes(name: str, x: Tensor, now: Tensor, layout: Layout | None, B: int) -> bool:
    if layout is None:
        return False
    if layout is SHARED:
        return not name.startswith("output ") and _distance(x, now) > _rounding(x)
    rows, others = (layout.units(v, B).unflatten(0, (B, -1))[1:] for v in (x, now))
    return _distance(rows, others) > max(0.01 * _distance(x, now), _rounding(x))


def _rounding(x: Tensor) -> float:
    return 8 * max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) * _norm(x)


def _distance(x: Tensor, y: Tensor) -> float:
    return _norm(torch.where(x == y, 0, x - y))


def _norm(x: Tensor) -> float:
    return float(x.nan_to_num(nan=2.0, posinf=1.0, neginf=-1.0).double().norm())


def _together(*seen: Seen) -> list[tuple[Any, ...]]:
    """Name and tensors of what all runs have as often."""
    runs: list[dict[str, list[Tensor]]] = [{} for _ in seen]
    for run, tensors in zip(runs, seen, strict=True):
        for name, x in tensors:
            run.setdefault(name, []).append(x.detach())
    return [
        (name, *each)
        for name in runs[0]
        if len({len(run.get(name, ())) for run in runs}) == 1
        for each in zip(*(run[name] for run in runs), strict=True)
    ]
