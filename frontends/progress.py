"""Progress bars on long work: throughput and time left, silent where nobody watches."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tracked(data: Iterable[Mapping[str, Any]], label: str | None) -> Iterator[Mapping[str, Any]]:
    """Iterate over batches, with a bar of examples, tokens per second and time left.

    Args:
        data: Batches; a sized iterable shows the time left.
        label: What is being done; None shows nothing.

    Returns:
        The batches.
    """
    if label is None:
        yield from data
        return
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield from _plain(data, label)
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.completed:g}/{task.total} batches  {task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    total = len(data) if hasattr(data, "__len__") else None  # type: ignore[arg-type]
    with Progress(*columns, transient=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=total, rate="")
        tokens = 0
        for batch in data:
            yield batch
            tokens += _tokens(batch)
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=1, rate=f"{tokens / max(elapsed, 1e-9):,.0f} tokens/s")


def _tokens(batch: Mapping[str, Any]) -> int:
    for key in ("attention_mask", "input_ids"):
        if isinstance(batch.get(key), Tensor):
            return int(batch[key].sum() if key == "attention_mask" else batch[key].numel())
    return next((v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.ndim), 0)


def _plain(data: Iterable[Mapping[str, Any]], label: str) -> Iterator[Mapping[str, Any]]:
    for count, batch in enumerate(data, 1):
        yield batch
        if count % 50 == 0:
            sys.stderr.write(f"{label}: {count} batches\n")
