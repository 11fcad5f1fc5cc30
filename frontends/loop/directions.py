"""Blocks of update directions in place of gradients: they wait whole for the optimizer step that gives them."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from attrax.core import Block, Directions, GradTree, Leaf, Optimizer, Transform, covers, directed
from attrax.core.algebra import scale_examples
from attrax.core.tree import target_scale
from attrax.frontends.loop.reweighing import rescaled
from attrax.frontends.runs.optimizers import read_optimizer


class Waiting:
    """Blocks whose gradients wait for their directions."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Block, Directions, dict[str, Leaf | None]]] = []

    def add(self, block: Block, how: Directions) -> None:
        """Take a block of whole gradients."""
        self._blocks.append((block, how, {}))

    def rescale(self, scale: Mapping[str, float]) -> None:
        """The share in `.grad` of all blocks that wait was multiplied by a number, by parameter."""
        self._blocks = [(rescaled(block, scale), how, done) for block, how, done in self._blocks]

    def turn(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, factor: float, transform: Transform | None
    ) -> None:
        """An optimizer is about to step: turn the gradients that it uses.

        Args:
            optimizer: The optimizer.
            model: The model.
            factor: What turns captured gradients into shares of those that the optimizer uses.
            transform: Applied to the directions.

        Raises:
            ValueError: If the optimizer has no directions or moves part of a leaf only, or a block does not know its
                loss weights.
        """
        if not self._blocks:
            return
        rules, states = read_optimizer(optimizer, model)
        for block, how, done in self._blocks:
            own = {n: _variant(rule, how.variant) for n, rule in rules.items()}
            change = directed(own, states, centered=how.centered)
            try:
                scale = target_scale(block.examples, how.target)
            except ValueError as error:
                raise ValueError(f"capture: directions={how}: {error}") from None
            if how.target == "as_trained":
                scale = torch.full((len(block.examples),), factor, dtype=torch.float64)
            for name, leaf in block.grads.items():
                if name in done or rules.keys().isdisjoint(covers(leaf)):
                    continue
                _refuse_divided(leaf, rules)
                moved = change(name, scale_examples(leaf, scale))
                done[name] = moved if transform is None or moved is None else transform(name, moved)

    def take(self) -> tuple[list[Block], list[Block]]:
        """Blocks of directions, without loss weights; and those that no step used."""
        ready = [(block, done) for block, _, done in self._blocks if done]
        unused = [block for block, _, done in self._blocks if not done]
        self._blocks = []
        return [
            Block(GradTree(_kept(done, block)), replace(block.examples, weight=None)) for block, done in ready
        ], unused

    def clear(self) -> list[Block]:
        """Forget the blocks that wait: their gradients were thrown away."""
        waiting, self._blocks = self.blocks, []
        return waiting

    @property
    def blocks(self) -> list[Block]:
        """The whole gradients that wait."""
        return [block for block, _, _ in self._blocks]

    @property
    def needs_factor(self) -> bool:
        """Whether a block is to be on the scale of training."""
        return any(how.target == "as_trained" for _, how, _ in self._blocks)


def _variant(rule: Optimizer, variant: str) -> Optimizer:
    if variant == "torch":
        return rule
    if rule.kind not in ("adam", "adamw"):
        raise ValueError(
            f"capture: directions: variant 'official' is one of Adam; the optimizer is '{rule.kind}'."
        )
    return replace(rule, kind="less")


def _refuse_divided(leaf: Leaf, rules: Mapping[str, Optimizer]) -> None:
    if left := [n for n in covers(leaf) if n not in rules]:
        raise ValueError(
            f"capture: directions: an optimizer moves {[n for n in covers(leaf) if n in rules]} but not {left}, of "
            "one layer (or of layers with one input). One optimizer must move all of them: use groups of one "
            "optimizer, or exclude the layers."
        )


def _kept(done: Mapping[str, Leaf | None], block: Block) -> dict[str, Leaf]:
    """Directions in the order of the block's leaves."""
    return {n: leaf for n in block.grads if (leaf := done.get(n)) is not None}
