"""A run seen as SGD with its learning rates, last step first: what both sides of `attrax.methods.dvemb` read of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attrax.core import Block, LinearMap
from attrax.core.trajectory import Trajectory
from attrax.methods.along import rate_of, seen
from attrax.methods.sweep import held, unbroken
from attrax.methods.weighing import FisherUnit, fisher_factor

Coupling: TypeAlias = Literal["full", "diagonal"]
ABOUT = {"method": "dvemb", "target": "as_trained", "unit": "loss"}


@dataclass(frozen=True, eq=False)
class Seen:
    """A step's blocks, learning rates by leaf, and the factor of its Fisher matrix."""

    blocks: list[Block]
    rates: dict[str, float]
    phi: float


def backwards(trajectory: Trajectory, unit: FisherUnit, projection: LinearMap | None) -> Iterator[Seen]:
    """The steps of a run, last one first.

    Raises:
        ValueError: If steps between them are missing.
    """
    for number in reversed(unbroken(trajectory.steps, "dvemb")):
        blocks = held(seen(trajectory.gradients(number), projection))
        if blocks:
            record = trajectory.step(number)
            rates = {
                n: rate_of(record, n, leaf, "dvemb") for block in blocks for n, leaf in block.grads.items()
            }
            yield Seen(blocks, rates, fisher_factor(blocks, unit))


def is_diagonal(coupling: str) -> bool:
    """Whether layers are coupled to themselves only.

    Raises:
        ValueError: If `coupling` is unknown.
    """
    if coupling not in ("full", "diagonal"):
        raise ValueError(f"dvemb: coupling: got {coupling!r}; expected 'full' or 'diagonal'.")
    return coupling == "diagonal"
