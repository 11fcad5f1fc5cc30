"""Save and load fitted curvature: one HDF5 file, tensors as datasets, the rest as JSON; no pickles.

A loaded fit scores with any damping, without the data it was fitted on.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor

from attrax.core import Eigenbasis, Part, Projection, Subspace

SCHEMA = "attrax-curvature-1"


def save_state(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a fitted Kronecker curvature to one file, replacing it only once the new one is complete.

    Args:
        state: A `Curvature`.
        path: File to write.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    fields = ("method", "fisher", "target", "fingerprint", "examples")
    about = {name: getattr(state, name) for name in fields}
    subspace = state.projection if isinstance(state.projection, Subspace) else None
    drawn = state.projection if subspace is None else None
    about["projection"] = None if drawn is None else asdict(drawn)
    with h5py.File(temporary, "w") as file:
        file.attrs["schema"], file.attrs["about"] = SCHEMA, json.dumps(about)
        if subspace is not None:
            _write_subspace(file.create_group("subspace"), subspace)
        for index, (name, basis) in enumerate(state.bases.items()):
            group = file.create_group(f"leaves/{index}")
            group.attrs["name"] = name
            group.attrs["parts"] = json.dumps([asdict(part) for part in basis.parts])
            _write(group, "ua", basis.ua)
            _write(group, "la", basis.la)
            _write(group, "positions", basis.positions)
            _write(group, "eigenvalues", state.eigenvalues[name])
            for k, (u, values) in enumerate(zip(basis.ug, basis.lg, strict=True)):
                _write(group, f"ug{k}", u)
                _write(group, f"lg{k}", values)
    os.replace(temporary, target)


def _write_subspace(group: h5py.Group, subspace: Subspace) -> None:
    group.attrs["dim"], group.attrs["digest"] = subspace.dim, subspace.digest
    for side, matrices in (("a", subspace.a), ("g", subspace.g)):
        group.attrs[side] = json.dumps(list(matrices))
        for index, matrix in enumerate(matrices.values()):
            _write(group, f"{side}{index}", matrix)


def _read_subspace(group: h5py.Group, device: str | torch.device) -> Subspace:
    a, g = (
        {
            name: _read(group, f"{side}{i}", device)
            for i, name in enumerate(json.loads(str(group.attrs[side])))
        }
        for side in ("a", "g")
    )
    return Subspace(int(str(group.attrs["dim"])), a, g, str(group.attrs["digest"]))


def _write(group: h5py.Group, name: str, value: Tensor | None) -> None:
    if value is not None:
        group.create_dataset(name, data=value.detach().cpu().numpy())


def load_state(path: str | os.PathLike[str], make: Any, *, device: str | torch.device = "cpu") -> Any:
    """Read a curvature written by `save_state`.

    Args:
        path: The file.
        make: Constructor of the state (`Curvature`).
        device: Where to put the tensors.

    Returns:
        The state.

    Raises:
        ValueError: If the file is not a curvature of this schema.
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"load_curvature: cannot read '{path}': {error}") from None
    with file:
        if file.attrs.get("schema") != SCHEMA:
            raise ValueError(f"load_curvature: '{path}' is not a file of schema {SCHEMA}.")
        about = json.loads(str(file.attrs["about"]))
        about["projection"] = None if about["projection"] is None else Projection(**about["projection"])
        if isinstance(group := file.get("subspace"), h5py.Group):
            about["projection"] = _read_subspace(group, device)
        bases: dict[str, Eigenbasis] = {}
        eigenvalues: dict[str, Tensor] = {}
        for group in _leaves(file):
            name = str(group.attrs["name"])
            parts = tuple(
                Part(**{**p, "shape": tuple(p["shape"])}) for p in json.loads(str(group.attrs["parts"]))
            )
            ug = tuple(_read(group, f"ug{k}", device) for k in range(len(parts)))
            lg = tuple(_needed(group, f"lg{k}", device) for k in range(len(parts)))
            la, positions = _needed(group, "la", device), _needed(group, "positions", device)
            bases[name] = Eigenbasis(_read(group, "ua", device), ug, la, lg, positions, parts)
            eigenvalues[name] = _needed(group, "eigenvalues", device)
    return make(bases, eigenvalues, **about)


def _leaves(file: h5py.File) -> list[h5py.Group]:
    groups = file["leaves"]
    assert isinstance(groups, h5py.Group)
    found = [groups[index] for index in sorted(groups, key=int)]
    return [group for group in found if isinstance(group, h5py.Group)]


def _values(group: h5py.Group, name: str) -> Any:
    values = group[name]
    assert isinstance(values, h5py.Dataset)
    return values[()]


def _read(group: h5py.Group, name: str, device: str | torch.device) -> Tensor | None:
    return torch.from_numpy(_values(group, name)).to(device) if name in group else None


def _needed(group: h5py.Group, name: str, device: str | torch.device) -> Tensor:
    value = torch.as_tensor(_values(group, name))
    return value.to(device)
