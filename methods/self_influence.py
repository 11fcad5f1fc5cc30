"""Self-influence: how strongly an example's own gradient acts on its own loss.

    plain      s[i] = |g_i|^2                           (TracIn self-influence, Pruthi et al. 2020)
    curvature  s[i] = <G_i, (H + damping)^-1 G_i> = sum (U_C^T G_i U_A)^2 / (L + damping)

Large values flag mislabeled, rare or memorized examples.
"""

import torch
from torch import Tensor

from attrax.core import (
    CPU,
    Examples,
    Hardware,
    Leaf,
    Scores,
    Source,
    Target,
    chain,
    projected,
    rotate,
    selected,
    sq_norms_leaf,
    targeted,
    transformed,
)
from attrax.core.scores import scores
from attrax.core.source import one_fingerprint, row_sums
from attrax.methods.kfac import Curvature, damping_amounts


def self_influence(
    train: Source,
    *,
    curvature: Curvature | None = None,
    damping: float = 0.1,
    target: Target = "sum",
    hardware: Hardware = CPU,
) -> Scores:
    """Score every example against itself.

    Args:
        train: Train gradients.
        curvature: A K-FAC or EK-FAC fit; squared gradient norms over all leaves if omitted.
        damping: Factor of each layer's mean eigenvalue (with a curvature).
        target: Loss convention (without a curvature; with one, the fit's).
        hardware: Roofline figures and memory budget.

    Returns:
        Scores [N, 1], column "self"; never negative.

    Raises:
        ValueError: If the source is empty, or parameters or layers differ from the fit's.

    >>> from attrax.core import Block, Blocks, GradTree, factorized
    >>> grads = GradTree({"w": factorized("w", torch.ones(1, 1, 2), torch.ones(1, 1, 2))})
    >>> self_influence(Blocks([Block(grads, Examples(("x",), weight=torch.ones(1)))])).values
    tensor([[4.]])
    """
    about = {"method": "self_influence", "curvature": "none", "target": target, "unit": "loss"}
    source = targeted(train, target)
    metric: dict[str, Tensor] = {}
    if curvature is not None:
        about |= {"curvature": curvature.method, "damping": f"{damping} x mean eigenvalue of each layer"}
        about |= {"target": curvature.target, "unit": "loss x examples"}
        bases = curvature.bases
        amounts = damping_amounts(curvature, damping)
        metric = {name: 1 / (values + amounts[name]) for name, values in curvature.eigenvalues.items()}
        project = () if curvature.projection is None else (projected(curvature.projection),)
        turn = chain(
            selected(lambda name, _: name in bases), *project, lambda name, leaf: rotate(leaf, bases[name])
        )
        source = transformed(targeted(train, curvature.target), turn)

    met: set[str] = set()

    def measure(name: str, leaf: Leaf, examples: Examples) -> Tensor:
        if curvature is not None:
            one_fingerprint(curvature.fingerprint, examples, "self_influence")
        met.add(name)
        return sq_norms_leaf(leaf, name=name, metric=metric.get(name), hardware=hardware)

    found = [(examples, value) for examples, value in row_sums(measure, source) if value is not None]
    if not found:
        raise ValueError("self_influence: the train source yielded no examples or no leaf of the fit.")
    if unmet := [name for name in metric if name not in met]:
        raise ValueError(
            f"self_influence: the fit holds leaves that no train block has: {unmet[:5]}. "
            "Score with the layer selection of the fit."
        )
    values = torch.cat([value for _, value in found]).unsqueeze(1)
    return scores(values, [examples for examples, _ in found], ["self"], about)
