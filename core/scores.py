"""Scores: the result of every attribution method.

Rows are train examples at a step, keyed (id, step, micro); columns are queries.  A score is higher for a more helpful
example: the first-order *decrease of the query's loss* when the example is up-weighted, so positive means proponent.
Duplicates stay distinct rows until `per_example` folds them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attrax.core.tree import Examples

SIGN = "higher = more helpful: first-order decrease of the query's loss when the example is up-weighted"


@dataclass(frozen=True, eq=False, slots=True)
class Scores:
    """Attribution scores [N, Q] with their row and column keys.

    Attributes:
        values: Scores, train rows by query columns.
        ids: Example id of each row.
        query_ids: Id of each column.
        steps: Optimizer step of each row (0 for a fixed model).
        micros: Block within the step of each row.
        about: What the numbers are: method, target, unit, sign, parameters scored.  Strings only.
    """

    values: Float[Tensor, "N Q"]
    ids: tuple[str, ...]
    query_ids: tuple[str, ...]
    steps: tuple[int, ...] = ()
    micros: tuple[int, ...] = ()
    about: Mapping[str, str] = field(default_factory=lambda: {"sign": SIGN})

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Scores({len(self.ids)} rows x {len(self.query_ids)} queries, {self.about.get('method', 'unnamed')})"

    def per_example(self) -> tuple["Scores", Int[Tensor, " N"]]:
        """Sum the rows of each example over steps.

        Returns:
            Scores with one row an example, in order of first appearance, and how many rows each one folded.

        >>> s = Scores(torch.ones(3, 1), ("a", "b", "a"), ("q",))
        >>> folded, count = s.per_example()
        >>> folded.ids, folded.values.flatten(), count
        (('a', 'b'), tensor([2., 1.]), tensor([2, 1]))
        """
        order = {i: k for k, i in enumerate(dict.fromkeys(self.ids))}
        index = torch.tensor([order[i] for i in self.ids], dtype=torch.int64, device=self.values.device)
        total = self.values.new_zeros(len(order), self.values.shape[1]).index_add(0, index, self.values)
        count = torch.zeros(len(order), dtype=torch.int64, device=index.device).index_add(
            0, index, torch.ones_like(index)
        )
        return replace(self, values=total, ids=tuple(order), steps=(), micros=()), count

    def top(self, k: int, query: str | int = 0, *, lowest: bool = False) -> list[tuple[str, float]]:
        """The `k` most (or least) helpful rows for one query, ties in row order.

        Args:
            k: How many; at most the number of rows are returned.
            query: Column id or position.
            lowest: Return the most harmful rows instead.

        Returns:
            (example id, score) pairs.

        Raises:
            ValueError: If k is not positive.
            KeyError: If the query is unknown.

        >>> Scores(torch.tensor([[1.0], [3.0], [2.0]]), ("a", "b", "c"), ("q",)).top(2)
        [('b', 3.0), ('c', 2.0)]
        """
        if k < 1:
            raise ValueError(f"top: k must be at least 1, got {k}.")
        column = self.values[:, self._column(query)]
        order = torch.argsort(column, descending=not lowest, stable=True)[:k].tolist()
        return [(self.ids[i], float(column[i])) for i in order]

    def _column(self, query: str | int) -> int:
        if isinstance(query, int):
            if not -len(self.query_ids) <= query < len(self.query_ids):
                raise KeyError(f"query {query} is out of range: there are {len(self.query_ids)} queries.")
            return query
        if query not in self.query_ids:
            raise KeyError(
                f"unknown query '{query}'; there are {len(self.query_ids)}: {list(self.query_ids[:5])} …"
            )
        return self.query_ids.index(query)

    def query(self, *ids: str) -> "Scores":
        """The columns of some queries, in the order asked.

        Raises:
            KeyError: If an id is unknown.

        >>> Scores(torch.tensor([[1.0, 2.0]]), ("a",), ("p", "q")).query("q").values
        tensor([[2.]])
        """
        columns = [self._column(i) for i in ids]
        return replace(
            self, values=self.values[:, columns], query_ids=tuple(self.query_ids[c] for c in columns)
        )

    def example(self, *ids: str) -> "Scores":
        """The rows of some examples (all their steps), in row order.

        Raises:
            KeyError: If an id is unknown.

        >>> Scores(torch.tensor([[1.0], [2.0]]), ("a", "b"), ("q",)).example("b").values
        tensor([[2.]])
        """
        unknown = [i for i in ids if i not in self.ids]
        if unknown:
            raise KeyError(f"unknown examples {unknown[:5]}; the scores have {len(set(self.ids))} examples.")
        keep = [k for k, i in enumerate(self.ids) if i in ids]
        cut = {n: tuple(v[k] for k in keep) for n, v in (("steps", self.steps), ("micros", self.micros)) if v}
        return replace(self, values=self.values[keep], ids=tuple(self.ids[k] for k in keep), **cut)

    def in_order(self, ids: Sequence[str]) -> "Scores":
        """Rows sorted into the order of `ids` (a data set's), rows of one example by step; others are dropped.

        Raises:
            KeyError: If an id has no row: nothing is filled in silently.

        >>> Scores(torch.tensor([[1.0], [2.0]]), ("a", "b"), ("q",)).in_order(["b", "a"]).values.flatten()
        tensor([2., 1.])
        """
        place = {i: k for k, i in enumerate(ids)}
        known = set(self.ids)
        missing = [i for i in place if i not in known]
        if missing:
            raise KeyError(f"in_order: {len(missing)} examples have no score, e.g. {missing[:5]}.")
        steps, micros = self.steps or (0,) * len(self), self.micros or (0,) * len(self)
        rows = sorted(
            (k for k, i in enumerate(self.ids) if i in place),
            key=lambda k: (place[self.ids[k]], steps[k], micros[k]),
        )
        cut = {n: tuple(v[k] for k in rows) for n, v in (("steps", self.steps), ("micros", self.micros)) if v}
        return replace(self, values=self.values[rows], ids=tuple(self.ids[k] for k in rows), **cut)

    def aggregate(self, how: Literal["sum", "mean", "max"], name: str | None = None) -> "Scores":
        """One column from all queries: sum, mean or max of the *per-query scores*.

        Returns:
            Scores [N, 1].  For linear scores "sum" equals scoring the summed query gradient; for cosine scores it
            does not, which is why aggregation happens after scoring.

        Raises:
            ValueError: If `how` is unknown.

        >>> Scores(torch.tensor([[1.0, 4.0]]), ("a",), ("p", "q")).aggregate("max").values
        tensor([[4.]])
        """
        reductions = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
        if how not in reductions:
            raise ValueError(f"aggregate: got {how!r}; expected 'sum', 'mean' or 'max'.")
        total = reductions[how](self.values, 1, keepdim=True)
        return replace(self, values=total, query_ids=(name or how,))


def interleaved(shares: Sequence[Scores]) -> Scores:
    """Scores of one set of examples that was dealt to several processes in turn, in the order of the set.

    A sampler repeats examples to even out the processes: a row whose (id, step) another process holds is dropped.
    What one process holds twice are two rows.

    Args:
        shares: Scores of each process, against the same queries.

    Raises:
        ValueError: If queries differ.

    >>> first, second = (Scores(torch.ones(2, 1), ids, ("q",)) for ids in (("a", "c"), ("b", "a")))
    >>> interleaved([first, second]).ids
    ('a', 'b', 'c')
    """
    for rank, share in enumerate(shares):
        if share.query_ids != shares[0].query_ids:
            raise ValueError(
                f"interleaved: share {rank} has scores of queries {list(share.query_ids[:3])} …, the first one of "
                f"{list(shares[0].query_ids[:3])} …; score the same queries everywhere."
            )
    if len(shares) == 1:
        return shares[0]
    rows: list[tuple[int, int, int, int, int]] = []
    for rank, share in enumerate(shares):
        turns: Counter[tuple[int, int]] = Counter()
        for row, at in enumerate(_times(share)):
            rows.append((*at, turns[at], rank, row))
            turns[at] += 1
    seen: set[tuple[str, int, int]] = set()
    repeats: Counter[tuple[int, str, int]] = Counter()
    kept: list[tuple[int, int, int, int, int]] = []
    for step, micro, turn, rank, row in sorted(rows):
        example = shares[rank].ids[row]
        key = (example, step, repeats[rank, example, step])
        repeats[rank, example, step] += 1
        if key not in seen:
            seen.add(key)
            kept.append((step, micro, turn, rank, row))
    starts = [sum(len(share) for share in shares[:rank]) for rank in range(len(shares))]
    return replace(
        shares[0],
        values=torch.cat([share.values for share in shares])[[starts[rank] + row for *_, rank, row in kept]],
        ids=tuple(shares[rank].ids[row] for *_, rank, row in kept),
        steps=tuple(step for step, *_ in kept),
        micros=tuple(micro for _, micro, *_ in kept),
    )


def _times(share: Scores) -> list[tuple[int, int]]:
    """Step and block of each row."""
    zeros = (0,) * len(share)
    return list(zip(share.steps or zeros, share.micros or zeros, strict=True))


def scores(
    values: Float[Tensor, "N Q"], rows: Sequence[Examples], query_ids: Sequence[str], about: Mapping[str, str]
) -> Scores:
    """Scores from blocks' examples; the sign convention is added to `about`.

    Raises:
        ValueError: If the numbers of rows disagree.
    """
    ids = tuple(i for e in rows for i in e.ids)
    if values.shape != (len(ids), len(query_ids)):
        raise ValueError(
            f"scores: {tuple(values.shape)} values for {len(ids)} examples and {len(query_ids)} queries."
        )
    steps = tuple(e.step for e in rows for _ in e.ids)
    micros = tuple(e.micro for e in rows for _ in e.ids)
    return Scores(values, ids, tuple(query_ids), steps, micros, {**about, "sign": SIGN})
