"""The downlinks of clients, as a storage server keeps to them: it writes no faster into an agent's memory than its
share of the agent's downlink allows, and asks the agent's keeper for that share.

The shares are decided in delivery.scheduler.downlink_shares. Servers ask each other directly: a gateway that is killed
or hangs changes nobody's share. Until the keeper has answered, and where it cannot be asked, a server takes as
much of the downlink as its bytes are of those that all servers bring, as if the client had no other request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Protocol

from descriptors.cluster import Member
from descriptors.errors import ObjectCacheError
from storage_server.agents.rules.agents import RegisteredAgent
from storage_server.delivery.scheduler.downlink_shares import RENEW_S, SHARE_S, DownlinkShares
from storage_server.home.own_keys import OwnKeys

ASK_S = 0.25
"""A keeper that takes longer for an answer is not waited for."""
RENEW_MAX_S = SHARE_S / 2
RENEWALS_PER_S = 250.0
"""All downlinks together are asked for so often; with more of them each is asked for less often, but every RENEW_MAX_S.
"""
LEAST_BYTES_PER_S = 65_536.0
"""Each delivery goes so fast at least: it holds memory that others need."""
BURST_S = 0.005
"""So much time's worth of bytes may be sent at once."""
_log = logging.getLogger(__name__)


class DownlinkKeepers(Protocol):
    """The other members, as keepers of agents."""

    async def downlink_share(
        self, member: Member, agent: RegisteredAgent, writer: str, left_bytes: int, whole_bytes: int
    ) -> float:
        """The share of `writer`, in bytes/s. Raises ObjectCacheError, ConnectionError."""


class Pace:
    """How fast one delivery may be sent. Without a downlink nothing waits."""

    def __init__(self, downlink: _Downlink | None = None) -> None:
        self._downlink = downlink
        self.left_bytes = 0
        self._of_whole = 1.0

    @property
    def whole_bytes(self) -> float:
        """The bytes that all servers together have left for the same request, as far as one of them can know."""
        return self.left_bytes / self._of_whole

    def begin(self, nbytes: int, whole_bytes: int) -> None:
        """Note how many bytes the delivery has, and the whole of which it is a part."""
        self.left_bytes, self._of_whole = nbytes, nbytes / max(1, nbytes, whole_bytes) or 1.0
        if self._downlink is not None:
            self._downlink.begin()

    async def wait(self, nbytes: int) -> None:
        """Wait until the next payload, of so many bytes, may be sent."""
        if self._downlink is not None:
            await self._downlink.take(nbytes)
        self.left_bytes = max(0, self.left_bytes - nbytes)


class _Downlink:
    """One agent's downlink: a bucket that fills at the rate of this server's share. Deliveries take turns, payload by
    payload, and a payload goes when nothing is owed for those before.
    """

    def __init__(
        self, downlink_bytes_per_s: float, renew: Callable[[_Downlink], Coroutine[None, None, None]] | None
    ) -> None:
        """`renew` keeps the share as the keeper says, until it is cancelled; None where there is no keeper."""
        self._renew = renew
        self.paces: set[Pace] = set()
        self.has_begun = asyncio.Event()
        """Set when another delivery has begun, for which the keeper is asked at once."""
        self.renewing: asyncio.Task[None] | None = None
        self.is_shared = False
        """Whether the keeper has given a share that still holds."""
        self._downlink_bytes_per_s = downlink_bytes_per_s
        self._rate_bytes_per_s = downlink_bytes_per_s
        self._level_bytes = 0.0
        self._filled_s = time.monotonic()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def left_bytes(self) -> int:
        """The bytes that all deliveries have left, 1 at least while there are any."""
        return max(1, sum(pace.left_bytes for pace in self.paces)) if self.paces else 0

    @property
    def whole_bytes(self) -> int:
        """The bytes that all servers have left for the same requests."""
        return max(1, round(sum(pace.whole_bytes for pace in self.paces)))

    def begin(self) -> None:
        """A delivery has begun."""
        if not self.is_shared:
            self.take_own_part()
        self.has_begun.set()
        if self.renewing is None and self._renew is not None:
            self.renewing = asyncio.create_task(self._renew(self))

    def take_own_part(self) -> None:
        """Go on at the rate that is right where the client has no other requests."""
        self.is_shared = False
        self.set_rate(self._downlink_bytes_per_s * min(1.0, self.left_bytes / self.whole_bytes))

    def set_rate(self, rate_bytes_per_s: float) -> None:
        """Go on at this rate, or what deliveries need at least."""
        self._fill()
        self._rate_bytes_per_s = max(rate_bytes_per_s, LEAST_BYTES_PER_S * len(self.paces))
        self._changed.set()

    def owed_s(self) -> float:
        """How long the link still carries what was sent."""
        return max(0.0, -self._fill() / self._rate_bytes_per_s)

    async def take(self, nbytes: int) -> None:
        """Wait until so many bytes may go."""
        async with self._turn:
            while (owed_bytes := -self._fill()) > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(owed_bytes / self._rate_bytes_per_s):
                        await self._changed.wait()
            self._level_bytes -= nbytes

    def _fill(self) -> float:
        now_s = time.monotonic()
        filled_bytes = self._level_bytes + (now_s - self._filled_s) * self._rate_bytes_per_s
        self._level_bytes = min(filled_bytes, self._rate_bytes_per_s * BURST_S)
        self._filled_s = now_s
        return self._level_bytes


class Downlinks:
    """The downlinks of the agents that this server writes to. Used on one event loop."""

    def __init__(self, shares: DownlinkShares, own: OwnKeys | None, keepers: DownlinkKeepers | None) -> None:
        """`shares` are those that this server is the keeper of. Alone, without `own`, it has every downlink for itself;
        in a cluster it asks `keepers`.
        """
        self._shares = shares
        self._own = own
        self._keepers = keepers
        self._downlinks: dict[str, _Downlink] = {}
        self._giving_back: set[asyncio.Task[float]] = set()
        self.asked_count = 0
        """Shares that keepers were asked for since the start."""
        self.failed_count = 0
        """How many of these were not answered."""

    @asynccontextmanager
    async def pace(self, agent: RegisteredAgent) -> AsyncIterator[Pace]:
        """The pace of one delivery to an agent."""
        rate_bytes_per_s = agent.downlink_bytes_per_s
        if rate_bytes_per_s is None:
            yield Pace()
            return
        downlink = self._downlinks.get(agent.agent_id)
        if downlink is None:
            downlink = self._downlinks[agent.agent_id] = _Downlink(
                rate_bytes_per_s, None if self._own is None else partial(self._renew, agent, rate_bytes_per_s)
            )
        pace = Pace(downlink)
        downlink.paces.add(pace)
        try:
            yield pace
        finally:
            downlink.paces.discard(pace)
            if not downlink.paces:
                self._end(downlink, agent)

    async def close(self) -> None:
        """Ask for nothing more."""
        tasks = [*self._giving_back, *(each.renewing for each in self._downlinks.values() if each.renewing is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _renew(self, agent: RegisteredAgent, rate_bytes_per_s: float, downlink: _Downlink) -> None:
        """Keep the share as the keeper says, until cancelled."""
        until_s = 0.0
        while True:
            downlink.has_begun.clear()
            share = await self._ask(agent, rate_bytes_per_s, downlink.left_bytes, downlink.whole_bytes)
            if share > 0:
                downlink.is_shared, until_s = True, time.monotonic() + SHARE_S
                downlink.set_rate(share)
            elif time.monotonic() >= until_s:
                downlink.take_own_part()
            with suppress(TimeoutError):
                pause_s = len(self._downlinks) / RENEWALS_PER_S
                async with asyncio.timeout(min(max(RENEW_S, pause_s), RENEW_MAX_S)):
                    await downlink.has_begun.wait()

    async def _ask(self, agent: RegisteredAgent, rate_bytes_per_s: float, left_bytes: int, whole_bytes: int) -> float:
        """The share that the keeper gives; 0 where it gives none, or cannot be asked."""
        assert self._own is not None
        keeper = self._own.keeper_of_agent(agent.agent_id)
        if keeper is not None and keeper.name == self._own.name:
            now_s, name = time.monotonic(), self._own.name
            return self._shares.share(
                agent.agent_id,
                rate_bytes_per_s,
                writer=name,
                left_bytes=left_bytes,
                whole_bytes=whole_bytes,
                now_s=now_s,
            )
        self.asked_count += 1
        try:
            if keeper is None or self._keepers is None:
                raise ConnectionError("nobody is the keeper")
            async with asyncio.timeout(ASK_S):
                return await self._keepers.downlink_share(keeper, agent, self._own.name, left_bytes, whole_bytes)
        except Exception as error:  # be it an answer of another release: a delivery must not stand still for it
            self.failed_count += 1
            is_usual = isinstance(error, ObjectCacheError | ConnectionError | TimeoutError)
            _log.log(
                logging.DEBUG if is_usual else logging.WARNING,
                "the keeper of the agent %s cannot be asked for a share: %r",
                agent.agent_id,
                error,
            )
            return 0.0

    def _end(self, downlink: _Downlink, agent: RegisteredAgent) -> None:
        """Give the share back, since nothing is left. The downlink is forgotten when the link has carried all."""
        asyncio.get_running_loop().call_later(downlink.owed_s(), self._forget, agent.agent_id, downlink)
        if downlink.renewing is not None:
            downlink.renewing.cancel()
            downlink.renewing, downlink.is_shared = None, False
            task = asyncio.create_task(self._ask(agent, agent.downlink_bytes_per_s or 0.0, 0, 0))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    def _forget(self, agent_id: str, downlink: _Downlink) -> None:
        if not downlink.paces and self._downlinks.get(agent_id) is downlink:
            del self._downlinks[agent_id]
