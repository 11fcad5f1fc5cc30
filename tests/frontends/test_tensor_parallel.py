"""Models whose layers are cut over processes give the gradients, stores and scores of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing

from attrax.core import Block, stored
from attrax.frontends import open_store

from . import tensor_parallel
from .tensor_parallel import KINDS
from .test_distributed import all_close, blocks_in, gradients

pytestmark = pytest.mark.usefixtures("unchecked")


def start(work: Any, processes: int, path: Path) -> Path:
    multiprocessing.spawn(work, (str(path),), nprocs=processes)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote; all plans run in one spawn."""
    return start(tensor_parallel.work, 2, tmp_path_factory.mktemp("cut"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def both(folder: Path, name: str) -> list[dict[str, Any]]:
    """The results of all processes."""
    return [read(path) for path in sorted(folder.glob(f"{name}[0-9].pt"))]


@pytest.fixture
def several(folder: Path, kind: str) -> list[dict[str, Any]]:
    return both(folder, kind)


@pytest.fixture
def one(folder: Path, kind: str) -> dict[str, Any]:
    """The results of one process."""
    return read(folder / f"{KINDS[kind][0].__name__}.pt")


def same_scores(got: Any, right: Any) -> None:
    assert (got.ids, got.query_ids, got.steps) == (right.ids, right.query_ids, right.steps)
    all_close({"": got.values}, {"": right.values})


def entries(blocks: list[Block]) -> dict[Any, dict[str, Tensor]]:
    """What blocks hold, by step, example and name."""
    return {
        (b.examples.step, key): {n: w[i] for n, w in stored(b.grads).items()}
        for b in blocks
        for i, key in enumerate(b.examples.ids)
    }


def same_moves(got: dict[str, Any], right: dict[str, Any], ranks: int = 1) -> None:
    for step, true in zip(got["steps"], right["steps"], strict=True):
        assert step.share * ranks == true.share and step.optimizers == true.optimizers
        all_close(step.gradients, true.gradients)
        all_close(step.parameters, true.parameters)
        all_close(step.states, true.states)


def test_leaves_are_those_of_one_process(several, one):
    for found in several:
        all_close(found["gradients"], one["gradients"])
        all_close(found["squares"], one["squares"])
        same_scores(found["graddot"], one["graddot"])


def test_one_process_writes_the_store_of_one_process(folder, kind, one):
    right, got = one["blocks"], blocks_in(folder / kind)
    assert {path.name.split("-")[1] for path in (folder / kind).glob("*.h5")} == {"0000"}
    assert [b.examples.ids for b in got] == [b.examples.ids for b in right]
    assert got[0].examples.fingerprint == right[0].examples.fingerprint
    assert open_store(folder / kind).duplicates == 0
    all_close(gradients(got), gradients(right))


def test_capture_leaves_training_as_it_is(several):
    for found in several:
        assert found["captured"].keys() == found["plain"].keys()
        assert all(torch.equal(w, found["plain"][n]) for n, w in found["captured"].items())


def test_names_sizes_and_fingerprints_are_those_of_one_process(several, one):
    for found in several:
        assert (found["coverage"], found["fingerprint"]) == (one["coverage"], one["fingerprint"])


def test_products_of_shards_add_up(several, one):
    for found in (x["shards"] for x in several):
        same_scores(found["graddot"], one["graddot"])
        all_close(found["squares"], one["squares"])


def test_shards_in_blocks_add_up(folder):
    right = {
        key: g for block in read(folder / "network.pt")["blocks"] for key, g in squares_of(block).items()
    }
    for found in both(folder, "further"):
        all_close(found["shards"], right)


def squares_of(block: Block) -> dict[str, Tensor]:
    whole = stored(block.grads).values()
    return dict(
        zip(
            block.examples.ids, torch.stack([w.flatten(1).square().sum(1) for w in whole]).sum(0), strict=True
        )
    )


def test_methods_score_as_on_one_process(folder):
    right = read(folder / "further.pt")["scores"]
    for found in both(folder, "further"):
        assert found["scores"].keys() == right.keys()
        for method, got in found["scores"].items():
            same_scores(got, right[method])


def test_one_process_hands_on_the_queries_of_a_probe(folder):
    right = read(folder / "further.pt")["probed"]
    first, second = (found["probed"] for found in both(folder, "further"))
    assert not second
    all_close(entries(first), entries(right))


def test_selection_trains_on_the_same_examples(folder):
    right = read(folder / "further.pt")["selected"]
    plain = read(folder / "network.pt")["plain"]
    assert any(not torch.equal(w, plain[n]) for n, w in right.items())
    for found in both(folder, "further"):
        all_close(found["selected"], right)


def test_steps_and_directions_are_those_of_one_process(folder):
    right = read(folder / "further.pt")["moves"]
    first, second = (found["moves"] for found in both(folder, "further"))
    assert not second["steps"] and not second["directions"]
    same_moves(first, right)
    all_close(entries(first["directions"]), entries(right["directions"]))


SAID = {
    "unknown": "tensor_parallel: got 'both'",
    "whole layer": "layer 'parts.0' (Part) would be run again with 'gate.weight' cut",
    "uncut": "no layer of the model is cut",
    "none cut": "no selected layer is cut",
    "directions": "directions are those of whole gradients",
    "store": "a store takes what two processes write",
    "functional": "functional: layers of the model are cut over processes",
    "forward": "forward_scores: layers of the model are cut over processes",
    "other examples": "put together by gather_scores",
    "other batches": "Give these processes the same batches",
    "half a sequence": "parameter 'parts.1.norm.weight': processes that share",
    "half packed": "layer 'head' (Linear) is parallelized as PackedColwiseParallel",
}


@pytest.mark.parametrize("what", SAID)
def test_what_cannot_be_done_is_refused_by_all_processes(folder, what):
    assert all(SAID[what] in found[what] for found in both(folder, "refusals"))


@pytest.mark.slow
def test_layers_cut_over_some_processes_and_examples_dealt_to_others(tmp_path):
    start(tensor_parallel.over_both, 4, tmp_path)
    one, further = read(tmp_path / "network.pt"), read(tmp_path / "further.pt")
    several = both(tmp_path, "both")
    got = blocks_in(tmp_path / "both")
    assert [b.examples.ids for b in got] == [b.examples.ids for b in one["blocks"]]
    all_close(gradients(got), gradients(one["blocks"]))
    for found in several:
        assert found["fingerprint"] == one["fingerprint"]
        assert all(torch.equal(w, found["plain"][n]) for n, w in found["captured"].items())
        all_close(found["selected"], further["selected"])
        same_scores(found["graddot"], one["graddot"])
        for method, right in further["scores"].items():
            same_scores(found["scores"][method], right)
    for found, other in zip(several[::2], several[1::2], strict=True):
        all_close(found["gradients"], other["gradients"])
    all_close(several[0]["gradients"] | several[2]["gradients"], one["gradients"])
    same_moves(several[0]["moves"], further["moves"], ranks=2)
