"""Models, data, brute-force answers and the fixture of the scenarios in `test_cases*.py`.

Everything is in float64, with weights and data that depend on a seed only.  The right answer is always autograd on one
example at a time, unpadded, without hooks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attrax

CLASSIFY, PREDICT = attrax.classification(), attrax.causal_lm()
IGNORE = -100


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """One thread for tiny tensors, and no run-time type checks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
    torch.set_num_threads(threads)


def seeded(build: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A model in eval mode whose weights depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().to(dtype).eval()


class Net(nn.Module):
    """Two layers with a tanh between them."""

    def __init__(self, Ni: int = 4, hidden: int = 5, No: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(Ni, hidden, bias=bias), nn.Linear(hidden, No, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.tanh(self.l1(x)))


class LM(nn.Module):
    """One attention block with fused q, k, v; positions of shape [1, T]; head optionally tied to the embedding."""

    def __init__(self, vocabulary: int = 11, d: int = 6, *, tied: bool = False) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, d), nn.Embedding(12, d)
        self.ln1, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ln2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.lnf, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        T = input_ids.shape[1]
        x = self.tok(input_ids) + self.pos(torch.arange(T)[None])
        seen = torch.ones(T, T, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None].bool() | torch.eye(T, dtype=torch.bool)
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
        x = x + self.proj(scores.softmax(-1) @ v)
        x = x + self.down(F.gelu(self.up(self.ln2(x))))
        return self.head(self.lnf(x))


class WithLoss(LM):
    """Returns its mean loss over predicted tokens of the batch, as training loops expect it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        logits = super().forward(input_ids, attention_mask)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        return {"loss": loss, "logits": logits}


class Checkpointed(nn.Module):
    """A body under activation checkpointing; layer `shared` runs inside it and outside."""

    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.first, self.shared, self.mid = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.last, self.how = nn.Linear(5, 3), how

    def body(self, h: Tensor) -> Tensor:
        return torch.tanh(self.mid(torch.tanh(self.shared(h))))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = (
            self.body(h)
            if self.how is None
            else checkpoint(self.body, h, use_reentrant=self.how == "reentrant")
        )
        return self.last(torch.tanh(self.shared(h)))


def mean_ce(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a training loop: a mean over the batch."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def each_position(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy summed over positions."""
    return F.cross_entropy(model(batch["x"]).mT, batch["y"], reduction="none").sum(1)


def points(seed: int, rows: int, Ni: int = 4, No: int = 3) -> dict[str, Tensor]:
    """A batch of a classifier."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, Ni, generator=gen, dtype=torch.float64)
    return {"x": x, "y": torch.randint(No, (rows,), generator=gen)}


def steps(seed: int, rows: int, T: int, Ni: int = 4, No: int = 3) -> dict[str, Tensor]:
    """A batch of sequences with a class at every position."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, T, Ni, generator=gen, dtype=torch.float64)
    return {"x": x, "y": torch.randint(No, (rows, T), generator=gen)}


def documents(seed: int, lengths: Sequence[int]) -> list[Tensor]:
    """Token documents; id 0 is kept for padding."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 11, (length,), generator=gen) for length in lengths]


def padded(docs: Sequence[Tensor], width: int | None = None) -> dict[str, Tensor]:
    """Documents padded on the right: ids 0, masked, without labels."""
    width = width or max(map(len, docs))
    fill = lambda x, value: F.pad(x, (0, width - len(x)), value=value)  # noqa: E731
    return {
        "input_ids": torch.stack([fill(x, 0) for x in docs]),
        "attention_mask": torch.stack([fill(torch.ones_like(x), 0) for x in docs]),
        "labels": torch.stack([fill(x, IGNORE) for x in docs]),
    }


def alone(docs: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Every document as a batch of its own, unpadded."""
    return [padded([doc]) for doc in docs]


def part(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some rows of a batch."""
    return {k: v[start:stop] for k, v in batch.items()}


def rows_of(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Every row of a batch as a batch of its own."""
    return [part(batch, i, i + 1) for i in range(len(next(iter(batch.values()))))]


def brute(model: nn.Module, loss: Any, examples: Sequence[Any]) -> dict[str, Tensor]:
    """Gradient [B, ...] of each example's loss by itself, for every trainable parameter."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {n: [] for n in named}
    for example in examples:
        total = loss(model, example).sum()
        grads: Sequence[Tensor | None] = [None] * len(named)
        if total.requires_grad:
            grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        for (n, p), g in zip(named.items(), grads, strict=True):
            found[n].append(torch.zeros_like(p) if g is None else g)
    return {n: torch.stack(gs) for n, gs in found.items()}


def grads_of(source: Any) -> dict[str, Tensor]:
    """attrax's per-example gradients by parameter, in its stored layout."""
    return attrax.stored(attrax.collect(source).grads)


def recorded(model: nn.Module, batches: Sequence[Any], loss: Any, **options: Any) -> dict[str, Tensor]:
    """The same from a training loop that sums its loss over each batch."""
    blocks: list[Any] = []
    with attrax.capture(model, sinks=[blocks.append], loss="sum", **options):
        for batch in batches:
            loss(model, batch).sum().backward()
            model.zero_grad()
    return grads_of(attrax.Blocks(blocks))


def both_give(
    model: nn.Module, batch: Any, loss: Any, right: Mapping[str, Tensor] | None = None, **options: Any
) -> None:
    """`live` and `capture` give these gradients; those of each row by itself if none are named."""
    expected = brute(model, loss, rows_of(batch)) if right is None else right
    all_same(grads_of(attrax.live(model, [batch], loss, **options)), expected)
    all_same(recorded(model, [batch], loss, **options), expected)


def vectors(grads: Mapping[str, Tensor]) -> Tensor:
    """Gradients of all parameters side by side, [B, P]."""
    return torch.cat([grads[n].flatten(1) for n in sorted(grads)], 1)


def same(actual: Tensor, expected: Tensor, within: float = 1e-10) -> None:
    """Equal up to a share of the largest entry."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert (actual - expected).abs().max() <= within * max(float(expected.abs().max()), 1e-3)


def all_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float = 1e-10) -> None:
    """The same parameters with the same gradients."""
    assert set(actual) == set(expected), set(actual) ^ set(expected)
    for name, right in expected.items():
        same(actual[name], right, within)
