"""The words of engines are read in turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from objectcache.adapters import loop_share
from objectcache.orchestrator import events_feed
from objectcache.orchestrator.events_feed import EventsFeed, FeedTurns
from objectcache.orchestrator.rules.kv_events import read_batch
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.sayings import HERE_BYTES_MAX, Sayings

READ_S = 4 * loop_share.TURN_S


class Clock:
    """A clock that only readings move on. `read_in` counts them by passes of the loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.passes = 0
        self.read_in: Counter[int] = Counter()
        self.order: list[bytes] = []

    def __call__(self) -> float:
        return self.now_s

    def read(self, said: bytes) -> None:
        self.now_s += READ_S
        self.read_in[self.passes] += 1
        self.order.append(said)

    async def run(self, *readings: Coroutine[Any, Any, object]) -> None:
        """Count passes until all of these are over."""
        reading = asyncio.gather(*readings)
        while not reading.done():
            self.passes += 1
            await asyncio.sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loop_share.time, "perf_counter", made)  # type: ignore[attr-defined]
    return made


async def test_engines_that_speak_at_once_are_read_one_after_the_other(clock: Clock) -> None:
    """All are asked in the same second: a hundred with long metrics stopped the loop for one."""
    sayings = Sayings()
    await clock.run(*(sayings.read(f"e{at}", b"", clock.read) for at in range(100)))
    assert len(clock.order) == 100
    assert max(clock.read_in.values()) == 1


async def test_an_engine_that_says_much_does_not_stand_before_the_others(clock: Clock) -> None:
    sayings = Sayings()
    much = [sayings.read("a", b"a", clock.read) for _ in range(50)]
    await clock.run(*much, sayings.read("b", b"b", clock.read))
    assert clock.order.index(b"b") <= 2


async def test_what_is_long_is_read_in_a_thread() -> None:
    loop = asyncio.get_running_loop()

    def is_on_the_loop(_: bytes) -> bool:
        try:
            return asyncio.get_running_loop() is loop
        except RuntimeError:
            return False

    assert await Sayings().read("a", bytes(HERE_BYTES_MAX), is_on_the_loop)
    assert not await Sayings().read("a", bytes(HERE_BYTES_MAX + 1), is_on_the_loop)


async def test_the_ranks_of_an_engine_have_one_turn(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's messages were read in each pass of the loop: an engine with 64 ranks stopped it for a second."""
    index, turns = PrefixIndex(), FeedTurns()
    payload = msgspec.msgpack.encode([1.0, [["Unknown"]], 0])

    def counted(said: bytes) -> Any:
        clock.read(said)
        return read_batch(said)

    monkeypatch.setattr(events_feed, "read_batch", counted)
    names = [*(f"a#{rank}" for rank in range(1, 64)), "b"]
    for name in names:
        index.add_engine(name)
    feeds = [EventsFeed(name, index, "tcp://127.0.0.1:9", None, turns=turns) for name in names]
    others = msgspec.msgpack.encode([2.0, [["Unknown"]], 0])
    await clock.run(*(feed._decoded(others if feed is feeds[-1] else payload) for feed in feeds))
    assert max(clock.read_in.values()) == 1
    assert clock.order.index(others) <= 2
