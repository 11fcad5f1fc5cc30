"""The functional source: per-example gradients by `torch.func.vmap(grad)`, no hooks and no rules.

Any parameter of any model that `torch.func` can trace, at a memory cost of B copies of the parameters: for toy models
and as the oracle of every other source.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from attrax.core import Examples, materialized
from attrax.core.source import Visit
from attrax.frontends.model.fingerprints import Fingerprints
from attrax.frontends.model.losses import Loss
from attrax.frontends.model.modes import check_mode
from attrax.frontends.model.parameters import replaced, slots
from attrax.frontends.model.rows import for_loss, pick, with_ids
from attrax.frontends.model.sharding import named
from attrax.frontends.tape.tensor_parallel import refuse_parallel

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Functional:
    """Per-example gradients of every trainable parameter; made by `functional`."""

    model: nn.Module
    data: Iterable[Mapping[str, Any]]
    loss: Loss
    how: Literal["vmap", "loop"] = "vmap"

    @property
    def reiterable(self) -> bool:
        """True unless `data` is a one-shot iterator."""
        return not isinstance(self.data, Iterator)

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `attrax.core.source.Source.map`; leaves are Materialized, in the parameters' stored layout."""
        check_mode(self.model)
        marks = Fingerprints(self.model)
        for raw in self.data:
            batch = with_ids(raw)
            tokens = getattr(self.loss, "tokens", None)
            B = len(batch["example_ids"])
            if not B:
                continue
            counts = tokens(batch).cpu() if tokens else None
            weight = torch.ones(B, dtype=torch.float64)
            examples = Examples(tuple(batch["example_ids"]), 0, 0, weight, counts, marks.now())
            grads = self._vmapped(batch) if self.how == "vmap" else self._looped(batch)
            yield examples, {n: visit(n, materialized(n, w), examples) for n, w in grads.items()}

    def _parameters(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in named(self.model).items() if p.requires_grad}

    def _at(self, parameters: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        own = named(self.model)
        return replaced(slots(self.model, {own[n]: p for n, p in parameters.items()}))

    def _vmapped(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        B = len(batch["example_ids"])
        mapped = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim and v.shape[0] == B}
        fixed = {k: v for k, v in batch.items() if k not in mapped and k != "example_ids"}

        def one(parameters: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
            single = {k: v.unsqueeze(0) for k, v in row.items()}
            with self._at(parameters):
                return self.loss(self.model, fixed | single).sum()

        return vmap(grad(one), in_dims=(None, 0))(self._parameters(), mapped)

    def _looped(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        rows = []
        for i in range(len(batch["example_ids"])):
            single = pick(batch, torch.tensor([i]))

            def one(parameters: dict[str, Tensor], single: Mapping[str, Any] = single) -> Tensor:
                with self._at(parameters):
                    return self.loss(self.model, for_loss(single, self.loss)).sum()

            rows.append(grad(one)(self._parameters()))
        return {n: torch.stack([row[n] for row in rows]) for n in rows[0]}


def functional(
    model: nn.Module,
    data: Iterable[Mapping[str, Any]],
    loss: Loss,
    *,
    how: Literal["vmap", "loop"] = "vmap",
) -> Functional:
    """Per-example gradients by `torch.func`, one Materialized leaf a parameter.

    Args:
        model: The model, in eval mode; it is not changed.
        data: Batches, as for `live`.
        loss: ``(model, batch) -> [B]`` summed loss per example; `model` is called, nothing else.
        how: "vmap" over the batch, or "loop" over examples for models vmap cannot trace.

    Returns:
        The source.

    Raises:
        ValueError: If `how` is unknown.

    >>> from attrax.core import collect
    >>> from attrax.frontends.model.losses import classification
    >>> net = nn.Linear(2, 3).eval()
    >>> source = functional(net, [{"x": torch.ones(4, 2), "y": torch.zeros(4, dtype=torch.long)}], classification())
    >>> collect(source).grads["weight"].w.shape
    torch.Size([4, 3, 2])
    """
    if how not in ("vmap", "loop"):
        raise ValueError(f"functional: how: got {how!r}; expected 'vmap' or 'loop'.")
    refuse_parallel(model, "functional")
    return Functional(model, data, loss, how)
