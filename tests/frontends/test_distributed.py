"""Training and attribution on several processes (replicated or sharded parameters) are what they are on one."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing

from attrax.core import Block, GradTree, Scores, stored
from attrax.core.pytree import tree_map
from attrax.frontends import open_store

from . import parallel
from .parallel import KINDS, PER_STEP, REPEATED, STEPS

pytestmark = pytest.mark.usefixtures("unchecked")
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"{ranks} processes")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes wrote; all kinds of training run in one spawn."""
    path = tmp_path_factory.mktemp("together")
    multiprocessing.spawn(parallel.work, (str(path), request.param), nprocs=request.param)
    return path


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """The results of one process."""
    return torch.load(folder / "alone.pt", weights_only=False)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def several(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The results of all processes."""
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{kind}[0-9].pt"))]


def blocks_in(folder: Path) -> list[Block]:
    """Blocks of the store that all processes wrote."""
    found = open_store(folder).map(lambda name, leaf, _: leaf)
    return [Block(GradTree(dict(leaves)), examples) for examples, leaves in found]


def gradients(blocks: list[Block]) -> dict[Any, dict[str, Tensor]]:
    """Gradients of the summed loss by step and example."""
    found: dict[Any, dict[str, Tensor]] = {}
    for block in blocks:
        weight = block.examples.weight
        assert weight is not None
        for name, w in stored(block.grads).items():
            for i, key in enumerate(block.examples.ids):
                found.setdefault((block.examples.step, key), {})[name] = w[i] / weight[i]
    return found


def all_close(got: Any, right: Any) -> None:
    """Equal by key, name and value, to 1e-10 of the largest entry of each tensor (or of rounding to zero)."""
    assert got.keys() == right.keys()
    for key, value in right.items():
        if isinstance(value, dict):
            all_close(got[key], value)
        else:
            size = float(value.abs().max()) if value.numel() else 0.0
            torch.testing.assert_close(got[key], value, rtol=0.0, atol=1e-10 * size + 1e-14)


def test_one_store_holds_the_gradients_of_one_process(folder, kind, one):
    right, got = one["blocks"]["steps"], blocks_in(folder / kind / "steps")
    assert [b.examples.ids for b in got] == [b.examples.ids for b in right]
    assert len({b.examples.fingerprint for b in got}) == STEPS
    all_close(gradients(got[:3]), gradients(right[:3]))


def test_late_gradients_are_those_of_one_process_too(folder, kind, one):
    """Rounding of twenty AdamW steps apart."""
    right, got = (gradients(b[-1:]) for b in (one["blocks"]["steps"], blocks_in(folder / kind / "steps")))
    assert got.keys() == right.keys() and len(right) == PER_STEP
    for key, grads in right.items():
        for name, g in grads.items():
            torch.testing.assert_close(got[key][name], g, rtol=1e-6, atol=1e-6 * float(g.abs().max()) + 1e-9)


def test_capture_leaves_training_as_it_is(several):
    for found in several:
        assert found["captured"].keys() == found["plain"].keys()
        assert all(torch.equal(w, found["plain"][n]) for n, w in found["captured"].items())


def test_capture_names_and_counts_parameters_as_on_one_process(several, one):
    assert all(found["coverage"] == one["coverage"] for found in several)


def test_a_model_has_one_fingerprint_however_it_is_spread(several, one):
    assert {found["fingerprint"] for found in several} == {one["fingerprint"]}


def test_k18_b85_examples_that_a_sampler_repeats_are_stored_once(folder, kind, one, several):
    assert REPEATED % len(several)
    got = blocks_in(folder / kind / "sampled")
    assert [i for b in got for i in b.examples.ids] == [str(i) for i in range(REPEATED)]
    all_close(gradients(got), gradients(one["blocks"]["sampled"]))


def test_k19_b90_token_means_weigh_as_on_one_process(several, one):
    right = one["tokens"]
    ids = [i for found in several for i in found["tokens"]["ids"]]
    assert sorted(ids) == sorted(right["ids"])
    tokens = dict(zip(right["ids"], right["tokens"].tolist(), strict=True))
    ranks = len(several)
    for found in (found["tokens"] for found in several):
        assert found["tokens"].tolist() == [tokens[i] for i in found["ids"]]
        torch.testing.assert_close(found["weight"], ranks * right["weight"][: len(found["ids"])])
        all_close(found["grads"], {i: right["grads"][i] for i in found["ids"]})


def test_live_gradients_of_shares_are_those_of_one_process(several, one):
    shares = [found["attributed"]["grads"] for found in several]
    assert len({len(share) for share in shares}) > 1, "shares are to be of unequal length"
    all_close({key: g for share in shares for key, g in share.items()}, one["attributed"]["grads"])


def test_scores_of_shares_are_those_of_one_process(several, one, kind):
    for found in (found["attributed"]["scores"] for found in several):
        assert found.keys() == (one["attributed"]["scores"].keys() if kind == "ddp" else {"influence"})
        for method, got in found.items():
            right: Scores = one["attributed"]["scores"][method]
            assert (got.ids, got.query_ids, got.steps) == (right.ids, right.query_ids, right.steps)
            error = float((got.values - right.values).abs().max() / right.values.abs().max())
            assert error < 1e-10, method


def test_all_processes_have_the_same_curvature_bit_for_bit(several, one):
    def tensors(curvature: Any) -> list[Tensor]:
        found: list[Tensor] = []
        tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, curvature)
        return found

    first, *others = [found["attributed"]["curvature"] for found in several]
    assert first.examples == one["attributed"]["curvature"].examples
    for other in others:
        pairs = zip(tensors(first), tensors(other), strict=True)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


def test_a_live_source_leaves_training_as_it_is(several):
    for found in several:
        pairs = [(w, found["uninterrupted"][n]) for n, w in found["interrupted"].items()]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_all_processes_say_what_is_wrong(folder):
    for path in folder.glob("refusals*.pt"):
        found = torch.load(path)
        assert "use_orig_params=True" in found["flat"]
        assert found["task"] == "no such layer"
        assert "layer 'w'" in found["shapes"]
        assert "rank 1 yielded no examples" in found["empty"]


def test_products_of_tensor_parallel_shards_add_up(folder):
    for path in folder.glob("refusals*.pt"):
        found = torch.load(path)
        all_close(found["cut"], found["whole"])


def ran(target: Any, *args: Any) -> list[int | None]:
    """Exit codes of two processes."""
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=target, args=(rank, *args)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    return [process.exitcode for process in both]


def test_a_killed_process_ends_the_others_and_leaves_the_finished_shards(tmp_path, kind):
    assert ran(parallel.killed, str(tmp_path), kind) == [0, -signal.SIGKILL]
    assert "onnection" in (tmp_path / "error").read_text()
    found = open_store(tmp_path / "store")
    right = range(3 * PER_STEP)
    assert {int(i) for i in found.ids} >= set(right), "three steps of both processes"
    assert [i for b in blocks_in(tmp_path / "store")[:3] for i in b.examples.ids] == [str(i) for i in right]


def test_a_process_killed_in_a_fit_ends_the_others(tmp_path):
    assert ran(parallel.killed_in_a_fit, str(tmp_path)) == [0, -signal.SIGKILL]
    error = (tmp_path / "error").read_text()
    assert "process 0 of 2: another one has ended" in error and "start all of them again" in error


def test_files_that_processes_save_are_equal(tmp_path):
    """Curvature and scores of sharded training, one process with a batch less than the other."""
    assert ran(parallel.saved, str(tmp_path)) == [0, 0]
    for name in ("curvature{}.safetensors", "scores{}.parquet"):
        one, other = (tmp_path.joinpath(name.format(rank)).read_bytes() for rank in (0, 1))
        assert one == other and one, name


def test_a_process_that_raises_in_a_fit_ends_the_others(tmp_path):
    assert ran(parallel.raising, str(tmp_path)) == [0, 0]
    assert "a row that is not there" in (tmp_path / "error1").read_text()
    assert "another one has ended" in (tmp_path / "error0").read_text()
