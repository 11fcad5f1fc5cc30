"""Blocks of a run carry the fingerprint of the parameters they were taken at, whatever moves the parameters."""

import pytest
import torch
from torch import nn

import attrax


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_every_optimizer_step_changes_the_fingerprint(options: dict[str, bool]) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    blocks: list[attrax.Block] = []
    expected: list[str] = []
    with attrax.capture(net, sinks=[blocks.append], loss="sum"):
        for _ in range(3):
            expected.append(attrax.core.fingerprint(dict(net.named_parameters())))
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    found = [block.examples.fingerprint for block in blocks]
    assert found == expected
    assert len(set(found)) == 3
