"""Scores as tables and files: what is in them, and that nothing is lost on the way back."""

import csv
import json

import h5py
import numpy as np
import pandas as pd
import pyarrow.parquet as parquet
import pytest
import torch

from attrax.core import Scores
from attrax.frontends.data.tablefiles import descending_ranks
from attrax.frontends.data.tables import join, read_joined, read_scores, to_pandas, write_scores

SUFFIXES = [".parquet", ".csv", ".h5", ".hdf5"]
ABOUT = {
    "method": "ekfac",
    "target": "sum",
    "unit": "loss x examples",
    "sign": "higher = more helpful",
    "ü": 'a: "b"\nc',
}
TRAIN = [
    {"id": "c", "text": "unused", "n": 0},
    {"id": "a", "text": 'comma, "quote"\nline\rend # hash', "n": 1},
    {"id": "b", "text": "=x ünï", "n": 2},
]
QUERIES = [{"id": "q1", "prompt": "why"}, {"id": "q2", "prompt": "how"}]


def made(dtype=torch.float32, steps=(3, 3, 4), micros=(0, 1, 0)):
    values = torch.tensor([[0.1, -1e-30], [2 / 3, float("inf")], [0.1, 7.0]], dtype=torch.float64).to(dtype)
    return Scores(values, ("a", "b", "a"), ("q1", "q2"), steps, micros, ABOUT)


def same(x, y):
    assert x.values.dtype == y.values.dtype and torch.equal(x.values, y.values)
    assert (x.ids, x.query_ids, x.steps, x.micros) == (y.ids, y.query_ids, y.steps, y.micros)
    assert dict(x.about) == dict(y.about)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("layout", ["long", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip(tmp_path, suffix, layout, dtype):
    scores = made(dtype)
    path = write_scores(scores, tmp_path / f"s{suffix}", columns=TRAIN, layout=layout)
    same(read_scores(path), scores)
    assert list(read_joined(path).train["text"]) == [TRAIN[1]["text"], TRAIN[2]["text"], TRAIN[1]["text"]]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "keys", [{"steps": (), "micros": ()}, {"micros": (0, 0, 0)}, {"steps": (), "micros": (1, 2, 3)}]
)
def test_row_keys_come_back_as_they_were(tmp_path, suffix, keys):
    scores = made(**keys)
    same(read_scores(write_scores(scores, tmp_path / f"s{suffix}")), scores)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_columns_of_queries_come_back(tmp_path, suffix):
    path = write_scores(made(), tmp_path / f"s{suffix}", columns=TRAIN, queries=QUERIES)
    assert read_joined(path).query == {"prompt": ["why", "how"]}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_more_rows_than_a_chunk(tmp_path, suffix, rng, monkeypatch):
    monkeypatch.setattr("attrax.frontends.data.tablefiles._CELLS", 10)
    ids = tuple(f"e{i}" for i in range(23))
    scores = Scores(torch.randn(23, 3, generator=rng), ids, ("x", "y", "z"), about=ABOUT)
    same(read_scores(write_scores(scores, tmp_path / f"s{suffix}")), scores)


def test_long_table():
    frame = to_pandas(made(), TRAIN, QUERIES)
    assert list(frame.columns) == [
        *("example", "step", "micro", "query", "score", "rank", "train.text", "train.n", "query.prompt")
    ]
    assert len(frame) == 6 and frame.attrs["sign"] == ABOUT["sign"]
    first = frame[frame["query"] == "q1"]
    assert first["rank"].tolist() == [2.5, 1.0, 2.5] and first["train.n"].tolist() == [1, 2, 1]
    assert frame.loc[frame["score"].idxmax(), ["example", "query"]].tolist() == ["b", "q2"]


def test_wide_table_takes_a_dataframe():
    frame = to_pandas(made(micros=()), pd.DataFrame(TRAIN), layout="wide")
    assert list(frame.columns) == ["example", "step", "score:q1", "score:q2", "train.text", "train.n"]
    indexed = pd.DataFrame(TRAIN).set_index("id")
    assert to_pandas(made(micros=()), indexed, layout="wide").equals(frame)


def test_plain_readers_see_what_the_numbers_are(tmp_path):
    scores = made()
    path = write_scores(scores, tmp_path / "s.csv", columns=TRAIN)
    head = path.read_text(encoding="utf-8").split("\n")
    count = int(head[0].split()[1])
    assert f"# about.sign: {json.dumps(ABOUT['sign'])}" in head[:count] and not head[count].startswith("#")
    assert pd.read_csv(path, skiprows=count)["score"].tolist() == pytest.approx(
        scores.values.flatten().tolist()
    )
    path = write_scores(scores, tmp_path / "s.parquet", columns=TRAIN)
    assert parquet.read_schema(path).metadata[b"attrax.about.unit"] == b"loss x examples"
    assert pd.read_parquet(path).equals(to_pandas(scores, TRAIN))
    with h5py.File(write_scores(scores, tmp_path / "s.h5")) as file:
        assert file.attrs["about.method"] == "ekfac" and np.asarray(file["scores"]).shape == (3, 2)


def test_columns_without_a_common_type(tmp_path):
    rows = [{"id": "a", "x": 1, "tags": ["u"]}, {"id": "b", "x": "two", "tags": None}]
    scores = Scores(torch.ones(2, 1), ("a", "b"), ("q",))
    for suffix in SUFFIXES:
        read = read_joined(write_scores(scores, tmp_path / f"s{suffix}", columns=rows))
        assert len(read.train["x"]) == 2 and len(read.train["tags"]) == 2


def test_ranks_of_ties_and_nan():
    values = torch.tensor([[1.0], [float("nan")], [3.0], [1.0], [float("-inf")]])
    assert descending_ranks(values).flatten().tolist() == [2.5, 5.0, 1.0, 2.5, 4.0]


def test_data_that_does_not_fit():
    with pytest.raises(
        ValueError, match=r"columns: 1 of the examples that are scored have no row, e.g. \['b'\]"
    ):
        join(made(), TRAIN[:2])
    with pytest.raises(ValueError, match="queries: 2 of the queries"):
        join(made(), None, TRAIN)
    with pytest.raises(TypeError, match="expected records or a DataFrame with a column 'id'"):
        join(made(), [{"text": "x"}])


def test_wide_tables_that_cannot_be():
    with pytest.raises(ValueError, match="layout='long'"):
        to_pandas(made(), None, QUERIES, layout="wide")
    twice = Scores(torch.ones(1, 2), ("a",), ("q", "q"))
    with pytest.raises(ValueError, match="distinct query ids"):
        to_pandas(twice, layout="wide")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_twice_the_same_query_id_in_a_long_table(tmp_path, suffix):
    twice = Scores(torch.tensor([[1.0, 2.0]]), ("a",), ("q", "q"))
    same(read_scores(write_scores(twice, tmp_path / f"s{suffix}")), twice)


def test_existing_files_are_kept(tmp_path):
    path = write_scores(made(), tmp_path / "s.csv")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_scores(made(), path)
    write_scores(made(torch.float64), path, overwrite=True)
    assert read_scores(path).values.dtype == torch.float64


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failed_write_leaves_nothing(tmp_path, suffix):
    with pytest.raises(ValueError):
        write_scores(made(), tmp_path / f"s{suffix}", columns=TRAIN[:1])
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"unknown format '.txt'; expected one of \['.parquet'"):
        write_scores(made(), tmp_path / "s.txt")
    (tmp_path / "s.txt").touch()
    with pytest.raises(ValueError, match="unknown format"):
        read_scores(tmp_path / "s.txt")
    with pytest.raises(FileNotFoundError):
        read_scores(tmp_path / "s.csv")
    for suffix in SUFFIXES:
        (tmp_path / f"s{suffix}").write_text("# nonsense")
        with pytest.raises(ValueError, match="read_scores"):
            read_scores(tmp_path / f"s{suffix}")
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "s.parquet")
    with pytest.raises(ValueError, match="expected a file written by write_scores"):
        read_scores(tmp_path / "s.parquet")


def test_a_changed_table_is_refused(tmp_path):
    path = write_scores(made(), tmp_path / "s.csv")
    rows = path.read_text().split("\n")
    head = int(rows[0].split()[1]) + 1
    for change in (rows[:head] + rows[head:][::-1][1:], rows[:-2], rows[: head - 1] + ["x,y"] + rows[head:]):
        path.write_text("\n".join(change))
        with pytest.raises(ValueError, match="changed since it was written|expected a file"):
            read_scores(path)


def test_numbers_are_spelled_shortly(tmp_path):
    path = write_scores(made(), tmp_path / "s.csv")
    rows = list(csv.reader(path.read_text().split("\n")[int(path.read_text().split()[1]) :]))
    assert rows[1][4] == "0.1"
