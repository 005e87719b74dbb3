"""Classes of the product: each has its name to itself, so that a name in a review, a log or a search means one thing;
and each is small enough to be read at once.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tree import repository

ROOT = repository()
PRODUCT = ("descriptors", "gateway", "nixl_client", "objectcache", "storage_server")
NAMED_BY_USERS = {"ObjectCacheConnector"}
"""Engines load their connectors by this name, each from a module of its own."""
METHODS_MAX = 20
POSITIONAL_MAX = 5
IN_ROWS = {"storage_server/kernel/index/queries.py: Extent"}
"""The call stands beside the columns that it reads, in a loop over rows."""
OF_OTHERS = {"__init__", "chain", "kivi_decode", "kivi_encode", "mmap", "pack", "setup"}
"""Names that libraries and C have, too."""
COUNTED = ("storage_server", "objectcache/orchestrator", "nixl_client/fetch")


def classes_of(*places: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    for place in places:
        for path in (ROOT / place).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    yield path, node


@pytest.mark.slow
def test_public_classes_have_names_of_their_own() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path, node in classes_of(*PRODUCT):
        if not node.name.startswith("_"):
            found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in NAMED_BY_USERS} == {}


@pytest.mark.slow
def test_classes_have_few_methods() -> None:
    counts = {
        node.name: sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
        for _, node in classes_of(*COUNTED)
    }
    assert {name: count for name, count in counts.items() if count > METHODS_MAX} == {}


@pytest.mark.slow
def test_calls_say_what_each_of_many_values_is() -> None:
    """A reader of six values in a row has to look them up, and two of one type are easily exchanged. Calls of what
    others have made are theirs: C, Triton's kernels, struct.
    """
    trees = {path: ast.parse(path.read_text()) for place in PRODUCT for path in (ROOT / place).rglob("*.py")}
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    own = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, kinds)} - OF_OTHERS
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) > POSITIONAL_MAX
        and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in own
    }
    assert found == IN_ROWS
