"""Tests outside unit/ use what users and other packages use: no private name of the product is read or patched."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tree import repository

TESTS = repository() / "tests"
EXEMPT_FOLDERS = {
    "unit": "tests of one module may look inside it",
    "engines": "vLLM and LMCache make our connectors themselves and give no way to them",
    "bench": "the benches' own loops are made to give wrong bytes, to show that each bench finds them",
}
PUBLIC_ALTHOUGH_PRIVATE_LOOKING = {"_asdict", "_exit", "_fields", "_replace"}
"""Documented names of the standard library."""


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of another object: read, set, imported, or patched by its name."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | {"self", "cls"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in own
            is_supers = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if not is_own and not is_supers:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"setattr", "object", "patch"}:
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            names = [text.rpartition(".")[2] for text in texts]
            yield from ((node.lineno, name) for name in names if is_private(name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_ALTHOUGH_PRIVATE_LOOKING


def found(path: Path) -> list[tuple[int, str]]:
    return sorted(private_names(ast.parse(path.read_text())))


@pytest.mark.slow
def test_tests_outside_unit_reach_the_product_through_public_names() -> None:
    """A private name in such a test says that a seam is missing: a constructor's argument, a setting, a property."""
    paths = [path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in EXEMPT_FOLDERS]
    wrong = {str(path.relative_to(TESTS)): names for path in paths if (names := found(path))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("x._a", ["_a"]),
        ("x.y._a.b._c", ["_a", "_c"]),
        ("x._a = 1", ["_a"]),
        ("from m import _a", ["_a"]),
        ("patch.setattr(x, '_a', 1)", ["_a"]),
        ("patch.setattr('m.x._a', 1)", ["_a"]),
        ("mock.patch.object(x, '_a')", ["_a"]),
        ("self._a; cls._a; super()._a; x.__name__; os._exit(1); t._replace(a=1)", []),
    ],
)
def test_private_names_are_found(line: str, names: list[str]) -> None:
    assert sorted(name for _, name in private_names(ast.parse(line))) == names
