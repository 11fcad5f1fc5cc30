"""Layers in all their configurations, and what each rule must give: autograd of one example at a time, in float64."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from attrax.core import GradTree, stored
from attrax.core.factorization import find_rule

from .dense import assert_same
from .toys import generator, normal

EXAMPLES = 3


@dataclass(frozen=True)
class Case:
    """A layer and its inputs.

    Attributes:
        label: The configuration.
        module: The layer, float64.
        inputs: What its rule takes, examples first.
        run: The layer's output for a batch of such inputs; by default ``module(*inputs)``.
        alone: The inputs of example k alone; by default row k of all.
    """

    label: str
    module: nn.Module
    inputs: tuple[Any, ...]
    run: Callable[..., Tensor] | None = None
    alone: Callable[[int], tuple[Any, ...]] | None = None

    def output(self, *inputs: Any) -> Tensor:
        return (self.run or self.module)(*inputs)

    def example(self, k: int) -> tuple[Any, ...]:
        return self.alone(k) if self.alone else tuple(v[k : k + 1] for v in self.inputs)


def check(case: Case) -> None:
    """The rule's leaves are the gradients of <target, output> of every example alone."""
    with torch.no_grad():
        shape = case.output(*case.inputs).shape
    target = normal(generator(10), *shape)
    names, parameters = zip(*case.module.named_parameters(), strict=True)
    expected: list[list[Tensor]] = []
    for k in range(shape[0]):
        total = (case.output(*case.example(k)) * target[k : k + 1]).sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        expected.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, dense, strict=True)]
        )
    found = by_rule(case, target)
    assert set(found) == set(names), f"{case.label}: {sorted(found)} is not {sorted(names)}"
    for name, values in zip(names, zip(*expected, strict=True), strict=True):
        try:
            assert_same(found[name], torch.stack(values), within=1e-10)
        except AssertionError as error:
            raise AssertionError(f"{case.label}: {name} {error}") from None


def by_rule(case: Case, target: Tensor) -> dict[str, Tensor]:
    rule = find_rule(case.module)
    assert rule is not None and rule.refuse(case.module) is None, case.label
    with torch.no_grad():
        leaves = rule.factorize(case.module, case.inputs if rule.inputs else case.inputs[0], target)
        return stored(GradTree(leaves))


def settings(**choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the choices."""
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def simple(make: Callable[..., nn.Module], *args: Any, shape: Sequence[int], **options: Any) -> Case:
    """A layer of one input of 3 examples."""
    module = make(*args, **options).double()
    for k, p in enumerate(module.parameters()):
        p.data = normal(generator(20 + k), *p.shape)
    for k, b in enumerate(module.buffers()):
        if b.is_floating_point():
            b.data = normal(generator(30 + k), *b.shape).abs() + 0.1
    text = ", ".join([*map(str, args), *(f"{name}={value}" for name, value in options.items())])
    label = f"{make.__name__}({text}) on {list(shape)}"
    return Case(label, module, (normal(generator(9), EXAMPLES, *shape),))


SPACE = (5, 6, 4)
PADDINGS = [
    (0, "zeros"),
    (1, "zeros"),
    ("same", "zeros"),
    ("valid", "zeros"),
    (1, "reflect"),
    (2, "replicate"),
]
PADDINGS += [(2, "circular"), ("same", "circular"), ("same", "reflect")]


def convolutions(d: int, **given: Sequence[Any]) -> Iterator[Case]:
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1]
    every = {
        "kernel_size": [1, 2, 3, (2, 3, 1)[:d]],
        "stride": [1, 2, (1, 2, 3)[:d]],
        "dilation": [1, 2],
        "groups": [1, 2, 4],
        "bias": [False, True],
        "pad": PADDINGS,
    }
    for options in settings(**(every | given)):
        padding, mode = options.pop("pad")
        if padding == "same" and options["stride"] != 1:
            continue
        shape = (4, *(size + 2 for size in SPACE[:d]))
        yield simple(make, 4, 8, shape=shape, padding=padding, padding_mode=mode, **options)


def transposed_convolutions(d: int, **given: Sequence[Any]) -> Iterator[Case]:
    make = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[d - 1]
    every = {
        "kernel_size": [1, 2, 3, (2, 3, 1)[:d]],
        "stride": [1, 2, (1, 2, 3)[:d]],
        "dilation": [1, 3],
        "groups": [1, 2],
        "bias": [False, True],
        "padding": [0, 1],
        "output_padding": [0, 1, 2],
    }
    for options in settings(**(every | given)):
        strides = options["stride"] if isinstance(options["stride"], tuple) else (options["stride"],)
        if options["output_padding"] >= max(min(strides), options["dilation"]):
            continue
        yield simple(make, 4, 6, shape=(4, *SPACE[:d]), **options)


def norms() -> Iterator[Case]:
    for shape, size in product([(4,), (6, 4), (2, 3, 4)], [(4,), (3, 4)]):
        if shape[-len(size) :] == size:
            for affine, bias in ((True, True), (True, False)):
                yield simple(nn.LayerNorm, size, shape=shape, elementwise_affine=affine, bias=bias)
            for eps in (None, 1e-2):
                yield simple(nn.RMSNorm, size, shape=shape, eps=eps)
    for shape, groups in product([(6,), (6, 5), (6, 5, 4), (6, 2, 3, 2)], [1, 2, 3, 6]):
        if not (shape == (6,) and groups == 6):
            yield simple(nn.GroupNorm, groups, 6, shape=shape, eps=1e-2)
    for d, stored_statistics, training in product([1, 2, 3], [False, True], [False, True]):
        kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
        case = simple(
            kinds[d - 1], 4, shape=(4, *SPACE[:d]), affine=True, track_running_stats=stored_statistics
        )
        case.module.train(training)
        yield case
    for kind, shape in (
        (nn.BatchNorm1d, (4,)),
        (nn.BatchNorm1d, (4, 5)),
        (nn.BatchNorm2d, (4, 5, 6)),
        (nn.BatchNorm3d, (4, 2, 3, 2)),
        (nn.SyncBatchNorm, (4, 5, 6)),
    ):
        case = simple(kind, 4, shape=shape)
        case.module.eval()
        yield case


def prelus() -> Iterator[Case]:
    for shape in ((), (4,), (4, 3), (4, 3, 2), (4, 3, 2, 2)):
        yield simple(nn.PReLU, shape=shape)
        if shape:
            yield simple(nn.PReLU, 4, shape=shape)


def bilinears() -> Iterator[Case]:
    for shape, bias in product([(), (5,), (2, 3)], [False, True]):
        module = nn.Bilinear(4, 3, 5, bias=bias).double()
        inputs = (normal(generator(1), 3, *shape, 4), normal(generator(2), 3, *shape, 3))
        yield Case(f"Bilinear(bias={bias}) on {list(shape)}", module, inputs)


def linears() -> Iterator[Case]:
    for shape, bias in product([(4,), (6, 4), (2, 3, 4)], [False, True]):
        yield simple(nn.Linear, 4, 5, shape=shape, bias=bias)


def embeddings() -> Iterator[Case]:
    options = settings(padding_idx=[None, 2, -1], sparse=[False, True], max_norm=[None, 0.5])
    for option, shape in product(options, [(), (9,), (2, 5)]):
        module = nn.Embedding(7, 4, **option).double()
        ids = torch.randint(0, 7, (EXAMPLES, *shape), generator=generator(8))
        yield Case(f"Embedding({option}) on {list(shape)}", module, (ids,))


LENGTHS = (3, 0, 5, 1)
"""Ids in each bag."""


def bags() -> Iterator[Case]:
    every = settings(
        mode=["sum", "mean", "max"],
        padding_idx=[None, 2],
        flat=[False, True],
        last=[False, True],
        weighed=[False, True],
    )
    for option in every:
        mode, padding_idx, flat, last, weighed = option.values()
        if (weighed and mode != "sum") or (last and not flat):
            continue
        module = nn.EmbeddingBag(4, 5, mode=mode, padding_idx=padding_idx, include_last_offset=last).double()
        label = f"EmbeddingBag({option})"
        yield flat_bag(label, module, weighed, LENGTHS) if flat else even_bag(label, module, weighed)
    module = nn.EmbeddingBag(4, 5, mode="sum").double()
    yield flat_bag("EmbeddingBag, all bags empty", module, False, (0, 0))
    sparse = nn.EmbeddingBag(4, 5, mode="sum", sparse=True).double()
    yield flat_bag("EmbeddingBag(sparse)", sparse, False, LENGTHS)
    yield even_bag("EmbeddingBag(max_norm)", nn.EmbeddingBag(4, 5, mode="mean", max_norm=0.5).double(), False)


def even_bag(label: str, module: nn.EmbeddingBag, weighed: bool) -> Case:
    ids = torch.randint(0, 4, (EXAMPLES, 6), generator=generator(8))
    ids[1] = 2
    weights = normal(generator(3), EXAMPLES, 6) if weighed else None
    return Case(
        label,
        module,
        (ids, None, weights),
        alone=lambda k: (ids[k : k + 1], None, None if weights is None else weights[k : k + 1]),
    )


def flat_bag(label: str, module: nn.EmbeddingBag, weighed: bool, lengths: Sequence[int]) -> Case:
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    ids = torch.randint(0, 4, (int(ends[-1]),), generator=generator(8))
    weights = normal(generator(3), len(ids)) if weighed else None
    offsets = torch.cat([starts, ends[-1:]]) if module.include_last_offset else starts

    def alone(k: int) -> tuple[Any, ...]:
        bag = slice(int(starts[k]), int(ends[k]))
        limits = [0, lengths[k]] if module.include_last_offset else [0]
        return ids[bag], torch.tensor(limits), None if weights is None else weights[bag]

    return Case(label, module, (ids, offsets, weights), alone=alone)


class ToyExperts(nn.Module):
    """Experts written out one token at a time, with the attributes that transformers gives its fused ones."""

    def __init__(self, has_gate: bool, has_bias: bool, is_transposed: bool) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        E, H, inner, wide = 5, 4, 3, 6 if has_gate else 3
        name = "gate_up_proj" if has_gate else "up_proj"
        self.up_name = name
        up, down = (E, wide, H), (E, H, inner)
        if is_transposed:
            up, down = (E, H, wide), (E, inner, H)
        self.register_parameter(name, nn.Parameter(normal(generator(1), *up)))
        self.down_proj = nn.Parameter(normal(generator(2), *down))
        if has_bias:
            self.register_parameter(name + "_bias", nn.Parameter(normal(generator(3), E, wide)))
            self.down_proj_bias = nn.Parameter(normal(generator(4), E, H))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return self.act_fn(gate) * up

    def matrix(self, name: str, e: int) -> Tensor:
        weight = getattr(self, name)[e]
        return weight.T if self.is_transposed else weight

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = []
        for x, experts, weights in zip(hidden_states, top_k_index.tolist(), top_k_weights, strict=True):
            total = torch.zeros_like(x)
            for e, w in zip(experts, weights, strict=True):
                if e == 5:
                    continue
                h = self.matrix(self.up_name, e) @ x
                h = h + getattr(self, self.up_name + "_bias")[e] if self.has_bias else h
                y = self.matrix("down_proj", e) @ (self._apply_gate(h) if self.has_gate else self.act_fn(h))
                total = total + w * (y + self.down_proj_bias[e] if self.has_bias else y)
            out.append(total)
        return torch.stack(out)


def routing(T: int, E: int, K: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, expert indices (E is none, and some experts are never asked) and weights of 3 examples."""
    index = torch.stack([torch.randperm(E, generator=generator(k))[:K] for k in range(EXAMPLES * T)])
    index = index.reshape(EXAMPLES, T, K)
    index[index == 1] = 0
    return normal(generator(5), EXAMPLES, T, width), index, normal(generator(6), EXAMPLES, T, K)


def experts_of(label: str, module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> Case:
    def run(*inputs: Tensor) -> Tensor:
        return module(*(v.flatten(0, 1) for v in inputs)).unflatten(0, inputs[0].shape[:2])

    return Case(label, module, inputs, run=run)


def toy_experts() -> Iterator[Case]:
    for option in settings(has_gate=[True, False], has_bias=[False, True], is_transposed=[False, True]):
        inputs = routing(6, 6, 2, 4)
        yield experts_of(f"ToyExperts({option})", ToyExperts(**option), inputs)
