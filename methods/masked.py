"""A training run seen through coordinate masks: runs of models whose other coordinates nothing can perturb."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import Tensor

from attrax.core import (
    Block,
    Blocks,
    Examples,
    GradTree,
    Leaf,
    Mask,
    Source,
    coordinates,
    materialize_leaf,
    projected,
)
from attrax.core.gather import is_sparse
from attrax.core.trajectory import Step, Trajectory


@dataclass(frozen=True, eq=False)
class Masked:
    """A trajectory whose tensors hold a mask's coordinates only; made by `masked_runs`."""

    whole: Trajectory
    mask: Mask
    of_step: Callable[[int], Step] = field(repr=False)
    of_gradients: Callable[[int], Source] = field(repr=False)

    @property
    def steps(self) -> Sequence[int]:
        """See `Trajectory.steps`."""
        return self.whole.steps

    def step(self, number: int) -> Step:
        """See `Trajectory.step`; hyperparameters, clipping and counts are those of the whole run."""
        record = self.of_step(number)
        return replace(
            record,
            gradients=self._picked(record.gradients),
            parameters=self._picked(record.parameters),
            touched=self._picked(_by_entry(record)),
            states={
                name: {k: self._pick(name, x) if x.ndim else x for k, x in state.items()}
                for name, state in record.states.items()
            },
        )

    def gradients(self, number: int) -> Source:
        """See `Trajectory.gradients`."""
        return self.of_gradients(number)

    def _picked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._pick(name, x) for name, x in tensors.items()}

    def _pick(self, name: str, x: Tensor) -> Tensor:
        return x.flatten()[coordinates(self.mask, name, tuple(x.shape)).to(x.device)]


def _by_entry(record: Step) -> dict[str, Tensor]:
    """Which entries of a parameter lie in touched rows, where something tells its shape."""
    like = {**record.gradients, **record.parameters}
    like |= {n: state["exp_avg"] for n, state in record.states.items() if "exp_avg" in state}
    return {n: rows.unsqueeze(1).expand(like[n].shape) for n, rows in record.touched.items() if n in like}


def masked_runs(trajectory: Trajectory, masks: Sequence[Mask]) -> list[Masked]:
    """See a run through each mask.  What they read of a step is read once, if they go through the steps side by side.

    Raises:
        ValueError: If a mask scales entries, which an optimizer's state would not follow.
    """
    for mask in masks:
        if mask.scale != "none":
            raise ValueError(
                f"masked_runs: got scale={mask.scale!r}; an optimizer's state needs Mask(scale='none')."
            )
    step = lru_cache(1)(trajectory.step)
    gradients = lru_cache(1)(lambda number: masked_sources(trajectory.gradients(number), masks))
    return [
        Masked(trajectory, mask, step, lambda number, k=k: gradients(number)[k])
        for k, mask in enumerate(masks)
    ]


def masked_sources(source: Source, masks: Sequence[Mask]) -> list[Blocks]:
    """A source in the coordinates of each mask, read once, in memory."""
    changes = [projected(mask) for mask in masks]
    count = sum(mask.count for mask in masks)

    def visit(name: str, leaf: Leaf, _: Examples) -> list[Leaf | None]:
        seen = leaf if leaf.basis or is_sparse(leaf, count) else materialize_leaf(leaf)
        return [change(name, seen) for change in changes]

    blocks: list[list[Block]] = [[] for _ in masks]
    for examples, leaves in source.map(visit):
        for k, found in enumerate(blocks):
            kept = {name: picked for name, each in leaves.items() if (picked := each[k]) is not None}
            found.append(Block(GradTree(kept), examples))
    return [Blocks(found) for found in blocks]
