"""Where the examples lie in the calls of a model's layers, and what is to be made of each call.

Shapes tell for most layers.  Where they leave a doubt the model is asked: it runs twice more without gradients, in eval
mode, on its inputs as they are and on the same examples in another order.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attrax.frontends.coverage import Layer
from attrax.frontends.forms import Form, packs, recompute_form, recompute_tensors, rule_form, rule_inputs
from attrax.frontends.layout import (
    EXAMPLES,
    FLAT,
    POSITIONS,
    SHARED,
    Layout,
    compared,
    doubtless,
    is_plain,
    moved,
    shared,
    unmoved,
)
from attrax.frontends.parameters import own_buffers
from attrax.frontends.passes import Pass, flatten, has_axis
from attrax.frontends.picked import in_order
from attrax.frontends.recompute import Moment, slow_attention


class LayoutError(RuntimeError):
    """Examples cannot be told apart in the calls of a layer, or of several.

    Attributes:
        parameters: Canonical names of the layers' parameters.
    """

    def __init__(self, parameters: Collection[str], message: str) -> None:
        super().__init__(message)
        self.parameters = set(parameters)


class Placing:
    """Places the examples of layer calls.

    Args:
        model: The model.
        known: Layouts found so far, by layer; filled as the model is asked.
        aside: Context in which the model runs without being listened to.
    """

    def __init__(
        self,
        model: nn.Module,
        known: dict[str, Layout],
        aside: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.known = known
        self._model, self._aside = model, aside
        self._guessed: dict[str, Layout] = {}
        self._noted: list[tuple[str, Tensor]] | None = None
        self._spread: tuple[str, Callable[[Tensor], Tensor]] | None = None
        self._plain: dict[str, set[str]] = {}
        self._lost: set[str] = set()

    @property
    def asking(self) -> bool:
        """Whether the model is being asked; calls are then answers, and nothing else."""
        return self._noted is not None

    def answer(self, layer: Layer, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call of a model that is being asked.

        Returns:
            The output for the model to go on with.
        """
        assert self._noted is not None
        self._noted += _placeable(layer, args, kwargs, output)
        spread = self._spread is not None and self._spread[0] == layer.key and layer.rule is not None
        return self._spread[1](output) if spread and self._spread is not None else output

    def check(self, run: Pass) -> None:
        """Ask the model, if it was not asked yet, whether layers with an axis as long as the batch have examples there.

        Raises:
            LayoutError: If rows do not move with the examples.
        """
        self._ask(run)
        wrong = sorted(self._plain.keys() & self._lost)
        if wrong:
            raise LayoutError(
                set().union(*(self._plain[path] for path in wrong)),
                f"capture: the rows of layers {wrong[:3]} do not move with the rows of the model's inputs: these are "
                "not the examples (sequence-first inputs?), or examples depend on each other. Give the examples "
                "first, exclude these layers, or pass verify=False if you know better.",
            )

    def learn(
        self, layer: Layer, run: Pass, args: Sequence[Any], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Ask the model about a call whose backward will run it again, when the model can no longer be asked."""
        if layer.rule is None:
            self._layouts(layer, run, recompute_tensors(args, kwargs, output))
            return
        x = rule_inputs(layer.rule, layer.module, args, kwargs)[0]
        if x is not None and isinstance(output, Tensor):
            self._layout(layer, run, output if layer.rule.inputs else x, output)

    def form(
        self,
        layer: Layer,
        run: Pass,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: Any,
        names: tuple[str, ...],
        moment: Moment | None,
    ) -> Form:
        """The form of a call of a layer.

        Args:
            layer: The layer.
            run: The pass it belongs to.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
            output: What it returned.
            names: Attribute paths of the parameters to capture.
            moment: The state around the call of a module without rule.

        Raises:
            LayoutError: If its examples cannot be told apart.
            RuntimeError: If the call is not one that the layer's rule can read.
        """
        module, rule = layer.module, layer.rule
        if rule is None:
            assert moment is not None
            layouts = self._layouts(layer, run, recompute_tensors(args, kwargs, output))
            form = recompute_form(module, names, args, kwargs, output, moment, layouts, run.rows or 0)
            return self._placed(layer, run, form, output)
        inputs = rule_inputs(rule, module, args, kwargs)
        if inputs[0] is None or not isinstance(output, Tensor):
            raise RuntimeError(
                f"capture: layer '{layer.path}' ({type(module).__name__}) was called with "
                f"{type(args[0] if args else None).__name__} and returned {type(output).__name__}; its rule "
                f"'{rule.name}' needs tensors in and one out. Exclude it or pass rules= with a rule for it."
            )
        run.rows = inputs[0].shape[0] if run.rows is None and inputs[0].ndim else run.rows
        layout = self._layout(layer, run, output if rule.inputs else inputs[0], output)
        if layout is None or not packs(rule, layout, inputs[0], run):
            raise LayoutError(layer.names.values(), _unclear(layer, inputs[0], run))
        return rule_form(rule, module, inputs, output, layout, run)

    def _placed(self, layer: Layer, run: Pass, form: Form | None, output: Any) -> Form:
        if form is None:
            shapes = [tuple(x.shape) for x in flatten((output,)).values() if isinstance(x, Tensor)]
            raise LayoutError(
                layer.names.values(),
                f"capture: layer '{layer.path}' ({type(layer.module).__name__}) has no rule and returned tensors of "
                f"shapes {shapes} for {run.rows} examples, none of whose axes is the example axis. Exclude it, give "
                "its output a batch axis, or recompute the module around it (recompute=).",
            )
        return form

    def _layout(self, layer: Layer, run: Pass, x: Tensor, output: Tensor) -> Layout | None:
        """Where the examples lie in a call; the model is asked where shapes leave a doubt."""
        B = run.rows
        vector = x.ndim == 1 and x.is_floating_point()
        if B is None or vector or not x.ndim or not output.ndim:
            return None
        if is_plain(x, output, B) and not (x.ndim == 1 and has_axis(run, B)):
            self._plain |= {layer.path: set(layer.names.values())} if B > 1 else {}
            return EXAMPLES if in_order(x, B) else None
        if B > 1 and layer.path not in self.known:
            self._ask(run)
        layout = moved(x, x, 1) if B == 1 else self._found(layer.path)
        features = layout is POSITIONS and x.is_floating_point() and x.ndim == 2
        if features or layout not in (None, SHARED) and not in_order(x, B):
            return None
        if layout is SHARED and not (x.shape[0] == output.shape[0] == 1 or x.ndim == 1 and output.ndim == 2):
            return None
        return layout if layout is not None and layout.fits(x.shape, B) else None

    def _layouts(self, layer: Layer, run: Pass, tensors: Sequence[Tensor]) -> list[Layout | None]:
        """Where the examples lie in all tensors of a module that will be recomputed: the model is always asked."""
        keys = [_numbered(layer, i) for i in range(len(tensors))]
        if run.rows is None or run.segments is not None:
            return [None for _ in tensors]
        if run.rows == 1:
            return [FLAT if x.ndim else SHARED for x in tensors]
        if any(key not in self.known for key in keys):
            self._ask(run)
        return [self._found(key) for key in keys]

    def _found(self, key: str) -> Layout | None:
        return self.known.get(key) or self._guessed.get(key)

    def _ask(self, run: Pass) -> None:
        """Run the model as it is and on reordered examples, to learn the layouts of all layers."""
        again, run.again = run.again, None
        if again is None or run.rows is None:
            return
        before, after = self._run(again, False), self._run(again, True)
        found = compared(before, after, run.rows)
        common = {key for key, layout in found.items() if layout is SHARED}
        found |= {key: None for key in common if not self._spreads(again, key, before, found, run.rows)}
        sure = doubtless(before, after, run.rows)
        placed = {key: layout for key, layout in found.items() if layout is not None}
        self.known.update({key: layout for key, layout in placed.items() if key in sure})
        self._guessed = placed
        self._lost |= {key for key, layout in found.items() if layout is None} | common

    def _run(self, again: Callable[[bool], object], reorder: bool) -> list[tuple[str, Tensor]]:
        """What the layers of the model see, and what it returns."""
        self._noted = []
        try:
            with self._aside(), evaluated(self._model):
                output = again(reorder)
            made = [x for x in flatten((output,)).values() if isinstance(x, Tensor)]
            return [*self._noted, *((f"output {i}", x) for i, x in enumerate(made))]
        finally:
            self._noted = None

    def _spreads(
        self,
        again: Callable[[bool], object],
        key: str,
        before: Sequence[tuple[str, Tensor]],
        found: Mapping[str, Layout | None],
        B: int,
    ) -> bool:
        """Whether the model is the same with one output of a shared layer for each example, and keeps them apart."""
        if any(key == f"output {i}" for i in range(len(before))) or " (recomputed) " in key:
            return True
        first = torch.arange(B) == 0
        for changed in (torch.zeros(B, dtype=torch.bool), first, ~first):
            self._spread = key, partial(_perturbed, B=B, examples=changed)
            try:
                now = self._run(again, False)
            except (RuntimeError, ValueError, IndexError, TypeError):
                return False
            finally:
                self._spread = None
            if not unmoved(before, now, found, B, ~changed):
                return False
        return True


def _numbered(layer: Layer, index: int) -> str:
    return f"{layer.key} {index}"


def _placeable(
    layer: Layer, args: Sequence[Any], kwargs: dict[str, Any], output: Any
) -> list[tuple[str, Tensor]]:
    """The tensors of a call by which the model tells where its examples lie."""
    if layer.rule is not None:
        first = rule_inputs(layer.rule, layer.module, args, kwargs)[0]
        return [] if first is None else [(layer.path, first.detach())]
    tensors = recompute_tensors(args, kwargs, output)
    return [(_numbered(layer, i), x.detach()) for i, x in enumerate(tensors)]


def _perturbed(output: Tensor, *, B: int, examples: Tensor) -> Tensor:
    """What all examples share, once for each, and something else for some of them."""
    each = shared(output, B)
    change = torch.randn_like(each) * output.abs().mean()
    return each + change * examples.to(each).reshape(-1, *[1] * (each.ndim - 1))


def _unclear(layer: Layer, x: Tensor, run: Pass) -> str:
    return (
        f"capture: layer '{layer.path}' saw an input of shape {tuple(x.shape)} in a batch of {run.rows} examples, and "
        "its rows do not move with the examples, so these cannot be told apart. Give it a batch axis (positions as "
        "[1, T]), exclude the layer, or recompute the module around it (recompute=)."
    )


@contextlib.contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A model in eval mode, with the random state set aside and nothing compiled, inside the context."""
    training = [m for m in model.modules() if m.training]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with (
        torch.random.fork_rng(devices=devices),
        torch.compiler.set_stance("force_eager"),
        slow_attention(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            for module in training:
                module.training = False
            with own_buffers(model):
                yield
        finally:
            for module in training:
                module.training = True
