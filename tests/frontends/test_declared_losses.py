"""A declared loss that the cross entropy of the model's logits contradicts is refused; others are not doubted."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Block
from attrax.frontends import capture
from attrax.frontends.loop.rowweight import row_weight

from .models import MLP, classes, seeded

B, T, V = 6, 4, 5


class Words(nn.Module):
    """Logits [B, T, V] as a tensor, a mapping, a tuple or an object."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.table, self.head, self.form = nn.Embedding(V, 3), nn.Linear(3, V), form

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.table(input_ids)))
        return {
            "tensor": lambda: logits,
            "mapping": lambda: {"logits": logits},
            "tuple": lambda: (logits, None),
            "object": lambda: type("Output", (), {"logits": logits})(),
        }[self.form]()


def ce(reduction: str, **options: Any) -> Any:
    return lambda z, y: F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction=reduction, **options)


def mean_of_sums(z: Tensor, y: Tensor) -> Tensor:
    return ce("sum")(z, y) / len(z)


def run(declared: str, loss: Any, rng: torch.Generator, rows: int = B, **options: Any) -> Tensor | None:
    model, batch, blocks = seeded(MLP), classes(rng, rows), list[Block]()
    with capture(model, loss=declared, sinks=[blocks.append], **options):
        loss(model(batch["x"]), batch["y"]).backward()
    return blocks[0].examples.weight


@pytest.mark.parametrize(
    ("declared", "loss", "fits"),
    [("sum", ce("mean"), "example_mean"), ("example_mean", ce("sum"), "sum")],
)
def test_a_contradiction_is_refused(rng, declared, loss, fits):
    with pytest.raises(ValueError, match=f"'{declared}' was declared.*6 rows counts .*that of loss='{fits}'"):
        run(declared, loss, rng)


@pytest.mark.parametrize("form", ["tensor", "mapping", "tuple", "object"])
@pytest.mark.parametrize("declared", ["sum", "token_mean"])
def test_tokens_are_told_from_rows(rng, form, declared):
    """With ignored labels: 15 of 24 count."""
    model = seeded(lambda: Words(form))
    ids = torch.randint(V, (B, T), generator=rng)
    labels = ids.masked_fill(torch.arange(T) < torch.tensor([1, 0, 2, 3, 1, 2])[:, None], -100)
    labels = torch.cat([labels[:, 1:], torch.full((B, 1), -100)], 1)
    mean = ce("mean" if declared == "sum" else "sum", ignore_index=-100)
    with capture(model, loss=declared) as running:
        out = model(ids, labels=torch.cat([ids[:, :1], labels[:, :-1]], 1))
        logits = {"tensor": lambda: out, "mapping": lambda: out["logits"], "tuple": lambda: out[0]}.get(
            form, lambda: out.logits
        )()
        with pytest.raises(
            ValueError, match=f"'{declared}' was declared.*of {int((labels >= 0).sum())} rows"
        ):
            mean(logits, labels).backward()
    assert running is not None


@pytest.mark.parametrize(
    ("declared", "loss"),
    [
        ("sum", ce("sum")),
        ("example_mean", ce("mean")),
        ("sum", ce("sum", weight=torch.tensor([1 / 6, 1.0, 2.0], dtype=torch.float64))),
        ("sum", lambda z, y: 0.5 * ce("sum")(z, y)),
        ("sum", ce("sum", label_smoothing=0.1)),
        ("sum", lambda z, y: ce("mean", label_smoothing=0.1)(z, y)),
        ("sum", lambda z, y: (z.softmax(-1) - F.one_hot(y, 3)).square().mean()),
        ("sum", lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).double())),
        ("sum", lambda z, y: ce("mean")(z / 0.7, y)),
        ("sum", lambda z, y: ce("sum")(z.mul_(1 / B), y)),
        ("sum", lambda z, y: ce("mean")(z, y) + z.square().sum()),
    ],
)
def test_what_is_no_contradiction_passes(rng, declared, loss):
    """Weights of classes, losses times a number, other losses, logits that were changed in place."""
    weight = run(declared, loss, rng)
    assert weight is not None
    assert torch.allclose(weight, torch.full_like(weight, 1.0 if declared == "sum" else 1 / B))


def test_one_example_has_one_weight(rng):
    assert run("sum", ce("mean"), rng, 1) is not None


def test_only_the_first_batch_is_looked_at(rng):
    model, batch = seeded(MLP), classes(rng, B)
    with capture(model, loss="sum"):
        for reduction in ("sum", "mean"):
            ce(reduction)(model(batch["x"]), batch["y"]).backward()


def test_the_weight_of_rows(rng):
    """Against the number that the loss was multiplied by, for any shape and in either precision."""
    for shape, dtype, c in [
        ((7, 3), torch.float64, 0.3),
        ((2, 5, 9), torch.float32, 4.0),
        ((90, 2), torch.float64, 1.0),
    ]:
        z = torch.randn(shape, generator=rng, dtype=dtype).requires_grad_()
        y = torch.randint(shape[-1], shape[:-1], generator=rng)
        (c * F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum")).backward()
        found = row_weight(z.detach(), z.grad)
        assert found is not None and abs(found - c) < 1e-5
        uneven = torch.arange(1.0, 1 + z.shape[0]).reshape(-1, *[1] * (z.ndim - 1)).to(dtype)
        assert row_weight(z.detach(), z.grad * uneven) is None
    alike = torch.randn(1, 4, generator=rng).expand(3, 4).clone().requires_grad_()
    F.cross_entropy(alike, torch.ones(3, dtype=torch.int64), label_smoothing=0.1).backward()
    assert row_weight(alike.detach(), alike.grad) is None
    assert row_weight(torch.zeros(3, 4), torch.zeros(3, 4)) is None
