"""Strictness and fixtures shared by all tests.

Offline by environment, deterministic algorithms, as many threads as this worker's share of the machine,
tolerances by dtype, and one source of randomness per test. attrax must not be imported here: the shape
checker (`--jaxtyping-packages`) is installed after this file is read.
"""

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for offline in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_OFFLINE"):
    os.environ[offline] = "1"
THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # subprocesses inherit it

import pytest
import torch
from hypothesis import settings
from torch import Tensor

torch.set_num_threads(THREADS)
torch.use_deterministic_algorithms(True)

settings.register_profile("attrax", database=None, deadline=None, derandomize=True, max_examples=50)
settings.load_profile("attrax")

TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}
"""What two routes to one number may differ by, relative and absolute."""


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator seeded by the test's name: the same numbers in every process and every order."""
    digest = hashlib.sha256(request.node.name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@pytest.fixture
def tolerance():
    """`tolerance(dtype)` -> `{"rtol": …, "atol": …}`, the keywords of `torch.testing.assert_close`."""
    return lambda dtype: dict(TOLERANCE[dtype])


@pytest.fixture
def assert_close():
    """`assert_close(actual, expected, scale=1)`: equal within the coarser dtype's tolerance, times `scale`.

    The absolute part is relative to the largest expected entry, so large and small problems are held alike.
    """

    def check(actual: Tensor, expected: Tensor, *, scale: float = 1.0) -> None:
        allowed = max((TOLERANCE[x.dtype] for x in (actual, expected)), key=lambda t: t["rtol"])
        size = max(1.0, expected.detach().abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(
            actual.detach().to(torch.float64),
            expected.detach().to(torch.float64),
            rtol=scale * allowed["rtol"],
            atol=scale * allowed["atol"] * size,
        )

    return check
