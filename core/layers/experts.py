"""Fused expert layers: the matrices of all experts in one parameter [E, ...], of which a token uses a few.

Only routed tokens that carry a gradient are rows.  They are sorted by expert, pushed through their expert once more to
recompute its inner activations, and laid out as [B, E, T, ...] with T the most rows of one expert in one example.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attrax.core.layers.rule import Rule
from attrax.core.leaves import Grouped, Leaf, Part


@dataclass(frozen=True, eq=False, slots=True)
class _Routed:
    """R routed tokens sorted by expert.

    Attributes:
        token: Position of each in [B T].
        choice: Position of each among the K choices of its token.
        place: Position of each in the layout [B, E, rows].
        counts: Tokens of each expert.
        shape: (B, E, rows).
    """

    token: Tensor
    choice: Tensor
    place: Tensor
    counts: list[int]
    shape: tuple[int, int, int]

    def lay_out(self, x: Tensor) -> Tensor:
        """[R, N] -> [B, E, rows, N], absent rows zero."""
        B, E, rows = self.shape
        out = x.new_zeros(B * E * rows, x.shape[1]).index_copy(0, self.place, x)
        return out.reshape(B, E, rows, x.shape[1])

    def times(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Each row times the matrix [N, M] of its expert."""
        out = x.new_empty(x.shape[0], weight.shape[2])
        start = 0
        for e, count in enumerate(self.counts):
            if count:
                rows = slice(start, start + count)
                product = x[rows] @ weight[e].to(x.dtype)
                out[rows] = product if bias is None else product + bias[e].to(x.dtype)
                start += count
        return out


def _route(index: Tensor, carries: Tensor, experts: int) -> _Routed:
    """Sort the choices [B, T, K] of tokens that carry a gradient [B, T]; indices beyond the experts are none."""
    B, T, K = index.shape
    flat = index.reshape(-1)
    real = (flat >= 0) & (flat < experts) & carries.reshape(-1, 1).expand(-1, K).reshape(-1)
    chosen = real.nonzero().squeeze(1)
    example = chosen // max(1, T * K)
    order = torch.argsort(flat[chosen] * B + example, stable=True)
    chosen, example = chosen[order], example[order]
    expert = flat[chosen]
    group = expert * B + example
    counts = torch.bincount(group, minlength=experts * B)
    slot = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group]
    rows = max(1, int(counts.max())) if len(counts) else 1
    place = (example * experts + expert) * rows + slot
    per_expert = counts.reshape(experts, B).sum(1).tolist()
    return _Routed(chosen // K, chosen % K, place, per_expert, (B, experts, rows))


def experts(module: nn.Module, x: tuple[Tensor, Tensor, Tensor], g: Tensor) -> dict[str, Leaf]:
    """y_t = sum_k w_tk D_e gate(U_e x_t),  e = e_tk:  dD_e = sum (w g_t) h_t^T,  dU_e = sum dh_t x_t^T.

    `x` holds the hidden states [B, T, H], the expert indices [B, T, K] and their weights [B, T, K]; a down projection
    D, an up projection U ([gate; up] where the module has gates) and their biases are the parameters, stored [E, N, M],
    or [E, M, N] with ``is_transposed``.
    """
    up_name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    flipped = bool(getattr(module, "is_transposed", False))
    up, down = (_matrix(module, name) for name in (up_name, "down_proj"))
    up_in, down_in = (w if flipped else w.transpose(1, 2) for w in (up, down))
    bias = getattr(module, up_name + "_bias", None)
    hidden, index, weights = x
    routed = _route(index, (g != 0).any(-1), up.shape[0])
    inputs, outputs = hidden.flatten(0, 1)[routed.token], g.flatten(0, 1)[routed.token]
    share = weights.flatten(0, 1)[routed.token, routed.choice].unsqueeze(-1)
    outputs = (outputs * share).to(g.dtype)
    before = routed.times(inputs, up_in, None if bias is None else bias.detach())
    behind = routed.times(outputs, down_in.transpose(1, 2))
    with torch.enable_grad():
        before.requires_grad_()
        inner = _gate(module)(before)
        (into,) = torch.autograd.grad(inner, before, behind.to(inner.dtype))
    found = {
        up_name: _pair(routed, up_name, inputs, into, flipped),
        "down_proj": _pair(routed, "down_proj", inner.detach(), outputs, flipped),
    }
    ones = inputs.new_ones(len(inputs), 1)
    for name, shift in ((up_name, into), ("down_proj", outputs)):
        if isinstance(getattr(module, name + "_bias", None), Tensor):
            found[name + "_bias"] = _pair(
                routed, name + "_bias", ones, shift, False, (up.shape[0], shift.shape[1])
            )
    return dict(found)


def _pair(
    routed: _Routed, name: str, a: Tensor, g: Tensor, transposed: bool, shape: tuple[int, ...] = ()
) -> Grouped:
    part = Part(name, routed.shape[1] * g.shape[1], transposed=transposed, shape=shape)
    return Grouped(routed.lay_out(a), routed.lay_out(g), (part,), positions=False)


def _matrix(module: nn.Module, name: str) -> Tensor:
    weight = getattr(module, name)
    assert isinstance(weight, Tensor)
    return weight.detach()


def _gate(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What an expert does between its two matrices."""
    if getattr(module, "has_gate", True) and hasattr(module, "_apply_gate"):
        return getattr(module, "_apply_gate")  # noqa: B009
    return getattr(module, "act_fn")  # noqa: B009


def _refuse(*names: str) -> Callable[[nn.Module], str | None]:
    def reason(module: nn.Module) -> str | None:
        forward = inspect.unwrap(type(module).forward)
        arguments = tuple(inspect.signature(forward).parameters)[1:]
        matrices = [getattr(module, n, None) for n in ("gate_up_proj", "up_proj", "down_proj")]
        fused = [w for w in matrices if isinstance(w, Tensor) and w.ndim == 3]
        if arguments[:3] != names or len(fused) != 2 or not hasattr(module, "_apply_gate"):
            return (
                f"{type(module).__name__} is not the fused layer of gate_up_proj (or up_proj) and down_proj, called "
                f"with {', '.join(names)}, that the rule is for"
            )
        if getattr(module, "has_post_expert_norm", False):
            return (
                f"{type(module).__name__} normalizes what each expert puts out, which the rule does not see"
            )
        return None

    return reason


PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
FUSED = ("hidden_states", "top_k_index", "top_k_weights")
ROUTER = ("hidden_states", "router_indices", "routing_weights")
RULES = (
    Rule(
        "Experts (gpt-oss)",
        r"(GptOss|OpenAIPrivacyFilter)Experts",
        experts,
        parameters=PARAMETERS,
        refuse=_refuse(*ROUTER),
        inputs=ROUTER,
    ),
    Rule("Experts", r".*Experts", experts, parameters=PARAMETERS, refuse=_refuse(*FUSED), inputs=FUSED),
)
