"""Positions as examples: their scores add up to their example's score, for every kind of leaf."""

from dataclasses import replace

import pytest
import torch

from attrax.core import (
    Block,
    Blocks,
    Examples,
    GradTree,
    Sum,
    diagonal,
    factorized,
    grouped,
    lookup,
    materialized,
)
from attrax.frontends.sources.positions import by_position
from attrax.methods import graddot

B, T, LENGTHS = 3, 4, {"x": 4, "y": 2, "z": 3}


def leaf_of(kind, rng, rows=T):
    def draw(width):
        x = torch.randn(B, rows, width, generator=rng)
        for b, length in enumerate(LENGTHS.values()):
            x.unflatten(1, (rows // T, T))[b, :, length:] = 0
        return x

    ids = torch.randint(0, 7, (B, rows), generator=rng)
    if kind == "lookup":
        return lookup("w", ids, draw(5), rows=7)
    if kind == "diagonal":
        return diagonal("w", draw(5), draw(5))
    if kind == "groups":
        return grouped("w", torch.stack([draw(5), draw(5)], 1), torch.stack([draw(3), draw(3)], 1))
    linear = factorized("w", draw(5), draw(7), bias="b" if kind == "bias" else None)
    if kind == "sum":
        tied = lookup("w", ids, draw(5), rows=7)
        return Sum((linear, tied), linear.parts)
    return linear


@pytest.mark.parametrize("kind", ["linear", "bias", "lookup", "diagonal", "groups", "sum"])
@pytest.mark.parametrize("calls", [1, 2])
def test_positions_add_up(kind, calls, rng, assert_close):
    leaf = leaf_of(kind, rng, T * calls)
    if calls == 2:
        uses = [replace(use, calls=2) for use in getattr(leaf, "uses", (leaf,))]
        leaf = replace(leaf, uses=tuple(uses)) if kind == "sum" else uses[0]
    examples = Examples(tuple(LENGTHS), weight=torch.ones(B), tokens=torch.tensor(list(LENGTHS.values())))
    source = Blocks([Block(GradTree({"w": leaf}), examples)])
    whole, split = graddot(source, source), graddot(by_position(source, LENGTHS), source)
    assert split.ids == tuple(name for name in LENGTHS for _ in range(T))
    shares = split.values.view(B, T, B)
    assert_close(shares.sum(1), whole.values)
    assert not shares[1, 2:].any() and not shares[2, 3:].any()


def test_trimmed_and_wider_rows_are_brought_to_the_width_of_the_block(rng, assert_close):
    leaf = leaf_of("linear", rng)
    short = replace(leaf, a=leaf.a[1:2, :2], g=leaf.g[1:2, :2])
    for rows, width in ((short, 3), (replace(leaf, a=leaf.a[1:2], g=leaf.g[1:2]), 2)):
        source = Blocks([Block(GradTree({"w": rows}), Examples(("y",), weight=torch.ones(1)))])
        split = graddot(by_position(source, {"y": width}), source)
        assert len(split) == width
        assert_close(split.values.sum(), graddot(source, source).values.sum())


def test_rows_of_experts_are_no_positions(rng):
    leaf = replace(leaf_of("groups", rng), positions=False)
    examples = Examples(tuple(LENGTHS), weight=torch.ones(B))
    source = Blocks([Block(GradTree({"w": leaf}), examples)])
    with pytest.raises(ValueError, match="routed to each expert"):
        graddot(by_position(source, LENGTHS), source)


def test_materialized_leaves_have_no_positions():
    source = Blocks(
        [
            Block(
                GradTree({"w": materialized("w", torch.ones(1, 2, 3))}),
                Examples(("x",), weight=torch.ones(1)),
            )
        ]
    )
    with pytest.raises(ValueError, match="'w' is materialized and has no positions"):
        graddot(by_position(source, {"x": 1}), source)


def test_rows_that_are_not_positions_are_refused(rng):
    leaf = factorized("w", torch.ones(1, 8, 5), torch.ones(1, 8, 7))
    source = by_position(Blocks([Block(GradTree({"w": leaf}), Examples(("x",)))]), {"x": 4})
    with pytest.raises(ValueError, match="by_position: leaf 'w' has 8 rows .* 4 positions"):
        list(source.map(lambda name, leaf, examples: None))
