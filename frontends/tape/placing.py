"""What is to be made of each call of a layer: where its examples lie, and the form its leaves take.

Shapes tell for most layers; where they leave a doubt, the model is asked.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from attrax.frontends.model.coverage import Layer
from attrax.frontends.model.distributed import least
from attrax.frontends.tape.asking import Asking, numbered
from attrax.frontends.tape.forms import Form, packs, recompute_form, recompute_tensors, rule_form, rule_inputs
from attrax.frontends.tape.layout import (
    EXAMPLES,
    FLAT,
    POSITIONS,
    SHARED,
    Layout,
    copied,
    is_plain,
    moved,
    permuted,
)
from attrax.frontends.tape.mixing import coupled, ordered, replaced, unsteady
from attrax.frontends.tape.passes import Pass, Repeat, flatten, has_axis
from attrax.frontends.tape.picked import in_order
from attrax.frontends.tape.recompute import Moment
from attrax.frontends.tape.tensor_parallel import TensorParallel


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
        parallel: The layers that are cut over processes.
    """

    def __init__(
        self,
        model: nn.Module,
        known: dict[str, Layout],
        aside: Callable[[], contextlib.AbstractContextManager[None]],
        parallel: TensorParallel | None = None,
    ) -> None:
        self.asking, self._parallel = Asking(model, known, aside), parallel
        self._plain: dict[str, set[str]] = {}
        self._doubts, self._unasked = True, False

    def ask_together(self, run: Pass) -> None:
        """Ask the model in all processes or in none, before the pass runs: it is not asked later in this pass.

        It is asked at the first pass, and where a process was in doubt since, if all of them have two examples or more.
        """
        again, run.again = run.again, None
        rows, settled = least(run.rows or 0, int(not self._doubts))
        self._unasked = rows < 2 and not settled
        if rows > 1 and not settled:
            run.again, self._doubts = again, False
            self.asking.ask(run)

    def check(self, run: Pass) -> None:
        """Ask the model, if it was not asked yet, whether layers with an axis as long as the batch have examples there.

        A pass that can be repeated is asked as well whether its rows keep apart.

        Raises:
            LayoutError: If rows do not move with the examples, or depend on each other.
        """
        self.asking.ask(run)
        wrong = sorted(self._plain.keys() & self.asking.lost)
        if wrong:
            raise LayoutError(
                set().union(*(self._plain[path] for path in wrong)),
                f"capture: the rows of layers {wrong[:3]} do not move with the rows of the model's inputs: these are "
                "not the examples (sequence-first inputs?), or examples depend on each other. Give the examples "
                "first, exclude these layers, or pass verify=False if you know better." + self.asking.doubt,
            )
        if run.repeat is not None and run.rows is not None:
            self._refuse_mixed(run.repeat, run.rows)

    def _refuse_mixed(self, repeat: Repeat, B: int) -> None:
        def seen(change: Callable[[Any], Any]) -> list[tuple[str, Tensor]]:
            return self.asking.run_once(lambda _: repeat(change), False)

        first = seen(copied)
        layouts, wrong = ordered(first, seen(partial(permuted, B=B)), B)
        wrong |= coupled(first, seen(partial(replaced, B=B)), layouts, B)
        wrong = wrong and wrong - unsteady(first, seen(copied))
        if wrong:
            raise LayoutError(
                (),
                f"capture: {sorted(wrong)[:3]} (layers and outputs of the model) depend on the order of the rows of "
                "the model's inputs, or on several at once: these are not the examples (sequence-first inputs?), or "
                "examples depend on each other. Give the examples first, or pass verify=False if you know better.",
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
            self._layout(layer, run, x, output)

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
        layout = self._layout(layer, run, inputs[0], output)
        if layout is None or not packs(rule, layout, inputs[0], run.extent):
            raise LayoutError(
                layer.names.values(), _unclear(layer, inputs[0], run, self._unasked) + self.asking.doubt
            )
        if self._parallel is not None and layer.path in self._parallel.layers:
            return self._parallel.form(layer.path, rule, module, inputs, output, layout, run.extent)
        return rule_form(rule, module, inputs, output, layout, run.extent)

    def _placed(self, layer: Layer, run: Pass, form: Form | None, output: Any) -> Form:
        if form is None:
            shapes = [tuple(x.shape) for x in flatten((output,)).values() if isinstance(x, Tensor)]
            raise LayoutError(
                layer.names.values(),
                f"capture: layer '{layer.path}' ({type(layer.module).__name__}) has no rule and returned tensors of "
                f"shapes {shapes} for {run.rows} examples, none of whose axes is the example axis. Exclude it, give "
                "its output a batch axis, or recompute the module around it (recompute=)."
                + self.asking.doubt,
            )
        return form

    def _ask(self, run: Pass) -> None:
        self._doubts = True
        self.asking.ask(run)

    def _layout(self, layer: Layer, run: Pass, first: Tensor, output: Tensor) -> Layout | None:
        """Where the examples lie in a call; the model is asked where shapes leave a doubt."""
        B = run.rows
        x = output if layer.rule is not None and layer.rule.inputs else first
        vector = x.ndim == 1 and x.is_floating_point()
        if B is None or vector or not x.ndim or not output.ndim:
            return None
        if is_plain(x, output, B) and not (x.ndim == 1 and has_axis(run, B)):
            self._plain |= {layer.path: set(layer.names.values())} if B > 1 else {}
            return EXAMPLES if in_order(first, B) else None
        if B > 1 and layer.path not in self.asking.known:
            self._ask(run)
        layout = moved(x, x, 1) if B == 1 else self.asking.found(layer.path)
        features = layout is POSITIONS and x.is_floating_point() and x.ndim == 2
        if features or layout not in (None, SHARED) and not in_order(first, B):
            return None
        if layout is SHARED and not (x.shape[0] == output.shape[0] == 1 or x.ndim == 1 and output.ndim == 2):
            return None
        return layout if layout is not None and layout.fits(x.shape, B) else None

    def _layouts(self, layer: Layer, run: Pass, tensors: Sequence[Tensor]) -> list[Layout | None]:
        """Where the examples lie in all tensors of a module that will be recomputed: the model is always asked."""
        keys = [numbered(layer, i) for i in range(len(tensors))]
        if run.rows is None or run.packed is not None:
            return [None for _ in tensors]
        if run.rows == 1:
            return [FLAT if x.ndim else SHARED for x in tensors]
        if any(key not in self.asking.known for key in keys):
            self._ask(run)
        return [self.asking.found(key) for key in keys]


def _unclear(layer: Layer, x: Tensor, run: Pass, unasked: bool) -> str:
    if unasked:
        return (
            f"capture: layer '{layer.path}' saw an input of shape {tuple(x.shape)} in a batch of {run.rows} examples. "
            "The model would tell where they are, but it is sharded and some process has fewer than two examples. "
            "Begin with batches of at least two examples on all processes, or exclude the layer."
        )
    return (
        f"capture: layer '{layer.path}' saw an input of shape {tuple(x.shape)} in a batch of {run.rows} examples, and "
        "its rows do not move with the examples, so these cannot be told apart. Give it a batch axis (positions as "
        "[1, T]), exclude the layer, or recompute the module around it (recompute=)."
    )
