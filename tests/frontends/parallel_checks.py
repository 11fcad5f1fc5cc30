"""Two processes whose captures check themselves; each writes down what it was told."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import attrax

ROWS = 3


class Scaled(nn.Linear):
    """Scales its weight where it is told to, which no rule knows."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.factor, self.bias)


class Network(nn.Module):
    """Two layers, prototypes that all examples share, and a layer that not every process calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.extra = Scaled(4, 6), nn.Linear(6, 3), nn.Linear(3, 3)
        self.points, self.shared, self.functional, self.called = None, nn.Linear(4, 3), False, True

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out = F.linear(h, self.last.weight, self.last.bias) if self.functional else self.last(h)
        out = out + (out @ self.shared(self.points).T if self.points is not None else self.shared(x))
        return out + (self.extra(out) if self.called else 0)


def alone(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def added_up(model: nn.Module) -> nn.Module:
    """Gradients are sums over processes, not means."""
    sharded = fully_shard(model)
    sharded.set_gradient_divide_factor(1.0)
    return sharded


KINDS = {"alone": alone, "ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "added up": added_up}


def scaled(net: Network) -> None:
    net.first.factor = 10.0


def scaled_elsewhere(net: Network) -> None:
    net.first.factor = 10.0 if dist.get_rank() == 1 else 1.0


def functional(net: Network) -> None:
    net.functional = True


def prototypes(net: Network) -> None:
    net.points = torch.randn(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def called_elsewhere(net: Network) -> None:
    net.called = dist.get_rank() == 0


SOUND: dict[str, Callable[[Network], None]] = {
    "sound": lambda net: None,
    "called elsewhere": called_elsewhere,
}
WRONG: dict[str, Callable[[Network], None]] = {
    "scaled": scaled,
    "scaled elsewhere": scaled_elsewhere,
    "functional": functional,
    "prototypes": prototypes,
}


ELSEWHERE = {"scaled elsewhere": ("fsdp1", "fsdp2"), "called elsewhere": ("alone", "ddp")}


def cases(names: Iterable[str]) -> list[tuple[str, str, int]]:
    """Kind of training, name of a model, and backwards a step."""
    several = [(kind, name, n) for kind in KINDS for name in names for n in (1, 2)]
    compared = [case for case in several if case[0] in ELSEWHERE.get(case[1], KINDS)]
    return [case for case in compared if case[0] != "added up" or case[1] == "sound"]


def not_yet(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """A backward after which processes average, or not until a later one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if last or isinstance(model, FSDPModule) or not hasattr(model, "no_sync"):
        return nullcontext()
    return model.no_sync()  # pyright: ignore


def told(kind: str, change: Callable[[Network], None], backwards: int = 1) -> dict[str, Any]:
    """What a capture says of two steps of a model with a fault, and what it left on it."""
    net = Network().double()
    change(net)
    model = KINDS[kind](net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(
        2, backwards, ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    text, blocks = "", list[attrax.Block]()
    try:
        with attrax.capture(model, loss="sum", sinks=[blocks.append]):
            for step in x:
                for k, batch in enumerate(step, 1):
                    with not_yet(model, k == backwards):
                        (model(batch).sin().sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    hooks = [n for n, p in model.named_parameters() if p._backward_hooks]
    return {"text": text, "hooks": hooks, "blocks": len(blocks)}


def work(rank: int, folder: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {(kind, name, n): told(kind, (SOUND | WRONG)[name], n) for kind, name, n in cases(SOUND | WRONG)}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
