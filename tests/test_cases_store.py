"""Faults that users of such libraries have reported, and what attrax does instead: what a store gives back."""

import time

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import attrax
from attrax.core import materialized, stored

from .case_models import CLASSIFY, Net, all_same, brute, points, rows_of, seeded
from .case_models import quick as quick

SPECIAL = torch.tensor([1.0, -0.0, 3.0e38, 1e-39, torch.inf, torch.nan, 1 / 3, 65536.0]).bfloat16()


def block(ids: list[str], **rows: Tensor) -> attrax.Block:
    """A block of rows by leaf name."""
    leaves = {name: materialized(name, w) for name, w in rows.items()}
    return attrax.Block(attrax.GradTree(leaves), attrax.Examples(tuple(ids), weight=torch.ones(len(ids))))


def test_k22_b101_bfloat16_comes_back_bit_by_bit(tmp_path):
    """Rows and, seen by any other reader, their values in float32; a cast that would overflow is refused."""
    rows = torch.stack([SPECIAL, SPECIAL.flip(0)])
    with attrax.store(tmp_path / "a") as sink:
        sink(block(["x", "y"], w=rows))
    leaf = attrax.open_store(tmp_path / "a").block(["x", "y"]).grads["w"]
    found = getattr(leaf, "w")  # noqa: B009
    assert found.dtype == torch.bfloat16 and torch.equal(found.view(torch.int16), rows.view(torch.int16))
    with h5py.File(next((tmp_path / "a").glob("*.shard.h5"))) as file:
        upper = file["data"][: 2 * rows.numel()].view(np.uint16).astype(np.uint32)
    plain = (upper << 16).view(np.float32).reshape(2, 8)
    assert np.array_equal(plain, rows.float().numpy(), equal_nan=True)
    with (
        pytest.raises(ValueError, match="float16"),
        attrax.store(tmp_path / "b", dtype=torch.float16) as sink,
    ):
        sink(block(["x"], w=torch.tensor([[3.0e38]]).bfloat16()))


def test_k22_b104_ids_and_names_are_text(tmp_path):
    ids = np.array(["a", "doc-0012", "Zürich", "文書", ""]).tolist()
    names = ["h.0/attn.c_proj", "h.0.attn/c_proj", "/", "..", "文書"]
    rows = torch.arange(10.0).view(5, 2)
    with attrax.store(tmp_path) as sink:
        sink(block(ids, **{name: rows + k for k, name in enumerate(names)}))
    source = attrax.open_store(tmp_path)
    assert source.ids == tuple(ids) and all(type(i) is str for i in source.ids)
    grads = stored(source.block(ids).grads)
    assert list(grads) == names and all(torch.equal(grads[n], rows + k) for k, n in enumerate(names))
    scores = attrax.graddot(source, source.select(ids=["文書", ""]))
    attrax.write_scores(scores, str(tmp_path / "scores.h5"))
    assert attrax.read_scores(str(tmp_path / "scores.h5")).query_ids == ("文書", "")


def test_k22_b106_scattered_reads_and_small_appends(tmp_path):
    """Seconds of a processor rather than an hour."""
    x = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(106))
    names = [str(n) for n in range(20_000)]
    with attrax.store(tmp_path / "large") as sink:
        for n in range(0, 20_000, 500):
            sink(block(names[n : n + 500], w=x[n : n + 500]))
    chosen = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:5000].tolist()
    source, start = attrax.open_store(tmp_path / "large"), time.process_time()
    found = source.block([names[n] for n in chosen])
    assert time.process_time() - start < 10
    assert torch.equal(stored(found.grads)["w"], x[chosen])
    start = time.process_time()
    with attrax.store(tmp_path / "small") as sink:
        for n in range(500):
            sink(block([names[n]], w=x[n : n + 1]))
    assert time.process_time() - start < 10
    appended = attrax.open_store(tmp_path / "small")
    assert appended.ids == tuple(names[:500])
    assert torch.equal(stored(appended.block(names[:500]).grads)["w"], x[:500])


def test_k22_b101_gradients_of_a_model_in_bfloat16(tmp_path):
    """Rows of a store are the captured ones, bit by bit, and near those of the model in float64."""
    model, batch = seeded(Net, 101, torch.bfloat16), points(101, 5)
    batch |= {"x": batch["x"].bfloat16(), "example_ids": list("vwxyz")}
    live = attrax.collect(attrax.live(model, [batch], CLASSIFY))
    with attrax.store(tmp_path) as sink:
        sink(live)
    found = stored(attrax.open_store(tmp_path).block("vwxyz").grads)
    assert all(torch.equal(found[n], g) for n, g in stored(live.grads).items())
    right = brute(model.double(), CLASSIFY, rows_of(batch | {"x": batch["x"].double()}))
    all_same({n: g.double() for n, g in found.items()}, right, within=3e-2)
