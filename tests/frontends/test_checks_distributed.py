"""What a capture refuses on one process it refuses on several."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from . import parallel_checks
from .parallel_checks import SOUND, WRONG, cases

pytestmark = pytest.mark.usefixtures("unchecked")
SAID = {
    "scaled": "first.weight: differs from autograd",
    "functional": "last.weight: has a gradient but its layer was never captured",
    "prototypes": "the rows of layers ['shared'] do not move",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    """What two processes were told."""
    path: Path = tmp_path_factory.mktemp("checks")
    multiprocessing.spawn(parallel_checks.work, (str(path),), nprocs=2)
    return [torch.load(path / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", cases(SOUND), ids=str)
def test_a_sound_model_is_captured(told, case):
    assert [(found[case]["text"], found[case]["blocks"]) for found in told] == 2 * [("", 2 * case[2])]


@pytest.mark.parametrize("case", cases(WRONG), ids=str)
def test_a_wrong_model_is_refused_by_all_processes(told, case):
    one, two = (found[case]["text"] for found in told)
    assert all(SAID[case[1].split()[0]] in text for text in (one, two))
    assert one == two or case[0] in ("alone", "ddp"), "what processes share they judge together"


@pytest.mark.parametrize("case", cases(SOUND | WRONG), ids=str)
def test_nothing_is_left_on_the_parameters_and_nothing_wrong_is_recorded(told, case):
    for found in told:
        assert found[case]["hooks"] == []
        assert found[case]["text"] == "" or found[case]["blocks"] == 0
