"""What low-precision factors cost: error of every operation and route on bfloat16 and float16 factors.

    python benchmarks/precision.py benchmarks/results/precision.json

Leaves of every kind with normal random factors (24 inputs, 32 outputs, norms of width 4; 2 x 2 examples of 16, 256 and
2048 rows) are rounded to 16 bits and given to each operation, by each route where there is a choice.  Two relative
errors (largest difference over largest entry, the worst of all leaves):

    sums      against float64 on the same rounded factors: what the operation itself loses
    factors   against float64 on the factors before rounding: what 16 bits lose, whatever the operation does

Below it, eigendecompositions of covariances in float64 and float32: CPU seconds on one thread, and how far float32
eigenvalues are off, relative to themselves.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workload import write

from attrax.core import (
    GradTree,
    Leaf,
    aggregate,
    diagonal,
    factorized,
    gram,
    grouped,
    lookup,
    materialize,
    self_gram,
    sq_norms,
    stored,
    token_scores,
    tree_map,
)
from attrax.core.algebra import wide
from attrax.core.contract import ROUTES
from attrax.core.grass import Grass
from attrax.core.kronecker import eigenbasis, ekfac_eigenvalues, kronecker_sums, spectrum
from attrax.core.leaves import dtype_of
from attrax.core.lowrank import low_rank_tree
from attrax.core.maps import LinearMap, project
from attrax.core.masks import Mask
from attrax.core.projection import KINDS, Projection
from attrax.core.subspace import fit_subspace

LENGTHS = (16, 256, 2048)
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NI, NO, NORM, B = 24, 32, 4, 2
ROUTED = ("gram", "self_gram", "sq_norms", "token_scores")
EIGH = (512, 1024, 2048, 4096)
Operation = Callable[[Leaf, Leaf], Tensor]


def leaves(T: int, seed: int) -> dict[str, Leaf]:
    """One leaf of every kind, float64."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    ids = torch.randint(0, NO, (B, T), generator=gen)
    return {
        "linear": factorized("fc.weight", normal(B, T, NI), normal(B, T, NO), bias="fc.bias"),
        "embedding": lookup("emb.weight", ids, normal(B, T, NI), rows=NO),
        "norm": diagonal("ln.weight", normal(B, T, NORM), normal(B, T, NORM)),
        "grouped": grouped("conv.weight", normal(B, 3, T, NI // 4), normal(B, 3, T, NO // 4)),
    }


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """The leaf (or eigenbasis) in another precision."""
    return tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, leaf)


def alone(leaf: Leaf) -> GradTree:
    """The leaf as a tree."""
    return GradTree({leaf.parts[0].weight: leaf})


def flat(grads: GradTree) -> Tensor:
    """All gradients of a tree of built leaves, [B, P]."""
    return torch.cat([leaf.w.flatten(1) for leaf in materialize(grads).values()], 1)  # type: ignore[attr-defined]


def maps() -> Iterator[LinearMap]:
    """Linear maps of every kind to 8 numbers (a side)."""
    for sides, kinds in KINDS.items():
        for kind in kinds:
            yield Projection(8, kind, sides)  # type: ignore[arg-type]
    yield Mask(8)
    yield Grass(8)
    yield Grass(8, "two")


def operations() -> Iterator[tuple[str, str, Operation]]:
    """(operation, route, function of a train and a query leaf); the first of an operation is left to the planner."""
    for route in (None, *ROUTES):
        yield "gram", route or "auto", lambda x, y, r=route: gram(alone(x), alone(y), route=r)
        yield "self_gram", route or "auto", lambda x, y, r=route: self_gram(alone(x), route=r)
        yield "sq_norms", route or "auto", lambda x, y, r=route: sq_norms(alone(x), route=r)
        yield "token_scores", route or "auto", lambda x, y, r=route: token_scores(alone(x), alone(y), route=r)
    yield "materialize", "", lambda x, y: flat(alone(x))
    yield "aggregate", "", lambda x, y: flat(aggregate(alone(x)))
    yield "stored", "", lambda x, y: next(iter(stored(alone(x)).values()))
    for spec in maps():
        yield "project", spec.basis, lambda x, y, s=spec: flat(project(alone(x), s))


def linear_operations(exact: Leaf) -> Iterator[tuple[str, str, Operation]]:
    """Operations on linear leaves only; fitted maps and bases are those of the exact leaf."""
    sums = kronecker_sums(exact)
    basis, subspace = eigenbasis(sums), fit_subspace({"fc.weight": sums}, 8)
    yield "kronecker_sums", "a", lambda x, y: kronecker_sums(x).a
    yield "kronecker_sums", "g", lambda x, y: kronecker_sums(x).g[0]
    yield "ekfac spectrum", "", lambda x, y: ekfac_eigenvalues(spectrum(x, cast(basis, wide(dtype_of(x)))))
    yield "project", "subspace", lambda x, y: flat(project(alone(x), subspace))
    yield "low_rank", "", lambda x, y: flat(low_rank_tree(alone(x), rank=NI)[0])


def error(value: Tensor, right: Tensor) -> float:
    """Largest difference over largest entry."""
    return float((value.double() - right).abs().max() / right.abs().max())


def measure(T: int) -> list[dict[str, Any]]:
    """Errors of every operation, route and dtype at one length."""
    train, query = leaves(T, 0), leaves(T, 1)
    found: list[dict[str, Any]] = []
    exact: dict[tuple[str, ...], Tensor] = {}
    cases = [(tuple(train), case) for case in operations()]
    cases += [(("linear",), case) for case in linear_operations(train["linear"])]
    for kinds, (operation, route, run) in cases:
        same = "any" if operation in ROUTED else route
        for name, dtype in NARROW.items():
            sums, factors = 0.0, 0.0
            for kind in kinds:
                low = [cast(side[kind], dtype) for side in (train, query)]
                value = run(*low)
                assert value.dtype == torch.float32, (operation, route, kind, value.dtype)
                for rounded, pair in ((name, low), ("no", (train[kind], query[kind]))):
                    key = (operation, same, kind, rounded)
                    if key not in exact:
                        exact[key] = run(*(cast(x, torch.float64) for x in pair))
                sums = max(sums, error(value, exact[operation, same, kind, name]))
                factors = max(factors, error(value, exact[operation, same, kind, "no"]))
            found.append(
                {"operation": operation, "route": route, "rows": T, "dtype": name}
                | {"sums": sums, "factors": factors}
            )
    return found


def eigendecomposition(width: int) -> dict[str, float]:
    """CPU seconds of eigh in both precisions, and the error of float32's eigenvalues."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2 * width, width, generator=gen) * torch.logspace(0, -3, width)
    moment, taken, values = x.T @ x / len(x), {}, {}
    for dtype in (torch.float64, torch.float32):
        start = time.process_time()
        values[dtype] = torch.linalg.eigh(moment.to(dtype)).eigenvalues.double()
        taken[dtype] = time.process_time() - start
    exact = values[torch.float64]
    off = float(((values[torch.float32] - exact) / exact).abs().max())
    times = {"float64": taken[torch.float64], "float32": taken[torch.float32]}
    return {"width": width, **times, "eigenvalues_off": off}


def show(rows: list[dict[str, Any]]) -> None:
    """One line an operation and route, worst over lengths."""
    print(
        f"{'operation':<15} {'route or map':<34}"
        + "".join(f"{n + ': sums':>17}{'factors':>9}" for n in NARROW)
    )
    for key in dict.fromkeys((row["operation"], row["route"]) for row in rows):
        line = f"{key[0]:<15} {key[1]:<34}"
        for name in NARROW:
            mine = [r for r in rows if (r["operation"], r["route"], r["dtype"]) == (*key, name)]
            line += f"{max(r['sums'] for r in mine):>17.1e}{max(r['factors'] for r in mine):>9.1e}"
        print(line)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--eigh", type=int, nargs="*", default=EIGH, help="widths to decompose")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for T in options.lengths for row in measure(T)]
    show(rows)
    decompositions = [eigendecomposition(width) for width in options.eigh]
    for each in decompositions:
        print(each)
    write(
        options.out,
        workload={"inputs": NI, "outputs": NO, "norm": NORM, "examples": B, "rows": list(options.lengths)},
        unit_roundoff={name: torch.finfo(dtype).eps / 2 for name, dtype in NARROW.items()},
        errors=rows,
        eigh=decompositions,
    )


if __name__ == "__main__":
    main()
