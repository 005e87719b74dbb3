"""KV events of one engine's data-parallel rank: subscribes, asks for batches that are missing, and says what came.

The feed is LIVE while every batch has come. Where batches are missing and cannot be had again it is DEGRADED: what is
known counts for DEGRADED_S more, then the index is cleared, and what is sent to the engine counts instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from enum import Enum

import msgspec
import zmq
import zmq.asyncio

from orchestrator.rules.kv_events import Batch, BatchOrder, Turn, WrongEventError, batch_of
from orchestrator.rules.prefix_index import PrefixIndex

BATCH_BYTES_MAX = 16 << 20
REPLAY_S = 3.0
REPLAY_BATCHES_MAX = 100_000
DEGRADED_S = 30.0
RECONNECT_S = 1.0
QUEUE_MAX = 10_000
BIND = "bind:"
_NUMBER_BYTES = 8
_END = (1 << 64) - 1
_log = logging.getLogger(__name__)


class FeedStatus(Enum):
    """What the index of an engine rests on."""

    NONE = "none"
    LIVE = "live"
    DEGRADED = "degraded"


class EventsFeed:
    """Events of `engine`, into `index`. `on_batch` is told of each batch that was taken, with its
    number, and `on_cleared` the number of the next batch when the index was cleared."""

    def __init__(
        self,
        engine: str,
        index: PrefixIndex,
        events: str,
        replay: str | None,
        topic: str = "",
        expected: int | None = None,
        on_batch: Callable[[int, Batch], None] | None = None,
        on_cleared: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._index = index
        self._events = events
        self._replay = replay
        self._topic = topic
        self._order = BatchOrder(expected)
        self._on_batch = on_batch
        self._on_cleared = on_cleared
        self._degraded_s: float | None = None
        self.status = FeedStatus.NONE
        self.gap_count = 0
        self.replayed_count = 0
        self.wrong_count = 0

    @property
    def next_number(self) -> int | None:
        """The number of the batch that comes next."""
        return self._order.expected

    async def run(self) -> None:
        """Listen until cancelled."""
        context = zmq.asyncio.Context()
        try:
            while True:
                try:
                    await self._listen(context)
                except zmq.ZMQError as error:
                    _log.warning("events of %s from %s: %s", self._engine, self._events, error)
                    await asyncio.sleep(RECONNECT_S)
        finally:
            context.destroy(linger=0)

    def age(self, now_s: float) -> None:
        """Clear what a degraded feed knows when its time is over. Called from time to time."""
        if self._degraded_s is not None and now_s - self._degraded_s >= DEGRADED_S:
            self._clear(self._order.expected or 0)  # what comes from now on is right, although it is not all
            self._degraded_s = None
            self.status = FeedStatus.LIVE

    async def _listen(self, context: zmq.asyncio.Context) -> None:
        with contextlib.closing(context.socket(zmq.SUB)) as socket:
            socket.setsockopt(zmq.RCVHWM, QUEUE_MAX)
            socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            if self._events.startswith(BIND):
                socket.bind(self._events.removeprefix(BIND))
            else:
                socket.connect(self._events)
            await self._replay_from(context, self._order.expected or 0)
            while True:
                frames = await socket.recv_multipart()
                await self._received(context, frames)

    async def _received(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self.wrong_count += 1
            return
        number = int.from_bytes(frames[1], "big")
        try:
            batch = batch_of(msgspec.msgpack.decode(frames[2]))
        except (msgspec.DecodeError, WrongEventError, ValueError) as error:
            self._missed(number, f"batch {number} cannot be read: {error}")
            return
        turn = self._order.turn(number, batch.sent_at)
        if turn is Turn.RESTART:
            _log.info("%s has started anew: its events count from %d", self._engine, number)
            self._order.restart()
            self._clear(0)
            turn = self._order.turn(number, batch.sent_at)
        if turn is Turn.REPLAY:
            self.gap_count += 1
            await self._replay_from(context, self._order.expected or 0)
            turn = self._order.turn(number, batch.sent_at)
            if turn is Turn.REPLAY and self._order.expected is None:
                self._order.took(
                    number - 1, 0.0
                )  # its blocks of before are not known, and nothing that is known is wrong
                turn = Turn.TAKE
            elif turn is Turn.REPLAY:
                self._missed(number - 1, f"batches before {number} cannot be had again")
                turn = Turn.TAKE
        if turn is Turn.TAKE:
            self._take(number, batch)

    def _take(self, number: int, batch: Batch) -> None:
        try:
            for event in batch.events:
                self._index.apply(self._engine, event)
        except ValueError as error:
            self._missed(number, f"batch {number}: {error}")
            return
        self._order.took(number, batch.sent_at)
        if self.status is FeedStatus.NONE:
            self.status = FeedStatus.LIVE
        if self._on_batch is not None:
            self._on_batch(number, batch)

    def _clear(self, next_number: int) -> None:
        """The index knows nothing of the engine any more."""
        self._index.clear(self._engine)
        if self._on_cleared is not None:
            self._on_cleared(next_number)

    def _missed(self, number: int, why: str) -> None:
        """Go on behind this batch, without what was in it."""
        self.wrong_count += 1
        if self.status is not FeedStatus.DEGRADED:
            _log.warning("events of %s: %s; what is known of it counts for %d s more", self._engine, why, DEGRADED_S)
            self._degraded_s = time.monotonic()
        self.status = FeedStatus.DEGRADED
        self._order.took(number, 0.0)

    async def _replay_from(self, context: zmq.asyncio.Context, first: int) -> None:
        """Ask for the batches from `first` on. Those that the engine still has come one by one, then an end mark. A
        whole replay from the first batch makes a degraded feed whole.
        """
        if self._replay is None:
            return
        with contextlib.closing(context.socket(zmq.DEALER)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.connect(self._replay)
            try:
                async with asyncio.timeout(REPLAY_S):
                    await socket.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
                for _ in range(REPLAY_BATCHES_MAX):
                    async with asyncio.timeout(REPLAY_S):
                        frames = await socket.recv_multipart()
                    if len(frames) < 3 or len(frames[-2]) != _NUMBER_BYTES:
                        continue
                    number = int.from_bytes(frames[-2], "big")
                    if number == _END:
                        return
                    self._replayed(number, frames[-1])
            except TimeoutError:
                _log.info("%s replays nothing from batch %d on", self._engine, first)

    def _replayed(self, number: int, payload: bytes) -> None:
        try:
            batch = batch_of(msgspec.msgpack.decode(payload))
        except (msgspec.DecodeError, WrongEventError, ValueError):
            return
        expected = self._order.expected
        if number == 0 and expected is None:
            self._clear(0)
        if (expected is None and number == 0) or number == expected:
            self.replayed_count += 1
            self._take(number, batch)
