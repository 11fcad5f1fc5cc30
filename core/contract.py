"""Contraction planner and executor: opt_einsum walks the paths, a roofline model prices every step.

A contraction multiplies the einsum terms of a train leaf, an optional metric and the terms of a query leaf.  Every
binary tree over the operands is a *route* with the same result and its own cost:

    factor        pair train with query factors first: (A A'^T) * (G G'^T), summed     cheap for short sequences
    materialize   build both gradients, then one GEMM                                  cheap for long ones
    mixed         build only the query's gradient and push the train rows through it   few or aggregated queries
    mixed_train   the mirror image
    chain         any other tree

A step costs ``max(flops / rate, bytes / bandwidth) + launch``.  Routes whose temporaries exceed the memory budget are
tiled over examples (letters b, then q).  Steps that involve only the query are charged once per `reuse` train blocks.

Plans are made from shapes only and are printable before anything runs.  Reference: dattri-LLM (2026), section 3.2 and
its two-route FLOP rule, which this search contains; opt_einsum (Smith and Gray 2018).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Any, Literal, TypeAlias

import opt_einsum
from opt_einsum.paths import PathOptimizer

from attrax.core.kernels import OneHot, Operand

Route: TypeAlias = Literal["factor", "materialize", "mixed", "mixed_train", "chain"]
ROUTES: tuple[Route, ...] = ("factor", "materialize", "mixed", "mixed_train", "chain")
Tree: TypeAlias = int | tuple[Any, Any]  # of trees: the run-time checker cannot follow a recursive alias


@dataclass(frozen=True, slots=True)
class Hardware:
    """Roofline figures of a device: the planner's only knowledge of it.

    Attributes:
        flops: Float32 multiply-add throughput, operations per second (a multiply-add is 2).
        bandwidth: Memory traffic, bytes per second.
        launch: Fixed cost of one step, seconds.
        memory: Budget for temporaries, bytes; larger contractions are tiled over examples.
    """

    flops: float = 1.2e11
    bandwidth: float = 2.0e10
    launch: float = 1.0e-5
    memory: int = 2**30


CPU = Hardware()


@dataclass(frozen=True, slots=True)
class Step:
    """One two-operand step of a plan, with its cost at tile size."""

    equation: str
    kind: Literal["gemm", "gather", "scatter", "match"]
    flops: float
    traffic: float
    elements: int
    seconds: float
    count: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What the planner decided for one contraction; ``print(plan)`` shows it.

    Attributes:
        equation: The whole contraction.
        route: Name of the chosen tree.
        tree: Nested pairs of operand indices.
        steps: Two-operand steps, in order.
        tile: Examples per tile for letters b and q.
        flops: Total operations.
        traffic: Total bytes moved, unfused.
        peak: Largest sum of live temporaries, bytes.
        seconds: Predicted time.
    """

    equation: str
    route: Route
    tree: Tree
    steps: tuple[Step, ...]
    tile: tuple[int, int]
    flops: float
    traffic: float
    peak: int
    seconds: float

    def __str__(self) -> str:
        head = (
            f"{self.equation}  route={self.route}  tile(b, q)={self.tile}\n"
            f"  {self.flops:.3g} FLOPs, {self.traffic:.3g} bytes moved, peak {self.peak:.3g} bytes, "
            f"predicted {self.seconds:.3g} s"
        )
        rows = [
            f"  {s.equation:<24} {s.kind:<8} x{s.count:<6g} {s.flops:.3g} FLOPs  {s.elements:.3g} elements"
            for s in self.steps
        ]
        return "\n".join([head, *rows])


@dataclass(frozen=True, slots=True)
class Problem:
    """The shapes of a contraction: everything a plan may depend on."""

    letters: tuple[str, ...]
    onehot: tuple[bool, ...]
    output: str
    sizes: tuple[tuple[str, int], ...]
    itemsize: int
    train: int
    twins: bool = False
    reuse: int = 1

    @property
    def equation(self) -> str:
        """The einsum equation."""
        return ",".join(self.letters) + "->" + self.output


@dataclass(frozen=True, slots=True)
class _Node:
    letters: str
    ops: frozenset[int]
    onehot: bool = False


def problem(
    train: Sequence[Operand],
    query: Sequence[Operand],
    output: str,
    *,
    itemsize: int,
    twins: bool = False,
    reuse: int = 1,
) -> Problem:
    """Describe the contraction ``train . query -> output``.

    Args:
        train: Operands of the train side (with the metric, if any).
        query: Operands of the query side; may be empty.
        output: Letters kept.
        itemsize: Bytes per element in the compute dtype.
        twins: Whether the query operands are the train operands under other letters (self products): a step done on
            one side is then not paid again on the other.
        reuse: Number of train blocks the query-only steps serve.

    Raises:
        ValueError: If one letter has two sizes.
    """
    sizes: dict[str, int] = {}
    for operand in (*train, *query):
        for letter, size in zip(operand.letters, operand.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"axis '{letter}' has size {sizes[letter]} on one side and {size} on the other"
                )
    operands = (*train, *query)
    return Problem(
        tuple(o.letters for o in operands),
        tuple(isinstance(o.data, OneHot) for o in operands),
        output,
        tuple(sorted(sizes.items())),
        itemsize,
        len(train),
        twins,
        reuse,
    )


def _join(x: _Node, y: _Node, keep: Iterable[str]) -> _Node:
    return _Node(kept_letters(x.letters, y.letters, keep), x.ops | y.ops)


def kept_letters(x: str, y: str, keep: Iterable[str]) -> str:
    """Letters of the product of two operands that something else still needs, in order of appearance.

    >>> kept_letters("bto", "bti", "bqoi")
    'boi'
    """
    wanted = set(keep)
    return "".join(c for c in dict.fromkeys(x + y) if c in wanted)


def _trees(items: tuple[Tree, ...]) -> Iterator[Tree]:
    """Every binary tree over the items, each once."""
    if len(items) == 1:
        yield items[0]
        return
    first, rest = items[0], items[1:]
    for mask in range(2 ** len(rest) - 1):
        left = (first, *(r for k, r in enumerate(rest) if mask >> k & 1))
        right = tuple(r for k, r in enumerate(rest) if not mask >> k & 1)
        for a in _trees(left):
            for b in _trees(right):
                yield (a, b)


def operands_of(tree: Tree) -> frozenset[int]:
    """Operand indices below a tree."""
    return frozenset((tree,)) if isinstance(tree, int) else operands_of(tree[0]) | operands_of(tree[1])


def _subtrees(tree: Tree) -> Iterator[Tree]:
    if not isinstance(tree, int):
        yield from _subtrees(tree[0])
        yield from _subtrees(tree[1])
    yield tree


def route_of(tree: Tree, train: int) -> Route:
    """Name the route of a tree whose operands 0..train-1 are the train side.

    >>> route_of(((0, 1), (2, 3)), 2), route_of(((0, 2), (1, 3)), 2), route_of((0, (1, (2, 3))), 2)
    ('materialize', 'factor', 'mixed')
    """
    total = operands_of(tree)
    xs = frozenset(range(train))
    ys = total - xs
    sets = [operands_of(t) for t in _subtrees(tree)]
    x_built, y_built = xs in sets, ys in sets or not ys
    if x_built or y_built:
        return "materialize" if x_built and y_built else "mixed" if y_built else "mixed_train"
    inner = [s for s in sets if 1 < len(s) < len(total)]
    return "factor" if all(len(s & xs) == 1 and len(s & ys) == 1 for s in inner) else "chain"


def _kind(x: _Node, y: _Node, out: str) -> Literal["gemm", "gather", "scatter", "match"] | None:
    if x.onehot and y.onehot:
        shared = x.letters[-1] == y.letters[-1]
        return "match" if shared and x.letters[-1] not in out else None
    if not (x.onehot or y.onehot):
        return "gemm"
    hot, dense = (x, y) if x.onehot else (y, x)
    vocabulary, row = hot.letters[-1], hot.letters[-2]
    if vocabulary in dense.letters:
        return "gather" if vocabulary not in out and row not in dense.letters else None
    return "scatter" if vocabulary in out and row not in out and row in dense.letters else None


def _tree_steps(p: Problem, tree: Tree) -> list[tuple[_Node, _Node, _Node]] | None:
    """Nodes of the tree's steps in execution order; None if a step has no kernel."""
    nodes: dict[Tree, _Node] = {}
    steps: list[tuple[_Node, _Node, _Node]] = []
    everything = frozenset(range(len(p.letters)))
    for t in _subtrees(tree):
        if isinstance(t, int):
            nodes[t] = _Node(p.letters[t], frozenset((t,)), p.onehot[t])
            continue
        x, y = nodes[t[0]], nodes[t[1]]
        outside = [p.letters[i] for i in everything - x.ops - y.ops]
        nodes[t] = out = _join(x, y, "".join(outside) + p.output)
        if _kind(x, y, out.letters) is None:
            return None
        steps.append((x, y, out))
    return steps


def _count(p: Problem, ops: frozenset[int], done: set[frozenset[int]], nb: int, nq: int) -> float:
    """How often a step runs over all tiles, per train block; `done` are the operands of every step of the tree."""
    if min(ops) < p.train:
        return float(nb * nq)
    twin = p.twins and frozenset(i - p.train for i in ops) in done
    if any("b" in p.letters[i] for i in ops):
        return 0.0 if twin else float(nb * nq)
    return 0.0 if twin and nb == nq == 1 else nq / p.reuse


def _price(p: Problem, tree: Tree, hardware: Hardware) -> Plan | None:
    """Tile the tree to the memory budget and price it; None if it cannot run."""
    full = dict(p.sizes)
    nodes = _tree_steps(p, tree)
    if nodes is None:
        return None
    tb, tq = full.get("b", 1), full.get("q", 1)
    while True:
        sizes = full | {"b": tb, "q": tq}
        peak = _peak(nodes, sizes) * p.itemsize
        if peak <= hardware.memory or max(tb, tq) <= 1:
            break
        tb, tq = (ceil(tb / 2), tq) if tb > 1 else (tb, ceil(tq / 2))
    nb, nq = ceil(full.get("b", 1) / max(tb, 1)), ceil(full.get("q", 1) / max(tq, 1))
    rate = hardware.flops * 4 / p.itemsize
    steps: list[Step] = []
    done = {out.ops for _, _, out in nodes}
    for x, y, out in nodes:
        kind = _kind(x, y, out.letters)
        assert kind is not None
        elements = prod(sizes[c] for c in out.letters)
        flops = 2.0 * prod(sizes[c] for c in set(x.letters + y.letters)) if kind == "gemm" else 0.0
        dense = [n for n in (x, y) if not n.onehot]
        read = sum(prod(sizes[c] for c in n.letters) for n in dense) if kind != "gather" else elements
        traffic = float(p.itemsize * (read + elements))
        seconds = max(flops / rate, traffic / hardware.bandwidth) + hardware.launch
        equation = f"{x.letters},{y.letters}->{out.letters}"
        steps.append(
            Step(equation, kind, flops, traffic, elements, seconds, _count(p, out.ops, done, nb, nq))
        )
    total = [sum(s.count * getattr(s, f) for s in steps) for f in ("flops", "traffic", "seconds")]
    return Plan(
        p.equation, route_of(tree, p.train), tree, tuple(steps), (tb, tq), total[0], total[1], peak, total[2]
    )


def _peak(nodes: list[tuple[_Node, _Node, _Node]], sizes: dict[str, int]) -> int:
    """Largest number of live temporary elements when the steps run in order."""
    live: dict[frozenset[int], int] = {}
    peak = 0
    for x, y, out in nodes:
        live[out.ops] = prod(sizes[c] for c in out.letters)
        peak = max(peak, sum(live.values()))
        live.pop(x.ops, None)
        live.pop(y.ops, None)
    return peak


class _Roofline(PathOptimizer):
    """opt_einsum path optimizer: the cheapest tree by predicted time, optionally of one route."""

    def __init__(self, p: Problem, hardware: Hardware, route: Route | None) -> None:
        self.problem, self.hardware, self.route = p, hardware, route
        self.best: Plan | None = None

    def __call__(
        self, inputs: object, output: object, size_dict: object, memory_limit: object = None
    ) -> list[tuple[int, ...]]:
        plans = (
            _price(self.problem, t, self.hardware) for t in _trees(tuple(range(len(self.problem.letters))))
        )
        usable = [q for q in plans if q is not None and self.route in (None, q.route)]
        if not usable:
            raise ValueError(f"{self.problem.equation}: no executable route {self.route!r}")
        fits = [q for q in usable if q.peak <= self.hardware.memory] or usable
        self.best = min(fits, key=lambda q: q.seconds)
        return _linear_path(self.best.tree, len(self.problem.letters))


def _linear_path(tree: Tree, n: int) -> list[tuple[int, ...]]:
    """The tree in opt_einsum's format: positions in the shrinking operand list."""
    remaining = [frozenset((i,)) for i in range(n)]
    path: list[tuple[int, ...]] = []
    for node in _subtrees(tree):
        if not isinstance(node, int):
            a, b = operands_of(node[0]), operands_of(node[1])
            path.append(tuple(sorted((remaining.index(a), remaining.index(b)))))
            remaining = [r for r in remaining if r not in (a, b)] + [a | b]
    return path or [(0,)]


@lru_cache(maxsize=4096)
def plan_contraction(p: Problem, hardware: Hardware = CPU, route: Route | None = None) -> Plan:
    """Choose the cheapest route for a contraction, from its shapes only.

    Args:
        p: The contraction.
        hardware: Roofline figures and memory budget.
        route: Force a route; if the contraction has no such route (e.g. a side is a single operand), the cheapest
            route of any name is taken.

    Returns:
        The plan.
    """
    if route is not None and route not in ROUTES:
        raise ValueError(f"route: got {route!r}; expected one of {list(ROUTES)} or None.")
    trees = _trees(tuple(range(len(p.letters))))
    if route is not None and route not in {route_of(t, p.train) for t in trees if _price(p, t, hardware)}:
        route = None
    optimizer = _Roofline(p, hardware, route)
    if len(p.letters) == 1:
        return Plan(p.equation, "materialize", 0, (), (dict(p.sizes).get("b", 1), 1), 0.0, 0.0, 0, 0.0)
    sizes = dict(p.sizes)
    shapes = [tuple(sizes[c] for c in letters) for letters in p.letters]
    if len(shapes) > 2:
        opt_einsum.contract_path(p.equation, *shapes, shapes=True, optimize=optimizer)
    else:
        optimizer((), (), sizes)
    assert optimizer.best is not None
    return optimizer.best
