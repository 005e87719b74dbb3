"""Events of engines that connect to a subscriber that is bound here."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from objectcache.adapters.caller import CALLER
from objectcache.adapters.threads import computed
from objectcache.orchestrator import events_feed
from objectcache.orchestrator.events_feed import BLOCKS_AT_ONCE, SWEEPS_MAX, EventsFeed, FeedTurns
from objectcache.orchestrator.rules import block_holders
from objectcache.orchestrator.rules.block_holders import BlockHolders
from objectcache.orchestrator.rules.kv_events import AllBlocksCleared, Batch, BlockStored, block_count_of
from objectcache.orchestrator.rules.kv_events import Event as KvEvent
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.sayings import HERE_BYTES_MAX
from objectcache.orchestrator.settings import EngineSettings, engine_settings
from tests.support.waiting import LIMIT_S, settled

SECRET = "a secret of many letters"


@pytest.mark.parametrize("topic", ["", "kv", "x" * 15])
def test_a_subscriber_that_is_bound_needs_a_secret(topic: str) -> None:
    with pytest.raises(ValueError, match="topic of at least 16 characters"):
        EngineSettings("http://a:1", events="bind:tcp://0.0.0.0:5557", topic=topic)
    with pytest.raises(ValueError, match="topic of at least 16 characters"):
        engine_settings({"url": "http://a:1", "events": "bind:tcp://0.0.0.0:5557", "topic": topic})
    assert EngineSettings("http://a:1", events="tcp://a:5557", topic=topic).topic == topic


async def test_many_feeds_stop_the_loop_no_longer_at_once_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worked for its millisecond in every turn of the loop: an engine with 32 ranks had half a second of each."""
    index, turns, names = PrefixIndex(), FeedTurns(), [f"a#{rank}" for rank in range(8)]
    taken, most = 0, 0
    apply = index.apply

    def counted(name: str, event: KvEvent) -> None:
        nonlocal taken
        taken += block_count_of(event)
        apply(name, event)

    monkeypatch.setattr(index, "apply", counted)
    for name in names:
        index.add_engine(name)
    feeds = [EventsFeed(name, index, "tcp://127.0.0.1:9", None, turns=turns) for name in names]
    batch = Batch(1.0, (BlockStored(tuple(range(3000)), None, tuple(range(3000)), 1),), 0)
    working = asyncio.gather(*(feed._take(0, batch) for feed in feeds))
    while not working.done():
        taken = 0
        await asyncio.sleep(0)
        most = max(most, taken)
    assert [index.held_count(name) for name in names] == [3000] * 8
    assert 0 < most <= 2 * BLOCKS_AT_ONCE


async def test_the_ranks_of_an_engine_take_blocks_over_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank had a turn of its own: what was known of other engines fell behind an engine with 64 ranks for good."""
    index, turns, order = PrefixIndex(), FeedTurns(), []
    monkeypatch.setattr(index, "apply", lambda name, _: order.append(name))
    feeds = [EventsFeed(f"a#{rank}", index, "tcp://127.0.0.1:9", None, turns=turns) for rank in range(1, 64)]
    other = EventsFeed("b", index, "tcp://127.0.0.1:9", None, turns=turns)
    names = tuple(range(BLOCKS_AT_ONCE))
    batch = Batch(1.0, (BlockStored(names, None, names, 1),), 0)
    await asyncio.gather(*(feed._take(0, batch) for feed in (*feeds, other)))
    assert len(order) == 64
    assert order.index("b") <= 4


MANY, ONE = bytes(HERE_BYTES_MAX + 1), bytes(HERE_BYTES_MAX + 2)
"""Long batches."""


async def read_for(engine: str, feed: EventsFeed, payload: bytes) -> None:
    """In a task of the engine's own."""
    CALLER.set(engine)
    await feed._decoded(payload)


async def test_the_long_batches_of_an_engine_are_read_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another engine stood behind those of 63 ranks."""
    index, turns, order = PrefixIndex(), FeedTurns(), []
    monkeypatch.setattr(events_feed, "read_batch", order.append)
    feeds = [EventsFeed(f"a#{rank}", index, "tcp://127.0.0.1:9", None, turns=turns) for rank in range(1, 64)]
    other = EventsFeed("b", index, "tcp://127.0.0.1:9", None, turns=turns)
    await asyncio.gather(*(read_for("a", feed, MANY) for feed in feeds), read_for("b", other, ONE))
    assert len(order) == 64
    assert order.index(ONE) <= 2


async def test_a_batch_that_waits_for_its_own_engine_holds_no_turn_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the one turn of all long batches, and waited for its engine's turn, which that engine's metrics had."""
    index, turns, order = PrefixIndex(), FeedTurns(), []
    monkeypatch.setattr(events_feed, "read_batch", order.append)
    feeds = {name: EventsFeed(name, index, "tcp://127.0.0.1:9", None, turns=turns) for name in ("a", "b")}
    are_read = Event()

    async def read_metrics() -> None:
        CALLER.set("a")
        await computed(lambda: are_read.wait(LIMIT_S), is_long=True)

    metrics = asyncio.create_task(read_metrics())
    await settled()
    waiting = asyncio.create_task(read_for("a", feeds["a"], MANY))
    await settled()
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.create_task(read_for("b", feeds["b"], ONE))
        assert order == [ONE]
    finally:
        are_read.set()
        await asyncio.gather(metrics, waiting)
    assert order == [ONE, MANY]


async def test_an_engine_clears_blocks_no_faster_than_they_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were taken away as often as engines were probed, and the only engine made its probes take 20 s: what waited
    grew by 10 MB/s.
    """
    index, count, most = PrefixIndex(), 600, 2000
    monkeypatch.setattr(block_holders, "CLEARED_ENTRIES_MAX", most)
    index.add_engine("a")
    feed = EventsFeed("a", index, "tcp://127.0.0.1:9", None)
    stored = BlockStored(tuple(range(count)), None, tuple(range(count)), 1)
    for number in range(20):
        await feed._take(number, Batch(1.0, (stored, AllBlocksCleared()), 0))
        waiting = [each for old in index.holders._cleared for each in (*old.counts, *old.rest)]
        assert sum(map(len, waiting)) <= most + 2 * count
    assert len(index.holders) <= most + count
    while index.holders.sweep():
        assert index.holders.has_room
    assert index.holders._cleared_count == len(index.holders) == 0


async def test_one_engine_at_a_time_sweeps_what_others_have_cleared() -> None:
    """All of them did in each pass of the loop: 250 engines stopped it for 1.3 s when one had cleared its blocks."""

    class Holders(BlockHolders):
        left = 3 * SWEEPS_MAX
        count = 0

        def sweep(self, blocks_max: int = 0) -> bool:
            self.count += 1
            self.left -= 1
            return self.left > 0

    turns, holders = FeedTurns(), Holders()
    most = 0
    while holders.left > 0:
        sweeping = asyncio.gather(*(turns.sweep(holders) for _ in range(20)))
        while not sweeping.done():
            before = holders.count
            await asyncio.sleep(0)
            most = max(most, holders.count - before)
        assert holders.count <= 3 * SWEEPS_MAX
    assert most == 1
