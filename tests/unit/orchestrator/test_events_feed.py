"""Events of engines that connect to a subscriber that is bound here."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from orchestrator import events_feed
from orchestrator.events_feed import BLOCKS_AT_ONCE, EventsFeed, Turns
from orchestrator.rules.kv_events import Batch, BlockStored, Event, block_count_of
from orchestrator.rules.prefix_index import PrefixIndex
from orchestrator.settings import EngineSettings, engine_settings
from tests.support.waiting import until

SECRET = "a secret of many letters"


async def test_events_count_by_their_topic_where_anybody_may_connect(tmp_path: Path) -> None:
    """Anybody who reached the port could say what an engine holds, or that it has started anew."""
    taken: list[int] = []
    endpoint = f"ipc://{tmp_path}/events"
    index = PrefixIndex()
    index.add_engine("a")
    feed = EventsFeed("a", index, f"bind:{endpoint}", None, SECRET, on_batch=lambda number, _: taken.append(number))
    running = asyncio.create_task(feed.run())
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.XPUB) as engine:
            engine.connect(endpoint)
            await engine.recv()  # the subscription has come
            cleared = msgspec.msgpack.encode([time.time(), [{"type": "AllBlocksCleared"}], 0])
            for number, topic in enumerate([SECRET, "", "kv", SECRET + "x", SECRET[:-1], SECRET]):
                await engine.send_multipart([topic.encode(), number.to_bytes(8, "big"), cleared])
            await until(lambda: 5 in taken)
    finally:
        running.cancel()
        await asyncio.wait((running,))
        context.destroy(linger=0)
    assert taken == [0, 5]
    assert feed.wrong_count  # of the topic that begins with the secret; others never come


@pytest.mark.parametrize("topic", ["", "kv", "x" * 15])
def test_a_subscriber_that_is_bound_needs_a_secret(topic: str) -> None:
    with pytest.raises(ValueError, match="topic of at least 16 characters"):
        EngineSettings("http://a:1", events="bind:tcp://0.0.0.0:5557", topic=topic)
    with pytest.raises(ValueError, match="topic of at least 16 characters"):
        engine_settings({"url": "http://a:1", "events": "bind:tcp://0.0.0.0:5557", "topic": topic})
    assert EngineSettings("http://a:1", events="tcp://a:5557", topic=topic).topic == topic


async def test_a_feed_ends_while_the_name_of_its_host_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a context waits for that: it stopped the event loop for as long as a name server did not answer."""
    may_end, has_ended = threading.Event(), threading.Event()
    term = zmq.asyncio.Context.term

    def slow_term(context: zmq.asyncio.Context) -> None:
        may_end.wait(60)
        term(context)
        has_ended.set()

    monkeypatch.setattr(zmq.asyncio.Context, "term", slow_term)
    monkeypatch.setattr(events_feed, "END_S", 0.01)
    index = PrefixIndex()
    index.add_engine("a")
    running = asyncio.create_task(EventsFeed("a", index, "tcp://127.0.0.1:9", None).run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait((running,))
    assert not has_ended.is_set()
    may_end.set()
    await until(has_ended.is_set)


async def test_many_feeds_stop_the_loop_no_longer_at_once_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worked for its millisecond in every turn of the loop: an engine with 32 ranks had half a second of each."""
    index, turns, names = PrefixIndex(), Turns(), [f"a#{rank}" for rank in range(8)]
    taken, most = 0, 0
    apply = index.apply

    def counted(name: str, event: Event) -> None:
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
