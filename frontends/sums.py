"""The first backward of a capture, checked: captured gradients must add up to what it put into `.grad`."""

import torch
from torch import Tensor, nn

from attrax.core import GradTree, Leaf, aggregate, stored
from attrax.core.leaves import dtype_of
from attrax.frontends.verify import distance, mismatches, raise_on


def fresh_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters without a gradient so far."""
    return {n for n, p in model.named_parameters() if p.grad is None or not bool(_dense(p.grad).any())}


class GradientSums:
    """Sums of the captured gradients of one backward, by parameter."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: set[torch.dtype] = set()

    def clear(self) -> None:
        """Forget the sums of a backward, which may not have ended."""
        self._sums, self._dtypes = {}, set()

    def add(self, name: str, leaf: Leaf) -> None:
        """Add the examples of a leaf."""
        self._dtypes.add(dtype_of(leaf))
        for parameter, total in stored(aggregate(GradTree({name: leaf}))).items():
            self._sums[parameter] = self._sums.get(parameter, 0) + total[0]

    def check(self, model: nn.Module, wanted: set[str], fresh: list[set[str]]) -> bool:
        """Compare with `.grad`, for parameters that had no gradient before.

        Args:
            model: The model, after the backward.
            wanted: Captured parameters.
            fresh: For each pass of the backward, the parameters without gradient when it ran.

        Returns:
            Whether there was a gradient to compare.

        Raises:
            RuntimeError: Naming the parameters that differ.
        """
        names = wanted.intersection(*fresh)
        grads = {n: p.grad for n, p in model.named_parameters() if n in names and p.requires_grad}
        given = {n: _dense(g) for n, g in grads.items() if g is not None}
        dtype = max(self._dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)
        errors: dict[str, str] = {}
        if not _reduced():
            pairs = {n: distance(self._sums[n], grads[n]) for n in grads.keys() & self._sums.keys()}
            errors = mismatches(pairs, dtype)
        missing = [n for n, g in given.items() if n not in self._sums and bool(g.any())]
        raise_on(errors | dict.fromkeys(missing, "has a gradient but its layer was never captured"))
        return any(bool(g.any()) for g in given.values())


def _dense(g: Tensor) -> Tensor:
    return g.to_dense() if g.is_sparse else g


def _reduced() -> bool:
    """Whether `.grad` is not this process's alone: data parallel training averages it over processes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
