"""Methods along a run of which SparseAdam moved a part, against literal training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attrax.core import Mask, Recorded
from attrax.frontends import capture, live, open_trajectory, record, replay, store
from attrax.methods import Less, dvemb, less, magic, tracin, trajectory_influence

from ..core.dense import assert_same
from ..core.toys import refused, unchecked
from ..frontends.models import seeded
from ..frontends.test_sparse import Oracle, Words, loss_of, make, per_example, words

BATCHES = [batch | {"example_ids": tuple(f"{k}-{i}" for i in range(4))} for k, batch in enumerate(words(5))]
(QUERY,) = words(1, rows=3, seed=9)


@pytest.fixture(autouse=True)
def quick() -> Any:
    with unchecked():
        yield


def trained(weights: Tensor, **spied: Any) -> nn.Module:
    """Literal training, every example's loss weighed."""
    model = seeded(Words)
    moving = make(model)
    sinks, steps, oracle = (spied.get(k) for k in ("sinks", "record", "oracle"))
    how: dict[str, Any] = {"ids": lambda inputs: now, "loss": "example_mean"}
    names: list[str] = []
    now = names

    def run() -> None:
        for batch, w in zip(BATCHES, weights, strict=True):
            names[:] = batch["example_ids"]
            ((per_example(model, batch) * w).sum() / 4).backward()
            for optimizer in moving:
                optimizer.step()
            model.zero_grad()

    if steps is None:
        run()
        return model
    with capture(model, sinks=sinks, trajectory=steps, before_step=[oracle], **how):
        run()
    return model


class Run:
    """A run recorded in a folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        data: Any = [{k: x for k, x in b.items() if isinstance(x, Tensor)} for b in BATCHES]
        self.oracle = Oracle(data)
        with store(folder, keep_factored=True) as sink:
            self.model = trained(
                torch.ones(5, 4), sinks=[sink], record=record(folder, **options), oracle=self.oracle
            )
        self.trajectory = open_trajectory(folder)
        self.query = live(self.model, [QUERY], per_example)

    def again(self, trajectory: Any = None) -> Any:
        data = {k: [batch] for k, batch in enumerate(BATCHES)}
        return replay(seeded(Words), data, per_example, trajectory or self.trajectory)


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Run:
    with unchecked():
        return Run(tmp_path_factory.mktemp("run"))


def differences(k: int, i: int, h: float = 1e-4) -> Tensor:
    """-df_q / dw of one use, of fourth order in h."""

    def slope(h: float) -> Tensor:
        found: list[Tensor] = []
        for d in (h, -h):
            w = torch.ones(5, 4, dtype=torch.float64)
            w[k, i] += d
            found.append(per_example(trained(w), QUERY).detach())
        return (found[0] - found[1]) / (2 * h)

    return -(4 * slope(h) - slope(2 * h)) / 3


def test_metagradients_are_differences_of_retrained_models(run: Run) -> None:
    found = magic(run.again(), run.query)
    keys = [(0, 1), (1, 3), (2, 0), (4, 2)]
    rows = [list(zip(found.ids, found.steps, strict=True)).index((f"{k}-{i}", k)) for k, i in keys]
    expected = torch.stack([differences(*key) for key in keys])
    assert_same(found.values[rows], expected, 1e-6)


def test_influence_with_exact_hessians_is_the_metagradient(run: Run) -> None:
    again = run.again()
    exact = trajectory_influence(run.trajectory, run.query, curvature=again.hvp)
    assert_same(exact.values, magic(again, run.query).values, 1e-10)


def test_steps_are_trained_again_with_the_rows_that_they_touched(run: Run) -> None:
    records = [run.trajectory.step(n) for n in run.trajectory.steps]
    light = [replace(x, parameters={}, states={}, gradients={}) for x in records[1:]]
    few = magic(run.again(Recorded([records[0], *light], [])), run.query)
    assert_same(few.values, magic(run.again(), run.query).values, 1e-10)
    bare = [replace(x, touched={}) for x in light]
    with refused("SparseAdam", "unknown which", "attrax.record"):
        magic(run.again(Recorded([records[0], *bare], [])), run.query)


def test_influence_seen_through_masks(run: Run) -> None:
    """Of all coordinates, in another order: the same."""
    whole = trajectory_influence(run.trajectory, run.query)
    masked = trajectory_influence(run.trajectory, run.query, masks=[Mask(1000, scale="none")])
    assert_same(masked.values, whole.values, 1e-10)


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([values[n].flatten(1) for n in sorted(values)], 1)


def test_less_is_the_cosine_with_literal_directions(run: Run) -> None:
    queries = run.again().queries([QUERY | {"example_ids": ("p", "q", "r")}])
    found = less(run.trajectory, queries, Less(target="sum"))
    for k in run.trajectory.steps:
        model = seeded(Words)
        model.load_state_dict(run.trajectory.step(k).parameters)
        names = dict(model.named_parameters())
        rows: list[dict[str, Tensor]] = []
        for q in range(3):
            one = {n: x[q : q + 1] for n, x in QUERY.items()}
            grads = torch.autograd.grad(loss_of(model, one), list(names.values()))
            rows.append({n: g.to_dense() if g.is_sparse else g for n, g in zip(names, grads, strict=True)})
        v = flat({n: torch.stack([row[n] for row in rows]) for n in names})
        D = flat(run.oracle.found[k])
        right = 0.05 * nn.functional.cosine_similarity(D[:, None], v[None], dim=-1)
        mine = torch.tensor([s == k for s in found.steps])
        assert_same(found.values[mine], right, 1e-9)


def test_methods_that_ask_for_learning_rates_alone_do_not_ask_for_rows(run: Run) -> None:
    queries = run.again().queries([QUERY | {"example_ids": ("p", "q", "r")}])
    assert tracin(run.trajectory, queries).values.shape == (20, 3)
    assert dvemb(run.trajectory, run.query).values.shape == (20, 3)
