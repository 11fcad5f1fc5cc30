"""Convolutions: linear layers whose rows are patches of the input, one at every output location.

A patch is a window onto the padded input; all windows of a batch are one strided view, and the only copy is the one
that lays them out as rows (none for depthwise kernels in one dimension).  A transposed convolution exchanges the roles:
its rows are input locations, and windows are taken of the output gradient.  Groups are blocks that share locations.
"""

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn
from torch.nn import functional

from attrax.core.algebra import wide
from attrax.core.layers.linear import bias
from attrax.core.layers.rule import Rule, overrides, own
from attrax.core.leaves import Factorized, Grouped, Leaf, Materialized, Part

ConvNd = nn.Conv1d | nn.Conv2d | nn.Conv3d
ConvTransposeNd = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def convolution(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """y_l = sum_k W_k x_{s l + d k - p} + b:  dW = sum_l g_l patch_l^T, db = sum_l g_l, per group.

    Raises:
        ValueError: If the input is a single example without its batch axis.
    """
    assert isinstance(module, ConvNd)
    _batched(module, x)
    x = functional.pad(
        x, _padding(module), "constant" if module.padding_mode == "zeros" else module.padding_mode
    )
    a = _patches(x, module.groups, module.kernel_size, module.stride, module.dilation, g.shape[2:])
    weight = _leaf(a, _places(g, module.groups), tuple(module.weight.shape), transposed=False)
    return own(module, {"weight": weight, "bias": bias(_places(g, 1).squeeze(1))})


def transposed_convolution(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """y_{s l + d k - p} += W_k^T x_l, y += b:  dW = sum_l x_l patch_l(g)^T per group, db = sum over outputs of g.

    The bias is summed over other rows than the weight, so its gradient is built and can not be folded.

    Raises:
        ValueError: If the input is a single example without its batch axis.
    """
    assert isinstance(module, ConvTransposeNd)
    _batched(module, x)
    padded = functional.pad(g, _margins(module, x.shape[2:], g.shape[2:]))
    patches = _patches(padded, module.groups, module.kernel_size, module.stride, module.dilation, x.shape[2:])
    weight = _leaf(_places(x, module.groups), patches, tuple(module.weight.shape), transposed=True)
    total = g.sum(list(range(2, g.ndim)), dtype=wide(g.dtype))
    shift = Materialized(total, (Part("bias", g.shape[1]),))
    return own(module, {"weight": weight, "bias": shift})


def _batched(module: ConvNd | ConvTransposeNd, x: Tensor) -> None:
    axes = 2 + len(module.kernel_size)
    if x.ndim != axes:
        raise ValueError(
            f"{type(module).__name__}: got an input of shape {tuple(x.shape)}; expected {axes} axes, the first of them "
            "the examples. Unsqueeze a single example."
        )


def _padding(module: ConvNd) -> list[int]:
    """Margins of the input, last axis first as torch wants them; "same" puts the odd one at the end."""
    if module.padding == "valid":
        return [0] * 2 * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [margin for total in reversed(totals) for margin in (total // 2, total - total // 2)]
    return [int(p) for p in reversed(module.padding) for _ in range(2)]


def _margins(module: ConvTransposeNd, inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """Margins of the output gradient, last axis first, so that every input location has a whole window."""
    margins: list[int] = []
    for n, out, k, s, d, p in zip(
        inputs, outputs, module.kernel_size, module.stride, module.dilation, module.padding, strict=True
    ):
        span = s * (n - 1) + d * (k - 1) + 1
        margins = [int(p), span - int(p) - out, *margins]
    return margins


def _places(x: Tensor, groups: int) -> Tensor:
    """[B, U N, ...] -> a view [B, U, T, N]."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, prod(x.shape[2:])).transpose(2, 3)


def _patches(
    x: Tensor,
    groups: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    places: Sequence[int],
) -> Tensor:
    """Windows of x [B, U N, ...] at the first `places` along each axis, [B, U, T, N kernel]."""
    B, channels = x.shape[0], x.shape[1] // groups
    size = (B, groups, channels, *kernel, *places)
    example, channel, *steps = x.stride()
    within = [step * d for step, d in zip(steps, dilation, strict=True)]
    between = [step * s for step, s in zip(steps, stride, strict=True)]
    windows = x.as_strided(size, (example, channels * channel, channel, *within, *between))
    return windows.reshape(B, groups, channels * prod(kernel), prod(places)).transpose(2, 3)


def _leaf(a: Tensor, g: Tensor, shape: tuple[int, ...], *, transposed: bool) -> Factorized | Grouped:
    part = Part("weight", g.shape[1] * g.shape[3], transposed=transposed, shape=shape)
    return Factorized(a.squeeze(1), g.squeeze(1), (part,)) if g.shape[1] == 1 else Grouped(a, g, (part,))


PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RULES = (
    *(
        Rule(c.__name__, c, convolution, rows=False, refuse=overrides(c, "forward", "_conv_forward"))
        for c in PLAIN
    ),
    *(
        Rule(c.__name__, c, transposed_convolution, rows=False, refuse=overrides(c, "forward"))
        for c in TRANSPOSED
    ),
)
