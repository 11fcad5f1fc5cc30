"""Linear-type layers: one matrix between the input and the output of every row."""

from dataclasses import replace

from torch import Tensor, nn

from attrax.core.algebra import wide
from attrax.core.layers.rule import Rule, own
from attrax.core.leaves import Diagonal, Factorized, Leaf, Part


def rows(x: Tensor) -> Tensor:
    """[B, ..., N] -> [B, T, N]."""
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.shape[0] else x.new_zeros(0, 1, x.shape[-1])


def bias(g: Tensor) -> Diagonal:
    """Leaf of a bias that is added to every row [B, T, No]."""
    return Diagonal(g.new_ones(1, 1, 1).expand(*g.shape[:2], 1), g, (Part("bias", g.shape[-1]),))


def linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = x W^T + b:  dW = sum_t g_t x_t^T, db = sum_t g_t."""
    a, g = rows(x), rows(g)
    return own(module, {"weight": Factorized(a, g, (Part("weight", g.shape[-1]),)), "bias": bias(g)})


def transposed_linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Leaf]:
    """Y = x W + b (Hugging Face Conv1D): the stored weight is [Ni, No]."""
    leaves = linear(module, x, g)
    weight = leaves["weight"]
    assert isinstance(weight, Factorized)
    return leaves | {"weight": replace(weight, parts=(Part("weight", g.shape[-1], transposed=True),))}


def bilinear(module: nn.Module, x: tuple[Tensor, Tensor], g: Tensor) -> dict[str, Leaf]:
    """y_o = x1^T W_o x2 + b_o:  dW = sum_t g_t (x1_t kron x2_t)^T, the weight seen as [No, N1 N2]."""
    assert isinstance(module, nn.Bilinear)
    one, two, g = rows(x[0]), rows(x[1]), rows(g)
    pairs = (one.to(wide(one.dtype)).unsqueeze(-1) * two.unsqueeze(-2)).flatten(2)
    part = Part("weight", g.shape[-1], shape=tuple(module.weight.shape))
    return own(module, {"weight": Factorized(pairs, g, (part,)), "bias": bias(g)})


def _refuse_conv1d(module: nn.Module) -> str | None:
    weight = getattr(module, "weight", None)
    return None if isinstance(weight, Tensor) and weight.ndim == 2 else "not a matrix product x W + b"


RULES = (
    Rule("Linear", nn.Linear, linear, shares_input=True),
    Rule("Conv1D (Hugging Face)", "Conv1D", transposed_linear, shares_input=True, refuse=_refuse_conv1d),
    Rule("Bilinear", nn.Bilinear, bilinear, inputs=("input1", "input2")),
)
