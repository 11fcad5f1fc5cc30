"""Arguments of `capture` that cannot be meant, refused before anything is recorded."""

from collections.abc import Sequence
from typing import cast

from attrax.frontends.runs.trajectory import Recorder
from attrax.frontends.storage.sink import Sink


def check_functions(trajectory: object, **options: object) -> None:
    """Refuse what is no list of functions, or no recorder.

    Raises:
        TypeError: Naming the argument.
    """
    for name, given in options.items():
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise TypeError(f"capture: {name}: got {given!r}; expected a list of functions.")
        for x in cast("Sequence[object]", given):
            if not callable(x):
                hint = {"sinks": "attrax.store(path)", "transform": "attrax.projected(attrax.Projection(32))"}
                such = f", such as {hint[name]}" if name in hint else ""
                raise TypeError(f"capture: {name}: {x!r} is no function{such}.")
    if not isinstance(trajectory, Recorder | None):
        raise TypeError(f"capture: trajectory: got {trajectory!r}; expected attrax.record({trajectory!r}).")


def check_steps(stores: Sequence[Sink], trajectory: Recorder | None) -> None:
    """A capture counts steps from 0: what goes on says where, and all of it at one step.

    Raises:
        ValueError: If it does not.
    """
    for sink in stores:
        if sink.continues and not sink.says_where:
            raise ValueError(
                f"capture: run '{sink.run}' of '{sink.path}' has gradients already, which those of the same example "
                "and step replace. Pass store(steps_done=n) to go on from a checkpoint, 0 to train from the beginning "
                "again, or another run=."
            )
    done = {x.steps_done for x in (*stores, trajectory) if x is not None}
    if trajectory is not None and len(done) > 1:
        raise ValueError(
            f"capture: the store and the trajectory go on from different steps, {sorted(done)}. Pass the same "
            "steps_done= to store and record."
        )
