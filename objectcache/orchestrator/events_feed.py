"""KV events of one engine's data-parallel rank: subscribes, asks for batches that are missing, and says what came.

The feed is LIVE while every batch has come since the engine's start, and PARTIAL where the first ones are not to be had
any more: what is known is right then, and what was sent to the engine counts beside it. Where batches are missing in
between it is DEGRADED: what is known counts for DEGRADED_S more, then the index is cleared.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from enum import Enum
from typing import Protocol

import msgspec

from objectcache.adapters.caller import CallerTurns
from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.adapters.zmtp import FrameLimits, ZmtpConnection, bound, connected
from objectcache.orchestrator.rules.block_holders import BlockHolders
from objectcache.orchestrator.rules.kv_events import (
    AllBlocksCleared,
    Batch,
    BatchOrder,
    BatchTurn,
    BlockRemoved,
    Event,
    KnownBatch,
    WrongEventError,
    block_count_of,
    block_tokens_of,
    read_batch,
    sliced,
)
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.sayings import Sayings
from objectcache.orchestrator.settings import BIND, RANK_MARK

BATCH_BYTES_MAX = 1 << 20
"""The blocks of 64 Ki tokens, which no engine computes in one step, take about half of it."""
BLOCKS_AT_ONCE, TOKENS_AT_ONCE = 500, 32_768
"""The index takes so many over without giving the event loop a turn: about a millisecond."""
SWEEPS_MAX = 64
"""An engine's task sweeps so often before it looks after the engine again: the blocks are gone with the next tasks."""
REPLAY_S = 3.0
REPLAY_BATCHES_MAX = 100_000
DEGRADED_S = 30.0
RECONNECT_S, RECONNECT_S_MAX = 1.0, 16.0
"""Each try to reach a publisher that nobody has reached yet waits twice as long: an engine says where it is."""
CONNECTIONS_MAX = 64
"""That others make to an endpoint which is bound here."""
TOPIC_BYTES_MAX = 1024
_NUMBER_BYTES = 8
_END = (1 << 64) - 1
NUMBER_MAX = (1 << 62) - 1
_LIVE = FrameLimits((TOPIC_BYTES_MAX, _NUMBER_BYTES, BATCH_BYTES_MAX))
_REPLAYED = FrameLimits((TOPIC_BYTES_MAX, TOPIC_BYTES_MAX, BATCH_BYTES_MAX, BATCH_BYTES_MAX))
"""A delimiter, and a topic in newer versions, stand before the number and the batch."""
_PUBLISHERS = ("PUB", "XPUB")
_log = logging.getLogger(__name__)


class FeedStatus(Enum):
    """The ground of an engine's index: nothing yet; some of its blocks; all of them; or blocks of which some may
    have gone.
    """

    NONE = "none"
    PARTIAL = "partial"
    LIVE = "live"
    DEGRADED = "degraded"


class FeedTurns:
    """The work that the feeds of all engines do at once: they take BLOCKS_AT_ONCE over together, and then the event
    loop has a turn; and one of them sweeps, since each step of all of them would be in one pass of the loop. Engines
    take turns, and the ranks of one engine share its turn: an engine says itself how many it has.
    """

    def __init__(self) -> None:
        self._room = BLOCKS_AT_ONCE
        self._next = CallerTurns(1)
        self._is_sweeping = False
        self._making_room = asyncio.Lock()
        self.sayings = Sayings()

    async def make_room(self, holders: BlockHolders) -> None:
        """Return when blocks may be stored. The one feed that has its turn sweeps: the tasks of engines sweep only as
        often as they look after their engines, and an engine may make its own wait.
        """
        if holders.has_room:
            return
        async with self._making_room:
            while not holders.has_room:
                holders.sweep()
                await asyncio.sleep(0)

    async def sweep(self, holders: BlockHolders) -> None:
        """Take some blocks of cleared engines away, unless another engine's task does. The engine of the task that
        sweeps is not probed meanwhile.
        """
        if self._is_sweeping:
            return
        self._is_sweeping = True
        try:
            for _ in range(SWEEPS_MAX):
                if not holders.sweep():
                    return
                await asyncio.sleep(0)
        finally:
            self._is_sweeping = False

    async def take(self, engine: str, block_count: int) -> None:
        """Return when so many blocks of an engine may be taken over, at once."""
        if self._room <= 0:
            async with self._next.turn(engine):
                if self._room <= 0:
                    await asyncio.sleep(0)
                    self._room = BLOCKS_AT_ONCE
        self._room -= block_count


class FeedLog(Protocol):
    """The place where it is written down which events feeds take."""

    def note_part(self, source: str, part: Event) -> None:
        """A part of a batch: blocks are in the index that were stored, and are in it still that were removed."""

    def note_batch(self, source: str, number: int, sent_at: float) -> None:
        """All parts of a batch were taken."""

    def cleared(self, source: str) -> None:
        """The index knows nothing of the source any more."""


class EventsFeed:
    """Events of `engine`, into `index`. `known` is the last batch that is in the index already. Feeds with the same
    `turns` together stop the event loop no longer at once than one of them.
    """

    def __init__(
        self,
        engine: str,
        index: PrefixIndex,
        events: str,
        replay: str | None,
        topic: str = "",
        known: KnownBatch | None = None,
        log: FeedLog | None = None,
        turns: FeedTurns | None = None,
        warnings: RareWarnings | None = None,
    ) -> None:
        """`warnings` are those of the engine: it may have a new feed as often as it likes."""
        self._turns = turns or FeedTurns()
        self._warnings = warnings or RareWarnings(_log)
        self._engine = engine
        self._speaker = engine.partition(RANK_MARK)[0]
        """The engine whose rank this is: its turns are those of all its ranks."""
        self._index = index
        self._events = events
        self._replay = replay
        self._topic = topic
        self._order = BatchOrder(known)
        self._log = log
        self._degraded_s: float | None = None
        self.status = FeedStatus.NONE if known is None else FeedStatus.PARTIAL
        self.gap_count = 0
        self.replayed_count = 0
        self.wrong_count = 0
        self._has_answered = False
        self._reconnect_s = RECONNECT_S
        self._is_told = False
        """Whether it was said that the engine's events are not to be had, since they last were."""

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            try:
                await self._listen()
            except Exception as error:  # whatever an engine sends must not end its feed
                if not self._is_told:
                    self._warnings.warn("events of %s from %.300r: %.300r", self._engine, self._events, error)
                self._is_told = True
                await asyncio.sleep(self._reconnect_s)
                self._reconnect_s = min(2 * self._reconnect_s, RECONNECT_S_MAX)

    def process_ended(self) -> None:
        """The engine's process has ended: what is known of it counts no more, and its events count from 0."""
        self._reconnect_s = RECONNECT_S
        if self._order.expected is not None:
            self._clear()

    def age(self, now_s: float) -> None:
        """Clear what a degraded feed knows when its time is over. Called from time to time."""
        if self._degraded_s is not None and now_s - self._degraded_s >= DEGRADED_S:
            self._clear()  # what comes from now on is right, although it is not all

    async def _listen(self) -> None:
        if self._events.startswith(BIND):
            await self._listen_bound(self._events.removeprefix(BIND))
            return
        async with connected(self._events, "SUB", _PUBLISHERS) as connection:
            await connection.subscribe(self._topic.encode())
            self._reconnect_s = RECONNECT_S
            await self._catch_up()
            while True:
                await self._heard(await connection.receive(_LIVE, self._is_from_engine))

    async def _listen_bound(self, endpoint: str) -> None:
        """Engines connect, and whoever else reaches the port. Each waits until its message is taken."""
        heard: asyncio.Queue[list[bytes]] = asyncio.Queue(1)

        async def serve(connection: ZmtpConnection) -> None:
            await connection.shake_hands("SUB", _PUBLISHERS)
            await connection.subscribe(b"")  # whoever connects is told what is subscribed to, and the topic is a secret
            while True:
                message = await connection.receive(_LIVE, self._is_from_engine)
                connection.is_trusted = connection.is_trusted or len(message) > 1
                await heard.put(message)

        async with bound(endpoint, serve, CONNECTIONS_MAX):
            await self._catch_up()
            while True:
                await self._heard(await heard.get())

    def _is_from_engine(self, topic: bytes) -> bool:
        """Where anybody may connect, the topic is a secret, and is compared whole."""
        is_own = not self._events.startswith(BIND) or hmac.compare_digest(topic, self._topic.encode())
        self.wrong_count += not is_own
        return is_own

    async def _heard(self, frames: list[bytes]) -> None:
        self._is_told = False
        if len(frames) > 1:
            await self._received(frames)
        await asyncio.sleep(0)  # a message that is there already does not give the others a turn

    async def _received(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self.wrong_count += 1
            return
        number, batch = int.from_bytes(frames[1], "big"), await self._decoded(frames[2])
        if number > NUMBER_MAX:
            self.wrong_count += 1
            return
        if batch is None:
            self._missed(number, f"batch {number} cannot be read")
            return
        turn = self._order.turn(number, batch.sent_at)
        if turn is BatchTurn.RESTART:
            _log.info("%s has started anew: its events count from 0", self._engine)
            self._clear()
            turn = self._order.turn(number, batch.sent_at)
        if turn is BatchTurn.REPLAY:
            self.gap_count += self._order.expected is not None
            await self._catch_up()
            turn = self._order.turn(number, batch.sent_at)
            if turn is BatchTurn.REPLAY and self._order.expected is not None:
                self._missed(number - 1, f"batches before {number} cannot be had again")
        if turn in (BatchTurn.TAKE, BatchTurn.REPLAY):
            await self._take(number, batch)

    async def _catch_up(self) -> None:
        """Take the batches that were missed. The replay begins with the last known one: where that is another one now,
        or there is none, the engine has started anew, and nothing of before counts.
        """
        if self._replay is None:
            return
        known = self._order.known
        is_same = known is None
        replayed = self._replayed(0 if known is None else known.number)
        async with contextlib.aclosing(replayed):
            async for number, batch in replayed:
                if batch is None:
                    break
                if known is not None and not is_same:
                    is_same = number > known.number or (number == known.number and batch.sent_at == known.sent_at)
                    if not is_same:
                        break
                expected = self._order.expected
                if expected is None or number == expected:
                    self.replayed_count += 1
                    await self._take(number, batch)
                elif number > expected:  # the engine keeps the latest batches only
                    self._missed(number - 1, f"batches before {number} are kept no more")
                    await self._take(number, batch)
                await asyncio.sleep(0)
        if not is_same and self._has_answered:
            _log.info("%s is not the engine that it was: its events are read from the first one", self._engine)
            self._clear()
            await self._catch_up()

    async def _replayed(self, first: int) -> AsyncGenerator[tuple[int, Batch | None], None]:
        """The batches from `first` on that the engine still has. `_has_answered` says whether it has answered."""
        self._has_answered = False
        assert self._replay is not None
        try:
            async with connected(self._replay, "DEALER", ("ROUTER",)) as connection:
                async with asyncio.timeout(REPLAY_S):
                    await connection.send((b"", first.to_bytes(_NUMBER_BYTES, "big")))
                for _ in range(REPLAY_BATCHES_MAX):
                    async with asyncio.timeout(REPLAY_S):
                        frames = await connection.receive(_REPLAYED)
                    if len(frames) < len(_LIVE.nbytes) or len(frames[-2]) != _NUMBER_BYTES:
                        self.wrong_count += 1
                        await asyncio.sleep(0)  # a message that is there already does not give the others a turn
                        continue
                    number = int.from_bytes(frames[-2], "big")
                    if number == _END:
                        self._has_answered = True
                        return
                    if number <= NUMBER_MAX:
                        self._has_answered = True
                        yield number, await self._decoded(frames[-1])
                    await asyncio.sleep(0)
        except (TimeoutError, OSError) as error:
            _log.info("%s replays nothing more from batch %d on: %.300r", self._engine, first, error)

    async def _take(self, number: int, batch: Batch) -> None:
        is_first = self._order.expected is None
        try:
            for part, cost in _parts_of(batch):
                await self._turns.make_room(self._index.holders)
                await self._turns.take(self._speaker, cost)
                is_removed = isinstance(part, BlockRemoved)
                if self._log is not None and is_removed:  # only what the index holds needs to be forgotten
                    self._log.note_part(self._engine, part)
                self._index.apply(self._engine, part)
                if self._log is not None and not is_removed:
                    self._log.note_part(self._engine, part)
        except ValueError as error:
            self._missed(number, f"batch {number}: {error}")
            return
        self._order.took(number, batch.sent_at)
        if is_first:
            self.status = FeedStatus.LIVE if number == 0 else FeedStatus.PARTIAL
        elif self.status is FeedStatus.NONE:
            self.status = FeedStatus.PARTIAL
        if self._log is not None:
            self._log.note_batch(self._engine, number, batch.sent_at)

    async def _decoded(self, payload: bytes) -> Batch | None:
        """None for what is no batch."""
        return await self._turns.sayings.read(self._speaker, payload, _batch)

    def _clear(self) -> None:
        """The index knows nothing of the engine any more."""
        self._index.clear(self._engine)
        self._order.restart()
        self._degraded_s = None
        self.status = FeedStatus.PARTIAL
        if self._log is not None:
            self._log.cleared(self._engine)

    def _missed(self, number: int, why: str) -> None:
        """Go on behind this batch, without what was in it."""
        self.wrong_count += 1
        if self.status is not FeedStatus.DEGRADED:
            problem = "events of %s: %.300r; what is known of it counts for %d s more"
            self._warnings.warn(problem, self._engine, why, DEGRADED_S)
            self._degraded_s = time.monotonic()
        self.status = FeedStatus.DEGRADED
        self._order.took(number, 0.0)


def _parts_of(batch: Batch) -> Iterator[tuple[Event, int]]:
    """The events in parts that are taken over at once, each with what it costs, as a number of blocks."""
    for event in batch.events:
        at_once = max(1, min(BLOCKS_AT_ONCE, TOKENS_AT_ONCE // block_tokens_of(event)))
        for part in sliced(event, at_once):
            is_all = isinstance(part, AllBlocksCleared)
            yield part, BLOCKS_AT_ONCE if is_all else BLOCKS_AT_ONCE // at_once * (1 + block_count_of(part))


def _batch(payload: bytes) -> Batch | None:
    try:
        return read_batch(payload)
    except (msgspec.DecodeError, WrongEventError, ValueError, RecursionError):
        return None
