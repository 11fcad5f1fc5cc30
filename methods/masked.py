"""A training run seen through a coordinate mask: the run of a model whose other coordinates nothing can perturb."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from attrax.core import Mask, Source, coordinates, projected, transformed
from attrax.core.trajectory import Step, Trajectory


@dataclass(frozen=True, eq=False)
class Masked:
    """A trajectory whose tensors hold a mask's coordinates only; made by `masked_run`."""

    trajectory: Trajectory
    mask: Mask

    @property
    def steps(self) -> Sequence[int]:
        """See `Trajectory.steps`."""
        return self.trajectory.steps

    def step(self, number: int) -> Step:
        """See `Trajectory.step`; hyperparameters, clipping and counts are those of the whole run."""
        record = self.trajectory.step(number)
        return replace(
            record,
            gradients=self._picked(record.gradients),
            parameters=self._picked(record.parameters),
            states={
                name: {k: self._pick(name, x) if x.ndim else x for k, x in state.items()}
                for name, state in record.states.items()
            },
        )

    def gradients(self, number: int) -> Source:
        """See `Trajectory.gradients`."""
        return transformed(self.trajectory.gradients(number), projected(self.mask))

    def _picked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._pick(name, x) for name, x in tensors.items()}

    def _pick(self, name: str, x: Tensor) -> Tensor:
        return x.flatten()[coordinates(self.mask, name, tuple(x.shape)).to(x.device)]


def masked_run(trajectory: Trajectory, mask: Mask) -> Masked:
    """See a run through a mask.

    Raises:
        ValueError: If the mask scales entries, which an optimizer's state would not follow.
    """
    if mask.scale != "none":
        raise ValueError(
            f"masked_run: got scale={mask.scale!r}; an optimizer's state needs Mask(scale='none')."
        )
    return Masked(trajectory, mask)
