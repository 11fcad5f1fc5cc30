"""Tiny models, in float64 and with fixed weights: every way a layer is used that the tape has to get right."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

Checkpointing = str | None
VOCAB = 11


def seeded(build: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A model whose weights depend on the seed only, in eval mode; norm weights are not left at one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().to(dtype).eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(0.3 * torch.randn_like(p))
    return model


def run(block: Callable[[Tensor], Tensor], x: Tensor, how: Checkpointing) -> Tensor:
    """A block, as it is or under activation checkpointing ("reentrant", "nonreentrant")."""
    return block(x) if how is None else checkpoint(block, x, use_reentrant=how == "reentrant")


class MLP(nn.Module):
    """Three linear layers."""

    def __init__(self, *, bias: bool = True, inplace: bool = False, how: Checkpointing = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=bias), nn.Linear(6, 6, bias=bias)
        self.last = nn.Linear(6, 3, bias=bias)
        self.act: nn.Module = nn.ReLU(inplace=True) if inplace else nn.Tanh()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        return self.last(run(lambda h: self.act(self.second(h)), h, self.how))


class Block(nn.Module):
    """Causal attention with separate q, k, v, then a gated MLP with gate and up fed by one tensor."""

    def __init__(self, d: int, norm: Callable[[int], nn.Module], bias: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = norm(d), norm(d)
        self.q, self.k, self.v = (nn.Linear(d, d, bias=bias) for _ in range(3))
        self.o = nn.Linear(d, d, bias=bias)
        self.gate, self.up = nn.Linear(d, 2 * d, bias=bias), nn.Linear(d, 2 * d, bias=bias)
        self.down = nn.Linear(2 * d, d, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.ln1(x)
        scores = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(h.shape[-1])
        x = x + self.o(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ self.v(h))
        h = self.ln2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TinyLM(nn.Module):
    """A causal language model with learned positions looked up as [1, T]."""

    def __init__(
        self,
        *,
        d: int = 6,
        layers: int = 2,
        tied: bool = False,
        bias: bool = True,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        how: Checkpointing = None,
        shared_norm: bool = False,
    ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(16, d)
        self.blocks = nn.ModuleList(Block(d, norm, bias) for _ in range(layers))
        self.ln = norm(d)
        self.head = nn.Linear(d, VOCAB, bias=False)
        self.how = how
        if tied:
            self.head.weight = self.tok.weight
        if shared_norm:
            for block in self.blocks:
                block.ln1 = block.ln2 = self.ln

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        T = input_ids.shape[1]
        positions = torch.arange(T)[None] if position_ids is None else position_ids
        mask = torch.ones(T, T, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, :] | torch.eye(T, dtype=torch.bool)
        x = self.tok(input_ids) + self.pos(positions)
        for block in self.blocks:
            x = run(lambda h, block=block: block(h, mask), x, self.how)
        return self.head(self.ln(x))


class LossLM(nn.Module):
    """A language model that returns its own mean loss over predicted tokens, as Hugging Face models do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lm = TinyLM(**options)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.lm(input_ids, attention_mask)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def classes(gen: Generator, rows: int = 4, width: int = 4) -> dict[str, Tensor]:
    """A batch for a classifier."""
    x = torch.randn(rows, width, generator=gen, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (rows,), generator=gen)}


def documents(gen: Generator, lengths: list[int], width: int | None = None) -> dict[str, Tensor]:
    """Token documents, padded on the right: ids 1 and up, labels -100 on padding."""
    width = width or max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), width), generator=gen)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
