"""What goes into a store comes out: every kind of leaf, every dtype, every id, and the same scores."""

import json
import math
from collections.abc import Iterable
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from attrax.core import (
    Block,
    Examples,
    Factorized,
    GradTree,
    Materialized,
    Part,
    Sum,
    collect,
    diagonal,
    factorized,
    grouped,
    lookup,
    materialize_leaf,
    materialized,
    token_scores,
)
from attrax.core.algebra import nothing
from attrax.frontends.storage.store import open_store, store

from .plain_h5py import slabs

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SPECIAL = torch.tensor([1.0, -0.0, 3.0e38, 1e-39, math.inf, math.nan, 1 / 3, 65536.0]).bfloat16()
LENGTHS = (5, 3, 0, 4)


def rows(rng, width, dtype=torch.float64, lengths=LENGTHS, padding=7):
    """Factors [B, padding, width] whose rows beyond each example's length are zero."""
    x = torch.randn(len(lengths), padding, width, generator=rng).to(dtype)
    for example, length in zip(x, lengths, strict=True):
        example[length:] = 0
    return x


def by_group(rng, width, dtype):
    """Factors of two groups [B, 2, padding, width]."""
    return torch.stack([rows(rng, width, dtype), rows(rng, width, dtype)], 1)


def every_kind(rng, dtype=torch.float64) -> dict[str, Any]:
    """One leaf of every kind, four examples each."""
    ids = torch.randint(0, 9, (4, 7), generator=rng).where(rows(rng, 1, lengths=LENGTHS)[..., 0] != 0, -1)
    both = (Part("q.weight", 2, "q.bias"), Part("k.weight", 3, "k.bias", transposed=True, head=True))
    head = factorized("wte.weight", rows(rng, 3, dtype), rows(rng, 9, dtype))
    return {
        "fc.weight": factorized("fc.weight", rows(rng, 4, dtype), rows(rng, 5, dtype), bias="fc.bias"),
        "q.weight": Factorized(rows(rng, 4, dtype), rows(rng, 5, dtype), both, True, 1, "rotated"),
        "wpe.weight": lookup("wpe.weight", ids, rows(rng, 3, dtype), rows=9),
        "dw.weight": grouped("dw.weight", by_group(rng, 3, dtype), by_group(rng, 1, dtype), shape=(2, 1, 3)),
        "ln.weight": diagonal("ln.weight", rows(rng, 6, dtype), rows(rng, 6, dtype)),
        "ln.bias": diagonal("ln.bias", (rows(rng, 6)[..., :1] != 0).to(dtype), rows(rng, 6, dtype)),
        "conv.weight": materialized("conv.weight", torch.randn(4, 2, 3, 2, generator=rng).to(dtype)),
        "temperature": materialized("temperature", torch.randn(4, generator=rng).to(dtype)),
        "wte.weight": Sum((lookup("wte.weight", ids, rows(rng, 3, dtype), rows=9), head), head.parts),
    }


def make(leaves, ids: Iterable[str] = "wxyz", **examples: Any) -> Any:
    return Block(GradTree(leaves), Examples(tuple(ids), **examples))


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same(found, expected):
    """Equal values and fields, bit by bit, but for rows of padding."""
    (xs, spec), (ys, expected_spec) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert spec == expected_spec
    for x, y in zip(xs, ys, strict=True):
        padded = y[tuple(map(slice, x.shape))] if x.shape != y.shape else y
        assert x.dtype == y.dtype and torch.equal(bits(x), bits(padded))
        assert not y.numel() or y.numel() == padded.numel() or bool((y[:, x.shape[1] :] == nothing(y)).all())


def write(path, *blocks, **options: Any) -> Any:
    with store(path, **options) as sink:
        for block in blocks:
            sink(block)
    return open_store(path)


def read(source) -> Any:
    return [
        Block(GradTree(leaves), examples)
        for examples, leaves in source.map(lambda name, leaf, examples: leaf)
    ]


def shard(folder):
    return next(folder.glob("*.shard.h5"))


def table(folder) -> Any:
    """What the only shard says of itself."""
    with h5py.File(shard(folder)) as file:
        text: Any = file["table"]
        return json.loads(text[:].tobytes())


def leaf(folder, wanted) -> Any:
    """Arrays of a leaf in the first slab, read without attrax."""
    return next(arrays for _, name, _, _, arrays in slabs(shard(folder)) if name == wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kind_comes_back_bit_by_bit(tmp_path, rng, dtype):
    block = make(every_kind(rng, dtype))
    (found,) = read(write(tmp_path, block, keep_factored=True))
    assert list(found.grads) == list(block.grads)
    for name, leaf in block.grads.items():
        assert_same(found.grads[name], leaf)


def test_special_values_of_bfloat16_keep_their_bits(tmp_path):
    open_ = write(tmp_path, make({"w": materialized("w", SPECIAL.reshape(1, 8))}, "x"))
    assert torch.equal(
        open_.block(["x"]).grads["w"].w.view(torch.int16), SPECIAL.reshape(1, 8).view(torch.int16)
    )
    plain = (leaf(tmp_path, "w")["w"][0].astype(np.uint32) << 16).view(np.float32)
    assert math.copysign(1, plain[1]) == -1
    assert np.array_equal(plain, SPECIAL.float().numpy(), equal_nan=True)


def test_several_calls_are_trimmed_call_by_call(tmp_path, rng):
    a, g = rows(rng, 3, lengths=(2, 1), padding=4), rows(rng, 2, lengths=(2, 1), padding=4)
    twice = Factorized(torch.cat([a, 2 * a], 1), torch.cat([g, 3 * g], 1), (Part("w", 2),), calls=2)
    short = Factorized(torch.cat([a, a[:, :3]], 1), torch.cat([g, g[:, :3]], 1), (Part("v", 2),), calls=2)
    found = write(tmp_path, make({"w": twice, "v": short}, "xy"), keep_factored=True).block("xy").grads
    assert found["w"].calls == 2 and found["w"].a.shape == (2, 4, 3)
    query = GradTree({"w": materialized("w", torch.randn(1, 2, 3, generator=rng, dtype=torch.float64))})
    whole = token_scores(GradTree({"w": twice}), query)
    assert torch.allclose(token_scores(GradTree({"w": found["w"]}), query), whole[:, :2])
    assert torch.allclose(materialize_leaf(found["v"]).w, materialize_leaf(short).w)


def test_the_smaller_form_is_stored_unless_rows_are_asked_for(tmp_path, rng):
    long = factorized("long", rows(rng, 3), rows(rng, 3))
    short = factorized("short", rows(rng, 30), rows(rng, 30))
    block = make({"long": long, "short": short, "ln": diagonal("ln", rows(rng, 3), rows(rng, 3))})
    compact = write(tmp_path / "a", block).block("wxyz").grads
    assert [type(leaf) for leaf in compact.values()] == [Materialized, Factorized, Materialized]
    chosen = write(tmp_path / "b", block, keep_factored=lambda name, leaf: name == "long").block("wxyz").grads
    assert [type(leaf) for leaf in chosen.values()] == [Factorized, Factorized, Materialized]
    for name, leaf in block.grads.items():
        assert torch.equal(materialize_leaf(compact[name]).w, materialize_leaf(leaf).w)


def test_padding_does_not_decide_the_form(tmp_path, rng):
    narrow = factorized("w", rows(rng, 8, padding=500), rows(rng, 8, padding=500))
    assert isinstance(
        write(tmp_path, make({"w": narrow}), keep_factored=True).block("w").grads["w"], Factorized
    )
    two = factorized(
        "w", rows(rng, 8, lengths=(2, 1), padding=500), rows(rng, 8, lengths=(2, 1), padding=500)
    )
    assert isinstance(write(tmp_path / "two", make({"w": two}, "ab")).block("ab").grads["w"], Factorized)


def test_a_leaf_recorded_in_two_forms_is_read_in_one(tmp_path, rng):
    blocks = [
        make({"w": factorized("w", rows(rng, 4, lengths=n), rows(rng, 4, lengths=n))}, ids)
        for ids, n in (("ab", (1, 1)), ("cd", (6, 5)), ("e", (1,)))
    ]
    open_ = write(tmp_path, *blocks)
    assert {form.kind for form in open_.leaves["w"]} == {"Factorized", "Materialized"}
    assert {type(block.grads["w"]) for block in read(open_)} == {Materialized}
    joined: Any = collect(open_)
    assert joined.examples.ids == tuple("abcde")
    expected = torch.cat([materialize_leaf(block.grads["w"]).w for block in blocks])
    for found in (joined, *read(open_store(tmp_path, block_examples=9)), open_.block("abcde")):
        assert torch.equal(found.grads["w"].w, expected)
    assert torch.equal(open_.block("eca").grads["w"].w, expected[[4, 2, 0]])


def test_what_is_known_of_the_examples(tmp_path):
    leaf = materialized("w", torch.ones(2, 3))
    weight, tokens = torch.tensor([0.1, 1 / 3]), torch.tensor([3, 0])
    known = make(
        {"w": leaf}, "ab", step=7, micro=2, weight=weight, tokens=tokens, fingerprint="äf", learning_rate=0.1
    )
    single = make({"w": leaf}, "cd", weight=weight.double(), learning_rate=0.0)
    unknown = make({"w": leaf}, "ef")
    found = [block.examples for block in read(write(tmp_path, known, single, unknown))]
    assert torch.equal(found[0].weight, weight) and torch.equal(found[1].weight, weight.double())
    assert found[0].weight.dtype == torch.float32 and found[1].weight.dtype == torch.float64
    assert torch.equal(found[0].tokens, tokens) and found[1].tokens is None
    assert (found[2].weight, found[2].tokens, found[2].learning_rate) == (None, None, None)
    about = [(e.ids, e.step, e.micro, e.fingerprint, e.learning_rate) for e in found]
    assert about == [(("a", "b"), 7, 2, "äf", 0.1), (("c", "d"), 0, 0, "", 0.0), (("e", "f"), 0, 0, "", None)]


def test_ids_and_names_are_text(tmp_path):
    ids = [*np.array(["a", "doc-0012", "Zürich", "文書", ""]).tolist(), "nul\0", "x" * 5000]
    names = ["h.0/attn.c_proj", "h.0.attn/c_proj", "/", "..", "../../etc/passwd"]
    ones = {name: materialized(name, torch.ones(len(ids), 2)) for name in names}
    open_ = write(tmp_path, make(ones, ids))
    assert open_.ids == tuple(ids) and list(open_.leaves) == names
    assert all(type(i) is str for i in open_.ids)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".h5", ".json"]


def test_plain_h5py_reads_a_shard(tmp_path, rng):
    block = make(every_kind(rng, torch.float32), ["a", "", "ü", "b"], step=3, weight=torch.ones(4))
    write(tmp_path, block, keep_factored=True)
    with h5py.File(shard(tmp_path)) as file:
        assert (file.attrs["format"], file.attrs["schema"]) == (b"attrax gradient shard", 4)
        assert all(file[name].dtype == np.uint8 and not file[name].chunks for name in ("data", "table"))
    ids, _, _, lengths, arrays = next(found for found in slabs(shard(tmp_path)) if found[1] == "fc.weight")
    assert (ids, lengths) == (["a", "", "ü", "b"], list(LENGTHS))
    assert np.array_equal(arrays["a"][5:8], block.grads["fc.weight"].a[1, :3])
    assert np.array_equal(arrays["g"][5:8], block.grads["fc.weight"].g[1, :3])
    assert (table(tmp_path)["steps"], table(tmp_path)["weight"]) == ([3], [1.0] * 4)


def test_padding_is_not_stored(tmp_path, rng):
    padded = factorized("w", rows(rng, 64, padding=400), rows(rng, 64, padding=400))
    write(tmp_path, make({"w": padded}), keep_factored=True)
    assert leaf(tmp_path, "w")["a"].shape == (sum(LENGTHS), 64)


def test_leaves_of_the_same_lengths_share_them(tmp_path, rng):
    a, g, other = rows(rng, 64), rows(rng, 64), rows(rng, 64)
    other[0] = 0
    leaves = {"v": factorized("v", a, g), "w": factorized("w", a, 2 * g), "x": factorized("x", a, other)}
    write(tmp_path, make(leaves), keep_factored=True)
    found = table(tmp_path)
    assert found["layouts"] == [[0, 0, 1]] and found["lengths"] == [list(LENGTHS), [0, *LENGTHS[1:]]]


def test_rows_wider_than_a_piece_come_back_bit_by_bit(tmp_path, rng):
    wide = {"w": materialized("w", torch.randn(4, 3, 50_000, generator=rng))}
    found = write(tmp_path, make(wide)).block("wxyz").grads
    assert torch.equal(found["w"].w, wide["w"].w)


def pieces(sizes: list[int]) -> list[tuple[int, int]]:
    """Where the pieces of arrays of these sizes begin and end, by the rule that `attrax.core.schema` states."""
    found, at, end = [], 0, 0
    for number, size in enumerate(sizes, 1):
        end = end + -end % 64 + size
        if end - at >= 2**22 or number == len(sizes):
            end += -end % 64
            found += [(n, min(n + 2**18, end)) for n in range(at, end, 2**18)]
            at = end
    return found


@pytest.mark.parametrize("sizes", [(7, 2000), (1, 3), (700_000, 300_000, 100_000, 9, 2_000_000, 5)])
def test_every_quarter_of_a_mebibyte_of_a_stretch_has_a_checksum(tmp_path, rng, sizes):
    leaves = {f"{n}": materialized(f"{n}", torch.randn(1, k, generator=rng)) for n, k in enumerate(sizes)}
    write(tmp_path, make(leaves, "a"), make({"x": materialized("x", torch.ones(1, 9))}, "x"))
    with h5py.File(shard(tmp_path)) as file:
        plain: Any = file
        data = plain["data"][:].tobytes()
        assert int(plain["table"].attrs["xxh3"]) == xxh3_64_intdigest(plain["table"][:].tobytes())
    for slab, arrays in zip(table(tmp_path)["slabs"], ([4 * k for k in sizes], [36]), strict=True):
        whole = data[slab["at"] : slab["at"] + slab["size"]]
        assert slab["xxh3"] == "".join(xxh3_64_hexdigest(whole[a:b]) for a, b in pieces(arrays))
        assert slab["at"] % 512 == 0 and slab["size"] == pieces(arrays)[-1][1]


def test_small_blocks_of_one_kind_share_a_slab(tmp_path, rng):
    def block(n, names, size=50):
        return make(
            {x: materialized(x, torch.randn(2, size, generator=rng)) for x in names}, (f"{n}a", f"{n}b")
        )

    blocks = [
        block(0, "vw"),
        block(1, "vw"),
        block(2, "v"),
        block(3, "vw"),
        block(4, "vw", 2**18),
        block(5, "vw"),
    ]
    source = write(tmp_path, *blocks)
    assert [slab["blocks"] for slab in table(tmp_path)["slabs"]] == [2, 1, 1, 1, 1]
    for found, expected in zip(read(source), blocks, strict=True):
        assert found.examples.ids == expected.examples.ids
        assert all(torch.equal(found.grads[x].w, leaf.w) for x, leaf in expected.grads.items())


def test_dtype_casts_and_refuses_to_overflow(tmp_path, rng):
    block = make(every_kind(rng, torch.float32))
    found = write(tmp_path / "a", block, dtype=torch.bfloat16, keep_factored=True).block("wxyz").grads
    assert found["fc.weight"].a.dtype == torch.bfloat16 and found["wpe.weight"].ids.dtype == torch.int64
    large = make({"w": materialized("w", torch.tensor([[65536.0, math.inf]]))}, "x")
    with (
        store(tmp_path / "b", dtype=torch.float16) as sink,
        pytest.raises(ValueError, match=r"'w'.*65504|6\.55e\+04"),
    ):
        sink(large)
    assert torch.isinf(
        write(tmp_path / "c", large, dtype=torch.bfloat16).block("x").grads["w"].w
    ).tolist() == [[False, True]]
    with pytest.raises(ValueError, match="int64"):
        store(tmp_path / "d", dtype=torch.int64)
    narrow = make({"w": materialized("w", torch.ones(1, 2).to(torch.float8_e4m3fn))}, "x")
    with store(tmp_path / "e") as sink, pytest.raises(ValueError, match="float8_e4m3fn"):
        sink(narrow)


def test_later_writes_to_a_captured_tensor_do_not_show(tmp_path):
    w, a, c = torch.ones(2, 3), torch.ones(2, 2, 40), torch.ones(2)
    with store(tmp_path) as sink:
        sink(make({"w": materialized("w", w), "a": factorized("a", a, a.clone())}, "xy", weight=c))
        for x in (w, a, c):
            x.zero_()
    found: Any = open_store(tmp_path).block("xy")
    assert found.grads["w"].w.all() and found.grads["a"].a.all() and found.examples.weight.all()


def test_a_default_device_changes_nothing(tmp_path, rng):
    block = make(every_kind(rng), weight=torch.ones(4), tokens=torch.ones(4, dtype=torch.int64))
    torch.set_default_device("meta")
    try:
        (found,) = read(write(tmp_path, block, columns=lambda examples: {"n": [1, 2, 3, 4]}))
        assert list(open_store(tmp_path).column("n")) == [1, 2, 3, 4]
    finally:
        torch.set_default_device(None)
    assert torch.equal(found.examples.weight, torch.ones(4))
    for name, leaf in block.grads.items():
        assert torch.allclose(materialize_leaf(found.grads[name]).w, materialize_leaf(leaf).w)


def test_blocks_without_examples_leave_no_trace(tmp_path):
    with store(tmp_path) as sink:
        sink(make({"w": materialized("w", torch.ones(0, 3))}, ""))
        sink.flush()
        assert not list(tmp_path.glob("*.h5"))
        sink(make({}, "ab"))
    assert open_store(tmp_path).ids == ("a", "b")
    assert [list(block.grads) for block in read(open_store(tmp_path))] == [[]]


def test_an_example_without_gradient_comes_back_as_zeros(tmp_path):
    leaf = factorized("w", torch.ones(2, 4, 50), torch.zeros(2, 4, 50))
    (found,) = read(write(tmp_path, make({"w": leaf}, "ab")))
    assert found.grads["w"].g.shape == (2, 1, 50) and not found.grads["w"].g.any()


def test_shards_close_by_bytes_and_by_examples(tmp_path):
    blocks = [make({"w": materialized("w", torch.ones(2, 256))}, f"{k}{k + 5}") for k in range(5)]
    assert len(write(tmp_path / "a", *blocks, shard_bytes=4096).shards) == 3
    assert len(write(tmp_path / "b", *blocks, shard_examples=3).shards) == 3
    assert len(write(tmp_path / "c", *blocks).shards) == 1


def test_what_cannot_be_stored(tmp_path):
    leaf = materialized("w", torch.ones(1, 3))
    with store(tmp_path) as sink:
        for block, problem in (
            (make({"w": leaf}, ["\ud800"]), "Unicode"),
            (make({"w": leaf}, "ab"), "2 ids"),
            (make({"a\0b": leaf}, "a"), "zero byte"),
            (make({"w": leaf}, "a", weight=torch.ones(2)), "weight has shape"),
        ):
            with pytest.raises(ValueError, match=problem):
                sink(block)
    with pytest.raises(ValueError, match="closed"):
        sink(make({"w": leaf}, "a"))
    refused: list[dict[str, Any]] = [
        {"run": "../x"},
        {"run": ".x"},
        {"run": ""},
        {"rank": -1},
        {"shard_bytes": 0},
        {"shard_examples": 0},
    ]
    for options in refused:
        with pytest.raises(ValueError, match="store:"):
            store(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        store(tmp_path / "file")
    with pytest.raises(OSError, match="store: '/proc/nowhere/x' cannot be made: .* Give a path"):
        store("/proc/nowhere/x")
    with pytest.raises(OSError, match="store: '/proc/self' cannot be written: .* Give a path"):
        store("/proc/self")


def test_stores_that_cannot_be_opened(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no shards.*capture\(sinks="):
        open_store(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="it is a file"):
        open_store(tmp_path / "file")
    (tmp_path / "00000000.step.h5").write_text("")
    with pytest.raises(ValueError, match=r"attrax\.open_trajectory reads the optimizer steps in it"):
        open_store(tmp_path)
    (tmp_path / ".r-0000-000000-ab.shard.h5.tmp").write_bytes(b"half")
    with pytest.raises(ValueError, match="1 were never finished"):
        open_store(tmp_path)
    write(tmp_path, make({}, "a"))
    with pytest.raises(ValueError, match="no run 'x'"):
        open_store(tmp_path, run="x")
    with pytest.raises(ValueError, match="at least 1"):
        open_store(tmp_path, block_examples=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: got 'cuda', and no GPU is available"):
            open_store(tmp_path, device="cuda")
