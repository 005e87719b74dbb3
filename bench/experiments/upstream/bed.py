"""Our servers in front of one service, the native client beside them, and how one sample is taken and checked."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import obstore

from bench.beds.kv_peers.work import S3Target
from bench.beds.s3_load import open_store
from calibration.content import Bytes, Content, VerificationError, make_content, verify_payload, verify_slices
from calibration.servers import LocalServer, running_server
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import GIB, KIB, MIB
from nixl_client.client import ObjectCacheClient, Transport

FETCH_TIMEOUT_S = 120.0
WARMING_FETCHES = 4
"""Until the DRAM tier has all of a prefix that is asked for again and again."""
SETTLE_S = 0.3
WRITTEN_S = 1.5
"""Until the files of a prefix that came cold are written."""
PIECE_BYTES = 256 * KIB


class Way(Enum):
    """How a prefix comes into the client's memory. NATIVE and NATIVE_LAYER go past us: whole chunks, and layer 0 of all
    chunks by ranges. EMBEDDED is our server without another service, from its DRAM tier.
    """

    NATIVE = "native, chunk-major"
    NATIVE_LAYER = "native, layer 0 by ranges"
    COLD = "ours, cold"
    CACHE = "ours, from the cache's files"
    DRAM = "ours, from DRAM"
    EMBEDDED = "embedded, from DRAM"


@dataclass(frozen=True, slots=True)
class Shape:
    """N chunks of one layout."""

    chunk_count: int
    layout: ChunkLayout

    @property
    def nbytes(self) -> int:
        """N*L*S."""
        return self.layout.delivery_bytes(self.chunk_count)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and bytes of one prefix."""

    keys: Sequence[str]
    content: Content


@dataclass(frozen=True, slots=True)
class Taken:
    """One sample: seconds to the first layer, and to the last byte."""

    first_s: float
    whole_s: float


class Bed:
    """One service with our servers before it. `stack` ends them. Raises LocalServerError, BaselineError."""

    def __init__(
        self, target: S3Target, shape: Shape, transport: Transport, folder: Path | None, stack: ExitStack
    ) -> None:
        self._shape = shape
        self._target = target
        self._folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-upstream-", dir=folder))
        )
        self._stack = stack
        self._transport = transport
        self._pool = stack.enter_context(ThreadPoolExecutor(shape.chunk_count))
        self._store = open_store(target, is_signed=True)
        self._writer = self._client(self.front(target, dram_bytes=0), Transport.HTTP)
        self._embedded_writer, embedded = self._embedded()
        self._clients = {
            Way.COLD: self._client(self.front(target, dram_bytes=0), transport),
            Way.DRAM: self._client(self.front(target, dram_bytes=GIB), transport),
            Way.EMBEDDED: embedded,
        }
        self._clients[Way.CACHE] = self._clients[Way.COLD]
        self._buffers = {id(client): client.allocate_buffer(shape.nbytes) for client in set(self._clients.values())}

    def front(self, target: S3Target, dram_bytes: int) -> LocalServer:
        """A server of ours with an empty cache in front of `target`."""
        config = self._folder / f"config-{len(list(self._folder.iterdir()))}.toml"
        config.write_text(
            f'[upstream]\nendpoint = "{target.url}"\naccess_key = "{target.access_key}"\n'
            f'secret_key = "{target.secret_key}"\nregion = "{target.region}"\n'
        )
        options = ["--config", str(config), "--dram-bytes", str(dram_bytes), "--disk-bytes", str(self._disk_bytes)]
        return self._stack.enter_context(running_server(self._folder, options, makes_bucket=False))

    @property
    def _disk_bytes(self) -> int:
        return 4 * self._shape.nbytes + 64 * MIB

    def _embedded(self) -> tuple[ObjectCacheClient, ObjectCacheClient]:
        server = self._stack.enter_context(running_server(self._folder, ["--dram-bytes", str(GIB)]))
        return self._client(server, Transport.HTTP), self._client(server, self._transport)

    def _client(self, server: LocalServer, transport: Transport) -> ObjectCacheClient:
        return self._stack.enter_context(server.client(transport))

    def stored(self, seed: int) -> Prefix:
        """A new prefix, upstream through another server of ours, so that its chunks carry their proof; and in the
        embedded server.
        """
        content = make_content(self._shape.chunk_count, self._shape.layout, seed)
        keys = [sha256(f"{seed}/{index}".encode()).hexdigest() for index in range(self._shape.chunk_count)]
        chunks = [content.chunk(index) for index in range(self._shape.chunk_count)]
        for client in (self._writer, self._embedded_writer):
            client.put_chunks(keys, chunks)
        time.sleep(SETTLE_S)
        return Prefix(keys, content)

    def removed(self, prefix: Prefix) -> None:
        """Delete it everywhere."""
        for client in {id(client): client for client in (*self._clients.values(), self._writer)}.values():
            client.delete(list(prefix.keys))

    def sample(self, way: Way, prefix: Prefix) -> Taken:
        """Take and check one sample. Raises VerificationError. The files of the cache are written behind a cold fetch,
        and none is measured before they are.
        """
        if way is Way.COLD:
            taken = self._fetched(way, prefix)
            time.sleep(WRITTEN_S)
            return taken
        if way is Way.NATIVE:
            return self._native(prefix, None)
        if way is Way.NATIVE_LAYER:
            return self._native(prefix, self._shape.layout.per_layer_chunk_bytes)
        if way in (Way.DRAM, Way.EMBEDDED):
            for _ in range(WARMING_FETCHES):
                self._fetched(way, prefix)
                time.sleep(SETTLE_S)
        return self._fetched(way, prefix)

    def _fetched(self, way: Way, prefix: Prefix) -> Taken:
        client = self._clients[way]
        buffer = self._buffers[id(client)]
        buffer[:] = 0
        began_s = time.monotonic()
        fetch = client.fetch(list(prefix.keys), self._shape.layout, buffer, delivery=Delivery.LAYER_MAJOR)
        first = fetch.wait_layer(0, FETCH_TIMEOUT_S)
        first_s = time.monotonic() - began_s
        verify_slices(first.data, prefix.content, 0)
        fetch.wait(FETCH_TIMEOUT_S)
        whole_s = max(fetch.ready_at_s()) - began_s
        verify_payload(buffer, prefix.content, Delivery.LAYER_MAJOR)
        return Taken(min(first_s, fetch.ready_at_s()[0] - began_s), whole_s)

    def _native(self, prefix: Prefix, nbytes: int | None) -> Taken:
        """obstore from one thread for each chunk: the calls leave the interpreter lock. Bodies are compared afterwards,
        and are not copied into one buffer.
        """

        def get(key: str) -> Any:
            if nbytes is None:
                return obstore.get(self._store, key).bytes()
            return obstore.get_range(self._store, key, start=0, length=nbytes)

        began_s = time.monotonic()
        bodies = list(self._pool.map(get, prefix.keys))
        seconds = time.monotonic() - began_s
        for index, body in enumerate(bodies):
            wanted = prefix.content.chunk(index)[:nbytes]
            if not np.array_equal(np.frombuffer(memoryview(body), dtype=np.uint8), wanted):
                raise VerificationError(f"the native client's chunk {index}: wrong bytes")
        return Taken(seconds, seconds)

    def asked_over_needed(self, prefix: Prefix) -> float:
        """The bytes that a cold fetch gets from upstream, headers included, over those of the prefix."""
        with counting_relay(self._target.url) as (url, count), ExitStack() as stack:
            through = replace(self._target, url=url)
            client = stack.enter_context(self.front(through, dram_bytes=0).client(self._transport))
            buffer: Bytes = client.allocate_buffer(self._shape.nbytes)
            client.fetch(list(prefix.keys), self._shape.layout, buffer, delivery=Delivery.LAYER_MAJOR).wait(
                FETCH_TIMEOUT_S
            )
            verify_payload(buffer, prefix.content, Delivery.LAYER_MAJOR)
            return count() / self._shape.nbytes


@contextmanager
def counting_relay(url: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """A way to a service that counts what comes back, with two threads for each connection."""
    parts = urlsplit(url)
    counts: list[int] = []
    bound = socket.create_server(("127.0.0.1", 0))

    def copied(source: socket.socket, target: socket.socket, *, is_counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if is_counted:
                    counts.append(len(data))
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def joined(here: socket.socket) -> None:
        with here, socket.create_connection((parts.hostname or "", parts.port or 80)) as there:
            back = threading.Thread(target=copied, args=(there, here), kwargs={"is_counted": True}, daemon=True)
            back.start()
            copied(here, there, is_counted=False)
            back.join()

    def accepting() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=joined, args=(bound.accept()[0],), daemon=True).start()

    threading.Thread(target=accepting, daemon=True).start()
    with bound:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", lambda: sum(counts)
