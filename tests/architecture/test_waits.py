"""Tests wait for events, not for times."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.tree import repository

TESTS = repository() / "tests"
WITHOUT_SLEEP = ("unit", "contract", "architecture")
CLOCKS = frozenset({"time", "asyncio"})


def sleeps(source: str) -> Iterator[int]:
    """The lines that call `time.sleep` or `asyncio.sleep`, but for those that let other tasks run: `sleep(0)`."""
    if ".sleep(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="sleep"), args=[length]):
                if module in CLOCKS and not (isinstance(length, ast.Constant) and length.value == 0):
                    yield node.lineno


def has_reason(lines: list[str], number: int) -> bool:
    """Whether the line, or the one above it, has a comment that is more than a mark for a tool."""
    for line in lines[max(0, number - 2) : number]:
        comment = line.partition("#")[2].strip()
        if comment.startswith("noqa"):
            comment = comment.partition(" - ")[2]
        if comment:
            return True
    return False


def found(folders: Iterator[Path], *, with_reason: bool) -> list[str]:
    """Where the tests sleep: everywhere, or only without a reason beside it."""
    places = []
    for path in sorted(folders):
        source = path.read_text()
        lines = source.splitlines()
        numbers = [number for number in sleeps(source) if with_reason or not has_reason(lines, number)]
        places += [f"{path.relative_to(TESTS)}:{number}" for number in numbers]
    return places


def test_unit_and_contract_tests_never_sleep() -> None:
    """tests/support/waiting.py has what they use instead."""
    files = (path for folder in WITHOUT_SLEEP for path in (TESTS / folder).rglob("*.py"))
    assert found(files, with_reason=True) == []


def test_each_sleep_elsewhere_has_its_reason_beside_it() -> None:
    files = (path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in WITHOUT_SLEEP)
    assert found(files, with_reason=False) == []


def test_the_rule_sees_sleeps_and_reasons() -> None:
    source = "import time, asyncio\ntime.sleep(1)\nasyncio.sleep(0)\n# a lease must end\ntime.sleep(x)\n"
    assert list(sleeps(source)) == [2, 5]
    lines = source.splitlines()
    assert [has_reason(lines, number) for number in (2, 5)] == [False, True]
    assert not has_reason(["time.sleep(1)  # noqa: ASYNC251"], 1)
    assert has_reason(["time.sleep(1)  # noqa: ASYNC251 - nothing else may run"], 1)


def test_ci_holds_tests_to_their_marker() -> None:
    """A test of seconds that is not marked `slow` fails the run that finds it, and two runs find the same."""
    added = (repository() / ".ci" / "run").read_text().partition("PYTEST_ADDOPTS=")[2].partition("\n")[0]
    assert "--check-times" in added
    assert "--hypothesis-seed=" in added
