"""ObjectCacheClient: put chunks, look a prefix up, fetch its layers into your own buffer.

Blocking calls are safe from any thread; `fetch_layers` and the `_async` methods are the same for event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from enum import Enum
from typing import Any

from adapters.nixl_agent import NixlFailure, is_available
from descriptors.descriptor import Delivery, Descriptor, OnMissing, RdmaTarget
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.layout import ChunkLayout
from descriptors.messages import LookupRequest, lookup_body
from descriptors.notices import Mode
from nixl_client.buffers import Buffer, as_buffer
from nixl_client.fetch import Layer, LayerFetch
from nixl_client.http import Answer, SignedHttp, Stream, UnansweredError
from nixl_client.ledger import ProtocolViolationError
from nixl_client.receiver import Receiver
from nixl_client.registration import GONE, LIFETIME_S, AgentSession

FETCHES_MAX = 64
PUT_THREADS = 8
_log = logging.getLogger(__name__)


class Transport(Enum):
    """How layers reach the buffer. AUTO is UCX where NIXL is installed here and the server offers it, else HTTP."""

    AUTO = "auto"
    UCX = "ucx"
    HTTP = "http"


class ObjectCacheClient:
    """A client of one bucket. Credentials default to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. `timeout_s` bounds
    each wait for the gateway, `fetch_timeout_s` the silence on a fetch's own request. The agent is renewed every third
    of `agent_lifetime_s`; a client that stops doing so is forgotten by the server after that time.

    Every method raises ObjectCacheError (CallerError, ChunkUnavailable, ServerError) for what the server refuses.
    """

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        *,
        access_key: str | None = None,
        secret_key: str | None = None,
        region: str = "us-east-1",
        transport: Transport | str = Transport.AUTO,
        timeout_s: float = 60.0,
        fetch_timeout_s: float = 600.0,
        agent_lifetime_s: float = LIFETIME_S,
    ) -> None:
        access_key = access_key or os.environ.get("AWS_ACCESS_KEY_ID")
        secret_key = secret_key or os.environ.get("AWS_SECRET_ACCESS_KEY")
        if not access_key or not secret_key:
            raise ValueError("credentials are needed: pass them or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        self.bucket = bucket
        self._http = SignedHttp(endpoint, access_key, secret_key, region, timeout_s)
        self._fetch_timeout_s = fetch_timeout_s
        self._agent_lifetime_s = agent_lifetime_s
        self._wanted = Transport(transport)
        self._lock = threading.Lock()
        self._receiver: Receiver | None = None
        self._session: AgentSession | None = None
        self._http_only = self._wanted is Transport.HTTP
        self._fetchers = ThreadPoolExecutor(FETCHES_MAX, "objectcache-fetch")
        self._waiters = ThreadPoolExecutor(FETCHES_MAX, "objectcache-wait")
        self._putters = ThreadPoolExecutor(PUT_THREADS, "objectcache-put")
        self._streams: dict[str, Stream] = {}
        self._buffers: dict[int, Any] = {}

    def close(self) -> None:
        """Deregister from the gateway, which waits for writes in flight, and free everything."""
        try:
            if self._session is not None:
                self._session.close()
        finally:
            if self._receiver is not None:
                self._receiver.stop()
            for pool in (self._fetchers, self._waiters, self._putters):
                pool.shutdown()
            self._http.close()
            self._buffers.clear()

    def __enter__(self) -> ObjectCacheClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_chunks(self, chunk_keys: Sequence[str], chunks: Sequence[Any]) -> None:
        """Store whole chunk objects (L*S bytes each, KV_L2TD), several at a time.

        The first failure is raised after the puts under way have ended; later chunks are then not started.
        """
        if len(chunk_keys) != len(chunks):
            raise ValueError(f"{len(chunk_keys)} keys, {len(chunks)} chunks")
        failed = threading.Event()

        def put(key: str, chunk: Any) -> None:
            if failed.is_set():
                return
            try:
                self._http.request("PUT", f"/{self.bucket}/{key}", body=memoryview(chunk).cast("B"))
            except BaseException:
                failed.set()
                raise

        waiting = [self._putters.submit(put, key, chunk) for key, chunk in zip(chunk_keys, chunks, strict=True)]
        _raise_first(waiting)

    def lookup(self, chunk_keys: Sequence[str], lease_s: float = 0.0) -> int:
        """How many chunks, from the first, are stored without a gap; `lease_s` keeps them from eviction that long."""
        if not chunk_keys:
            return 0
        body = lookup_body(LookupRequest(tuple(chunk_keys), lease_s))
        return int(self._http.request("POST", f"/{self.bucket}", {"lookup": ""}, body).json()["matched"])

    def register_buffer(self, array: Any) -> Transport:
        """Register a buffer for one-sided writes ahead of its first fetch; the transport fetches into it will use.

        Buffers stay registered, and referenced, until `release_buffer` or `close`.
        """
        return Transport.HTTP if self._region(as_buffer(array), array) is None else Transport.UCX

    def release_buffer(self, array: Any) -> None:
        """Deregister a buffer: on return the server cannot write into it."""
        buffer = as_buffer(array)
        if self._session is not None:
            self._session.release(buffer)
        self._buffers.pop(buffer.memory.address, None)

    def fetch(
        self,
        chunk_keys: Sequence[str],
        layout: ChunkLayout,
        buffer: Any,
        *,
        offset: int = 0,
        delivery: Delivery = Delivery.AUTO,
        on_missing: OnMissing = OnMissing.FAIL,
        layer_compute_us: Sequence[int] = (),
    ) -> LayerFetch:
        """Start fetching into `buffer` (numpy, torch or bytes-like) from byte `offset` on, and return at once.

        The buffer needs N*L*S bytes from `offset`. It must not be touched, but for layers that are ready, until the
        fetch is settled: `wait` returned, or `cancel` did.
        """
        target = as_buffer(buffer)
        region_id = self._region(target, buffer)
        descriptor = Descriptor(
            chunk_keys=tuple(chunk_keys),
            num_layers=layout.num_layers,
            chunk_tokens=layout.chunk_tokens,
            per_layer_chunk_bytes=layout.per_layer_chunk_bytes,
            delivery=delivery,
            on_missing=on_missing,
            request_id=uuid.uuid4().hex,
            layer_compute_us=tuple(layer_compute_us),
        )
        if offset < 0 or offset + descriptor.payload_bytes > target.nbytes:
            raise ValueError(f"{descriptor.payload_bytes} bytes from {offset} on do not fit {target.nbytes}")
        run: Callable[[LayerFetch], None]
        if region_id is None:
            view = target.host_view()[offset : offset + descriptor.payload_bytes]
            run = lambda fetch: self._fetch_http(fetch, view)  # noqa: E731
        else:
            run = self._fetch_ucx
            agent_id = self._require_session().agent_id()
            rdma_target = RdmaTarget(agent_id, region_id, offset, descriptor.payload_bytes)
            descriptor = replace(descriptor, rdma_target=rdma_target)
        fetch = LayerFetch(descriptor, target, offset, self._cancel)
        if self._receiver is not None and region_id is not None:
            self._receiver.listen(fetch.request_id, fetch.on_notice)
        self._fetchers.submit(run, fetch)
        return fetch

    async def fetch_layers(
        self, chunk_keys: Sequence[str], layout: ChunkLayout, buffer: Any, **options: Any
    ) -> AsyncIterator[Layer]:
        """The layers in order, each as soon as it is complete; options as for `fetch`. Leaving early cancels."""
        loop = asyncio.get_running_loop()
        fetch = await loop.run_in_executor(self._waiters, lambda: self.fetch(chunk_keys, layout, buffer, **options))
        try:
            for layer_index in range(layout.num_layers):
                yield await loop.run_in_executor(self._waiters, fetch.wait_layer, layer_index)
            await loop.run_in_executor(self._waiters, fetch.wait)
        finally:
            await asyncio.shield(asyncio.to_thread(fetch.cancel))

    async def put_chunks_async(self, chunk_keys: Sequence[str], chunks: Sequence[Any]) -> None:
        """`put_chunks` for event loops."""
        await asyncio.get_running_loop().run_in_executor(self._waiters, self.put_chunks, chunk_keys, chunks)

    async def lookup_async(self, chunk_keys: Sequence[str], lease_s: float = 0.0) -> int:
        """`lookup` for event loops."""
        return await asyncio.get_running_loop().run_in_executor(self._waiters, self.lookup, chunk_keys, lease_s)

    def _region(self, buffer: Buffer, array: Any) -> str | None:
        """The buffer's region id, or None where the http transport is to be used."""
        if self._http_only:
            return None
        try:
            region_id = self._require_session().region_of(buffer)
        except (ImportError, NixlFailure, ObjectCacheError) as error:
            unsupported = not isinstance(error, ObjectCacheError) or error.code is ErrorCode.NOT_IMPLEMENTED
            if self._wanted is Transport.UCX or not unsupported:
                raise
            _log.info("ucx is not to be had here, using http: %s", error)
            self._http_only = True
            return None
        self._buffers[buffer.memory.address] = array
        return region_id

    def _require_session(self) -> AgentSession:
        with self._lock:
            if self._session is None:
                if not is_available():
                    raise ImportError("NIXL is not installed: pip install 'objectcache[ucx]'")
                self._receiver = Receiver()
                self._session = AgentSession(self._http, self._receiver, self._agent_lifetime_s)
            return self._session

    def _fetch_ucx(self, fetch: LayerFetch) -> None:
        """POST the descriptor; its answer comes when every write is done. What may have started is never sent twice."""
        try:
            answer = self._post_ucx(fetch)
            transferred_bytes = int(answer.headers["x-amz-rdma-bytes-transferred"])
            fetch.on_answer(*_shape(answer.headers), transferred_bytes)
        except UnansweredError as error:
            fetch.on_failure(error)
            with contextlib.suppress(ObjectCacheError):  # the caller's own cancel meets the error again
                self._cancel(fetch)
        except ObjectCacheError as error:
            fetch.on_failure(error)
            fetch.settle()
        except Exception as error:
            _log.exception("fetch %s", fetch.request_id)
            fetch.on_failure(ServerError(ErrorCode.INTERNAL_ERROR, f"the client failed: {error}"))
        finally:
            if self._receiver is not None:
                self._receiver.forget(fetch.request_id)

    def _post_ucx(self, fetch: LayerFetch) -> Answer:
        """Where the gateway has forgotten our agent (it restarted, or we were suspended), register anew and ask again:
        such a refusal comes before anything is planned.
        """
        path, query = f"/{self.bucket}", {"layerwise": ""}
        try:
            return self._http.request("POST", path, query, encode_binary(fetch.descriptor), self._fetch_timeout_s)
        except ObjectCacheError as error:
            target = fetch.descriptor.rdma_target
            if error.code not in GONE or target is None:
                raise
            session = self._require_session()
            session.forget(target.agent_id)
            fetch.descriptor = replace(fetch.descriptor, rdma_target=replace(target, agent_id=session.agent_id()))
            return self._http.request("POST", path, query, encode_binary(fetch.descriptor), self._fetch_timeout_s)

    def _fetch_http(self, fetch: LayerFetch, view: memoryview) -> None:
        """POST the descriptor and read the body into the buffer, layer by layer."""
        stream: Stream | None = None
        try:
            body = encode_binary(fetch.descriptor)
            stream = self._http.stream("POST", f"/{self.bucket}", {"layerwise": ""}, body, self._fetch_timeout_s)
            self._streams[fetch.request_id] = stream
            mode, chunk_count = _shape(stream.headers)
            fetch.on_start(mode, chunk_count)
            layout = fetch.descriptor.layout
            if mode is Mode.LAYER_MAJOR:
                nbytes = layout.layer_bytes(chunk_count)
                for layer_index in range(layout.num_layers):
                    stream.read_into(view[layer_index * nbytes : (layer_index + 1) * nbytes])
                    fetch.on_layer(layer_index)
            else:
                stream.read_into(view[: layout.payload_bytes(chunk_count)])
            fetch.on_answer(mode, chunk_count, layout.payload_bytes(chunk_count))
        except ObjectCacheError as error:
            fetch.on_failure(error)
        except Exception as error:
            _log.exception("fetch %s", fetch.request_id)
            fetch.on_failure(ServerError(ErrorCode.INTERNAL_ERROR, f"the client failed: {error}"))
        finally:
            self._streams.pop(fetch.request_id, None)
            if stream is not None:
                stream.close()
            fetch.settle()

    def _cancel(self, fetch: LayerFetch) -> None:
        """Make sure nothing writes into the fetch's buffer any more, then settle it."""
        path = f"/_objectcache/requests/{fetch.request_id}"
        if fetch.descriptor.rdma_target is not None:
            self._http.request("DELETE", path)
            fetch.settle()
            return
        # over http only our own thread writes into the buffer; it ends with its connection
        with contextlib.suppress(ObjectCacheError):
            self._http.request("DELETE", path)
        stream = self._streams.get(fetch.request_id)
        if stream is not None:
            stream.abort()
        fetch.wait_settled()


def _shape(headers: Any) -> tuple[Mode, int]:
    try:
        return Mode(headers["x-amz-objectcache-mode"]), int(headers["x-amz-objectcache-chunks"])
    except (KeyError, ValueError) as error:
        raise ProtocolViolationError(f"the answer does not say mode and chunks: {error}") from error


def _raise_first(waiting: Sequence[Future[None]]) -> None:
    failures = [error for error in (future.exception() for future in waiting) if error is not None]
    if failures:
        raise failures[0]
