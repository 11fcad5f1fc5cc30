"""Layer rules against autograd, one example at a time."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Factorized, GradTree, Leaf, stored
from attrax.core.factorization import RULES, Rule, find_rule
from attrax.core.layers.embedding import scaled_embedding
from attrax.core.layers.linear import linear

from .dense import assert_same
from .toys import generator, normal


class Conv1D(nn.Module):
    """A linear layer that stores its weight [Ni, No]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(generator(1), inputs, outputs))
        self.bias = nn.Parameter(normal(generator(2), outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ShiftedRMSNorm(nn.Module):
    """Multiplies by 1 + w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(generator(3), width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (1 + self.weight)


class PlainRMSNorm(ShiftedRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * self.weight


class TinyScaledWordEmbedding(nn.Embedding):
    embed_scale = 3.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale


def rule_for(module: nn.Module) -> Rule:
    rule = find_rule(module)
    assert rule is not None
    return rule


def by_autograd(module: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Per-example gradients of <target, module(x)>."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    rows = [
        torch.autograd.grad((module(x[k : k + 1]) * target[k : k + 1]).sum(), parameters, allow_unused=True)
        for k in range(len(x))
    ]
    columns = zip(*rows, strict=True)
    return {
        name: torch.stack([torch.zeros_like(p) if g is None else g for g in column])
        for name, p, column in zip(names, parameters, columns, strict=True)
    }


def by_rule(module: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    leaves: Mapping[str, Leaf] = rule_for(module).factorize(module, x, target)
    return stored(
        GradTree({name: leaf for name, leaf in leaves.items() if getattr(module, name, None) is not None})
    )


def float_input(*shape: int) -> Tensor:
    return normal(generator(9), 3, *shape)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 7, (3, *shape), generator=generator(8))


CASES = {
    "linear, no rows": (lambda: nn.Linear(4, 5), lambda: float_input(4)),
    "linear": (lambda: nn.Linear(4, 5), lambda: float_input(6, 4)),
    "linear, images": (lambda: nn.Linear(4, 5), lambda: float_input(2, 3, 4)),
    "linear without bias": (lambda: nn.Linear(4, 5, bias=False), lambda: float_input(6, 4)),
    "transposed": (lambda: Conv1D(4, 4), lambda: float_input(6, 4)),
    "embedding": (lambda: nn.Embedding(7, 4), lambda: ids(6)),
    "embedding, no rows": (lambda: nn.Embedding(7, 4), lambda: ids()),
    "embedding, two axes": (lambda: nn.Embedding(7, 4), lambda: ids(2, 3)),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), lambda: ids(20)),
    "scaled embedding": (lambda: TinyScaledWordEmbedding(7, 4), lambda: ids(6)),
    "layer norm": (lambda: nn.LayerNorm(4), lambda: float_input(6, 4)),
    "layer norm, no rows": (lambda: nn.LayerNorm(4), lambda: float_input(4)),
    "layer norm over two axes": (lambda: nn.LayerNorm((3, 4)), lambda: float_input(2, 3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4, eps=1e-2), lambda: float_input(6, 4)),
    "rms norm, machine epsilon": (lambda: nn.RMSNorm(4), lambda: float_input(6, 4)),
    "rms norm of a model": (lambda: PlainRMSNorm(4), lambda: float_input(6, 4)),
    "rms norm with 1 + w": (lambda: ShiftedRMSNorm(4), lambda: float_input(6, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_give_the_gradients_of_autograd(case):
    make, inputs = CASES[case]
    module, x = make().double(), inputs()
    target = normal(generator(10), *module(x).shape)
    expected, found = by_autograd(module, x, target), by_rule(module, x, target)
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert_same(found[name], values, within=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if "norm" not in case])
def test_rules_take_batches_without_examples(case):
    make, inputs = CASES[case]
    module, x = make().double(), inputs()
    found = by_rule(module, x[:0], normal(generator(0), 0, *module(x).shape[1:]))
    assert {len(values) for values in found.values()} == {0}


def test_rules_say_what_they_do_not_cover():
    counted = nn.Embedding(7, 4, scale_grad_by_freq=True)
    assert "scale_grad_by_freq" in (rule_for(counted).refuse(counted) or "")
    assert rule_for(nn.Embedding(7, 4)).refuse(nn.Embedding(7, 4)) is None


def test_scales_multiply_the_gradient():
    module = TinyScaledWordEmbedding(7, 4).double()
    x, g = ids(5), float_input(5, 4)
    (leaf,) = scaled_embedding(module, x, g).values()
    (plain,) = rule_for(nn.Embedding(7, 4)).factorize(nn.Embedding(7, 4), x, 3 * g).values()
    assert_same(stored(GradTree({"w": leaf}))["weight"], stored(GradTree({"w": plain}))["weight"])


def test_rules_are_those_of_the_nearest_class():
    class Mine(nn.Linear):
        pass

    class GatedRMSNorm(ShiftedRMSNorm):
        pass

    assert rule_for(Mine(2, 3)).name == "Linear"
    own = Rule("Mine", "Mine", linear)
    assert find_rule(Mine(2, 3), (own, *RULES)) is own
    assert find_rule(nn.LSTM(1, 1)) is None and find_rule(nn.ReLU()) is None


def test_a_transposed_layer_holds_a_matrix():
    convolution = Conv1D(4, 5)
    convolution.weight = nn.Parameter(torch.ones(2, 3, 4))
    assert rule_for(Conv1D(4, 5)).refuse(Conv1D(4, 5)) is None
    assert "matrix product" in (rule_for(convolution).refuse(convolution) or "")


def test_only_plain_linear_layers_share_their_input():
    sharing = {rule.name for rule in RULES if rule.shares_input}
    assert sharing == {"Linear", "Conv1D (Hugging Face)"}
    x = float_input(6, 4)
    weight = linear(nn.Linear(4, 5), x, float_input(6, 5))["weight"]
    assert isinstance(weight, Factorized) and weight.a.data_ptr() == x.data_ptr()
