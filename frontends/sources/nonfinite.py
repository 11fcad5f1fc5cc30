"""Examples whose gradients are not finite, and a block without them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attrax.core import Block, Leaf, take_block
from attrax.core.algebra import wide


def nonfinite_examples(leaf: Leaf) -> Tensor:
    """Boolean [B]: examples whose gradient in this leaf is not finite.

    Both factors are read: a gradient of zero times an infinite input is not a number.  A sum is finite only if all its
    terms are; it costs one read where an elementwise test costs three passes.
    """
    uses = getattr(leaf, "uses", (leaf,))
    factors = [getattr(use, name) for use in uses for name in ("a", "x", "g", "w") if hasattr(use, name)]
    sums = [x.flatten(1).sum(1, dtype=wide(x.dtype)) for x in factors]
    return ~torch.isfinite(torch.stack(sums)).all(0)


def without_nonfinite(block: Block, bad: Mapping[str, Tensor]) -> tuple[Block, list[str], str]:
    """Leave out the examples that are not finite in some leaf.

    Args:
        block: Gradients.
        bad: Boolean [B] by leaf name.

    Returns:
        The block, the ids that were left out, and a sentence that says where; empty if there are none.

    >>> from attrax.core import Examples, GradTree
    >>> block = Block(GradTree({}), Examples(("a", "b")))
    >>> without_nonfinite(block, {"w": torch.tensor([False, True])})[1]
    ['b']
    """
    flags = torch.stack(list(bad.values())).cpu()
    if not bool(flags.any()):
        return block, [], ""
    examples, keep = block.examples, ~flags.any(0)
    where = [name for name, row in zip(bad, flags, strict=True) if bool(row.any())]
    names = [examples.ids[i] for i in (~keep).nonzero().flatten().tolist()]
    text = (
        f"capture: step {examples.step}: non-finite gradients of examples {names[:5]} in layers {where[:3]}"
    )
    return take_block(block, keep), names, text
