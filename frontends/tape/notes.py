"""What a front-end keeps with a pass: what its forward has told, and what its running backward has delivered."""

from collections.abc import Set
from dataclasses import dataclass, field

from torch import Tensor

from attrax.core import Directions, Examples, Leaf
from attrax.frontends.model.averaging import Averaging
from attrax.frontends.tape.layout import Packing


@dataclass(eq=False)
class Notes:
    """What is known of a pass beside its calls.

    Attributes:
        mark: Fingerprint of the parameters that it ran with.
        averaging: How its gradients are averaged over processes.
        fresh: Parameters whose whole gradient its backward makes.
        together: Where the rows of each example lie, if several whole rows are one.
        loss: The model's own loss.
        logits: What the model returned beside it; dropped once it was looked at.
        version: How often these had been changed in place when they were returned.
        scale: Gradient that arrived at that loss, which is there as soon as its backward begins.
        outside: Whether a gradient arrived at the logits from outside of the model: the loop has a loss of its own.
        row_weight: What every row counts in a cross entropy that the loop has computed of the logits, and how many do.
        log_probs: Gradient that arrived at the log-probabilities of a fused head, and their mask.
    """

    mark: str = ""
    averaging: Averaging | None = None
    fresh: Set[str] = frozenset()
    together: Packing | None = None
    loss: Tensor | None = None
    logits: Tensor | None = None
    version: int = 0
    scale: Tensor | None = None
    outside: bool = False
    row_weight: tuple[float, int] | None = None
    log_probs: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class Delivered:
    """What the running backward of a pass has delivered.

    Attributes:
        examples: The examples of the pass.
        directions: What to record in place of gradients, as it was when the first leaf arrived.
        leaves: By name, as the capture's transform has made them.
        bad: By name of the leaf, Boolean [B]: examples whose gradient is not finite.
    """

    examples: Examples
    directions: Directions | None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    bad: dict[str, Tensor] = field(default_factory=dict)
