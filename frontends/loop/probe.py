"""Query gradients recorded while a model trains: what TracIn compares a step's training examples with."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from attrax.core import Block, GradTree
from attrax.frontends.loop.capture import Sink
from attrax.frontends.loop.events import StepEvent
from attrax.frontends.model.losses import Loss, causal_lm
from attrax.frontends.sources.live import Live


def probe(
    data: Iterable[Mapping[str, Any]],
    sink: Sink,
    loss: Loss | None = None,
    *,
    when: Callable[[int], bool] = lambda step: True,
) -> Callable[[StepEvent], None]:
    """Callback that records query gradients during training, at the parameters of each step (what TracIn needs).

    Args:
        data: Batches of queries, re-iterable; as for `attrax.live`.
        sink: Where the query blocks go.
        loss: Query loss, ``(model, batch) -> [B]``; `causal_lm` by default.
        when: ``step -> bool``, which steps to record at; all of them by default.

    Returns:
        A callback for `capture`; queries pass through the capture's selection and transform, in eval mode.
    """
    verified: set[str] = set()
    last = -1

    def run(event: StepEvent) -> None:
        nonlocal last
        if event.step == last or not when(event.step):
            return
        last = event.step
        source = Live(
            event.model,
            data,
            loss or causal_lm(),
            event.capture.selection,
            frozenset(c.parameter for c in event.capture.coverage.captured),
            verify=not verified,
            verified=verified,
            holds=event.capture.holds,
        )
        change = event.capture.transform or (lambda _, leaf: leaf)
        with event.capture.paused(), evaluating(event.model):
            for examples, leaves in source.map(lambda name, leaf, _: change(name, leaf)):
                tree = GradTree({n: leaf for n, leaf in leaves.items() if leaf is not None})
                if event.capture.hands_out:
                    sink(Block(tree, replace(examples, step=event.step, learning_rate=event.learning_rate)))

    return run


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the context, each module's own mode after it."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
