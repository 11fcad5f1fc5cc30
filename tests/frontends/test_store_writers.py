"""Killed writers, several writers, several readers: what was written is there, whole, once, and in data order."""

import atexit
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import h5py
import pytest
import torch

from attrax.core import Block, Examples, GradTree, materialized
from attrax.frontends.storage import sink as sinks
from attrax.frontends.storage import slabwriter
from attrax.frontends.storage.store import open_store, store
from attrax.methods import graddot

WIDTH = 37


def row(n):
    """A row that is recognized, and different in every column."""
    return torch.cos(torch.arange(WIDTH, dtype=torch.float64) * 0.51 + n * 2.17)


def block(*numbers, **examples: Any) -> Block:
    leaf = materialized("w", torch.stack([row(n) for n in numbers]))
    return Block(GradTree({"w": leaf}), Examples(tuple(map(str, numbers)), **examples))


def write(path, *blocks, **options: Any) -> Any:
    with store(path, **options) as sink:
        for each in blocks:
            sink(each)
    return open_store(path)


def assert_exact(source):
    """Every row is the one its id names, and no id comes twice."""
    ids = []
    for examples, leaves in source.map(lambda name, leaf, examples: leaf.w):
        assert torch.equal(leaves["w"], torch.stack([row(int(i)) for i in examples.ids]))
        ids += examples.ids
    assert len(ids) == len(set(ids))
    return ids


def script(body, *arguments, **environment):
    """Run a program that has this module's rows and blocks; returns what it printed."""
    code = f"import sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_store_writers import *\n{body}"
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


FORKED = """
import json, os, random, signal, time
from pathlib import Path

def in_child(work):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(lambda number: os.write(writer, f"{number} ".encode()))
        finally:
            os._exit(1)
    os.close(writer)
    return child, reader

def said(child, reader):
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return [int(number) for number in file.read().split()]

def resume(folder, total, run):
    present = set(open_store(folder).ids) if list(folder.glob("*.shard.h5")) else set()
    with store(folder, run=run, shard_examples=50) as sink:
        for n in range(total):
            if str(n) not in present:
                sink(block(n))
    return open_store(folder)
"""

EXITS_AFTER = """
def work(folder, last, say):
    sink = store(folder, run="r")
    for n in range(200):
        sink(block(n))
        if n % 16 == 15:
            sink.flush()
        if n == last:
            os._exit(1)

for last in (5, 16, 17, 100, 199):
    for run in ("r", None):
        folder, kept = Path(sys.argv[1], f"{last}{run}"), (last + 1) // 16 * 16
        said(*in_child(lambda say: work(folder, last, say)))
        if kept:
            assert assert_exact(open_store(folder)) == [str(n) for n in range(kept)]
        complete = resume(folder, 200, run)
        assert sorted(map(int, assert_exact(complete))) == list(range(200))
        assert not complete.missing(map(str, range(200)))
"""


def test_an_exit_without_closing_and_a_resumption(tmp_path):
    script(FORKED + EXITS_AFTER, tmp_path)
    assert len(list(tmp_path.iterdir())) == 10


def test_what_a_killed_writer_left_is_removed_by_the_next_one_of_its_run(tmp_path):
    for run in ("r", "other"):
        (tmp_path / f".{run}-0000-000000-ab.shard.h5.tmp").write_bytes(b"half")
    assert write(tmp_path, block(0), run="r").ids == ("0",)
    assert [path.name for path in tmp_path.glob("*.tmp")] == [".other-0000-000000-ab.shard.h5.tmp"]


def test_a_program_that_forgets_to_close_loses_nothing(tmp_path):
    body = """
sink = store(sys.argv[1])
sink(block(0, 1))
if not os.fork():
    try:
        sink(block(2))
    except ValueError as error:
        print(error, flush=True)
    sys.exit()
os.wait()
"""
    assert "belongs to another process" in script(body, tmp_path)
    assert assert_exact(open_store(tmp_path)) == ["0", "1"]
    assert len(list(tmp_path.glob("*.shard.h5"))) == 1


def test_a_full_disk_keeps_what_is_waiting(tmp_path, monkeypatch):
    sink = store(tmp_path)
    sink(block(0, 1))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(slabwriter.os, "pwritev", full)
        for write_out in (sink.flush, sink.close):
            with pytest.raises(OSError, match="2 examples are still waiting"):
                write_out()
    assert not list(tmp_path.glob("*.shard.h5"))
    sink(block(2))
    sink.close()
    assert assert_exact(open_store(tmp_path)) == ["0", "1", "2"]


def test_a_block_that_the_disk_did_not_take_may_be_changed_afterwards(tmp_path, monkeypatch):
    sink, x = store(tmp_path), torch.randn(4, 2**17)
    expected = x.clone()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(slabwriter.os, "pwritev", full)
        with pytest.raises(OSError, match="4 examples are still waiting"):
            sink(Block(GradTree({"w": materialized("w", x)}), Examples(tuple("abcd"))))
    x.zero_()
    sink.close()
    found: Any = open_store(tmp_path).block("abcd").grads
    assert torch.equal(found["w"].w, expected)


def test_a_disk_that_is_full_in_the_middle_of_a_block_leaves_nothing_of_it(tmp_path, monkeypatch):
    real, room = os.pwritev, 3

    def tight(descriptor, pieces, at):
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, pieces, at)

    x = torch.randn(3, 1, 2**20)
    with store(tmp_path) as sink:
        monkeypatch.setattr(slabwriter.os, "pwritev", tight)
        for n in range(3):
            with pytest.raises(OSError, match="still waiting"):
                sink(Block(GradTree({"w": materialized("w", x[n])}), Examples((str(n),))))
        monkeypatch.undo()
    found: Any = open_store(tmp_path).block("012").grads
    assert torch.equal(found["w"].w, x[:, 0])


def test_a_flush_that_failed_writes_everything_again(tmp_path, monkeypatch):
    """What the system reports once as lost it may forget: flushing again does not bring it to the disk."""
    written: list[int] = []
    real_publish, real_pwrite = sinks.publish, os.pwrite

    def publish(*_):
        raise OSError(5, "Input/output error")

    def pwrite(descriptor, data, at):
        written.append(len(data))
        return real_pwrite(descriptor, data, at)

    sink = store(tmp_path)
    sink(Block(GradTree({"w": materialized("w", torch.ones(4, 2**17))}), Examples(tuple("abcd"))))
    monkeypatch.setattr(sinks, "publish", publish)
    with pytest.raises(OSError, match=r"Input/output error.*4 examples are still waiting"):
        sink.flush()
    monkeypatch.setattr(sinks, "publish", real_publish)
    monkeypatch.setattr(slabwriter.os, "pwrite", pwrite)
    sink.close()
    assert written[:8] == [2**18] * 8
    found: Any = open_store(tmp_path).block("abcd").grads
    assert found["w"].w.all()


def test_bytes_that_the_system_has_lost_are_not_taken_for_written(tmp_path, monkeypatch):

    def refuse(*_):
        raise OSError(5, "Input/output error")

    sink = store(tmp_path)
    sink(Block(GradTree({"w": materialized("w", torch.ones(4, 2**17))}), Examples(tuple("abcd"))))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            sink.flush()
    with next(tmp_path.glob("*.tmp")).open("r+b") as file:
        file.seek(2**19)
        file.write(bytes(9))
    with pytest.raises(
        OSError, match="the system has lost bytes .* Its 4 examples are lost; capture them again"
    ):
        sink.close()
    atexit.unregister(sink.close)
    assert not list(tmp_path.glob("*.shard.h5"))


def test_a_reader_sees_finished_shards_and_later_ones_after_a_refresh(tmp_path):
    with store(tmp_path) as sink:
        sink(block(*range(10)))
        sink.flush()
        sink(block(*range(10, 20)))
        early: Any = open_store(tmp_path)
        assert assert_exact(early) == [str(n) for n in range(10)]
        sink.flush()
        assert early.missing(["15"]) == ("15",)
        late = early.refresh()
    assert len(late) == 20 and torch.equal(late.block(["15"]).grads["w"].w[0], row(15))
    assert len(early) == 10 and assert_exact(early) == [str(n) for n in range(10)]


def test_one_writer_a_run(tmp_path):
    with store(tmp_path, run="r") as first:
        first(block(0))
        with pytest.raises(ValueError, match="run 'r', rank 0.*being written"):
            store(tmp_path, run="r")
        body = """
try:
    store(sys.argv[1], run="r")
except ValueError as error:
    print(error)
"""
        assert "being written" in script(body, tmp_path)
        with store(tmp_path, run="r", rank=1) as other_rank, store(tmp_path) as other_run:
            other_rank(block(1))
            other_run(block(2))
        first(block(3))
    assert sorted(assert_exact(open_store(tmp_path))) == ["0", "1", "2", "3"]
    assert not list(tmp_path.glob(".*"))
    write(tmp_path, block(4), run="r")
    assert [info.sequence for info in open_store(tmp_path, run="r").shards] == [0, 1, 0]


def test_without_file_locks_two_writers_do_not_replace_each_other(tmp_path, monkeypatch):
    from attrax.frontends.storage import folder

    def unsupported(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", unsupported)
    with store(tmp_path, run="r") as first, store(tmp_path, run="r") as second:
        first(block(0, 1))
        second(block(1, 2))
    open_: Any = open_store(tmp_path)
    assert sorted(assert_exact(open_)) == ["0", "1", "2"] and open_.duplicates == 1


def test_readers_work_at_once_and_under_any_locking_rule(tmp_path):
    write(tmp_path, block(0, 1, 2))
    body = """
from pathlib import Path
with h5py.File(next(Path(sys.argv[1]).glob("*.shard.h5"))):
    print(assert_exact(open_store(sys.argv[1])))
"""
    with store(tmp_path) as sink:
        sink(block(3))
        sink.flush()
        with h5py.File(min(tmp_path.glob("*.shard.h5")), locking=True):
            assert len(assert_exact(open_store(tmp_path))) == 4
            rules = ("TRUE", "FALSE")
            with ThreadPoolExecutor() as pool:
                printed = pool.map(lambda rule: script(body, tmp_path, HDF5_USE_FILE_LOCKING=rule), rules)
                assert set(printed) == {"['0', '1', '2', '3']\n"}


def test_readers_in_threads(tmp_path):
    open_ = write(tmp_path, *(block(n, n + 1) for n in range(0, 100, 2)), shard_examples=10)
    found = []
    threads = [threading.Thread(target=lambda: found.append(assert_exact(open_))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[str(n) for n in range(100)]] * 6


def test_overwrite_replaces_the_store_and_nothing_else(tmp_path):
    write(tmp_path, block(0, 1), run="old")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".x-0000-000000-ab.shard.h5.tmp").write_bytes(b"left by a kill")
    with store(tmp_path, run="busy"), pytest.raises(ValueError, match="busy-0000.*overwrite it afterwards"):
        store(tmp_path, overwrite=True)
    open_ = write(tmp_path, block(2), overwrite=True)
    assert open_.ids == ("2",) and "old" not in open_.runs
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".shard.h5")) == [
        "index.json",
        "notes.txt",
    ]


def test_examples_that_a_sampler_repeats_are_one_row_in_data_order(tmp_path):
    """Ten examples dealt to four ranks in turn; the first two are dealt twice to make the ranks even."""
    dealt = [*range(10), 0, 1]
    sinks_ = [store(tmp_path, run="job", rank=rank, shard_examples=1) for rank in reversed(range(4))]
    for sink in sinks_:
        for n in dealt[sink.rank :: 4]:
            sink(block(n))
        sink.close()
    open_: Any = open_store(tmp_path)
    assert assert_exact(open_) == [str(n) for n in range(10)]
    assert open_.duplicates == 2 and "left out: 2 rows" in open_.summary()
    mean = open_.block(open_.ids).grads["w"].w.mean(0)
    assert torch.allclose(mean, torch.stack([row(n) for n in range(10)]).mean(0))


def test_blocks_of_ranks_become_blocks_of_the_step(tmp_path):
    for rank in range(2):
        with store(tmp_path, run="job", rank=rank) as sink:
            for step in range(3):
                for micro in range(2):
                    first = 8 * step + 4 * micro
                    sink(block(first + rank, first + 2 + rank, step=step, micro=micro, fingerprint=str(step)))
    open_: Any = open_store(tmp_path)
    found = [(e.step, e.micro, e.ids) for e, _ in open_.map(lambda *_: None)]
    expected = [(s, m, tuple(str(8 * s + 4 * m + n) for n in range(4))) for s in range(3) for m in range(2)]
    assert found == expected and open_.steps() == (0, 1, 2)
    assert_exact(open_)
    whole = open_store(tmp_path, block_examples=100)
    assert [len(e) for e, _ in whole.map(lambda *_: None)] == [8, 8, 8]
    assert_exact(whole)


def test_a_document_that_the_data_holds_twice_stays_two_rows(tmp_path):
    open_ = write(tmp_path, block(0, 1, 0), block(1, 2), shard_examples=1)
    assert open_.ids == ("0", "1", "0", "1", "2") and open_.duplicates == 0
    assert open_.block(["1"]).examples.ids == ("1", "1")
    assert graddot(open_, open_, target="as_trained").values.shape == (5, 5)


def test_a_resumed_run_repeats_nothing(tmp_path):
    write(tmp_path, *(block(n, step=n) for n in range(6)), run="job")
    again = write(tmp_path, *(block(n, step=n) for n in range(4, 9)), run="job")
    assert assert_exact(again) == [str(n) for n in range(9)] and again.duplicates == 2


def test_a_second_run_over_the_same_data_does_not_double_it(tmp_path):
    step = partial(block, step=3)
    write(tmp_path, step(0, 1, fingerprint="p"), step(2, fingerprint="p"), run="one")
    both = write(tmp_path, step(2, 1, fingerprint="p"), step(3, fingerprint="p"), run="two")
    assert assert_exact(both) == ["0", "1", "2", "3"] and both.duplicates == 2
    assert both.runs == ("one", "two")
    assert open_store(tmp_path, run="two").ids == ("2", "1", "3")


def test_runs_that_contradict_each_other_must_be_named(tmp_path):
    write(tmp_path, block(0, 1, fingerprint="p"), run="one")
    both = write(tmp_path, block(1, 2, fingerprint="q"), run="two")
    assert "open one with run=" in both.summary() and both.fingerprints == ("p", "q")
    for ask in (lambda: assert_exact(both), lambda: both.block(["1"])):
        with pytest.raises(ValueError, match=r"2 rows.*'1'.*run=.*'one', 'two'"):
            ask()
    assert assert_exact(both.select(ids=["0", "2"])) == ["0", "2"]
    assert assert_exact(open_store(tmp_path, run="two")) == ["1", "2"]


def test_a_shard_that_was_taken_away_is_reported(tmp_path):
    write(tmp_path, block(0), block(1), block(2), run="r", shard_examples=1)
    sorted(tmp_path.glob("*.shard.h5"))[1].unlink()
    open_: Any = open_store(tmp_path)
    assert open_.ids == ("0", "2") and open_.missing("012") == ("1",)
    assert "shard missing: run r, rank 0, number 1" in open_.summary()
