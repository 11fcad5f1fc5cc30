"""A store as numpy arrays and as a pandas table."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attrax.core import GradTree, Leaf, materialize_leaf
from attrax.core import stored as by_parameter
from attrax.frontends.data.records import needed

if TYPE_CHECKING:
    from attrax.frontends.storage.store import Store


def arrays(source: "Store") -> dict[str, np.ndarray]:
    """See `Store.to_numpy`."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for _, blocks in source.map(lambda name, leaf, _: _built(name, leaf)):
        for block in blocks.values():
            for name, x in block.items():
                found[name].append(x)
    short = [name for name, pieces in found.items() if sum(map(len, pieces)) != len(source)]
    if short:
        raise ValueError(
            f"to_numpy: {short[:5]} are not recorded for all {len(source)} rows. Cut the store with select or at."
        )
    return {name: torch.cat(pieces).numpy() for name, pieces in found.items()}


def _built(name: str, leaf: Leaf) -> dict[str, torch.Tensor]:
    tensors = {name: materialize_leaf(leaf).w} if leaf.basis else by_parameter(GradTree({name: leaf}))
    return {n: x.float().cpu() if x.dtype == torch.bfloat16 else x.cpu() for n, x in tensors.items()}


def frame(source: "Store") -> Any:
    """See `Store.to_pandas`."""
    pandas = needed("pandas", "report", "to_pandas")
    known = [
        (e.step, e.micro, *row)
        for e, _ in source.map(lambda *_: None)
        for row in zip(_values(e.weight, len(e)), _values(e.tokens, len(e)), strict=True)
    ]
    columns: dict[str, Any] = {"id": list(source.ids)}
    for name, values in zip(("step", "micro", "weight", "tokens"), zip(*known, strict=True), strict=True):
        columns[name] = list(values)
    for name in source.columns:
        values = source.column(name)
        columns[name] = values.numpy() if isinstance(values, torch.Tensor) else list(values)
    return pandas.DataFrame(
        columns | {name: list(x.reshape(len(x), -1)) for name, x in arrays(source).items()}
    )


def _values(x: torch.Tensor | None, rows: int) -> list[Any]:
    return [None] * rows if x is None else x.tolist()
