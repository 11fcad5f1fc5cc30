"""Normalizing layers: a scale and a shift of every entry, or every channel, of a normalized input.

The normalized input is computed anew from the layer's input, in float32 or better; dividing the output by the scale
would lose digits where the scale is small.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attrax.core.algebra import wide
from attrax.core.layers.linear import bias, rows
from attrax.core.layers.rule import Rule, own
from attrax.core.leaves import Diagonal, Leaf, Part


def scale(module: nn.Module, x: Tensor, g: Tensor, shape: Sequence[int]) -> dict[str, Leaf]:
    """Leaves of ``y = x * weight + bias`` over the trailing axes `shape`."""
    axes, width = len(shape), prod(shape)
    x = rows(x.reshape(*x.shape[: x.ndim - axes], width))
    g = rows(g.reshape(*g.shape[: g.ndim - axes], width))
    stored = tuple(shape) if axes > 1 else ()
    shift = replace(bias(g), parts=(Part("bias", width, shape=stored),))
    return own(module, {"weight": Diagonal(x, g, (Part("weight", width, shape=stored),)), "bias": shift})


def layer_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = (x - mean) / sqrt(var + eps) * w + b over the trailing axes."""
    assert isinstance(module, nn.LayerNorm)
    axes = list(range(-len(module.normalized_shape), 0))
    return scale(module, _standardized(x.to(wide(x.dtype)), axes, module.eps), g, module.normalized_shape)


def _standardized(x: Tensor, axes: list[int], eps: float) -> Tensor:
    centered = x - x.mean(axes, keepdim=True)
    return centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()


def rms_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = x / sqrt(mean(x^2) + eps) * w; eps=None is the machine epsilon of the computation dtype."""
    assert isinstance(module, nn.RMSNorm)
    x = x.to(wide(x.dtype))
    axes = list(range(-len(module.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    normal = x * (x.square().mean(axes, keepdim=True) + eps).rsqrt()
    return scale(module, normal, g, module.normalized_shape)


def scaled_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = norm(x) * w or norm(x) * (1 + w), for norms that models define themselves.

    norm(x) is the module's own output at w = 1 less that at w = 0 (zero, or norm(x) itself for 1 + w, as in Gemma; the
    difference is exact), so its epsilon, casts and order of operations are reproduced whatever they are.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    one, zero = (functional_call(module, {"weight": torch.full_like(weight, w)}, (x,)) for w in (1.0, 0.0))
    return {"weight": scale(module, (one - zero).to(wide(x.dtype)), g, weight.shape)["weight"]}


def _channels(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Leaves of ``y = x * weight + bias`` per channel, of x [B, C, ...]: every further place is a row."""
    x, g = (v.reshape(*v.shape[:2], prod(v.shape[2:])).transpose(1, 2) for v in (x, g))
    return own(module, {"weight": Diagonal(x, g, (Part("weight", g.shape[-1]),)), "bias": bias(g)})


def group_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = (x - mean) / sqrt(var + eps) * w + b, statistics over each group of channels and all places."""
    assert isinstance(module, nn.GroupNorm)
    x = x.to(wide(x.dtype))
    size = x.shape[1] // module.num_groups * prod(x.shape[2:])
    groups = x.reshape(x.shape[0], module.num_groups, size)
    return _channels(module, _standardized(groups, [2], module.eps).reshape(x.shape), g)


def instance_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = (x - mean) / sqrt(var + eps) * w + b, statistics over the places of each channel, or the stored ones."""
    mean, variance, eps = _stored(module)
    _batched(module, x)
    if mean is None or variance is None or module.training:
        x = x.to(wide(x.dtype))
        return _channels(module, _standardized(x, list(range(2, x.ndim)), eps), g)
    return _channels(module, _by_stored(x, mean, variance, eps), g)


def batch_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = (x - mean) / sqrt(var + eps) * w + b with the stored statistics.

    Raises:
        ValueError: In training mode, where an example's output depends on the others.
    """
    reason = refuse_batch_norm(module)
    if reason is not None:
        raise ValueError(f"{type(module).__name__}: {reason}.")
    mean, variance, eps = _stored(module)
    assert mean is not None and variance is not None
    return _channels(module, _by_stored(x, mean, variance, eps), g)


def _stored(module: nn.Module) -> tuple[Tensor | None, Tensor | None, float]:
    """Stored statistics of a norm with the attributes that torch's have."""
    mean, variance, eps = (getattr(module, name) for name in ("running_mean", "running_var", "eps"))
    return mean, variance, eps


def _by_stored(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    x = x.to(wide(x.dtype))
    mean, factor = (v.to(x.dtype).reshape(-1, *[1] * (x.ndim - 2)) for v in (mean, (variance + eps).rsqrt()))
    return (x - mean) * factor


def _batched(module: nn.Module, x: Tensor) -> None:
    """Refuse the input of one example without its batch axis, whose first axis would be taken for it."""
    expected = {"InstanceNorm1d": 3, "InstanceNorm2d": 4, "InstanceNorm3d": 5}
    for cls in type(module).__mro__:
        if cls.__name__ in expected and x.ndim != expected[cls.__name__]:
            raise ValueError(
                f"{cls.__name__}: got an input of shape {tuple(x.shape)}; expected {expected[cls.__name__]} axes, the "
                "first of them the examples. Unsqueeze a single example."
            )


def refuse_batch_norm(module: nn.Module) -> str | None:
    """Why a batch norm couples the examples of a batch, or None."""
    if module.training:
        return "normalizes by the statistics of the batch in training mode, which couple its examples; use eval()"
    if getattr(module, "running_mean", None) is None:
        return "has no running statistics and normalizes by those of the batch, which couple its examples"
    return None


def _refuse_channels_first(module: nn.Module) -> str | None:
    first = getattr(module, "data_format", None) == "channels_first"
    return "normalizes the channels of [B, C, ...], which its rule takes for the last axis" if first else None


RULES = (
    Rule("LayerNorm", nn.LayerNorm, layer_norm, refuse=_refuse_channels_first),
    Rule("RMSNorm", nn.RMSNorm, rms_norm, parameters=("weight",)),
    Rule("RMSNorm", r"(?!.*Gated).*RMSNorm|T5LayerNorm", scaled_norm, parameters=("weight",)),
    Rule("GroupNorm", nn.GroupNorm, group_norm, rows=False),
    Rule("InstanceNorm", "_InstanceNorm", instance_norm, rows=False),
    Rule("BatchNorm", "_BatchNorm", batch_norm, rows=False, refuse=refuse_batch_norm),
)
