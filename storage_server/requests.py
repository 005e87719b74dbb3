"""Request ids: each is used once per access key, can be cancelled, and is remembered while a replay could be valid."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.storage_api import DeliveryOutcome

REMEMBER_S = 30 * 60
"""A signature is valid from 15 minutes before to 15 minutes after its date, so an id can come back for 30."""


class ActiveRequest:
    """A delivery under way. `drained` is set when none of its writes can reach the client's buffer any more."""

    def __init__(self, access_key: str, request_id: str) -> None:
        self.access_key = access_key
        self.request_id = request_id
        self.agent_id: str | None = None
        self.region_id: str | None = None
        self.cancelled_by_caller = False
        self.drained = asyncio.Event()
        self.task: asyncio.Task[DeliveryOutcome] | None = None

    def cancel(self) -> None:
        """Stop at the next await; the pipeline drains before it ends."""
        self.cancelled_by_caller = True
        if self.task is not None:
            self.task.cancel()


class RequestTable:
    """Bounded by `ids_max`; when full of ids that may still be replayed, new ones are told to slow down."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._used: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._active: dict[tuple[str, str], ActiveRequest] = {}

    @property
    def active_count(self) -> int:
        """Deliveries under way."""
        return len(self._active)

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
        del self._active[request.access_key, request.request_id]
        request.drained.set()

    async def cancel(self, access_key: str, request_id: str, now_s: float) -> None:
        """Stop a delivery and wait until it has drained. An id not seen yet is used up, so that a request still on its
        way is refused when it arrives: after this returns, nothing is written on its behalf.
        """
        request = self._active.get((access_key, request_id))
        if request is None:
            if (access_key, request_id) not in self._used:
                self._use(access_key, request_id, now_s)
            return
        request.cancel()
        await request.drained.wait()

    def _use(self, access_key: str, request_id: str, now_s: float) -> None:
        while self._used and next(iter(self._used.values())) < now_s - REMEMBER_S:
            self._used.popitem(last=False)
        if (access_key, request_id) in self._used:
            raise CallerError(
                ErrorCode.REQUEST_REPLAYED, f"request_id {request_id} was used already", field="request_id"
            )
        if len(self._used) >= self._ids_max:
            raise ServerError(ErrorCode.SLOW_DOWN, "too many request ids are remembered", retryable=True)
        self._used[access_key, request_id] = now_s
