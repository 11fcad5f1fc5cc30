"""Files of `attrax.frontends.data.tables`: CSV with comment lines, parquet with schema metadata, HDF5 with attributes.

All three carry the same entries: the schema version, the layout, the dtype, the query ids in order, which row keys were
known, and the scores' description as ``about.<key>``.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import h5py
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attrax.core import Scores
from attrax.frontends.data.records import needed

Layout: TypeAlias = Literal["long", "wide"]
Along: TypeAlias = Literal["row", "query", "cell"]

SCHEMA = "attrax scores 1"
_LISTS = ("queries", "keys")
_CELLS = 2**18
_LONGEST = 2**31 - 1


@dataclass(frozen=True, eq=False, slots=True)
class Joined:
    """Scores with columns of the data beside them; made by `join` and `read_joined`.

    Attributes:
        scores: The scores.
        train: Columns of the train data, one value a row of `scores`.
        query: Columns of the query data, one value a query.
    """

    scores: Scores
    train: Mapping[str, Sequence[Any]]
    query: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, eq=False, slots=True)
class Column:
    """A column of the table: its name, its distinct values, and what they run along."""

    name: str
    values: Any
    along: Along


def descending_ranks(values: Float[Tensor, "N Q"]) -> Float[Tensor, "N Q"]:
    """Rank of every row in its column, 1 for the largest; ties share their average rank, NaN comes last.

    >>> descending_ranks(torch.tensor([[1.0], [3.0], [3.0]])).flatten()
    tensor([3.0000, 1.5000, 1.5000], dtype=torch.float64)
    """
    ranks = torch.empty(values.shape, dtype=torch.float64)
    for q, column in enumerate(-values.detach().cpu().double().T):
        _, inverse, count = torch.unique(column, return_inverse=True, return_counts=True)
        last = count.cumsum(0).double()
        ranks[:, q] = (last - (count.double() - 1) / 2)[inverse]
    return ranks


def layout_columns(joined: Joined, layout: Layout) -> list[Column]:
    """The table's columns, in order.

    Raises:
        ValueError: If the wide layout cannot hold the table.
    """
    scores = joined.scores
    values = numbers(scores.values)
    keys = [Column("example", scores.ids, "row"), Column("step", _integers(scores.steps, len(scores)), "row")]
    if scores.micros and any(scores.micros):
        keys.append(Column("micro", _integers(scores.micros, len(scores)), "row"))
    train = [Column(f"train.{name}", column, "row") for name, column in joined.train.items()]
    if layout == "long":
        ranks = descending_ranks(scores.values).numpy()
        cells = [Column("score", values.reshape(-1), "cell"), Column("rank", ranks.reshape(-1), "cell")]
        query = [Column(f"query.{name}", column, "query") for name, column in joined.query.items()]
        return [*keys, Column("query", scores.query_ids, "query"), *cells, *train, *query]
    if len(set(scores.query_ids)) < len(scores.query_ids) or joined.query:
        raise ValueError(
            "write_scores: layout='wide' has one column a query: it needs distinct query ids and has no place for the "
            "queries' own columns. Use layout='long'."
        )
    return [
        *keys,
        *(Column(f"score:{name}", values[:, q], "row") for q, name in enumerate(scores.query_ids)),
        *train,
    ]


def numbers(values: Tensor) -> np.ndarray:
    """Values as numpy, half precision widened to float32."""
    wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    return wide.detach().cpu().numpy()


def _integers(values: Sequence[int], count: int) -> np.ndarray:
    return np.asarray(values or [0] * count, dtype=np.int64)


def chunks(scores: Scores, layout: Layout) -> Iterator[dict[Along, np.ndarray]]:
    """Which values of each kind of column make up the next rows of the table, a bounded number at a time."""
    count, width = len(scores), len(scores.query_ids) if layout == "long" else 1
    step = max(1, _CELLS // max(1, width))
    for start in range(0, count, step):
        rows = np.repeat(np.arange(start, min(start + step, count)), width)
        columns = np.tile(np.arange(width), len(rows) // max(1, width))
        yield {"row": rows, "query": columns, "cell": rows * width + columns}


def _entries(scores: Scores, layout: str) -> dict[str, str]:
    keys = [name for name in ("steps", "micros") if getattr(scores, name)]
    return {
        "schema": SCHEMA,
        "layout": layout,
        "dtype": str(scores.values.dtype).removeprefix("torch."),
        "queries": json.dumps(scores.query_ids, ensure_ascii=False),
        "keys": json.dumps(keys),
        **{f"about.{key}": value for key, value in scores.about.items()},
    }


def _checked(entries: Mapping[str, str], path: Path) -> Mapping[str, str]:
    if entries.get("schema") != SCHEMA:
        raise ValueError(
            f"read_scores: {path}: expected a file written by write_scores ('{SCHEMA}'); it says "
            f"{entries.get('schema')!r}."
        )
    return entries


def _rebuilt(entries: Mapping[str, str], table: Mapping[str, Any], path: Path) -> Joined:
    """Scores and joined columns from the columns of a table, checked against what was written."""
    queries: tuple[str, ...] = tuple(json.loads(entries["queries"]))
    long = entries["layout"] == "long"
    width = len(queries) if long else 1
    try:
        names = ["score"] if long else [f"score:{query}" for query in queries]
        values = np.stack([np.asarray(table[name], dtype=np.float64) for name in names], -1)
        values = values.reshape(-1, len(queries))
        ids = tuple(table["example"][::width])
        if long and not _in_turn(table, ids, queries):
            raise ValueError("its rows are not those of every example and query in turn")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"read_scores: {path}: the table was changed since it was written ({error}). Read it as a plain table."
        ) from error
    keys = json.loads(entries["keys"])
    steps = _row_key(table, "step", width) if "steps" in keys else ()
    micros = _row_key(table, "micro", width) if "micros" in keys else ()
    scores = Scores(
        torch.from_numpy(values).to(_dtype(entries)), ids, queries, steps, micros, _about(entries)
    )
    train = {n.removeprefix("train."): list(c[::width]) for n, c in table.items() if n.startswith("train.")}
    query = {n.removeprefix("query."): list(c[:width]) for n, c in table.items() if n.startswith("query.")}
    return Joined(scores, train, query)


def _in_turn(table: Mapping[str, Any], ids: Sequence[str], queries: Sequence[str]) -> bool:
    examples = [i for i in ids for _ in queries]
    return list(table["example"]) == examples and list(table["query"]) == list(queries) * len(ids)


def _row_key(table: Mapping[str, Any], name: str, width: int) -> tuple[int, ...]:
    """One integer a row; `micro` is written only where it is not 0 throughout."""
    return (
        tuple(int(x) for x in table[name][::width]) if name in table else (0,) * len(table["step"][::width])
    )


def _about(entries: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix("about."): value for key, value in entries.items() if key.startswith("about.")}


def _dtype(entries: Mapping[str, str]) -> torch.dtype:
    return getattr(torch, entries["dtype"])


def _write_csv(joined: Joined, layout: Layout, path: Path) -> None:
    entries = _entries(joined.scores, layout)
    size = len(entries) + 1
    columns = layout_columns(joined, layout)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {size} comment lines, then the table: pandas.read_csv(path, skiprows={size})\n")
        for key, value in entries.items():
            file.write(f"# {key}: {value if key in _LISTS else json.dumps(value, ensure_ascii=False)}\n")
        writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow([column.name for column in columns])
        for index in chunks(joined.scores, layout):
            cells = [[_cell(column.values[i]) for i in index[column.along]] for column in columns]
            writer.writerows(zip(*cells, strict=True))


def _cell(value: Any) -> str | int | float:
    """Numbers in their shortest exact spelling, everything else as (quoted) text."""
    if isinstance(value, np.generic):
        return float(str(value)) if isinstance(value, np.floating) else int(value)
    if value is None or isinstance(value, str | int | float):
        return "" if value is None else value
    return json.dumps(value, ensure_ascii=False, default=str)


def _read_csv(path: Path) -> Joined:
    limit = csv.field_size_limit(_LONGEST)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            count = int(first.split()[1]) - 1 if first.startswith("# ") and first.split()[1].isdigit() else 0
            lines = [file.readline()[2:].rstrip("\n").partition(": ") for _ in range(count)]
            entries = {key: value if key in _LISTS else json.loads(value) for key, _, value in lines}
            header, *rows = csv.reader(file)
            columns = list(zip(*rows, strict=True)) if rows else [()] * len(header)
            table = dict(zip(header, columns, strict=True))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"read_scores: {path}: expected a file written by write_scores: {error}.") from error
    finally:
        csv.field_size_limit(limit)
    return _rebuilt(_checked(entries, path), table, path)


def _write_parquet(joined: Joined, layout: Layout, path: Path) -> None:
    arrow = needed("pyarrow", "report", f"writing {path.suffix} files")
    parquet = needed("pyarrow.parquet", "report", f"writing {path.suffix} files")
    columns = [(c, _array(arrow, c.values)) for c in layout_columns(joined, layout)]
    notes = {f"attrax.{key}": value for key, value in _entries(joined.scores, layout).items()}
    schema = arrow.schema([(c.name, values.type) for c, values in columns], metadata=notes)
    with parquet.ParquetWriter(path, schema) as writer:
        for index in chunks(joined.scores, layout):
            taken = [values.take(arrow.array(index[c.along])) for c, values in columns]
            writer.write_table(arrow.Table.from_arrays(taken, schema=schema))


def _array(arrow: Any, values: Any) -> Any:
    """Values as an arrow array of their own type; what has no common type becomes JSON text."""
    try:
        return arrow.array(values)
    except (ValueError, TypeError):
        return arrow.array([v if isinstance(v, str) else json.dumps(v, default=str) for v in values])


def _read_parquet(path: Path) -> Joined:
    parquet = needed("pyarrow.parquet", "report", f"reading {path}")
    try:
        table = parquet.read_table(path)
    except ValueError as error:
        raise ValueError(f"read_scores: {path}: not a parquet file: {error}.") from error
    notes = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    entries = {k.removeprefix("attrax."): v for k, v in notes.items() if k.startswith("attrax.")}
    own = [n for n in table.column_names if not n.startswith(("train.", "query."))]
    columns = {n: table[n].to_numpy() if n in own else table[n].to_pylist() for n in table.column_names}
    return _rebuilt(_checked(entries, path), columns, path)


def _write_h5(joined: Joined, layout: Layout, path: Path) -> None:
    scores = joined.scores
    with h5py.File(path, "w") as file:
        for key, value in _entries(scores, "matrix").items():
            if key != "queries":
                file.attrs[key] = value
        file.create_dataset("scores", data=numbers(scores.values), fletcher32=scores.values.numel() > 0)
        _write_strings(file, "examples", scores.ids)
        _write_strings(file, "queries", scores.query_ids)
        for name in ("steps", "micros"):
            if getattr(scores, name):
                file.create_dataset(name, data=np.asarray(getattr(scores, name), dtype=np.int64))
        for side in ("train", "query"):
            for name, values in getattr(joined, side).items():
                texts = [json.dumps(v, default=str) for v in values]
                _write_strings(file.require_group(side), name.replace("/", "_"), texts)


def _write_strings(group: Any, name: str, values: Sequence[str]) -> None:
    group.create_dataset(
        name, data=np.asarray(values, dtype=object), dtype=h5py.string_dtype(), shape=(len(values),)
    )


def _read_h5(path: Path) -> Joined:
    try:
        with h5py.File(path, "r") as file:
            entries = _checked({k: str(v) for k, v in file.attrs.items()}, path)
            keys = {n: tuple(file[n][:].tolist()) if n in file else () for n in ("steps", "micros")}  # type: ignore[index]
            values = torch.from_numpy(file["scores"][:]).to(_dtype(entries))  # type: ignore[index]
            ids, queries = _strings(file["examples"]), _strings(file["queries"])
            train, query = _texts(file, "train"), _texts(file, "query")
    except (OSError, KeyError) as error:
        raise ValueError(f"read_scores: {path}: expected a file written by write_scores: {error}.") from error
    return Joined(Scores(values, ids, queries, keys["steps"], keys["micros"], _about(entries)), train, query)


def _texts(file: Any, side: str) -> dict[str, list[Any]]:
    return {n: [json.loads(v) for v in _strings(column)] for n, column in file.get(side, {}).items()}


def _strings(dataset: Any) -> tuple[str, ...]:
    return tuple(dataset.asstr()[:].tolist())


WRITERS: dict[str, Callable[[Joined, Layout, Path], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".h5": _write_h5,
    ".hdf5": _write_h5,
}
READERS: dict[str, Callable[[Path], Joined]] = {
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".h5": _read_h5,
    ".hdf5": _read_h5,
}
