"""Layers that are cut over processes (tensor parallel training): their whole gradients, or what each process holds.

A column-parallel layer of `torch.distributed.tensor.parallel` computes some of its outputs, a row-parallel one takes
some of its inputs.  Of an example's gradient G = sum_t g_t a_t^T a process has the rows, or the columns, that belong to
its shard of the weight; what is not cut is the same everywhere.

"whole" gathers the cut factor when the gradient of the layer's output arrives, so that leaves are those of one process.
A backward of such a model exchanges gradients at every layer anyway, in an order that all processes share, and the
gathers fall in line.  "shards" keeps to what each process has, every entry of G once (`attrax.core.counted_once`), and
leaves that to be added up: inner products and squared norms of shards are, cosines and curvature are not.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from attrax.core import Leaf
from attrax.core.factorization import Rule
from attrax.core.shards import Cut, counted_once
from attrax.frontends.model.coverage import Layer
from attrax.frontends.model.sharding import named
from attrax.frontends.tape.forms import Form, rule_form
from attrax.frontends.tape.layout import Layout
from attrax.frontends.tape.passes import Extent

Holds: TypeAlias = Literal["whole", "shards"]

_CUTS: dict[str, dict[int, Cut]] = {
    "Linear": {0: "outputs", 1: "inputs"},
    "Embedding": {0: "none", 1: "outputs"},
}
"""What a weight cut along an axis has of a layer, by rule; a look-up in a part of the vocabulary gets whole outputs."""
_STYLES = ("ColwiseParallel", "RowwiseParallel", "EmbeddingParallel", "TensorParallelLayer")
"""Styles of Hugging Face's plans in which inputs and outputs of a layer are whole or cut along their last axis."""


@dataclass(frozen=True, eq=False)
class CutLayer:
    """A layer whose parameters are spread over the processes.

    Attributes:
        inputs: Width of its whole input; None where only a `DTensor` can be cut (a norm, the ids of an embedding).
        outputs: Width of its whole output, likewise.
        cuts: What this process has of the gradient of each parameter, by attribute.
    """

    inputs: int | None
    outputs: int | None
    cuts: Mapping[str, Cut]


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The cut layers of a model; made by `tensor_parallel`.

    Attributes:
        mesh: The processes that share them, one axis.
        holds: Whether leaves are whole or shards.
        layers: Cut layers by path.
    """

    mesh: DeviceMesh
    holds: Holds
    layers: Mapping[str, CutLayer]

    @property
    def hands_out(self) -> bool:
        """Whether this process's leaves are to be counted: of processes with the same whole ones, the first's are."""
        return self.holds == "shards" or self.mesh.get_local_rank() == 0

    def form(
        self,
        path: str,
        rule: Rule,
        module: nn.Module,
        inputs: Sequence[Tensor | None],
        output: Tensor,
        layout: Layout,
        extent: Extent,
    ) -> Form:
        """The form of a call of a cut layer, seen before its output is turned into what follows expects."""
        form = rule_form(rule, _bare(module), inputs, output, layout, extent)
        placed = [_placement(x) for x in form.saved]
        with torch.no_grad():
            saved = [_local(x) for x in form.saved]
        return Form(saved, form.outputs, partial(self._leaves, form, self.layers[path], placed))

    def _leaves(
        self,
        form: Form,
        cut: CutLayer,
        placed: Sequence["_Placed | None"],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Mapping[str, Leaf]:
        kind = cut.cuts["weight"] if self.holds == "shards" else "none"
        take = {"whole": self._whole, "part": self._part}
        xs = [_restored(x, p) for x, p in zip(saved, placed, strict=True)]
        xs = [take["part" if kind == "inputs" else "whole"](x, cut.inputs) for x in xs]
        gs = [take["part" if kind == "outputs" else "whole"](g, cut.outputs) for g in grads]
        return form.leaves(xs, gs)

    def counted(self, path: str, leaves: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
        """What this process counts of the leaves of a call, by attribute."""
        if self.holds == "whole":
            return leaves
        rank, layer = self.mesh.get_local_rank(), self.layers.get(path)
        label = f"shard {rank} of {self.mesh.size()}"
        cuts = {} if layer is None else layer.cuts
        found = {a: counted_once(leaf, cuts.get(a, "none"), rank) for a, leaf in leaves.items()}
        return {a: replace(leaf, basis=label) for a, leaf in found.items() if leaf is not None}

    def _whole(self, x: Tensor, width: int | None) -> Tensor:
        return self._spread(x, width).full_tensor()

    def _part(self, x: Tensor, width: int | None) -> Tensor:
        return self._spread(x, width).redistribute(placements=[Shard(x.ndim - 1)]).to_local()

    def _spread(self, x: Tensor, width: int | None) -> DTensor:
        """A tensor of a call as what it is a part of; a plain one is cut along its last axis, or not at all."""
        if isinstance(x, DTensor):
            return x
        shape = x.shape if width is None else torch.Size((*x.shape[:-1], width))
        stride = torch.empty(shape, device="meta").stride()
        placements: list[Placement] = [Replicate() if x.shape == shape else Shard(x.ndim - 1)]
        return DTensor.from_local(x, self.mesh, placements, run_check=False, shape=shape, stride=stride)


def tensor_parallel(
    model: nn.Module, layers: Sequence[Layer] = (), holds: Holds = "whole", operation: str = "capture"
) -> TensorParallel | None:
    """The layers of a model that are cut over processes, None if there are none (FSDP gathers them first).

    Args:
        model: The model.
        layers: Its layers to be captured.
        holds: What leaves are to be.
        operation: For errors.

    Raises:
        ValueError: If a layer is cut in a way that its leaves cannot be made whole, or counted once.
    """
    if holds not in ("whole", "shards"):
        raise ValueError(f"{operation}: tensor_parallel: got {holds!r}; expected 'whole' or 'shards'.")
    mesh = parallel_mesh(model, operation)
    if mesh is None and holds == "shards":
        raise ValueError(
            f"{operation}: tensor_parallel='shards', but no layer of the model is cut. Leave it out."
        )
    if mesh is None:
        return None
    found: dict[str, CutLayer] = {}
    for layer in layers:
        spread = {n: p for n, p in layer.module.named_parameters() if _is_cut(p, mesh)}
        style = _style(layer.module)
        if style not in (None, *_STYLES):
            raise ValueError(_refusal(operation, layer, f"is parallelized as {style}"))
        if layer.rule is None and spread:
            raise ValueError(
                _refusal(operation, layer, f"would be run again with '{next(iter(spread))}' cut")
            )
        if layer.rule is not None and spread:
            found[layer.path] = _cut_layer(layer, layer.rule, spread, operation)
    if holds == "shards" and all(kind == "none" for cut in found.values() for kind in cut.cuts.values()):
        raise ValueError(
            f"{operation}: tensor_parallel='shards', but no selected layer is cut, and one process would count all of "
            "them. Select others (include=), or use tensor_parallel='whole'."
        )
    users = [(name, layer) for layer in layers for name in layer.names.values()]
    tied = [(n, x) for n, x in users if x.path in found and sum(n == other for other, _ in users) > 1]
    if tied and holds == "shards":
        raise ValueError(
            f"{operation}: parameter '{tied[0][0]}' is used by several layers, which cut it in ways that do not fit. "
            "Capture whole gradients: tensor_parallel='whole'."
        )
    return TensorParallel(mesh, holds, found)


def parallel_mesh(model: nn.Module, operation: str = "capture") -> DeviceMesh | None:
    """The processes over which layers of a model are cut, None if none is.

    Raises:
        ValueError: If different layers are cut over different processes.
    """
    managed = {id(p) for m in model.modules() if isinstance(m, FSDPModule) for p in named(m).values()}
    meshes: dict[str, DeviceMesh] = {}
    for name, p in named(model).items():
        cuts = sum(not isinstance(x, Replicate) for x in p.placements) if isinstance(p, DTensor) else 0
        if isinstance(p, DTensor) and cuts > (id(p) in managed):
            meshes[name] = _last(p.device_mesh)
            if cuts > 1 and id(p) not in managed or meshes[name].ndim > 1:
                raise ValueError(
                    f"{operation}: parameter '{name}' is cut over several axes of a mesh, {p.placements}; expected "
                    "one axis of tensor parallel processes. Capture on a copy that is not cut."
                )
    first = next(iter(meshes.values()), None)
    other = [n for n, mesh in meshes.items() if first is not None and not torch.equal(mesh.mesh, first.mesh)]
    if other:
        raise ValueError(
            f"{operation}: parameters '{next(iter(meshes))}' and '{other[0]}' are cut over different processes; "
            "expected one group. Capture on a copy that is not cut."
        )
    return first


def refuse_parallel(model: nn.Module, operation: str) -> None:
    """Refuse a model whose layers are cut over processes.

    Raises:
        ValueError: Saying what to do.
    """
    if parallel_mesh(model, operation) is not None:
        raise ValueError(
            f"{operation}: layers of the model are cut over processes (tensor parallel), and it runs the model with "
            "parameters of its own. Use capture or live, which gather what is cut, or a copy that is not cut."
        )


def _cut_layer(layer: Layer, rule: Rule, spread: Mapping[str, nn.Parameter], operation: str) -> CutLayer:
    placed = {a: p.placements[-1] for a, p in spread.items() if isinstance(p, DTensor)}
    cuts: dict[str, Cut] = {}
    for attribute, placement in placed.items():
        kind = _cut(rule, placement, spread[attribute].shape)
        if kind is not None:
            cuts[attribute] = kind
    if len(cuts) < len(placed) or "weight" not in cuts:
        raise ValueError(_refusal(operation, layer, f"is cut as {placed}"))
    if rule.name not in _CUTS:
        return CutLayer(None, None, cuts)
    shape = spread["weight"].shape
    return CutLayer(shape[1], shape[0], cuts) if rule.name == "Linear" else CutLayer(None, shape[1], cuts)


def _cut(rule: Rule, placement: Placement, shape: torch.Size) -> Cut | None:
    """What a process has of the gradient of a parameter that is placed so; None if it cannot be told."""
    if isinstance(placement, Replicate):
        return "none"
    if type(placement) is not Shard or shape[placement.dim] == 1:  # one output: a shard looks like the whole
        return None
    return _CUTS.get(rule.name, {}).get(placement.dim % len(shape))


def _refusal(operation: str, layer: Layer, how: str) -> str:
    return (
        f"{operation}: layer '{layer.path}' ({type(layer.module).__name__}) {how}; expected linear layers and "
        "embeddings in ColwiseParallel or RowwiseParallel, norms in SequenceParallel of torch, and parameters of the "
        "others whole on every process. Exclude it (exclude=), or capture on a copy that is not cut."
    )


def _style(module: nn.Module) -> str | None:
    """The style in which Hugging Face has parallelized a module: it replaces the module's forward."""
    forward: Any = module.__dict__.get("forward")
    if getattr(forward, "__name__", "") != "tp_forward":
        return None
    style = inspect.getclosurevars(forward).nonlocals.get("self")
    return forward.__qualname__.partition(".")[0] if style is None else type(style).__name__


def _is_cut(p: Tensor, mesh: DeviceMesh) -> bool:
    return isinstance(p, DTensor) and torch.equal(_last(p.device_mesh).mesh, mesh.mesh)


def _last(mesh: DeviceMesh) -> DeviceMesh:
    """The last axis of a mesh: FSDP puts its own before it."""
    return mesh if mesh.mesh_dim_names is None or mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


_Placed: TypeAlias = tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]]


def _placement(x: Tensor) -> _Placed | None:
    return (x.device_mesh, tuple(x.placements), x.shape, x.stride()) if isinstance(x, DTensor) else None


def _local(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    x = x.to_local() if isinstance(x, DTensor) else x
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x  # pyright: ignore[reportAttributeAccessIssue]


def _restored(x: Tensor, placed: _Placed | None) -> Tensor:
    if placed is None:
        return x
    mesh, placements, shape, stride = placed
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride)


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


def _bare(module: nn.Module) -> nn.Module:
    """A layer that computes on whole tensors: without hooks, its uncut parameters plain."""
    own: dict[str, Any] = {
        n: nn.Parameter(_local(p.detach()), requires_grad=False)
        if isinstance(p, DTensor) and all(isinstance(x, Replicate) for x in p.placements)
        else p
        for n, p in module._parameters.items()
    }
    bare = copy.copy(module)
    bare.__dict__ = {n: x for n, x in module.__dict__.items() if n != "forward"}
    bare.__dict__ |= {"_parameters": own, **{n: OrderedDict() for n in _HOOKS}}
    return bare
