"""Requests that go on from a response go to the engine that has it."""

from __future__ import annotations

import pytest

from objectcache.orchestrator.rules import kept_responses
from objectcache.orchestrator.rules.kept_responses import KEPT_MAX, KeptResponses, response_id


@pytest.mark.parametrize(
    ("beginning", "wanted"),
    [
        (b'{"id":"resp_0a1b","object":"response"}', "resp_0a1b"),
        (b'event: response.created\ndata: {"response": {"id": "resp_x-Y_9", "output": []}}\n\n', "resp_x-Y_9"),
        (b'{"object": "response"}', ""),
        (b'{"id": "chatcmpl-1"}', ""),
        (b'{"id": "resp_' + b"a" * 500 + b'"}', ""),
        (b" " * 5000 + b'{"id": "resp_1"}', ""),
        (b"", ""),
    ],
)
def test_the_id_stands_at_the_beginning_of_an_answer(beginning: bytes, wanted: str) -> None:
    assert response_id(beginning) == wanted


def test_the_last_responses_are_known_to_their_tenants_only() -> None:
    kept = KeptResponses()
    kept.note("a", "resp_1", "engine 1")
    assert kept.engine("a", "resp_1") == "engine 1"
    assert kept.engine("b", "resp_1") is None
    assert kept.engine("a", "x" * 1000) is None
    for number in range(KEPT_MAX):
        kept.note("b", f"resp_{number}", "engine 2")
    assert kept.engine("a", "resp_1") == "engine 1"
    assert kept.engine("b", "resp_0") is None
    assert kept.engine("b", f"resp_{KEPT_MAX - 1}") == "engine 2"


def test_no_tenant_pushes_the_responses_of_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bound for all: many cheap requests of one made another's next turn `not found`."""
    monkeypatch.setattr(kept_responses, "KEPT_MAX", 10)
    kept = KeptResponses()
    for number in range(3):
        kept.note("small", f"resp_{number}", "e")
    for number in range(100):
        kept.note("large", f"resp_{number}", "e")
    assert [kept.engine("small", f"resp_{number}") for number in range(3)] == ["e"] * 3
    assert sum(kept.engine("large", f"resp_{number}") == "e" for number in range(100)) == 7
    assert kept.engine("large", "resp_99") == "e"
