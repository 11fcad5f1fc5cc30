"""Small training runs with literal torch optimizers, recorded by hand, and their dense counterparts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attrax.core import Block, Examples, GradTree, materialized
from attrax.core.optimizers import Optimizer
from attrax.core.trajectory import Clip, Recorded, Step
from attrax.frontends import classification, functional
from attrax.frontends.runs.retraining import Recipe, Weight, loss_terms, query_losses, step_weights, train

from ..core.toys import generator, normal

LOSS = classification()
Batches = Mapping[int, list[dict[str, Any]]]


def net(seed: int = 0) -> nn.Module:
    gen = generator(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    for p in model.parameters():
        p.data.copy_(0.6 * normal(gen, *p.shape))
    return model


def points(gen: torch.Generator, names: list[str]) -> dict[str, Any]:
    y = torch.randint(0, 2, (len(names),), generator=gen)
    return {"x": normal(gen, len(names), 3), "y": y, "example_ids": tuple(names)}


def batches(steps: int = 6, sizes: tuple[int, ...] = (4,), repeated: bool = False) -> Batches:
    """Micro-batches of the given sizes a step; `repeated` runs through the same examples every two steps."""
    gen, out, count = generator(1), {}, 0
    for step in range(steps):
        if repeated and step >= 2:
            out[step] = out[step - 2]
            continue
        out[step] = []
        for B in sizes:
            out[step].append(points(gen, [f"x{count + i}" for i in range(B)]))
            count += B
    return out


QUERIES = [points(generator(2), ["p", "q", "r"])]


def recipe(make: Callable[..., Any] = torch.optim.SGD, **about: Any) -> Recipe:
    """A run; what is not of a Recipe goes to the optimizer."""
    own = {k: about.pop(k) for k in list(about) if k in Recipe.__dataclass_fields__}
    data = own.pop("batches", batches())
    return Recipe(net(), data, LOSS, lambda model: make(model.parameters(), **about), **own)


def warm(optimizer: Any) -> Any:
    """A schedule that warms up and then decays."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 2) * (1 - t / 10))


def recorded_step(number: int, model: nn.Module, optimizer: Any, clip: Clip) -> Step:
    """What a torch optimizer sees, copied out by hand."""
    kind = type(optimizer).__name__.lower()
    names = {p: n for n, p in model.named_parameters()}
    optimizers: dict[str, Optimizer] = {}
    for group in optimizer.param_groups:
        hyper = {k: float(v) for k, v in group.items() if isinstance(v, float | int)}
        if "betas" in group:
            hyper |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        if "etas" in group:
            hyper |= dict(zip(("etaminus", "etaplus"), group["etas"], strict=True))
            hyper |= dict(zip(("step_size_min", "step_size_max"), group["step_sizes"], strict=True))
        optimizers |= {names[p]: Optimizer(kind, hyper) for p in group["params"]}
    states = {
        names[p]: {k: torch.as_tensor(v).clone() for k, v in s.items() if v is not None}
        for p, s in optimizer.state.items()
    }
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    return Step(number, optimizers, states, grads, values, clip)


def at(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    other = net()
    other.load_state_dict(dict(values))
    return other.eval()


@dataclass(frozen=True)
class Run:
    """A recorded run, its trained model and the gradients of queries at the end."""

    recipe: Recipe
    trajectory: Recorded
    model: nn.Module
    queries: list[dict[str, Any]] = field(default_factory=lambda: QUERIES)

    @property
    def query(self) -> Any:
        return functional(self.model, self.queries, self.recipe.loss)

    @property
    def query_ids(self) -> tuple[str, ...]:
        return tuple(i for b in self.queries for i in b["example_ids"])

    def losses(self, weight: Weight) -> Tensor:
        return query_losses(train(self.recipe, weight), self.queries, self.recipe.loss)

    def uses(self) -> list[tuple[str, int]]:
        return [(i, e.examples.step) for e in self.trajectory.blocks for i in e.examples.ids]


def run(recipe: Recipe) -> Run:
    records: list[Step] = []
    model = train(recipe, before_step=lambda n, m, o, c: records.append(recorded_step(n, m, o, c)))
    blocks = [
        block
        for record in records
        for block in step_blocks(recipe, record, at(recipe.model, record.parameters))
    ]
    return Run(recipe, Recorded(records, blocks), model.eval())


def step_blocks(recipe: Recipe, record: Step, model: nn.Module) -> list[Block]:
    """Per-example gradients of a step as trained, one example at a time."""
    data = recipe.batches[record.step]
    out: list[Block] = []
    for micro, (batch, c) in enumerate(
        zip(data, step_weights(data, recipe.loss, recipe.reduction), strict=True)
    ):
        (found,) = functional(model, [batch], recipe.loss).map(lambda name, leaf, _: leaf)
        grads = {
            n: materialized(n, leaf.w * c.reshape(-1, *[1] * (leaf.w.ndim - 1)))
            for n, leaf in found[1].items()
        }
        lr = next(iter(record.optimizers.values())).lr
        tokens = loss_terms(batch, recipe.loss).long()
        about = Examples(found[0].ids, record.step, micro, c, tokens, found[0].fingerprint, lr)
        out.append(Block(GradTree(grads), about))
    return out


def flat(values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Tensors by parameter as one vector, in the order of `like`."""
    return torch.cat([values[n].flatten() for n in like])


def dense(block: Block, like: Mapping[str, Tensor]) -> Tensor:
    """Per-example gradients of a block of parameters' own leaves, [B, P]."""
    return torch.cat([block.grads[n].w.flatten(1) for n in like], 1)


def query_matrix(run: Run) -> Tensor:
    """Query gradients at the end, [Q, P]."""
    ((_, leaves),) = run.query.map(lambda name, leaf, _: leaf)
    return torch.cat([leaves[n].w.flatten(1) for n in run.trajectory.records[0].parameters], 1)


def thinned(trajectory: Recorded, every: int, first: int = 0) -> Recorded:
    """The run with parameters and states of some steps, and gradients of none."""
    light = [replace(x, gradients={}, parameters={}, states={}) for x in trajectory.records]
    whole = [replace(x, gradients={}) for x in trajectory.records]
    keep = [
        x if k >= first and (k - first) % every == 0 else y
        for k, (x, y) in enumerate(zip(whole, light, strict=True))
    ]
    return Recorded(keep, trajectory.blocks)
