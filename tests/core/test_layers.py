"""Layer rules in every configuration, against autograd of one example at a time."""

import pytest

from .layer_cases import (
    bags,
    bilinears,
    check,
    convolutions,
    embeddings,
    linears,
    norms,
    prelus,
    toy_experts,
    transposed_convolutions,
)

FAMILIES = {f.__name__: f for f in (linears, embeddings, bags, norms, prelus, bilinears, toy_experts)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_configuration_gives_the_gradients_of_autograd(family):
    for case in FAMILIES[family]():
        check(case)


EVEN = "ignore:Using padding='same' with even kernel lengths"


@pytest.mark.slow
@pytest.mark.filterwarnings(EVEN)
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("family", [convolutions, transposed_convolutions])
def test_every_convolution_gives_the_gradients_of_autograd(family, d):
    for case in family(d):
        check(case)
