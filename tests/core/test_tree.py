"""Trees, examples, blocks and declared targets."""

from typing import Any

import pytest
import torch

from attrax.core import Block, Examples, GradTree, diagonal
from attrax.core.tree import block_rows, concat_examples, describe, target_scale

from .toys import KINDS, SMALL, block, named, refused, tree

ABOUT: dict[str, Any] = dict(weight=torch.tensor([0.5, 0.25, 0.0]), tokens=torch.tensor([2, 4, 0]))
KNOWN = Examples(named(3), **ABOUT)


def test_trees_are_mappings_in_layer_order():
    x, _ = SMALL.trees()
    assert list(x) == list(KINDS) and len(x) == len(KINDS)
    assert "norm" in x and "absent" not in x
    assert list(x.items())[0] == ("linear", x["linear"])
    assert x["norm"] is x.leaves[x.names.index("norm")]


def test_an_absent_leaf_is_named_with_those_present():
    with refused("'up' is not a leaf of this tree", "['down']", error=KeyError):
        tree(down=SMALL.one(KINDS["linear"]))["up"]


def test_mapping_a_tree_drops_leaves_mapped_to_none():
    x, _ = SMALL.trees()
    kept = x.map(lambda name, leaf: None if name.startswith("built") else leaf)
    assert list(kept) == [name for name in KINDS if not name.startswith("built")]
    assert len(x) == len(KINDS)


def test_trees_print_a_line_a_leaf():
    x, _ = SMALL.trees({kind: KINDS[kind] for kind in ("stacked_bias", "embedding", "tied")})
    assert repr(x).splitlines() == [
        "GradTree(",
        "  stacked_bias: Factorized(a[3, 4, 3], g[3, 4, 6]) of q.weight, k.weight, q.bias, k.bias",
        "  embedding: Lookup(ids[3, 4], g[3, 4, 3]) of emb.weight",
        "  tied: Sum(Lookup(ids[3, 4], g[3, 4, 3]) + Factorized(a[3, 5, 3], g[3, 5, 5])) of emb.weight",
        ")",
    ]
    assert describe(SMALL.one(KINDS["built_tensor"])) == "Materialized(w[3, 4, 2, 3]) of kernel"


def test_targets_undo_the_weight_of_the_loss():
    """The leaves hold c G: the sum over an example's tokens is G, its mean G / n."""
    total, mean = (target_scale(KNOWN, target) for target in ("sum", "mean"))
    assert total is not None and total.tolist() == [2.0, 4.0, 0.0]
    assert mean is not None and mean.tolist() == [1.0, 1.0, 0.0]
    assert target_scale(KNOWN, "as_trained") is None
    assert target_scale(Examples(("a",), weight=torch.ones(1)), "sum") is None


def test_targets_need_the_numbers_they_are_made_of():
    unknown: Any = "average"
    with refused("target: got 'average'", "'sum', 'mean' or 'as_trained'"):
        target_scale(KNOWN, unknown)
    for target in ("sum", "mean"):
        with refused(f"target '{target}'", "unknown loss weight", "Declare the loss", "target='as_trained'"):
            target_scale(Examples(("a",)), target)
    with refused("target 'mean'", "number of loss tokens", "target='sum'"):
        target_scale(Examples(("a",), weight=torch.ones(1)), "mean")
    assert target_scale(Examples(("a",)), "as_trained") is None


def test_joined_examples_keep_what_every_block_knows():
    one = Examples(("a", "b"), 3, 1, torch.ones(2), torch.tensor([1, 2]), "p", 0.1)
    two = Examples(("c",), 3, 2, torch.zeros(1), None, "p", 0.1)
    both = concat_examples([one, two])
    assert both.ids == ("a", "b", "c") and both.weight is not None and both.weight.tolist() == [1, 1, 0]
    assert both.tokens is None
    assert (both.step, both.fingerprint, both.learning_rate) == (3, "p", 0.1)
    with refused("concat_examples", "different parameters"):
        concat_examples([one, Examples(("c",), fingerprint="q")])


def test_blocks_hold_as_many_gradients_as_ids():
    grads, _ = SMALL.trees()
    assert block_rows(block(grads, named(3))) == len(Examples(named(3))) == 3
    with refused("block: leaf 'linear' holds 3 examples", "2 ids"):
        block_rows(block(grads, named(2)))


@pytest.mark.parametrize(
    "wrong", [dict(weight=torch.ones(2, 2)), dict(weight=torch.ones(2), tokens=torch.ones(3))]
)
def test_examples_are_checked_for_shape_under_test(wrong: dict[str, Any]):
    with pytest.raises(TypeError):
        Examples(named(2), **wrong)


def test_blocks_of_the_same_numbers_are_still_different_values():
    grads = GradTree({"b": diagonal("b", torch.ones(1, 1, 1), torch.ones(1, 1, 3))})
    assert Block(grads, Examples(("a",))) != Block(grads, Examples(("a",)))
