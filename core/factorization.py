"""Layer rules: how each layer type's parameters turn (input, output gradient) into leaves.

A rule is a pure function ``(module, x, g) -> {parameter attribute: leaf}`` of the layer's input `x` [B, ..., Ni] and
the gradient `g` [B, ..., No] of the loss with respect to its output.  Axes between the first and the last are rows.
It knows nothing of hooks, names or other layers: folding biases, joining calls, tying and stacking happen afterwards
and alike for every rule.  A user adds a layer type by putting one more `Rule` in front of `RULES`.

Rules are looked up along the module's class hierarchy, by class or by class name (Hugging Face defines one RMSNorm a
model); whether a rule really fits is checked against autograd by the front-ends (`verify`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attrax.core.algebra import wide
from attrax.core.leaves import Diagonal, Factorized, Leaf, Lookup, Part

Factorize: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Mapping[str, Leaf]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One layer type.

    Attributes:
        name: Shown in coverage reports.
        match: The module class, or a regular expression its class name must match in full.
        factorize: The rule.
        shares_input: Whether `a` is the layer's input unchanged, so that layers fed by one tensor can be stacked.
        parameters: Attributes the rule may return a leaf for; others of the layer are not captured.
        refuse: ``module -> reason`` for configurations the rule does not cover (they are recomputed), else None.
        inputs: Names of the forward arguments the rule takes, as a tuple of tensors or None; empty for the first
            tensor argument alone.
        rows: Whether further axes between the first and the last are rows, however many there are.
    """

    name: str
    match: type[nn.Module] | str
    factorize: Factorize
    shares_input: bool = False
    parameters: tuple[str, ...] = ("weight", "bias")
    inputs: tuple[str, ...] = ()
    rows: bool = True
    refuse: Callable[[nn.Module], str | None] = lambda module: None


def _rows(x: Tensor) -> Tensor:
    """[B, ..., N] -> [B, T, N]."""
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.shape[0] else x.new_zeros(0, 1, x.shape[-1])


def _bias(g: Tensor) -> Diagonal:
    return Diagonal(g.new_ones(1, 1, 1).expand(*g.shape[:2], 1), g, (Part("bias", g.shape[-1]),))


def linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = x W^T + b:  dW = sum_t g_t x_t^T, db = sum_t g_t."""
    a, g = _rows(x), _rows(g)
    return {"weight": Factorized(a, g, (Part("weight", g.shape[-1]),)), "bias": _bias(g)}


def transposed_linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = x W + b (Hugging Face Conv1D): the stored weight is [Ni, No]."""
    leaves = linear(module, x, g)
    weight = leaves["weight"]
    assert isinstance(weight, Factorized)
    return leaves | {"weight": replace(weight, parts=(Part("weight", g.shape[-1], transposed=True),))}


def embedding(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """y_t = W[id_t]:  dW = sum_t onehot(id_t) g_t^T; the padding row has no gradient."""
    assert isinstance(module, nn.Embedding)
    ids = x.reshape(x.shape[0], -1) if x.shape[0] else x.new_zeros(0, 1)
    g = _rows(g)
    if module.padding_idx is not None:
        g = g * (ids != module.padding_idx).unsqueeze(-1)
    return {"weight": Lookup(ids, g, (Part("weight", module.num_embeddings),), module.num_embeddings)}


def scaled_embedding(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """y_t = s W[id_t] with a constant s (Gemma, BART)."""
    return embedding(module, x, g * getattr(module, "embed_scale"))  # noqa: B009


def _scale(x: Tensor, g: Tensor, shape: Sequence[int]) -> dict[str, Leaf]:
    """Leaves of ``y = x * weight + bias`` over the trailing axes `shape`."""
    axes, width = len(shape), 1
    for size in shape:
        width *= size
    x = x.reshape(*x.shape[: x.ndim - axes], width)
    g = g.reshape(*g.shape[: g.ndim - axes], width)
    stored = tuple(shape) if axes > 1 else ()
    x, g = _rows(x), _rows(g)
    weight, bias = Diagonal(x, g, (Part("weight", width, shape=stored),)), _bias(g)
    return {"weight": weight, "bias": replace(bias, parts=(Part("bias", width, shape=stored),))}


def layer_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = (x - mean) / sqrt(var + eps) * w + b over the trailing axes."""
    assert isinstance(module, nn.LayerNorm)
    axes = list(range(-len(module.normalized_shape), 0))
    x = x.to(wide(x.dtype))
    centered = x - x.mean(axes, keepdim=True)
    normal = centered * (centered.square().mean(axes, keepdim=True) + module.eps).rsqrt()
    return _scale(normal, g, module.normalized_shape)


def rms_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = x / sqrt(mean(x^2) + eps) * w; eps=None is the machine epsilon of the computation dtype."""
    assert isinstance(module, nn.RMSNorm)
    x = x.to(wide(x.dtype))
    axes = list(range(-len(module.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    normal = x * (x.square().mean(axes, keepdim=True) + eps).rsqrt()
    return {"weight": _scale(normal, g, module.normalized_shape)["weight"]}


def scaled_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = norm(x) * w or norm(x) * (1 + w), for norms that models define themselves.

    norm(x) is the module's own output at w = 1 less that at w = 0 (zero, or norm(x) itself for 1 + w, as in Gemma; the
    difference is exact), so its epsilon, casts and order of operations are reproduced whatever they are.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    one, zero = (functional_call(module, {"weight": torch.full_like(weight, w)}, (x,)) for w in (1.0, 0.0))
    return {"weight": _scale((one - zero).to(wide(x.dtype)), g, weight.shape)["weight"]}


def _refuse_embedding(module: nn.Module) -> str | None:
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq divides by counts of the whole batch; per-example gradients are undefined"
    if type(module).forward is not nn.Embedding.forward:
        return f"{type(module).__name__} computes the ids it looks up, which the rule does not see"
    return None


def _refuse_conv1d(module: nn.Module) -> str | None:
    weight = getattr(module, "weight", None)
    return None if isinstance(weight, Tensor) and weight.ndim == 2 else "not a matrix product x W + b"


RULES: tuple[Rule, ...] = (
    Rule("Linear", nn.Linear, linear, shares_input=True),
    Rule("Conv1D (Hugging Face)", "Conv1D", transposed_linear, shares_input=True, refuse=_refuse_conv1d),
    Rule("Embedding (scaled)", r".*ScaledWordEmbedding", scaled_embedding, parameters=("weight",)),
    Rule("Embedding", nn.Embedding, embedding, parameters=("weight",), refuse=_refuse_embedding),
    Rule("LayerNorm", nn.LayerNorm, layer_norm),
    Rule("RMSNorm", nn.RMSNorm, rms_norm, parameters=("weight",)),
    Rule("RMSNorm", r"(?!.*Gated).*RMSNorm|T5LayerNorm", scaled_norm, parameters=("weight",)),
)


def find_rule(module: nn.Module, rules: Sequence[Rule] = RULES) -> Rule | None:
    """The rule of the nearest class in the module's hierarchy, or None.

    >>> rule = find_rule(nn.Linear(2, 3))
    >>> rule.name if rule else None
    'Linear'
    """
    for cls in type(module).__mro__:
        for rule in rules:
            named = isinstance(rule.match, str) and re.fullmatch(rule.match, cls.__name__)
            if named or rule.match is cls:
                return rule
    return None
