"""Tensors here are tiny: one thread is faster than several that wait for each other."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import config

# OLMo-core needs older versions of what the other tests use: `make olmo` runs its tests in an environment of their own.
collect_ignore = [] if importlib.util.find_spec("olmo_core") else ["olmo.py", "test_olmo_core.py"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch off the run-time type checker: four times faster, and shows the errors of a caller who has none."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
