"""Request ids: each is used once per access key, can be cancelled, and is remembered while a replay could be valid."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.messages import Region

REMEMBER_S = 30 * 60
"""A signature is valid from 15 minutes before to 15 minutes after its date, so an id can come back for 30."""


class ActiveRequest:
    """A request under way that moves a client's registered memory, or a delivery over http. `drained` is set when
    nothing of it can reach the client's buffer any more.
    """

    def __init__(self, access_key: str, request_id: str) -> None:
        self.access_key = access_key
        self.request_id = request_id
        self.agent_id: str | None = None
        self.region: Region | None = None
        self.cancelled_by_caller = False
        self.drained = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Stop at the next await; the pipeline drains before it ends."""
        self.cancelled_by_caller = True
        if self.task is not None:
            self.task.cancel()


class RequestTable:
    """Remembers at most `ids_max` ids per access key; a key that used more within half an hour is told to slow down.
    `on_used` hears each id before its request begins.
    """

    def __init__(self, ids_max: int, on_used: Callable[[str, str], None] = lambda access_key, request_id: None) -> None:
        self._ids_max = ids_max
        self._on_used = on_used
        self._used: defaultdict[str, OrderedDict[str, float]] = defaultdict(OrderedDict)
        self._active: dict[tuple[str, str], ActiveRequest] = {}

    @property
    def active_count(self) -> int:
        """Deliveries under way."""
        return len(self._active)

    def restore(self, access_key: str, request_id: str, used_s: float) -> None:
        """An id that was used before this table was made. Oldest first."""
        self._used[access_key][request_id] = used_s

    def active_for_agent(self, agent_id: str) -> list[ActiveRequest]:
        """Deliveries that write into this agent's memory."""
        return [request for request in self._active.values() if request.agent_id == agent_id]

    def begin(self, access_key: str, request_id: str | None, now_s: float) -> ActiveRequest:
        """Register a delivery until `end`. Raises CallerError(RequestReplayed), ServerError(SlowDown)."""
        if request_id is not None:
            self._use(access_key, request_id, now_s)
        request = ActiveRequest(access_key, request_id or secrets.token_hex(16))
        self._active[access_key, request.request_id] = request
        return request

    def end(self, request: ActiveRequest) -> None:
        """The delivery is over and nothing of it is in flight."""
        self._active.pop((request.access_key, request.request_id), None)
        request.drained.set()

    async def cancel(self, access_key: str, request_id: str, now_s: float) -> None:
        """Stop a delivery and wait until it has drained. An id not seen yet is used up, so that a request still on its
        way is refused when it arrives: after this returns, nothing is written on its behalf.
        """
        request = self._active.get((access_key, request_id))
        if request is not None:
            request.cancel()
            await request.drained.wait()
        elif request_id not in self._used[access_key]:
            self._use(access_key, request_id, now_s)

    def _use(self, access_key: str, request_id: str, now_s: float) -> None:
        used = self._used[access_key]
        while used and next(iter(used.values())) < now_s - REMEMBER_S:
            used.popitem(last=False)
        if request_id in used or (access_key, request_id) in self._active:
            raise CallerError(
                ErrorCode.REQUEST_REPLAYED, f"request_id {request_id} was used already", field="request_id"
            )
        if len(used) >= self._ids_max:
            raise ServerError(ErrorCode.SLOW_DOWN, "this access key has used too many request ids", retryable=True)
        self._on_used(access_key, request_id)
        used[request_id] = now_s
