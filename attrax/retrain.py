"""Effects of removals by training again, literally: what `attrax evaluate` holds scores against.

A folder gets `retrained.json` (losses of the queries after every finished training), `model` (trained on everything),
`effects.parquet` (``f_q(trained without) - f_q(trained)``) and `precision.json` (how far these can be trusted).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attrax.config import Config
from attrax.core import Scores
from attrax.evaluate import finite
from attrax.frontends import Recipe, causal_lm, decay_groups, query_losses, train, write_scores
from attrax.frontends.data.examples import Encoded, batches
from attrax.frontends.model.rows import Batch, pick
from attrax.methods import above_floor, linearity
from attrax.pipeline import Fed, Inputs, Track, device_of, load

PARTS, PARTIAL = (0.5, 0.1), 3


@dataclass(frozen=True, slots=True)
class Training:
    """AdamW with linear warm-up and decay on the mean loss over a step's tokens, without dropout."""

    lr: float
    batch_size: int = 8
    epochs: int = 1
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None


def retrain(config: Config, training: Training, removals: int, track: Track) -> dict[str, Any]:
    """Train with everything, then without one example after another; finished trainings are not repeated.

    Returns:
        What precision.json holds: median size of effects and of rounding, and for examples that lost only a part of
        their weight how far effects are from proportional (0 = proportional).

    Raises:
        ValueError: If a number makes no sense, training diverges, or the folder's trainings had other settings.
    """
    if min(training.lr, training.batch_size, training.epochs) <= 0 or not 0 <= training.warmup <= 1:
        raise ValueError(f"retrain: got {training}; expected lr, batch_size, epochs > 0, warmup in [0, 1].")
    inputs, out = load(config), Path(config.out)
    if not 0 < removals <= len(inputs.train) or inputs.query is None:
        raise ValueError(f"retrain: got {removals} removals; expected 1 to {len(inputs.train)}, and queries.")
    drawn = torch.randperm(len(inputs.train), generator=torch.Generator().manual_seed(config.seed))
    gone = [inputs.train.ids[i] for i in drawn[:removals]]
    recipe, queries = _recipe(config, training, inputs), _batches(config, inputs, inputs.query)
    made = {"seed": config.seed, "dtype": config.dtype, "tokens": config.tokens, **inputs.recorded.inputs}
    settings = asdict(training) | made
    losses = _finished(out / "retrained.json", settings)
    runs = {"all": ("", 0.0), "permuted": ("", 0.0)}
    runs |= {f"{h} of {name}": (name, h) for name in gone[:PARTIAL] for h in PARTS}
    runs |= {f"1 of {name}": (name, 1.0) for name in gone}
    todo = [run for run in runs if run not in losses]
    advance = track("retraining", len(todo) * training.epochs * inputs.train.size)
    for run in todo:
        name, h = runs[run]
        used = _permuted(recipe) if run == "permuted" else recipe
        trained: Any = train(used, lambda example, step, name=name, h=h: 1.0 - h * (example == name))
        losses[run] = query_losses(trained, queries, recipe.loss).tolist()
        if not all(map(math.isfinite, losses[run])):
            raise ValueError(
                f"retrain: training diverged (run '{run}'). Lower lr, or bound gradients (clip)."
            )
        if run == "all":
            trained.save_pretrained(out / "model")
            inputs.tokenizer.save_pretrained(out / "model")
        _write(out / "retrained.json", {"settings": settings, "losses": losses})
        advance(training.epochs * inputs.train.size)
    asked = tuple(name for batch in queries for name in batch["example_ids"])
    effects, precision = _summary(losses, gone, asked)
    write_scores(effects.query(*inputs.query.ids), out / "effects.parquet", overwrite=True)
    _write(out / "precision.json", precision)
    return precision


def _finished(path: Path, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Losses of the trainings that an earlier call finished."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"losses": {}}
    other = [k for k, value in settings.items() if before.get("settings", settings).get(k) != value]
    if other:
        raise ValueError(f"retrain: {path} has another {', '.join(other)}. Choose another out, or delete it.")
    return before["losses"]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    part.replace(path)


def _batches(config: Config, inputs: Inputs, data: Encoded) -> list[Batch]:
    formed = batches(data, tokens=config.tokens, pad_id=inputs.tokenizer.pad_token_id or 0)
    return list(Fed(formed, device_of(config), lambda count: None))


def _recipe(config: Config, training: Training, inputs: Inputs) -> Recipe:
    from transformers import get_linear_schedule_with_warmup

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        both = zip(decay_groups(model), (training.weight_decay, 0.0), strict=True)
        groups = [{"params": [named[n] for n in names], "weight_decay": decay} for names, decay in both]
        return torch.optim.AdamW(groups, lr=training.lr)

    gen, N = torch.Generator().manual_seed(config.seed + 1), len(inputs.train)
    orders = [torch.randperm(N, generator=gen) for _ in range(training.epochs)]
    steps = [[inputs.train.ids[i] for i in rows] for o in orders for rows in o.split(training.batch_size)]
    data = {k: _batches(config, inputs, inputs.train.only(ids)) for k, ids in enumerate(steps)}
    warm = math.ceil(training.warmup * len(steps))
    schedule = partial(get_linear_schedule_with_warmup, num_warmup_steps=warm, num_training_steps=len(steps))
    recipe = Recipe(inputs.model, data, causal_lm(), optimizer, "token_mean", scheduler=schedule)
    return replace(recipe, max_norm=training.clip, seed=config.seed)


def _permuted(recipe: Recipe) -> Recipe:
    """The same run with the rows of its batches in another order: it differs by rounding alone."""
    turned = {
        step: [pick(batch, torch.arange(len(batch["example_ids"])).flip(0)) for batch in given]
        for step, given in recipe.batches.items()
    }
    return replace(recipe, batches=turned)


def _summary(
    losses: dict[str, list[float]], gone: Sequence[str], queries: tuple[str, ...]
) -> tuple[Scores, dict[str, Any]]:
    table = {run: torch.tensor(row, dtype=torch.float64) for run, row in losses.items()}

    def changes(runs: dict[str, str]) -> Scores:
        values = torch.stack([table[run] - table["all"] for run in runs.values()])
        about = {"method": "retraining", "unit": "loss", "removal": "fixed", "sign": "positive = it helped"}
        return Scores(values, tuple(runs), queries, about=about)

    effects, floor = changes({name: f"1 of {name}" for name in gone}), changes({"permuted": "permuted"})
    parts = {h: changes({name: f"{h} of {name}" for name in gone[:PARTIAL]}) for h in PARTS}
    distances = linearity(effects.in_order(gone[:PARTIAL]), parts)
    return effects, {
        "median_effect": float(effects.values.abs().median()),
        "noise_floor": float(floor.values.abs().median()),
        "effect_over_floor": finite(above_floor(effects, floor)),
        "linearity": {str(h): finite(x) for h, x in distances.items()},
    }
