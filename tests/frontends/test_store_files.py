"""Files that are missing, torn, flipped, foreign or hostile: refused by name, never believed."""

import json
import os
import random
import shutil
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from attrax.core import Block, Examples, GradTree, Part, Sum, diagonal, factorized, lookup, materialized
from attrax.core.schema import SCHEMA
from attrax.frontends import index
from attrax.frontends.h5types import write_array
from attrax.frontends.store import open_store, store


def leaves_of(rng):
    def x(*shape):
        return torch.randn(*shape, generator=rng)

    ids = torch.randint(0, 7, (3, 5), generator=rng)
    tied = (lookup("tied", ids, x(3, 5, 4), rows=7), factorized("tied", x(3, 5, 4), x(3, 5, 7)))
    return {
        "fc/w": factorized("fc/w", x(3, 5, 4), x(3, 5, 6)),
        "emb": lookup("emb", ids, x(3, 5, 4), rows=7),
        "ln": diagonal("ln", x(3, 5, 4), x(3, 5, 4)),
        "m": materialized("m", x(3, 2, 2).bfloat16()),
        "tied": Sum(tied, (Part("tied", 7),)),
    }


@pytest.fixture
def shard(tmp_path, rng):
    """A store of two blocks in one shard; its path."""
    weight, tokens = torch.rand(3, generator=rng), torch.tensor([1, 2, 3])
    with store(tmp_path, keep_factored=True, columns=lambda e: {"text": [2 * i for i in e.ids]}) as sink:
        sink(Block(GradTree(leaves_of(rng)), Examples(("a", "Zürich", ""), 3, 1, weight, tokens, "fp", 0.1)))
        sink(Block(GradTree(leaves_of(rng)), Examples(("b", "c", "d"), 4, 0, weight, None, "fp", None)))
    return next(tmp_path.glob("*.shard.h5"))


def content(folder):
    """All that a store says, as plain values."""
    open_ = open_store(folder)
    found = [open_.ids, open_.runs, open_.fingerprints, open_.column("text"), open_.summary()]
    for examples, leaves in open_.map(lambda name, leaf, _: pytree.tree_flatten(leaf)):
        known = [None if x is None else x.tolist() for x in (examples.weight, examples.tokens)]
        found += [examples.ids, examples.step, examples.micro, examples.learning_rate, known]
        found += [(n, str(spec), [x.float().tolist() for x in xs]) for n, (xs, spec) in leaves.items()]
    return found


def opened(shard) -> Any:
    return h5py.File(shard)


def problem_with(folder, expected):
    """Why the store cannot be read; None if it reads as it should."""
    try:
        return None if content(folder) == expected else "read otherwise"
    except ValueError as error:
        return str(error)


def edit(shard, change):
    """Change a shard through plain h5py, then forget the index."""
    with h5py.File(shard, "r+") as file:
        change(file)
    (shard.parent / "index.json").unlink(missing_ok=True)


def test_a_flipped_bit_anywhere_is_found(shard):
    whole, expected = shard.read_bytes(), content(shard.parent)
    chooser = random.Random(3)
    unnoticed = 0
    for place in chooser.sample(range(len(whole)), 60):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chooser.randrange(8)
        shard.write_bytes(damaged)
        (shard.parent / "index.json").unlink(missing_ok=True)
        problem = problem_with(shard.parent, expected)
        assert problem is None or shard.name in problem, place
        unnoticed += problem is None
    assert unnoticed < 10


@pytest.mark.parametrize(
    "array", ["leaves/0/a", "leaves/0/offsets", "leaves/3/w", "leaves/4/uses/1/g", "weight"]
)
def test_a_flipped_bit_in_an_array_names_the_leaf(shard, array):
    expected = open_store(shard.parent)
    with opened(shard) as file:
        place = file[array].id.get_chunk_info(0).byte_offset
        name = file["leaves"][array.split("/")[1]].attrs["name"].decode() if "/" in array else "weights"
    damaged = bytearray(shard.read_bytes())
    damaged[place + 3] ^= 16
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match=f"{shard.name}.*{name}.*checksum.*capture its examples again"):
        content(shard.parent)
    with pytest.raises(ValueError, match=name):
        expected.block(["a"])


def test_a_torn_shard_is_named(shard):
    whole = shard.read_bytes()
    for length in (0, 7, 600, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=shard.name):
            content(shard.parent)
    shard.write_bytes(b"PK\3\4 not HDF5 at all")
    with pytest.raises(ValueError, match=r"Move it out of the store"):
        open_store(shard.parent)


def test_the_other_shards_can_be_used_without_a_damaged_one(shard):
    with store(shard.parent) as sink:
        sink(Block(GradTree({"w": materialized("w", torch.ones(1, 2))}), Examples(("other",))))
    shard.write_bytes(b"")
    with pytest.raises(ValueError, match=shard.name):
        open_store(shard.parent)
    shard.rename(shard.parent / "damaged")
    assert open_store(shard.parent).ids == ("other",)


def test_a_shard_that_was_taken_away_after_opening_is_named(shard):
    open_ = open_store(shard.parent)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}' is gone.*Open the store again"):
        open_.block(["a"])


def test_the_index_is_only_a_cache(shard, monkeypatch):
    folder, cache = shard.parent, shard.parent / "index.json"
    expected = content(folder)
    good = cache.read_text()
    changed = json.loads(good)
    changed["shards"][0]["ids"][0] = "other"
    larger = json.loads(good)
    larger["shards"][0]["size"] += 1
    newer = good.replace(f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1}', 1)
    unusable = [
        "",
        good[: len(good) // 2],
        "null",
        "[]",
        "[" * 5000,
        json.dumps(changed),
        json.dumps(larger),
        newer,
    ]
    for text in unusable:
        cache.write_text(text)
        assert content(folder) == expected
        assert cache.read_text() == good
    cache.unlink()
    assert content(folder) == expected and cache.read_text() == good
    monkeypatch.setattr(index, "read_info", lambda path: pytest.fail("the index was not used"))
    assert content(folder) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", [1, 2]),
        ("sizes", [3]),
        ("kinds", [9, 9]),
        ("signatures", [[99]]),
        ("leaves", [["w", {}]]),
        ("rank", "x"),
    ],
)
def test_an_index_with_a_right_checksum_and_wrong_fields(shard, field, value):
    expected = content(shard.parent)
    entries = json.loads((shard.parent / "index.json").read_text())["shards"]
    entries[0][field] = value
    text = index._canonical(entries)
    forged = f'{{"schema":{SCHEMA},"crc32":{index.zlib.crc32(text.encode())},"shards":{text}}}'
    (shard.parent / "index.json").write_text(forged)
    assert content(shard.parent) == expected


def test_an_index_that_names_other_files_leads_nowhere(shard):
    expected = content(shard.parent)
    entries = json.loads((shard.parent / "index.json").read_text())["shards"]
    outside = {**entries[0], "name": "../../etc/passwd"}
    text = index._canonical([*entries, outside])
    forged = f'{{"schema":{SCHEMA},"crc32":{index.zlib.crc32(text.encode())},"shards":{text}}}'
    (shard.parent / "index.json").write_text(forged)
    assert content(shard.parent) == expected


def test_a_store_in_a_directory_that_cannot_be_written(shard, monkeypatch):
    from attrax.frontends import folder

    expected = content(shard.parent)
    (shard.parent / "index.json").unlink()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder, "publish", refuse)
    assert content(shard.parent) == expected
    assert sorted(path.name for path in shard.parent.iterdir()) == [shard.name]


def test_another_schema_is_refused(shard):
    edit(shard, lambda file: file.attrs.modify("schema", SCHEMA + 1))
    with pytest.raises(
        ValueError,
        match=f"schema {SCHEMA + 1}; this version of attrax reads .* schema {SCHEMA}. Open the store",
    ):
        open_store(shard.parent)
    edit(shard, lambda file: file.attrs.__delitem__("format"))
    with pytest.raises(ValueError, match=shard.name):
        open_store(shard.parent)


def test_links_out_of_the_store_are_refused(shard, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(shard, elsewhere / "secret.h5")
    expected = content(shard.parent)
    link = shard.with_name("z.shard.h5")
    os.symlink(elsewhere / "secret.h5", link)
    with pytest.raises(ValueError, match=r"'z\.shard\.h5'.*is a link"):
        open_store(shard.parent)
    link.unlink()
    assert content(shard.parent) == expected

    def external(file):
        del file["leaves/0/a"]
        file["leaves/0/a"] = h5py.ExternalLink(str(elsewhere / "secret.h5"), "/leaves/0/a")

    edit(shard, external)
    with pytest.raises(ValueError, match=r"leaf 'fc/w'.*not a dataset of this file"):
        content(shard.parent)


def replace_array(file, name, make):
    shape, dtype = file[name].shape, file[name].dtype
    del file[name]
    make(name, shape, dtype)


def test_data_outside_the_file_is_refused(shard, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_bytes(bytes(range(256)) * 40)

    def outside(file):
        def make(name, shape, dtype):
            file.create_dataset(name, shape, dtype, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])

        replace_array(file, "leaves/0/a", make)

    def virtual(file):
        def make(name, shape, dtype):
            layout = h5py.VirtualLayout(shape, dtype)
            layout[:] = h5py.VirtualSource(str(secret), "x", shape)
            file.create_virtual_dataset(name, layout)

        replace_array(file, "leaves/1/g", make)

    for change, leaf in ((virtual, "emb"), (outside, "fc/w")):
        edit(shard, change)
        with pytest.raises(ValueError, match=f"leaf '{leaf}'.*not a chunked array"):
            content(shard.parent)


@pytest.mark.parametrize("filters", [{"compression": "gzip"}, {"fletcher32": True}, {}])
def test_other_filters_are_refused(shard, filters):
    def change(file):
        replace_array(
            file,
            "leaves/0/a",
            lambda n, s, d: file.create_dataset(n, data=np.ones(s, d), chunks=s, **filters),
        )

    edit(shard, change)
    with pytest.raises(ValueError, match="leaf 'fc/w'.*not a chunked array of a known type with checksums"):
        content(shard.parent)


def test_chunks_that_are_no_contiguous_pieces_are_refused(shard):
    def change(file):
        def make(name, shape, dtype):
            data = np.ones(shape, dtype)
            file.create_dataset(name, data=data, chunks=(2, shape[1] - 1)).attrs["xxh3"] = np.zeros(
                -(-len(data) // 2), np.uint64
            )

        replace_array(file, "leaves/0/a", make)

    edit(shard, change)
    with pytest.raises(ValueError, match=r"leaf 'fc/w'.*has chunks of .*, which are not contiguous in"):
        content(shard.parent)


def test_sizes_that_the_file_does_not_hold_are_refused(shard):
    def huge(file):
        def make(name, shape, dtype):
            array = file.create_dataset(name, (2**50, 4), dtype, chunks=(2**49, 4), maxshape=(None, 4))
            array.attrs["xxh3"] = np.zeros(2, np.uint64)

        replace_array(file, "leaves/0/a", make)

    edit(shard, huge)
    with pytest.raises(ValueError, match=r"leaf 'fc/w'.*claims \d+ bytes, which the file does not hold"):
        content(shard.parent)


@pytest.mark.parametrize(
    ("array", "values", "problem"),
    [
        ("leaves/0/offsets", [0, 5, 10, 15, 20, 25, 99], "fewer than its offsets say"),
        ("leaves/0/offsets", [0, 5, 10, 15, 12, 25, 30], "ascend"),
        ("leaves/0/offsets", [0, 5, 10], "2 examples"),
        ("leaves/1/ids", [7] * 30, "vocabulary has 7"),
        ("leaves/1/ids", [-1] * 30, "reach from -1"),
        ("ids/offsets", [0, 1, 8, 8, 9, 10, 99], "offsets say"),
        ("blocks/size", [3, 2**40], "blocks have"),
        ("blocks/size", [7, -1], "lengths"),
        ("blocks/signature", [0, 5], "does not have"),
        ("signatures/leaf", [0, 1, 2, 3, 77], "does not have"),
        ("signatures/leaf", [0, 1, 2, 3, 3], "twice"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(shard, array, values, problem):
    def change(file):
        def make(name, _, dtype):
            write_array(file, name, torch.from_numpy(np.array(values, dtype)))

        replace_array(file, array, make)

    edit(shard, change)
    with pytest.raises(ValueError, match=f"{shard.name}.*{problem}"):
        content(shard.parent)


@pytest.mark.parametrize(
    "form",
    [
        "[" * 100_000,
        "{}",
        '{"kind": "os.system"}',
        "not json",
        '{"kind":"Lookup","parts":[{"weight":"w","width":3}],"arrays":[{"name":"ids","dtype":"int64","shape":[]},'
        '{"name":"g","dtype":"float32","shape":[4]}],"bias":false,"calls":1,"basis":"","rows":1e300,"uses":[]}',
        '{"kind":"Materialized","parts":[{"weight":3,"width":3}],"arrays":[{"name":"w","dtype":"float32","shape":[4]}],'
        '"bias":false,"calls":1,"basis":"","rows":0,"uses":[]}',
        '{"kind":"Materialized","parts":[],"arrays":[{"name":"../w","dtype":"float32","shape":[4]}],'
        '"bias":false,"calls":1,"basis":"","rows":0,"uses":[]}',
    ],
)
def test_a_form_that_makes_no_sense_is_refused(shard, form):
    edit(shard, lambda file: file["leaves/0"].attrs.__setitem__("form", np.bytes_(form)))
    with pytest.raises(ValueError, match=shard.name):
        content(shard.parent)


def test_hostile_names_stay_names(tmp_path, rng):
    names = ["../../etc/passwd", "/etc/passwd", "..", "a\nb", "%n%s", "x" * 70_000]
    leaves = {name: materialized(name, torch.ones(2, 3)) for name in names}
    block = Block(GradTree(leaves), Examples(("../../id", "/"), fingerprint="../../f"))
    with store(tmp_path / "in") as sink:
        sink(block)
    open_ = open_store(tmp_path / "in")
    assert list(open_.leaves) == names and open_.block(["../../id"]).examples.fingerprint == "../../f"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_nothing_in_a_store_is_executed(shard):
    with h5py.File(shard) as file:
        kinds = set()
        file.visititems(
            lambda _, node: kinds.add(node.dtype.kind) if isinstance(node, h5py.Dataset) else None
        )
    assert kinds <= {"f", "i", "u"}
