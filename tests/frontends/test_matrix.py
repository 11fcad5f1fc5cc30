"""Every layer, in the configurations of its rule, alone, tied and called twice: live and capture against autograd.

The layers and their inputs are those of the tests of the rules; the right answer is float64 autograd of one example at
a time through the whole model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attrax.frontends import capture, live
from attrax.frontends.model.losses import by_example

from ..core.layer_cases import (
    Case,
    bags,
    bilinears,
    convolutions,
    embeddings,
    linears,
    norms,
    prelus,
    simple,
    toy_experts,
    transposed_convolutions,
)
from ..core.toys import generator, normal
from .oracle import assert_gradients, block_gradients, captured, gradients, one_by_one

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]
Family = Callable[[], Iterator[Case]]


def huggingface() -> Iterator[Case]:
    """Layers with the weight stored [Ni, No], which have a bias always."""
    for shape in ((4,), (6, 4)):
        yield simple(Conv1D, 5, 4, shape=shape)


def attentions() -> Iterator[Case]:
    for bias in (False, True):
        module = nn.MultiheadAttention(4, 2, bias=bias, batch_first=True)
        yield returning(module, f"MultiheadAttention(bias={bias})", lambda m, x: m(x, x, x)[0])


def lstms() -> Iterator[Case]:
    for bias in (False, True):
        yield returning(
            nn.LSTM(4, 3, bias=bias, batch_first=True), f"LSTM(bias={bias})", lambda m, x: m(x)[0]
        )


def returning(module: nn.Module, label: str, output: Callable[[Any, Tensor], Tensor]) -> Case:
    """A module that returns more than its output."""
    for k, p in enumerate(module.double().parameters()):
        p.data = normal(generator(20 + k), *p.shape)
    return Case(label, module, (normal(generator(9), 3, 5, 4),), run=lambda x: output(module, x))


def few_convolutions(d: int) -> Family:
    few = {"kernel_size": [2], "stride": [2], "dilation": [1], "groups": [1, 2], "pad": [(1, "zeros")]}
    return lambda: convolutions(d, **few)


def few_transposed(d: int) -> Family:
    few = {"kernel_size": [2], "stride": [2], "dilation": [1], "padding": [1], "output_padding": [1]}
    return lambda: transposed_convolutions(d, **few)


def more_convolutions(d: int) -> Family:
    more = {"kernel_size": [(2, 3, 1)[:d]], "stride": [1, 2], "dilation": [2]}
    return lambda: convolutions(d, **more)


def more_transposed(d: int) -> Family:
    more = {"kernel_size": [(2, 3, 1)[:d]], "stride": [1, (1, 2, 3)[:d]], "padding": [1]}
    return lambda: transposed_convolutions(d, **more)


def bags_in_rows() -> Iterator[Case]:
    """Bags that are rows of ids: flat ones have no example axis to slice a batch by."""
    return (case for case in bags() if case.inputs[0].ndim == 2)


def prelus_with_axes() -> Iterator[Case]:
    """An input [B] of one number an example is refused: nothing tells it from one that examples share."""
    return (case for case in prelus() if case.inputs[0].ndim > 1)


def some(family: Family, every: int) -> Family:
    return lambda: (case for k, case in enumerate(family()) if k % every == 0)


FEW: dict[str, Family] = {
    "Linear": linears,
    "Conv1D of Hugging Face": huggingface,
    **{f"Conv{d}d": few_convolutions(d) for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": few_transposed(d) for d in (1, 2)},
    "Embedding": some(embeddings, 5),
    "EmbeddingBag": some(bags_in_rows, 3),
    "norms": some(norms, 3),
    "Bilinear": bilinears,
    "PReLU": some(prelus_with_axes, 2),
    "MultiheadAttention": attentions,
    "LSTM": lstms,
    "experts": some(toy_experts, 3),
}
ALL: dict[str, Family] = {
    "Linear": linears,
    "Conv1D of Hugging Face": huggingface,
    **{f"Conv{d}d": more_convolutions(d) for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": more_transposed(d) for d in (1, 2, 3)},
    "Embedding": embeddings,
    "EmbeddingBag": bags_in_rows,
    "norms": norms,
    "Bilinear": bilinears,
    "PReLU": prelus_with_axes,
    "MultiheadAttention": attentions,
    "LSTM": lstms,
    "experts": toy_experts,
}
USES = ("plain", "tied", "twice")
HOW = ("live", "capture")


class Model(nn.Module):
    """A layer, used as `use` says; inputs x0, x1, ... of one use and z0, z1, ... of the other."""

    def __init__(self, first: Case, second: Case, use: str) -> None:
        super().__init__()
        self.calls = (first.output, (second if use == "tied" else first).output)
        self.first, self.alone, self.width = first.module, use == "plain", len(first.inputs)
        if use == "tied":
            self.second = second.module
            for name, p in list(first.module.named_parameters()):
                *path, attribute = name.split(".")
                setattr(second.module.get_submodule(".".join(path)), attribute, p)

    def forward(self, **inputs: Tensor) -> Tensor:
        x, z = ([inputs.get(f"{side}{k}") for k in range(self.width)] for side in "xz")
        y = torch.tanh(self.calls[0](*x))
        return y if self.alone else y + 0.5 * self.calls[1](*z)


def inputs_of(case: Case) -> dict[str, Tensor]:
    """Inputs of both uses."""
    given = {k: v for k, v in enumerate(case.inputs) if v is not None}
    return {f"x{k}": v for k, v in given.items()} | {f"z{k}": other(v) for k, v in given.items()}


def other(x: Tensor) -> Tensor:
    """Another input of the same kind: features in another order, other ids, the same experts."""
    if x.is_floating_point():
        return x.flip(-1)
    return (x + 1) % 4 if x.ndim < 3 else x


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """One number an example, different for every entry."""
    return model(**batch).reshape(len(batch["x0"]), -1).square().cumsum(1).tanh().sum(1)


def found_by(how: str, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients through the public front-ends."""

    def wanted(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return loss(model, {k: v for k, v in batch.items() if k != "example_ids"})

    if how == "live":
        source = live(model, [batch], wanted, strict=True)
        got = captured(source)
        assert not source.apart
        return got
    blocks: list[Any] = []
    with capture(model, sinks=[blocks.append], loss="sum", strict=True, ids=lambda inputs: ["a", "b", "c"]):
        wanted(model, batch).sum().backward()
    return block_gradients(blocks[0])


def check(family: Family, use: str, how: str) -> None:
    for first, second in zip(family(), family(), strict=True):
        model, batch = Model(first, second, use).eval(), inputs_of(first)
        dense = {n: g.to_dense() for n, g in one_by_one(model, batch, loss).items()}
        try:
            assert_gradients(found_by(how, model, batch), dense)
        except Exception as error:
            raise AssertionError(f"{use}, {how}: {first.label}: {error}") from error


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layer", FEW)
def test_gradients_are_those_of_one_example_at_a_time(layer, use, how):
    check(FEW[layer], use, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layer", ALL)
def test_every_configuration_gives_the_gradients_of_one_example_at_a_time(layer, use, how):
    check(ALL[layer], use, how)


def rows(family: Family) -> Family:
    """The cases of inputs [B, T, N] or ids [B, T]."""

    def has_rows(case: Case) -> bool:
        x = case.inputs[0]
        return x.ndim == (3 if x.is_floating_point() else 2) and case.output(*case.inputs).ndim == 3

    return lambda: (case for case in family() if has_rows(case))


def row_norms() -> Iterator[Case]:
    return (
        case
        for case in norms()
        if isinstance(case.module, nn.LayerNorm | nn.RMSNorm) and len(case.module.normalized_shape) == 1
    )


ROWS = {
    "Linear": rows(linears),
    "Conv1D of Hugging Face": rows(huggingface),
    "Embedding": rows(embeddings),
    "norms": rows(row_norms),
    "Bilinear": rows(bilinears),
    "experts": rows(toy_experts),
}
PACKED = {"packed": ((0, 3), (0, 1), (1, 2), (1, 3), (2, 4)), "padded": ((0, 3), (1, 5), (2, 1))}
"""(row, length) of every example; what is left of a row is padding."""


def row_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """One number an example, of what its own positions put out."""
    y = model(**{k: v for k, v in batch.items() if k[0] in "xz"})
    return by_example(y.square().cumsum(2).tanh().sum(2), batch)


def check_rows(family: Family, use: str, places: tuple[tuple[int, int], ...]) -> None:
    for first, second in zip(family(), family(), strict=True):
        model, inputs = Model(first, second, use).eval(), inputs_of(first)
        segments, examples = torch.full(inputs["x0"].shape[:2], -1), []
        for e, (r, length) in enumerate(places):
            start = int((segments[r] >= 0).sum())
            segments[r, start : start + length] = e
            examples.append({k: v[r : r + 1, start : start + length] for k, v in inputs.items()})
        names = tuple(f"e{e}" for e in range(len(places)))
        source = live(
            model, [inputs | {"segment_ids": segments, "example_ids": names}], row_loss, strict=True
        )
        right = {n: g.to_dense() for n, g in gradients(model, row_loss, examples).items()}
        try:
            assert_gradients(captured(source), right)
        except Exception as error:
            raise AssertionError(f"{use}: {first.label}: {error}") from error


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layer", ROWS)
def test_examples_within_rows_are_what_they_are_alone(layer, use, how):
    assert list(ROWS[layer]())
    check_rows(ROWS[layer], use, PACKED[how])
