"""A worker's background writer: reads finished chunks out of the engine's blocks and puts what is not stored yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from descriptors.descriptor import ELEMENT_BYTES
from descriptors.errors import ObjectCacheError
from descriptors.kv_forms import KvLayout
from descriptors.layout import LAYOUT_ID, ChunkLayout
from descriptors.prefix_keys import metadata_of
from nixl_client.client import Client
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.vllm.blocks import Blocks, PagedLayer
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.steps import Report, StoreJob
from nixl_client.connectors.vllm.worker_ledger import Instruction, Outbox, StopReading, WorkerLedger, WriteJob
from nixl_client.lossy import accept_of

BATCH_CHUNKS = 8
BATCH_BYTES = 64 << 20
LOADS_FIRST_S = 1.0
"""How long a batch waits for loads to end."""
_log = logging.getLogger(__name__)


class Writer:
    """Carries out the instructions of a `WorkerLedger` in a thread of its own. Its methods are called by the thread
    that runs the model.
    """

    def __init__(
        self,
        client: Client,
        rank: int,
        grid: Grid,
        layout: ChunkLayout,
        layers: Sequence[PagedLayer],
        ledger: WorkerLedger,
        loads_idle: threading.Event,
        counters: Counters,
        options: VllmOptions,
        model_name: str,
        *,
        is_writer: bool = True,
        may_be_encoded: bool = True,
    ) -> None:
        """Chunks that servers may encode are told with the layout of their keys and values."""
        self._is_writer = is_writer
        self._client = client
        self._content_class = options.content_class
        self._rank = rank
        self._grid = grid
        self._layers = layers
        self._ledger = ledger
        self._outbox = Outbox()
        self._loads_idle = loads_idle
        self._counters = counters
        states = layers[0].keys
        heads, head_dim = states.shape[3], states.shape[4] * states.shape[5]
        self._batch_chunks = max(1, min(BATCH_CHUNKS, BATCH_BYTES // layout.chunk_bytes))
        shape = (self._batch_chunks, layout.num_layers, 2, layout.chunk_tokens, heads, head_dim)
        self._batch = torch.empty(shape, dtype=states.dtype)
        element = str(states.dtype).removeprefix("torch.")
        about = {"model": model_name}
        if not options.native:  # else pages, which only engines alike can read
            about |= {"dtype": element, "layout": LAYOUT_ID, "tokens": str(layout.chunk_tokens)}
        self._metadata = metadata_of(about)
        self._kv_layout = None
        if element in ELEMENT_BYTES and may_be_encoded:
            self._kv_layout = KvLayout(layout.num_layers, layout.chunk_tokens, heads * head_dim, element)
        self._accept = accept_of(options.lossy, states.dtype, options.max_error, options.loss_bound)
        self._changed = threading.Condition()
        self._is_gathering = False
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, jobs: Iterable[StoreJob], lossy: Collection[int] = ()) -> None:
        """Write these, when there is time; but for those whose ids are in `lossy`, whose KV is not exact."""
        now_s = time.monotonic()
        with self._changed:
            for job in jobs:
                if not self._is_writer:
                    self._carry_out(self._ledger.refuse(job, now_s))
                elif job.job_id in lossy:
                    self._counters.add(lossy_unstored_chunks=job.chunk_range.chunk_count)
                    self._carry_out(self._ledger.refuse(job, now_s))
                else:
                    self._carry_out(self._ledger.add(job, now_s))
            self._changed.notify_all()
            if self._thread is None and not self._ledger.is_idle:
                self._thread = threading.Thread(target=self._run, name="objectcache-store", daemon=True)
                self._thread.start()

    def void(self, blocks: frozenset[int] | None) -> None:
        """On return nothing reads these blocks; None: no block at all."""
        if blocks is not None and not blocks:
            return
        with self._changed:
            instructions = self._ledger.void(blocks)
            self._carry_out(instructions)
            if any(isinstance(instruction, StopReading) for instruction in instructions):
                self._changed.wait_for(lambda: not self._is_gathering)

    def poll(self, awaited: Iterable[str], finished: Iterable[str]) -> tuple[set[str], Report]:
        """Which ended requests' blocks are free now, and which jobs have been read."""
        with self._changed:
            self._carry_out(self._ledger.await_free(awaited))
            self._ledger.forget(finished)
            self._carry_out(self._ledger.expire(time.monotonic(), self._is_gathering))
            told, self._outbox = self._outbox, Outbox()
            return told.freed, Report(told.read_jobs)

    def close(self, drain_s: float) -> None:
        """Write what waits, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or self._ledger.is_idle, drain_s)
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(drain_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._ledger.has_waiting)
                if self._is_closing:
                    return
                instructions = self._ledger.begin_next()
            for instruction in instructions:
                if isinstance(instruction, WriteJob):
                    self._write(instruction.job)

    def _write(self, job: StoreJob) -> None:
        try:
            self._store(job)
        except Exception as error:
            if isinstance(error, (ObjectCacheError, OSError, TimeoutError)):
                _log.warning("request %s: chunks were not stored: %s", job.request_id, error)
            else:
                _log.exception("request %s: chunks were not stored", job.request_id)
            self._counters.add(store_failures=1)
            self._end(self._ledger.fail, job)
        else:
            self._end(self._ledger.end, job)

    def _store(self, job: StoreJob) -> None:
        keys = job.keys[self._rank]
        stored = 0 if job.is_repair else self._client.lookup(keys, accept=self._accept)
        self._counters.add(stored_already_chunks=stored)
        for first in range(stored, len(keys), self._batch_chunks):
            end = min(first + self._batch_chunks, len(keys))
            self._loads_idle.wait(LOADS_FIRST_S)
            if not self._gather(job, first, end):
                break
            chunks = [self._batch[index].flatten().view(torch.uint8).numpy() for index in range(end - first)]
            self._client.put_chunks(
                keys[first:end],
                chunks,
                content_class=self._content_class,
                kv_layout=self._kv_layout,
                metadata=self._metadata,
            )
            self._counters.add(stored_chunks=end - first, stored_bytes=sum(chunk.nbytes for chunk in chunks))

    def _gather(self, job: StoreJob, first: int, end: int) -> bool:
        """Copy chunks out of their blocks; False when the blocks hold other bytes by now."""
        chunk_range = job.chunk_range
        with self._changed:
            if not self._ledger.may_read(job.job_id):
                return False
            self._is_gathering = True
        try:
            start = chunk_range.block_skip + first * self._grid.chunk_tokens
            first_block, skip = divmod(start, self._grid.block_tokens)
            count = (end - first) * self._grid.chunk_tokens
            blocks = Blocks(chunk_range.blocks[first_block : -(-(start + count) // self._grid.block_tokens)])
            for index, layer in enumerate(self._layers):
                for part in (0, 1):
                    states = layer.read(blocks, skip, count, part)
                    self._batch[: end - first, index, part] = states.view(end - first, -1, *states.shape[1:]).to("cpu")
        finally:
            with self._changed:
                self._is_gathering = False
                if end == chunk_range.chunk_count:
                    self._carry_out(self._ledger.end_read(job.job_id))
                self._changed.notify_all()
        return True

    def _end(self, event: Callable[[int], list[Instruction]], job: StoreJob) -> None:
        with self._changed:
            self._carry_out(event(job.job_id))
            self._changed.notify_all()

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Note what is to be told, and count what was dropped."""
        self._outbox.put(instructions)
        if self._outbox.dropped_chunks:
            self._counters.add(dropped_chunks=self._outbox.dropped_chunks)
            self._outbox.dropped_chunks = 0
