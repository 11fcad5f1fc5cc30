"""Registration of attrax values as torch pytrees.

Every value of `attrax.core` is a frozen dataclass whose tensor fields are pytree children and whose remaining fields
are static context, so `torch.func.vmap`, `jvp`, `tree_map` and `torch.compile` see through it.  This is the only file
that touches `torch.utils._pytree`, which torch still keeps private.

Rebuilding bypasses `__init__`: transforms put tensors of other ranks, shapes or plain objects into the fields, which
a validating constructor would refuse.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

T = TypeVar("T")


def register_value(cls: type[T], *, arrays: tuple[str, ...], static: tuple[str, ...] = ()) -> type[T]:
    """Register a frozen dataclass as a pytree node named ``attrax.<ClassName>``.

    Args:
        cls: The dataclass; its fields are `arrays` then `static`.
        arrays: Names of the child fields (tensors, or containers of values).
        static: Names of the fields kept as hashable context.

    Returns:
        `cls`, unchanged.
    """

    def flatten(value: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in arrays], tuple(getattr(value, name) for name in static)

    def flatten_with_keys(value: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(value)
        keys = [pytree.GetAttrKey(name) for name in arrays]
        return list(zip(keys, children, strict=True)), context

    def unflatten(children: Iterable[Any], context: Any) -> T:
        value = object.__new__(cls)
        for name, child in zip(arrays + static, (*children, *context), strict=True):
            object.__setattr__(value, name, child)
        return value

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"attrax.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


def tree_map(function: Any, tree: Any) -> Any:
    """Apply `function` to every tensor of a value, keeping its static fields.

    A packed sequence is passed to `function` whole: its rows are no axis of examples, and it cannot hold other objects.

    >>> import torch
    >>> from attrax.core import diagonal
    >>> leaf = diagonal("norm.weight", torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    >>> tree_map(lambda x: 2 * x, leaf).g.unique()
    tensor([2.])
    """
    return pytree.tree_map(function, tree, is_leaf=lambda x: isinstance(x, PackedSequence))
