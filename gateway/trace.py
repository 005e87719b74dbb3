"""One request's trace through the gateway: whose id it has, and where its time goes.

Time between `handle` and the answer is the gateway's but for what is spent in storage calls; of that, what moving
payload to or from the client took is the transfer's, and the rest the storage's.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, cast

from adapters.request_log import Stopwatch
from descriptors.objects import ReadRequest
from descriptors.storage_api import ObjectRead, StorageApi
from descriptors.tracing import REQUEST_ID_HEADER, ServerTiming
from gateway.body import RequestBody


class RequestTrace:
    """`trace_id` is ours, `request_id` the client's where it has named one, `headers` what every answer carries.
    `storage` runs during storage calls, `transfer` while payload moves in them; `upload` waits on its own.
    """

    __slots__ = (
        "_began_s", "bucket", "headers", "key", "nbytes", "operation", "request_id", "storage", "trace_id", "transfer",
        "upload",
    )  # fmt: skip

    def __init__(self, trace_id: str, headers: dict[str, str]) -> None:
        self.trace_id = trace_id
        self.request_id = trace_id
        self.headers = headers
        self.operation = "-"
        self.bucket = ""
        self.key = ""
        self.nbytes = 0
        self.storage = Stopwatch()
        self.transfer = Stopwatch()
        self.upload: RequestBody | None = None
        self._began_s = time.perf_counter()

    def name(self, request_id: str | None) -> None:
        """The client's own id: the answer repeats it, an error too."""
        if request_id is not None:
            self.request_id = request_id
            self.headers[REQUEST_ID_HEADER] = request_id

    def moved(self, nbytes: int, transfer_s: float) -> None:
        """What a storage call that moved payload past this process says of it."""
        self.nbytes = nbytes
        self.transfer.add(transfer_s)

    def timing(self) -> ServerTiming:
        """The split until now. Two clocks may disagree by a little; no part is less than nothing."""
        total_s = time.perf_counter() - self._began_s
        storage_s = self.storage.total_s
        transfer_s = self.transfer.total_s
        if self.upload is not None:
            transfer_s += self.upload.waited_s
        return ServerTiming(max(0.0, total_s - storage_s), max(0.0, storage_s - transfer_s), transfer_s)


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("request trace", default=None)


def follow(trace: RequestTrace) -> None:
    """From now on what this task does is done for that request."""
    _CURRENT.set(trace)


def current_request_id() -> str | None:
    """The id of the request this task is answering."""
    trace = _CURRENT.get()
    return None if trace is None else trace.request_id


def timed(storage: StorageApi) -> StorageApi:
    """The same storage, with the time of each call entered in the trace of the request that makes it."""
    return cast(StorageApi, _Timed(storage))


class _Timed:
    def __init__(self, storage: StorageApi) -> None:
        self._storage = storage
        for name, _ in inspect.getmembers(StorageApi, inspect.iscoroutinefunction):
            setattr(self, name, _timed_call(storage, name))

    def open_object(self, request: ReadRequest) -> AbstractAsyncContextManager[ObjectRead]:
        return _Opening(self._storage.open_object(request))


def _timed_call(storage: StorageApi, name: str) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any) -> Any:
        trace = _CURRENT.get()
        if trace is None:
            return await getattr(storage, name)(*arguments)
        with trace.storage:
            return await getattr(storage, name)(*arguments)

    return call


class _Opening:
    """Opening is the storage's time; what is done while the object is open is for its reader to say."""

    __slots__ = ("_opening",)

    def __init__(self, opening: AbstractAsyncContextManager[ObjectRead]) -> None:
        self._opening = opening

    async def __aenter__(self) -> ObjectRead:
        trace = _CURRENT.get()
        if trace is None:
            return await self._opening.__aenter__()
        with trace.storage:
            return await self._opening.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self._opening.__aexit__(*raised)
