"""Small random leaves, trees and sources of every kind, and the strategies that size them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import config
from torch import Generator, Tensor

from attrax.core import (
    Block,
    Blocks,
    Diagonal,
    Examples,
    Factorized,
    GradTree,
    Grouped,
    Leaf,
    Lookup,
    Materialized,
    Part,
    Sum,
    diagonal,
    factorized,
    grouped,
    lookup,
    materialized,
    take,
)
from attrax.core.products import examples_in

from .dense import gradient

Rows: TypeAlias = Factorized | Lookup | Diagonal | Grouped
Builder: TypeAlias = Callable[[Generator, int, int, int, int], Any]


def generator(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def normal(gen: Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)


def linear(gen: Generator, B: int, T: int, Ni: int, No: int) -> Factorized:
    return factorized("fc.weight", normal(gen, B, T, Ni), normal(gen, B, T, No))


def linear_bias(gen: Generator, B: int, T: int, Ni: int, No: int) -> Factorized:
    return factorized("fc.weight", normal(gen, B, T, Ni), normal(gen, B, T, No), bias="fc.bias")


def conv1d(gen: Generator, B: int, T: int, Ni: int, No: int) -> Factorized:
    a, g = normal(gen, B, T, Ni), normal(gen, B, T, No)
    return factorized("c_fc.weight", a, g, bias="c_fc.bias", transposed=True)


def stacked(gen: Generator, B: int, T: int, Ni: int, No: int) -> Factorized:
    parts = [Part("q.weight", No), Part("k.weight", 1), Part("v.weight", No + 1)]
    return factorized(parts, normal(gen, B, T, Ni), normal(gen, B, T, 2 * No + 2))


def stacked_bias(gen: Generator, B: int, T: int, Ni: int, No: int) -> Factorized:
    parts = [Part("q.weight", No, bias="q.bias"), Part("k.weight", 2, bias="k.bias", transposed=True)]
    return factorized(parts, normal(gen, B, T, Ni), normal(gen, B, T, No + 2), bias=True)


def called_twice(gen: Generator, B: int, T: int, Ni: int, No: int) -> Factorized:
    return replace(linear(gen, B, 2 * T, Ni, No), calls=2)


def embedding(gen: Generator, B: int, T: int, Ni: int, No: int) -> Lookup:
    ids = torch.randint(0, No + 1, (B, T), generator=gen)
    return lookup("emb.weight", ids, normal(gen, B, T, Ni), rows=No + 1)


def norm(gen: Generator, B: int, T: int, Ni: int, No: int) -> Diagonal:
    return diagonal("ln.weight", normal(gen, B, T, Ni), normal(gen, B, T, Ni))


def bias(gen: Generator, B: int, T: int, Ni: int, No: int) -> Diagonal:
    return diagonal("ln.bias", torch.ones(B, T, 1, dtype=torch.float64), normal(gen, B, T, Ni))


def groups(gen: Generator, B: int, T: int, Ni: int, No: int) -> Grouped:
    return grouped("groups.weight", normal(gen, B, 3, T, Ni), normal(gen, B, 3, T, No))


def built_matrix(gen: Generator, B: int, T: int, Ni: int, No: int) -> Materialized:
    return materialized("m.weight", normal(gen, B, No, Ni))


def built_vector(gen: Generator, B: int, T: int, Ni: int, No: int) -> Materialized:
    return materialized("scale", normal(gen, B, Ni))


def built_tensor(gen: Generator, B: int, T: int, Ni: int, No: int) -> Materialized:
    return materialized("kernel", normal(gen, B, No, 2, Ni))


def tied(gen: Generator, B: int, T: int, Ni: int, No: int) -> Sum:
    """An embedding of No + 1 entries that is also the output head, which sees one position more."""
    first = embedding(gen, B, T, Ni, No)
    second = factorized(first.parts, normal(gen, B, T + 1, Ni), normal(gen, B, T + 1, No + 1))
    return Sum((first, second), first.parts)


def mixed(gen: Generator, B: int, T: int, Ni: int, No: int) -> Sum:
    """One matrix used by a layer and, elsewhere, in a way that only gives its gradient."""
    first = linear(gen, B, T, Ni, No)
    return Sum((first, replace(built_matrix(gen, B, T, Ni, No), parts=first.parts)), first.parts)


FACTORED: dict[str, Builder] = {
    f.__name__: f
    for f in (linear, linear_bias, conv1d, stacked, stacked_bias, called_twice, embedding, norm, bias, groups)
}
BUILT: dict[str, Builder] = {f.__name__: f for f in (built_matrix, built_vector, built_tensor)}
SUMS: dict[str, Builder] = {f.__name__: f for f in (tied, mixed)}
KINDS = FACTORED | BUILT | SUMS
LINEAR = {name: f for name, f in FACTORED.items() if f not in (embedding, norm, bias, groups)}


@dataclass(frozen=True)
class Sizes:
    """Two sides with B and Q examples of T and S rows, widths Ni and No, and a seed."""

    B: int
    Q: int
    T: int
    S: int
    Ni: int
    No: int
    seed: int = 0

    def pair(self, build: Builder) -> tuple[Any, Any]:
        gen = generator(self.seed)
        return build(gen, self.B, self.T, self.Ni, self.No), build(gen, self.Q, self.S, self.Ni, self.No)

    def one(self, build: Builder) -> Any:
        return self.pair(build)[0]

    def trees(self, builders: dict[str, Builder] = KINDS) -> tuple[GradTree, GradTree]:
        """Both sides with one leaf of every kind."""
        pairs = {
            name: replace(self, seed=self.seed + i).pair(f) for i, (name, f) in enumerate(builders.items())
        }
        train, query = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
        return GradTree(train), GradTree(query)


SHAPES = [
    *[Sizes(3, 2, 4, 3, 3, 4), Sizes(1, 1, 1, 1, 1, 1), Sizes(2, 3, 1, 5, 4, 2)],
    *[Sizes(4, 1, 2, 2, 1, 3), Sizes(1, 4, 6, 1, 5, 1), Sizes(2, 2, 3, 3, 2, 2)],
]
EMPTY = [
    *[Sizes(0, 2, 3, 1, 2, 3), Sizes(2, 0, 1, 3, 3, 2), Sizes(2, 3, 0, 2, 3, 4)],
    *[Sizes(3, 2, 2, 0, 1, 1), Sizes(0, 0, 0, 0, 2, 2)],
]
"""A few shapes, so that their plans are shared between examples and tests; the numbers are drawn anew."""


def sizes(*, empty: bool = False) -> st.SearchStrategy[Sizes]:
    """Sizes, with `empty` also of sides without examples or rows."""
    shapes = st.sampled_from(SHAPES + EMPTY if empty else SHAPES)
    return st.builds(lambda shape, seed: replace(shape, seed=seed), shapes, st.integers(0, 2**31))


def metric_for(leaf: Leaf, seed: int = 0) -> Tensor:
    """A positive diagonal metric in the leaf's coordinates."""
    values = normal(generator(seed), *gradient(leaf).shape[1:]).abs()
    if isinstance(leaf, Grouped) or (isinstance(leaf, Materialized) and leaf.w.ndim == 4):
        return values.unflatten(0, (leaf.w if isinstance(leaf, Materialized) else leaf.g).shape[1:2] + (-1,))
    return values.squeeze(0) if values.shape[0] == 1 else values


SMALL = Sizes(B=3, Q=2, T=4, S=3, Ni=3, No=4, seed=7)
"""One ordinary case."""


def tree(**leaves: Leaf) -> GradTree:
    return GradTree(leaves)


def named(count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(f"x{first + i}" for i in range(count))


def block(grads: GradTree, ids: tuple[str, ...], **about: Any) -> Block:
    """A block of summed losses: every example weighs 1."""
    return Block(grads, Examples(ids, **{"weight": torch.ones(len(ids)), "fingerprint": "p0", **about}))


def source(*trees: GradTree, **about: Any) -> Blocks:
    """One block a tree, examples numbered through."""
    blocks: list[Block] = []
    for grads in trees:
        first = sum(len(b.examples) for b in blocks)
        blocks.append(block(grads, named(examples_in(grads), first), **about))
    return Blocks(blocks)


def cut(grads: GradTree, *lengths: int) -> list[GradTree]:
    """The examples of a tree in consecutive groups of the given lengths."""
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    return [
        grads.map(lambda _, leaf, stop=end, size=size: take(leaf, slice(stop - size, stop)))
        for end, size in zip(ends, lengths, strict=True)
    ]


@contextmanager
def unchecked() -> Iterator[None]:
    """Switch off the run-time type checker, to see the errors of a caller who has none."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


@contextmanager
def refused(*phrases: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """The block raises `error`, whose message holds every phrase: operation, leaf, remedy."""
    with unchecked(), pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    for phrase in phrases:
        assert phrase in message, f"{phrase!r} is not in {message!r}"


def law(examples: int = 25, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """`given`, without the run-time type checker, whose cost would leave time for few examples."""

    def decorate(test: Callable[..., None]) -> Any:
        @settings(max_examples=examples)
        @given(**strategies)
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            with unchecked():
                test(*args, **kwargs)

        return run

    return decorate
