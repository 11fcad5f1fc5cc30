"""One optimizer step in one HDF5 file ``<step>.step.h5``, written under a temporary name and renamed.

    /                     attributes format, schema, step, share; coefficient and norm of the clipping (NaN if unknown);
                          unused (JSON: numbers of the blocks that were thrown away)
    /optimizers/<k>       attributes kind and hyper (JSON): one for every combination of hyperparameters
    /parameters/<k>/      attributes name, optimizer (its number, -1 if it does not move in the step) and scalars (JSON:
                          names of arrays without axes, which are kept as one element)
        value             the parameter before the step, if recorded
        gradient          the gradient that the optimizer uses, if recorded
        touched           the rows that it holds, if it is sparse
        state/<name>      the optimizer's state before the step, by torch's names

Arrays are dense, of their own dtype, and have an attribute xxh3: the XXH3-64 of their bytes.
"""

import json
import math
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor

from attrax.core import Clip, Optimizer, Step
from attrax.frontends.storage.folder import publish
from attrax.frontends.storage.h5types import (
    TYPES,
    child,
    open_file,
    read_array,
    read_number,
    read_text,
    write_array,
    write_text,
)

FORMAT = "attrax optimizer step"
SCHEMA = 2
SUFFIX = ".step.h5"


def step_path(folder: Path, number: int) -> Path:
    """Where a step is kept.

    >>> step_path(Path("run"), 12).name
    '00000012.step.h5'
    """
    return folder / f"{number:08d}{SUFFIX}"


def recorded_steps(folder: Path) -> dict[int, Path]:
    """Files of the steps in a directory, in order."""
    found = {path.name.removesuffix(SUFFIX): path for path in folder.glob(f"*{SUFFIX}")}
    return {int(n): found[n] for n in sorted(found) if n.isdigit()}


def write_step(folder: Path, step: Step) -> None:
    """Write a step; it appears whole or not at all.

    Raises:
        ValueError: If a tensor is of a dtype that cannot be stored.
        OSError: If it cannot be written.
    """
    final = step_path(folder, step.step)
    temporary = folder / f".{final.name}.tmp"
    try:
        with h5py.File(temporary, "w", libver=("v110", "v110"), locking=False) as file:
            _write(file, step)
        publish(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: h5py.File, step: Step) -> None:
    clip = step.clip or Clip(math.nan, math.nan)
    write_text(file, "format", FORMAT)
    write_text(file, "unused", json.dumps(step.unused))
    numbers = {"schema": SCHEMA, "step": step.step, "share": step.share}
    for name, value in (numbers | {"coefficient": clip.coefficient, "norm": clip.norm}).items():
        file.attrs[name] = value
    texts = {n: (rule.kind, json.dumps(dict(rule.hyper))) for n, rule in step.optimizers.items()}
    distinct = {text: k for k, text in enumerate(dict.fromkeys(texts.values()))}
    for (kind, hyper), k in distinct.items():
        group = file.create_group(f"optimizers/{k}")
        write_text(group, "kind", kind)
        write_text(group, "hyper", hyper)
    parameters = file.create_group("parameters")
    for k, name in enumerate(dict.fromkeys([*texts, *step.parameters])):
        group = parameters.create_group(str(k))
        write_text(group, "name", name)
        group.attrs["optimizer"] = distinct[texts[name]] if name in texts else -1
        tensors = {f"state/{key}": x for key, x in step.states.get(name, {}).items()}
        tensors |= {"value": step.parameters[name]} if name in step.parameters else {}
        tensors |= {"gradient": step.gradients[name]} if name in step.gradients else {}
        tensors |= {"touched": step.touched[name].to(torch.uint8)} if name in step.touched else {}
        write_text(group, "scalars", json.dumps([n for n, x in tensors.items() if not x.ndim]))
        group.create_group("state")
        for key, x in tensors.items():
            if x.dtype not in TYPES:
                raise ValueError(
                    f"record: '{key}' of parameter '{name}' is {x.dtype}, which cannot be stored."
                )
            write_array(group, key, x.cpu() if x.ndim else x.cpu().reshape(1))


def read_step(path: Path) -> Step:
    """Read a step.

    Raises:
        ValueError: If the file is damaged, of another schema, or not a step.
    """
    try:
        with open_file(path) as file:
            found = read_text(file, "format"), read_number(file, "schema")
            if found != (FORMAT, SCHEMA):
                raise ValueError(
                    f"its format is {found[0]!r}, schema {found[1]}, not {FORMAT!r}, schema {SCHEMA}"
                )
            return _read(file)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"open_trajectory: '{path}' cannot be read as a step: {error}.") from error


def _read(file: h5py.File) -> Step:
    rules = [_rule(child(file, "optimizers", str(k))) for k in range(len(child(file, "optimizers")))]
    optimizers: dict[str, Optimizer] = {}
    states: dict[str, dict[str, Tensor]] = {}
    values: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    touched: dict[str, Tensor] = {}
    for k in range(len(child(file, "parameters"))):
        group = child(file, "parameters", str(k))
        name, scalars = read_text(group, "name"), set(json.loads(read_text(group, "scalars")))
        number = int(read_number(group, "optimizer"))
        keys = [
            *(f"state/{key}" for key in child(group, "state")),
            *({"value", "gradient", "touched"} & set(group)),
        ]
        tensors = {key: _tensor(group, key, scalars) for key in keys}
        if number >= 0:
            optimizers[name] = rules[number]
            states[name] = {
                key.removeprefix("state/"): x for key, x in tensors.items() if key.startswith("state/")
            }
        values |= {name: tensors["value"]} if "value" in tensors else {}
        gradients |= {name: tensors["gradient"]} if "gradient" in tensors else {}
        touched |= {name: tensors["touched"].bool()} if "touched" in tensors else {}
    coefficient, norm = float(read_number(file, "coefficient")), float(read_number(file, "norm"))
    clip = None if math.isnan(norm) else Clip(coefficient, norm)
    step, share = int(read_number(file, "step")), float(read_number(file, "share"))
    unused = tuple(int(n) for n in json.loads(read_text(file, "unused")))
    return Step(step, optimizers, states, gradients, values, clip, share, unused, touched)


def _rule(group: h5py.Group) -> Optimizer:
    hyper: dict[str, Any] = json.loads(read_text(group, "hyper"))
    return Optimizer(read_text(group, "kind"), {name: float(x) for name, x in hyper.items()})


def _tensor(group: h5py.Group, key: str, scalars: set[str]) -> Tensor:
    *path, name = key.split("/")
    x = read_array(child(group, *path), name)
    return x.reshape(()) if key in scalars else x
