"""The right answers: autograd of one example at a time, and what is compared with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attrax.core import Block, collect, stored

Loss = Callable[[nn.Module, Any], Tensor]
Grads = Mapping[str, Tensor]


def row(batch: Mapping[str, Any], i: int) -> dict[str, Any]:
    """One example of a batch, as a batch."""
    return {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in batch.items()}


def unpadded(batch: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    """One document of a batch without its padding."""
    keep = batch["attention_mask"][i].bool()
    return {k: v[i : i + 1, keep] for k, v in batch.items()}


def gradients(model: nn.Module, loss: Loss, examples: list[Any]) -> dict[str, Tensor]:
    """Gradients [B, ...] of each example's loss by itself, for every trainable parameter."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {n: [] for n in named}
    for example in examples:
        grads = torch.autograd.grad(loss(model, example).sum(), list(named.values()), allow_unused=True)
        for (name, p), g in zip(named.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(found) for name, found in rows.items()}


def one_by_one(model: nn.Module, batch: Mapping[str, Any], loss: Loss) -> dict[str, Tensor]:
    """`gradients` of the rows of a batch."""
    count = next(v.shape[0] for v in batch.values() if isinstance(v, Tensor))
    return gradients(model, loss, [row(batch, i) for i in range(count)])


def captured(source: Any) -> dict[str, Tensor]:
    """Gradients of a source by parameter, in the stored layout."""
    return stored(collect(source).grads)


def block_gradients(block: Block) -> dict[str, Tensor]:
    """Gradients of a block by parameter, in the stored layout."""
    return stored(block.grads)


def assert_gradients(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float = 1e-10, zero: float = 1e-14
) -> None:
    """The same parameters, each within a share of the largest entry of the right answer.

    A gradient that is zero up to rounding (of the bias of attention keys) is held to a share, `zero`, of the largest.
    """
    assert set(actual) == set(expected), set(actual) ^ set(expected)
    floor = zero * max(float(right.abs().max()) for right in expected.values())
    for name, right in expected.items():
        assert actual[name].shape == right.shape, f"{name}: {tuple(actual[name].shape)}"
        scale, error = float(right.abs().max()), float((actual[name] - right).abs().max())
        assert error <= within * scale + floor, f"{name}: off by {error:.3g}, largest entry {scale:.3g}"


def assert_rounded(
    actual: Sequence[Grads], autograd: Sequence[Grads], exact: Sequence[Grads], zero: float = 1e-8
) -> None:
    """Gradients of the examples of a batch in low precision, by parameter: each is off by 1e-6 of its largest entry
    beyond twice what autograd of one example at a time is off at most.

    A gradient that is zero up to rounding is held to a share, `zero`, of the largest.
    """

    own: dict[str, float] = {}
    for found, right in zip(autograd, exact, strict=True):
        for name, g in right.items():
            error, scale = float((found[name].double() - g).abs().max()), float(g.abs().max())
            own[name] = max(own.get(name, 0.0), error / scale if scale else 0.0)
    for found, right in zip(actual, exact, strict=True):
        assert set(found) == set(right), set(found) ^ set(right)
        floor = zero * max(float(g.abs().max()) for g in right.values())
        for name, g in right.items():
            error, scale = float((found[name].double() - g).abs().max()), float(g.abs().max())
            allowed = (1e-6 + 2 * own[name]) * scale + floor
            assert error <= allowed, (
                f"{name}: off by {error:.3g}, largest entry {scale:.3g}, {allowed:.3g} allowed"
            )


def flat(grads: Mapping[str, Tensor]) -> Tensor:
    """All parameters of each example, [B, P], by sorted name."""
    return torch.cat([grads[n].reshape(len(grads[n]), -1) for n in sorted(grads)], 1)
