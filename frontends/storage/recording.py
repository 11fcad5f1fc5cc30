"""A block on its way to the disk: on the host, in its smaller form, cast, and known to be one that can be stored."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attrax.core import Block, Examples, GradTree, Leaf, compact, tree_map
from attrax.core.algebra import first_rows
from attrax.core.leaves import Diagonal, Factorized, Grouped, Sum
from attrax.core.packed import row_lengths
from attrax.core.schema import ARRAYS, Form, form_of
from attrax.frontends.storage.h5types import TYPES

Columns: TypeAlias = Callable[[Examples], Mapping[str, Sequence[str] | Sequence[int | float] | Tensor]]
KeepFactored: TypeAlias = bool | Callable[[str, Leaf], bool]

Column: TypeAlias = Tensor | tuple[str, ...]

RESERVED = ("id", "step", "micro", "weight", "tokens")


@dataclass(frozen=True, eq=False)
class Record:
    """A block on its way to the disk.

    Attributes:
        examples: Its examples.
        leaves: Its leaves, on the CPU, by name.
        columns: Further columns.
    """

    examples: Examples
    leaves: Mapping[str, Leaf]
    columns: Mapping[str, Column]

    @cached_property
    def size(self) -> int:
        """Bytes of its leaves."""
        return sum(x.nbytes for leaf in self.leaves.values() for x in arrays_of(leaf))

    @cached_property
    def forms(self) -> tuple[tuple[str, Form], ...]:
        """Names and forms of its leaves: what the blocks of a slab share."""
        return tuple((name, form_of(leaf)) for name, leaf in self.leaves.items())

    def kept(self) -> "Record":
        """With memory of its own."""
        return replace(self, leaves=tree_map(_copied, self.leaves))


def record_of(
    block: Block,
    dtype: torch.dtype | None = None,
    keep_factored: KeepFactored = False,
    columns: Columns | None = None,
) -> Record:
    """A block on the host, compacted and cast; it shares the memory of the block where that is there already.

    Raises:
        ValueError: If it cannot be stored.
    """
    grads = block.grads if keep_factored is True else _compacted(block.grads, keep_factored)
    examples = _on_host(block.examples)
    grads = (
        _on_host(grads)
        if any(x.device.type != "cpu" for leaf in grads.leaves for x in arrays_of(leaf))
        else grads
    )
    for name, values in (("weight", examples.weight), ("tokens", examples.tokens)):
        if values is not None and values.shape != (len(examples),):
            raise ValueError(
                f"store: {name} has shape {tuple(values.shape)}, the block has {len(examples)} examples."
            )
    leaves = {name: _cast(name, leaf, dtype) for name, leaf in zip(grads.names, grads.leaves, strict=True)}
    for name, leaf in leaves.items():
        _check(name, leaf)
    values = _columns(examples, columns)
    texts = [v for column in values.values() if isinstance(column, tuple) for v in column]
    _encodable([*examples.ids, examples.fingerprint, *grads, *values, *texts])
    return Record(tree_map(_copied, examples), leaves, values)


def _compacted(grads: GradTree, keep: KeepFactored) -> GradTree:
    """Every leaf in its smaller exact form; lengths of all leaves on a GPU are read in one transfer."""
    rows = {
        name: leaf
        for name, leaf in zip(grads.names, grads.leaves, strict=True)
        if isinstance(leaf, Factorized | Diagonal | Grouped) and leaf.calls == 1
    }
    longest = _on_host(
        {
            name: _longest(leaf.g) if leaf.g.is_cuda else row_lengths(leaf).max(initial=0)
            for name, leaf in rows.items()
        }
    )

    def shrink(name: str, leaf: Leaf) -> Leaf:
        if callable(keep) and keep(name, leaf):
            return leaf
        length = max(1, int(longest[name])) if name in longest else None
        return compact(leaf if length is None else first_rows(leaf, length))

    return grads.map(shrink)


def _longest(g: Tensor) -> Tensor:
    """Number of rows up to the last one that is not zero for every example."""
    used = (g != 0).any(-1).flatten(0, -2).any(0)
    last = used * torch.arange(1, len(used) + 1, device=g.device)
    return last.amax() if len(used) else last.sum()


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _on_host(value: Any) -> Any:
    """Copy to the host what lies on a GPU, all of it before waiting once."""
    devices: set[torch.device] = set()

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_cuda:
            devices.add(x.device)
        return x.detach().to("cpu", non_blocking=x.is_cuda)

    moved = tree_map(move, value)
    for device in devices:
        torch.cuda.synchronize(device)
    return moved


def arrays_of(leaf: Leaf) -> list[Tensor]:
    """The arrays of a leaf and of its uses."""
    own: list[Tensor] = [getattr(leaf, name) for name in ARRAYS[type(leaf).__name__]]
    return [x for use in leaf.uses for x in arrays_of(use)] if isinstance(leaf, Sum) else own


def _cast(name: str, leaf: Leaf, dtype: torch.dtype | None) -> Leaf:
    if dtype is None:
        return leaf

    def convert(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.dtype == dtype:
            return x
        small = x.to(dtype)
        if bool((small.isinf() & x.isfinite()).any()):
            raise ValueError(
                f"store: leaf '{name}': {dtype} holds numbers up to {torch.finfo(dtype).max:.3g}, the gradients reach "
                f"{x.abs().max():.3g}. Store them as bfloat16, float32 or as they come."
            )
        return small

    return tree_map(convert, leaf)


def _check(name: str, leaf: Leaf) -> None:
    for x in arrays_of(leaf):
        if x.dtype not in TYPES:
            known = ", ".join(str(dtype) for dtype in TYPES)
            raise ValueError(
                f"store: leaf '{name}' is {x.dtype}, which cannot be stored; pass dtype=, one of {known}."
            )
    if "\0" in name:
        raise ValueError(f"store: the leaf name {name!r} holds a zero byte.")


def _columns(examples: Examples, columns: Columns | None) -> dict[str, Tensor | tuple[str, ...]]:
    found = {n: _column(n, values) for n, values in (columns(examples) if columns else {}).items()}
    for name, values in found.items():
        if name in RESERVED:
            raise ValueError(f"store: column {name!r}: every store has one; give yours another name.")
        known = isinstance(values, tuple) or values.dtype in TYPES
        if not known or len(values) != len(examples) or "\0" in name:
            raise ValueError(
                f"store: column {name!r} holds {len(values)} values for {len(examples)} examples; give one text or one "
                "number an example."
            )
    return found


def _column(name: str, values: Sequence[str] | Sequence[int | float] | Tensor) -> Tensor | tuple[str, ...]:
    if isinstance(values, Tensor):
        return values.cpu()
    texts = tuple(v for v in values if isinstance(v, str))
    if len(texts) == len(values):
        return texts
    try:
        return torch.from_numpy(np.asarray(values, np.float64))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"store: column {name!r} holds {sorted({type(v).__name__ for v in values})}; give one text or one number "
            "an example, all texts or all numbers."
        ) from error


def _encodable(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"store: {text!r} is not valid Unicode and cannot be stored: {error}."
            ) from error
