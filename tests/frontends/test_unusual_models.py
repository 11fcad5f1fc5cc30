"""Models that share, pick, reorder or change what their layers see: exact, or left out, and never trained otherwise."""

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from attrax.core import Block, GradTree, collect, stored
from attrax.frontends import capture, live
from tests.frontends.oracle import assert_gradients, block_gradients, captured, one_by_one


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Loss of each example."""
    return model(**batch).sin().flatten(1).sum(1)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


USES = {
    "added": lambda h, p: h + p(torch.arange(h.shape[1])),
    "unsqueezed": lambda h, p: h + p(torch.arange(h.shape[1]))[None],
    "repeated": lambda h, p: h + p(torch.arange(h.shape[1])[None]).repeat(h.shape[0], 1, 1),
    "first": lambda h, p: h + p(torch.arange(h.shape[1])[None])[0],
    "last": lambda h, p: h + p(torch.arange(h.shape[1])[None])[-1],
    "mean": lambda h, p: h + p(torch.arange(h.shape[1])[None]).mean(0),
    "normed": lambda h, p: h + p(torch.arange(h.shape[1])) / p(torch.arange(h.shape[1])).norm(dim=0),
}


class Positions(nn.Module):
    """A table of positions that all examples share."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.inner, self.table, self.out, self.use = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 2), use

    def forward(self, x: Tensor) -> Tensor:
        return self.out(USES[self.use](self.inner(x), self.table))


@pytest.mark.filterwarnings("ignore:live")
@pytest.mark.parametrize("use", USES)
def test_shared_layers_live(use: str) -> None:
    model, batch = seeded(lambda: Positions(use)).eval(), {"x": inputs(3, 5, 3)}
    source = live(model, [batch], squares)
    assert_gradients(captured(source), one_by_one(model, batch, squares))
    assert bool(source.apart) == (use != "added")


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize("use", USES)
def test_shared_layers_do_not_change_training(use: str) -> None:
    """One output an example is put in the place of a shared one only where the model is the same with it."""
    model, batch = seeded(lambda: Positions(use)), {"x": inputs(3, 5, 3)}
    right, plain, blocks = one_by_one(model, batch, squares), squares(model, batch), []
    with capture(model, sinks=[blocks.append], loss="sum"):
        losses = squares(model, batch)
        losses.sum().backward()
    assert torch.equal(losses, plain)
    found = block_gradients(blocks[0])
    assert_gradients(found, {n: g for n, g in right.items() if n in found})
    assert ("table.weight" in found) == (use == "added")


class Masked(nn.Module):
    """A head that reads some positions only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        each = self.head(self.inner(x).tanh()[mask]).sin().sum(1)
        return torch.zeros(len(x), dtype=x.dtype).index_add(0, mask.nonzero()[:, 0], each).unsqueeze(1)


def masked(counts: list[int]) -> dict[str, Tensor]:
    return {"x": inputs(len(counts), 6, 3), "mask": torch.arange(6) < torch.tensor(counts).unsqueeze(1)}


def test_as_many_picked_rows_as_examples_are_not_taken_for_examples() -> None:
    """Four masked tokens of four examples, two of them in one; the batch that is verified has one in each."""
    model, batches = seeded(Masked).eval(), [masked([1, 1, 1, 1]), masked([2, 0, 1, 1])]
    with pytest.raises(RuntimeError, match="'head'"):
        collect(live(model, batches, squares, strict=True))
    with pytest.warns(RuntimeWarning, match="head.bias, head.weight"):
        found = list(live(model, batches, squares).map(lambda name, leaf, _: stored(GradTree({name: leaf}))))
    for (_, leaves), batch in zip(found, batches, strict=True):
        assert_gradients(
            {n: g for x in leaves.values() for n, g in x.items()}, one_by_one(model, batch, squares)
        )


def test_as_many_picked_rows_as_examples_in_training() -> None:
    model, blocks = seeded(Masked), []
    with capture(model, sinks=[blocks.append], loss="sum"):
        squares(model, masked([1, 1, 1, 1])).sum().backward()
        with pytest.warns(RuntimeWarning, match="'head'"):
            squares(model, masked([2, 0, 1, 1]))
        squares(model, masked([1, 1, 1, 1])).sum().backward()
    assert [any("head" in n for n in block_gradients(b)) for b in blocks] == [True, False]


class TimeFirst(nn.Module):
    """Layers that see [T B, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return self.out(self.inner(x.transpose(0, 1).flatten(0, 1)).tanh()).view(T, B, -1).mean(0)


def test_examples_that_are_all_alike_do_not_decide_the_layout() -> None:
    x = inputs(4, 6, 3)
    x[:2] = 0
    model, batches = seeded(TimeFirst).eval(), [{"x": x}, {"x": inputs(4, 6, 3, seed=2)}]
    found, right = captured(live(model, batches, squares)), [one_by_one(model, b, squares) for b in batches]
    assert_gradients(found, {n: torch.cat([r[n] for r in right]) for n in right[0]})


class Sorted(nn.Module):
    """Examples in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return self.out(self.inner(x[order]).tanh())[order.argsort()]


@pytest.mark.filterwarnings("ignore:live")
def test_examples_sorted_inside_of_the_model() -> None:
    """The first batch is in order already."""
    x = inputs(4, 6, 3)
    batches = [{"x": x[x[:, 0, 0].argsort()]}, {"x": x}]
    model = seeded(Sorted).eval()
    found, right = captured(live(model, batches, squares)), [one_by_one(model, b, squares) for b in batches]
    assert_gradients(found, {n: torch.cat([r[n] for r in right]) for n in right[0]})


class Packs(nn.Module):
    """A recurrent layer that is given a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rnn = nn.Linear(3, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 3)
        packed = nn.utils.rnn.pack_padded_sequence(self.inner(x), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


@pytest.mark.filterwarnings("ignore:live")
def test_packed_sequences() -> None:
    model, batch = seeded(Packs).eval(), {"x": inputs(3, 5, 3)}
    assert_gradients(captured(live(model, [batch], squares)), one_by_one(model, batch, squares))


class Changes(nn.Module):
    """A module that changes its argument, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.out(x * self.scale)


class Counts(nn.Module):
    """A module that counts its calls, in training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.scale


@pytest.mark.parametrize(
    "make",
    [
        Changes,
        Counts,
        lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
        lambda: parametrizations.spectral_norm(nn.Conv1d(5, 2, 3)),
    ],
    ids=["arguments", "buffers", "spectral norm", "spectral norm of a convolution"],
)
def test_state_of_modules_is_that_of_training_without_capture(make: Callable[[], nn.Module]) -> None:
    ends: list[Tensor] = []
    for watched in (False, True):
        model = nn.Sequential(seeded(make), nn.Tanh()).train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        context = capture(model, loss="sum") if watched else contextlib.nullcontext()
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(2):
                x = inputs(3, 5, 3, seed=step)
                optimizer.zero_grad()
                model(x).sin().sum().backward()
                optimizer.step()
        ends.append(torch.cat([v.double().flatten() for v in [x, *model.state_dict().values()]]))
    assert torch.equal(*ends)


def test_buffers_that_a_call_changes_are_those_before_it_in_its_gradient() -> None:
    """A step of spectral norm's power iteration, from random vectors: against the gradient that training uses."""
    model, blocks = (
        nn.Sequential(seeded(lambda: parametrizations.spectral_norm(nn.Linear(3, 3)))),
        list[Block](),
    )
    model.double().train()
    with capture(model, loss="sum", sinks=[blocks.append]):
        model(inputs(3, 5, 3)).sin().sum().backward()
    for name, found in stored(blocks[0].grads).items():
        right = model.get_parameter(name).grad
        assert right is not None and torch.allclose(found.sum(0), right, rtol=1e-10, atol=1e-12)


def test_a_parameter_under_reentrant_checkpointing_is_differentiated_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(3, 4), nn.Parameter(torch.randn(4))
            self.within = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            def run(h: Tensor) -> Tensor:
                return self.within(h) * self.scale

            return torch.utils.checkpoint.checkpoint(run, self.inner(x), use_reentrant=True)

    model, batch = seeded(Scaled).eval(), {"x": inputs(3, 3)}
    named, rows = dict(model.named_parameters()), []
    for i in range(3):
        model.zero_grad()
        squares(model, {"x": batch["x"][i : i + 1]}).sum().backward()
        rows.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
    model.zero_grad()
    assert_gradients(
        captured(live(model, [batch], squares)), {n: torch.stack([r[n] for r in rows]) for n in named}
    )
