"""Seeded chunks in a server, and fetches of which every byte is compared: what all measurements share."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import MIB
from nixl_client.client import Client, Transport
from nixl_client.fetch.layer_fetch import LayerFetch
from objectcache.calibration.content import STAMP_BYTES, Bytes, Content, VerificationError, make_content, verify_payload
from objectcache.calibration.samples import Label, State, Task, progress_bar
from objectcache.calibration.servers import LocalServer
from storage_server.settings import StorageSettings

FETCH_TIMEOUT_S = 300.0
STORE_BATCH_BYTES = 64 * MIB
STORE_BATCH_COUNT = 512
WARMING_FETCHES_MAX = 8
SETTLE_S = 0.5
SETTLE_POLLS_MAX = 240
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one prefix: their keys and what is in them."""

    keys: Sequence[str]
    content: Content

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S."""
        return self.content.layout

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout.delivery_bytes(len(self.keys))

    @property
    def layer_bytes(self) -> int:
        """N*S."""
        return self.layout.layer_bytes(len(self.keys))

    def part(self, first: int, count: int) -> Chunks:
        """Some of the chunks, in their order."""
        base, stamps = self.content.base[:, first * STAMP_BYTES :], self.content.stamps[:, first : first + count]
        return Chunks(self.keys[first : first + count], Content(self.layout, count, base, stamps))


@dataclass(frozen=True, slots=True)
class Fetched:
    """One fetch, in seconds since the first of those made together was asked for: when the client said that everything
    was there, and when each layer was.
    """

    ended_s: float
    layers_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files of a store that are to be cold; none where they are not. `resident_shares` collects how much of them
    was still in the page cache each time that they were dropped from it.
    """

    files: Sequence[Path] = ()
    resident_shares: list[float] = field(default_factory=list)

    def drop(self) -> None:
        """Let the kernel forget their pages."""
        nbytes, left = 0, 0.0
        for file in self.files:
            with file.open("rb") as opened:
                drop_pages(opened.fileno())
                size = file.stat().st_size
                nbytes += size
                left += size * resident_share(opened.fileno())
        if nbytes:
            self.resident_shares.append(left / nbytes)


def make_chunks(count: int, layout: ChunkLayout, seed: int, model: str = "bench") -> Chunks:
    """Content of one seed, under the keys of seeded tokens."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 32, count * layout.chunk_tokens, dtype=np.uint32)
    namespace = Namespace(model=model, dtype="uint8", block_tokens=layout.chunk_tokens)
    return Chunks(chunk_keys(namespace, tokens, layout.chunk_tokens), make_content(count, layout, seed))


def store_chunks(server: LocalServer, chunks: Chunks, title: str = "storing chunks") -> None:
    """Put every chunk."""
    store_bodies(server, chunks.keys, chunks.content.chunk, chunks.layout.chunk_bytes, title)


def store_bodies(
    server: LocalServer, keys: Sequence[str], body: Callable[[int], Any], nbytes: int, title: str = "storing"
) -> None:
    """Put an object of `nbytes` under each key; `body` gives it by its index. Only a batch exists here at a time."""
    batch = max(1, min(STORE_BATCH_COUNT, STORE_BATCH_BYTES // nbytes))
    with server.client(Transport.HTTP) as client, progress_bar(len(keys), title) as advance:
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            client.put_chunks(some, [body(first + index) for index in range(len(some))])
            advance(len(some))


def register_as(client: Client, buffer: Any, transport: Transport) -> None:
    """Register a buffer. Raises VerificationError where another transport takes the place of the wanted one."""
    used = client.register_buffer(buffer)
    if transport is not Transport.AUTO and used is not transport:
        raise VerificationError(f"{used.value} took the place of {transport.value}")


def fetch_checked(
    client: Client, chunks: Chunks, buffer: Bytes, delivery: Delivery, transport: Transport | None = None
) -> Fetched:
    """Fetch into the beginning of the buffer. Raises VerificationError, and what the client raises."""
    return fetch_together(client, [chunks], buffer, delivery, transport)[0]


def fetch_task(labels: Mapping[str, Label], client: Client, chunks: Chunks, buffer: Bytes) -> Task:
    """One layer-major request for all of the chunks, as a task of `run_rounds`."""
    return Task(
        labels, chunks.payload_bytes, lambda: fetch_checked(client, chunks, buffer, Delivery.LAYER_MAJOR).ended_s
    )


def fetch_together(
    client: Client,
    prefixes: Sequence[Chunks],
    buffer: Bytes,
    delivery: Delivery,
    transport: Transport | None = None,
) -> list[Fetched]:
    """The same for several at once, one behind the other in the buffer. The buffer is cleared before, and compared
    after, the time that is measured.
    """
    sizes = [chunks.payload_bytes for chunks in prefixes]
    starts = list(accumulate(sizes, initial=0))[:-1]
    buffer[: sum(sizes)].fill(0)
    with ExitStack() as stack:
        started_s = time.monotonic()
        fetches = [
            stack.enter_context(client.fetch(chunks.keys, chunks.layout, buffer, offset=start, delivery=delivery))
            for chunks, start in zip(prefixes, starts, strict=True)
        ]
        found = []
        for fetch in fetches:
            fetch.wait(FETCH_TIMEOUT_S)
            ended_s = time.monotonic() - started_s
            layers = map(fetch.wait_layer, range(fetch.descriptor.num_layers))
            found.append(Fetched(ended_s, tuple(layer.ready_at_s - started_s for layer in layers)))
        for fetch, nbytes in zip(fetches, sizes, strict=True):
            check_fetch(fetch, delivery, nbytes, transport)
    for chunks, start, nbytes in zip(prefixes, starts, sizes, strict=True):
        verify_payload(buffer[start : start + nbytes], chunks.content, delivery)
    return found


def check_fetch(fetch: LayerFetch, delivery: Delivery, nbytes: int, transport: Transport | None = None) -> None:
    """That a fetch which has ended came as it was asked for. Raises VerificationError."""
    result = fetch.wait(FETCH_TIMEOUT_S)
    if result.mode.value != delivery.value or result.transferred_bytes != nbytes:
        raise VerificationError(f"{result} came of {delivery.value}, {nbytes} bytes")
    if transport is not None and fetch.transport is not transport:
        raise VerificationError(f"{result} over {fetch.transport} came of {delivery.value} over {transport}")


def state_of_warm(stored_bytes: int, storage: StorageSettings) -> State:
    """Where chunks that are asked for again are found: the DRAM tier, where it is large enough for all of these."""
    return State.DRAM if storage.dram_bytes >= stored_bytes * 9 // 8 else State.PAGE_CACHE


def warm(server: LocalServer, client: Client, prefixes: Sequence[Chunks], buffer: Bytes) -> int:
    """Fetch everything, twice and then until the server takes no more into memory; the memory it has then."""
    before, seen = -1, 0
    for fetched in range(WARMING_FETCHES_MAX):
        for chunks in prefixes:
            with client.fetch(chunks.keys, chunks.layout, buffer, delivery=Delivery.LAYER_MAJOR) as fetch:
                fetch.wait(FETCH_TIMEOUT_S)
        seen = _settled_rss_bytes(server.pid)
        if fetched >= 2 and seen - before < buffer.nbytes // 64:
            break
        before = seen
    return seen


def _settled_rss_bytes(pid: int) -> int:
    """Resident memory of a process once it no longer grows."""
    seen, before = 0, -MIB
    for _ in range(SETTLE_POLLS_MAX):
        seen = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
        if seen - before < MIB:
            break
        before = seen
        time.sleep(SETTLE_S)
    return seen


def drop_pages(fd: int) -> None:
    """Write a file's dirty pages and let the kernel forget all of its pages. Raises OSError."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(fd: int) -> float:
    """How much of a file is in the page cache, 0 to 1. Raises OSError."""
    nbytes = os.fstat(fd).st_size
    if nbytes == 0:
        return 0.0
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        failed = _libc.mincore(view.ctypes.data, nbytes, pages.ctypes.data)
        del view  # a mapping with a view of it cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return float((pages & 1).mean())
