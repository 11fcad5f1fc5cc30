"""Checks of a running capture: the captured gradients of a backward must add up to what it put into `.grad`.

Every parameter is checked in the first backward that gives it a finite gradient of its own.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from attrax.core import GradTree, Leaf, aggregate, stored
from attrax.core.leaves import covers, dtype_of
from attrax.frontends.distributed import Processes
from attrax.frontends.sharding import is_sharded, named
from attrax.frontends.tensor_parallel import parallel_mesh
from attrax.frontends.verify import distance, mismatches, raise_on


class GradientSums:
    """Sums of the captured gradients of one backward, for parameters that were not checked so far."""

    def __init__(self, model: nn.Module, wanted: Iterable[str]) -> None:
        names = set(wanted)
        self._waiting = {n: p for n, p in named(model).items() if n in names}
        self._own = not (several_processes() and is_sharded(model))  # else a gradient may be that of others
        self._parallel = parallel_mesh(model)  # to be compared once
        self._sums: dict[str, Tensor] = {}
        self._dtypes: set[torch.dtype] = set()

    def clear(self) -> None:
        """Forget the sums of a backward, which may not have ended."""
        self._sums, self._dtypes = {}, set()

    def leave_out(self, parameters: Iterable[str]) -> None:
        """Do not wait for some parameters."""
        for name in parameters:
            self._waiting.pop(name, None)

    def fresh(self) -> set[str]:
        """Parameters to check that have no gradient yet."""
        grads = {n: p.grad for n, p in self._waiting.items()}
        return {n for n, g in grads.items() if g is None or not bool(_dense(g).any())}

    def add(self, name: str, leaf: Leaf) -> None:
        """Add the examples of a leaf."""
        if self._waiting.keys().isdisjoint(covers(leaf)):
            return
        self._dtypes.add(dtype_of(leaf))
        for parameter, total in stored(aggregate(GradTree({name: leaf}))).items():
            self._sums[parameter] = self._sums.get(parameter, 0) + total[0]

    def check(self, fresh: Iterable[set[str]]) -> None:
        """Compare with `.grad`.

        Args:
            fresh: For each pass of the backward, the parameters without gradient when it ran.

        Raises:
            RuntimeError: Naming the parameters that differ.
        """
        if self._parallel is not None:
            _check_alike(self._sums, self._parallel.get_group())
            self._parallel = None
        names = set(self._waiting).intersection(*fresh)
        grads = {n: self._waiting[n].grad for n in names if self._waiting[n].requires_grad}
        dense = {n: _dense(g) for n, g in grads.items() if g is not None}
        given = {n: g for n, g in dense.items() if bool(g.any())}
        unseen = given.keys() - self._sums.keys() if self._own else ()
        missing = dict.fromkeys(unseen, "has a gradient but its layer was never captured")
        dtype = max(self._dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)
        unread = {n for n, g in given.items() if not bool(g.isfinite().all())}
        seen = (grads.keys() & self._sums.keys()) - unread
        pairs = {} if several_processes() else {n: distance(self._sums[n], dense.get(n)) for n in seen}
        raise_on(missing | mismatches(pairs, dtype, torch.finfo(torch.float32).eps))
        for name in seen if given else ():
            del self._waiting[name]


def _check_alike(sums: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Compare the sums of processes that share a model's layers, and so have the same examples' whole gradients."""
    held = Processes(group).listed({n: float(x.double().norm()) for n, x in sums.items()})
    for name in sums:
        norms = [own.get(name, 0.0) for own in held]
        if max(norms) - min(norms) > 1e-3 * max(norms):
            raise RuntimeError(
                f"capture: parameter '{name}': processes that share the model's layers found gradients of different "
                f"norms, {norms}; expected the same everywhere. Give these processes the same batches; put a layer "
                "that sees a part of each example into torch's SequenceParallel, or exclude it."
            )


def _dense(g: Tensor) -> Tensor:
    """Entries of a gradient that this process holds."""
    g = g.to_local() if isinstance(g, DTensor) else g
    return g.to_dense() if g.is_sparse else g


def several_processes() -> bool:
    """Whether `.grad` may not be this process's alone: data parallel training averages it over processes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
