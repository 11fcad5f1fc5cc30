"""What a front-end may leave behind on a model (nothing), and which operations run."""

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All state of a model and of the process that may not change."""
    parameters = dict(model.named_parameters())
    return {
        "values": {n: x.detach().clone() for n, x in [*parameters.items(), *model.named_buffers()]},
        "objects": [id(p) for p in parameters.values()],
        "grads": {n: None if p.grad is None else (id(p.grad), p.grad.clone()) for n, p in parameters.items()},
        "trainable": {n: p.requires_grad for n, p in parameters.items()},
        "modes": [m.training for m in model.modules()],
        "keys": list(model.state_dict()),
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [[list(getattr(m, h)) for h in HOOKS] for m in model.modules()],
        "parameter hooks": [list(p._backward_hooks or {}) for p in parameters.values()],
        "random": torch.get_rng_state(),
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    """Everything is bitwise as it was."""
    after = snapshot(model)
    for name, value in before.items():
        assert _same(value, after[name]), f"{name} changed"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model is bitwise the same after the block, also if the block raises."""
    before = snapshot(model)
    try:
        yield
    finally:
        assert_untouched(model, before)


class Operations(TorchDispatchMode):
    """Counts operations by name and output shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.seen[func.overloadpacket._qualified_op_name.split("::")[1], tuple(x.shape)] += 1
        return out

    def named(self, *names: str) -> int:
        """How often these operations ran."""
        return sum(count for (name, _), count in self.seen.items() if name in names)

    def shaped(self, shapes: set[tuple[int, ...]], *names: str) -> int:
        """How often these operations made a tensor of one of these shapes."""
        found = [count for (name, shape), count in self.seen.items() if name in names and shape in shapes]
        return sum(found)


MATMULS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "einsum", "linear", "linear_backward")
WEIGHT_GRADIENTS = ("embedding_dense_backward", "embedding_backward")


def weight_gradient_ops(model: nn.Module, operations: Operations) -> int:
    """Matrix products with the shape of a weight, either way round, and embedding gradients."""
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim == 2}
    both = shapes | {shape[::-1] for shape in shapes}
    return operations.shaped(both, *MATMULS) + operations.named(*WEIGHT_GRADIENTS)


@contextlib.contextmanager
def watched_inputs(module: nn.Module) -> Iterator[list[weakref.ref[Tensor]]]:
    """Weak references to the inputs of a module's calls; none of them may be left alive at the end."""
    refs: list[weakref.ref[Tensor]] = []
    handle = module.register_forward_pre_hook(lambda m, args: refs.append(weakref.ref(args[0])))
    try:
        yield refs
    finally:
        handle.remove()
    gc.collect()
    assert refs and all(ref() is None for ref in refs), f"{len(refs)} inputs, some alive"
