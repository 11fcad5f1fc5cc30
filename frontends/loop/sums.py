"""Checks of a running capture: the captured gradients of a backward must add up to what it put into `.grad`.

Every parameter is checked in the first backward that gives it a finite gradient of its own.  Where `.grad` is a mean
over processes, a replicated model (DistributedDataParallel) is checked before that is taken, by hooks on parameters; of
a sharded one, the mean of what processes captured is compared with the slice of it that each holds, and all of them
find the same errors.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate

from attrax.core import GradTree, Leaf, aggregate, stored
from attrax.core.algebra import wide
from attrax.core.leaves import covers, dtype_of
from attrax.core.transfers import fetched
from attrax.frontends.loop.removal import is_reduced, mean_slice, no_mean, summed
from attrax.frontends.model.averaging import Averaging, several_processes
from attrax.frontends.model.distributed import Processes
from attrax.frontends.model.sharding import Piece, gradients, is_sharded, named, part, pieces
from attrax.frontends.model.sparse import filled
from attrax.frontends.sources.verify import distance, mismatches, raise_on
from attrax.frontends.tape.tensor_parallel import parallel_mesh

_EXCHANGES = 8


class Found(NamedTuple):
    """A parameter's gradient: how far what was captured is from it, how large it is, and whether that says anything."""

    difference: float
    size: float
    finite: bool
    captured: bool

    def also(self, other: "Found") -> "Found":
        """What two processes have found together."""
        finite, captured = self.finite and other.finite, self.captured or other.captured
        return Found(max(self.difference, other.difference), max(self.size, other.size), finite, captured)


class _Share(NamedTuple):
    """What one process has found: distances, and dtypes of what was captured."""

    found: dict[str, Found]
    dtypes: set[torch.dtype]


class GradientSums:
    """Sums of the captured gradients of one backward, for parameters that were not checked so far."""

    def __init__(self, model: nn.Module, wanted: Iterable[str]) -> None:
        names = set(wanted)
        self._model = model
        self._waiting: dict[str, Tensor] = {n: p for n, p in named(model).items() if n in names}
        self._sharded = several_processes() and is_sharded(model)
        self._hooked = several_processes() and not self._sharded
        self._parallel = parallel_mesh(model)  # to be compared once
        self._sums: dict[str, Tensor] = {}
        self._dtypes: set[torch.dtype] = set()
        self._own: dict[str, Tensor] = {}
        self._hooks: dict[str, Any] = {}
        self._unreduced: set[str] | None = None  # what was fresh before a backward that is yet to be averaged
        self._exchanges = _EXCHANGES

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    @property
    def hooked(self) -> Set[str]:
        """Parameters with a hook of this check."""
        return self._hooks.keys()

    def clear(self) -> None:
        """Forget the sums of a backward, which may not have ended; keep those that processes have yet to average."""
        if self._unreduced is None:
            self._sums, self._dtypes, self._own = {}, set(), {}

    def spoiled(self) -> None:
        """Gradients that processes have yet to average were changed by others: do not compare them."""
        if self._unreduced is not None:
            self._unreduced = set()

    def again(self, parameters: Mapping[str, Tensor]) -> None:
        """Check some parameters once more."""
        if not self._sharded:
            self._waiting.update(parameters)

    def leave_out(self, parameters: Iterable[str]) -> None:
        """Do not wait for some parameters."""
        for name in parameters:
            self._waiting.pop(name, None)

    def fresh(self) -> set[str]:
        """Parameters to check of which the coming backward's gradient will be known."""
        if self._hooked:
            for name, p in self._waiting.items():
                if p.requires_grad and name not in self._hooks:
                    self._hooks[name] = p.register_hook(partial(self._keep, name))
            return set(self._waiting)
        if self._unreduced is not None:
            return self._unreduced
        grads = {n: p.grad for n, p in self._waiting.items()}
        return {n for n, g in grads.items() if g is None or not bool(_dense(g).any())}

    def _keep(self, name: str, grad: Tensor) -> None:
        self._own[name] = self._own.get(name, 0) + _dense(grad.detach())

    def add(self, name: str, leaf: Leaf) -> None:
        """Add the examples of a leaf."""
        if self._waiting.keys().isdisjoint(covers(leaf)):
            return
        self._dtypes.add(dtype_of(leaf))
        for parameter, total in stored(aggregate(GradTree({name: leaf}))).items():
            self._sums[parameter] = self._sums.get(parameter, 0) + total[0]

    def check(self, fresh: Iterable[Set[str]], averaging: Averaging | None = None) -> None:
        """Compare with `.grad`.

        Args:
            fresh: For each pass of the backward, the parameters whose gradient it makes is known.
            averaging: How `.grad` is averaged over processes that hold all of each parameter.

        Raises:
            RuntimeError: Naming the parameters that differ; of a sharded model, in all processes.
        """
        if self._parallel is not None:
            _check_alike(self._sums, self._parallel.get_group())
            self._parallel = None
        names = set(self._waiting).intersection(*fresh)
        if self._sharded:
            self._check_shards(names, averaging)
        else:
            self._judge([_Share(_measured(self._pairs(names)), self._dtypes)])

    def _pairs(self, names: set[str]) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """What was captured of each parameter, and what the backward has added to its `.grad`."""
        grads = self._own if self._hooked else {n: self._waiting[n].grad for n in names}
        held = {n: p for n, p in self._waiting.items() if n in names and p.requires_grad}
        return {n: (self._sums.get(n), grads.get(n)) for n, p in held.items() if not _used(p)}

    def _check_shards(self, names: set[str], averaging: Averaging | None) -> None:
        """Compare the mean over processes with this process's shards, where `.grad` is that mean."""
        if averaging is not None or not self._exchanges or no_mean(self._model):
            return
        self._unreduced = None if is_reduced(self._model) else names
        if self._unreduced is not None:
            return
        held = Processes().listed((names, set(self._sums)))
        agreed, captured = set.intersection(*(x for x, _ in held)), set().union(*(x for _, x in held))
        flat, pairs = pieces(self._model), dict[str, tuple[Tensor | None, Tensor | None]]()
        for name, grad in sorted(gradients(self._model).items()):
            if name in agreed:
                grad = _summed_up(grad) if isinstance(grad, DTensor) else grad
                pairs[name] = (
                    _mean_here(self._sums.get(name), grad, flat.get(id(self._waiting[name]))),
                    grad,
                )
        found = {n: x._replace(captured=n in captured) for n, x in _measured(pairs).items()}
        self._exchanges -= 1
        self._judge(Processes().listed(_Share(found, self._dtypes)))
        if not any(Processes().listed(bool(self._waiting))):
            self._exchanges = 0

    def _judge(self, shares: Sequence["_Share"]) -> None:
        """Raise what is wrong; what is right is checked no more."""
        every: dict[str, Found] = {}
        for share in shares:
            every |= {n: x.also(every.get(n, x)) for n, x in share.found.items()}
        found = {n: x for n, x in every.items() if x.finite}
        given = [n for n, x in found.items() if x.size > 0]
        missing = {
            n: "has a gradient but its layer was never captured" for n in given if not found[n].captured
        }
        seen = [n for n, x in found.items() if x.captured]
        dtypes = set[torch.dtype]().union(*(share.dtypes for share in shares))
        dtype = max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)
        distances = {n: (found[n].difference, found[n].size) for n in seen}
        raise_on(missing | mismatches(distances, dtype, torch.finfo(torch.float32).eps))
        for name in seen if given else ():
            self._waiting.pop(name, None)
            if name in self._hooks:
                self._hooks.pop(name).remove()


def _measured(pairs: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> dict[str, Found]:
    """Distances of what was captured from gradients, read from the device together."""
    names: list[str] = []
    values: list[Tensor] = []
    for name, (own, given) in pairs.items():
        grad = None if given is None else _dense(given)
        if own is None and grad is None:
            continue
        captured = torch.zeros_like(grad) if own is None and grad is not None else own
        assert captured is not None
        finite = captured.new_ones((), dtype=torch.bool) if grad is None else grad.isfinite().all()
        pair = distance(captured, grad) if captured.numel() else captured.new_zeros(2)
        names.append(name)
        values.append(torch.stack([*pair, finite]).double())
    return {
        name: Found(difference, size, bool(finite), pairs[name][0] is not None)
        for name, (difference, size, finite) in zip(names, fetched(values).tolist(), strict=True)
    }


def _summed_up(grad: DTensor) -> DTensor:
    """A gradient of which each process holds a summand (sequence parallel norms), added up."""
    settled = [Replicate() if isinstance(x, Partial) else x for x in grad.placements]
    return grad.redistribute(placements=settled)


def _mean_here(own: Tensor | None, grad: Tensor, cut: Piece | None) -> Tensor:
    """What this process holds of the mean over processes of what they captured; all of them must ask."""
    shape, dtype = grad.shape if cut is None else cut.shape, wide(grad.dtype)
    total = (
        torch.zeros(shape, dtype=dtype, device=grad.device) if own is None else own.to(dtype).reshape(shape)
    )
    if cut is not None:
        return part(summed(total, cut.averaged), cut) / prod(group.size() for group in cut.averaged)
    return mean_slice(total, grad) if isinstance(grad, DTensor) else total


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


def _used(p: Tensor) -> bool:
    """Whether a hook of the loop's has used the gradient within the backward (an optimizer that steps there)."""
    return p.grad is None and bool(getattr(p, "_post_accumulate_grad_hooks", None))


def _dense(g: Tensor) -> Tensor:
    """Entries of a gradient that this process holds."""
    return filled(g.to_local() if isinstance(g, DTensor) else g)
