"""LESS (Xia et al. 2024, arXiv:2402.04333): cosines of query gradients with what an example makes the optimizer do.

    s(z, q) = sum_k w_k cos(v_q(theta_k), Gamma(g_z(theta_k); optimizer state at k))

g_z is the gradient of the example's mean loss over tokens, Gamma the update direction that it alone would give
(`attrax.core.directed`), cosines run over all layers, and w_k is the learning rate.  Gamma is taken of whole gradients;
a projection comes after it.  Along a run k are the steps in which z was used; else saved checkpoints, for all z.

Variants: "torch" takes the optimizer's own rule; "official" that of the released code, m' / sqrt(v' + eps) without bias
correction, and weights that add up to one.
"""

from typing import Literal, TypeAlias

from attrax.core import (
    CPU,
    Hardware,
    LinearMap,
    Scores,
    Target,
)
from attrax.core.trajectory import Trajectory
from attrax.methods.tracin import Stepped

Variant: TypeAlias = Literal["torch", "official"]


def less(
    trajectory: Trajectory,
    query: Stepped,
    *,
    variant: Variant = "torch",
    target: Target = "mean",
    centered: bool = False,
    projection: LinearMap | None = None,
    hardware: Hardware = CPU,
) -> Scores:
    """LESS along a run: every use of an example at the parameters and the optimizer state before that step.

    Args:
        trajectory: The run, with optimizer states.
        query: Query gradients at the steps of the run, before each step.
        variant: See the module.
        target: Scale of the train gradients: directions depend on it.
        centered: Leave out the direction of the momentum, which all examples share.
        projection: Applied to directions and query gradients.
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [rows, Q], one row per (example, step); higher = more helpful.  A mean over steps of cosines, weighed
        by learning rates ("torch": not normalized).

    Raises:
        ValueError: If a step has no query gradients, its parameters differ, or there are several learning rates.
    """
    missing = sorted(set(trajectory.steps) - set(query.steps()))
    if missing:
        raise ValueError(f"less: no query gradients at steps {missing[:5]}; record them at every step.")
    parts = [
        _weighed(
            trajectory.gradients(k),
            query.at(k),
            trajectory.step(k),
            variant,
            target,
            centered,
            projection,
            hardware,
        )
        for k in trajectory.steps
    ]
    return parts
