"""Four processes that hold two replicas of a model, each cut into two shards: all is as on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from . import parallel
from .parallel import HYBRID
from .test_accumulation_distributed import CASES, Case, assert_trained, train
from .test_distributed import (  # noqa: F401
    one,
    several,
    test_a_live_source_leaves_training_as_it_is,
    test_a_model_has_one_fingerprint_however_it_is_spread,
    test_all_processes_have_the_same_curvature_bit_for_bit,
    test_capture_leaves_training_as_it_is,
    test_capture_names_and_counts_parameters_as_on_one_process,
    test_k18_b85_examples_that_a_sampler_repeats_are_stored_once,
    test_k19_b90_token_means_weigh_as_on_one_process,
    test_late_gradients_are_those_of_one_process_too,
    test_live_gradients_of_shares_are_those_of_one_process,
    test_one_store_holds_the_gradients_of_one_process,
    test_scores_of_shares_are_those_of_one_process,
)

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.slow]
RANKS = 4
SELECTIONS = {name: CASES[name] for name in ("fixed", "examples", "layers")} | {
    "at once": Case("examples", reduced=(True,))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    multiprocessing.spawn(parallel.work, (str(path), RANKS, True), nprocs=RANKS)
    return path


@pytest.fixture(params=HYBRID)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = {
        (k, name): train(wrap, case, rank) for k, wrap in HYBRID.items() for name, case in SELECTIONS.items()
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("selected")
    multiprocessing.spawn(work, (str(path),), nprocs=RANKS)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_trains_as_one_process_on_the_kept_examples(name, kind, selected):
    assert_trained(SELECTIONS[name], [ranks[kind, name] for ranks in selected])
