"""Where the examples lie in the calls of a model's layers, and what is to be made of each call.

Shapes tell for most layers.  Where they leave a doubt the model is asked: it runs twice more without gradients, in eval
mode, on its inputs as they are and on the same examples in another order.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attrax.frontends.coverage import Layer
from attrax.frontends.forms import Form, packs, recompute_form, recompute_tensors, rule_form, rule_inputs
from attrax.frontends.layout import EXAMPLES, FLAT, SHARED, Layout, compared, is_plain, moved
from attrax.frontends.passes import Pass, flatten, has_axis
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
        self._noted: list[tuple[str, Tensor]] | None = None
        self._plain: set[str] = set()
        self._lost: set[str] = set()

    def noted(self, layer: Layer, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> bool:
        """Whether the model is being asked; the call is then an answer, and nothing else."""
        if self._noted is None:
            return False
        self._noted += _placeable(layer, args, kwargs, output)
        return True

    def check(self, run: Pass) -> None:
        """Ask the model, if it was not asked yet, whether layers with an axis as long as the batch have examples there.

        Raises:
            RuntimeError: If rows do not move with the examples.
        """
        self._ask(run)
        wrong = sorted(self._plain & self._lost)
        if wrong:
            raise RuntimeError(
                f"capture: the rows of layers {wrong[:3]} do not move with the rows of the model's inputs: these are "
                "not the examples (sequence-first inputs?), or examples depend on each other. Give the examples "
                "first, exclude these layers, or pass verify=False if you know better."
            )

    def form(
        self,
        layer: Layer,
        run: Pass,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: Any,
        names: tuple[str, ...],
        random: Tensor | None,
    ) -> Form:
        """The form of a call of a layer.

        Args:
            layer: The layer.
            run: The pass it belongs to.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
            output: What it returned.
            names: Attribute paths of the parameters to capture.
            random: State of random numbers before the call, if it drew any.

        Raises:
            LayoutError: If its examples cannot be told apart.
            RuntimeError: If the call is not one that the layer's rule can read.
        """
        module, rule = layer.module, layer.rule
        if rule is None:
            layouts = self._layouts(layer, run, recompute_tensors(args, kwargs, output))
            moment = Moment.of(module, random)
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
            self._plain |= {layer.path} if B > 1 else set()
            return EXAMPLES
        if x.shape[0] == output.shape[0] == 1 and B not in x.shape:
            return SHARED
        if B > 1 and layer.path not in self.known:
            self._ask(run)
        layout = moved(x, x, 1) if B == 1 else self.known.get(layer.path)
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
        return [self.known.get(key) for key in keys]

    def _ask(self, run: Pass) -> None:
        """Run the model as it is and on reordered examples, to learn the layouts of all layers."""
        again, run.again = run.again, None
        if again is None or run.rows is None:
            return
        seen: list[list[tuple[str, Tensor]]] = []
        try:
            for reorder in (False, True):
                self._noted = []
                with self._aside(), evaluated(self._model), torch.no_grad():
                    again(reorder)
                seen.append(self._noted)
        finally:
            self._noted = None
        found = compared(seen[0], seen[1], run.rows)
        self.known.update({key: layout for key, layout in found.items() if layout is not None})
        self._lost |= {key for key, layout in found.items() if layout is None or layout is SHARED}


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
            yield
        finally:
            for module in training:
                module.training = True
