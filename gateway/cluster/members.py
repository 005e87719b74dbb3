"""A gateway's connections to the members of its cluster, and what it knows of each."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from descriptors.cluster import Member, View
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.placement import Placement
from descriptors.storage_api import SERVER_KEY
from gateway.cluster.hedging import Hedging
from gateway.storage_client import RemoteStorage, StaleViewError, StorageUnreachableError
from objectcache.adapters.breaker import Breaker
from objectcache.adapters.membership import Membership

FAILURES_MAX = 1
PAUSE_S_MIN, PAUSE_S_MAX = 0.25, 4.0
"""A member that could not be reached is asked again after a pause, which doubles with each failure."""
STALL_S = 2.0
"""The time without an answer, or without a byte, after which a member is asked whether it is there."""
QUESTION_S_MAX = 60.0
"""A member that is there and takes longer for a count of its chunks counts as gone: its disk may hang, for example."""
ALIVE_S = 1.0
"""A member that takes longer for an answer without work counts as gone."""
PACED_AGENTS_MAX = 4_096
ROUNDS_MAX = 8
"""How often one request takes a later view, where members refuse it for an older one."""
VIEWS_MAX = 3
"""How many views one call to one member is made under."""
CLOSE_AFTER_S = 60.0
"""The connections to a member that has left are kept for so long, since calls may still be under way."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
MakeStorage = Callable[[str], RemoteStorage]


class Members:
    """The members of the latest view. `start` before use, `close` after. Used on one event loop."""

    def __init__(self, membership: Membership, make_storage: MakeStorage) -> None:
        self.membership = membership
        self._make_storage = make_storage
        self._storages: dict[str, RemoteStorage] = {}
        self._breakers: dict[str, Breaker] = {}
        self._placement: Placement | None = None
        self._closing: dict[str, asyncio.Task[None]] = {}
        """By endpoint: views may change much faster than an endpoint is closed."""
        self.hedging = Hedging()
        """The hedging of this gateway's deliveries."""
        self._paced_agents: OrderedDict[str, None] = OrderedDict()
        membership.on_view(self._take)

    async def start(self) -> None:
        """Learn who the members are. Raises MembershipError."""
        await self.membership.start()

    async def close(self) -> None:
        """Close every connection."""
        await self.membership.close()
        for task in self._closing.values():
            task.cancel()
        if self._closing:
            await asyncio.wait(self._closing.values())
        for storage in self._storages.values():
            await storage.close()

    @property
    def view(self) -> View:
        """The latest view."""
        return self.membership.view

    @property
    def placement(self) -> Placement:
        """Where keys lie in the latest view. Raises ServerError(SlowDown) while it has no members."""
        view = self.view
        if not view.members:
            raise ServerError(ErrorCode.SLOW_DOWN, "the cluster has no storage server", retryable=True, retry_after_s=1)
        if self._placement is None or self._placement.view is not view:
            self._placement = Placement(view)
        return self._placement

    async def storage(self, member: Member) -> RemoteStorage:
        """The connections to a member."""
        found = self._storages.get(member.endpoint)
        if found is None:
            found = self._storages[member.endpoint] = self._make_storage(member.endpoint)
            await found.start()
        return found

    @property
    def unreachable(self) -> frozenset[str]:
        """The names of members that could not be reached a moment ago; none where that would leave nobody."""
        now_s = time.monotonic()
        names = frozenset(name for name, breaker in self._breakers.items() if breaker.is_open(now_s))
        return names if any(member.name not in names for member in self.view.placed) else frozenset()

    def failed(self, member: Member) -> None:
        """Note that a member could not be reached."""
        breaker = self._breakers.setdefault(member.name, Breaker(FAILURES_MAX, PAUSE_S_MIN, PAUSE_S_MAX))
        if not breaker.is_open(time.monotonic()):
            _log.warning("the storage server %s at %s cannot be reached", member.name, member.endpoint)
        breaker.failed(time.monotonic())

    def succeeded(self, member: Member) -> None:
        """Note that a member has answered."""
        breaker = self._breakers.get(member.name)
        if breaker is not None:
            breaker.succeeded()

    def note_paced(self, agent_id: str, *, is_paced: bool) -> None:
        """Note whether links made a delivery to this agent wait."""
        self._paced_agents.pop(agent_id, None)
        if is_paced:
            self._paced_agents[agent_id] = None
            if len(self._paced_agents) > PACED_AGENTS_MAX:
                self._paced_agents.popitem(last=False)

    def are_paced(self, agent_id: str) -> bool:
        """Whether links made the last delivery to this agent wait."""
        return agent_id in self._paced_agents

    async def require_alive(self, member: Member) -> None:
        """Raises StorageUnreachableError where a member that has gone quiet does not answer a question, either."""
        storage = await self.storage(member)
        try:
            async with asyncio.timeout(ALIVE_S):
                await storage.status.transports(SERVER_KEY)
        except (TimeoutError, StorageUnreachableError) as error:
            raise StorageUnreachableError(error) from error
        except ObjectCacheError:
            return  # a refusal is an answer

    async def watched(
        self, member: Member, call: Coroutine[Any, Any, _T], stall_s: float = STALL_S, call_s_max: float = math.inf
    ) -> _T:
        """The result of a call that may take long. The member is asked whether it is there whenever nothing has come
        for `stall_s`. Raises StorageUnreachableError where it is not, and where the call takes longer than
        `call_s_max`; then the call is not awaited any more.
        """
        task, loop = asyncio.ensure_future(call), asyncio.get_running_loop()
        too_late_s = loop.time() + call_s_max
        try:
            while not (await asyncio.wait([task], timeout=stall_s))[0]:
                if loop.time() > too_late_s:
                    raise StorageUnreachableError(TimeoutError("an answer takes too long"))
                await self.require_alive(member)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    @asynccontextmanager
    async def watching(self, member: Member) -> AsyncIterator[None]:
        """As `watched`, for awaits in the block: they end with StorageUnreachableError where the member is gone."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(STALL_S)
                try:
                    await self.require_alive(member)
                except StorageUnreachableError:
                    limit.reschedule(asyncio.get_running_loop().time())
                    return

        limit = asyncio.timeout(None)
        try:
            async with limit:
                watchdog = asyncio.create_task(watch())
                try:
                    yield
                finally:
                    watchdog.cancel()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StorageUnreachableError(error) from error

    async def in_latest_view(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """The result of `ask()`, which is called again under a later view where a member knows one. Raises
        StaleViewError where that view cannot be learned, or the call's body cannot be sent again.
        """
        for _ in range(VIEWS_MAX - 1):
            try:
                return await ask()
            except StaleViewError as stale:
                if stale.took_body:
                    raise
                await self.membership.refresh()
        return await ask()

    def _take(self, view: View) -> None:
        """Forget members that have left, and keep the connections to those that are back."""
        names, there = {member.name for member in view.members}, {member.endpoint for member in view.members}
        for name in set(self._breakers) - names:
            del self._breakers[name]
        for endpoint in there & set(self._closing):
            self._closing.pop(endpoint).cancel()
        for endpoint in set(self._storages) - set(self._closing) - there:
            self._closing[endpoint] = asyncio.get_running_loop().create_task(self._close_later(endpoint))

    async def _close_later(self, endpoint: str) -> None:
        await asyncio.sleep(CLOSE_AFTER_S)
        del self._closing[endpoint]
        storage = self._storages.pop(endpoint, None)
        if storage is not None:
            await storage.close()


def nobody() -> ServerError:
    """The error for a call that no member could carry out."""
    return ServerError(ErrorCode.SLOW_DOWN, "no storage server can be reached", retryable=True, retry_after_s=1)


async def stopped(futures: Sequence[asyncio.Future[_T]]) -> None:
    """Cancel those that are not done, and wait until they are."""
    unfinished = [future for future in futures if not future.done()]
    for future in unfinished:
        future.cancel()
    if unfinished:
        await asyncio.wait(unfinished)
