"""Trainers: how each weighs its examples, which rows make an example, and callbacks that capture while one trains.

    with attrax.capture(trainer.model, **attrax.trainer_options(trainer), sinks=[...]):
        trainer.train()

Trainers are told apart by the names of their classes, so that none of them is imported here before it is used.
"""

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attrax.core import Examples
from attrax.frontends.loop.capture import capture
from attrax.frontends.loop.events import BackwardEvent
from attrax.frontends.loop.normalization import Declared, Weights, declared_weights
from attrax.frontends.loop.owners import documents, stacked
from attrax.frontends.storage.sink import Sink as Files
from attrax.frontends.tape.notes import Notes

Options = dict[str, Any]


def trainer_options(trainer: object, loss: Declared | None = None) -> Options:
    """Options of `capture` for a trainer: `examples`, `loss`, and `scaler` where it matters.

    Args:
        trainer: A trainer of transformers, TRL (SFT, DPO, GRPO), Lightning or OLMo-core, or accelerate's `Accelerator`.
        loss: How a loss that is computed by the caller's own code weighs examples, before the trainer divides it by
            the steps it accumulates: a Lightning module's, ``compute_loss_func`` of a Hugging Face trainer, or what
            a loop gives to ``accelerator.backward``.

    Returns:
        Keyword arguments; none where the model's own loss tells all.

    Raises:
        ValueError: If it is no trainer known here.

    >>> class Trainer:
    ...     "One of transformers"
    >>> Trainer.__module__ = "transformers.trainer"
    >>> trainer_options(Trainer())
    {}
    """
    names = {f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(trainer).__mro__}
    if "trl.DPOTrainer" in names:
        return {"examples": stacked(2), "loss": partial(_dpo, trainer)}
    if "trl.GRPOTrainer" in names:
        return {"loss": partial(_grpo, trainer)}
    if "trl.SFTTrainer" in names and loss is None:
        return _sft(trainer)
    if "transformers.Trainer" in names:
        return {} if loss is None else {"loss": partial(_divided, loss, partial(_accumulated, trainer))}
    if names & {"lightning.Trainer", "pytorch_lightning.Trainer"}:
        return {} if loss is None else {"loss": partial(_divided, loss, partial(_lightning_divisor, trainer))}
    if "accelerate.Accelerator" in names:
        return (
            {} if loss is None else {"loss": partial(_divided, loss, partial(_accelerator_divisor, trainer))}
        )
    if "olmo_core.Trainer" in names:
        return {"loss": olmo_loss}
    raise ValueError(
        f"trainer_options: {type(trainer).__module__}.{type(trainer).__name__} is not known; expected a trainer of "
        "transformers, TRL (SFT, DPO, GRPO), Lightning or OLMo-core, or an Accelerator. Pass loss= and examples= "
        "to capture yourself."
    )


def _scale(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())


def _accumulated(trainer: Any) -> float:
    """What a Hugging Face trainer divides a loss of the caller's by, over what its scaler multiplies it with."""
    whole = getattr(trainer, "loss_is_scaled_for_ga", None)
    if whole is None:
        whole = trainer.compute_loss_func is not None or trainer.model_accepts_loss_kwargs
    return (1 if whole else trainer.current_gradient_accumulation_steps) / _scale(trainer.accelerator.scaler)


def _lightning_divisor(trainer: Any) -> float:
    return trainer.accumulate_grad_batches / _scale(trainer.scaler)


def _accelerator_divisor(accelerator: Any) -> float:
    return accelerator.gradient_accumulation_steps / _scale(accelerator.scaler)


def _divided(
    loss: Declared, divisor: Callable[[], float], inputs: Mapping[str, Any], examples: int
) -> Weights:
    c, n = declared_weights(loss, Notes(), inputs, examples, "causal")
    return None if c is None else c / divisor(), n


def _equal(c: float, examples: int) -> Tensor:
    return torch.full((examples,), c, dtype=torch.float64)


def _sft(trainer: Any) -> Options:
    """Tokens weigh alike, and the weight is read off the gradient of their log-probabilities."""
    plain = (
        trainer.args.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
    )
    return ({"loss": "token_mean"} if plain else {}) | (
        {"examples": documents} if trainer.padding_free else {}
    )


def _dpo(trainer: Any, inputs: Mapping[str, Any], examples: int) -> Weights:
    """The loss is the mean over pairs; each is one loss term."""
    return _equal(1 / (examples * _accumulated(trainer)), examples), torch.ones(examples, dtype=torch.long)


def _sampled(trainer: Any) -> Mapping[str, Any]:
    """The batch of sampled completions in the running step of a GRPO trainer."""
    return trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]


def _grpo(trainer: Any, inputs: Mapping[str, Any], examples: int) -> Weights:
    """An example's loss is the sum over the tokens of its completion; see `GRPOConfig.loss_type` for the weights."""
    batch, kind = _sampled(trainer), trainer.loss_type
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    n = mask.sum(1).long().cpu()
    steps = trainer.current_gradient_accumulation_steps
    if kind in ("grpo", "sapo"):
        c = 1 / (examples * steps * n.double().clamp_min(1))
    elif kind == "bnpo":
        c = _equal(1 / (max(1, int(n.sum())) * steps), examples)
    elif kind == "dr_grpo":
        c = _equal(1 / (examples * trainer.max_completion_length * steps), examples)
    elif kind in ("cispo", "dapo", "vespo"):
        total = float(batch["num_items_in_batch"].clamp(min=1)) / trainer.accelerator.num_processes
        c = _equal(trainer.args.steps_per_generation / (total * steps), examples)
    else:
        c = _equal(1 / (examples * steps), examples)
    return c * _scale(trainer.accelerator.scaler), n


def olmo_loss(inputs: Mapping[str, Any], examples: int) -> Weights:
    """OLMo-core divides the summed loss of a micro-batch by the tokens of the whole batch, which the model is given.

    >>> olmo_loss({"labels": torch.tensor([[5, 6], [7, -100]]), "loss_div_factor": torch.tensor(8)}, 2)
    (tensor([0.1250, 0.1250], dtype=torch.float64), tensor([2, 1]))
    """
    counts = (inputs["labels"] != inputs.get("ignore_index", -100)).sum(1).cpu()
    return _equal(1 / float(inputs["loss_div_factor"]), examples), counts


class Samples:
    """Columns of a store for what a GRPO trainer has sampled: advantages, rewards, prompts and completions.

        samples = Samples(trainer)
        sinks = [attrax.store("run/", columns=samples.columns)]
        attrax.capture(model, **attrax.trainer_options(trainer), after_backward=[samples], sinks=sinks)

    They are noted when a backward is over, and kept until its block is stored.

    Attributes:
        waiting: By step, block and id, the columns of the examples that are not stored yet.
    """

    def __init__(self, trainer: object) -> None:
        self._trainer = weakref.ref(trainer)
        self.waiting: dict[tuple[int, int, str], dict[str, Any]] = {}

    def __call__(self, event: BackwardEvent) -> None:
        """Note the examples of a backward."""
        trainer = self._trainer()
        if trainer is None:
            return
        batch, (block,) = _sampled(trainer), event.blocks
        for i, name in enumerate(block.examples.ids):
            key = (block.examples.step, block.examples.micro, name)
            self.waiting[key] = self._row(trainer, batch, i)

    def columns(self, examples: Examples) -> dict[str, Any]:
        """Columns of a block; ``reward:<name>`` of every reward function, tokens as text of their numbers.

        Raises:
            KeyError: If the block was not noted: `after_backward` lacks this object.
        """
        keys = [(examples.step, examples.micro, name) for name in examples.ids]
        if missing := [key for key in keys if key not in self.waiting]:
            raise KeyError(
                f"Samples: nothing is known of example {missing[0][2]!r} at step {examples.step}. Pass the object "
                "itself in after_backward= and its columns to one store."
            )
        rows = [self.waiting[key] for key in keys]
        for key in keys:
            self.waiting.pop(key, None)
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def _row(self, trainer: Any, batch: Mapping[str, Any], i: int) -> dict[str, Any]:
        tokens = {
            f"{part}_ids": batch[f"{part}_ids"][i][batch[f"{part}_mask"][i].bool()].tolist()
            for part in ("prompt", "completion")
        }
        advantage = float(batch["advantages"][i])
        texts = {name: " ".join(map(str, ids)) for name, ids in tokens.items()}
        return {"advantage": advantage, **_rewards(trainer, tokens["completion_ids"], advantage), **texts}


def _rewards(trainer: Any, completion_ids: list[int], advantage: float) -> dict[str, float]:
    """What the reward functions gave a completion, from the trainer's log of the present samples; NaN if not there."""
    text = trainer.processing_class.decode(completion_ids, skip_special_tokens=True)
    logs = trainer._logs
    for at, (said, worth) in enumerate(zip(logs["completion"], logs["advantages"], strict=False)):
        said = said if isinstance(said, str) else said[-1]["content"]
        if said == text and abs(worth - advantage) <= 1e-6 * max(1.0, abs(advantage)):
            return {f"reward:{name}": float(values[at]) for name, values in logs["rewards"].items()}
    return {f"reward:{name}": math.nan for name in logs["rewards"]}


class Opened:
    """A capture that callbacks open and close; closed as well when it is no longer used, and at the end of Python."""

    def __init__(self, options: Options) -> None:
        self.running, self._used = False, False
        self._options, self._stack = options, contextlib.ExitStack()
        weakref.finalize(self, self._stack.close)

    def open(self, model: nn.Module, known: Options | None = None) -> None:
        """Open a capture, after closing the one of a training that did not end.

        Raises:
            RuntimeError: If a sink was closed by the capture before.
        """
        self.close()
        if self._used and any(callable(getattr(x, "close", None)) for x in self._options.get("sinks", ())):
            raise RuntimeError(
                "trainer_callback: its store was closed when the training before ended. Make a callback for each "
                "train(), with a store opened anew: store(path, steps_done=...) goes on in the same directory."
            )
        self._used = True
        self._stack.enter_context(capture(model, **{**(known or {}), **self._options}))
        self.running = True

    def warn_of_resumed(self, done: int) -> None:
        """Training goes on from a checkpoint after some steps; sinks that count from 0 are told of."""
        files = [x for x in self._options.get("sinks", ()) if isinstance(x, Files)]
        recorder = self._options.get("trajectory")
        counts = {x.steps_done for x in [*files, *([] if recorder is None else [recorder])]}
        if wrong := counts - {done}:
            warnings.warn(
                f"trainer_callback: training begins at step {done} of its checkpoint, and what is stored counts from "
                f"{min(wrong)}. Pass steps_done={done} to store and record.",
                RuntimeWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Close it, if it is open."""
        self.running = False
        self._stack.close()


def trainer_callback(framework: Literal["transformers", "lightning", "olmo_core"], **options: Any) -> Any:
    """A callback that captures for as long as a trainer trains.

    Lightning and OLMo-core report exceptions, and the capture is closed then; Hugging Face's trainer does not: there it
    is closed by ``callback.close()``, when training starts again, or when Python ends.

    Args:
        framework: Whose callback to make.  It is imported here and nowhere else.
        options: Those of `capture`.  `loss` and `examples` default to `trainer_options` for OLMo-core; with
            transformers pass ``**trainer_options(trainer)`` to the callback and ``trainer.add_callback(callback)``.

    Returns:
        An instance of the framework's callback class, with a method `close`.

    Raises:
        ValueError: If the framework is none of these.
        ImportError: If it is not installed.
    """
    makers = {"transformers": _transformers, "lightning": _lightning, "olmo_core": _olmo}
    if framework not in makers:
        raise ValueError(f"trainer_callback: got {framework!r}; expected one of {sorted(makers)}.")
    try:
        return makers[framework](Opened(options))
    except ImportError as error:
        package = {"olmo_core": "ai2-olmo-core"}.get(framework, framework)
        raise ImportError(
            f"trainer_callback: {framework} cannot be imported ({error}). Install it: pip install {package}"
        ) from error


def _transformers(opened: Opened) -> Any:
    from transformers import TrainerCallback

    class Capturing(TrainerCallback):
        """Opens a capture when training begins."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            opened.warn_of_resumed(state.global_step)
            opened.open(kwargs["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            opened.close()

        def close(self) -> None:
            opened.close()

    return Capturing()


def _lightning(opened: Opened) -> Any:
    from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]

    class Capturing(Callback):
        """Opens a capture when training begins."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            opened.open(pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            opened.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            opened.close()

        def close(self) -> None:
            opened.close()

    return Capturing()


def _olmo(opened: Opened) -> Any:
    from olmo_core.train.callbacks import Callback  # pyright: ignore[reportMissingImports]

    class Capturing(Callback):
        """Opens a capture when training begins."""

        def pre_epoch(self) -> None:  # not before: a mock batch is run before the first epoch
            if not opened.running:
                opened.open(self.trainer.train_module.model, {"loss": olmo_loss})

        def post_train(self) -> None:
            opened.close()

        def on_error(self, exc: BaseException) -> None:
            opened.close()

        def close(self) -> None:
            opened.close()

    return Capturing()
