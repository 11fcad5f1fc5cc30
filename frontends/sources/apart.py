"""Parameters that cannot be captured at their layers: autograd of one example at a time.

A weight that is used outside the layer that owns it, a table that no example axis reaches (relative positions), a loss
with a penalty on weights: exact for all of them, at the price of one forward and backward an example.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from attrax.core import Examples
from attrax.core.source import Visit
from attrax.frontends.model.rows import Batch, pick
from attrax.frontends.model.sharding import named
from attrax.frontends.sources.verify import Misread, autograd_gradients, verify_gradients
from attrax.frontends.tape.placing import LayoutError

if TYPE_CHECKING:
    from attrax.frontends.sources.live import Live

T = TypeVar("T")


def settle(source: "Live", batch: Mapping[str, Any]) -> bool:
    """Verify a source on a batch; what its layers get wrong is put apart, with a warning.

    Returns:
        Whether an example with a gradient was found.

    Raises:
        RuntimeError: If the source is strict, or nothing helps: an example's gradient depends on other examples.
    """
    while source.tapped:
        try:
            return verify_gradients(source, batch)
        except Misread as error:
            found = dict.fromkeys(error.parameters, "its layer does not account for it")
            _put_apart(source, found, error)
        except LayoutError as error:
            found = dict.fromkeys(error.parameters, "no example axis in the calls of its layer")
            _put_apart(source, found, error)
    return True


def run_apart(source: "Live", batch: Batch, visit: Visit[T], mark: str) -> tuple[Examples, dict[str, T]]:
    """Run a batch; layers whose examples lie nowhere in this one are put apart, before any leaf is delivered.

    Raises:
        LayoutError: If the source is strict.
    """
    while True:
        try:
            return source.run(batch, visit, mark)
        except LayoutError as error:
            found = dict.fromkeys(error.parameters, "no example axis in some calls of its layer")
            _put_apart(source, found, error)


def _put_apart(source: "Live", found: Mapping[str, str], error: RuntimeError) -> None:
    new = {name: why for name, why in found.items() if name in source.tapped}
    if source.strict or not new:
        raise error
    source.apart.update(new)
    names = sorted(new)
    shown = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    warnings.warn(
        f"live: {len(names)} parameters ({shown}) are differentiated one example at a time, which is exact but slow: "
        f"{new[names[0]]}. To be fast, exclude them or recompute the module around them (recompute=). strict=True "
        "makes this an error.",
        RuntimeWarning,
        stacklevel=6,
    )


def gradients_apart(source: "Live", batch: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
    """Gradients [B, ...] of some parameters, by autograd of each example by itself."""
    parameters = {n: p for n, p in named(source.model).items() if n in names}
    singles = (pick(batch, torch.tensor([i])) for i in range(len(batch["example_ids"])))
    rows = [autograd_gradients(source, single, names) for single in singles]
    return {
        n: torch.stack([row[n] if n in row else torch.zeros_like(p) for row in rows])
        for n, p in parameters.items()
    }
