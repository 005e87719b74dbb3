"""Which tests are named as too long for `make test`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.pace import BOUND_S, FAST, OWN_S, Times


def found(own_s: float, *markers: str, profile: str = FAST, when: str = "teardown") -> list[str]:
    times = Times(profile)
    report: Any = SimpleNamespace(
        nodeid="tests/test_a.py::test_b",
        when=when,
        user_properties=[(OWN_S, own_s)],
        keywords=dict.fromkeys(markers, 1),
    )
    times.pytest_runtest_logreport(report)
    return times.unmarked


def test_a_test_above_the_bound_is_named() -> None:
    assert found(BOUND_S + 0.1) == ["tests/test_a.py::test_b"]
    assert found(BOUND_S + 0.1, "hypothesis", "needs_server") == ["tests/test_a.py::test_b"]
    assert found(BOUND_S - 0.1) == []


@pytest.mark.parametrize("marker", ["slow", "environments", "bench_smoke", "engines_full"])
def test_tests_that_run_elsewhere_may_take_longer(marker: str) -> None:
    assert found(60.0, marker) == []


def test_a_property_may_take_longer_with_all_its_examples() -> None:
    assert found(60.0, "hypothesis", profile="untimed") == []


def test_each_test_counts_once() -> None:
    """Its time is known at its end."""
    assert found(60.0, when="call") == []
