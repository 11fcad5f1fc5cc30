"""What there is to know of a layer right before it runs, and is changed or out of reach once it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attrax.frontends.model.coverage import Layer
from attrax.frontends.model.parameters import Slot, buffers
from attrax.frontends.model.randomness import Draws, draws
from attrax.frontends.tape.placing import LayoutError
from attrax.frontends.tape.recompute import Moment, owner, without_tensors


@dataclass(frozen=True, eq=False, slots=True)
class Before:
    """A layer right before it runs.

    Attributes:
        accumulators: Autograd node that adds to the `.grad` of a trained parameter, by attribute.  Sharded training
            holds the parameter that autograd sees in the module only while the layer runs.
        versions: How often the tensors of its arguments had been changed in place, if it is to be recomputed.
        random: How far random generators had drawn, if it is to be recomputed and may draw.
        buffers: Its buffers and copies of them, likewise.
    """

    accumulators: Mapping[str, torch.autograd.graph.Node]
    versions: Sequence[int] | None = None
    random: Draws | None = None
    buffers: Sequence[tuple[Slot, Tensor, Tensor]] = ()

    @staticmethod
    def of(
        layer: Layer,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        names: Mapping[str, str],
        model: Mapping[str, Tensor],
    ) -> "Before":
        """The layer now.

        Args:
            layer: The layer.
            module: Its module.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
            names: Names by attribute of the parameters whose accumulators are to be found.
            model: Parameters of the model by name, in whose place a module may hold other tensors for a call.
        """
        own = {a: getattr(*owner(module, a)) for a in names}
        own = {a: p if isinstance(p, nn.Parameter) else model.get(names[a], p) for a, p in own.items()}
        trained = {a: p for a, p in own.items() if isinstance(p, Tensor) and p.requires_grad}
        accumulators = {a: torch.autograd.graph.get_gradient_edge(p).node for a, p in trained.items()}
        if layer.rule is not None:
            return Before(accumulators)
        versions = _versions(args, kwargs)
        if not module.training:
            return Before(accumulators, versions)
        copies = [(slot, b, b.clone()) for slot, b in buffers(module).items() if b is not None]
        return Before(accumulators, versions, draws(module), copies)

    def moment(self, layer: Layer, args: Any, kwargs: Any) -> Moment:
        """What a call that is over depended on, as far as it has changed it.

        Raises:
            LayoutError: If the call changed its arguments.
        """
        if self.versions is not None and self.versions != _versions(args, kwargs):
            raise LayoutError(
                layer.names.values(),
                f"capture: layer '{layer.path}' ({type(layer.module).__name__}) has no rule and changes its arguments "
                "in place, so it cannot run again. Give it a copy, exclude it, or recompute the module around it "
                "(recompute=).",
            )
        now = buffers(layer.module)
        kept = all(now.get(slot) is b and torch.equal(b, value) for slot, b, value in self.buffers)
        changed = None if kept else {slot: value for slot, _, value in self.buffers}
        return Moment.of(layer.module, self.random, changed)


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [x._version for x in without_tensors((args, kwargs))[1] if not x.is_inference()]
