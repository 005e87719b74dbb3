"""What an engine says of its events."""

from __future__ import annotations

from typing import Any

import pytest

from objectcache.orchestrator.engine import event_sources, reachable
from objectcache.orchestrator.engine_blocks import index_name


def source(port: int, **changes: Any) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "replay_endpoint": None, "topic": "kv",
        **changes,
    }  # fmt: skip


def test_ranks_come_in_the_order_of_their_numbers() -> None:
    found = event_sources({str(rank): source(rank) for rank in (0, 10, 11, 2, 1)})
    assert [rank for rank, *_ in found] == [0, 1, 2, 10, 11]


@pytest.mark.parametrize(
    "document",
    [None, [], "x", {"0": 5}, {"x": source(1)}, {"0": source(1, enable_kv_cache_events=False)},
     {"0": source(1, endpoint="ipc:///etc/passwd")}, {"0": source(1, endpoint=5)}],
)  # fmt: skip
def test_what_names_no_reachable_events_is_left_out(document: object) -> None:
    assert event_sources(document) == []


def test_an_endpoint_on_every_address_is_reached_at_the_engines() -> None:
    assert reachable("tcp://*:5557", "10.0.0.1") == "tcp://10.0.0.1:5557"
    assert reachable("tcp://[::]:5557", "10.0.0.1") == "tcp://10.0.0.1:5557"
    assert reachable("tcp://10.0.0.2:5557", "10.0.0.1") == "tcp://10.0.0.2:5557"
    assert (index_name("a", 0), index_name("a", 3)) == ("a", "a#3")
