"""How well scores foretell what training without examples does: files of scores against a table of effects."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attrax.core import Scores
from attrax.methods import agreement, bootstrap, group_scores

LEVEL = 0.95


@dataclass(frozen=True, eq=False, slots=True)
class Judged:
    """How one file of scores fared.

    Attributes:
        source: The file, as it was named.
        method: The method that made the scores, as far as they say.
        removals: How many removals (or models of subsets) there are.
        correlations: Spearman's correlation by query; NaN where one side is constant.
        constant: By query without correlation, what is constant: "scores", "effects" or both.
        interval: Bounds of the mean correlation when removals and queries are drawn anew; None if there is no mean.
    """

    source: str
    method: str
    removals: int
    correlations: Mapping[str, float]
    constant: Mapping[str, str]
    interval: tuple[float, float] | None

    @property
    def mean(self) -> float | None:
        """Mean of the correlations that exist."""
        found = [x for x in self.correlations.values() if math.isfinite(x)]
        return sum(found) / len(found) if found else None

    def plain(self) -> dict[str, Any]:
        """Everything as JSON knows it; a correlation that does not exist is null."""
        return {
            "scores": self.source,
            "method": self.method,
            "spearman": self.mean,
            "interval": self.interval,
            "removals": self.removals,
            "queries": len(self.correlations),
            "constant": dict(self.constant),
            "by_query": {name: finite(x) for name, x in self.correlations.items()},
        }


def finite(x: float) -> float | None:
    """A number for JSON, which knows no NaN and no infinity.

    >>> finite(0.5), finite(float("nan"))
    (0.5, None)
    """
    return x if math.isfinite(x) else None


def read_groups(path: str | Path) -> dict[str, list[str]]:
    """Sets of examples by name, from a JSON file ``{"name": ["id", …], …}``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"groups: {path}: there is no such file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"groups: {path}: not a JSON file: {error}.") from error
    lists = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(x, list) and x and all(isinstance(i, str) for i in x) for x in lists):
        raise ValueError(
            f'groups: {path}: expected {{"name": ["id", …], …}}: a list of example ids by set name.'
        )
    return content


def judge(
    files: Mapping[str, Scores],
    effects: Scores,
    groups: Mapping[str, Sequence[str]] | None = None,
    *,
    lds: bool = False,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Judged]:
    """Compare files of scores with effects of removals, best first.

    Args:
        files: Scores of examples, by file name.
        effects: ``f_q(trained without) - f_q(trained)``, one row a removal; or losses of models, see `lds`.
        groups: Example ids by the name of a removal.  A removal that is not named here is a single example.
        lds: Whether `effects` holds the losses of models that were trained **on** the groups alone.
        resamples: Draws of the bootstrap.
        seed: Seed of these draws.

    Returns:
        One value a file, by falling mean correlation; files without one come last.

    Raises:
        ValueError: If there are fewer than three removals, a number is not finite, or ids do not match.

    >>> import torch
    >>> effects = Scores(torch.tensor([[0.1], [0.3], [0.2]]), ("a", "b", "c"), ("q",))
    >>> round(judge({"same": effects}, effects, resamples=20)[0].mean, 6)
    1.0
    """
    groups = groups or {}
    repeated = [name for name, rows in Counter(effects.ids).items() if rows > 1]
    if repeated:
        raise ValueError(
            f"evaluate: effects have several rows of {repeated[:5]}. Average repeated trainings first."
        )
    if len(effects) < 3:
        raise ValueError(f"evaluate: effects have {len(effects)} rows; rank correlations need at least 3.")
    unnamed = [name for name in effects.ids if name not in groups]
    if lds and unnamed:
        raise ValueError(f"evaluate: lds: groups do not say what the models {unnamed[:5]} were trained on.")
    _check_finite("effects", effects)
    truth = replace(effects, values=-effects.values) if lds else effects
    sets = {name: groups.get(name, [name]) for name in effects.ids}
    found = [
        _judged(source, _predicted(source, scores, truth, sets), truth, resamples, seed)
        for source, scores in files.items()
    ]
    return sorted(found, key=lambda one: -2.0 if one.mean is None else one.mean, reverse=True)


def _predicted(source: str, scores: Scores, truth: Scores, sets: Mapping[str, Sequence[str]]) -> Scores:
    """Scores of the removals, rows and columns as those of the effects."""
    rows, columns = set(scores.ids), set(scores.query_ids)
    needed = dict.fromkeys(name for members in sets.values() for name in members)
    for what, missing in (
        ("examples", [name for name in needed if name not in rows]),
        ("queries", [name for name in truth.query_ids if name not in columns]),
    ):
        if missing:
            raise ValueError(
                f"evaluate: {source} has no scores of {len(missing)} {what} that effects are about, e.g. "
                f"{missing[:5]}. Score the same data; sets of examples need groups (--groups)."
            )
    asked = scores.query(*truth.query_ids)
    predicted = group_scores(replace(asked, values=asked.values.double()), sets)
    _check_finite(source, predicted)
    return predicted


def _check_finite(source: str, table: Scores) -> None:
    bad = (~table.values.isfinite()).nonzero().tolist()
    if bad:
        row, column = bad[0]
        raise ValueError(
            f"evaluate: {source}: {len(bad)} numbers are not finite, e.g. '{table.ids[row]}' for query "
            f"'{table.query_ids[column]}'. Leave these rows or queries out of the effects."
        )


def _judged(source: str, predicted: Scores, truth: Scores, resamples: int, seed: int) -> Judged:
    correlations = dict(zip(truth.query_ids, agreement(predicted, truth).tolist(), strict=True))
    sides = {"scores": predicted.values, "effects": truth.values}
    constant = {
        name: " and ".join(side for side, x in sides.items() if bool((x[:, q] == x[0, q]).all()))
        for q, name in enumerate(truth.query_ids)
        if math.isnan(correlations[name])
    }
    varied = [name for name in truth.query_ids if name not in constant]
    interval = (
        bootstrap(predicted, truth.query(*varied), level=LEVEL, resamples=resamples, seed=seed)
        if varied
        else None
    )
    method = predicted.about.get("method", "")
    return Judged(source, method, len(truth), correlations, constant, interval)
