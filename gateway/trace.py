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

from descriptors.objects import ReadRequest
from descriptors.storage_api import ObjectRead, StorageApi
from descriptors.tracing import REQUEST_ID_HEADER, ServerTiming
from gateway.body import RequestBody

_GATEWAY, _STORAGE, _TRANSFER = range(3)


class RequestTrace:
    """`trace_id` is ours, `request_id` the client's where it has named one, `headers` what every answer carries.

    Time is told apart by saying, where a stretch begins, whose it is; before, it is the gateway's.
    """

    __slots__ = (
        "_at_s", "_spent_s", "_whose", "bucket", "code", "headers", "key", "nbytes", "operation", "request_id",
        "trace_id", "upload",
    )  # fmt: skip

    def __init__(self, trace_id: str, headers: dict[str, str]) -> None:
        self.trace_id = trace_id
        self.request_id = trace_id
        self.headers = headers
        self.operation = "-"
        self.code = ""
        self.bucket = ""
        self.key = ""
        self.nbytes = 0
        self.upload: RequestBody | None = None
        self._spent_s = [0.0, 0.0, 0.0]
        self._whose = _GATEWAY
        self._at_s = time.perf_counter()

    def name(self, request_id: str | None) -> None:
        """The client's own id: the answer repeats it, an error too."""
        if request_id is not None:
            self.request_id = request_id
            self.headers[REQUEST_ID_HEADER] = request_id

    def work(self) -> None:
        """From now on it is the gateway that takes its time."""
        self._turn(_GATEWAY)

    def wait_for_storage(self) -> None:
        """From now on the storage side is waited for."""
        self._turn(_STORAGE)

    def wait_for_client(self) -> None:
        """From now on the client's connection is waited for."""
        self._turn(_TRANSFER)

    def _turn(self, whose: int) -> None:
        now_s = time.perf_counter()
        self._spent_s[self._whose] += now_s - self._at_s
        self._at_s, self._whose = now_s, whose

    def add_bytes(self, nbytes: int) -> None:
        """So many more of the answer's body are on their way."""
        self.nbytes += nbytes

    def moved(self, nbytes: int, transfer_s: float) -> None:
        """What a storage call that moved the payload says of it, when it is over."""
        self.nbytes = nbytes
        self._spent_s[_STORAGE] -= transfer_s
        self._spent_s[_TRANSFER] += transfer_s

    def timing(self) -> ServerTiming:
        """The split until now. Two clocks may disagree by a little: nothing is below 0."""
        self._turn(self._whose)
        gateway_s, storage_s, transfer_s = self._spent_s
        waited_s = 0.0 if self.upload is None else self.upload.waited_s
        return ServerTiming(gateway_s, max(0.0, storage_s - waited_s), transfer_s + waited_s)


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("request trace", default=None)


def follow(trace: RequestTrace) -> None:
    """From now on what this task does is done for that request."""
    _CURRENT.set(trace)


def current_request_id() -> str | None:
    """The id of the request this task is answering."""
    trace = _CURRENT.get()
    return None if trace is None else trace.request_id


def timed(storage: StorageApi) -> StorageApi:
    """The same storage, with the time of each call entered in the trace of the request that makes it; but for
    `open_object`, whose caller knows what it waits for.
    """
    return cast(StorageApi, _Timed(storage))


class _Timed:
    def __init__(self, storage: StorageApi) -> None:
        self._storage = storage
        for name, _ in inspect.getmembers(StorageApi, inspect.iscoroutinefunction):
            setattr(self, name, _timed_call(storage, name))

    def open_object(self, request: ReadRequest) -> AbstractAsyncContextManager[ObjectRead]:
        return self._storage.open_object(request)


def _timed_call(storage: StorageApi, name: str) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any) -> Any:
        trace = _CURRENT.get()
        if trace is None:
            return await getattr(storage, name)(*arguments)
        trace.wait_for_storage()
        try:
            return await getattr(storage, name)(*arguments)
        finally:
            trace.work()

    return call
