"""RemoteStorage: the StorageApi of a storage server in another process, over HTTP with an HMAC on every call."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast

import aiohttp
from pydantic import TypeAdapter

from descriptors.cluster import VIEW_HEADER, ViewId
from descriptors.descriptor import Descriptor
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError, error_from_fields
from descriptors.objects import BodyDigests
from descriptors.peer_auth import AUTH_HEADER, CALL_HEADER, STREAMED_BODY, PeerSecrets, sign_call
from descriptors.peer_calls import ARGUMENT_BYTES_MAX, CALLS, RESULT_HEADER, CallForm, PeerCall, role_of
from descriptors.rdma_token import ObjectPath, RdmaToken, declined
from descriptors.storage_api import (
    AgentsApi,
    Body,
    BodySink,
    DeliveryOutcome,
    DeliveryStart,
    ObjectRead,
    ObjectsApi,
    Piece,
    PrefixesApi,
    StatusApi,
    UploadsApi,
)
from descriptors.tracing import PEER_REQUEST_ID_HEADER, Phase
from gateway.trace import current_request_id
from objectcache.adapters.careful_session import careful_session
from objectcache.adapters.phases import Phases, delivery_timing
from objectcache.adapters.threads import HERE_BYTES_MAX, HERE_ITEMS_MAX, computed
from objectcache.adapters.whole_answers import UNENCODED, read_whole

CONNECT_TIMEOUT_S = 5.0
_DIGESTS = TypeAdapter(BodyDigests)
_START = TypeAdapter(DeliveryStart)
REFUSAL_BYTES_MAX = 1 << 16
"""A refusal that is longer is no refusal: it is parsed on the event loop."""
_T = TypeVar("_T")


class StorageUnreachableError(ServerError):
    """The storage server did not answer. Whether the call took effect is unknown, unless the connection failed."""

    def __init__(self, cause: BaseException) -> None:
        self.never_connected = isinstance(cause, aiohttp.ClientConnectorError | UnicodeError)
        self.has_ended = False
        """Whether the call surely moves no bytes any more."""
        code = ErrorCode.SLOW_DOWN if self.never_connected else ErrorCode.INTERNAL_ERROR
        super().__init__(code, "the storage server cannot be reached", retryable=True)


class StaleViewError(ServerError):
    """The storage server knows a later view of the cluster than the one that the call was made under. Nothing of the
    call was carried out. `took_body` says that bytes of its body were read, so that it cannot be made again.
    """

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.SLOW_DOWN, message, retryable=True, field=VIEW_HEADER, retry_after_s=1)
        self.took_body = False


class RemoteStorage:
    """Implements descriptors.storage_api.StorageApi over `endpoint`: http://HOST:PORT, https://HOST:PORT or
    unix:/PATH."""

    def __init__(
        self,
        endpoint: str,
        secrets: PeerSecrets,
        view_id: Callable[[], ViewId] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """With `view_id`, calls say under which view of a cluster they are made. `tls` is for https endpoints."""
        self._peer = Peer(endpoint, secrets, view_id, tls)
        made = partial(_method, self._peer)
        self.objects: ObjectsApi = role_of("objects", made)
        self.uploads: UploadsApi = role_of("uploads", made)
        self.prefixes: PrefixesApi = role_of("prefixes", made)
        self.agents: AgentsApi = role_of("agents", made)
        self.status: StatusApi = role_of("status", made)

    async def start(self) -> None:
        """Open the connection pool."""
        await self._peer.start()

    async def close(self) -> None:
        """Close the connection pool."""
        await self._peer.close()


class Peer:
    """Connections to one storage server, and one method for each form of call."""

    def __init__(
        self,
        endpoint: str,
        secrets: PeerSecrets,
        view_id: Callable[[], ViewId] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._secrets = secrets
        self._tls = tls
        self._view_id = view_id
        self._base = endpoint
        self._socket_path: str | None = None
        if endpoint.startswith("unix:"):
            self._base, self._socket_path = "http://storage-server", endpoint.removeprefix("unix:")
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connection pool. It has no bound of its own, because the gateway bounds its own connections."""
        connector: aiohttp.BaseConnector
        if self._socket_path is not None:
            connector = aiohttp.UnixConnector(self._socket_path, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = careful_session(connector, timeout=timeout, headers=UNENCODED, max_field_size=65_536)

    async def close(self) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def values(self, call: PeerCall, arguments: Mapping[str, Any]) -> Any:
        """Make a call whose arguments and result are values; long arguments travel in the body."""
        _refuse_staging(arguments)
        async with self._drained_if_lost(arguments):
            return await _decoded(call, await self._exchange(call, *await _encoded(call, arguments)))

    async def send(self, call: PeerCall, arguments: Mapping[str, Any]) -> Any:
        """Make a call with object bytes. If reading the body fails, the body's own error is raised, not the error with
        which the storage server answers a cut body. In a cluster the body waits for the storage server's leave, because
        a server that knows a later view refuses the call, and then the same body goes to another one.
        """
        body: Body = arguments["body"]
        failures: list[BaseException] = []
        waits_for_leave = body.is_held_back or self._view_id is not None
        is_taken = False

        async def pieces() -> AsyncIterator[Piece]:
            nonlocal is_taken
            is_taken = True
            try:
                async for piece in body:
                    yield piece
                yield _DIGESTS.dump_json(body.digests())
            except Exception as error:  # without CancelledError, which a refused body gets
                failures.append(error)
                raise

        fields = {**call.encode(arguments)[0], "has_sha256": body.has_sha256}
        try:
            async with self._open(call, fields, pieces(), waits_for_leave=waits_for_leave) as response:
                return await _decoded(call, await read_whole(response, call.result_bytes_max))
        except ObjectCacheError as error:
            if isinstance(error, StaleViewError):
                error.took_body = is_taken
            if failures:
                raise failures[0] from None
            raise

    @asynccontextmanager
    async def read(self, call: PeerCall, arguments: Mapping[str, Any]) -> AsyncIterator[ObjectRead]:
        """Make a call that is answered with object bytes."""
        async with self._open(call, *call.encode(arguments)) as response:
            yield ObjectRead(await _decoded(call, _result(response)), _body(response))

    async def deliver(self, call: PeerCall, arguments: Mapping[str, Any]) -> DeliveryOutcome:
        """Make a delivery. Its payload is relayed to the sink, unless it goes to registered memory."""
        descriptor: Descriptor = arguments["descriptor"]
        if descriptor.rdma_target is not None:
            return cast(DeliveryOutcome, await self.values(call, arguments))
        sink: BodySink = arguments["sink"]
        phases = Phases(Phase.PLAN)
        async with self._open(call, *await _encoded(call, arguments)) as response:
            start = _sensible(lambda: _START.validate_json(_result(response)))
            phases.enter(Phase.GATHER)
            await sink.begin(start)
            relayed_bytes = 0
            try:
                async for piece in _body(response):
                    relayed_bytes += len(piece)
                    if relayed_bytes > start.delivery_bytes:
                        raise _other_size(start, relayed_bytes)
                    with phases.during(Phase.TRANSFER):
                        await sink.write(memoryview(piece))
                if relayed_bytes < start.delivery_bytes:
                    raise _other_size(start, relayed_bytes)
            except BaseException:
                sink.abort()
                raise
            return DeliveryOutcome(start, relayed_bytes, delivery_timing(phases))

    @asynccontextmanager
    async def _drained_if_lost(self, arguments: Mapping[str, Any]) -> AsyncIterator[None]:
        """Guard a call that moves bytes of registered memory. An answer tells the client that its memory is free. So
        when the storage server's answer is lost, the client must get none until the request has surely drained.

        Raises ConnectionResetError, which closes the client's connection without an answer, when that cannot be known.
        """
        request_id = _request_id(arguments)
        try:
            yield
        except StorageUnreachableError as lost:
            if request_id is None or lost.never_connected:
                raise
            cancel = CALLS["prefixes.cancel"]
            try:
                await self.values(cancel, cancel.bound(arguments["access_key"], request_id))
            except ObjectCacheError as error:
                raise ConnectionResetError("the storage server may still be moving bytes") from error
            raise lost

    async def _exchange(self, call: PeerCall, fields: Mapping[str, Any], document: bytes) -> bytes:
        encoded = json.dumps(fields).encode()
        if not document and len(encoded) > ARGUMENT_BYTES_MAX:
            fields, document = {}, encoded
        async with self._open(call, fields, document) as response:
            return await read_whole(response, call.result_bytes_max)

    @asynccontextmanager
    async def _open(
        self,
        call: PeerCall,
        fields: Mapping[str, Any],
        body: bytes | AsyncIterator[Piece] = b"",
        *,
        waits_for_leave: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST one call. An error that the storage server names is raised here. A body whose client waits for leave to
        send goes out when the storage server has accepted the request.
        """
        if self._session is None:
            raise RuntimeError("start() was not called")
        text = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
        body_sha256 = STREAMED_BODY
        if isinstance(body, bytes):
            data = body
            is_long = len(data) > HERE_BYTES_MAX
            body_sha256 = await computed(lambda: hashlib.sha256(data).hexdigest(), is_long=is_long)
        headers = {
            CALL_HEADER: text,
            AUTH_HEADER: sign_call(self._secrets.signing, call.operation, text, body_sha256, time.time()),
        }
        request_id = current_request_id()
        if request_id is not None:
            headers[PEER_REQUEST_ID_HEADER] = request_id
        if self._view_id is not None:
            headers[VIEW_HEADER] = str(self._view_id())
        try:
            url = f"{self._base}/v1/{call.operation}"
            async with self._session.post(
                url, data=body, headers=headers, expect100=waits_for_leave, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise _refusal(await read_whole(response, REFUSAL_BYTES_MAX), response.status)
                yield response
        except (aiohttp.ClientError, TimeoutError, UnicodeError) as error:  # of a name that no host can have
            raise StorageUnreachableError(error) from error


def _other_size(start: DeliveryStart, nbytes: int) -> StorageUnreachableError:
    problem = f"a delivery of {start.delivery_bytes} bytes whose body has {nbytes}"
    return StorageUnreachableError(ConnectionError(problem))


def _refusal(body: bytes, status: int) -> ObjectCacheError:
    """The error that a storage server names. An answer of something else, a proxy for example, counts as none."""
    try:
        error = error_from_fields(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return StorageUnreachableError(ConnectionError(f"an answer {status} that no storage server gives"))
    return StaleViewError(error.message) if error.field == VIEW_HEADER else error


def _method(peer: Peer, call: PeerCall) -> Callable[..., Any]:
    make = {
        CallForm.VALUES: peer.values,
        CallForm.BODY: peer.send,
        CallForm.READ: peer.read,
        CallForm.SINK: peer.deliver,
    }[call.form]
    return lambda *values, **named: make(call, call.bound(*values, **named))


def _request_id(arguments: Mapping[str, Any]) -> str | None:
    """The id under which the call moves bytes of registered memory; None where it moves none."""
    for value in arguments.values():
        if isinstance(value, RdmaToken):
            return value.request_id
        if isinstance(value, Descriptor) and value.rdma_target is not None:
            return value.request_id or ""
    return None


def _refuse_staging(arguments: Mapping[str, Any]) -> None:
    """Raises CallerError(NotImplemented) for the Buffer path, since a gateway in its own process has no UCX."""
    for value in arguments.values():
        if isinstance(value, RdmaToken) and value.path is ObjectPath.BUFFER:
            raise declined("this gateway has no ucx transport to send from its own memory")


def _result(response: aiohttp.ClientResponse) -> bytes:
    return _sensible(lambda: base64.urlsafe_b64decode(response.headers[RESULT_HEADER]))


async def _encoded(call: PeerCall, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The fields and the document of a call, from a thread where the document names many keys."""
    keys = () if call.document is None else getattr(arguments[call.document], "chunk_keys", ())
    return await computed(lambda: call.encode(arguments), is_long=len(keys) > HERE_ITEMS_MAX)


async def _decoded(call: PeerCall, result: bytes) -> Any:
    """The value of a result, from a thread where it is long. Raises StorageUnreachableError for what is none."""
    return await computed(lambda: _sensible(lambda: call.decode_result(result)), is_long=len(result) > HERE_BYTES_MAX)


def _sensible(read: Callable[[], _T]) -> _T:
    """The value that was read from an answer. A member that answers nonsense counts as one that cannot be reached."""
    try:
        return read()
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StorageUnreachableError(ConnectionError("an answer that no storage server gives")) from error


async def _body(response: aiohttp.ClientResponse) -> AsyncIterator[Piece]:
    async for piece in response.content.iter_any():
        yield piece
