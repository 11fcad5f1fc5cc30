"""The parameters that a model has now, where training may replace the objects that hold them.

``load_state_dict(assign=True)`` puts new parameters into the same layers: they are followed.  A layer that is another
one now (a resized embedding, a new head, an adapter around it) is not the one that is tapped: its gradients would be
missing, so that is an error.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from attrax.frontends.model.coverage import Layer
from attrax.frontends.model.sharding import cut_of, is_flat, is_sharded, named
from attrax.frontends.tape.recompute import owner


class Present:
    """The captured parameters of a model; what FSDP2 holds gathered after an evaluation is sharded again first.

    Attributes:
        parameters: All parameters by canonical name, as of the last look.
        captured: Those that are captured.
        added: Names of trainable parameters that the model has gained since the first look.
        stand_ins: Captured parameters in whose place the model holds other tensors (`functional_call`): what is
            captured are the gradients of these.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.parameters = now = named(model)
        self._model, self._layers = model, tuple(layers)
        self._flat, self._sharded = is_flat(model), is_sharded(model)
        self._first = set(now)
        self.captured: dict[str, Tensor] = {n: now[n] for layer in layers for n in layer.names.values()}
        self.added: set[str] = set()
        self.stand_ins: dict[str, Tensor] = {}
        self._shapes = {n: p.shape for n, p in self.captured.items()}

    def look(self) -> bool:
        """Look again; whether parameters are other objects than before.

        Those of FSDP1 are views while it runs, and are not looked at.

        Raises:
            RuntimeError: If a layer is not the one that was captured, or the model was sharded meanwhile.
        """
        cut = cut_of(self._model)
        self.parameters = now = named(self._model, cut)
        if self._flat:
            return False
        self._refuse_sharded(now)
        self._refuse_replaced(now, cut)
        self.added = {n for n, p in now.items() if n not in self._first and p.requires_grad}
        changed = {n: now[n] for n, p in self.captured.items() if now[n] is not p and _follows(now[n], p)}
        self.captured |= changed
        self.stand_ins = {n: p for n, p in self.captured.items() if not isinstance(now[n], nn.Parameter)}
        return bool(changed)

    def _refuse_sharded(self, now: dict[str, nn.Parameter]) -> None:
        if not self._sharded and (any(isinstance(p, DTensor) for p in now.values()) or is_flat(self._model)):
            raise RuntimeError(
                "capture: the model was sharded inside the context: its parameters are others now. Shard it first "
                "(fully_shard, FullyShardedDataParallel, parallelize_module), then open the capture."
            )

    def _refuse_replaced(self, now: dict[str, nn.Parameter], cut: dict[int, nn.Parameter]) -> None:
        for layer in self._layers:
            held = {n: _held(layer.module, a) for a, n in layer.names.items()}
            held = {n: cut.get(id(p), p) for n, p in held.items()}
            gone = [n for n, p in held.items() if p is None or now.get(n) is not p]
            resized = {
                n: (tuple(p.shape), tuple(self._shapes[n]))
                for n, p in held.items()
                if p is not None and p.shape != self._shapes[n]
            }
            if gone or resized:
                what = (
                    f"does not hold the model's {gone} any more"
                    if gone
                    else f"has parameters of other shapes than at the beginning, {resized}"
                )
                raise RuntimeError(
                    f"capture: layer '{layer.path}' ({type(layer.module).__name__}) {what}: layers of the model were "
                    "replaced, resized, tied, untied or wrapped inside the context. Open the capture after such a "
                    "change, or leave it and open a new one."
                )


def _held(module: nn.Module, attribute: str) -> Tensor | None:
    try:
        return getattr(*owner(module, attribute))
    except AttributeError:
        return None


def _follows(p: Tensor, before: Tensor) -> bool:
    """Not what a sharded layer has gathered for the moment, nor what `functional_call` puts there for a call."""
    return isinstance(p, nn.Parameter) and isinstance(p, DTensor) == isinstance(before, DTensor)
