"""Running requests. Each has an id, which an access key may use once and by which the request can be cancelled. The id
is remembered for as long as a replay could be valid.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.messages import Region
from storage_server.agents.rules.used_ids import SECRET_BYTES, UsedIds

REMEMBER_S = 30 * 60
"""A signature is valid from 15 minutes before to 15 minutes after its date, so a replay may come for 30 minutes."""

CLAIM = "whole"
"""Stands in place of a portion's label for the claim on a request's id."""

_T = TypeVar("_T")


class ActiveRequest:
    """A request under way: it moves bytes of a client's registered `region`, or it is a delivery over http. `drained`
    is set when nothing of the request can reach the client's memory any more.
    """

    def __init__(
        self, access_key: str, request_id: str, agent_id: str | None, region: Region | None, portion: str = ""
    ) -> None:
        self.access_key = access_key
        self.request_id = request_id
        self.portion = portion
        self.agent_id = agent_id
        self.region = region
        self.stopped_by: ObjectCacheError | None = None
        """The error with which the server stopped the request, and with which the caller is answered."""
        self.drained = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None

    def stop(self, error: ObjectCacheError) -> None:
        """End the request with this error at its next await; the work drains before it ends. Only the first error
        counts, because the later ones are consequences of it.
        """
        if self.stopped_by is None:
            self.stopped_by = error
        if self.task is not None:
            self.task.cancel()


class RequestTable:
    """The running requests and the used ids. `on_used` is called with the fingerprint of each id before its request
    begins.
    """

    def __init__(self, on_used: Callable[[int], None] = lambda fingerprint: None) -> None:
        self._on_used = on_used
        self._used = UsedIds(secrets.token_bytes(SECRET_BYTES), REMEMBER_S)
        self._active: dict[tuple[str, str], ActiveRequest] = {}
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def active_count(self) -> int:
        """How many requests are under way."""
        return len(self._active)

    def restore(self, secret: bytes, found: Iterable[tuple[int, float]]) -> None:
        """Take over what was used before this table was made: the secret, the fingerprints and the times of use, about
        in order.
        """
        self._used = UsedIds(secret, REMEMBER_S)
        for fingerprint, used_s in found:
            self._used.add(fingerprint, "", used_s)

    def active_for_agent(self, agent_id: str) -> list[ActiveRequest]:
        """Requests that move bytes of this agent's memory."""
        return [request for request in self._active.values() if request.agent_id == agent_id]

    def begin(
        self,
        access_key: str,
        request_id: str | None,
        now_s: float,
        agent_id: str | None = None,
        region: Region | None = None,
        portion: str = "",
    ) -> ActiveRequest:
        """Register a request that moves bytes of this region, if any; `run` comes next. With `portion`, the label
        of a portion of a request, each portion of one id may be begun once. Raises CallerError(RequestReplayed),
        ServerError(SlowDown).
        """
        if request_id is not None:
            if portion and self._is_used(access_key, request_id, now_s):
                raise _replayed(request_id)
            self._use(access_key, _used_as(request_id, portion), now_s)
        request = ActiveRequest(access_key, request_id or secrets.token_hex(16), agent_id, region, portion)
        self._active[access_key, _used_as(request.request_id, portion)] = request
        return request

    def claim(self, access_key: str, request_id: str, now_s: float) -> None:
        """Take an id for a request whose portions may be begun here, or elsewhere. Raises CallerError(RequestReplayed),
        ServerError(SlowDown).
        """
        if self._is_used(access_key, request_id, now_s):
            raise _replayed(request_id)
        self._use(access_key, _used_as(request_id, CLAIM), now_s)

    async def run(self, request: ActiveRequest, work: Coroutine[Any, Any, _T]) -> _T:
        """Carry the work out; the request ends with it. Raises what the work raises, or the error that the request was
        stopped with, such as CallerError(RequestCancelled) after `cancel`. When the caller of this method is cancelled
        instead, the work is cancelled at once and drains on its own.
        """
        task = asyncio.create_task(work)
        request.task = task
        self._running.add(task)

        def ended(_: asyncio.Task[_T]) -> None:
            self._running.discard(task)
            self._active.pop((request.access_key, _used_as(request.request_id, request.portion)), None)
            request.drained.set()
            if not task.cancelled():
                task.exception()

        task.add_done_callback(ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if request.stopped_by is not None:
                raise request.stopped_by from None
            task.cancel()
            raise

    async def close(self, timeout_s: float) -> None:
        """Cancel everything that runs and wait until it has drained, at most `timeout_s`."""
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def cancel(self, access_key: str, request_id: str, now_s: float) -> None:
        """Stop a request, with all its portions here, and wait until it has drained. An id that is not known yet is
        marked as used, so that a request that arrives later, or a further portion of it, is refused: after this method
        returns, nothing is written for the request.
        """
        active = self._active.get((access_key, request_id))
        requests = [active] if active is not None else self._active_portions(access_key, request_id)
        for request in requests:
            request.stop(CallerError(ErrorCode.CANCELLED, "the request was cancelled", field="request_id"))
        if active is None and not self._is_used(access_key, request_id, now_s):
            self._use(access_key, request_id, now_s, is_bounded=not requests)
        for request in requests:
            await request.drained.wait()

    def _active_portions(self, access_key: str, request_id: str) -> list[ActiveRequest]:
        return [
            request
            for request in self._active.values()
            if request.portion and (request.access_key, request.request_id) == (access_key, request_id)
        ]

    def _use(self, access_key: str, request_id: str, now_s: float, *, is_bounded: bool = True) -> None:
        fingerprint = self._used.fingerprint(access_key, request_id)
        if self._used.has(fingerprint, now_s) or (access_key, request_id) in self._active:
            raise _replayed(request_id)
        if is_bounded and not self._used.has_room(access_key, now_s):
            raise ServerError(ErrorCode.SLOW_DOWN, "this access key has used too many request ids", retryable=True)
        self._on_used(fingerprint)
        self._used.add(fingerprint, access_key, now_s)

    def _is_used(self, access_key: str, request_id: str, now_s: float) -> bool:
        return self._used.has(self._used.fingerprint(access_key, request_id), now_s)


def _used_as(request_id: str, portion: str) -> str:
    """The name under which an id is remembered: no id has a `#`."""
    return f"{request_id}#{portion}" if portion else request_id


def _replayed(request_id: str) -> CallerError:
    problem = f"request_id {request_id.partition('#')[0]} was used already"
    return CallerError(ErrorCode.REQUEST_REPLAYED, problem, field="request_id")
