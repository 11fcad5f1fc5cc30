"""Sources of gradients, transforms on leaves and reducers over a source.

A **source** yields per-example gradients block by block.  Its only operation is `map`: run a function on every leaf
and collect what it returns.  Live sources run the function inside the backward hooks, where the leaf is made, and free
the factors at once; stores run it on leaves read from disk.  Methods are written with `fold`, `row_sums` and `collect`
on top of it and therefore run on any source.

A **transform** is a pure ``(name, leaf) -> leaf``; None drops the leaf.  A **reducer** is ``(state, leaf) -> state``.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from attrax.core.algebra import concat, scale_examples, zeros_like
from attrax.core.leaves import Leaf, covers
from attrax.core.ranks import ALONE, Ranks
from attrax.core.reduce import materialize_leaf
from attrax.core.tree import Block, Examples, GradTree, Target, concat_examples, target_scale

T = TypeVar("T")
S = TypeVar("S")
Transform: TypeAlias = Callable[[str, Leaf], Leaf | None]
Visit: TypeAlias = Callable[[str, Leaf, Examples], T]


@runtime_checkable
class Source(Protocol):
    """Anything that yields per-example gradients.

    `reiterable` says whether `map` may be called again with the same blocks in the same order (K-FAC needs one pass,
    EK-FAC two and scoring one more).
    """

    @property
    def reiterable(self) -> bool:
        """Whether `map` may be called more than once."""
        ...

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """Run ``visit(name, leaf, examples)`` on every leaf; yield each block's examples and results by name."""
        ...


@dataclass(frozen=True, eq=False)
class Blocks:
    """A source over blocks held in memory.

    >>> from attrax.core import GradTree, diagonal
    >>> grads = GradTree({"b": diagonal("b", torch.ones(1, 1, 1), torch.ones(1, 1, 3))})
    >>> source = Blocks([Block(grads, Examples(("x",)))])
    >>> [examples.ids for examples, _ in source.map(lambda name, leaf, examples: None)]
    [('x',)]
    """

    blocks: Iterable[Block] = field(repr=False)

    @property
    def reiterable(self) -> bool:
        """True for a sequence of blocks, False for a generator."""
        return not isinstance(self.blocks, Iterator)

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `Source.map`."""
        for block in self.blocks:
            yield block.examples, {n: visit(n, leaf, block.examples) for n, leaf in block.grads.items()}


@dataclass(frozen=True, eq=False)
class Transformed:
    """A source seen through a transform; made by `transformed`."""

    source: Source
    transform: Callable[[str, Leaf, Examples], Leaf | None]

    @property
    def reiterable(self) -> bool:
        """As the underlying source."""
        return self.source.reiterable

    def map(self, visit: Visit[T]) -> Iterator[tuple[Examples, Mapping[str, T]]]:
        """See `Source.map`; dropped leaves are not visited."""
        missing = object()

        def run(name: str, leaf: Leaf, examples: Examples) -> T | object:
            changed = self.transform(name, leaf, examples)
            return missing if changed is None else visit(name, changed, examples)

        for examples, values in self.source.map(run):
            yield examples, {n: v for n, v in values.items() if v is not missing}  # type: ignore[misc]


def transformed(source: Source, transform: Transform) -> Source:
    """The source whose leaves pass through `transform`; None drops a leaf."""
    return Transformed(source, lambda name, leaf, _: transform(name, leaf))


def targeted(source: Source, target: Target) -> Source:
    """The source whose gradients are those of the declared target; see `attrax.core.tree.target_scale`."""
    return Transformed(source, lambda _, leaf, examples: scale_examples(leaf, target_scale(examples, target)))


@runtime_checkable
class Resampling(Source, Protocol):
    """A source that can replace the labels of its data by samples from the model."""

    def resample(self, seed: int) -> Source:
        """The source of the same inputs with labels drawn from the model's own distribution."""
        ...


def resampled(source: Source, seed: int, operation: str) -> Source:
    """The source with model-sampled labels (sampled Fisher).

    Raises:
        ValueError: If the source has no model to sample from.
    """
    if not isinstance(source, Resampling):
        raise ValueError(
            f"{operation}: fisher='sampled' draws labels from the model, which {type(source).__name__} does not hold. "
            "Fit on a live source, or use fisher='empirical'."
        )
    return source.resample(seed)


def chain(*transforms: Transform) -> Transform:
    """Compose transforms, first one first.

    >>> from attrax.core import diagonal
    >>> drop = chain(lambda n, x: x, lambda n, x: None)
    >>> drop("b", diagonal("b", torch.ones(1, 1, 1), torch.ones(1, 1, 3))) is None
    True
    """

    def run(name: str, leaf: Leaf) -> Leaf | None:
        current: Leaf | None = leaf
        for transform in transforms:
            if current is None:
                return None
            current = transform(name, current)
        return current

    return run


def selected(keep: Callable[[str, Leaf], bool]) -> Transform:
    """Transform that keeps the leaves for which ``keep(name, leaf)`` holds."""
    return lambda name, leaf: leaf if keep(name, leaf) else None


def one_fingerprint(seen: str | None, examples: Examples, operation: str) -> str:
    """Check that a block was taken at the parameters seen so far; returns its fingerprint.

    Raises:
        ValueError: If the parameters moved.
    """
    if seen is not None and seen != examples.fingerprint:
        raise ValueError(
            f"{operation}: gradients were taken at different parameters (fingerprint {seen!r}, then "
            f"{examples.fingerprint!r} at step {examples.step}). Curvature and scores need fixed parameters: capture "
            "again after training, or use a trajectory method such as tracin."
        )
    return examples.fingerprint


def several_passes(source: Source, operation: str) -> None:
    """Check that a source can be read more than once.

    Raises:
        ValueError: If it cannot.
    """
    if not source.reiterable:
        raise ValueError(
            f"{operation}: needs several passes over the data, but this source can be read once. Use a store."
        )


def fold(
    reducer: Callable[[S | None, Leaf], S], source: Source, *, operation: str = "fold", ranks: Ranks = ALONE
) -> tuple[dict[str, S], str, int]:
    """Reduce a source leaf by leaf: sums over examples, kept per leaf.

    Args:
        reducer: ``(state or None, leaf) -> state``.
        source: Gradients at fixed parameters; with several `ranks`, this process's share.
        operation: Name used in errors.
        ranks: The processes whose states are added up: their tensors must be sums over examples.

    Returns:
        States by leaf name, the fingerprint of the parameters, and the number of examples, of all shares together.

    Raises:
        ValueError: If a share is empty or parameters move.

    >>> from attrax.core import GradTree, diagonal
    >>> grads = GradTree({"b": diagonal("b", torch.ones(2, 1, 1), torch.ones(2, 1, 3))})
    >>> states, _, n = fold(lambda s, x: (s or 0) + x.g.sum(), Blocks([Block(grads, Examples(("x", "y")))]))
    >>> states["b"], n
    (tensor(6.), 2)
    """
    states: dict[str, S] = {}
    fingerprint: str | None = None
    ids: list[str] = []

    def visit(name: str, leaf: Leaf, _: Examples) -> None:
        states[name] = reducer(states.get(name), leaf)

    for examples, _ in source.map(visit):
        fingerprint = one_fingerprint(fingerprint, examples, operation)
        ids += examples.ids
    fingerprint, count = _one_set(ranks.listed((fingerprint, ids)), operation)
    return ranks.total(states), fingerprint, count


def _one_set(shares: Sequence[tuple[str | None, list[str]]], operation: str) -> tuple[str, int]:
    """The fingerprint of all shares and their number of examples; every process judges the same."""
    for rank, (mark, ids) in enumerate(shares):
        if not ids:
            where = f"the source of rank {rank}" if len(shares) > 1 else "the source"
            raise ValueError(f"{operation}: {where} yielded no examples.")
        if mark != shares[0][0]:
            raise ValueError(
                f"{operation}: gradients were taken at different parameters: rank 0 has fingerprint {shares[0][0]!r}, "
                f"rank {rank} {mark!r}. All processes must fit the same model."
            )
    found = Counter(i for _, ids in shares for i in set(ids))
    repeated = [i for i, times in found.items() if times > 1]
    if repeated:
        warnings.warn(
            f"{operation}: {len(repeated)} examples, e.g. '{repeated[0]}', are in the shares of several ranks and "
            "count once for each. A DistributedSampler repeats examples to even out ranks: deal rows[rank::ranks] "
            "instead.",
            RuntimeWarning,
            stacklevel=3,
        )
    return str(shares[0][0]), sum(len(ids) for _, ids in shares)


def row_sums(
    measure: Callable[[str, Leaf, Examples], Tensor | None], source: Source
) -> Iterator[tuple[Examples, Tensor | None]]:
    """Measure every leaf and sum over leaves, block by block: scores and squared norms are such sums.

    Args:
        measure: ``(name, leaf, examples) -> [B, ...]`` or None to leave a leaf out.
        source: Gradients.

    Returns:
        For each block, its examples and the summed measure (None if no leaf was measured).

    >>> from attrax.core import GradTree, diagonal
    >>> grads = GradTree({"b": diagonal("b", torch.ones(2, 1, 1), torch.ones(2, 1, 3))})
    >>> source = Blocks([Block(grads, Examples(("x", "y")))])
    >>> [v for _, v in row_sums(lambda n, x, e: x.g.sum((1, 2)), source)]
    [tensor([3., 3.])]
    """
    for examples, values in source.map(measure):
        found = [v for v in values.values() if v is not None]
        yield examples, torch.stack(found).sum(0) if found else None


def collect(source: Source, transform: Transform | None = None, *, operation: str = "collect") -> Block:
    """All gradients of a source as one block in memory: queries, usually.

    Args:
        source: Gradients at fixed parameters.
        transform: Applied to every leaf as it appears.
        operation: Name used in errors.

    Returns:
        One block.

    Raises:
        ValueError: If the source is empty or its parameters move.

    >>> from attrax.core import GradTree, diagonal
    >>> grads = GradTree({"b": diagonal("b", torch.ones(2, 1, 1), torch.ones(2, 1, 3))})
    >>> collect(Blocks([Block(grads, Examples(("x", "y")))] * 2)).grads["b"].g.shape
    torch.Size([4, 1, 3])
    """
    change = transform or (lambda _, leaf: leaf)
    blocks = [
        Block(GradTree({n: leaf for n, leaf in leaves.items() if leaf is not None}), examples)
        for examples, leaves in source.map(lambda name, leaf, _: change(name, leaf))
        if len(examples)
    ]
    if not blocks:
        raise ValueError(f"{operation}: the source yielded no examples.")
    fingerprint: str | None = None
    for block in blocks:
        fingerprint = one_fingerprint(fingerprint, block.examples, operation)
    return join(blocks)


def join(blocks: list[Block]) -> Block:
    """Blocks of one source as one block, shorter examples padded with zero rows.

    A leaf that only some blocks hold is zero in the others: its layer was not called there.

    Raises:
        ValueError: If blocks hold the same parameters in different leaves.
    """
    first = {n: leaf for block in reversed(blocks) for n, leaf in block.grads.items()}

    def of(block: Block, name: str) -> Leaf:
        if name in block.grads:
            return block.grads[name]
        other = {n for leaf in block.grads.values() for n in covers(leaf)}
        if shared := sorted(other.intersection(covers(first[name]))):
            raise ValueError(f"join: blocks hold parameters {shared[:5]} in different leaves.")
        return zeros_like(first[name], len(block.examples))

    names = dict.fromkeys(n for block in blocks for n in block.grads)
    grads = GradTree({n: concat(_one_form([of(block, n) for block in blocks])) for n in names})
    return Block(grads, concat_examples([block.examples for block in blocks]))


def _one_form(leaves: list[Leaf]) -> list[Leaf]:
    """Compaction depends on the number of rows, so that blocks may hold one parameter in different forms."""
    if len({type(leaf) for leaf in leaves}) == 1:
        return leaves
    return [materialize_leaf(leaf) for leaf in leaves]
