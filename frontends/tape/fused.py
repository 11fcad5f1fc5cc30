"""Output heads that a trainer has fused with the loss: the head's weight is used, but the head is never called.

TRL computes log-probabilities of labels in tiles, from the last hidden states and the head's weight, in one autograd
node.  That node holds all that is needed: when the gradient of the log-probabilities arrives, the gradient of the
logits follows from the definition, and from there on the head is a linear layer like any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_NODE = "ChunkedLogProbFunction"


def fused_heads(output: Any) -> list[Any]:
    """The nodes in which log-probabilities inside a model's output were computed."""
    found = output.get("log_probs") if isinstance(output, Mapping) else None
    pending = [found.grad_fn] if isinstance(found, Tensor) and found.grad_fn is not None else []
    nodes: list[Any] = []
    while pending:
        node = pending.pop()
        if _NODE in type(node).__name__:
            nodes.append(node)
        else:
            pending += [parent for parent, _ in node.next_functions if parent is not None]
    return nodes


def logit_gradients(
    node: Mapping[str, Any], saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Float[Tensor, "N V"]:
    """Gradient of the logits of each position.

    Args:
        node: How the logits are scaled (`kernel_args` of the node).
        saved: Hidden states [N, H], weight [V, H], bias [V] or None and targets [N].
        grads: Gradients of the log-probabilities [N] and of the entropies [N], None for zero.
    """
    hidden, weight, bias, targets = saved[:4]
    with torch.enable_grad():
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        plain = torch.nn.functional.linear(hidden.detach().to(dtype), weight.detach().to(dtype))
        logits = (plain if bias is None else plain + bias.detach().to(dtype)).requires_grad_()
        x = logits * node["logit_scale"]
        x = torch.tanh(x / node["softcap"]) * node["softcap"] if node["HAS_SOFTCAP"] else x
        log = (x * node["inv_t"]).log_softmax(-1)
        outputs = [log.gather(1, targets[:, None])[:, 0], -(log.exp() * log).sum(-1)]
        pairs = [(y, g.to(dtype)) for y, g in zip(outputs, grads, strict=False) if g is not None]
        (found,) = torch.autograd.grad([y for y, _ in pairs], logits, [g for _, g in pairs])
    return found


def in_rows(x: Tensor, mask: Tensor) -> Tensor:
    """Values of the positions that predict, or only of those with a label, as [B, T, ...]; the last predicts nothing.

    >>> in_rows(torch.tensor([5.0, 6.0]), torch.tensor([[True, False], [False, True]]))
    tensor([[5., 0., 0.],
            [0., 6., 0.]])
    """
    if len(x) == mask.numel():
        each = x.unflatten(0, tuple(mask.shape))
    else:
        each = x.new_zeros(*mask.shape, *x.shape[1:])
        each[mask] = x
    return torch.cat([each, torch.zeros_like(each[:, :1])], 1)


def output_head(model: nn.Module) -> nn.Module | None:
    """The layer that makes the logits of a Hugging Face model."""
    model = getattr(model, "module", model)
    getter = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):
        return None
    return head if isinstance(head, nn.Module) else None
