"""A store as a source: the same scores as from memory, views, random access, bounded memory."""

import os
import resource
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attrax.core import (
    Blocks,
    Diagonal,
    Mask,
    Source,
    diagonal,
    factorized,
    fold,
    materialize_leaf,
    materialized,
    projected,
    take,
)
from attrax.core.kronecker import kronecker_sums, merge
from attrax.core.masks import coordinates
from attrax.frontends import capture
from attrax.frontends.buffers import Buffers
from attrax.frontends.storage import windows
from attrax.frontends.storage.gather import stream
from attrax.frontends.storage.store import open_store, store
from attrax.methods import ekfac, gradcos, graddot, self_influence, tracin
from attrax.methods.along import Stepped

from ..core.dense import assert_same
from .test_store import make, read, rows, write


def random_blocks(rng, sizes=(3, 2, 4), steps=None, dtype=torch.float64):
    """Blocks of two layers with token counts and weights, named in order."""
    first = np.cumsum([0, *sizes])
    blocks = []
    for k, size in enumerate(sizes):
        lengths = [1 + (3 * k + b) % 6 for b in range(size)]
        leaves = {
            "fc.weight": factorized("fc.weight", rows(rng, 4, dtype, lengths), rows(rng, 3, dtype, lengths)),
            "ln.weight": diagonal("ln.weight", rows(rng, 3, dtype, lengths), rows(rng, 3, dtype, lengths)),
        }
        weight = torch.rand(size, generator=rng, dtype=torch.float64) + 0.5
        step = 0 if steps is None else steps[k]
        ids = [f"e{n}" for n in range(first[k], first[k] + size)]
        about = {"weight": weight, "tokens": torch.tensor(lengths), "fingerprint": f"at {step}", "step": step}
        blocks.append(make(leaves, ids, learning_rate=0.1 * (step + 1), **about))
    return blocks


def vars_of(block):
    e = block.examples
    return {
        "step": e.step,
        "fingerprint": e.fingerprint,
        "learning_rate": e.learning_rate,
        "weight": e.weight[:1],
    }


@pytest.mark.parametrize("block_examples", [None, 1, 4, 100])
@pytest.mark.parametrize("shard_examples", [1, 100])
def test_scores_from_a_store_are_those_from_memory(tmp_path, rng, block_examples, shard_examples):
    sizes = (3, 2, 1, 3)
    blocks, queries = random_blocks(rng, sizes), random_blocks(rng, (2, 1))
    write(tmp_path / "train", *blocks, shard_examples=shard_examples)
    write(tmp_path / "query", *queries)
    train, query = (
        open_store(tmp_path / "train", block_examples=block_examples),
        open_store(tmp_path / "query"),
    )
    for method in (graddot, gradcos):
        found, expected = method(train, query), method(Blocks(blocks), Blocks(queries))
        assert (found.ids, found.query_ids) == (expected.ids, expected.query_ids)
        assert torch.allclose(found.values, expected.values, rtol=1e-10, atol=1e-12)
    expected = self_influence(Blocks(blocks)).values
    assert torch.allclose(self_influence(train).values, expected, rtol=1e-10, atol=1e-12)
    if block_examples:
        assert {len(e) for e, _ in train.map(lambda *_: None)} <= {
            block_examples,
            sum(sizes) % block_examples,
        }


def test_kronecker_statistics_and_ekfac_from_a_store(tmp_path, rng):
    blocks, queries = random_blocks(rng, (6, 5, 7)), random_blocks(rng, (2,))
    train = write(tmp_path, *blocks, keep_factored=True)
    expected = ekfac(Blocks(blocks), Blocks(queries), damping=0.1)
    assert torch.allclose(ekfac(train, Blocks(queries), damping=0.1).values, expected.values, rtol=1e-8)
    rebatched = open_store(tmp_path, block_examples=4)

    def reduce(state, leaf) -> Any:
        return (
            None
            if isinstance(leaf, Diagonal)
            else merge(state, kronecker_sums(leaf))
            if state
            else kronecker_sums(leaf)
        )

    found, whole = (fold(reduce, source)[0]["fc.weight"] for source in (rebatched, Blocks(blocks)))
    assert found.rows == whole.rows and torch.allclose(found.a, whole.a, rtol=1e-10)


def test_tracin_from_two_stores(tmp_path, rng):
    steps = [0, 0, 3, 4]
    blocks = random_blocks(rng, (2, 1, 2, 3), steps)
    queries = [
        make(block.grads.map(lambda _, x: take(x, slice(0, 1))), "q", **vars_of(block))
        for block in blocks[1:]
    ]
    train, query = write(tmp_path / "t", *blocks), write(tmp_path / "q", *queries)
    assert isinstance(query, Stepped) and isinstance(train, Source) and query.steps() == (0, 3, 4)

    class Steps(Blocks):
        def steps(self):
            return tuple(sorted({block.examples.step for block in self.blocks}))

        def at(self, step):
            return Blocks([block for block in self.blocks if block.examples.step == step])

    found, expected = tracin(train, query), tracin(Blocks(blocks), Steps(queries))
    assert (found.ids, found.steps) == (expected.ids, expected.steps)
    assert torch.allclose(found.values, expected.values, rtol=1e-10, atol=1e-12)


def test_views_of_a_store(tmp_path, rng):
    blocks = random_blocks(rng, (3, 2, 4), [0, 1, 1])
    open_ = write(tmp_path, *blocks, shard_examples=3)
    assert (len(open_), open_.examples, open_.steps(), open_.reiterable) == (9, 9, (0, 1), True)
    assert open_.fingerprints == ("at 0", "at 1") and len(open_.runs) == 1
    assert open_.at(1).ids == ("e3", "e4", "e5", "e6", "e7", "e8")
    assert open_.select(ids=["e7", "e1", "e4"]).ids == ("e1", "e4", "e7")
    assert open_.select(ids=["e7", "e1"], steps=[1]).ids == ("e7",)
    assert [b.examples.ids for b in read(open_.select(ids=["e1", "e3", "e4", "e8"]))] == [
        ("e1",),
        ("e3", "e4"),
        ("e8",),
    ]
    whole = {
        i: materialize_leaf(take(b.grads["fc.weight"], slice(k, k + 1))).w
        for b in blocks
        for k, i in enumerate(b.examples.ids)
    }
    found = open_.block(["e8", "e3", "e5", "e8"])
    assert found.examples.ids == ("e8", "e3", "e5", "e8")
    expected = torch.cat([whole[i] for i in found.examples.ids])
    assert torch.allclose(materialize_leaf(found.grads["fc.weight"]).w, expected, rtol=1e-12)
    assert (
        "9 examples" in repr(open_) and "fc.weight" in open_.summary() and "steps 0 to 1" in open_.summary()
    )


def test_rows_that_were_never_written_are_named(tmp_path):
    written = [0, 1, 2, 3, 4, 5, 6, 8]
    leaf = materialized("w", torch.ones(len(written), 3))
    open_ = write(tmp_path, make({"w": leaf}, map(str, written)))
    expected = [str(n) for n in range(10)]
    assert open_.missing(expected) == ("7", "9")
    for ask in (lambda: open_.select(ids=expected), lambda: open_.block(expected)):
        with pytest.raises(KeyError, match="'7', '9'"):
            ask()
    with pytest.raises(KeyError, match="lacks 1 steps, .* 8 examples of steps 0 to 0 here"):
        open_.at(5)
    scores = graddot(open_, open_.select(ids=["0"]), target="as_trained")
    with pytest.raises(KeyError, match="'7', '9'"):
        scores.in_order(expected)


@pytest.mark.usefixtures("unchecked")
def test_a_cut_takes_several(tmp_path):
    open_ = write(tmp_path, make({"w": materialized("w", torch.ones(2, 3))}, ["a", "b"]))
    with pytest.raises(TypeError, match=r"steps: got 1; expected several, such as \[1000\]"):
        open_.select(steps=1)
    with pytest.raises(TypeError, match="ids: got 'a'; expected several"):
        open_.select("a")


def test_examples_that_make_no_block_are_refused(tmp_path, rng):
    open_ = write(tmp_path, *random_blocks(rng, (2, 2), [0, 1]))
    with pytest.raises(ValueError, match=r"steps \[0, 1\]"):
        open_.block(["e0", "e3"])
    with pytest.raises(ValueError, match="0 rows"):
        open_.block([])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"weight": [1.0, 2.0]}, "column 'weight': every store has one"),
        ({"t": ["a", 1]}, r"column 't' holds \['int', 'str'\]; give one text or one number"),
        ({"t": [{}, {}]}, r"column 't' holds \['dict'\]"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_columns_that_are_none_are_refused(tmp_path, columns, message):
    block = make({"w": materialized("w", torch.ones(2, 3))}, ["a", "b"])
    with store(tmp_path, columns=lambda examples: columns) as sink, pytest.raises(ValueError, match=message):
        sink(block)


@pytest.mark.parametrize("shard_examples", [1, None])
def test_a_column_stays_what_it_is(tmp_path, shard_examples):
    """Within a run; runs that differ are not read as one column."""
    block, values = make({"w": materialized("w", torch.ones(1, 3))}, ["a"]), [1.0, "x"]
    options: Any = {"columns": lambda examples: {"t": [values.pop(0)]}, "shard_examples": shard_examples}
    with store(tmp_path, **options) as sink:
        sink(block)
        with pytest.raises(ValueError, match="columns {'t': 'text'} at step 0 differ from {'t': 'number'}"):
            sink(block)
    values.append("x")
    other = make({"w": materialized("w", torch.ones(1, 3))}, ["b"])
    with pytest.raises(ValueError, match="numbers in some shards and texts in others"):
        write(tmp_path, other, **options).column("t")


def test_further_columns(tmp_path):
    def columns(examples):
        return {"text": [f"<{i}>" for i in examples.ids], "loss": [len(i) / 2 for i in examples.ids]}

    blocks = [make({"w": materialized("w", torch.ones(2, 3))}, ids) for ids in (["a", "bb"], ["ccc", ""])]
    open_ = write(tmp_path, *blocks, columns=columns, shard_examples=1)
    assert open_.select(ids=["ccc", "a"]).column("text") == ("<a>", "<ccc>")
    assert open_.column("loss").tolist() == [0.5, 1.0, 1.5, 0.0]
    with pytest.raises(KeyError, match="loss"):
        open_.column("label")
    with (
        store(tmp_path, columns=lambda examples: {"text": ["x"]}) as sink,
        pytest.raises(ValueError, match="'text'"),
    ):
        sink(blocks[0])


def test_memory_is_bounded_by_a_window_of_blocks(tmp_path, monkeypatch):
    read_at_once = []
    real = windows.read_rows
    monkeypatch.setattr(
        windows, "read_rows", lambda *args, **kind: read_at_once.append(len(args[2])) or real(*args, **kind)
    )
    blocks = [make({"w": materialized("w", torch.full((1, 1024), float(n)))}, [str(n)]) for n in range(40)]
    open_ = write(tmp_path, *blocks)
    reading = windows.Reading(window_bytes=5 * 4500)
    found = list(stream(open_.path, open_.shards, open_.rows, frozenset(), reading))
    assert len(found) == 40 and max(read_at_once) <= 6 and sum(read_at_once) == 40


@pytest.fixture
def few_files():
    """Room for 20 more open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_files")
def test_many_small_shards_are_not_all_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "_FILES", 8)
    blocks = [make({"w": materialized("w", torch.full((1, 3), float(n)))}, [str(n)]) for n in range(60)]
    source = write(tmp_path, *blocks, shard_examples=1, buffer_bytes=0)
    for prefetch in (0, 1):
        found = read(open_store(tmp_path, prefetch=prefetch))
        assert [block.grads["w"].w[0, 0].item() for block in found] == list(range(60))
    ids = source.ids[::-1]
    assert source.block(ids).grads["w"].w[:, 0].tolist() == [float(i) for i in ids]
    with pytest.raises(ValueError, match=r"too many files are open.*attrax compact"):
        read(open_store(tmp_path, block_examples=60))


@pytest.fixture
def asked(monkeypatch):
    """The sizes of the memory that is asked for to read stretches."""
    sizes: list[int] = []
    real = Buffers.array

    def array(self, shape, dtype):
        sizes.append(shape[0])
        return real(self, shape, dtype)

    monkeypatch.setattr(Buffers, "array", array)
    return sizes


def test_a_large_block_is_in_memory_a_few_leaves_at_a_time(tmp_path, rng, asked):
    leaves = {f"{n:02}": materialized(f"{n}", torch.randn(2, 2**18, generator=rng)) for n in range(16)}
    source = write(tmp_path, make(leaves, "ab"))
    ((_, places),) = source.map(lambda name, leaf, _: leaf.w.untyped_storage().data_ptr())
    assert asked == [2**22] * 8 and len(set(places.values())) == 2
    ((_, kept),) = source.map(lambda name, leaf, _: leaf)
    assert all(torch.equal(leaf.w, leaves[name].w) for name, leaf in kept.items())


def test_blocks_that_share_a_slab_read_it_once(tmp_path, rng, asked):
    leaves = {f"{n}": materialized(f"{n}", torch.randn(4, 2**19, generator=rng)) for n in range(3)}
    write(tmp_path, make(leaves, "abcd"))
    blocks = list(open_store(tmp_path, block_examples=1).map(lambda name, leaf, _: leaf.w))
    assert asked == [2**23] * 3
    for n, (_, found) in enumerate(blocks):
        assert all(torch.equal(w[0], leaves[name].w[n]) for name, w in found.items())


def test_blocks_read_as_one_lack_what_all_of_them_lack(tmp_path, rng):
    """Leaves that a transform has dropped are not absent: their gradients are not known to be zero."""
    one, two = (
        make({"w": materialized("w", torch.randn(1, 3, generator=rng))}, [i], absent=absent, micro=k)
        for k, (i, absent) in enumerate([("a", ("u", "v")), ("b", ("v", "x"))])
    )
    write(tmp_path, one, two)
    ((merged, _),) = open_store(tmp_path, block_examples="step").map(lambda *_: None)
    assert merged.ids == ("a", "b") and merged.absent == ("v",)
    assert [examples.absent for examples, _ in open_store(tmp_path).map(lambda *_: None)] == [
        ("u", "v"),
        ("v", "x"),
    ]


def test_masked_leaves_come_back(tmp_path):
    """Against the kept coordinates of each example's gradient, taken alone."""
    model, spec = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), Mask(6, scale="none")
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.arange(7) % 3
    with store(tmp_path) as sink, capture(model, loss="sum", transform=projected(spec), sinks=[sink]):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    kept = {n: coordinates(spec, n, tuple(p.shape)) for n, p in model.named_parameters()}
    right = []
    for i in range(7):
        grads = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), [*model.parameters()])
        right.append(torch.cat([g.flatten()[k] for g, k in zip(grads, kept.values(), strict=True)]))
    source = open_store(tmp_path)
    assert_same(graddot(source, source).values, torch.stack(right) @ torch.stack(right).T)


@pytest.mark.usefixtures("unchecked")
def test_small_appends_and_scattered_reads_are_not_quadratic(tmp_path, rng):
    """2,000 rows one at a time, of which the last cost what the first do, and 5,000 of 20,000 rows."""
    x = torch.randn(20_000, 64, generator=rng)
    clock = [time.process_time()]
    with store(tmp_path / "small") as sink:
        for n in range(2000):
            sink(make({"w": materialized("w", x[n : n + 1])}, [str(n)]))
            clock += [time.process_time()] if n % 500 == 499 else []
    assert clock[-1] - clock[-2] < 3 * (clock[1] - clock[0])
    assert torch.equal(open_store(tmp_path / "small").block(["1999", "7"]).grads["w"].w, x[[1999, 7]])
    blocks = [
        make({"w": materialized("w", x[n : n + 500])}, map(str, range(n, n + 500)))
        for n in range(0, 20_000, 500)
    ]
    open_ = write(tmp_path / "large", *blocks)
    chosen = torch.randperm(20_000, generator=rng)[:5000]
    start = time.process_time()
    found = open_.block([str(n) for n in chosen.tolist()])
    assert time.process_time() - start < 2
    assert torch.equal(found.grads["w"].w, x[chosen])


def test_the_system_is_told_that_shards_are_read_in_order(tmp_path, monkeypatch):
    write(tmp_path, *(make({"w": materialized("w", torch.ones(1, 3))}, [n]) for n in "ab"), shard_examples=1)
    told: set[tuple[str, int, int, int]] = set()
    name_of = lambda d: os.path.basename(os.readlink(f"/proc/self/fd/{d}"))  # noqa: E731
    open_ = open_store(tmp_path)
    monkeypatch.setattr(os, "posix_fadvise", lambda d, *advice: told.add((name_of(d), *advice)))
    assert len(list(open_.map(lambda *_: None))) == 2
    assert told == {(info.name, 0, 0, os.POSIX_FADV_SEQUENTIAL) for info in open_.shards}
