"""ObjectCacheClient: put chunks, look a prefix up, fetch its layers into your own buffer.

Blocking calls are safe from any thread; `fetch_layers` and the `_async` methods are the same for event loops.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from descriptors.descriptor import Delivery, Descriptor, OnMissing, RdmaTarget
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.messages import LookupRequest, lookup_body, parse_lookup_answer
from descriptors.recompute import Advice, AdviceRequest
from descriptors.recompute import advise as advise_here
from nixl_client import shared_memory
from nixl_client.buffers import as_buffer
from nixl_client.choices import chosen
from nixl_client.fetch import Layer, LayerFetch
from nixl_client.fetch_http import HttpFetches
from nixl_client.http import Answer, SignedHttp
from nixl_client.objects import ObjectPaths, Registered
from nixl_client.registration import LIFETIME_S
from nixl_client.transport import HTTP_CONNECTIONS_MAX, Transport
from nixl_client.ways import Ways

FETCHES_MAX = 64
PUT_THREADS = 8
_log = logging.getLogger(__name__)
__all__ = ["ObjectCacheClient", "Transport"]


class ObjectCacheClient:
    """A client of one bucket; `in_bucket` gives clients of others that share its connections, threads and buffers.
    Credentials default to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. `timeout_s` bounds each wait for the gateway,
    `fetch_timeout_s` the silence on a fetch's own request; calls take another in their own `timeout_s`. The agent is
    renewed every third of `agent_lifetime_s`; a client that stops doing so is forgotten by the server after that time.
    Over http a large fetch uses up to `http_connections` connections, each for some of the chunks: as many requests.

    `transport`, `delivery`, `on_missing` and `path` may be given by name; a name that there is not raises ValueError at
    the call. Every method raises ObjectCacheError (CallerError, ChunkUnavailable, ServerError) for what the server
    refuses.
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
        http_connections: int = 1,
        timeout_s: float = 60.0,
        fetch_timeout_s: float = 600.0,
        agent_lifetime_s: float = LIFETIME_S,
    ) -> None:
        wanted = chosen(Transport, transport, "transport")
        access_key = access_key or os.environ.get("AWS_ACCESS_KEY_ID")
        secret_key = secret_key or os.environ.get("AWS_SECRET_ACCESS_KEY")
        if not access_key or not secret_key:
            raise ValueError("credentials are needed: pass them or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if not 1 <= http_connections <= HTTP_CONNECTIONS_MAX:
            raise ValueError(f"http_connections must be from 1 to {HTTP_CONNECTIONS_MAX}, not {http_connections!r}")
        self.bucket = bucket
        self._http = SignedHttp(endpoint, access_key, secret_key, region, timeout_s)
        self._fetch_timeout_s = fetch_timeout_s
        self._http_fetches = HttpFetches(self._http, http_connections)
        self._ways = Ways(self._http, wanted, agent_lifetime_s)
        self._is_own = True
        self._fetchers = ThreadPoolExecutor(FETCHES_MAX, "objectcache-fetch")
        self._waiters = ThreadPoolExecutor(FETCHES_MAX, "objectcache-wait")
        self._putters = ThreadPoolExecutor(PUT_THREADS, "objectcache-put")

    def in_bucket(self, bucket: str) -> ObjectCacheClient:
        """A client of another bucket with the connections, threads and registered buffers of this one, which must be
        closed last; closing the new one does nothing. Both may be used by any threads.
        """
        other = copy.copy(self)
        other.bucket, other._is_own = bucket, False
        return other

    def close(self) -> None:
        """Deregister from the gateway, which waits for writes in flight, and free everything."""
        if not self._is_own:
            return
        try:
            self._ways.close()
        finally:
            for pool in (self._fetchers, self._waiters, self._putters):
                pool.shutdown()
            self._http.close()

    def __enter__(self) -> ObjectCacheClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_chunks(self, chunk_keys: Sequence[str], chunks: Sequence[Any], *, timeout_s: float | None = None) -> None:
        """Store whole chunk objects (L*S bytes each, KV_L2TD), several at a time.

        The first failure is raised after the puts under way have ended; later chunks are then not started.
        """
        if len(chunk_keys) != len(chunks):
            raise ValueError(f"{len(chunk_keys)} keys, {len(chunks)} chunks")

        def put(key: str, chunk: Any) -> None:
            self._http.request("PUT", f"/{self.bucket}/{key}", None, memoryview(chunk).cast("B"), timeout_s)

        self._each(put, zip(chunk_keys, chunks, strict=True))

    def delete(self, chunk_keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Delete objects, several at a time; one that is missing is deleted already. Failures as in `put_chunks`."""

        def delete(key: str) -> None:
            self._http.request("DELETE", f"/{self.bucket}/{key}", timeout_s=timeout_s)

        self._each(delete, [(key,) for key in chunk_keys])

    def _each(self, work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Do all of it in our threads, until one fails; raises the first failure when none is under way any more."""
        failed = threading.Event()

        def do(*given: Any) -> None:
            if failed.is_set():
                return
            try:
                work(*given)
            except BaseException:
                failed.set()
                raise

        _raise_first([self._putters.submit(do, *given) for given in arguments])

    def lookup(self, chunk_keys: Sequence[str], lease_s: float = 0.0, *, timeout_s: float | None = None) -> int:
        """How many chunks, from the first, are stored without a gap; `lease_s` asks to keep them that long,
        which a server that evicts nothing needs not be asked.
        """
        if not chunk_keys:
            return 0
        body = lookup_body(LookupRequest(tuple(chunk_keys), lease_s))
        return int(self._lookup(body, timeout_s).json()["matched"])

    def advise(
        self, chunk_keys: Sequence[str], compute: AdviceRequest, lease_s: float = 0.0, *, timeout_s: float | None = None
    ) -> tuple[int, Advice]:
        """`lookup`, and whether to load what is stored or to recompute it, at the rate the server would offer now."""
        if not chunk_keys:
            return 0, advise_here(0, compute)
        body = lookup_body(LookupRequest(tuple(chunk_keys), lease_s, compute))
        answer = parse_lookup_answer(self._lookup(body, timeout_s).body)
        return answer.matched, answer.advice or advise_here(answer.matched, compute)

    def _lookup(self, body: bytes, timeout_s: float | None) -> Answer:
        return self._http.request("POST", f"/{self.bucket}", {"lookup": ""}, body, timeout_s)

    def allocate_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A uint8 array any transport can fill, and the only kind SHM can: its memory may be handed to a server on this
        host. Raises OSError when there is not that much.
        """
        return shared_memory.allocate(nbytes)

    def register_buffer(self, array: Any) -> Transport:
        """Make a buffer known to the server ahead of its first fetch; the transport fetches into it will use.

        Buffers stay registered, and referenced, until `release_buffer` or `close`.
        """
        return self._ways.find(array).transport

    def release_buffer(self, array: Any) -> None:
        """Deregister a buffer: on return the server cannot write into it."""
        self._ways.release(array)

    def fetch(
        self,
        chunk_keys: Sequence[str],
        layout: ChunkLayout,
        buffer: Any,
        *,
        offset: int = 0,
        delivery: Delivery | str = Delivery.AUTO,
        on_missing: OnMissing | str = OnMissing.FAIL,
        layer_compute_us: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> LayerFetch:
        """Start fetching into `buffer` (numpy, torch or bytes-like) from byte `offset` on, and return at once.

        The buffer needs N*L*S bytes from `offset`. It must not be touched, but for layers that are ready, until the
        fetch is settled: `wait` returned, or `cancel` did.
        """
        delivery = chosen(Delivery, delivery, "delivery")
        on_missing = chosen(OnMissing, on_missing, "on_missing")
        target = as_buffer(buffer)
        way = self._ways.find(buffer)
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
        if way.fetches is not None:
            agent_id = way.fetches.session.agent_id()
            start = way.region_offset + offset
            descriptor = replace(
                descriptor, rdma_target=RdmaTarget(agent_id, way.region_id, start, descriptor.payload_bytes)
            )
        fetches = way.fetches or self._http_fetches
        silence_s = timeout_s or self._fetch_timeout_s
        fetch = LayerFetch(descriptor, target, offset, fetches.cancel, way.transport, self.bucket, silence_s)
        self._fetchers.submit(fetches.run, fetch)
        return fetch

    async def fetch_layers(
        self, chunk_keys: Sequence[str], layout: ChunkLayout, buffer: Any, **options: Any
    ) -> AsyncIterator[Layer]:
        """The layers in order, each as soon as it is complete; options as for `fetch`. Leaving early cancels."""
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(self._waiters, lambda: self.fetch(chunk_keys, layout, buffer, **options))
        try:
            fetch = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_cancel_started)
            raise
        try:
            for layer_index in range(layout.num_layers):
                yield await loop.run_in_executor(self._waiters, fetch.wait_layer, layer_index)
            await loop.run_in_executor(self._waiters, fetch.wait)
        finally:
            await _to_end(asyncio.to_thread(fetch.cancel))

    async def put_chunks_async(self, chunk_keys: Sequence[str], chunks: Sequence[Any]) -> None:
        """`put_chunks` for event loops."""
        await asyncio.get_running_loop().run_in_executor(self._waiters, self.put_chunks, chunk_keys, chunks)

    async def lookup_async(self, chunk_keys: Sequence[str], lease_s: float = 0.0) -> int:
        """`lookup` for event loops."""
        return await asyncio.get_running_loop().run_in_executor(self._waiters, self.lookup, chunk_keys, lease_s)

    async def advise_async(
        self, chunk_keys: Sequence[str], compute: AdviceRequest, lease_s: float = 0.0
    ) -> tuple[int, Advice]:
        """`advise` for event loops."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._waiters, self.advise, chunk_keys, compute, lease_s)

    @property
    def objects(self) -> ObjectPaths:
        """Whole objects of the bucket, and puts of many chunks, by each of the paper's S3 paths."""
        return ObjectPaths(self._http, self.bucket, self._register_for_ucx, self._fetch_timeout_s)

    def _register_for_ucx(self, array: Any) -> Registered:
        way = self._ways.over(Transport.UCX, array)
        if way.fetches is None:
            raise RuntimeError("ucx is a one-sided transport")
        return Registered(way.fetches.session, way.fetches.link, way.region_id)


def _cancel_started(starting: asyncio.Future[LayerFetch]) -> None:
    """Its caller is gone: stop the fetch as soon as it exists."""
    if not starting.cancelled() and starting.exception() is None:
        threading.Thread(target=_cancel_quietly, args=(starting.result(),), daemon=True).start()


def _cancel_quietly(fetch: LayerFetch) -> None:
    try:
        fetch.cancel()
    except ObjectCacheError as error:
        _log.warning("cancelling fetch %s failed: %s", fetch.request_id, error)


async def _to_end(work: Coroutine[Any, Any, None]) -> None:
    """Await to the end whatever happens to the caller meanwhile: the buffer is its own again only then."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


def _raise_first(waiting: Sequence[Future[None]]) -> None:
    failures = [error for error in (future.exception() for future in waiting) if error is not None]
    if failures:
        raise failures[0]
