"""The notebooks run as committed, from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

SLOW = {"online_selection"}
NOTEBOOKS = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else [], id=path.stem)
    for path in sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
