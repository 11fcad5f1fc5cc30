"""Several forward passes of one backward that are of the same examples: one block, in which gradients add up.

Two towers, two views of an input, a model called on a question and on its answer: each call is a pass of its own, and
an example's gradient is the sum over all of them.  Leaves are added as the capture's transform has made them, which is
right for maps that are linear in the gradient, as all of attrax's are.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from attrax.core import Examples, Leaf
from attrax.core.leaves import covers
from attrax.frontends.tape.assemble import joined
from attrax.frontends.tape.notes import Delivered


def merged(found: Sequence[Delivered]) -> list[Delivered]:
    """What the passes of one backward have delivered, those of the same ids as one."""
    same: dict[tuple[str, ...], list[Delivered]] = defaultdict(list)
    for x in found:
        same[x.examples.ids].append(x)
    return [x for passes in same.values() for x in _one(passes)]


def _one(passes: list[Delivered]) -> list[Delivered]:
    if len(passes) == 1:
        return passes
    if not _joinable([x.leaves for x in passes]):
        warnings.warn(
            "capture: two calls of the model in one backward are of the same examples but their layers do not share "
            "inputs in the same way, so their gradients stay in separate blocks.",
            RuntimeWarning,
            stacklevel=2,
        )
        return passes
    bad: dict[str, Tensor] = {}
    for x in passes:
        bad |= {name: bad[name] | flags if name in bad else flags for name, flags in x.bad.items()}
    leaves = {n: joined(xs) for n, xs in _by_name([x.leaves for x in passes]).items()}
    return [Delivered(_examples([x.examples for x in passes]), passes[0].directions, leaves, bad)]


def _by_name(parts: Sequence[Mapping[str, Leaf]]) -> dict[str, list[Leaf]]:
    found: dict[str, list[Leaf]] = defaultdict(list)
    for leaves in parts:
        for name, leaf in leaves.items():
            found[name].append(leaf)
    return found


def _joinable(parts: Sequence[Mapping[str, Leaf]]) -> bool:
    """Whether leaves of the same name are of the same parameters, and all others of different ones."""
    groups = _by_name(parts)
    parameters = [name for leaves in groups.values() for name in covers(leaves[0])]
    alike = all(leaf.parts == leaves[0].parts for leaves in groups.values() for leaf in leaves)
    return alike and len(set(parameters)) == len(parameters)


def _examples(parts: Sequence[Examples]) -> Examples:
    """Counts add up; a weight is known if it is the same in all passes."""
    weights, counts = [x.weight for x in parts], [x.tokens for x in parts]
    first = weights[0]
    alike = first is not None and all(
        w is not None and bool(w.allclose(first, rtol=1e-6, atol=0.0)) for w in weights
    )
    total = None if any(n is None for n in counts) else sum(n for n in counts if n is not None)
    return replace(parts[0], weight=first if alike else None, tokens=total)
