"""A worker's loads of one step: one descriptor fetch for each request, layer-major; each layer is waited for by the
attention that reads it, and copied into the engine's blocks then.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from descriptors.descriptor import OnMissing
from descriptors.errors import ChunkUnavailable, ObjectCacheError
from descriptors.layout import ChunkLayout
from nixl_client.client import ObjectCacheClient
from nixl_client.connectors.vllm.blocks import PagedLayer
from nixl_client.connectors.vllm.options import Options
from nixl_client.connectors.vllm.plan import Grid
from nixl_client.connectors.vllm.staging import Staging
from nixl_client.connectors.vllm.stats import Counters
from nixl_client.connectors.vllm.steps import LoadJob
from nixl_client.fetch import LayerFetch
from nixl_client.ledger import ProtocolViolationError

FAILURES = (ObjectCacheError, TimeoutError, ProtocolViolationError, ValueError, OSError, ImportError)
RETIRED_MAX = 4
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ActiveLoad:
    """A load under way. `good_blocks` of its blocks are still expected to be filled, out of `chunk_count` chunks."""

    job: LoadJob
    blocks: torch.Tensor
    fetch: LayerFetch
    offset: int
    deadline_s: float
    chunk_count: int
    good_blocks: int
    next_layer: int = 0
    is_retried: bool = False

    def left_s(self) -> float:
        """Seconds until the deadline, 0 past it."""
        return max(0.0, self.deadline_s - time.monotonic())


class Loads:
    """All loads of a worker; used by the thread that runs the model."""

    def __init__(
        self,
        client: ObjectCacheClient,
        rank: int,
        grid: Grid,
        layout: ChunkLayout,
        layers: Sequence[PagedLayer],
        dtype: torch.dtype,
        options: Options,
        counters: Counters,
    ) -> None:
        self._client = client
        self._rank = rank
        self._grid = grid
        self._layout = layout
        self._layers = layers
        self._dtype = dtype
        self._counters = counters
        self._device = layers[0].keys.device
        self._options = options
        self._staging = self._new_staging()
        self._used = 0
        self._active: list[ActiveLoad] = []
        self._lost_blocks: set[int] = set()
        self._bad_chunks: dict[str, int] = {}
        self._retired: queue.Queue[tuple[tuple[LayerFetch, ...], Staging] | None] = queue.Queue()
        self._reaper: threading.Thread | None = None
        self.is_idle = threading.Event()
        self.is_idle.set()

    def start(self, jobs: Sequence[LoadJob]) -> None:
        """Start these loads; what cannot be started is lost at once."""
        if jobs:
            self.is_idle.clear()
            self._staging.await_read()
        for job in jobs:
            try:
                self._start(job)
            except FAILURES as error:
                self._lose(job, 0, error)

    def wait_layer(self, layer_index: int) -> None:
        """Return when the layer of every load is in its blocks, or the load is given up."""
        for load in list(self._active):
            while load.next_layer <= layer_index and load in self._active:
                self._take_layer(load)

    def finish(self) -> None:
        """The step's forward pass is over: bring what is left to an end."""
        if not self._active and self.is_idle.is_set():
            return
        self.wait_layer(len(self._layers) - 1)
        for load in list(self._active):
            try:
                load.fetch.wait(load.left_s())
            except FAILURES as error:
                self._give_up(load, error)
                continue
            self._active.remove(load)
            self._counters.add(loads=1, loaded_chunks=load.chunk_count, loaded_bytes=self._bytes(load.chunk_count))
            self._counters.add(loaded_tokens=load.good_blocks * self._grid.block_tokens)
        self._staging.mark_read()
        self._used = 0
        self.is_idle.set()

    def take_lost_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not, since the last call."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_bad_chunks(self) -> dict[str, int]:
        """By request the first chunk that was missing or damaged, since the last call."""
        bad, self._bad_chunks = self._bad_chunks, {}
        return bad

    def close(self, timeout_s: float) -> None:
        """Give up what is under way."""
        for load in list(self._active):
            self._active.remove(load)
            self._retire(load.fetch)
        if self._reaper is not None:
            self._retired.put(None)
            self._reaper.join(timeout_s)

    def _start(self, job: LoadJob) -> None:
        offset, nbytes = self._used, self._bytes(job.span.chunk_count)
        if offset + nbytes > self._staging.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit what is left of the staging buffer")
        self._used += nbytes
        fetch = self._fetch(job, job.span.chunk_count, offset)
        deadline_s = time.monotonic() + self._options.load_timeout_s
        blocks = torch.tensor(job.span.blocks, device=self._device)
        self._active.append(
            ActiveLoad(job, blocks, fetch, offset, deadline_s, job.span.chunk_count, len(job.span.blocks))
        )

    def _fetch(self, job: LoadJob, chunk_count: int, offset: int) -> LayerFetch:
        return self._client.fetch(
            job.keys[self._rank][:chunk_count],
            self._layout,
            self._staging.array,
            offset=offset,
            delivery=self._options.delivery,
            on_missing=OnMissing.PREFIX,
        )

    def _take_layer(self, load: ActiveLoad) -> None:
        began_s = time.monotonic()
        try:
            layer = load.fetch.wait_layer(load.next_layer, load.left_s())
            waited_s = time.monotonic() - began_s
            if layer.chunk_count < load.chunk_count:
                self._shorten(load, layer.chunk_count, "chunks are missing")
                self._bad_chunks[load.job.request_id] = load.job.span.first_chunk + layer.chunk_count
            self._scatter(load, layer.data)
        except ChunkUnavailable as error:
            self._again(load, error)
            return
        except FAILURES as error:
            self._give_up(load, error)
            return
        self._counters.add(load_wait_s=waited_s, load_copy_s=time.monotonic() - began_s - waited_s)
        load.next_layer += 1

    def _scatter(self, load: ActiveLoad, data: Any) -> None:
        layer = self._layers[load.next_layer]
        heads, head_dim = layer.keys.shape[3], layer.keys.shape[4] * layer.keys.shape[5]
        chunks = self._staging.rows(data[: load.chunk_count]).view(self._dtype)
        states = chunks.view(load.chunk_count, 2, self._grid.chunk_tokens, heads, head_dim)
        first, count = load.job.span.chunk_skip, load.good_blocks * self._grid.block_tokens
        blocks = load.blocks[: load.good_blocks]
        for part in (0, 1):
            tokens = states[:, part].reshape(-1, heads, head_dim)[first : first + count]
            layer.write(blocks, tokens, part)

    def _again(self, load: ActiveLoad, error: ChunkUnavailable) -> None:
        """A chunk turned out bad: fetch those before it once more, and recompute only from it on."""
        self._bad_chunks[load.job.request_id] = load.job.span.first_chunk + (error.index or 0)
        if not error.index or load.is_retried:
            self._give_up(load, error)
            return
        try:
            self._shorten(load, error.index, str(error))
            if not load.good_blocks:
                raise error
            load.fetch.wait_settled(load.left_s())
            load.fetch = self._fetch(load.job, load.chunk_count, load.offset)
            load.is_retried = True
        except FAILURES as failure:
            self._give_up(load, failure)

    def _shorten(self, load: ActiveLoad, chunk_count: int, why: str) -> None:
        load.chunk_count = min(chunk_count, load.chunk_count)
        good = self._grid.first_lost_block(load.job.span, load.chunk_count)
        if good < load.good_blocks:
            load.good_blocks = good
            self._lose(load.job, good, why)

    def _give_up(self, load: ActiveLoad, error: Exception) -> None:
        self._active.remove(load)
        self._lose(load.job, 0, error)
        self._retire(load.fetch)

    def _lose(self, job: LoadJob, first_block: int, why: object) -> None:
        lost = job.span.blocks[first_block:]
        self._lost_blocks.update(lost)
        self._counters.add(load_failures=1, lost_tokens=len(lost) * self._grid.block_tokens)
        _log.warning(
            "request %s: %d of %d blocks were not loaded and will be recomputed: %s",
            job.request_id,
            len(lost),
            len(job.span.blocks),
            why,
        )

    def _retire(self, fetch: LayerFetch) -> None:
        """The fetch is given up, and its server may still write: cancel it elsewhere, and go on in other memory."""
        if fetch.is_settled:
            return
        if self._reaper is None:
            self._reaper = threading.Thread(target=self._reap, name="objectcache-reaper", daemon=True)
            self._reaper.start()
        if self._retired.qsize() >= RETIRED_MAX:
            fetch.wait_settled(self._options.load_timeout_s)
            return
        others = tuple(load.fetch for load in self._active)
        self._retired.put(((fetch, *others), self._staging))
        for load in list(self._active):
            self._active.remove(load)
            self._lose(load.job, 0, "its buffer is given up with that of another load")
        self._staging = self._new_staging()
        self._used = 0

    def _new_staging(self) -> Staging:
        return Staging(self._client, self._options.staging_bytes, self._device, self._options.staging)

    def _reap(self) -> None:
        while (item := self._retired.get()) is not None:
            fetches, staging = item
            for fetch in fetches:
                try:
                    fetch.cancel()
                except FAILURES as error:
                    _log.warning("cancelling fetch %s failed: %s", fetch.request_id, error)
            try:
                staging.release()
            except FAILURES as error:
                _log.warning("a buffer could not be released: %s", error)

    def _bytes(self, chunk_count: int) -> int:
        return self._layout.payload_bytes(chunk_count)
