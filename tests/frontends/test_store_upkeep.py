"""Stores that are checked, compacted, and looked at with other tools."""

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from attrax.core import Block, Examples, GradTree, factorized, materialize_leaf, materialized, projected
from attrax.core.projection import Projection
from attrax.frontends.storage import slabreader
from attrax.frontends.storage.compaction import compact_store
from attrax.frontends.storage.damages import damages
from attrax.frontends.storage.store import open_store, store

from .plain_h5py import gradients
from .test_store import assert_same, every_kind, make, read, write
from .test_store_files import forge


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.shard.h5"))


def small(folder, count=6, **options: Any) -> Any:
    """A shard for each of some examples."""
    blocks = [make({"w": materialized("w", torch.full((1, 300), float(n)))}, [f"e{n}"]) for n in range(count)]
    return write(folder, *blocks, shard_examples=1, **options)


def content(source):
    """All that a store gives back, by value."""
    found: list[Any] = [source.ids, source.runs, source.duplicates, source.steps(), source.missing(["e3"])]
    for block in read(source):
        e = block.examples
        values = [None if x is None else (x.dtype, x.tolist()) for x in (e.weight, e.tokens)]
        found.append((e.ids, e.step, e.micro, e.fingerprint, e.learning_rate, values))
        found.append({n: materialize_leaf(leaf).w.float().tolist() for n, leaf in block.grads.items()})
    return found + [source.column(name) for name in source.columns]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 64
    path.write_bytes(data)


def place_of_rows(path: Path) -> int:
    with h5py.File(path) as file:
        data: Any = file["data"]
        return data.id.get_offset()


def test_every_damaged_shard_is_named_and_the_others_can_be_read(tmp_path):
    small(tmp_path, 8)
    files = shards(tmp_path)
    flip(files[1], place_of_rows(files[1]) + 77)
    flip(files[2], 9)
    os.truncate(files[3], 1000)
    files[5].unlink()
    files[6].unlink()
    files[6].symlink_to(files[0])
    found = damages(tmp_path)
    missing = files[5].name[: files[5].name.rindex("-")]
    assert set(found) == {*(files[n].name for n in (1, 2, 3, 6)), f"{missing}-*.shard.h5"}
    assert "leaf 'w'" in found[files[1].name] and "is a link" in found[files[6].name]
    whole = open_store(tmp_path, without=found)
    assert whole.ids == ("e0", "e4", "e7") and whole.refresh().ids == whole.ids
    assert [block.grads["w"].w[0, 0].item() for block in read(whole)] == [0, 4, 7]


def test_a_whole_store_has_no_damages_and_nothing_is_not_a_store(tmp_path):
    small(tmp_path / "a")
    assert damages(tmp_path / "a") == {}
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="open_store"):
            damages(folder)


def various(folder, rng, **options: Any) -> Any:
    """Blocks of every kind of leaf and of other leaves, one shard each, with all that can be known."""
    with store(folder, run="job", shard_examples=1, keep_factored=True, **options) as sink:
        for n in range(4):
            leaves = every_kind(rng, torch.bfloat16 if n % 2 else torch.float32)
            known = {"weight": torch.rand(4).double(), "tokens": torch.tensor([3, 1, 4, 1]), "step": n}
            about = {**known, "fingerprint": f"at {n}", "learning_rate": 0.5} if n < 3 else {"step": n}
            sink(make(leaves if n else {"ln.bias": leaves["ln.bias"]}, [f"{n}{i}" for i in "wxyz"], **about))
    return open_store(folder)


def test_compaction_keeps_everything(tmp_path, rng):
    columns = lambda e: {"text": [f"<{i}>" for i in e.ids], "n": torch.arange(len(e))}  # noqa: E731
    before = various(tmp_path, rng, columns=columns)
    expected, blocks = content(before), read(before)
    assert compact_store(tmp_path) == (4, 1)
    after = open_store(tmp_path)
    assert str(content(after)) == str(expected) and len(after.shards) == 1
    for old, new in zip(blocks, read(after), strict=True):
        assert list(old.grads) == list(new.grads)
        for name, leaf in old.grads.items():
            assert_same(new.grads[name], leaf)
    assert damages(tmp_path) == {} and compact_store(tmp_path) == (1, 1)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".h5", ".json"]


def test_a_run_goes_on_after_compaction(tmp_path):
    small(tmp_path, run="job")
    compact_store(tmp_path)
    again = write(tmp_path, make({"w": materialized("w", torch.zeros(1, 300))}, ["last"]), run="job")
    assert again.ids == (*(f"e{n}" for n in range(6)), "last")
    assert "missing" not in again.summary() and [info.sequence for info in again.shards] == [5, 6]


def test_compaction_keeps_ranks_attempts_and_sizes_apart(tmp_path):
    for rank in range(2):
        small(tmp_path, run="job", rank=rank)
    small(tmp_path, 3, run="job", rank=0, steps_done=0)
    small(tmp_path, 2, run="other")
    expected = content(open_store(tmp_path))
    size = shards(tmp_path)[0].stat().st_size
    assert compact_store(tmp_path, shard_bytes=3 * size + 100) == (17, 6)
    assert content(open_store(tmp_path)) == expected
    assert compact_store(tmp_path) == (6, 4)
    assert content(open_store(tmp_path)) == expected


def test_a_compaction_cut_off_anywhere_loses_and_doubles_nothing(tmp_path, monkeypatch):
    expected = content(small(tmp_path))
    real, allowed = Path.unlink, 0

    def unlink(path, missing_ok=False):
        nonlocal left
        if path.name.endswith(".shard.h5"):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        real(path, missing_ok)

    while True:
        left = allowed
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            try:
                compact_store(tmp_path)
            except KeyboardInterrupt:
                assert content(open_store(tmp_path)) == expected
                allowed += 1
                continue
        break
    assert allowed > 2 and len(shards(tmp_path)) == 1 and content(open_store(tmp_path)) == expected


def test_what_is_being_written_is_not_compacted(tmp_path):
    small(tmp_path, run="job")
    with (
        store(tmp_path, run="job"),
        pytest.raises(ValueError, match="compact a store when its runs are over"),
    ):
        compact_store(tmp_path)
    assert len(shards(tmp_path)) == 6


def test_a_damaged_shard_stops_compaction_and_stays(tmp_path):
    small(tmp_path)
    victim = shards(tmp_path)[3]
    flip(victim, place_of_rows(victim) + 5)
    before = {p.name: p.read_bytes() for p in shards(tmp_path)}
    with pytest.raises(ValueError, match=victim.name):
        compact_store(tmp_path)
    assert {p.name: p.read_bytes() for p in shards(tmp_path)} == before and list(damages(tmp_path)) == [
        victim.name
    ]


def test_a_hostile_shard_cannot_have_other_files_deleted(tmp_path):
    small(tmp_path / "in", 1)
    victim = tmp_path / "precious.shard.h5"
    victim.write_text("mine")
    names = ["../precious.shard.h5", str(victim), "index.json", ".."]
    forge(shards(tmp_path / "in")[0], lambda said: said.update(first=0, replaces=names))
    compact_store(tmp_path / "in")
    assert victim.read_text() == "mine" and (tmp_path / "in" / "index.json").exists()


def linear(rng, bias=True):
    a, g = torch.randn(3, 2, 30, generator=rng), torch.randn(3, 2, 20, generator=rng)
    return factorized("fc.weight", a, g, bias="fc.bias" if bias else None)


def test_plain_h5py_and_numpy_give_the_gradients(tmp_path, rng):
    short, long = linear(rng), factorized("fc.weight", torch.randn(2, 9, 3), torch.randn(2, 9, 3))
    write(
        tmp_path / "rows", make({"fc.weight": short}, "abc"), make({}, "z"), make({"fc.weight": short}, "def")
    )
    write(tmp_path / "built", make({"fc.weight": long}, "xy"))
    found = gradients(tmp_path / "rows", "fc.weight")
    assert list(found) == list("abcdef")
    assert np.allclose(found["e"], materialize_leaf(short).w[1].numpy(), rtol=1e-4, atol=1e-5)
    found = gradients(tmp_path / "built", "fc.weight")
    assert np.allclose(found["y"], materialize_leaf(long).w[1].numpy(), rtol=1e-5)


def test_numpy_arrays_by_parameter(tmp_path, rng):
    leaf = linear(rng)
    half = materialized("ln", torch.randn(3, 4, generator=rng).bfloat16())
    narrow: Any = projected(Projection(2))("p", factorized("p", torch.randn(3, 2, 5), torch.randn(3, 2, 6)))
    found = write(tmp_path, make({"fc.weight": leaf, "ln": half, "p": narrow}, "abc")).to_numpy()
    assert {n: x.shape for n, x in found.items()} == {
        "fc.weight": (3, 20, 30),
        "fc.bias": (3, 20),
        "ln": (3, 4),
        "p": (3, 2, 2),
    }
    assert np.allclose(found["fc.bias"], leaf.g.sum(1), rtol=1e-5) and np.array_equal(
        found["ln"], half.w.float()
    )
    other = write(tmp_path, make({"ln": half}, "def"))
    with pytest.raises(ValueError, match=r"'fc\.weight'.*not recorded for all 6 rows"):
        other.to_numpy()


def test_a_pandas_table_of_a_store(tmp_path):
    blocks = [
        make(
            {"w": materialized("w", torch.ones(2, 2, 3) * n)}, f"{n}{n + 5}", step=n, weight=torch.ones(2) / 4
        )
        for n in range(2)
    ]
    source = write(tmp_path, *blocks, columns=lambda e: {"text": list(e.ids)})
    frame = source.to_pandas()
    assert list(frame.columns) == ["id", "step", "micro", "weight", "tokens", "text", "w"]
    assert frame["id"].tolist() == ["0", "5", "1", "6"] and frame["step"].tolist() == [0, 0, 1, 1]
    assert (
        frame["weight"].tolist() == [0.25] * 4
        and np.stack(frame["w"]).tolist() == [[0.0] * 6] * 2 + [[1.0] * 6] * 2
    )
    assert source.select(ids=["6"]).to_pandas()["text"].tolist() == ["6"]


def test_selecting_by_id_and_step_reads_only_those(tmp_path, rng):
    x = torch.randn(4000, 64, generator=rng)
    blocks = [
        Block(
            GradTree({"w": materialized("w", x[n : n + 40])}),
            Examples(tuple(map(str, range(n, n + 40))), n // 400),
        )
        for n in range(0, 4000, 40)
    ]
    source = write(tmp_path, *blocks)
    chosen = source.select(ids=["3999", "17", "2000", "2001"], steps=[0, 5])
    assert chosen.ids == ("17", "2000", "2001")
    assert np.array_equal(chosen.to_numpy()["w"], x[[17, 2000, 2001]])


def test_an_example_costs_its_pieces_and_not_the_shard(tmp_path, rng, monkeypatch):
    x, real, read = torch.randn(1000, 8192, generator=rng), slabreader.read_bytes, []
    source = write(
        tmp_path, make({"w": materialized("w", x), "v": materialized("v", -x)}, map(str, range(1000)))
    )

    def read_bytes(descriptor, at, out):
        read.append(len(out))
        real(descriptor, at, out)

    monkeypatch.setattr(slabreader, "read_bytes", read_bytes)
    found = source.block(["999", "500"]).grads
    assert torch.equal(found["w"].w, x[[999, 500]]) and torch.equal(found["v"].w, -x[[999, 500]])
    assert sum(read) <= 6 * 2**18
