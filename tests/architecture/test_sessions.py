"""Each HTTP session of the servers is a careful one, and none of its requests follows a redirect."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.tree import repository

ROOT = repository()
PACKAGES = ("gateway", "storage_server", "objectcache")
CAREFUL = ROOT / "objectcache" / "adapters" / "careful_session.py"
MODULES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "aiohttp.Cli" in path.read_text()
]
REQUESTS = {"delete", "get", "head", "post", "put", "request"}
OPTIONS = {"data", "headers", "json", "params", "timeout"}
"""A request of a session has one of these arguments; `get` of a mapping has none."""


def sessions_made(source: str) -> int:
    return source.count("aiohttp.ClientSession(")


def following(source: str) -> list[int]:
    """The lines of requests that would follow a redirect."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REQUESTS
        for named in [{keyword.arg: keyword.value for keyword in node.keywords}]
        if named.keys() & OPTIONS
        if not isinstance(said := named.get("allow_redirects"), ast.Constant) or said.value is not False
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_servers_are_spoken_to_in_careful_sessions_that_follow_no_redirect(path: Path) -> None:
    """A member, an engine or etcd may answer anything: a redirect would send a signed call elsewhere."""
    source = path.read_text()
    assert sessions_made(source) == (path == CAREFUL)
    assert following(source) == []


def test_the_rule_sees_sessions_and_requests() -> None:
    assert {CAREFUL, ROOT / "gateway" / "storage_client.py", ROOT / "objectcache" / "adapters" / "etcd.py"} <= {
        *MODULES
    }
    assert sessions_made("session = aiohttp.ClientSession(connector=c)") == 1
    assert following("session.post(url, data=body)\nfields.get('name', default)\n") == [1]
    assert following("session.post(url, data=body, allow_redirects=True)") == [1]
    assert following("session.post(url, data=body, allow_redirects=False)") == []
