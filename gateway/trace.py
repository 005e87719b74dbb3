"""One request's trace through the gateway: the request's id, and the phases that its time goes to.

The time from `handle` to the answer counts as the gateway's, except for storage calls. In a storage call, the time of
moving payload to or from the client counts as transfer, and the rest as storage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from descriptors.peer_calls import CallForm, PeerCall, role_of
from descriptors.storage_api import AgentsApi, Moved, ObjectsApi, PrefixesApi, StatusApi, StorageApi, UploadsApi
from descriptors.tracing import REQUEST_ID_HEADER, Phase, ServerTiming
from objectcache.adapters.phases import Phases


class RequestTrace:
    """`trace_id` is the gateway's id, `request_id` the client's where it has named one. `headers` are in every answer.
    `phases` are GATEWAY, STORAGE and TRANSFER. `client` is the address of the connection, `access_key` the signer's
    once the signature is good, and `facts` are what an operation adds to the line in the log.
    """

    __slots__ = (
        "access_key", "bucket", "client", "code", "facts", "headers", "key", "nbytes", "operation", "phases",
        "request_id", "trace_id",
    )  # fmt: skip

    def __init__(self, trace_id: str, headers: dict[str, str]) -> None:
        self.trace_id = trace_id
        self.request_id = trace_id
        self.headers = headers
        self.operation = "-"
        self.code = ""
        self.client = ""
        self.access_key = ""
        self.facts: dict[str, str | int] = {}
        self.bucket = ""
        self.key = ""
        self.nbytes = 0
        self.phases = Phases(Phase.GATEWAY)

    def name(self, request_id: str | None) -> None:
        """Set the client's own id, which every answer repeats, errors included."""
        if request_id is not None:
            self.request_id = request_id
            self.headers[REQUEST_ID_HEADER] = request_id

    def add_bytes(self, nbytes: int) -> None:
        """Count bytes of the answer's body."""
        self.nbytes += nbytes

    def moved(self, moved: Moved) -> None:
        """Take bytes and time from a finished storage call that moved payload."""
        self.nbytes = moved.nbytes
        self.phases.move(moved.transfer_s, Phase.STORAGE, Phase.TRANSFER)

    def timing(self) -> ServerTiming:
        """The time of each phase until now."""
        return ServerTiming(*map(self.phases.seconds, (Phase.GATEWAY, Phase.STORAGE, Phase.TRANSFER)))


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("request trace", default=None)


def follow(trace: RequestTrace) -> None:
    """Make `trace` the trace of the request that this task works for."""
    _CURRENT.set(trace)


def current_request_id() -> str | None:
    """The id of the request that this task is answering."""
    trace = _CURRENT.get()
    return None if trace is None else trace.request_id


class TimedStorage:
    """A StorageApi that adds the time of each call to the trace of the request that makes it. It does not measure
    `open_object`, because the caller of `open_object` measures the reads itself.
    """

    def __init__(self, storage: StorageApi) -> None:
        def made(call: PeerCall) -> Callable[..., Any]:
            def method(*values: Any, **named: Any) -> Any:
                return getattr(getattr(storage, call.role), call.method)(*values, **named)

            return method if call.form is CallForm.READ else _timed(method)

        self.objects: ObjectsApi = role_of("objects", made)
        self.uploads: UploadsApi = role_of("uploads", made)
        self.prefixes: PrefixesApi = role_of("prefixes", made)
        self.agents: AgentsApi = role_of("agents", made)
        self.status: StatusApi = role_of("status", made)


def _timed(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any, **named: Any) -> Any:
        trace = _CURRENT.get()
        if trace is None:
            return await method(*arguments, **named)
        with trace.phases.during(Phase.STORAGE):
            return await method(*arguments, **named)

    return call
