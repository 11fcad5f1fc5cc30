"""A fitted curvature on disk: it scores as before, without what it was fitted on; a bad file is refused."""

import json
import os

import h5py
import pytest
import torch
from torch.utils._pytree import tree_leaves

from attrax import load_curvature, save_curvature
from attrax.core import Projection, fit_subspace, fold, is_linear, selected, transformed
from attrax.core.kronecker import update
from attrax.frontends import live
from attrax.methods import Curvature, fit_ekfac, fit_kfac, influence

from .models import TinyLM, documents, seeded

pytestmark = pytest.mark.usefixtures("unchecked")


def subspace(source):
    """The leading eigenvectors of a K-FAC pass."""
    sums, _, _ = fold(update, transformed(source, selected(is_linear)))
    return fit_subspace(sums, 3)


FITS = {
    "kfac": fit_kfac,
    "ekfac": lambda source: fit_ekfac(source, fisher="sampled", seed=2),
    "projected": lambda source: fit_ekfac(source, projection=Projection(3, seed=4), target="mean"),
    "subspace": lambda source: fit_ekfac(source, projection=subspace(source)),
    "diagonal": lambda source: fit_kfac(source, max_dim=6),
}


@pytest.fixture
def sources(rng):
    model = seeded(lambda: TinyLM(layers=1))
    return live(model, [documents(rng, [5, 3, 6])]), live(model, [documents(rng, [4])])


@pytest.mark.parametrize("kind", FITS)
def test_a_loaded_curvature_scores_as_the_saved_one(kind, sources, tmp_path):
    train, query = sources
    fit = FITS[kind](train)
    path = str(tmp_path / "fit.h5")
    save_curvature(fit, path)
    loaded = load_curvature(path)
    assert isinstance(loaded, Curvature) and list(loaded.bases) == list(fit.bases)
    for name in ("method", "fisher", "target", "fingerprint", "examples"):
        assert getattr(loaded, name) == getattr(fit, name)
    assert getattr(loaded.projection, "basis", None) == getattr(fit.projection, "basis", None)
    before, after = (tree_leaves((dict(state.bases), dict(state.eigenvalues))) for state in (fit, loaded))
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(before, after, strict=True))
    for damping in (0.1, 1.0):
        a, b = (influence(state, train, query, damping=damping) for state in (fit, loaded))
        torch.testing.assert_close(a.values, b.values, rtol=1e-12, atol=1e-12)
        assert a.about == b.about


def test_saving_replaces_a_file_only_when_the_new_one_is_complete(sources, tmp_path, monkeypatch):
    fit, path = fit_kfac(sources[0]), tmp_path / "fit.h5"
    save_curvature(fit, str(path))
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_curvature(fit, str(path))
    assert path.read_bytes() == before


def test_files_that_are_no_curvature(sources, tmp_path):
    (tmp_path / "text").write_text("no HDF5")
    for name, match in (("absent", "cannot read"), ("text", "cannot read")):
        with pytest.raises(ValueError, match=match):
            load_curvature(str(tmp_path / name))
    path = str(tmp_path / "fit.h5")
    save_curvature(fit_kfac(sources[0]), path)
    with h5py.File(path, "a") as file:
        file.attrs["schema"] = "attrax-curvature-2"
    with pytest.raises(ValueError, match="not a file of schema attrax-curvature-1"):
        load_curvature(path)


def test_the_file_is_plain(sources, tmp_path):
    path = tmp_path / "fit.h5"
    fit = fit_kfac(sources[0])
    save_curvature(fit, str(path))
    with h5py.File(path) as file:
        about = json.loads(str(file.attrs["about"]))
        assert (
            about["method"] == "kfac" and about["examples"] == 3 and about["fingerprint"] == fit.fingerprint
        )
        names = {str(group.attrs["name"]) for group in file["leaves"].values()}  # pyright: ignore
        assert names == set(fit.bases)
    assert b"pickle" not in path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["fit.h5"]
