"""The layering of the rooms, guarded with nothing but the standard library."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"torch", "numpy", "opt_einsum", "jaxtyping", *sys.stdlib_module_names}
FORBIDDEN = {
    "core": lambda name: name not in {"attrax.core", *OUTSIDE},
    "methods": lambda name: name not in {"attrax.core", "attrax.methods", *OUTSIDE},
    "frontends": lambda name: (
        name in FORBIDDEN  # `import core` would be a second copy
        or (name.startswith("attrax") and name not in {"attrax.core", "attrax.frontends"})
    ),
}


def imported(path):
    """What the file imports: `attrax.<name>` for the package itself, else the top-level module."""
    package = ("attrax", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = [*base, node.module] if node.module else base
            names = [".".join([*module, name]) for name in names]
        for name in names:
            yield ".".join(name.split(".")[: 2 if name.startswith("attrax.") else 1])


@pytest.mark.parametrize("room", FORBIDDEN)
def test_room_imports_only_what_lies_below(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room}/ holds no modules"
    for path in files:
        wrong = {name for name in imported(path) if FORBIDDEN[room](name)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("room", FORBIDDEN)
def test_room_is_a_link(room):
    assert (ROOT / "attrax" / room).readlink() == Path("..") / room
