"""Running a contraction plan: two operands at a time, tile by tile."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attrax.core.contract import Plan, Tree, kept_letters, operands_of
from attrax.core.kernels import OneHot, Operand, contract_pair


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
        if len(column) == 1:
            rows += column
        else:
            rows.append(torch.cat(column, output.index("b")) if "b" in output else torch.stack(column).sum(0))
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
    ops = operands_of(tree)
    memo = local if any("b" in operands[i].letters for i in ops) else kept
    if ops in memo or ops in local:
        return memo[ops] if ops in memo else local[ops]
    left, right = (_visit(t, operands, output, kept, local, train, twins) for t in tree)
    outside = "".join(o.letters for i, o in enumerate(operands) if i not in ops) + output
    letters = kept_letters(left.letters, right.letters, outside)
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
