"""A class of the product has its name to itself, so that a name in a review, a log or a search means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.support.tree import repository

ROOT = repository()
PRODUCT = ("descriptors", "gateway", "nixl_client", "objectcache", "storage_server")
NAMED_BY_USERS = {"ObjectCacheConnector"}
"""Engines load their connectors by this name, each from a module of its own."""


@pytest.mark.slow
def test_public_classes_have_names_of_their_own() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for top in PRODUCT:
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in NAMED_BY_USERS} == {}
