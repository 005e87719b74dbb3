"""One object, or many chunks, between the store and a registered buffer, by each of the paper's S3 paths (section 4.1).

Blocking, and safe from any thread. Besides what they name, calls raise ObjectCacheError for what the server refuses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from descriptors.descriptor import Delivery, Descriptor, RdmaTarget
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError, make_error
from descriptors.headers import RDMA_BYTES_HEADER, RDMA_REPLY_HEADER, REQUESTS_PATH
from descriptors.layout import ChunkLayout
from descriptors.rdma_token import TOKEN_HEADER, ObjectPath, RdmaToken, encode_token
from descriptors.tracing import REQUEST_ID_HEADER
from nixl_client.options import enum_member
from nixl_client.session.agent import GONE, ClientAgent
from nixl_client.session.retries import always, if_refused
from nixl_client.session.signed_http import SignedAnswer, SignedHttp, understood
from nixl_client.session.timing import Timing, split_time
from nixl_client.transports.buffers import Buffer, as_buffer
from nixl_client.transports.http import Stream, UnansweredError, number_in

_T = TypeVar("_T")


class Path(Enum):
    """How the bytes of one object go: S3TCP, S3RDMA Buffer, S3RDMA Direct."""

    TCP = "tcp"
    BUFFER = "buffer"
    DIRECT = "direct"


CONDITIONS = frozenset({"if-match", "if-none-match"})
_TOKEN_PATHS = {Path.BUFFER: ObjectPath.BUFFER, Path.DIRECT: ObjectPath.DIRECT}


@dataclass(frozen=True, slots=True)
class ObjectMoved:
    """`nbytes` are in the buffer, or stored. `path` is the path that they took: a GET that the server declines to write
    past HTTP comes as TCP. `headers` are the answer's, lower-case. `request_id` is in the servers' logs; `timing` is
    where the time went once the buffer was registered.
    """

    nbytes: int
    path: Path
    etag: str
    headers: Mapping[str, str]
    request_id: str
    timing: Timing


@dataclass(frozen=True, slots=True)
class Registered:
    """A buffer that the server may reach: the agent that registered it, and its region."""

    agent: ClientAgent
    region_id: str


@dataclass(frozen=True, slots=True)
class _Move:
    """An object move under way; `registered` is set where its bytes go past HTTP."""

    request_id: str
    registered: Registered | None
    began_s: float
    timeout_s: float

    def result(self, nbytes: int, path: Path, headers: Mapping[str, str], body_s: float = 0.0) -> ObjectMoved:
        timing = split_time(time.monotonic() - self.began_s, headers, body_s)
        with understood():
            return ObjectMoved(
                nbytes=nbytes,
                path=path,
                etag=headers["etag"].strip('"'),
                headers=headers,
                request_id=self.request_id,
                timing=timing,
            )


class BufferInUseError(ServerError):
    """The request's end is not known and the server could not be asked: the buffer must not be used again."""

    def __init__(self, cause: ObjectCacheError) -> None:
        super().__init__(ErrorCode.INTERNAL_ERROR, f"the buffer may still be in use: {cause.message}")


class ObjectPaths:
    """Objects of one bucket. `register` makes a buffer known to the server and keeps it referenced; doing so again
    changes nothing. `timeout_s` bounds each wait for the gateway; a call may take another bound in its own `timeout_s`.
    """

    def __init__(self, http: SignedHttp, bucket: str, register: Callable[[Any], Registered], timeout_s: float) -> None:
        self._http = http
        self._bucket = bucket
        self._register = register
        self._timeout_s = timeout_s

    def get_object(
        self,
        key: str,
        buffer: Any,
        *,
        offset: int = 0,
        length: int | None = None,
        path: Path | str = Path.DIRECT,
        byte_range: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> ObjectMoved:
        """Get an object, or its bytes from the first to the last of `byte_range`, into at most `length` bytes (the
        rest of the buffer) from `offset` on. Raises ValueError where that is outside the buffer, or a body is longer.
        """
        path, target = enum_member(Path, path, "path"), as_buffer(buffer)
        length = _checked_length(target, offset, length)
        headers = {} if byte_range is None else {"Range": f"bytes={byte_range[0]}-{byte_range[1]}"}
        registered = None if path is Path.TCP else self._register(buffer)

        def get(left_s: float) -> ObjectMoved:
            return self._get(
                key, target, headers=headers, move=_begin(registered, left_s), offset=offset, length=length, path=path
            )

        return self._http.retries.run(get, timeout_s or self._timeout_s)

    def _get(
        self,
        key: str,
        target: Buffer,
        headers: Mapping[str, str],
        move: _Move,
        offset: int,
        length: int,
        path: Path,
    ) -> ObjectMoved:
        if path is Path.TCP:
            named = {**headers, REQUEST_ID_HEADER: move.request_id}
            stream = self._http.stream("GET", self._path_of(key), timeout_s=move.timeout_s, headers=named)
        else:
            stream = self._with_token("GET", key, headers=headers, move=move, offset=offset, length=length, path=path)
        body_s = 0.0
        try:
            if RDMA_REPLY_HEADER not in stream.headers:
                head_at_s = time.monotonic()
                nbytes, path = _read_body(stream, target, offset, length), Path.TCP
                body_s = time.monotonic() - head_at_s
            else:
                nbytes = number_in(stream.headers, RDMA_BYTES_HEADER)
        finally:
            stream.close()
        return move.result(nbytes, path, stream.headers, body_s)

    def put_object(
        self,
        key: str,
        buffer: Any,
        *,
        offset: int = 0,
        length: int | None = None,
        path: Path | str = Path.DIRECT,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ObjectMoved:
        """Store `length` bytes (the rest of the buffer) from `offset` on. `headers` are those of any PUT; Content-MD5
        and checksums are the object's. A put with a condition (If-Match, If-None-Match) is made again only where the
        server has refused it: its own first try may be what the condition meets. Raises ValueError where that is
        outside the buffer.
        """
        path, target = enum_member(Path, path, "path"), as_buffer(buffer)
        length = _checked_length(target, offset, length)
        is_conditional = any(name.lower() in CONDITIONS for name in headers or ())
        registered = None if path is Path.TCP else self._register(buffer)

        def put(left_s: float) -> ObjectMoved:
            return self._put(
                key,
                target,
                headers=headers or {},
                move=_begin(registered, left_s),
                offset=offset,
                length=length,
                path=path,
            )

        return self._http.retries.run(put, timeout_s or self._timeout_s, if_refused if is_conditional else always)

    def _put(
        self,
        key: str,
        target: Buffer,
        headers: Mapping[str, str],
        move: _Move,
        offset: int,
        length: int,
        path: Path,
    ) -> ObjectMoved:
        if path is Path.TCP:
            body = target.host_view()[offset : offset + length]
            named = {**headers, REQUEST_ID_HEADER: move.request_id}
            answer = self._http.request_once(
                "PUT", self._path_of(key), query=None, body=body, timeout_s=move.timeout_s, headers=named
            )
            return move.result(length, path, answer.headers)
        stream = self._with_token("PUT", key, headers=headers, move=move, offset=offset, length=length, path=path)
        stream.close()
        if RDMA_REPLY_HEADER not in stream.headers:
            raise ServerError(ErrorCode.INTERNAL_ERROR, "the answer does not say that the token was executed")
        return move.result(length, path, stream.headers)

    def put_chunks(
        self,
        chunk_keys: Sequence[str],
        layout: ChunkLayout,
        buffer: Any,
        *,
        offset: int = 0,
        delivery: Delivery | str = Delivery.CHUNK_MAJOR,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Store chunks that lie in the buffer chunk after chunk (S3RDMA Batch) or layer after layer (S3RDMA Agg), in
        one request; their ETags. Raises the error of the first chunk that was not stored, with its index; the others
        may have been. Raises ValueError where N*L*S bytes from `offset` on are outside the buffer.
        """
        delivery = enum_member(Delivery, delivery, "delivery")
        length = layout.delivery_bytes(len(chunk_keys))
        _checked_length(as_buffer(buffer), offset, length)
        registered = self._register(buffer)

        def put(left_s: float) -> list[str]:
            return self._put_chunks(
                chunk_keys,
                layout,
                registered=registered,
                offset=offset,
                length=length,
                delivery=delivery,
                timeout_s=left_s,
            )

        return self._http.retries.run(put, timeout_s or self._timeout_s)

    def _put_chunks(
        self,
        chunk_keys: Sequence[str],
        layout: ChunkLayout,
        registered: Registered,
        offset: int,
        length: int,
        delivery: Delivery,
        timeout_s: float,
    ) -> list[str]:
        request_id = uuid.uuid4().hex

        def send(agent_id: str) -> SignedAnswer:
            descriptor = Descriptor(
                chunk_keys=tuple(chunk_keys),
                num_layers=layout.num_layers,
                chunk_tokens=layout.chunk_tokens,
                per_layer_chunk_bytes=layout.per_layer_chunk_bytes,
                delivery=delivery,
                rdma_target=RdmaTarget(agent_id, registered.region_id, offset, length),
                request_id=request_id,
            )
            body = encode_binary(descriptor)
            return self._http.request_once("PUT", f"/{self._bucket}", {"layerwise": ""}, body, timeout_s)

        answer = self._send_past_http(registered, request_id, send).json()
        with understood():
            puts = answer["chunks"]
            for index, put in enumerate(puts):
                if "etag" not in put:
                    raise make_error(ErrorCode(put["code"]), str(put["message"]), index=index)
            return [str(put["etag"]) for put in puts]

    def _with_token(
        self, method: str, key: str, headers: Mapping[str, str], move: _Move, offset: int, length: int, path: Path
    ) -> Stream:
        if move.registered is None:
            raise ValueError(f"{path} needs no token")
        region_id = move.registered.region_id

        def send(agent_id: str) -> Stream:
            token = RdmaToken(
                agent_id=agent_id,
                region_id=region_id,
                offset=offset,
                length=length,
                request_id=move.request_id,
                path=_TOKEN_PATHS[path],
            )
            with_token = {**headers, TOKEN_HEADER: encode_token(token)}
            return self._http.stream(method, self._path_of(key), timeout_s=move.timeout_s, headers=with_token)

        return self._send_past_http(move.registered, move.request_id, send)

    def _send_past_http(self, registered: Registered, request_id: str, send: Callable[[str], _T]) -> _T:
        """Send a request whose bytes go past HTTP; its answer comes when they have. Our side is polled meanwhile: over
        TCP nothing moves otherwise. An agent the server has forgotten is registered anew, and the request sent again:
        such a refusal comes before anything is moved. A move that may have started is stopped before an error is
        raised.
        """
        agent = registered.agent
        agent.receiver.listen(request_id, lambda _: None)
        try:
            agent_id = agent.agent_id()
            try:
                return send(agent_id)
            except ObjectCacheError as error:
                if error.code not in GONE:
                    raise
                agent.mark_gone(agent_id)
                return send(agent.agent_id())
        except ObjectCacheError as error:
            if isinstance(error, UnansweredError) and not error.never_sent:
                self._stop(request_id)
            raise
        except BaseException:
            self._stop(request_id)
            raise
        finally:
            agent.receiver.stop_listening(request_id)

    def _stop(self, request_id: str) -> None:
        """The server answers when nothing is in flight."""
        try:
            self._http.request_once("DELETE", f"{REQUESTS_PATH}/{request_id}")
        except ObjectCacheError as error:
            raise BufferInUseError(error) from error

    def _path_of(self, key: str) -> str:
        return f"/{self._bucket}/{key}"


def _begin(registered: Registered | None, timeout_s: float) -> _Move:
    return _Move(uuid.uuid4().hex, registered, time.monotonic(), timeout_s)


def _checked_length(target: Buffer, offset: int, length: int | None) -> int:
    wanted = target.nbytes - offset if length is None else length
    if offset < 0 or wanted < 0 or offset + wanted > target.nbytes:
        raise ValueError(f"{wanted} bytes from {offset} on are not within the buffer's {target.nbytes}")
    return wanted


def _read_body(stream: Stream, target: Buffer, offset: int, length: int) -> int:
    nbytes = number_in(stream.headers, "content-length")
    if nbytes > length:
        raise ValueError(f"the object's {nbytes} bytes do not fit {length}")
    stream.read_into(target.host_view()[offset : offset + nbytes])
    return nbytes
