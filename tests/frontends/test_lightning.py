"""Unmodified Lightning trainer inside a capture, and captures that it opens itself."""

from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attrax.core import Block
from attrax.frontends import trainer_callback, trainer_options

from .trainers import Check, trained_alike

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


class Module(lightning.LightningModule):
    """A classifier in float64 whose steps compute the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.fails = 0

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.fails and index == self.fails:
            raise KeyError("training step")
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def data() -> DataLoader:
    gen = torch.Generator().manual_seed(3)
    x, y = torch.randn(30, 5, generator=gen, dtype=torch.float64), torch.randint(3, (30,), generator=gen)
    return DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=torch.Generator().manual_seed(4))


def trainer(path: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    place = {"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "default_root_dir": path}
    return lightning.Trainer(**{"max_steps": 20, **quiet, **place, **options})


LABELS: dict[bytes, Tensor] = {
    x.numpy().tobytes(): y for xs, ys in data() for x, y in zip(xs, ys, strict=True)
}


def loss(model: Any, row: Any) -> Tensor:
    return F.cross_entropy(model(row["input"]), LABELS[row["input"].numpy().tobytes()][None])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(accumulate, tmp_path):
    """The module's own loss is a mean, which the trainer divides by the batches it accumulates."""

    def train(net: Any) -> Any:
        module = Module()
        module.net = net
        made = trainer(tmp_path, accumulate_grad_batches=accumulate)
        return lambda: made.fit(module, data()), trainer_options(made, loss="example_mean")

    check, running = trained_alike(lambda: Module().net, train, lambda net: Check(Module().net, loss))
    assert running.coverage.share == 1
    sizes = [len(known_weights(b)) for b in check.blocks]
    assert sorted(set(sizes)) == [2, 4] and [b.examples.micro for b in check.blocks][:2] == [
        0,
        int(accumulate > 1),
    ]
    for block in check.blocks:
        assert known_weights(block) == pytest.approx(
            [1 / (len(block.examples) * accumulate)] * len(block.examples)
        )


def known_weights(block: Block) -> list[float]:
    assert block.examples.weight is not None
    return block.examples.weight.tolist()


def test_a_callback_captures_while_it_trains(tmp_path):
    blocks: list[Block] = []
    module, callback = Module(), trainer_callback("lightning", sinks=[blocks.append], loss="example_mean")
    trainer(tmp_path, callbacks=[callback], max_steps=6).fit(module, data())
    assert [b.examples.step for b in blocks] == list(range(6)) and set(blocks[0].grads) == {
        "net.0.weight",
        "net.2.weight",
    }
    module.training_step(next(iter(data())), 0).backward()
    assert len(blocks) == 6, "nothing is captured afterwards"


def test_a_callback_closes_its_capture_on_an_exception(tmp_path):
    blocks: list[Block] = []
    module, callback = Module(), trainer_callback("lightning", sinks=[blocks.append])
    module.fails = 3
    with pytest.raises(KeyError, match="training step"):
        trainer(tmp_path, callbacks=[callback]).fit(module, data())
    assert len(blocks) == 3 and not any(m._forward_hooks for m in module.modules())
