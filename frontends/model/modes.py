"""States of a model in which per-example gradients cannot be had, or not by hooks."""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from attrax.frontends.model.coverage import Coverage
from attrax.frontends.model.sharding import canonical, named


def check_mode(model: nn.Module) -> None:
    """Refuse modules in training mode whose examples depend on each other or on chance.

    Raises:
        ValueError: Naming the modules.
    """
    found = [f"'{n}' ({type(m).__name__})" for n, m in model.named_modules() if is_coupled(m) or _drops(m)]
    if found:
        raise ValueError(
            f"live: {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''} uses batch statistics or "
            "dropout, so that per-example gradients are undefined. Call model.eval() first (a BatchNorm without "
            "running statistics uses those of the batch in eval mode too)."
        )


def check_selection(model: nn.Module, coverage: Coverage) -> None:
    """Refuse a model whose parameters are not those of the selection: some would be missing.

    Raises:
        ValueError: Naming the new parameters.
    """
    new = {n for n, p in named(model).items() if p.requires_grad} - coverage.known
    if new:
        raise ValueError(
            f"live: {len(new)} parameters became trainable, or part of the model, after the source was made, e.g. "
            f"{sorted(new)[:3]}. Make a new source."
        )


def is_coupled(module: nn.Module) -> bool:
    """Whether a module computes statistics over the batch."""
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return norm and (module.training or module.running_mean is None)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def check_compiled(model: nn.Module) -> None:
    """Refuse a model that is compiled already.

    Raises:
        RuntimeError: Naming the module.
    """
    compiled = [n or "the model" for n, m in model.named_modules() if m._compiled_call_impl is not None]
    wrapped = [n or "the model" for n, m in model.named_modules() if hasattr(m, "_orig_mod")]
    if compiled or wrapped:
        raise RuntimeError(
            f"capture: {(compiled + wrapped)[0]} is already compiled, and hooks added now would never fire. Enter the "
            "capture before torch.compile, or capture the original module under "
            "torch.compiler.set_stance('force_eager')."
        )


def check_sharding(model: nn.Module) -> None:
    """Refuse sharding that hides the model's own parameters.

    Raises:
        ValueError: Naming the module.
    """
    units = [(n, m) for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
    flat = [canonical(n) or "the model" for n, m in units if not m._use_orig_params]
    if flat:
        raise ValueError(
            f"capture: {flat[0]} is wrapped in FullyShardedDataParallel with use_orig_params=False: it has one flat "
            "parameter in the place of its own. Wrap with use_orig_params=True, or shard with "
            "torch.distributed.fsdp.fully_shard (FSDP2)."
        )


def check_coupled(model: nn.Module) -> None:
    """Refuse modules that compute statistics over the batch.

    Raises:
        ValueError: Naming the module.
    """
    coupled = [n for n, m in model.named_modules() if is_coupled(m)]
    if coupled:
        raise ValueError(
            f"capture: '{coupled[0]}' is a BatchNorm with batch statistics: its examples depend on each other, so "
            "there is no per-example gradient. Put it in eval mode (frozen statistics)."
        )
