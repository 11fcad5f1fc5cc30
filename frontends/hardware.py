"""Measure the planner's roofline figures on the device at hand."""

import time
from collections.abc import Callable

import torch

from attrax.core import Hardware


def measure_hardware(
    device: str | torch.device = "cpu", *, memory: int = 2**30, size: int = 1024
) -> Hardware:
    """Time a few GEMMs and copies: under a second on a CPU.

    Args:
        device: Where contractions will run.
        memory: Budget for temporaries, bytes.
        size: Side of the timed float32 GEMM.

    Returns:
        Figures for `hardware=` of any method.

    >>> measure_hardware(size=128).flops > 0
    True
    """
    x = torch.ones(size, size, device=device)
    block = torch.ones(2**24, device=device)
    small = torch.ones(8, device=device)
    flops = 2 * size**3 / _seconds(lambda: x @ x, device)
    bandwidth = 2 * block.numel() * block.element_size() / _seconds(block.clone, device)
    return Hardware(flops, bandwidth, _seconds(lambda: small + small, device), memory)


def _seconds(run: Callable[[], object], device: str | torch.device, repeats: int = 5) -> float:
    """Median time of one call."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]
