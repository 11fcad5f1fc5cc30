"""Scores as tables a person can use: pandas, parquet, CSV and HDF5, joined with the data's own columns.

    long   example  step  query  score  rank  train.<column> …  query.<column> …      one row per example and query
    wide   example  step  score:<query> …  train.<column> …                           one row per example

Rank 1 is the most helpful example of a query; tied scores share their average rank.  Every file says what its numbers
are (sign, unit, method, target and all other entries of `Scores.about`): in the schema metadata of a parquet file, in
the attributes of an HDF5 file, and in comment lines at the head of a CSV file, the first of which says how many they
are.  `read_scores` gives back the scores that were written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attrax.core import Scores
from attrax.frontends.data.records import needed
from attrax.frontends.data.tablefiles import READERS, WRITERS, Joined, Layout, chunks, layout_columns


def join(scores: Scores, columns: Any = None, queries: Any = None) -> Joined:
    """Scores beside the columns of their examples and queries, joined by id.

    Args:
        scores: Scores.
        columns: Train data: records or a DataFrame with a column "id"; it may hold more examples than are scored.
        queries: Query data, likewise.

    Returns:
        Both together.

    Raises:
        ValueError: If a scored example or query has no row.
        TypeError: If `columns` or `queries` is something else.

    >>> import torch
    >>> s = Scores(torch.tensor([[1.0], [2.0]]), ("a", "b"), ("q",))
    >>> join(s, [{"id": "b", "topic": "rivers"}, {"id": "a", "topic": "towns"}]).train
    {'topic': ['towns', 'rivers']}
    """
    return Joined(
        scores,
        _aligned(columns, scores.ids, "columns", "examples"),
        _aligned(queries, scores.query_ids, "queries", "queries"),
    )


def _aligned(data: Any, ids: Sequence[str], argument: str, what: str) -> dict[str, list[Any]]:
    if data is None:
        return {}
    rows = data.reset_index(drop="id" in data.columns) if hasattr(data, "to_dict") else data
    rows = rows.to_dict("records") if hasattr(rows, "to_dict") else rows
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) and "id" in row for row in rows):
        raise TypeError(
            f"join: {argument}: got {type(data).__name__}; expected records or a DataFrame with a column 'id'."
        )
    place = {str(row["id"]): row for row in rows}
    missing = [name for name in dict.fromkeys(ids) if name not in place]
    if missing:
        raise ValueError(
            f"join: {argument}: {len(missing)} of the {what} that are scored have no row, e.g. {missing[:5]}. Pass the "
            "data that was scored."
        )
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name != "id"]
    return {name: [place[i].get(name) for i in ids] for name in names}


def to_pandas(scores: Scores, columns: Any = None, queries: Any = None, *, layout: Layout = "long") -> Any:
    """Scores as a pandas DataFrame, joined with the data's own columns.

    Args:
        scores: Scores.
        columns: Train data, records or a DataFrame with a column "id"; its columns appear as ``train.<column>``.
        queries: Query data likewise, as ``query.<column>`` (long layout only).
        layout: "long" or "wide"; see the module docstring.

    Returns:
        A DataFrame; ``frame.attrs`` holds the entries of `Scores.about`.

    Raises:
        ImportError: If pandas is not installed.
        ValueError: If an example or query has no row in the data, or the layout cannot hold the table.

    >>> import torch
    >>> s = Scores(torch.tensor([[1.0], [2.0]]), ("a", "b"), ("q",))
    >>> to_pandas(s, layout="wide")
      example  step  score:q
    0       a     0      1.0
    1       b     0      2.0
    """
    pandas = needed("pandas", "report", "to_pandas")
    table = layout_columns(join(scores, columns, queries), layout)
    whole = list(chunks(scores, layout))
    frame = {}
    for column in table:
        index = np.concatenate([chunk[column.along] for chunk in whole]) if whole else np.zeros(0, np.int64)
        frame[column.name] = (
            column.values[index]
            if isinstance(column.values, np.ndarray)
            else [column.values[i] for i in index]
        )
    made = pandas.DataFrame(frame)
    made.attrs = dict(scores.about)
    return made


def write_scores(
    scores: Scores,
    path: str | Path,
    *,
    columns: Any = None,
    queries: Any = None,
    layout: Layout = "long",
    overwrite: bool = False,
) -> Path:
    """Write scores to a file that says what they are; the suffix decides the format.

    Args:
        scores: Scores.
        path: A .parquet, .csv, .h5 or .hdf5 file.
        columns: Train data to join: records or a DataFrame with a column "id".
        queries: Query data to join, likewise.
        layout: "long" or "wide" table; an HDF5 file always holds the matrix.
        overwrite: Replace an existing file.

    Returns:
        The path.

    Raises:
        FileExistsError: If the file exists and `overwrite` is not set.
        ImportError: If the format needs a package that is not installed.
        ValueError: If the suffix is unknown, or data and scores do not match.
    """
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        raise ValueError(
            f"write_scores: {path}: unknown format '{path.suffix}'; expected one of {list(WRITERS)}."
        )
    if path.exists() and not overwrite:
        raise FileExistsError(f"write_scores: {path} exists. Choose another path, or pass overwrite=True.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    try:
        WRITERS[path.suffix.lower()](join(scores, columns, queries), layout, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_scores(path: str | Path) -> Scores:
    """Read the scores that `write_scores` wrote: values, ids, steps and description, as they were.

    Args:
        path: The file.

    Returns:
        The scores.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it was not written by `write_scores`, or its rows were changed since.
    """
    return read_joined(path).scores


def read_joined(path: str | Path) -> Joined:
    """Read scores and the columns that were joined to them; errors as `read_scores`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"read_scores: {path}: there is no such file.")
    if path.suffix.lower() not in READERS:
        raise ValueError(
            f"read_scores: {path}: unknown format '{path.suffix}'; expected one of {list(READERS)}."
        )
    return READERS[path.suffix.lower()](path)
