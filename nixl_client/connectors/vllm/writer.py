"""A worker's background writer: reads finished chunks out of the engine's blocks and puts what is not stored yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

import torch

from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from nixl_client.client import ObjectCacheClient
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.vllm.blocks import Blocks, PagedLayer
from nixl_client.connectors.vllm.plan import Grid, Span
from nixl_client.connectors.vllm.steps import Report, StoreJob
from nixl_client.connectors.vllm.store_book import Entry, StoreBook

BATCH_CHUNKS = 8
BATCH_BYTES = 64 << 20
LOADS_FIRST_S = 1.0
"""How long a batch waits for loads to end."""
_log = logging.getLogger(__name__)


class Writer:
    """One thread that works off a `StoreBook`; everything else is called by the thread that runs the model."""

    def __init__(
        self,
        client: ObjectCacheClient,
        rank: int,
        grid: Grid,
        layout: ChunkLayout,
        layers: Sequence[PagedLayer],
        book: StoreBook,
        loads_idle: threading.Event,
        counters: Counters,
    ) -> None:
        self._client = client
        self._rank = rank
        self._grid = grid
        self._layers = layers
        self._book = book
        self._loads_idle = loads_idle
        self._counters = counters
        states = layers[0].keys
        heads, head_dim = states.shape[3], states.shape[4] * states.shape[5]
        self._batch_chunks = max(1, min(BATCH_CHUNKS, BATCH_BYTES // layout.chunk_bytes))
        shape = (self._batch_chunks, layout.num_layers, 2, layout.chunk_tokens, heads, head_dim)
        self._batch = torch.empty(shape, dtype=states.dtype)
        self._changed = threading.Condition()
        self._is_gathering = False
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, jobs: Iterable[StoreJob]) -> None:
        """Write these, when there is time."""
        now_s = time.monotonic()
        with self._changed:
            for job in jobs:
                self._book.add(job, now_s)
            self._changed.notify_all()
            if self._thread is None and not self._book.is_idle:
                self._thread = threading.Thread(target=self._run, name="objectcache-store", daemon=True)
                self._thread.start()

    def void(self, blocks: frozenset[int] | None) -> None:
        """On return nothing reads these blocks; None: no block at all."""
        if blocks is not None and not blocks:
            return
        with self._changed:
            if self._book.void(blocks) is not None:
                self._changed.wait_for(lambda: not self._is_gathering)
            self._count_dropped()

    def poll(self, awaited: Iterable[str], finished: Iterable[str]) -> tuple[set[str], Report]:
        """Which ended requests' blocks are free now, and which jobs have been read."""
        with self._changed:
            self._book.await_free(awaited)
            self._book.forget(finished)
            self._book.expire(time.monotonic(), self._is_gathering)
            self._count_dropped()
            return self._book.take_freed(), self._book.take_report()

    def close(self, drain_s: float) -> None:
        """Write what waits, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or self._book.is_idle, drain_s)
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(drain_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._book.has_waiting)
                if self._is_closing:
                    return
                entry = self._book.take()
            if entry is None:
                continue
            try:
                self._store(entry)
            except (ObjectCacheError, OSError, TimeoutError) as error:
                _log.warning("request %s: chunks were not stored: %s", entry.job.request_id, error)
                self._counters.add(store_failures=1)
                self._fail(entry)
            except Exception:
                _log.exception("request %s: chunks were not stored", entry.job.request_id)
                self._counters.add(store_failures=1)
                self._fail(entry)

    def _store(self, entry: Entry) -> None:
        keys, span = entry.job.keys[self._rank], entry.job.span
        stored = 0 if entry.job.is_repair else self._client.lookup(keys)
        self._counters.add(stored_already_chunks=stored)
        for first in range(stored, len(keys), self._batch_chunks):
            end = min(first + self._batch_chunks, len(keys))
            self._loads_idle.wait(LOADS_FIRST_S)
            if not self._gather(entry, span, first, end):
                break
            chunks = [self._batch[index].flatten().view(torch.uint8).numpy() for index in range(end - first)]
            self._client.put_chunks(keys[first:end], chunks)
            self._counters.add(stored_chunks=end - first, stored_bytes=sum(chunk.nbytes for chunk in chunks))
        with self._changed:
            self._book.end(entry)
            self._changed.notify_all()

    def _gather(self, entry: Entry, span: Span, first: int, end: int) -> bool:
        """Copy chunks out of the blocks; False when these are somebody else's by now."""
        with self._changed:
            if entry.is_void:
                return False
            self._is_gathering = True
        try:
            start = span.block_skip + first * self._grid.chunk_tokens
            first_block, skip = divmod(start, self._grid.block_tokens)
            count = (end - first) * self._grid.chunk_tokens
            blocks = Blocks(span.blocks[first_block : -(-(start + count) // self._grid.block_tokens)])
            for index, layer in enumerate(self._layers):
                for part in (0, 1):
                    states = layer.read(blocks, skip, count, part)
                    self._batch[: end - first, index, part] = states.view(end - first, -1, *states.shape[1:]).to("cpu")
        finally:
            with self._changed:
                self._is_gathering = False
                if end == span.chunk_count:
                    self._book.end_read(entry)
                self._changed.notify_all()
        return True

    def _fail(self, entry: Entry) -> None:
        with self._changed:
            self._book.end(entry)
            self._book.fail(entry.job.request_id)
            self._count_dropped()
            self._changed.notify_all()

    def _count_dropped(self) -> None:
        dropped = self._book.take_dropped()
        if dropped:
            self._counters.add(dropped_chunks=dropped)
