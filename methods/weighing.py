"""What the loss of a step is a mean over: the scale of its Fisher matrix, and the share of an example in it."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from attrax.core import Block, Examples

FisherUnit: TypeAlias = Literal["examples", "tokens"]
Removal: TypeAlias = Literal["fixed", "example_mean", "token_mean"]


def fisher_factor(blocks: Sequence[Block], unit: FisherUnit) -> float:
    """Phi in H ~ phi sum_z ghat_z ghat_z^T: the number of units in the step by the total weight of their losses.

    A step's loss is sum_z c_z l_z, and ghat_z = c_z g_z.  With l_z a sum over tokens whose labels are the model's own,
    E ghat_z ghat_z^T = c_z^2 GGN_z, so that "tokens" is exact on average for a mean over tokens (phi = their number)
    and for a sum (phi = 1).  "examples" takes an example's token mean for one unit (phi = number of examples for
    any mean); this is what the papers do.

    Args:
        blocks: All blocks of a step.
        unit: "examples" or "tokens"; an example counts as one token where counts are unknown.

    Raises:
        ValueError: If loss weights are unknown.

    >>> from attrax.core import GradTree
    >>> about = Examples(("a", "b"), weight=torch.full((2,), 0.1), tokens=torch.tensor([4, 6]))
    >>> [round(fisher_factor([Block(GradTree({}), about)], unit), 3) for unit in ("examples", "tokens")]
    [2.0, 10.0]
    """
    if unit not in ("examples", "tokens"):
        raise ValueError(f"unit: got {unit!r}; expected 'examples' or 'tokens'.")
    total = sum(float(loss_shares(block.examples).sum()) for block in blocks)
    counted = [len(b.examples) if unit == "examples" else float(_tokens(b.examples).sum()) for b in blocks]
    return sum(counted) / total if total else 0.0


def loss_shares(examples: Examples) -> Tensor:
    """c_z n_z [B]: how much of the step's loss is the mean loss of each example; they add up to 1 for a mean.

    Raises:
        ValueError: If loss weights are unknown.
    """
    if examples.weight is None:
        raise ValueError(
            f"step {examples.step}: the weights that the loss put on its examples are unknown, and the scale of the "
            "curvature (or of renormalized removal) depends on them. Declare the loss at capture; where every layer "
            "selected examples of its own, there are none."
        )
    return examples.weight.double() * _tokens(examples).to(examples.weight.device)


def _tokens(examples: Examples) -> Tensor:
    return torch.ones(len(examples)) if examples.tokens is None else examples.tokens


def removed(rows: Sequence[tuple[Examples, Tensor]], removal: Removal) -> list[tuple[Examples, Tensor]]:
    """Scores of a step from its products: the gradient changes by -ghat_z, or by -(ghat_z - share_z G) if the loss is
    divided by what is left of the batch.

    Raises:
        ValueError: If `removal` is unknown.
    """
    if removal not in ("fixed", "example_mean", "token_mean"):
        raise ValueError(f"removal: got {removal!r}; expected 'fixed', 'example_mean' or 'token_mean'.")
    if removal == "fixed" or not rows:
        return [(examples, -x) for examples, x in rows]
    whole = torch.stack([x.sum(0) for _, x in rows]).sum(0)
    if removal == "example_mean":
        counts = [torch.ones(len(examples)) for examples, _ in rows]
    else:
        counts = [_tokens(examples) for examples, _ in rows]
    total = float(sum(n.sum() for n in counts))
    shares = [(n / total).to(whole) for n in counts]
    return [(examples, w[:, None] * whole - x) for (examples, x), w in zip(rows, shares, strict=True)]
