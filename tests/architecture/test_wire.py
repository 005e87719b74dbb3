"""What goes over the wire has its name in one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.tree import repository

OURS = re.compile(r"(x-amz-objectcache|x-objectcache|x-amz-rdma|/_objectcache|_objectcache$)")
MAGIC = re.compile(rb"OC[A-Z]")


def literals(path: Path) -> list[str | bytes]:
    """Every string of a module but its docstrings."""
    tree = ast.parse(path.read_text())
    said = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in said
    ]


@pytest.mark.parametrize(
    "package", ["gateway", "nixl_client", "objectcache/adapters", "objectcache/cli", "storage_server"]
)
def test_headers_paths_and_magic_numbers_of_the_wire_are_in_descriptors(package: str) -> None:
    """Both sides import the one constant, so that they cannot come to differ."""
    for path in (repository() / package).rglob("*.py"):
        for literal in literals(path):
            pattern = MAGIC if isinstance(literal, bytes) else OURS
            assert not pattern.match(literal), f"{path.relative_to(repository())}: {literal!r}"  # type: ignore[arg-type]
