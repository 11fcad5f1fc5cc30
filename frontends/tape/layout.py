"""Where the examples lie in a layer's tensors.

Most layers keep examples along the first axis.  Others see ``[B T, N]`` (batch and time flattened), ``[T, B, N]``
(sequence first), or something that all examples share.  Shapes alone cannot always tell: a layer whose input is not
plainly ``[B, ...]`` is asked once, by running the model on the same examples in another order and seeing which way its
rows moved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from attrax.core import Leaf
from attrax.core.algebra import nothing
from attrax.core.leaves import Materialized, Sum
from attrax.core.pytree import tree_map

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """One way examples can lie along the leading axes of a tensor.

    Attributes:
        name: What the axes are.
        axis: The example axis once the first axis is split; None if examples share the tensor.
        flat: Whether the first axis holds examples and something else, to be split.
    """

    name: str
    axis: int | None
    flat: bool = False

    def fits(self, shape: torch.Size, B: int) -> bool:
        """Whether a tensor of B examples can be laid out so."""
        if self.axis is None:
            return shape[0] == 1 or len(shape) == 1
        if self.flat:
            return B > 0 and shape[0] % B == 0
        return len(shape) > self.axis and shape[self.axis] == B

    def split(self, x: Tensor, B: int) -> Tensor:
        """The tensor with an axis of its own for the examples, `axis`."""
        return x.unflatten(0, (B, -1) if self.axis == 0 else (-1, B)) if self.flat else x

    def units(self, x: Tensor, B: int) -> Tensor:
        """The tensor as [B F, ...], the F units of an example next to each other."""
        if self.axis != 1:
            return x
        x = self.split(x, B).transpose(0, 1)
        return x.flatten(0, 1) if self.flat else x

    def alone(self, x: Tensor) -> Tensor:
        """One example taken out of a split tensor, as the tensor of a batch of one."""
        return x if self.axis is None or self.flat else x.unsqueeze(self.axis)

    def only(self, x: Tensor, B: int, i: int) -> Tensor:
        """A tensor that is zero but for one example."""
        alone = torch.zeros_like(x)
        axis = self.axis or 0
        self.split(alone, B).select(axis, i).copy_(self.split(x, B).select(axis, i))
        return alone


EXAMPLES = Layout("[B, ...]", 0)
FLAT = Layout("[B T, ...]", 0, flat=True)
POSITIONS = Layout("[T, B, ...]", 1)
FLAT_POSITIONS = Layout("[T B, ...]", 1, flat=True)
SHARED = Layout("[1, ...] or [T], shared", None)
LAYOUTS = (EXAMPLES, POSITIONS, FLAT, FLAT_POSITIONS)


def is_plain(x: Tensor, output: Tensor, B: int) -> bool:
    """Whether the first axis can only be the example axis."""
    inner = x.shape[1:] if not x.is_floating_point() else x.shape[1:-1]
    return x.shape[0] == output.shape[0] == B and B not in inner


def shared(x: Tensor, B: int) -> Tensor:
    """What all examples share, [1, ...] or [T, ...], once for each: [B, ...]."""
    return x.expand(B, *x.shape[1:]) if x.shape[0] == 1 else x.expand(B, *x.shape)


def fold(leaf: Leaf, B: int) -> Leaf:
    """A leaf of B F units as one of B examples: the rows of an example's units one after the other."""
    if isinstance(leaf, Sum):
        return replace(leaf, uses=tuple(fold(use, B) for use in leaf.uses))
    if isinstance(leaf, Materialized):
        return leaf if leaf.w.shape[0] == B else replace(leaf, w=leaf.w.unflatten(0, (B, -1)).sum(1))
    return leaf if leaf.g.shape[0] == B else tree_map(lambda x: _joined(x, leaf.g.ndim, B), leaf)


def _joined(x: Tensor, ndim: int, B: int) -> Tensor:
    x = x.unflatten(0, (B, -1))
    return x.flatten(1, 2) if ndim == 3 else x.transpose(1, 2).flatten(2, 3)


def moved(before: Tensor, after: Tensor, B: int) -> Layout | None:
    """The layout under which `after` is `before` with its examples in the order of `reordered`; None if none is.

    A layout is right if it explains all of the change but rounding; a tensor that did not change is shared, unless it
    has the examples' length and rows that are alike.
    """
    explained = explanations(before, after, B)
    return explained[0] if explained else None


def explanations(before: Tensor, after: Tensor, B: int) -> list[Layout]:
    """All layouts under which `after` is `before` with its examples in the order of `reordered`."""
    if before.shape != after.shape:
        return []
    before, after = _finite(before.detach()), _finite(after.detach())
    changed, rounding = _distance(before, after), _rounding(before)
    allowed = max(0.01 * changed, rounding)
    found: list[Layout] = []
    for layout in LAYOUTS if before.ndim else ():
        if not layout.fits(before.shape, B):
            continue
        x, y = (layout.units(v, B).unflatten(0, (B, -1)) for v in (before, after))
        if _distance(x[reordered(B).to(x.device)], y) <= allowed:
            found.append(layout)
    return found or ([SHARED] if changed <= rounding else [])


def reordered(B: int) -> Tensor:
    """The other order of the examples: each takes the place of the one before it."""
    return torch.arange(B).roll(-1)


def _distance(x: Tensor, y: Tensor) -> float:
    return float(torch.where(x == y, 0, x - y if x.is_floating_point() else 1).double().norm())


def _rounding(x: Tensor) -> float:
    if not x.is_floating_point():
        return 0.0
    return 8 * max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) * float(x.double().norm())


def _finite(x: Tensor) -> Tensor:
    """Numbers in place of those that are not finite, which have no distance: a mask's, or an overflow's."""
    return x.nan_to_num(nan=2.0, posinf=1.0, neginf=-1.0) if x.is_floating_point() else x


Seen: TypeAlias = Iterable[tuple[str, Tensor]]


def compared(before: Seen, after: Seen, B: int) -> dict[str, Layout | None]:
    """The layout of every layer that two runs of the model called alike, by path; None where there is none."""
    found = {path: [moved(x, y, B) for x, y in pairs] for path, pairs in _paired(before, after).items()}
    return {path: kinds[0] if len(set(kinds)) == 1 else None for path, kinds in found.items()}


def doubtless(before: Seen, after: Seen, B: int) -> set[str]:
    """Layers whose tensors say which of two layouts they have: not those of examples that are all alike."""

    def clear(x: Tensor, y: Tensor) -> bool:
        found = explanations(x, y, B)
        return len({layout is POSITIONS if x.ndim and x.shape[0] == B else layout for layout in found}) < 2

    return {path for path, pairs in _paired(before, after).items() if all(clear(x, y) for x, y in pairs)}


def unmoved(
    before: Seen, after: Seen, layouts: Mapping[str, Layout | None], B: int, examples: Tensor
) -> bool:
    """Whether some examples saw the same in two runs, wherever it is known where they lie."""
    same: list[bool] = []
    for path, pairs in _paired(before, after).items():
        layout = layouts.get(path)
        if layout is None or layout is SHARED:
            same += [
                x.shape == y.shape and (_alike(x, y) or not bool(examples.all()))
                for x, y in pairs
                if not x.ndim
            ]
            continue
        for x, y in pairs:
            if x.shape != y.shape:
                return False
            one, two = (layout.units(v, B).unflatten(0, (B, -1))[examples.to(v.device)] for v in (x, y))
            same.append(_alike(one, two))
    return bool(same) and all(same)


def _alike(x: Tensor, y: Tensor) -> bool:
    x, y = _finite(x.detach()), _finite(y.detach())
    return _distance(x, y) <= _rounding(x)


def _paired(before: Seen, after: Seen) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Tensors of two runs by path, of the layers that both called as often."""
    runs: list[dict[str, list[Tensor]]] = [{}, {}]
    for run, seen in zip(runs, (before, after), strict=True):
        for path, x in seen:
            run.setdefault(path, []).append(x)
    first, second = runs
    return {
        path: list(zip(xs, second[path], strict=True))
        for path, xs in first.items()
        if len(second.get(path, ())) == len(xs)
    }


def copied(values: T) -> T:
    """Nested arguments with a copy of every tensor, for a module that may change them in place."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, values)


def permuted(values: T, B: int) -> T:
    """Every tensor in nested arguments whose first axis is the examples', with its examples reordered."""
    order = reordered(B)
    return tree_map(
        lambda x: x[order.to(x.device)] if isinstance(x, Tensor) and x.ndim and x.shape[0] == B else x, values
    )


class Packing(NamedTuple):
    """Where the positions of examples lie in packed sequences; made by `packing`.

    Attributes:
        index: [E, L] index into the R T positions, for the positions of every example.
        valid: [E, L] which of them the example has.
        length: Positions T of a sequence.
    """

    index: Tensor
    valid: Tensor
    length: int


def packing(segments: Tensor, examples: int) -> Packing:
    """Read the places of all examples off their segments, once for all layers.

    Args:
        segments: [R, T] index of the example each position belongs to, -1 for none.
        examples: Number of examples E.

    >>> packing(torch.tensor([[0, 1, 1], [0, -1, -1]]), 2).index.tolist()
    [[0, 3], [1, 2]]
    """
    flat = segments.flatten()
    order = flat.argsort(stable=True)
    order = order[int((flat < 0).sum()) :]
    counts = torch.bincount(flat[order], minlength=examples)
    column = torch.arange(len(order), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    index = order.new_zeros(examples, int(counts.max()) if len(counts) else 0)
    valid = torch.zeros_like(index, dtype=torch.bool)
    index[flat[order], column], valid[flat[order], column] = order, True
    return Packing(index, valid, segments.shape[1])


def regrouped(x: Tensor, packed: Packing) -> Tensor:
    """Positions of packed sequences [R, T, ...] as those of examples [E, L, ...]; what an example lacks is zero."""
    each = x.flatten(0, 1)[packed.index]
    return each * packed.valid.reshape(*packed.valid.shape, *[1] * (each.ndim - 2)).to(each.dtype)


def regrouped_rows(x: Tensor, packed: Packing) -> Tensor:
    """The same of an array of a leaf, in which an id that an example lacks is -1."""
    return regrouped(x - nothing(x), packed) + nothing(x) if nothing(x) else regrouped(x, packed)
