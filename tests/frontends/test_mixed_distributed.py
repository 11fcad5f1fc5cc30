"""Sharded training in mixed precision on two processes: bfloat16 parameters inside the passes, float32 outside.

What is captured is what one process captures of a copy of the model in bfloat16, and that is as near to the gradients
of the exact model at the same parameters as autograd of one example at a time is.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn

from attrax.core import Block, GradTree, stored
from attrax.frontends import open_store
from attrax.frontends.model.fingerprints import model_fingerprint

from . import mixed
from .mixed import KINDS, LOW, ROWS, SELECTIONS, losses, network
from .oracle import assert_rounded, gradients
from .parallel import examples

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS, U = 2, torch.finfo(LOW).eps / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    multiprocessing.spawn(mixed.work, (str(path), RANKS), nprocs=RANKS)
    return path


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "alone.pt", weights_only=False)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def several(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{kind}{rank}.pt", weights_only=False) for rank in range(RANKS)]


def by_example(blocks: list[Block]) -> dict[str, dict[str, Tensor]]:
    """Gradients of each example's own loss."""
    found: dict[str, dict[str, Tensor]] = {}
    for block in blocks:
        weight = block.examples.weight
        assert weight is not None
        for name, w in stored(block.grads).items():
            for i, key in enumerate(block.examples.ids):
                found.setdefault(key, {})[name] = w[i] / weight[i]
    return found


def autograd(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Gradients of one example at a time, at the parameters in bfloat16."""
    x, y = examples()
    grads = gradients(network().to(LOW).to(dtype), losses, [{"x": x[[i]], "y": y[[i]]} for i in range(ROWS)])
    return [{n: g[i] for n, g in grads.items()} for i in range(ROWS)]


def assert_near(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Within what rounding does to a gradient, relative to its norm (see `test_low_precision`)."""
    assert got.keys() == right.keys()
    for name, g in right.items():
        assert float((got[name].double() - g).norm() / g.norm()) <= 8 * U, name


def test_gradients_are_as_near_to_exact_ones_as_autograd_is(several):
    found = by_example([block for own in several for block in own["captured"]["blocks"]])
    assert set(found) == {str(i) for i in range(ROWS)}
    assert_rounded([found[str(i)] for i in range(ROWS)], autograd(LOW), autograd(torch.float64))


def test_gradients_are_those_of_one_process_bit_for_bit(several, one):
    right = by_example(one["captured"]["blocks"])
    for key, grads in by_example([block for own in several for block in own["captured"]["blocks"]]).items():
        assert all(torch.equal(g, right[key][n]) for n, g in grads.items())


def test_gradients_add_up_to_what_training_uses(several):
    blocks = [block for own in several for block in own["captured"]["blocks"]]
    sums = [{n: w.double().sum(0) for n, w in stored(block.grads).items()} for block in blocks]
    assert_near(several[0]["captured"]["grad"], {n: sum(own[n] for own in sums) / RANKS for n in sums[0]})


def test_capture_leaves_training_as_it_is(several):
    for found in several:
        assert all(torch.equal(w, found["plain"][n]) for n, w in found["watched"].items())


def test_curvature_and_scores_are_those_of_one_process(several, one):
    right, within = one["attributed"], 1e-6
    for found in (found["attributed"] for found in several):
        for name, values in right["curvature"].eigenvalues.items():
            error = float((found["curvature"].eigenvalues[name] - values).abs().max() / values.abs().max())
            assert error <= within, name
        assert found["scores"].ids == right["scores"].ids
        got, exact = found["scores"].values, right["scores"].values
        assert float((got - exact).abs().max() / exact.abs().max()) <= within


def test_one_store_holds_the_gradients_of_all(folder, kind, several):
    right = by_example([block for own in several for block in own["captured"]["blocks"]])
    ((known, leaves),) = open_store(folder / kind).map(lambda name, leaf, _: leaf)
    found = by_example([Block(GradTree(dict(leaves)), known)])
    assert list(found) == [str(i) for i in range(ROWS)]
    assert known.fingerprint == model_fingerprint(network())
    for key, grads in found.items():
        assert grads.keys() == right[key].keys()
        assert all(torch.equal(g, right[key][n]) for n, g in grads.items())


@pytest.mark.parametrize("how", SELECTIONS)
def test_a_selection_trains_on_the_kept_examples(how, several):
    first, second = (found["selected"][how] for found in several)
    x, y = examples()
    model: nn.Module = network().to(LOW).double()
    for a, b in zip(first["decisions"], second["decisions"], strict=True):
        assert len(a.kept) != len(b.kept)
        kept = [int(i) for i in a.kept + b.kept]
        size = 6 if how[0] == "fixed" else len(kept)
        (losses(model, {"x": x[kept], "y": y[kept]}).sum() / size).backward()
    assert len(first["decisions"]) == len(how[1])
    assert_near(first["grad"], {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
