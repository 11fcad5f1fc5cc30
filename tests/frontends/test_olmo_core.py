"""OLMo-core's unmodified trainer inside a capture; runs in an environment of its own (`make olmo`)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.train import prepare_training_environment, teardown_training_environment

from attrax.core import Block, Examples, GradTree, stored
from attrax.frontends import capture, open_store, trainer_callback, trainer_options

from . import olmo
from .oracle import assert_gradients, one_by_one
from .trainers import Check, keep_double, trained_alike

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    hook = sys.excepthook
    prepare_training_environment(backend=None, seed=0)
    yield
    teardown_training_environment()
    sys.excepthook = hook


def assert_weighed(used: list[Examples]) -> None:
    """Steps of two micro-batches, whose learning rates are those of the schedule; c is 1 / labels of the step."""
    steps = [step for step in range(olmo.STEPS) for _ in (0, 1)]
    assert [x.step for x in used] == steps
    rates = [olmo.SCHEDULE.get_lr(olmo.RATE, step + 1, olmo.STEPS) for step in steps]
    assert [x.learning_rate for x in used] == pytest.approx(rates)
    for x in used:
        labels = sum(int(y.tokens.sum()) for y in used if y.step == x.step)
        assert x.weight.tolist() == pytest.approx([1 / labels] * 2)


def test_olmo_core(tmp_path, monkeypatch):
    """Micro-batches of two of four sequences; the loss is divided by the labels of the whole batch."""
    keep_double(monkeypatch)

    def train(model: Any) -> Any:
        torch.manual_seed(1)
        made = olmo.trainer(model, tmp_path)
        return made.fit, trainer_options(made)

    check, running = trained_alike(olmo.model, train, lambda model: Check(olmo.model(), olmo.loss))
    assert running.coverage.share == 1
    mock, used = check.blocks[:2], check.blocks[2:]
    assert [b.examples.learning_rate for b in mock] == [0, 0], (
        "a batch to warm up, whose gradients are thrown away"
    )
    assert_weighed([b.examples for b in used])


def test_a_callback_captures_while_it_trains(tmp_path):
    blocks: list[Block] = []
    callback, model = trainer_callback("olmo_core", sinks=[blocks.append]), olmo.model()
    olmo.trainer(model, tmp_path, steps=3, callbacks={"attrax": callback}).fit()
    assert len(blocks) == 6 and all(b.examples.learning_rate for b in blocks)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have trained."""
    path = tmp_path_factory.mktemp("olmo")
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*program, "-m", "tests.frontends.olmo", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    return path


def both(folder: Path, mode: str) -> list[dict[str, Any]]:
    """What the processes have noted."""
    return [torch.load(folder / f"{mode}{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("mode", olmo.MODES)
def test_two_processes_capture_their_own_examples(mode, ran):
    """At every step, as autograd of one example at a time; a loss is divided by the labels of its process."""
    one, other = both(ran, mode)
    for x in (one, other):
        assert x["checked"] == 4 * (1 + olmo.STEPS) and x["share"] == 1
        assert [b.learning_rate for b in x["mock"]] == [0, 0]
        assert_weighed(x["used"])
    ids = [i for x in (one, other) for b in x["used"] for i in b.ids]
    assert len(set(ids)) == len(ids) == 8 * olmo.STEPS
    assert any(not torch.equal(a.weight, b.weight) for a, b in zip(one["used"], other["used"], strict=True))


@pytest.mark.parametrize("mode", olmo.MODES)
def test_two_processes_write_one_store(mode, ran, monkeypatch):
    """Its gradients are those of the sequences of its ids, and add up to those of the optimizer, before clipping.

    Processes average what each has divided by its labels: as consumed, c is half of what a process has recorded.  Under
    FSDP they do so in float32.
    """
    keep_double(monkeypatch)
    net, rows, own = olmo.model(dtype=torch.float64), olmo.rows(ran), list[Block]()
    with capture(net, sinks=[own.append]):
        net(**rows, loss_reduction="sum", return_logits=False).loss.backward()
    place = {name: i for i, name in enumerate(own[0].examples.ids)}
    found = open_store(ran / mode)
    assert found.steps() == tuple(range(olmo.STEPS))
    for step, noted in both(ran, mode)[0]["noted"].items():
        net.load_state_dict({name: p for name, (p, _) in noted.items()})
        blocks = found.at(step).map(lambda _, leaf, __: leaf)
        used = [(x, stored(GradTree(dict(leaves)))) for x, leaves in blocks if x.learning_rate]
        assert sum(len(examples) for examples, _ in used) == 8
        for examples, grads in used:
            order = [place[name] for name in examples.ids]
            right = one_by_one(net, {name: x[order] for name, x in rows.items()}, olmo.loss)
            c = examples.weight
            assert_gradients(grads, {n: torch.einsum("b,b...->b...", c, g) for n, g in right.items()})
        sums = {name: sum(grads[name].sum(0) / 2 for _, grads in used) for name in noted}
        assert_gradients(sums, {n: g for n, (_, g) in noted.items()}, 1e-6 if mode == "fsdp" else 1e-10)
        assert torch.cat([g.flatten() for g in sums.values()]).norm() > olmo.CLIP
