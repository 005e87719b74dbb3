"""Client: put chunks, look a prefix up, fetch its layers into your own buffer.

Blocking calls are safe from any thread; `fetch_layers` and the `_async` methods are the same for event loops.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import mmap
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from descriptors.descriptor import (
    Accept,
    Delivery,
    Descriptor,
    OnMissing,
    RdmaTarget,
    version_of,
)
from descriptors.errors import CallerError, ObjectCacheError
from descriptors.headers import CLASS_HEADER, LAYOUT_HEADER
from descriptors.kv_forms import KvLayout
from descriptors.layout import ChunkLayout
from descriptors.messages import LookupRequest, lookup_body, parse_lookup_answer
from descriptors.presence import Presence
from descriptors.recompute import Advice, AdviceRequest
from descriptors.recompute import advise as advise_here
from descriptors.tiers import TierRuns
from descriptors.units import MIB
from nixl_client.fetch.fetch_ledger import FetchLedger, FetchPlace
from nixl_client.fetch.http import HttpFetches
from nixl_client.fetch.layer_fetch import Layer, LayerFetch
from nixl_client.fetch.routes import Routes
from nixl_client.objects import ObjectPaths, Registered
from nixl_client.options import enum_member
from nixl_client.session.agent import LIFETIME_S
from nixl_client.session.check import Checked, check
from nixl_client.session.retries import Retries
from nixl_client.session.signed_http import SignedAnswer, SignedHttp, understood
from nixl_client.transports import shared_memory
from nixl_client.transports.buffers import as_buffer
from nixl_client.transports.transport import HTTP_CONNECTIONS_MAX, Transport

FETCHES_MAX = 64
PUT_THREADS = 8
DECODE_THREADS = 2
LOOKUP_BYTES_MAX, TIERS_BYTES_MAX = MIB, 2 * MIB
_T = TypeVar("_T")
_log = logging.getLogger(__name__)
__all__ = ["Client", "Transport"]


class Client:
    """A client of one bucket; `in_bucket` gives clients of other buckets that share its threads and buffers.

    access_key, secret_key: default to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    http_connections: over http a large fetch is split among up to so many connections, each with a request of its own
        for some of the chunks.
    timeout_s: bounds each wait while a request is sent, all waits for an answer together, and all tries of a call. A
        call may take another bound in its own `timeout_s`.
    fetch_timeout_s: bounds the silence on a fetch's request.
    agent_lifetime_s: the server forgets a client that has not renewed its agent for so long. The client renews it every
        quarter of that time.
    retries: how calls are made again where the server answers 500 or 503 or the connection breaks
        (`nixl_client.session.retries`); `Retries(1)` for callers that repeat calls themselves.
    downlink_bytes_per_s: over `shm` and `ucx`, what the link into this process's memory carries: all storage servers
        together write there no faster.

    `transport`, `delivery`, `on_missing` and `path` may be given by name; an unknown name raises ValueError when it is
    given. Every method raises ObjectCacheError when the server refuses: CallerError, ChunkUnavailable or ServerError.

    Clients of one process share connections, and agents, where server, credentials and times are the same
    (`nixl_client.session`).
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
        downlink_bytes_per_s: float | None = None,
        retries: Retries | None = None,
    ) -> None:
        wanted = enum_member(Transport, transport, "transport")
        access_key = access_key or os.environ.get("AWS_ACCESS_KEY_ID")
        secret_key = secret_key or os.environ.get("AWS_SECRET_ACCESS_KEY")
        if not access_key or not secret_key:
            raise ValueError("credentials are needed: pass them or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if not 1 <= http_connections <= HTTP_CONNECTIONS_MAX:
            raise ValueError(f"http_connections must be from 1 to {HTTP_CONNECTIONS_MAX}, not {http_connections!r}")
        self.bucket = bucket
        self.http = SignedHttp(
            endpoint=endpoint,
            access_key=access_key,
            secret_key=secret_key,
            region=region,
            timeout_s=timeout_s,
            retries=retries,
        )
        """Signed requests to the server, for paths that no method here has: its status and metrics."""
        self._fetch_timeout_s = fetch_timeout_s
        self._http_fetches = HttpFetches(self.http, http_connections)
        self._routes = Routes(self.http, wanted, agent_lifetime_s, downlink_bytes_per_s)
        self._is_own = True
        self._fetchers = ThreadPoolExecutor(FETCHES_MAX, "objectcache-fetch")
        self._waiters = ThreadPoolExecutor(FETCHES_MAX, "objectcache-wait")
        self._putters = ThreadPoolExecutor(PUT_THREADS, "objectcache-put")
        self._decoders = ThreadPoolExecutor(DECODE_THREADS, "objectcache-decode")

    def in_bucket(self, bucket: str) -> Client:
        """A client of another bucket with the threads and registered buffers of this one. This one must be closed last;
        closing the new one does nothing. Both may be used by any threads.
        """
        other = copy.copy(self)
        other.bucket, other._is_own = bucket, False
        return other

    def check(self) -> Checked:
        """Whether the server is there and the bucket may be used; one that is missing is made as a cache. Raises
        nothing.
        """
        return check(self.http, self.bucket)

    def close(self) -> None:
        """Deregister the buffers, which waits for writes in flight, and free everything."""
        if not self._is_own:
            return
        try:
            self._routes.close()
        finally:
            for pool in (self._fetchers, self._waiters, self._putters, self._decoders):
                pool.shutdown()
            self.http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_chunks(
        self,
        chunk_keys: Sequence[str],
        chunks: Sequence[Any],
        *,
        content_class: str = "",
        kv_layout: KvLayout | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Store whole chunk objects (L*S bytes each, KV_L2TD), several at a time. `content_class` is the kind of their
        content (docs/guides/compression.md), 1 to 32 of a-z 0-9 _ -; empty for none. Chunks that declare their
        `kv_layout` may be replaced by encoded ones in a bucket whose owner wants that. `metadata` is the objects' user
        metadata, as `Namespace.metadata` gives it: ASCII without `x-amz-meta-`.

        The first failure is raised after the puts under way have ended; later chunks are then not started.
        """
        if len(chunk_keys) != len(chunks):
            raise ValueError(f"{len(chunk_keys)} keys, {len(chunks)} chunks")

        headers = {CLASS_HEADER: content_class} if content_class else {}
        if kv_layout is not None:
            headers[LAYOUT_HEADER] = kv_layout.text
        headers |= {f"x-amz-meta-{name}": value for name, value in (metadata or {}).items()}

        def put(key: str, chunk: Any) -> None:
            body = memoryview(chunk).cast("B")
            self.http.request(
                "PUT", f"/{self.bucket}/{key}", query=None, body=body, timeout_s=timeout_s, headers=headers
            )

        self._run_all(put, zip(chunk_keys, chunks, strict=True))

    def delete(self, chunk_keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Delete objects, several at a time. Deleting an object that is not there succeeds. Failures as in
        `put_chunks`.
        """

        def delete(key: str) -> None:
            self.http.request("DELETE", f"/{self.bucket}/{key}", timeout_s=timeout_s)

        self._run_all(delete, [(key,) for key in chunk_keys])

    def _run_all(self, work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Call `work` with each of `arguments` in our threads, and begin no further call once one has failed. After
        every call that was begun has ended, raises the first failure.
        """
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

    def lookup(
        self,
        chunk_keys: Sequence[str],
        lease_s: float = 0.0,
        *,
        accept: Accept | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """How many chunks, from the first, are stored without a gap; encoded ones count as far as `accept` takes them.
        `lease_s` asks the server to keep them for that long. A server that evicts nothing keeps them anyway.
        """
        if not chunk_keys:
            return 0
        answer = self._lookup(LookupRequest(tuple(chunk_keys), lease_s, accept=accept), timeout_s)
        with understood():
            return _counted(int(answer.json()["matched"]), chunk_keys)

    def present(
        self,
        chunk_keys: Sequence[str],
        lease_s: float = 0.0,
        *,
        accept: Accept | None = None,
        timeout_s: float | None = None,
    ) -> Presence:
        """For each chunk whether it is stored, as `lookup` would count it. The keys need be no prefix: one request
        tells of chunks of several kinds. A server of an earlier release raises CallerError(InvalidArgument).
        """
        if not chunk_keys:
            return ()
        request = LookupRequest(tuple(chunk_keys), lease_s, accept=accept, each=True)
        body = self._lookup(request, timeout_s).body
        with understood():
            present = parse_lookup_answer(body).present
            if present is None or len(present) != len(chunk_keys):
                raise ValueError("the answer does not tell of each chunk")
        return present

    def tiers(
        self, chunk_keys: Sequence[str], *, accept: Accept | None = None, timeout_s: float | None = None
    ) -> TierRuns:
        """Where the chunks lie that `lookup` counts: runs of chunks in one tier, in order. It costs the server more
        than a lookup does, and is meant for people who look.
        """
        if not chunk_keys:
            return ()
        request = LookupRequest(tuple(chunk_keys), accept=accept, tiers=True)
        body = self._lookup(request, timeout_s).body
        with understood():
            answer = parse_lookup_answer(body)
            if answer.tiers is None:
                raise ValueError("the answer names no tiers")
            _counted(answer.matched, chunk_keys)
        return answer.tiers

    def advise(
        self,
        chunk_keys: Sequence[str],
        compute: AdviceRequest,
        lease_s: float = 0.0,
        *,
        accept: Accept | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, Advice]:
        """`lookup`, and how many of the stored chunks to load rather than to recompute, at the rate that the server
        would offer now.
        """
        if not chunk_keys:
            return 0, advise_here(0, compute)
        request = LookupRequest(tuple(chunk_keys), lease_s, compute, accept)
        body = self._lookup(request, timeout_s).body
        with understood():
            answer = parse_lookup_answer(body)
            matched = _counted(answer.matched, chunk_keys)
        return matched, answer.advice or advise_here(matched, compute)

    def _lookup(self, request: LookupRequest, timeout_s: float | None) -> SignedAnswer:
        """A server of an earlier release is asked without what it does not know."""
        try:
            bytes_max = TIERS_BYTES_MAX if request.tiers else LOOKUP_BYTES_MAX
            return self.http.request(
                "POST", f"/{self.bucket}", {"lookup": ""}, lookup_body(request), timeout_s, bytes_max=bytes_max
            )
        except CallerError as error:
            if request.accept is None or error.field not in ("accept", "max_loss"):
                raise
        return self._lookup(replace(request, accept=None), timeout_s)

    def allocate_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A uint8 array in memory that can be handed to a server on this host. Every transport can fill it, and SHM can
        fill no other memory. Raises OSError when there is not so much memory.
        """
        return shared_memory.allocate(nbytes)

    def adopt_buffer(self, fd: int, mapping: mmap.mmap) -> npt.NDArray[np.uint8]:
        """`allocate_buffer` for memory that somebody else has made: `mapping` maps the memfd `fd` from its first byte
        on, and all its pages are in place. Both stay the caller's. Raises ValueError for what is no memfd sealed
        against shrinking.
        """
        return shared_memory.adopt(fd, mapping)

    def register_buffer(self, array: Any) -> Transport:
        """Make a buffer known to the server ahead of its first fetch. Returns the transport that fetches into it will
        use. Buffers stay registered, and referenced, until `release_buffer` or `close`.
        """
        return self._routes.route_to(array).transport

    def release_buffer(self, array: Any) -> None:
        """Deregister a buffer: on return the server cannot write into it, unless another client of this process that
        shares the agent has registered it, too.
        """
        self._routes.release(array)

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
        accept: Accept | None = None,
        places: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> LayerFetch:
        """Start fetching into `buffer` (numpy, torch or bytes-like) from byte `offset` on, and return at once. With
        `accept` chunks may come encoded, with a loss that the fetch's `forms` tell; they are decoded in the buffer,
        layer by layer, so that its bytes are those of exact chunks: by this process in host memory, by the device in a
        device's.

        With `places` chunk i lands whole at byte `offset + places[i]`, and nothing between the chunks is touched;
        `wait` returns when all are there. Such a fetch is chunk-major and exact. Over ucx and shm it needs a server
        that knows descriptors with places; another one raises CallerError(InvalidDescriptor).

        The buffer needs N*L*S bytes from `offset`. It must not be touched, but for layers that are ready, until the
        fetch is settled: `wait` returned, or `cancel` did.
        """
        delivery = enum_member(Delivery, delivery, "delivery")
        on_missing = enum_member(OnMissing, on_missing, "on_missing")
        if places and delivery is Delivery.AUTO:
            delivery = Delivery.CHUNK_MAJOR
        target = as_buffer(buffer)
        route = self._routes.route_to(buffer)
        descriptor = Descriptor(
            chunk_keys=tuple(chunk_keys),
            num_layers=layout.num_layers,
            chunk_tokens=layout.chunk_tokens,
            per_layer_chunk_bytes=layout.per_layer_chunk_bytes,
            delivery=delivery,
            on_missing=on_missing,
            request_id=uuid.uuid4().hex,
            layer_compute_us=tuple(layer_compute_us),
            accept=accept,
            version=version_of(accept, is_plain=True),
        )
        place = FetchPlace.of(descriptor, target, offset, places)
        if route.fetches is not None:
            agent_id = route.fetches.agent.agent_id()
            start = route.region_offset + offset
            descriptor = replace(
                descriptor,
                rdma_target=RdmaTarget(agent_id, route.region_id, start, place.nbytes),
                places=place.places,
                version=version_of(accept, is_plain=not places),
            )
        fetches = route.fetches or self._http_fetches
        silence_s = timeout_s or self._fetch_timeout_s
        decoders = None if accept is None or route.fetches is None else self._decoders
        running = FetchLedger(descriptor, place, self.bucket, silence_s, decoders)
        self._fetchers.submit(fetches.run, running)
        return LayerFetch(running, fetches.cancel, route.transport)

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

    async def put_chunks_async(
        self,
        chunk_keys: Sequence[str],
        chunks: Sequence[Any],
        *,
        content_class: str = "",
        kv_layout: KvLayout | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`put_chunks` for event loops."""
        await self._in_thread(
            lambda: self.put_chunks(
                chunk_keys,
                chunks,
                content_class=content_class,
                kv_layout=kv_layout,
                metadata=metadata,
                timeout_s=timeout_s,
            )
        )

    async def delete_async(self, chunk_keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """`delete` for event loops."""
        await self._in_thread(lambda: self.delete(chunk_keys, timeout_s=timeout_s))

    async def lookup_async(
        self,
        chunk_keys: Sequence[str],
        lease_s: float = 0.0,
        *,
        accept: Accept | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """`lookup` for event loops."""
        return await self._in_thread(lambda: self.lookup(chunk_keys, lease_s, accept=accept, timeout_s=timeout_s))

    async def advise_async(
        self,
        chunk_keys: Sequence[str],
        compute: AdviceRequest,
        lease_s: float = 0.0,
        *,
        accept: Accept | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, Advice]:
        """`advise` for event loops."""
        return await self._in_thread(
            lambda: self.advise(chunk_keys, compute, lease_s, accept=accept, timeout_s=timeout_s)
        )

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._waiters, call)

    @property
    def objects(self) -> ObjectPaths:
        """Whole objects of the bucket, and puts of many chunks, over each of the paper's S3 paths."""
        return ObjectPaths(self.http, self.bucket, self._register_for_ucx, self._fetch_timeout_s)

    def _register_for_ucx(self, array: Any) -> Registered:
        route = self._routes.route_over(Transport.UCX, array)
        if route.fetches is None:
            raise RuntimeError("ucx is a one-sided transport")
        return Registered(route.fetches.agent, route.region_id)


def _counted(matched: int, chunk_keys: Sequence[str]) -> int:
    """The number of chunks that a server has found. Raises ValueError for more than were asked for."""
    if not 0 <= matched <= len(chunk_keys):
        raise ValueError(f"{matched} of {len(chunk_keys)} chunks were found")
    return matched


def _cancel_started(starting: asyncio.Future[LayerFetch]) -> None:
    """Stop a fetch whose caller was cancelled while the fetch was being started."""
    if not starting.cancelled() and starting.exception() is None:
        threading.Thread(target=_cancel_quietly, args=(starting.result(),), daemon=True).start()


def _cancel_quietly(fetch: LayerFetch) -> None:
    try:
        fetch.cancel()
    except ObjectCacheError as error:
        _log.warning("cancelling fetch %s failed: %s", fetch.request_id, error)


async def _to_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end, even if the caller is cancelled meanwhile: the buffer is the caller's only then."""
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
