"""Rows of a data file as mappings, from JSON, CSV, parquet or a saved Hugging Face dataset.

Nothing is converted: a CSV cell stays the string it is, and an unreadable file is an error that names the place.
"""

import csv
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_CELL = 2**31 - 1


def needed(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: Module name.
        extra: The extra of attrax that installs it.
        purpose: What it is needed for.

    Returns:
        The module.

    Raises:
        ImportError: If it is not installed; the message names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs the package '{module.split('.')[0]}', which cannot be imported ({error}). Install it: "
            f"pip install 'attrax[{extra}]'"
        ) from error


def read_rows(path: Path, split: str | None = None) -> list[dict[str, Any]]:
    """Rows of a data file or saved dataset; see `attrax.read_examples` for formats and errors."""
    if not path.exists():
        raise FileNotFoundError(f"read_examples: {path}: there is no such file or folder.")
    if path.is_dir():
        return _saved_dataset(path, split)
    if split is not None:
        raise ValueError(f"read_examples: {path}: split='{split}' is for a folder of splits; this is a file.")
    if path.suffix.lower() not in _READERS:
        raise ValueError(
            f"read_examples: {path}: unknown format '{path.suffix}'; expected one of {list(_READERS)}, or a folder "
            "written by datasets' save_to_disk."
        )
    try:
        return _READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"read_examples: {path}: byte {error.start} is not UTF-8. Convert the file to UTF-8."
        ) from error
    except OSError as error:
        raise ValueError(f"read_examples: {path}: cannot be read: {error}.") from error


def _object(value: Any, path: Path, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"read_examples: {path}: {place} is {type(value).__name__}; expected an object {{…}}."
        )
    return value


def _parse(text: str, path: Path, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"read_examples: {path}: {place} is not JSON: {error.msg} at column {error.colno}."
        ) from error


def _json_lines(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_object(_parse(line, path, f"line {number}"), path, f"line {number}"))
    return rows


def _json_array(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        return _json_lines(path)
    return [_object(row, path, f"element {i}") for i, row in enumerate(_parse(text, path, "the file"), 1)]


def _delimited(delimiter: str) -> Callable[[Path], list[dict[str, Any]]]:
    def read(path: Path) -> list[dict[str, Any]]:
        limit = csv.field_size_limit(_CELL)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                return _table(csv.reader(file, delimiter=delimiter, strict=True), path)
        except csv.Error as error:
            raise ValueError(f"read_examples: {path}: not a valid table: {error}.") from error
        finally:
            csv.field_size_limit(limit)

    return read


def _table(reader: Any, path: Path) -> list[dict[str, Any]]:
    header = next(reader, [])
    if len(set(header)) < len(header):
        raise ValueError(f"read_examples: {path}: the header repeats a column name: {header}.")
    rows: list[dict[str, Any]] = []
    for cells in reader:
        if cells and len(cells) != len(header):
            raise ValueError(
                f"read_examples: {path}: line {reader.line_num} has {len(cells)} cells, the header has {len(header)}. "
                'Quote cells that contain the delimiter ("…").'
            )
        if cells:
            rows.append(dict(zip(header, cells, strict=True)))
    return rows


def _parquet(path: Path) -> list[dict[str, Any]]:
    parquet = needed("pyarrow.parquet", "report", f"reading {path}")
    try:
        return parquet.read_table(path).to_pylist()
    except ValueError as error:
        raise ValueError(f"read_examples: {path}: not a parquet file: {error}.") from error


def _saved_dataset(path: Path, split: str | None) -> list[dict[str, Any]]:
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"read_examples: {path}: a folder without 'state.json' or 'dataset_dict.json'. Give a file, or a folder "
            "written by datasets' save_to_disk."
        )
    data = needed("datasets", "hf", f"reading {path}").load_from_disk(str(path))
    if isinstance(data, Mapping):
        choice = split or (next(iter(data)) if len(data) == 1 else None)
        if choice not in data:
            raise ValueError(
                f"read_examples: {path}: split={split!r}; the folder holds the splits {sorted(data)}. Choose one."
            )
        data = data[choice]
    elif split is not None:
        raise ValueError(
            f"read_examples: {path}: split='{split}', but the folder holds one data set without splits."
        )
    return data.to_list()


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_array,
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    ".parquet": _parquet,
}
