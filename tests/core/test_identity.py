"""Content ids and fingerprints: equal content has one name everywhere, anything else another."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from attrax.core import content_ids, fingerprint
from attrax.core import identity as module

from .toys import generator, law, normal

TOKENS = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]])


def test_ids_and_fingerprints_never_change():
    """Stores and scores on disk are matched by them."""
    assert content_ids({"input_ids": TOKENS}) == ("df8ad0efa3ad2e08", "5bfda8c00d848f57")
    parameters = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}
    assert fingerprint(parameters) == "5190b9ebfe9e176d"


def test_padding_is_no_content():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    alone = content_ids({"input_ids": TOKENS[:1, :2]})
    padded = content_ids({"input_ids": TOKENS, "attention_mask": mask}, mask=mask)
    left = content_ids({"input_ids": TOKENS[:1].roll(2, 1)}, mask=mask[:1].roll(2, 1))
    assert alone[0] == padded[0] == left[0] != padded[1]


@law(25, order=st.permutations(range(4)), cut=st.integers(0, 4))
def test_an_example_has_one_id_in_any_batch_and_order(order, cut):
    x, y = torch.arange(12).reshape(4, 3) % 5, torch.arange(4.0)
    whole = content_ids({"x": x, "y": y})
    shuffled = torch.tensor(order)
    parts = [content_ids({"y": y[s], "x": x[s]}) for s in (shuffled[:cut], shuffled[cut:])]
    assert [*parts[0], *parts[1]] == [whole[k] for k in order]


def test_every_declared_input_counts():
    x = torch.tensor([[1, 2]])
    variants = [
        {"x": x},
        {"z": x},
        {"x": x, "label": torch.tensor([0])},
        {"x": x, "label": torch.tensor([1])},
        {"x": x.int()},
        {"x": x.flip(1)},
        {"x": torch.tensor([[1, 2, 0]])},
    ]
    ids = [content_ids(v)[0] for v in variants]
    assert len(set(ids)) == len(ids)
    assert content_ids({"x": x, "attention_mask": x}) == content_ids({"x": x})
    assert content_ids({"x": x, "note": x}, ignore=["note"]) == content_ids({"x": x})
    assert content_ids({"x": x, "step": torch.tensor(3)}) == content_ids({"x": x})


def test_equal_rows_have_equal_ids():
    a, b, c = content_ids({"x": torch.tensor([[1, 2], [3, 4], [1, 2]])})
    assert a == c != b
    assert all(len(i) == 16 and int(i, 16) >= 0 for i in (a, b))
    assert content_ids({"x": torch.zeros(0, 3)}) == () == content_ids({})


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool]
)
def test_a_changed_or_moved_element_changes_the_fingerprint(dtype):
    w = (normal(generator(0), 3, 5) * 10).to(dtype)
    w[0, 0], w[2, 4] = 0, 1
    same = fingerprint({"w": w})
    assert same == fingerprint({"w": w.clone()}) == fingerprint({"w": w.T.contiguous().T})
    swapped, changed = w.clone(), w.clone()
    swapped[0, 0], swapped[2, 4] = w[2, 4], w[0, 0]
    changed[0, 0] = 1
    others = [swapped, changed, w.reshape(5, 3), w.flatten()[:-1]]
    assert len({same, *(fingerprint({"w": x}) for x in others), fingerprint({"v": w})}) == 6


def test_fingerprints_see_the_smallest_change():
    w = torch.ones(1000)
    moved = w.clone()
    moved[500] = torch.nextafter(w[500], torch.tensor(2.0))
    assert fingerprint({"w": w}) != fingerprint({"w": moved})
    assert fingerprint({"w": torch.tensor([0.0])}) != fingerprint({"w": torch.tensor([-0.0])})


def test_fingerprints_do_not_depend_on_the_order_of_names():
    a, b = torch.ones(2), torch.zeros(3)
    assert fingerprint({"a": a, "b": b}) == fingerprint({"b": b, "a": a}) != fingerprint({"a": b, "b": a})


@pytest.mark.parametrize("chunk", [1, 7, 10**6])
def test_fingerprints_do_not_depend_on_the_chunk(chunk, monkeypatch):
    w = {"w": normal(generator(1), 150, 150)}
    whole = fingerprint(w)
    monkeypatch.setattr(module, "_CACHED", chunk)
    assert fingerprint(w) == whole


@pytest.mark.slow
def test_names_do_not_depend_on_the_process():
    """Python salts `hash` anew in every process."""
    code = (
        "import torch; from attrax.core import content_ids, fingerprint; x = torch.arange(6.0).reshape(2, 3);"
        "print(content_ids({'x': x}), fingerprint({'x': x}))"
    )
    root = Path(__file__).parents[2]
    run = [
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
        for _ in range(2)
    ]
    x = torch.arange(6.0).reshape(2, 3)
    assert {r.stdout.strip() for r in run} == {f"{content_ids({'x': x})} {fingerprint({'x': x})}"}
