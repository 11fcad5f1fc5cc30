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

Operands are dense tensors or one-hot selections (`OneHot`), which are never built: one-hot x dense is a gather or an
index_add, one-hot x one-hot an equality mask.

Plans are made from shapes only and are printable before anything runs.  Reference: dattri-LLM (2026), section 3.2 and
its two-route FLOP rule, which this search contains; opt_einsum (Smith and Gray 2018).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Any, Literal, TypeAlias

import opt_einsum
import torch
from opt_einsum.paths import PathOptimizer
from torch import Tensor

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


@dataclass(frozen=True, eq=False, slots=True)
class OneHot:
    """One-hot vectors of width `size` at `ids`; an operand of letters (*axes of ids, vocabulary)."""

    ids: Tensor
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Operand:
    """A factor of a contraction: its einsum letters and its data."""

    letters: str
    data: Tensor | OneHot

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of `letters`."""
        return (
            (*self.data.ids.shape, self.data.size)
            if isinstance(self.data, OneHot)
            else tuple(self.data.shape)
        )


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
    kept = set(keep)
    letters = x.letters + "".join(c for c in y.letters if c not in x.letters)
    return _Node("".join(c for c in letters if c in kept), x.ops | y.ops)


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


def _ops(tree: Tree) -> frozenset[int]:
    return frozenset((tree,)) if isinstance(tree, int) else _ops(tree[0]) | _ops(tree[1])


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
    total = _ops(tree)
    xs = frozenset(range(train))
    ys = total - xs
    sets = [_ops(t) for t in _subtrees(tree)]
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


def _count(p: Problem, ops: frozenset[int], nb: int, nq: int) -> float:
    """How often a step runs over all tiles, per train block."""
    if min(ops) < p.train:
        return float(nb * nq)
    if any("b" in p.letters[i] for i in ops):
        return 0.0 if p.twins else float(nb * nq)
    return 0.0 if p.twins and nb == nq == 1 else nq / p.reuse


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
        if peak <= hardware.memory or tb == tq == 1:
            break
        tb, tq = (ceil(tb / 2), tq) if tb > 1 else (tb, ceil(tq / 2))
    nb, nq = ceil(full.get("b", 1) / max(tb, 1)), ceil(full.get("q", 1) / max(tq, 1))
    rate = hardware.flops * 4 / p.itemsize
    steps: list[Step] = []
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
        steps.append(Step(equation, kind, flops, traffic, elements, seconds, _count(p, out.ops, nb, nq)))
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
            a, b = _ops(node[0]), _ops(node[1])
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


def execute(plan: Plan, operands: Sequence[Operand], *, train: int, twins: bool = False) -> Tensor:
    """Run a plan, strictly two operands at a time, tile by tile.

    Args:
        plan: A plan for operands of these letters (other sizes are allowed; the plan may then be slow).
        operands: Train operands, then query operands, dense ones in the compute dtype.
        train: Number of train operands.
        twins: Whether the query operands are the train operands under other letters.

    Returns:
        The contraction, letters in the order of the plan's output.
    """
    output = plan.equation.split("->")[1]
    q_tiles, b_tiles = _slices(operands, "q", plan.tile[1]), _slices(operands, "b", plan.tile[0])
    aligned = len(q_tiles) == len(b_tiles) == 1 or all("b" in o.letters for o in operands[train:])
    rows: list[Tensor] = []
    for q in q_tiles:
        kept: dict[frozenset[int], Operand] = {}
        column = [
            _evaluate(plan.tree, _tile(operands, {"b": b, "q": q}), output, kept, train, twins and aligned)
            for b in b_tiles
        ]
        joined = torch.cat(column, output.index("b")) if "b" in output else torch.stack(column).sum(0)
        rows.append(column[0] if len(column) == 1 else joined)
    return rows[0] if len(rows) == 1 else torch.cat(rows, output.index("q"))


def _slices(operands: Sequence[Operand], letter: str, tile: int) -> list[slice]:
    sizes = [o.shape[o.letters.index(letter)] for o in operands if letter in o.letters]
    if not sizes or sizes[0] <= tile:
        return [slice(None)]
    return [slice(i, i + tile) for i in range(0, sizes[0], tile)]


def _tile(operands: Sequence[Operand], cut: dict[str, slice]) -> list[Operand]:
    return [_cut(o, tuple(cut.get(c, slice(None)) for c in o.letters)) for o in operands]


def _cut(o: Operand, index: tuple[slice, ...]) -> Operand:
    if isinstance(o.data, OneHot):
        return Operand(o.letters, OneHot(o.data.ids[index[:-1]], o.data.size, o.data.dtype))
    return Operand(o.letters, o.data[index])


def _evaluate(
    tree: Tree,
    operands: Sequence[Operand],
    output: str,
    kept: dict[frozenset[int], Operand],
    train: int,
    twins: bool,
) -> Tensor:
    """Contract one tile.  `kept` carries results that do not depend on the train tile from one tile to the next."""
    result = _visit(tree, operands, output, kept, {}, train, twins)
    data = _dense(result)
    summed = [result.letters.index(c) for c in result.letters if c not in output]
    data = data.sum(summed) if summed else data
    remaining = [c for c in result.letters if c in output]
    return data.permute([remaining.index(c) for c in output])


def _visit(
    tree: Tree,
    operands: Sequence[Operand],
    output: str,
    kept: dict[frozenset[int], Operand],
    local: dict[frozenset[int], Operand],
    train: int,
    twins: bool,
) -> Operand:
    if isinstance(tree, int):
        return operands[tree]
    ops = _ops(tree)
    memo = local if any("b" in operands[i].letters for i in ops) else kept
    if ops in memo or ops in local:
        return memo[ops] if ops in memo else local[ops]
    left, right = (_visit(t, operands, output, kept, local, train, twins) for t in tree)
    outside = "".join(o.letters for i, o in enumerate(operands) if i not in ops) + output
    letters = _join(_Node(left.letters, ops), _Node(right.letters, ops), outside).letters
    result = Operand(letters, contract_pair(left, right, letters))
    if min(ops) >= train:
        memo[ops] = result
    elif twins and max(ops) < train and max(ops) + train < len(operands):
        pairs = [(operands[i].letters, operands[i + train].letters) for i in ops]
        rename = {c: d for ours, theirs in pairs for c, d in zip(ours, theirs, strict=True)}
        twin = "".join(rename[c] for c in letters)
        local[frozenset(i + train for i in ops)] = Operand(twin, result.data)
    return result


def _dense(operand: Operand) -> Tensor:
    if isinstance(operand.data, OneHot):
        raise ValueError(f"a lone one-hot operand '{operand.letters}' has no dense form")
    return operand.data


def contract_pair(x: Operand, y: Operand, out: str) -> Tensor:
    """Contract two operands to the letters `out`; equals einsum of the dense forms."""
    if isinstance(x.data, OneHot) and isinstance(y.data, OneHot):
        return _match(x, y, out)
    if isinstance(x.data, OneHot):
        return _select(x, y, out)
    if isinstance(y.data, OneHot):
        return _select(y, x, out)
    if set(y.letters) <= set(x.letters):
        return _elementwise(x, y, out)
    if set(x.letters) <= set(y.letters):
        return _elementwise(y, x, out)
    return _gemm(x, y, out)


_SPLIT = 16


def _gemm(x: Operand, y: Operand, out: str) -> Tensor:
    """torch.einsum of two dense operands as one (batched) GEMM on views wherever the axes already lie so.

    A product with few outputs and a very long contraction is split along it: BLAS runs those on one core.
    """
    batch = [c for c in x.letters if c in y.letters and c in out]
    summed = [c for c in x.letters if c in y.letters and c not in out]
    left, rows = _matrix(x, batch, summed)
    right, columns = _matrix(y, batch, summed)
    few = left.shape[0] == 1 and left.shape[1] * right.shape[1] <= 4096
    if few and left.shape[2] >= 2**15 and left.shape[2] % _SPLIT == 0:
        left, right = (m.unflatten(2, (_SPLIT, -1)).squeeze(0).transpose(0, 1) for m in (left, right))
        product = torch.bmm(left, right.transpose(1, 2)).sum(0)
    else:
        product = torch.bmm(left, right.transpose(1, 2))
    sizes = dict(zip(x.letters, x.shape, strict=True)) | dict(zip(y.letters, y.shape, strict=True))
    letters = [*batch, *rows, *columns]
    return product.reshape([sizes[c] for c in letters]).permute([letters.index(c) for c in out])


def _matrix(operand: Operand, batch: list[str], summed: list[str]) -> tuple[Tensor, list[str]]:
    """[batch, free, summed] view of an operand and its free letters."""
    assert isinstance(operand.data, Tensor)
    free = [c for c in operand.letters if c not in batch and c not in summed]
    sizes = dict(zip(operand.letters, operand.shape, strict=True))
    count = [prod(sizes[c] for c in group) for group in (batch, free, summed)]
    order = operand.letters
    if summed and free and order.index(summed[0]) < order.index(free[0]):
        data = operand.data.permute([order.index(c) for c in (*batch, *summed, *free)])
        return data.reshape(count[0], count[2], count[1]).transpose(1, 2), free
    data = operand.data.permute([order.index(c) for c in (*batch, *free, *summed)])
    return data.reshape(count), free


def _align(data: Tensor, letters: str, target: str) -> Tensor:
    """Permute to the order of `target`, with axes of length 1 for its other letters."""
    data = data.permute([letters.index(c) for c in target if c in letters])
    for position, c in enumerate(target):
        if c not in letters:
            data = data.unsqueeze(position)
    return data


def _elementwise(x: Operand, y: Operand, out: str) -> Tensor:
    """`y`'s letters lie within `x`'s: multiply and sum, without the copies that a batched GEMM would make."""
    assert isinstance(x.data, Tensor) and isinstance(y.data, Tensor)
    summed = [c for c in x.letters if c not in out]
    if x.letters == y.letters and x.letters.startswith(out) and summed:
        shape = x.data.shape[: len(out)]
        rows = (*shape, -1) if x.data.numel() else (*shape, 0)
        return torch.linalg.vecdot(x.data.reshape(rows), y.data.reshape(rows))
    product = x.data * _align(y.data, y.letters, x.letters)
    result = product.sum([x.letters.index(c) for c in summed]) if summed else product
    remaining = [c for c in x.letters if c in out]
    return result.permute([remaining.index(c) for c in out])


def _match(x: Operand, y: Operand, out: str) -> Tensor:
    """One-hot x one-hot: 1 where the ids agree.  einsum 'btv,qsv->btqs'."""
    assert isinstance(x.data, OneHot) and isinstance(y.data, OneHot)
    left, right = x.letters[:-1], y.letters[:-1]
    every = left + "".join(c for c in right if c not in left)
    equal = _align(x.data.ids, left, every) == _align(y.data.ids, right, every)
    result = equal.to(x.data.dtype)
    extra = [every.index(c) for c in every if c not in out]
    result = result.sum(extra) if extra else result
    remaining = [c for c in every if c in out]
    return result.permute([remaining.index(c) for c in out])


def _select(hot: Operand, other: Operand, out: str) -> Tensor:
    """One-hot x dense: a gather if the dense operand has the vocabulary axis, else a scatter-add into it."""
    assert isinstance(hot.data, OneHot) and isinstance(other.data, Tensor)
    ids, v = hot.data.ids, hot.letters[-1]
    index = hot.letters[:-1]
    if v in other.letters:
        batch = [c for c in index if c in other.letters]
        rest = [c for c in other.letters if c != v and c not in batch]
        table = other.data.permute([other.letters.index(c) for c in (*batch, v, *rest)])
        if batch:
            # einsum 'btv,bsv->bts': each example gathers from its own table.
            flat = table.reshape(*table.shape[:2], prod(table.shape[2:]))
            rows = flat.gather(1, ids.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
            letters = index + "".join(rest)
            picked = rows.reshape(*ids.shape, *table.shape[2:])
        else:
            picked = table[ids]
            letters = index + "".join(rest)
        extra = [letters.index(c) for c in letters if c not in out]
        picked = picked.sum(extra) if extra else picked
        remaining = [c for c in letters if c in out]
        return picked.permute([remaining.index(c) for c in out])
    # einsum 'btv,bte->bve' (b may be summed too): rows of the dense operand are added into their vocabulary entry.
    rest = [c for c in other.letters if c not in index]
    source = other.data.permute([other.letters.index(c) for c in (*index, *rest)])
    width = source.shape[len(index) :]
    size = hot.data.size
    kept = [c for c in index if c in out]
    if kept:
        offset = torch.arange(ids.shape[0], device=ids.device).reshape(-1, *[1] * (ids.ndim - 1))
        flat_ids, lead = (offset * size + ids).reshape(-1), (ids.shape[0], size)
    else:
        flat_ids, lead = ids.reshape(-1), (size,)
    flat = source.reshape(flat_ids.shape[0], prod(width))
    total = flat.new_zeros(prod(lead), flat.shape[1]).index_add(0, flat_ids, flat)
    letters = "".join(kept) + v + "".join(rest)
    return total.reshape(*lead, *width).permute([letters.index(c) for c in out])
