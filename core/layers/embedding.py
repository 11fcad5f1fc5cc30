"""Embeddings: a row of the weight for every id."""

import torch
from torch import Tensor, nn

from attrax.core.algebra import wide
from attrax.core.layers.linear import rows
from attrax.core.layers.rule import Rule
from attrax.core.leaves import Leaf, Lookup, Part


def embedding(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """y_t = W[id_t]:  dW = sum_t onehot(id_t) g_t^T; the padding row has no gradient, and counts as not looked up.

    This is also the gradient under ``sparse`` (the same numbers) and ``max_norm`` (which renormalizes W in place before
    the look-up).
    """
    assert isinstance(module, nn.Embedding)
    ids = x.reshape(x.shape[0], -1) if x.shape[0] else x.new_zeros(0, 1)
    g = rows(g)
    if module.padding_idx is not None:
        real = ids != module.padding_idx
        ids, g = ids.masked_fill(~real, -1), g * real.unsqueeze(-1)
    return {"weight": _lookup(module, ids, g)}


def _lookup(module: nn.Embedding | nn.EmbeddingBag, ids: Tensor, g: Tensor) -> Lookup:
    size = module.num_embeddings
    return Lookup(ids, g, (Part("weight", size, head=True),), size, sparse=module.sparse)


def scaled_embedding(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """y_t = s W[id_t] with a constant s (Gemma, BART)."""
    return embedding(module, x, g.to(wide(g.dtype)) * getattr(module, "embed_scale"))  # noqa: B009


def embedding_bag(
    module: nn.Module, x: tuple[Tensor, Tensor | None, Tensor | None], g: Tensor
) -> dict[str, Leaf]:
    """y_b = the weighted sum, the mean or the maximum of W[ids of bag b]; every bag is an example.

    Ids are [B, T], or [N] with the offsets at which bags begin.  Ids equal to ``padding_idx`` are in no bag: a mean is
    over the others, and an empty bag has no gradient.

        sum   dW = sum_j w_j onehot(id_j) g_b^T
        mean  dW = (1 / |bag|) sum_j onehot(id_j) g_b^T
        max   dW = sum_j onehot(id_j) (g_b * [j is the first maximum of each entry])^T
    """
    assert isinstance(module, nn.EmbeddingBag)
    ids, weights, inside = _bags(module, *x)
    g = g.to(wide(g.dtype))
    if module.padding_idx is not None:
        inside = inside & (ids != module.padding_idx)
    if module.mode == "max":
        share = _winners(module.weight, ids, inside).to(g.dtype)
    else:
        share = inside.to(g.dtype) if weights is None else inside * weights.to(g.dtype)
        if module.mode == "mean":
            share = share / inside.sum(1, keepdim=True).clamp_min(1)
        share = share.unsqueeze(-1)
    return {"weight": _lookup(module, ids.masked_fill(~inside, -1), share * g.unsqueeze(1))}


def _bags(
    module: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Ids [B, T], weights [B, T] and which of them lie in the bag, of bags in either form."""
    if ids.ndim == 2:
        return ids, weights, torch.ones_like(ids, dtype=torch.bool)
    assert offsets is not None
    ends = (
        offsets[1:]
        if module.include_last_offset
        else torch.cat([offsets[1:], offsets.new_tensor([len(ids)])])
    )
    starts = offsets[:-1] if module.include_last_offset else offsets
    lengths = ends - starts
    steps = torch.arange(max(1, int(lengths.max())) if len(lengths) else 1, device=ids.device)
    inside = steps < lengths.unsqueeze(1)
    if not len(ids):
        return ids.new_zeros(inside.shape), None, inside
    places = (starts.unsqueeze(1) + steps).clamp_max(len(ids) - 1)
    return ids[places], None if weights is None else weights[places], inside


def _winners(weight: Tensor, ids: Tensor, inside: Tensor) -> Tensor:
    """Which id of a bag is the first maximum of each entry [B, T, E]."""
    values = weight[ids].masked_fill(~inside.unsqueeze(-1), -torch.inf)
    steps = torch.arange(ids.shape[1], device=ids.device).unsqueeze(-1)
    return (steps == values.argmax(1, keepdim=True)) & inside.unsqueeze(-1)


def _refuse_embedding(module: nn.Module) -> str | None:
    """An example alone divides by its own counts, a batch by the counts of all: no sum of the one is the other."""
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq divides by counts of the whole batch; per-example gradients are undefined"
    kinds = [cls for cls in type(module).__mro__ if cls in (nn.Embedding, nn.EmbeddingBag)]
    if kinds and getattr(type(module), "forward") is not getattr(kinds[0], "forward"):  # noqa: B009
        return f"{type(module).__name__} computes the ids it looks up, which the rule does not see"
    return None


RULES = (
    Rule("Embedding (scaled)", r".*ScaledWordEmbedding", scaled_embedding, parameters=("weight",)),
    Rule("Embedding", nn.Embedding, embedding, parameters=("weight",), refuse=_refuse_embedding),
    Rule(
        "EmbeddingBag",
        nn.EmbeddingBag,
        embedding_bag,
        parameters=("weight",),
        refuse=_refuse_embedding,
        inputs=("input", "offsets", "per_sample_weights"),
        rows=False,
    ),
)
