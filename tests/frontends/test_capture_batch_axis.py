"""How many examples a call has, where its tensors have first axes of several lengths."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Block
from attrax.frontends import capture

from .loops import recorded
from .models import seeded
from .oracle import assert_gradients, block_gradients, gradients

pytestmark = pytest.mark.usefixtures("unchecked")


class Diffusion(nn.Module):
    """One time for the whole batch, given first."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first, self.second = nn.Embedding(10, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x) + self.time(t)))


class Placed(nn.Module):
    """Tokens and positions [1, T], or a patch table beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos, self.head = nn.Embedding(10, 6), nn.Embedding(8, 6), nn.Linear(6, 10)
        self.patch = nn.Linear(3, 6)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, patches: Tensor | None = None
    ) -> Any:
        x = self.tok(input_ids) + (0 if position_ids is None else self.pos(position_ids))
        return {
            "loss": x.sum(),
            "logits": self.head(torch.tanh(x if patches is None else x + patches.mean(0)[:1])),
        }


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return (output if isinstance(output, Tensor) else output["logits"]).square().sum()


def alone(batch: dict[str, Tensor], example: str, i: int) -> dict[str, Tensor]:
    return {k: v[i : i + 1] if k == example else v for k, v in batch.items()}


def times(rng: Any) -> tuple[nn.Module, str, list[dict[str, Tensor]]]:
    x = torch.randn(9, 4, generator=rng, dtype=torch.float64)
    return (
        seeded(Diffusion),
        "x",
        [{"t": torch.tensor([k]), "x": part} for k, part in enumerate(x.split([4, 1, 4]))],
    )


def positions(rng: Any) -> tuple[nn.Module, str, list[dict[str, Tensor]]]:
    ids = torch.randint(10, (9, 5), generator=rng)
    batches = [{"position_ids": torch.arange(5)[None], "input_ids": part} for part in ids.split([4, 1, 4])]
    model = seeded(Placed)
    model.patch.requires_grad_(False)
    return model, "input_ids", batches


@pytest.mark.parametrize("kind", [times, positions])
def test_a_first_tensor_that_all_examples_share(kind, rng):
    model, name, batches = kind(rng)
    right = [[alone(batch, name, i) for i in range(len(batch[name]))] for batch in batches[:1]]
    expected = gradients(model, squares, right[0])
    blocks, _, _ = recorded(model, batches, squares, {"loss": "sum"}, rate=1e-3)
    assert [len(b.examples) for b in blocks] == [4, 1, 4]
    assert_gradients(block_gradients(blocks[0]), expected)
    assert len(set(blocks[0].examples.ids)) == 4


def test_a_batch_of_one_beside_a_longer_tensor(rng):
    """Patches of one image are not examples."""
    model, blocks = seeded(Placed), []
    model.pos.requires_grad_(False)
    model.patch.requires_grad_(False)
    patches = torch.randn(7, 5, 6, generator=rng, dtype=torch.float64)
    batch = {"input_ids": torch.randint(10, (1, 5), generator=rng), "patches": patches}
    right = gradients(model, squares, [batch])
    with capture(model, loss="sum", sinks=[blocks.append]):
        squares(model, batch).backward()
    assert len(blocks[0].examples) == 1
    assert_gradients(block_gradients(blocks[0]), right)


def test_what_no_output_tells_is_refused(rng):
    class Loss(Diffusion):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return super().forward(t, x).square().sum()

    x = torch.randn(4, 4, generator=rng, dtype=torch.float64)
    with (
        capture(seeded(Loss), loss="sum") as running,
        pytest.raises(RuntimeError, match=r"'t': 1, 'x': 4.*how many examples.*holds the examples first"),
    ):
        running.model(torch.tensor([3]), x)


def test_a_model_that_cannot_be_asked_is_refused(rng):
    """It was called with a cache, which a second call would fill again."""

    class Cache:
        pass

    class Cached(Diffusion):
        def forward(self, t: Tensor, x: Tensor, past: Any = None) -> Tensor:
            return super().forward(t, x)

    x = torch.randn(4, 4, generator=rng, dtype=torch.float64)
    blocks: list[Block] = []
    with capture(seeded(Cached), loss="sum", sinks=[blocks.append]) as running:
        with pytest.raises(RuntimeError, match=r"taken for one example, and returned 4"):
            running.model(torch.tensor([3]), x, Cache())
        running.model(torch.tensor([3]), x).sum().backward()
        running.model(torch.tensor([3]), x, Cache()).sum().backward()
    assert [len(b.examples) for b in blocks] == [4, 4]
