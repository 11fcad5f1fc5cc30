"""The fingerprint of a model, computed anew only when its parameters or buffers were written to."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attrax.core import fingerprint


def model_fingerprint(model: nn.Module) -> str:
    """Fingerprint of all parameters and buffers; sharded ones are gathered, which all processes must do together."""
    return fingerprint(dict(model.named_parameters()) | dict(model.named_buffers()), read=whole)


def whole(x: Tensor) -> Tensor:
    """The values of a tensor, gathered from all processes if it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


class Fingerprints:
    """The model's fingerprint as it moves; torch counts the writes to every tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: tuple[tuple[tuple[int, int], ...], str] | None = None

    def forget(self) -> None:
        """Read the values at the next call: something wrote to them uncounted (a fused optimizer does)."""
        self._known = None

    def now(self, *, exact: bool = False) -> str:
        """The fingerprint at this moment.

        Args:
            exact: Read the values even if torch has counted no write (writes through `.data` are not counted).
        """
        state = (*self._model.parameters(), *self._model.buffers())
        writes = tuple((id(x), _writes(x)) for x in state)
        if exact or self._known is None or self._known[0] != writes:
            self._known = (writes, model_fingerprint(self._model))
        return self._known[1]


def _writes(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
