"""The fingerprint of a model as it moves, the same however its parameters are spread over processes.

Every process reads the pieces it holds, and only if they were written to.  If parameters are sharded, two numbers a
tensor are then added up over the processes (`attrax.frontends.model.distributed` lists all such exchanges): at every
call of `Fingerprints.now`, whatever this process has seen, so that no process waits for one that has nothing to say.
"""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attrax.core.identity import Content, bit_sums, combined, counted
from attrax.frontends.model.sharding import Piece, canonical, is_flat, named, piece, pieces


def model_fingerprint(model: nn.Module) -> str:
    """Fingerprint of all parameters and buffers; of a sharded model, all processes must ask together."""
    return Fingerprints(model).now()


class Fingerprints:
    """The model's fingerprint as it moves; torch counts the writes to every tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._flat = pieces(model)
        self._held = named(model) if is_flat(model) else None
        self._writes: dict[str, tuple[int, int]] = {}
        self._local: dict[str, tuple[int, int]] = {}
        self._known: dict[str, Content] = {}

    def forget(self) -> None:
        """Read the values at the next call: something wrote to them uncounted (a fused optimizer does)."""
        self._writes = {}

    def now(self, parameters: Mapping[str, Tensor] | None = None, *, exact: bool = False) -> str:
        """The fingerprint at this moment.

        Args:
            parameters: The model's parameters by canonical name, where they were looked up already.
            exact: Read the values even if torch has counted no write (writes through `.data` are not counted).
        """
        buffers = {canonical(name): b for name, b in self._model.named_buffers()}
        state = {**(self._held or parameters or named(self._model)), **buffers}
        writes = {name: (id(x), _version(x)) for name, x in state.items()}
        parts = {name: self._flat.get(id(x)) or piece(x.detach()) for name, x in state.items()}
        stale = [name for name in state if exact or writes[name] != self._writes.get(name)]
        read = counted({n: bit_sums(parts[n].local, parts[n].place, parts[n].run) for n in stale})
        self._local = {n: read[n] if n in read else self._local[n] for n in state}
        self._writes = writes
        totals = _added_up(self._local, parts)
        self._known = {n: Content(x.dtype, parts[n].shape, totals[n]) for n, x in state.items()}
        return combined(self._known)

    def of(self, names: Collection[str]) -> str:
        """The fingerprint of some of the tensors, as of the last call of `now`."""
        return combined({n: content for n, content in self._known.items() if n in names})


def _added_up(sums: dict[str, tuple[int, int]], parts: dict[str, Piece]) -> dict[str, tuple[int, int]]:
    """The sums of whole tensors, from those of this process's pieces and of the others'."""
    whole = dict(sums)
    for groups in dict.fromkeys(part.groups for part in parts.values() if part.groups):
        names = sorted(n for n, part in parts.items() if part.groups == groups)
        device = parts[names[0]].local.device
        total = torch.tensor([sums[n] for n in names], device=device)
        for group in groups:
            dist.all_reduce(total, group=group)
        whole |= {n: (int(row[0]), int(row[1])) for n, row in zip(names, total.tolist(), strict=True)}
    return whole


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
