"""What engines, and whoever else reaches an endpoint of ours, send as KV events."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from objectcache.adapters import zmtp
from objectcache.adapters.zmtp import FrameLimits, ZmtpError, connected
from objectcache.orchestrator.events_feed import BATCH_BYTES_MAX, CONNECTIONS_MAX, TOPIC_BYTES_MAX, EventsFeed
from objectcache.orchestrator.rules.kv_events import Event
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from tests.support.waiting import until

SECRET = "a secret of many letters"
READY = b"\x05READY\x0bSocket-Type\0\0\0\x03PUB"
CLEARED = msgspec.msgpack.encode([time.time(), [{"type": "AllBlocksCleared"}], 0])


class Numbers:
    """Notes the numbers of batches."""

    def __init__(self, taken: list[int]) -> None:
        self.taken = taken

    def note_part(self, source: str, part: Event) -> None:
        pass

    def note_batch(self, source: str, number: int, sent_at: float) -> None:
        self.taken.append(number)

    def cleared(self, source: str) -> None:
        pass


@asynccontextmanager
async def listening(tmp_path: Path) -> AsyncIterator[tuple[str, EventsFeed, list[int]]]:
    """A feed that is bound, its path, and the numbers of the batches that it has taken."""
    taken: list[int] = []
    place, index = f"{tmp_path}/events", PrefixIndex()
    index.add_engine("a")
    feed = EventsFeed("a", index, f"bind:ipc://{place}", None, SECRET, log=Numbers(taken))
    running = asyncio.create_task(feed.run())
    try:
        await until(Path(place).exists)
        yield place, feed, taken
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def test_events_count_by_their_topic_where_anybody_may_connect(tmp_path: Path) -> None:
    """Anybody who reached the port could say what an engine holds, or that it has started anew."""
    taken: list[int] = []
    endpoint = f"ipc://{tmp_path}/events"
    index = PrefixIndex()
    index.add_engine("a")
    feed = EventsFeed("a", index, f"bind:{endpoint}", None, SECRET, log=Numbers(taken))
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


async def peer_of(place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has greeted as a publisher."""
    reader, writer = await asyncio.open_unix_connection(place)
    writer.write(zmtp.GREETING + bytes((zmtp.COMMAND, len(READY))) + READY)
    return reader, writer


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def frame(body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BQ", flags | zmtp.LONG, len(body)) + body


async def is_hung_up_on(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        frame(SECRET.encode(), zmtp.MORE) + frame(bytes(8), zmtp.MORE) + frame(b"x", zmtp.MORE) + frame(b"x"),
        struct.pack(">BQ", zmtp.LONG, TOPIC_BYTES_MAX + 1),
        struct.pack(">BQ", zmtp.LONG, 1 << 62),
        frame(SECRET.encode(), zmtp.MORE) + frame(b"123456789"),
        frame(SECRET.encode(), zmtp.MORE)
        + frame(bytes(8), zmtp.MORE)
        + struct.pack(">BQ", zmtp.LONG, BATCH_BYTES_MAX + 1),
        b"\x40\0",
        (bytes((zmtp.COMMAND, 1)) + b"x") * (zmtp.COMMANDS_MAX + 2),
        struct.pack(">BQ", zmtp.LONG | zmtp.COMMAND, 1 << 20),
    ],
)
async def test_a_peer_that_sends_more_than_it_may_is_hung_up_on(tmp_path: Path, sent: bytes) -> None:
    async with listening(tmp_path) as (place, _, taken):
        reader, writer = await peer_of(place)
        writer.write(sent)
        assert await is_hung_up_on(reader)
        writer.close()
        reader, writer = await peer_of(place)  # others are heard
        writer.write(frame(SECRET.encode(), zmtp.MORE) + frame(bytes(8), zmtp.MORE) + frame(CLEARED))
        await until(lambda: taken == [0])
        writer.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n".ljust(64),
        zmtp.GREETING.replace(b"NULL", b"CURV"),
        b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53),
        zmtp.GREETING + bytes((zmtp.COMMAND, 7)) + b"\x05ERROR\0",
        zmtp.GREETING + frame(b"no command"),
        zmtp.GREETING + struct.pack(">BQ", zmtp.LONG | zmtp.COMMAND, 1 << 40),
    ],
)
async def test_a_peer_that_speaks_something_else_is_hung_up_on(tmp_path: Path, greeting: bytes) -> None:
    async with listening(tmp_path) as (place, _, _):
        reader, writer = await asyncio.open_unix_connection(place)
        writer.write(greeting)
        assert await is_hung_up_on(reader)
        writer.close()


async def test_a_message_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    """libzmq kept all frames of a message that never ended, and ten thousand messages that nobody had read yet."""
    async with listening(tmp_path) as (place, feed, _):
        before = rss_bytes()
        peers = [await peer_of(place) for _ in range(8)]
        for _, writer in peers:
            with suppress(ConnectionError, TimeoutError):
                for _ in range(64):
                    writer.write(frame(b"wrong", zmtp.MORE) + frame(bytes(8), zmtp.MORE) + frame(bytes(1 << 20)))
                    async with asyncio.timeout(10):
                        await writer.drain()
        await until(lambda: feed.wrong_count >= 8)
        assert rss_bytes() - before < 64 << 20
        for _, writer in peers:
            writer.transport.abort()


async def test_nobody_who_connects_is_told_the_topic(tmp_path: Path) -> None:
    """A stranger that greeted as a publisher was sent the subscription, with the secret in it."""
    async with listening(tmp_path) as (place, _, taken):
        reader, writer = await peer_of(place)
        await reader.readexactly(64)
        said = await reader.readexactly(2)
        await reader.readexactly(said[1])  # READY
        assert await reader.readexactly(3) == b"\0\x01\x01", "a subscription to all topics"
        writer.write(frame(b"guessed", zmtp.MORE) + frame(bytes(8), zmtp.MORE) + frame(CLEARED))
        writer.write(frame(SECRET.encode(), zmtp.MORE) + frame(bytes(8), zmtp.MORE) + frame(CLEARED))
        await until(lambda: taken == [0])
        writer.close()


async def test_strangers_that_say_nothing_give_their_places_up(tmp_path: Path) -> None:
    """As many as there may be kept an engine out for ever."""
    async with listening(tmp_path) as (place, _, taken):
        engine = await peer_of(place)
        engine[1].write(frame(SECRET.encode(), zmtp.MORE) + frame(bytes(8), zmtp.MORE) + frame(CLEARED))
        await until(lambda: taken == [0])
        peers = [await peer_of(place) for _ in range(2 * CONNECTIONS_MAX)]
        for reader, _ in peers[:CONNECTIONS_MAX]:
            assert await is_hung_up_on(reader)
        late = await peer_of(place)
        for number, (_, writer) in enumerate((engine, late), 1):
            numbered = frame(number.to_bytes(8, "big"), zmtp.MORE)
            writer.write(frame(SECRET.encode(), zmtp.MORE) + numbered + frame(CLEARED))
            await until(lambda wanted=number: taken[-1] == wanted)
        assert taken == [0, 1, 2]
        for _, each in (engine, late, *peers):
            each.close()


async def test_messages_come_from_a_real_publisher_and_router(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.XPUB) as publisher, context.socket(zmq.ROUTER) as router:
            publisher.bind(f"ipc://{tmp_path}/events")
            router.bind(f"ipc://{tmp_path}/replay")
            limits = FrameLimits((16, 8, 1000))
            async with connected(f"ipc://{tmp_path}/events", "SUB", ("PUB", "XPUB")) as connection:
                await connection.subscribe(b"kv")
                assert await publisher.recv() == b"\x01kv"
                for frames in ([b"kv", b"1", b"x" * 1000], [b"kv"], [b"kv", b""]):
                    await publisher.send_multipart(frames)
                    assert await connection.receive(limits) == frames
                await publisher.send_multipart([b"kv", b"1", b"x" * 1001])
                with pytest.raises(ZmtpError, match="of at most 1000"):
                    await connection.receive(limits)
            async with connected(f"ipc://{tmp_path}/replay", "DEALER", ("ROUTER",)) as connection:
                await connection.send((b"", b"y" * 300))
                name, *frames = await router.recv_multipart()
                assert frames == [b"", b"y" * 300]
                await router.send_multipart([name, b"", b"2", b"z"])
                assert await connection.receive(limits) == [b"", b"2", b"z"]
            with pytest.raises(ZmtpError, match="none of ROUTER"):
                async with connected(f"ipc://{tmp_path}/events", "DEALER", ("ROUTER",)):
                    pass
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "endpoint", ["tcp://a", "tcp://:1", "tcp://a:0", "tcp://a:65536", "tcp://a:x", "inproc://a", "ipc://", ""]
)
def test_an_endpoint_has_a_place(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is no endpoint"):
        zmtp.place_of(endpoint)
    assert zmtp.place_of("tcp://[::1]:5557") == ("::1", 5557)
    assert zmtp.place_of("ipc:///a/b") == "/a/b"
