"""The command line on gradient stores: looking, verifying, compacting."""

import os

import pytest
import torch
from typer.testing import CliRunner

from attrax.cli import app
from attrax.core import Block, Examples, GradTree, Step, materialized
from attrax.frontends.runs.stepfiles import write_step
from attrax.frontends.storage.store import open_store, store


@pytest.fixture
def folder(tmp_path):
    with store(tmp_path / "grads", shard_examples=1) as sink:
        for n in range(5):
            sink(Block(GradTree({"w": materialized("w", torch.ones(1, 9))}), Examples((f"e{n}",))))
    return tmp_path / "grads"


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_inspect_verify_of_a_whole_store(folder):
    found = call("inspect", folder, "--verify")
    assert found.exit_code == 0 and "5 examples" in found.output and "all shards are whole" in found.output
    assert "all shards are whole" not in call("inspect", folder).output


def test_inspect_verify_names_every_damaged_shard(folder):
    first, second, *_ = sorted(folder.glob("*.shard.h5"))
    os.truncate(first, 500)
    data = bytearray(second.read_bytes())
    data[8] ^= 255
    second.write_bytes(data)
    found = call("inspect", folder, "--verify")
    assert found.exit_code == 1
    assert [line.split(": ")[1] for line in found.output.splitlines()] == [first.name, second.name]


def test_inspect_counts_recorded_steps(folder):
    assert "optimizer steps" not in call("inspect", folder).output
    for n in (0, 3):
        write_step(folder, Step(n, {}, {}))
    assert "optimizer steps recorded: 2, from 0 to 3" in call("inspect", folder).output


def test_verify_is_for_stores(tmp_path):
    (tmp_path / "scores.csv").write_text("x")
    found = call("inspect", tmp_path, "--verify")
    assert found.exit_code == 2 and "gradient stores" in found.output


def test_compact(folder):
    found = call("compact", folder)
    assert found.exit_code == 0 and "5 shards before, 1 now" in found.output
    assert open_store(folder).ids == tuple(f"e{n}" for n in range(5))
    assert call("compact", folder / "nowhere").exit_code == 2
