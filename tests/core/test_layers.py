"""Layer rules in every configuration, against autograd of one example at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Diagonal, Factorized, GradTree, Grouped, Leaf, Materialized, gram_leaf, stored
from attrax.core.factorization import RULES, Rule, find_rule
from attrax.core.layers.convolution import convolution, transposed_convolution
from attrax.core.layers.norm import rms_norm

from .dense import assert_same, gradient
from .layer_cases import (
    Case,
    ToyExperts,
    bags,
    bilinears,
    check,
    convolutions,
    embeddings,
    experts_of,
    linears,
    norms,
    prelus,
    routing,
    simple,
    toy_experts,
    transposed_convolutions,
)
from .toys import generator, normal, refused

FAMILIES = {f.__name__: f for f in (linears, embeddings, bags, norms, prelus, bilinears, toy_experts)}
EVEN = "ignore:Using padding='same' with even kernel lengths"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_configuration_gives_the_gradients_of_autograd(family):
    for case in FAMILIES[family]():
        check(case)


@pytest.mark.filterwarnings(EVEN)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_convolutions_give_the_gradients_of_autograd(d):
    few = {"kernel_size": [2, 3], "dilation": [2], "bias": [True]}
    for case in convolutions(d, **few, stride=[2], groups=[1, 4], pad=[(1, "zeros"), (2, "circular")]):
        check(case)
    for case in convolutions(d, **few, stride=[1], groups=[2], pad=[("same", "zeros"), ("same", "reflect")]):
        check(case)
    few["dilation"] = [1]
    for case in convolutions(d, **few, stride=[1], groups=[1], pad=[("same", "zeros"), ("same", "circular")]):
        check(case)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_transposed_convolutions_give_the_gradients_of_autograd(d):
    few = {"kernel_size": [2], "dilation": [3], "bias": [True], "padding": [1]}
    for case in transposed_convolutions(d, **few, stride=[1, 2], groups=[1, 2], output_padding=[0, 2]):
        check(case)


@pytest.mark.slow
@pytest.mark.filterwarnings(EVEN)
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("family", [convolutions, transposed_convolutions])
def test_every_convolution_gives_the_gradients_of_autograd(family, d):
    for case in family(d):
        check(case)


def leaves_of(case: Case, target: Tensor) -> dict[str, Any]:
    rule = find_rule(case.module)
    assert rule is not None
    with torch.no_grad():
        return dict(rule.factorize(case.module, case.inputs if rule.inputs else case.inputs[0], target))


ALL = {**FAMILIES, "conv": lambda: [simple(nn.Conv1d, 4, 8, 3, shape=(4, 6), groups=g) for g in (1, 2)]}
ALL["transposed"] = lambda: [simple(nn.ConvTranspose1d, 4, 8, 3, shape=(4, 6), groups=g) for g in (1, 2)]


@pytest.mark.parametrize("family", ALL)
def test_rules_give_leaves_of_existing_parameters_only(family):
    for case in ALL[family]():
        with torch.no_grad():
            target = case.output(*case.inputs)
        found = leaves_of(case, target)
        assert set(found) == {n for n, _ in case.module.named_parameters()}, case.label
        rule = find_rule(case.module)
        assert rule is not None and set(found) <= set(rule.parameters)


@pytest.mark.parametrize("family", [family for family in ALL if family != "bags"])
def test_rules_take_batches_without_examples(family):
    for case in ALL[family]():
        with torch.no_grad():
            target = case.output(*case.inputs)
        none = replace(case, inputs=tuple(v[:0] for v in case.inputs))
        for name, values in stored(GradTree(leaves_of(none, target[:0]))).items():
            assert values.shape == (0, *case.module.get_parameter(name).shape), case.label


def test_rules_are_linear_in_the_output_gradient():
    """Masking or weighing `g` must mask or weigh the gradient: the oracle above has one g only."""
    for case in (simple(nn.Conv1d, 4, 8, 3, shape=(4, 6)), simple(nn.PReLU, shape=(4, 6)), *toy_experts()):
        with torch.no_grad():
            g = normal(generator(1), *case.output(*case.inputs).shape)
        keep = (torch.arange(g.shape[1]) < 3).double()[:, None]
        whole, part, rest = (stored(GradTree(leaves_of(case, x))) for x in (g, g * keep, g * (1 - keep)))
        for name, values in whole.items():
            assert_same(part[name] + rest[name], values)


def test_a_bias_of_a_convolution_shares_its_rows_and_that_of_a_transposed_one_has_none():
    for make, rule in ((nn.Conv1d, convolution), (nn.ConvTranspose1d, transposed_convolution)):
        case = simple(make, 4, 8, 1, shape=(4, 6))
        found: dict[str, Leaf] = rule(case.module, case.inputs[0], case.output(*case.inputs).detach())
        weight, bias = found["weight"], found["bias"]
        assert isinstance(weight, Factorized) and weight.parts[0].transposed == (make is nn.ConvTranspose1d)
        if make is nn.Conv1d:
            assert isinstance(bias, Diagonal) and torch.equal(bias.g, weight.g)
        else:
            assert isinstance(bias, Materialized)


def test_a_folded_bias_and_a_kernel_are_stored_apart():
    case = simple(nn.Conv2d, 4, 8, 3, shape=(4, 6, 6))
    g = normal(generator(1), *case.output(*case.inputs).shape)
    found = leaves_of(case, g)
    part = replace(found["weight"].parts[0], bias="bias")
    folded = stored(GradTree({"weight": replace(found["weight"], bias=True, parts=(part,))}))
    for name, values in stored(GradTree(found)).items():
        assert_same(folded[name], values)


def test_grouped_convolutions_are_grouped_leaves_and_depthwise_patches_are_not_copied():
    case = simple(nn.Conv1d, 4, 4, 3, shape=(4, 16), groups=4, padding=2)
    weight = leaves_of(case, case.output(*case.inputs).detach())["weight"]
    assert isinstance(weight, Grouped) and weight.a.shape == (3, 4, 18, 3) and weight.positions
    assert weight.a.untyped_storage().nbytes() == 3 * 4 * 20 * 8
    assert_same(gram_leaf(weight, weight), torch.einsum("boi,qoi->bq", gradient(weight), gradient(weight)))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_layout_of_memory_does_not_matter(make, kernel):
    case = simple(make, 4, 8, kernel, shape=(4, 5, 6), groups=2)
    x = case.inputs[0]
    wide = torch.zeros(3, 5, 7, 8, dtype=torch.float64)
    wide[:, 1:, 1:6, 1:7] = x
    views = (x.contiguous(memory_format=torch.channels_last), wide[:, 1:, 1:6, 1:7], x[:1].expand_as(x))
    for view in views:
        g = case.output(view).detach()
        check(replace(case, inputs=(view,)))
        far = replace(case, inputs=(view.contiguous(),))
        assert_same(
            gradient(
                leaves_of(replace(case, inputs=(view,)), g.contiguous(memory_format=torch.channels_last))[
                    "weight"
                ]
            ),
            gradient(leaves_of(far, g.contiguous())["weight"]),
        )


def test_experts_are_differentiated_inside_a_backward():
    """A front-end calls the rule while the backward of the model runs, with gradients switched off."""
    case = experts_of("", ToyExperts(True, True, False), routing(6, 6, 2, 4))
    found: list[dict[str, Tensor]] = []

    class Tap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            found.append(stored(GradTree(leaves_of(case, grads[0]))))
            return grads[0]

    out = case.output(*case.inputs)
    target = normal(generator(2), *out.shape)
    (Tap.apply(out) * target).sum().backward()
    for name, parameter in case.module.named_parameters():
        assert parameter.grad is not None
        assert_same(found[0][name].sum(0), parameter.grad)


def test_experts_under_autocast_take_inputs_of_low_precision():
    module = ToyExperts(True, True, False).float()
    hidden, index, weights = routing(6, 6, 2, 4)
    case = experts_of("", module, (hidden.bfloat16(), index, weights.bfloat16()))
    low = stored(GradTree(leaves_of(case, hidden.bfloat16())))
    full = stored(
        GradTree(leaves_of(experts_of("", module, (hidden.float(), index, weights.float())), hidden.float()))
    )
    for name, values in low.items():
        assert_same(values, full[name], within=0.1)


def test_only_routed_tokens_are_rows():
    case = experts_of("", ToyExperts(True, False, False), routing(6, 6, 2, 4))
    hidden, index, weights = case.inputs
    g = normal(generator(1), *hidden.shape)
    most = max(int((index[b] == e).sum()) for b in range(3) for e in range(5))
    for leaf in leaves_of(case, g).values():
        assert isinstance(leaf, Grouped) and leaf.g.shape[:3] == (3, 5, most) and not leaf.positions
    g[:, 1:] = 0
    assert leaves_of(case, g)["down_proj"].g.shape[2] == 1


def test_machine_epsilon_of_a_low_precision_norm_is_that_of_its_computation():
    module, x = nn.RMSNorm(64).bfloat16(), 1e-3 * normal(generator(1), 2, 5, 64, dtype=torch.bfloat16)
    weight = rms_norm(module, x, torch.ones_like(x))["weight"]
    assert isinstance(weight, Diagonal) and weight.x.dtype == torch.float32
    assert_same(weight.x, module(x).detach().float(), within=2**-8)


def reason(module: nn.Module) -> str:
    rule = find_rule(module)
    assert rule is not None
    return rule.refuse(module) or ""


class Standardized(nn.Conv2d):
    """Normalizes its kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


class Padded(nn.ConvTranspose1d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(nn.functional.pad(input, [1, 1]), output_size)


class ChannelsFirst(nn.LayerNorm):
    data_format = "channels_first"


class DenseExperts(nn.Module):
    """Every token goes to every expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 6, 4))
        self.down_proj = nn.Parameter(torch.zeros(2, 4, 3))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


def test_what_a_rule_would_get_wrong_is_refused_by_name():
    assert "Standardized overrides Conv2d.forward" in reason(Standardized(1, 1, 1))
    assert "Padded overrides ConvTranspose1d.forward" in reason(Padded(1, 1, 1))
    assert "couple its examples" in reason(nn.BatchNorm1d(3))
    assert "no running statistics" in reason(nn.BatchNorm1d(3, track_running_stats=False).eval())
    assert reason(nn.BatchNorm1d(3).eval()) == ""
    assert "scale_grad_by_freq" in reason(nn.EmbeddingBag(3, 2, mode="sum", scale_grad_by_freq=True))
    assert "channels of [B, C, ...]" in reason(ChannelsFirst(3))
    assert "DenseExperts is not the fused layer" in reason(DenseExperts())
    module = ToyExperts(True, False, False)
    assert reason(module) == ""
    module.has_post_expert_norm = True
    assert "normalizes what each expert puts out" in reason(module)


def test_inputs_whose_first_axis_is_not_the_examples_are_refused():
    x = torch.zeros(4, 6)
    for module, name in (
        (nn.Conv1d(4, 4, 1), "Conv1d"),
        (nn.InstanceNorm1d(4, affine=True), "InstanceNorm1d"),
    ):
        rule = find_rule(module)
        assert rule is not None
        with refused(name, "(4, 6)", "expected 3 axes", "Unsqueeze"):
            rule.factorize(module, x, x)
    with refused("BatchNorm1d", "couple its examples"):
        rule = find_rule(nn.BatchNorm1d(4))
        assert rule is not None
        rule.factorize(nn.BatchNorm1d(4), x, x)


def test_rules_name_the_arguments_they_take():
    named = {rule.name: rule.inputs for rule in RULES if rule.inputs}
    assert named["Bilinear"] == ("input1", "input2")
    assert named["EmbeddingBag"] == ("input", "offsets", "per_sample_weights")
    assert named["Experts"] == ("hidden_states", "top_k_index", "top_k_weights")
    assert Rule("mine", nn.Linear, lambda module, x, g: {}).inputs == ()


FUSED = {
    "mixtral": ("MixtralExperts", {"num_local_experts": 5, "intermediate_size": 3}),
    "qwen3_moe": ("Qwen3MoeExperts", {"num_experts": 5, "moe_intermediate_size": 3}),
    "olmoe": ("OlmoeExperts", {"num_experts": 5, "intermediate_size": 3}),
    "gpt_oss": ("GptOssExperts", {"num_local_experts": 5, "intermediate_size": 3}),
}


@pytest.mark.parametrize("model", FUSED)
def test_fused_experts_of_transformers_give_the_gradients_of_autograd(model):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    import importlib

    name, sizes = FUSED[model]
    config = transformers.AutoConfig.for_model(model, hidden_size=4, num_experts_per_tok=2, **sizes)
    config._experts_implementation = "eager"
    code = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    module = getattr(code, name)(config).double()
    for k, p in enumerate(module.parameters()):
        p.data = normal(generator(k), *p.shape)
    check(experts_of(name, module, routing(6, 5, 2, 4)))
