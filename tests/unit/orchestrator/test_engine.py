"""An engine's own words on its events and its models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, cast

import aiohttp
import pytest

from objectcache.orchestrator.engine import MODELS_BYTES_MAX, Engine, event_sources, models_of, reachable
from objectcache.orchestrator.engine_blocks import index_name
from objectcache.orchestrator.engine_calls import EngineCalls
from objectcache.orchestrator.rules.liveness import FAILURES_MAX, EngineStatus
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import EngineSettings
from tests.support.waiting import settled


def source(port: int, **changes: Any) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "replay_endpoint": None, "topic": "kv",
        **changes,
    }  # fmt: skip


def test_ranks_come_in_the_order_of_their_numbers() -> None:
    found, _ = event_sources({str(rank): source(rank) for rank in (0, 10, 11, 2, 1)})
    assert [rank for rank, *_ in found] == [0, 1, 2, 10, 11]


@pytest.mark.parametrize(
    "document",
    [None, [], "x", {"0": 5}, {"x": source(1)}, {"0": source(1, enable_kv_cache_events=False)},
     {"0": source(1, endpoint="ipc:///etc/passwd")}, {"0": source(1, endpoint=5)},
     {"0": source(1, endpoint="tcp://*:1\n2026-11-28 WARNING forged")},
     {"0": source(1, endpoint="tcp://" + "a" * 256)}],
)  # fmt: skip
def test_what_names_no_reachable_events_is_left_out(document: object) -> None:
    assert event_sources(document)[0] == []


def test_what_is_left_out_is_counted_so_that_somebody_is_told() -> None:
    found, left_out_count = event_sources({"0": source(1), "1": source(1, endpoint="ipc:///x"), "2": source(2)})
    assert ([rank for rank, *_ in found], left_out_count) == ([0, 2], 1)


async def test_an_engine_writes_no_lines_of_its_own_and_few_of_any(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that named other endpoints each second wrote 22 GB a day, and lines that looked like ours."""
    engine = Engine(EngineSettings("http://a"), cast(aiohttp.ClientSession, None), PrefixIndex(), 1.0, 1.0)
    for at in range(8):  # refused at once; the feed of an engine that names other endpoints is a new one
        engine.blocks.found([(0, f"tcp://no port {at}\nWARNING forged", None, "")])
        await settled()
    for _ in range(100):
        engine.failed("500 Bad\nWARNING forged" + "x" * 5000, is_certain=True)
        engine.liveness.ejected_until_s = 0.0
    await engine.blocks.stop()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 2
    assert max(map(len, told)) < 1000
    assert not any("\n" in each for each in told)


def test_a_failed_probe_asks_for_no_other_engines() -> None:
    """It ejects an engine whether others are there or not. Each of a thousand engines that were down looked at all."""
    asked: list[bool] = []
    engine = Engine(
        EngineSettings("http://a"), cast(aiohttp.ClientSession, None), PrefixIndex(), 1.0, 1.0,
        is_needed=lambda: asked.append(True) is None,
    )  # fmt: skip
    engine.succeeded()
    engine.failed("it is not well", is_probe=True)
    engine.failed("no process", is_certain=True)
    assert asked == []
    assert engine.status() is EngineStatus.EJECTED
    engine.liveness.ejected_until_s = 0.0
    engine.succeeded()
    for _ in range(FAILURES_MAX):
        engine.failed("a request failed")
    assert len(asked) == FAILURES_MAX
    assert engine.status() is EngineStatus.UP, "it is needed"


def test_the_models_of_one_engine_are_bounded_in_bytes() -> None:
    cards = [{"id": f"model {at}", "root": "x" * 1000} for at in range(400)]
    found, left_out_count = models_of([None, *cards])
    assert len(found) + left_out_count == 400
    assert MODELS_BYTES_MAX - 1100 < sum(len(json.dumps(card)) for card in found.values()) <= MODELS_BYTES_MAX
    assert models_of([None, *cards[:9]]) == ({card["id"]: card for card in cards[:9]}, 0)


def test_an_endpoint_on_every_address_is_reached_at_the_engines() -> None:
    assert reachable("tcp://*:5557", "10.0.0.1") == "tcp://10.0.0.1:5557"
    assert reachable("tcp://[::]:5557", "10.0.0.1") == "tcp://10.0.0.1:5557"
    assert reachable("tcp://10.0.0.2:5557", "10.0.0.1") == "tcp://10.0.0.2:5557"
    assert (index_name("a", 0), index_name("a", 3)) == ("a", "a#3")


class Calls:
    """Answers the orchestrator's questions for an engine that has these models."""

    def __init__(self, *models: str) -> None:
        self.models = models

    async def json(self, _: str, reading: Callable[[Any], Any]) -> Any:
        return reading({"data": [{"id": name} for name in self.models]})


async def test_requests_that_wait_are_told_of_a_model_that_an_engine_has_loaded() -> None:
    """They waited for the engine that had it before, to the end of their time, while new requests were answered."""
    told: list[bool] = []
    engine = Engine(
        EngineSettings("http://a"), cast(aiohttp.ClientSession, None), PrefixIndex(), 1.0, 1.0,
        on_up=lambda: told.append(engine.serves("adapter")),
    )  # fmt: skip
    engine._calls = cast(EngineCalls, Calls("base"))
    await engine._read_models()
    assert told == [], "it takes no requests yet"
    engine.succeeded()
    engine._calls = cast(EngineCalls, Calls("base", "adapter"))
    for _ in range(3):
        await engine._read_models()
    assert told == [False, True]
    engine.refused("adapter")
    await engine._read_models()
    assert told == [False, True, True], "it says once more that it has what it has refused"


async def test_an_engine_that_says_again_that_it_has_what_it_refuses_is_ejected() -> None:
    """An engine that had only unloaded an adapter was ejected, for all its models."""
    index = PrefixIndex()
    engine = Engine(EngineSettings("http://a"), cast(aiohttp.ClientSession, None), index, 1.0, 1.0)
    engine._calls = cast(EngineCalls, Calls("base", "adapter"))
    engine.succeeded()
    await engine._read_models()
    engine.refused("adapter")
    assert (engine.serves("base"), engine.serves("adapter")) == (True, False)
    engine._calls = cast(EngineCalls, Calls("base"))
    await engine._read_models()
    engine._calls = cast(EngineCalls, Calls("base", "adapter"))
    await engine._read_models()
    assert engine.serves("adapter")  # it was loaded again
    engine.refused("adapter")
    await engine._read_models()
    for _ in range(FAILURES_MAX):
        assert engine.status() is EngineStatus.UP
        engine.refused("adapter")
    assert engine.status() is EngineStatus.EJECTED
