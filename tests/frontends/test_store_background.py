"""Shards written while training goes on, and windows read ahead: bounds, errors, and what is left running."""

import gc
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from attrax.core import Block, Examples, GradTree, materialized
from attrax.frontends.storage import gather
from attrax.frontends.storage import sink as sinks
from attrax.frontends.storage.background import Background, ahead
from attrax.frontends.storage.store import open_store, store
from attrax.frontends.storage.windows import Reading


def block(n) -> Block:
    return Block(GradTree({"w": materialized("w", torch.full((1, 256), float(n)))}), Examples((str(n),)))


def exact(source):
    """Ids of all rows, each the one its id names."""
    found = []
    for examples, leaves in source.map(lambda name, leaf, _: leaf.w):
        assert torch.equal(leaves["w"], torch.tensor([[float(i)] * 256 for i in examples.ids]))
        found += examples.ids
    return found


def waiting_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("attrax")]


class Disk:
    """Stands for `publish`: waits for `go` before it flushes a shard to the disk, or fails."""

    def __init__(self, monkeypatch):
        self.go, self.full, self.asked, real = threading.Event(), False, 0, sinks.publish

        def write(*args):
            self.asked += 1
            assert self.go.wait(20)
            if self.full:
                raise OSError(28, "No space left on device")
            real(*args)

        monkeypatch.setattr(sinks, "publish", write)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_training_goes_on_until_the_bound_is_reached(tmp_path, disk):
    sink = store(tmp_path, shard_bytes=1024, buffer_bytes=3 * 1100)
    reached = []

    def train():
        for n in range(6):
            sink(block(n))
            reached.append(n)

    training = threading.Thread(target=train)
    training.start()
    while len(reached) < 3:
        time.sleep(0.001)
    time.sleep(0.1)
    assert reached == [0, 1, 2] and disk.asked == 1
    disk.go.set()
    training.join()
    sink.close()
    assert exact(open_store(tmp_path)) == [str(n) for n in range(6)] and not waiting_threads()


def test_few_files_wait_for_the_disk_however_small_they_are(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(sinks, "_SHARDS", 4)
    sink = store(tmp_path, shard_examples=1)
    training = threading.Thread(target=lambda: [sink(block(n)) for n in range(20)])
    training.start()
    while len(list(tmp_path.glob(".*.tmp"))) < 5:
        time.sleep(0.001)
    time.sleep(0.1)
    assert len(list(tmp_path.glob(".*.tmp"))) == 5
    disk.go.set()
    training.join()
    sink.close()
    assert exact(open_store(tmp_path)) == [str(n) for n in range(20)]


def test_without_a_buffer_every_shard_is_on_the_disk_at_once(tmp_path):
    with store(tmp_path, shard_bytes=1024, buffer_bytes=0) as sink:
        for n in range(3):
            sink(block(n))
            assert len(open_store(tmp_path)) == n + 1


def test_an_error_is_raised_by_the_next_block_and_nothing_is_lost(tmp_path, disk):
    disk.full = True
    sink = store(tmp_path, shard_examples=2)
    sink(block(0))
    sink(block(1))
    disk.go.set()
    while waiting_threads():
        time.sleep(0.001)
    with pytest.raises(OSError, match=r"No space left.*2 examples are still waiting"):
        sink(block(2))
    with pytest.raises(OSError, match="No space left"):
        sink.close()
    disk.full = False
    sink(block(3))
    sink.close()
    assert exact(open_store(tmp_path)) == ["0", "1", "2", "3"]
    assert not list(tmp_path.glob(".*"))


def test_an_error_after_the_last_block_is_raised_on_closing(tmp_path, disk):
    with pytest.raises(OSError, match="No space left"), store(tmp_path, shard_examples=1) as sink:  # noqa: PT012
        sink(block(0))
        disk.full = True
        disk.go.set()
    disk.full = False
    sink.close()
    assert exact(open_store(tmp_path)) == ["0"]


def test_blocks_that_come_while_the_disk_is_full_raise_each_time_and_are_kept(tmp_path, disk):
    disk.full = True
    disk.go.set()
    sink = store(tmp_path, shard_bytes=1024, buffer_bytes=0)
    for n in range(3):
        with pytest.raises(OSError, match="No space left"):
            sink(block(n))
    disk.full = False
    sink.close()
    assert exact(open_store(tmp_path)) == ["0", "1", "2"]


def test_jobs_run_in_order_and_a_failed_one_stays_first():
    done: list[int] = []
    broken = {2}

    def work(n):
        if n in broken:
            raise ValueError(n)
        done.append(n)

    jobs = Background(work, limit=0)
    jobs.put(1, 10)
    for n in (2, 3):
        with pytest.raises(ValueError, match="2"):
            jobs.put(n, 10)
    assert done == [1]
    broken.clear()
    jobs.finish(4)
    assert done == [1, 2, 3, 4]


def many(folder, count=12) -> Any:
    with store(folder, shard_examples=1) as sink:
        for n in range(count):
            sink(block(n))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_reading_ahead_gives_the_same_blocks(tmp_path, prefetch):
    many(tmp_path)
    source = open_store(tmp_path, prefetch=prefetch, device="cpu")
    source = replace(source, reading=replace(source.reading, window_bytes=1))
    assert exact(source) == exact(source) == exact(open_store(tmp_path)) == [str(n) for n in range(12)]
    assert not waiting_threads()


def test_reading_ahead_is_bounded_and_ends_with_the_iteration():
    made = []

    def items():
        for n in range(100):
            made.append(n)
            yield n

    reading = ahead(items(), 3)
    assert next(reading) == 0
    time.sleep(0.1)
    assert made == [0, 1, 2, 3]
    reading.close()
    assert len(made) <= 5 and not waiting_threads()


def test_an_error_ahead_is_raised_in_its_place(tmp_path):
    many(tmp_path, 4)
    source = open_store(tmp_path)
    windows = Reading(1, None, 2, window_bytes=1)
    victim = sorted(tmp_path.glob("*.shard.h5"))[2]
    victim.unlink()
    stream = gather.stream(source.path, source.shards, source.rows, frozenset(), windows)
    assert [next(stream)[0].ids for _ in range(2)] == [("0",), ("1",)]
    with pytest.raises(ValueError, match=f"{victim.name}' is gone"):
        next(stream)
    assert not waiting_threads()


def test_an_iteration_that_its_own_thread_collects_ends_quietly(monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    go = threading.Event()

    def items():
        yield 0
        assert go.wait(20)
        gc.collect()
        yield 1

    cycle: list[Any] = [ahead(items(), 1)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    go.set()
    while waiting_threads():
        time.sleep(0.001)
    assert not told


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_is_told_that_nobody_reads_ahead_for_it(tmp_path):
    many(tmp_path)
    source = open_store(tmp_path, prefetch=1)
    source = replace(source, reading=replace(source.reading, window_bytes=1))
    blocks = source.map(lambda *_: None)
    next(blocks)
    if not (child := os.fork()):
        signal.alarm(20)
        try:
            list(blocks)
        except RuntimeError as error:
            os._exit(0 if "Begin to read after the fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(blocks)) == 11


def test_leaves_go_where_they_are_asked_for(tmp_path):
    many(tmp_path, 2)
    source = open_store(tmp_path, device="meta")
    devices = [leaves["w"] for _, leaves in source.map(lambda name, leaf, _: leaf.w.device.type)]
    assert devices == ["meta", "meta"]
    assert source.block(["1"]).grads["w"].w.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_leaves_reach_a_gpu_unchanged(tmp_path):
    many(tmp_path)
    for n, (_, leaves) in enumerate(
        open_store(tmp_path, device="cuda", prefetch=2).map(lambda _, leaf, __: leaf.w)
    ):
        assert leaves["w"].is_cuda and torch.equal(leaves["w"].cpu(), torch.full((1, 256), float(n)))
