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
from xxhash import xxh3_64_intdigest

from attrax.core import Block, Examples, GradTree, Part, Sum, diagonal, factorized, lookup, materialized
from attrax.core.schema import FORMAT, SCHEMA, Places
from attrax.frontends.storage import index
from attrax.frontends.storage.envelope import data_at, wrapped
from attrax.frontends.storage.store import open_store, store


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


def parts_of(shard) -> Any:
    """Table and data of a shard."""
    with opened(shard) as file:
        return json.loads(file["table"][:].tobytes()), file["data"][:].tobytes()


def forge(shard, change):
    """Change what a shard says of itself, with right checksums, then forget the index."""
    said, data = parts_of(shard)
    change(said)
    pieces, size = wrapped(len(data), json.dumps(said).encode())
    whole = bytearray(size)
    for at, piece in ((data_at(), data), *pieces):
        whole[at : at + len(piece)] = piece
    shard.write_bytes(whole)
    (shard.parent / "index.json").unlink(missing_ok=True)


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


def flipped(shard, whole, place, chooser):
    damaged = bytearray(whole)
    damaged[place] ^= 1 << chooser.randrange(8)
    shard.write_bytes(damaged)
    (shard.parent / "index.json").unlink(missing_ok=True)


def test_a_flipped_bit_in_data_or_table_is_found(shard):
    whole, expected = shard.read_bytes(), content(shard.parent)
    with opened(shard) as file:
        (slab,), table = parts_of(shard)[0]["slabs"], file["table"]
        places = [*range(data_at() + slab["at"], data_at() + slab["at"] + slab["size"])]
        places += range(start := table.id.get_offset(), start + len(table))
    chooser = random.Random(3)
    for place in chooser.sample(places, 60):
        flipped(shard, whole, place, chooser)
        assert shard.name in (problem_with(shard.parent, expected) or ""), place


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(shard):
    whole, expected = shard.read_bytes(), content(shard.parent)
    chooser = random.Random(4)
    for place in [*range(0, 464, 11), *chooser.sample(range(len(whole)), 20)]:
        flipped(shard, whole, place, chooser)
        problem = problem_with(shard.parent, expected)
        assert problem is None or shard.name in problem, place


@pytest.mark.parametrize(("leaf", "place"), [("fc/w", 3), ("long", 300_000), ("long", 700_000), ("last", -1)])
def test_a_flipped_bit_in_an_array_names_the_leaf(tmp_path, leaf, place):
    sizes = {"fc/w": 8, "long": 200_000, "last": 8}
    with store(tmp_path) as sink:
        sink(
            Block(
                GradTree({n: materialized(n, torch.ones(1, k)) for n, k in sizes.items()}), Examples(("a",))
            )
        )
    (shard,), before = tmp_path.glob("*.shard.h5"), open_store(tmp_path)
    (slab,) = parts_of(shard)[0]["slabs"]
    damaged = bytearray(shard.read_bytes())
    damaged[data_at() + place % slab["size"]] ^= 16
    shard.write_bytes(damaged)
    for source in (before, open_store(tmp_path)):
        with pytest.raises(ValueError, match=f"{shard.name}.*'{leaf}'.*checksum.*capture its examples again"):
            source.block(["a"])


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
        ("places", [1, 2]),
        ("places", [1, 2, 3, 4, 5]),
        ("places", [2**70, 2**70, -1, 2**70, -1]),
    ],
)
def test_an_index_with_a_right_checksum_and_wrong_fields(shard, field, value):
    expected = content(shard.parent)
    entries = json.loads((shard.parent / "index.json").read_text())["shards"]
    entries[0][field] = value
    (shard.parent / "index.json").write_text(index.enclosed(json.dumps(entries)))
    assert content(shard.parent) == expected


def write_entry(shard, **fields: Any):
    """An index that says something else of a shard."""
    entries = json.loads((shard.parent / "index.json").read_text())["shards"]
    (shard.parent / "index.json").write_text(index.enclosed(json.dumps([{**entries[0], **fields}])))


@pytest.mark.parametrize("place", Places._fields)
@pytest.mark.parametrize("value", [0, 64, -64, 2**62, 2**70])
def test_an_index_with_one_wrong_place(shard, place, value):
    expected = content(shard.parent)
    (info,) = open_store(shard.parent).shards
    write_entry(shard, places=info.places._replace(**{place: value}))
    assert content(shard.parent) == expected


def test_an_index_that_says_otherwise_than_the_shard_is_forgotten(shard):
    expected = content(shard.parent)
    write_entry(shard, ids=["other", *open_store(shard.parent).ids[1:]])
    with pytest.raises(ValueError, match=f"{shard.name}' is not what it was.*Open the store again"):
        content(shard.parent)
    assert content(shard.parent) == expected


def test_an_index_makes_no_file_larger(shard):
    """Slabs that reach beyond the file, which a forged index says is large enough."""
    (before,) = open_store(shard.parent).shards
    text = (shard.parent / "index.json").read_text()
    forge(shard, lambda said: said["slabs"][0].__setitem__("at", 2**40))
    (shard.parent / "index.json").write_text(text)
    with opened(shard) as file:
        table: Any = file["table"]
        where = (table.id.get_offset(), len(table), int(table.attrs["xxh3"]))
    places = Places(before.places.data, 2**62, *where)
    write_entry(shard, size=shard.stat().st_size, places=places)
    with pytest.raises(ValueError, match=f"{shard.name}.*the description.*beyond its"):
        content(shard.parent)


def test_an_index_without_places_is_made_anew(shard):
    """As versions wrote it that did not keep them."""
    expected, good = content(shard.parent), (shard.parent / "index.json").read_text()
    entries = json.loads(good)["shards"]
    (shard.parent / "index.json").write_text(
        index.enclosed(json.dumps([{k: v for k, v in e.items() if k != "places"} for e in entries]))
    )
    assert content(shard.parent) == expected and (shard.parent / "index.json").read_text() == good


def test_data_may_lie_where_another_hdf5_puts_them(shard):
    expected = content(shard.parent)
    with opened(shard) as file:
        data, table = (file[name][:] for name in ("data", "table"))
    with h5py.File(shard, "w", userblock_size=1024) as file:
        file.attrs["format"], file.attrs["schema"] = np.bytes_(FORMAT), SCHEMA
        file["data"], file["table"] = data, table
        file["table"].attrs["xxh3"] = np.uint64(xxh3_64_intdigest(table.tobytes()))
        assert file["data"].id.get_offset() != data_at()
    for _ in ("described", "from the index"):
        assert content(shard.parent)[:4] == expected[:4] and content(shard.parent)[5:] == expected[5:]


def test_an_index_that_names_other_files_leads_nowhere(shard):
    expected = content(shard.parent)
    entries = json.loads((shard.parent / "index.json").read_text())["shards"]
    outside = {**entries[0], "name": "../../etc/passwd"}
    (shard.parent / "index.json").write_text(index.enclosed(json.dumps([*entries, outside])))
    assert content(shard.parent) == expected


def test_a_store_in_a_directory_that_cannot_be_written(shard, monkeypatch):
    from attrax.frontends.storage import folder

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
        del file["data"]
        file["data"] = h5py.ExternalLink(str(elsewhere / "secret.h5"), "/data")

    edit(shard, external)
    with pytest.raises(ValueError, match=rf"{shard.name}.*not a dataset of this file"):
        open_store(shard.parent)


def outside(file, name, shape, dtype, secret):
    file.create_dataset(name, shape, dtype, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def virtual(file, name, shape, dtype, secret):
    layout = h5py.VirtualLayout(shape, dtype)
    layout[:] = h5py.VirtualSource(str(secret), "x", shape)
    file.create_virtual_dataset(name, layout)


def packed(file, name, shape, dtype, secret):
    file.create_dataset(name, data=np.ones(shape, dtype), compression="gzip")


def chunked(file, name, shape, dtype, secret):
    file.create_dataset(name, data=np.ones(shape, dtype), chunks=shape)


def wider(file, name, shape, dtype, secret):
    file.create_dataset(name, data=np.ones(shape, np.int32))


def huge(file, name, shape, dtype, secret):
    file.create_dataset(name, (2**50,), dtype)


@pytest.mark.parametrize("name", ["data", "table"])
@pytest.mark.parametrize("make", [outside, virtual, packed, chunked, wider, huge])
def test_other_arrays_are_refused(shard, tmp_path_factory, make, name):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_bytes(bytes(range(256)) * 100)

    def change(file):
        shape, dtype = file[name].shape, file[name].dtype
        del file[name]
        make(file, name, shape, dtype, secret)

    edit(shard, change)
    with pytest.raises(ValueError, match=f"{shard.name}.*(in one piece in|list of bytes|does not hold)"):
        open_store(shard.parent)


LONG = 2**62


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("lengths", 0), [5, 5, 5, 5, 5, 99], "has arrays of"),
        (("lengths", 0), [5, 5, 5, 5, 5, LONG], "make no sense"),
        (("lengths", 0), [LONG] * 6, "make no sense"),
        (("lengths", 0), [5, 5, 5, 5, 15, -5], "make no sense"),
        (("lengths", 0), [5, 5], "2 examples"),
        (("layouts", 0), [0, 0], "argument"),
        (("layouts", 0, 0), 7, "out of range"),
        (("layouts", 0, 0), None, "integer"),
        (("slabs", 0, "at"), 2**40, "beyond its"),
        (("slabs", 0, "at"), -4096, "not those of its blocks"),
        (("slabs", 0, "at"), 1, "not those of its blocks"),
        (("slabs", 0, "size"), 2**40, "checksums"),
        (("slabs", 0, "size"), 64, "has arrays of"),
        (("slabs", 0, "size"), 1e3, "integer"),
        (("slabs", 0, "blocks"), 3, "not those of its blocks"),
        (("slabs", 0, "blocks"), 1, "examples, its blocks have"),
        (("slabs", 0, "xxh3"), "0" * 16, "checksum"),
        (("slabs", 0, "xxh3"), "x", "hexadecimal"),
        (("slabs",), [], "hold 0 blocks"),
        (("weight",), [1.0], "different lengths"),
        (("tokens", 0), "x", "invalid literal"),
        (("sizes",), [3, 2**40], "blocks have"),
        (("sizes",), [7, -1], "lengths"),
        (("kinds",), [0, 5], "does not have"),
        (("signatures", 0), [0, 1, 2, 3, 77], "does not have"),
        (("signatures", 0), [0, 1, 2, 3, 3], "twice"),
        (("leaves", 0, 1, "arrays", 0, "dtype"), "object", "no known dtype"),
        (("leaves", 0, 1, "arrays", 0, "shape"), [2**40], "has arrays of"),
        (("leaves", 0, 1, "arrays", 0, "shape"), [-4], "negative|inconsistent"),
        (("ids", 0), 3, "another type"),
        (("values", 0, "values"), [], "0 values for 6 examples"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(shard, path, value, problem):
    def change(said):
        for step in path[:-1]:
            said = said[step]
        said[path[-1]] = value

    forge(shard, change)
    with pytest.raises(ValueError, match=f"{shard.name}.*({problem})"):
        content(shard.parent)


@pytest.mark.parametrize("ids", [[7] * 3, [-2] * 3])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path, ids):
    leaf = lookup("emb", torch.tensor([ids]), torch.ones(1, 3, 2), rows=7)
    with store(tmp_path, keep_factored=True) as sink:
        sink(Block(GradTree({"emb": leaf}), Examples(("a",))))
    with pytest.raises(ValueError, match=r"leaf 'emb'.*ids reach from .* vocabulary has 7"):
        open_store(tmp_path).block(["a"])


def test_a_forged_table_is_read_as_it_says(shard):
    """The forgeries above fail for what they say, not for how they are made."""
    expected = content(shard.parent)
    forge(shard, lambda said: None)
    assert content(shard.parent) == expected


@pytest.mark.parametrize(
    "form",
    [
        "{}",
        '{"kind": "os.system"}',
        '"not a form"',
        '{"kind":"Lookup","parts":[{"weight":"w","width":3}],"arrays":[{"name":"ids","dtype":"int64","shape":[]},'
        '{"name":"g","dtype":"float32","shape":[4]}],"bias":false,"calls":1,"basis":"","rows":1e300,"uses":[]}',
        '{"kind":"Materialized","parts":[{"weight":3,"width":3}],"arrays":[{"name":"w","dtype":"float32","shape":[4]}],'
        '"bias":false,"calls":1,"basis":"","rows":0,"uses":[]}',
        '{"kind":"Materialized","parts":[],"arrays":[{"name":"../w","dtype":"float32","shape":[4]}],'
        '"bias":false,"calls":1,"basis":"","rows":0,"uses":[]}',
    ],
)
def test_a_form_that_makes_no_sense_is_refused(shard, form):
    forge(shard, lambda said: said["leaves"][0].__setitem__(1, json.loads(form)))
    with pytest.raises(ValueError, match=shard.name):
        content(shard.parent)


@pytest.mark.parametrize("text", [b"not json", b"[" * 100_000, b"{}", b"[]", b"null", b"\xff"])
def test_a_table_that_makes_no_sense_is_refused(shard, text):
    pieces, size = wrapped(4096, text)
    shard.write_bytes(bytes(size))
    with shard.open("r+b") as file:
        for at, piece in pieces:
            file.seek(at)
            file.write(piece)
    with pytest.raises(ValueError, match=f"{shard.name}.*description"):
        open_store(shard.parent)


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
