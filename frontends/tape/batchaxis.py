"""How many examples a call of a model has: as many as the first axis of its first tensor is long, as a rule.

A first tensor of one row may be one that all examples share (a diffusion time [1], positions [1, T]) or a batch of one
example beside others of other lengths (patches, cache positions).  The model is asked then: the examples are along the
first axis of what it returns.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from attrax.frontends.tape.asking import evaluated
from attrax.frontends.tape.layout import copied
from attrax.frontends.tape.passes import Pass, Repeat, flatten


class BatchAxis:
    """Counts the examples of calls.

    Args:
        model: The model.
        aside: Context in which the model runs without being listened to.
    """

    def __init__(
        self, model: nn.Module, aside: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._model, self._aside = model, aside
        self._leading: dict[nn.Module, str] = {}

    def rows(self, module: nn.Module, inputs: Mapping[str, Any], repeat: Repeat | None) -> int | None:
        """Number of rows of a call.

        Args:
            module: The module that was called.
            inputs: Its inputs by name.
            repeat: Runs the call once more on changed arguments; None where that cannot be.

        Raises:
            RuntimeError: If the inputs have several lengths, and the output none of them.
        """
        lengths = _lengths(inputs)
        if not lengths:
            return None
        first = next(iter(lengths.values()))
        if self._leading.get(module) in lengths:
            return lengths[self._leading[module]]
        if first > 1 or set(lengths.values()) == {1} or repeat is None:
            return first
        with self._aside(), evaluated(self._model):
            found = _leading(repeat(copied))
        name = next((name for name, length in lengths.items() if length == found), None)
        if name is None:
            raise RuntimeError(
                f"capture: {type(module).__name__} was called with tensors whose first axes are {lengths} long, and "
                f"returned {found or 'no tensor with an axis'}, so it is unknown how many examples there are. Pass the "
                "tensor that holds the examples first, or return one row an example."
            )
        self._leading[module] = name
        return lengths[name]

    def check(self, run: Pass, output: Any) -> None:
        """Refuse a pass that was taken for one example without being asked, and returned several.

        Raises:
            RuntimeError: Saying what to do.
        """
        lengths, found = _lengths(run.inputs), _leading(output)
        if run.rows == 1 and found is not None and found > 1 and found in lengths.values():
            raise RuntimeError(
                f"capture: a call whose first tensor has one row was taken for one example, and returned {found}. Its "
                f"inputs' first axes are {lengths} long. Pass the tensor that holds the examples first."
            )


def _lengths(inputs: Mapping[str, Any]) -> dict[str, int]:
    return {name: x.shape[0] for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim}


def _leading(output: Any) -> int | None:
    """Length of the first axis of the first tensor that has one."""
    tensors = (x for x in flatten((output,)).values() if isinstance(x, Tensor) and x.ndim)
    return next((x.shape[0] for x in tensors), None)
