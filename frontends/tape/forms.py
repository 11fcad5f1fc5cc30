"""From one call of a layer to its leaves: which tensors are kept, and what is made of them in backward."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from attrax.core import Leaf
from attrax.core.factorization import Rule
from attrax.frontends.model.parameters import own_buffers
from attrax.frontends.tape.layout import EXAMPLES, SHARED, Layout, fold, regrouped_rows, shared
from attrax.frontends.tape.passes import Extent, bind
from attrax.frontends.tape.recompute import Moment, Recorded, tapped, without_tensors

Leaves = Callable[[Sequence[Tensor], Sequence[Tensor]], Mapping[str, Leaf]]


@dataclass(frozen=True, eq=False)
class Form:
    """What a call's tap keeps and does.

    Attributes:
        saved: Tensors to keep until backward.
        outputs: Outputs to tap.
        leaves: ``(saved, output gradients) -> leaves by attribute``, of the examples of the pass.
    """

    saved: list[Tensor]
    outputs: list[Tensor]
    leaves: Leaves


def rule_inputs(
    rule: Rule, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, ...]:
    """The tensors of a call that its rule takes; None for arguments left out."""
    if rule.inputs:
        found = bind(module, args, kwargs)
        return tuple(x if isinstance(x := found.get(name), Tensor) else None for name in rule.inputs)
    first = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    return (first if isinstance(first, Tensor) else None,)


def rule_form(
    rule: Rule,
    module: nn.Module,
    inputs: Sequence[Tensor | None],
    output: Tensor,
    layout: Layout,
    extent: Extent,
) -> Form:
    """The form of a call of a layer with a rule."""
    rows = extent.rows
    own = [None if x is None else x.detach() for x in inputs]
    if layout is SHARED:
        own = [None if x is None else shared(x, rows) for x in own]
        output = shared(output, rows)
    kept = tuple(x is not None for x in own)
    lead = own[0].shape[0] if own[0] is not None else output.shape[0]
    make = partial(_ruled, rule, module, layout, extent, kept, lead)
    return Form([x for x in own if x is not None], [output], make)


def _ruled(
    rule: Rule,
    module: nn.Module,
    layout: Layout,
    extent: Extent,
    kept: tuple[bool, ...],
    lead: int,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> dict[str, Leaf]:
    following = iter(saved)
    units = [_units(next(following), layout, extent, lead, rule) if given else None for given in kept]
    g = _units(grads[0], layout, extent, lead, rule)
    x: Any = tuple(units) if rule.inputs else units[0]
    with own_buffers(module) if hasattr(module, "parametrizations") else contextlib.nullcontext():
        leaves = rule.factorize(module, x, g)
    return {name: fold(leaf, extent.examples) for name, leaf in leaves.items()}


def _units(x: Tensor, layout: Layout, extent: Extent, lead: int, rule: Rule) -> Tensor:
    """Examples first; further axes that examples were flattened with become rows where the rule takes rows."""
    rows = extent.rows
    if layout not in (EXAMPLES, SHARED) and x.shape[0] == lead:
        x = layout.units(x, rows)
        x = x.unflatten(0, (rows, -1)) if rule.rows and x.shape[0] != rows else x
    return x if extent.packed is None else regrouped_rows(x, extent.packed)


def packs(rule: Rule, layout: Layout, x: Tensor, extent: Extent) -> bool:
    """Whether the positions of packed sequences can be told apart in a layer's tensors."""
    if extent.packed is None:
        return True
    T = extent.packed.length
    axes = {EXAMPLES: x.shape[1:2], SHARED: x.shape[-1:] if not x.is_floating_point() else x.shape[-2:-1]}
    return rule.rows and (layout not in axes or tuple(axes[layout]) == (T,))


def recompute_form(
    module: nn.Module,
    names: tuple[str, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Any,
    moment: Moment,
    layouts: Sequence[Layout | None],
    rows: int,
) -> Form | None:
    """The form of a call of a module without a rule; None if its inputs or outputs have no example axis.

    Args:
        module: The module.
        names: Its parameters to differentiate, by attribute path.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
        output: What it returned.
        moment: The state around the call.
        layouts: Layout of every input tensor, then of every output tensor that carries gradients.
        rows: Number of examples B.
    """
    outputs = tapped(output)
    arguments, tensors = without_tensors(stateless(args, kwargs))
    known = tuple(layout for layout in layouts if layout is not None)
    taken, made = known[: len(tensors)], known[len(tensors) :]
    if len(known) < len(layouts) or not made or SHARED in made or all(x is SHARED for x in taken):
        return None
    recorded = Recorded(module, names, arguments, moment, known, rows)
    return Form([x.detach() for x in tensors], outputs, recorded.leaves)


def recompute_tensors(args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> list[Tensor]:
    """The tensors of a call whose examples have to be placed: all inputs, then the outputs that carry gradients."""
    return [*without_tensors(stateless(args, kwargs))[1], *tapped(output)]


def stateless(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without caches for generation, which the call has filled: training passes them empty."""
    kept = [None if _is_cache(x) else x for x in (*args, *kwargs.values())]
    return tuple(kept[: len(args)]), dict(zip(kwargs, kept[len(args) :], strict=True))


def cached(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is a step of generation: it adds to a cache, so it cannot be made again."""
    return any(_is_cache(x) for x in (*args, *kwargs.values()))


def _is_cache(x: object) -> bool:
    return type(x).__name__.endswith("Cache")
