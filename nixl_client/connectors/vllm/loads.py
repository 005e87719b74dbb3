"""A worker's loads: one fetch for each request. Where a load belongs to a step the attention of a layer waits for the
layer, which is copied into the engine's blocks then. `loads_ahead` ends a load before its request runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from descriptors.descriptor import OnMissing
from descriptors.errors import ChunkUnavailable
from descriptors.layout import ChunkLayout
from descriptors.recompute import PrefillCosts
from nixl_client.client import Client
from nixl_client.connectors.compute_fit import LoadFit
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.late import RECHECK_MIN_S
from nixl_client.connectors.vllm.active_load import ActiveLoad
from nixl_client.connectors.vllm.blocks import Blocks, PagedLayer
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.lossy_blocks import LossyBlocks
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.retired import Retired
from nixl_client.connectors.vllm.staging import Staging
from nixl_client.connectors.vllm.steps import LoadJob, Report
from nixl_client.fetch.layer_fetch import Layer, LayerFetch
from nixl_client.lossy import accept_of

RETIRED_MAX = 4
_log = logging.getLogger(__name__)


class Loads:
    """All loads of a worker; used by one thread."""

    def __init__(
        self,
        client: Client,
        rank: int,
        grid: Grid,
        layout: ChunkLayout,
        layers: Sequence[PagedLayer],
        dtype: torch.dtype,
        options: VllmOptions,
        counters: Counters,
        *,
        is_alone: bool = True,
        is_ahead: bool = False,
        on_end: Callable[[LoadJob], None] = lambda job: None,
    ) -> None:
        """`is_ahead` says that no step waits for them. `on_end` is told of each job that is over, well or not."""
        self._client = client
        self._rank = rank
        self._grid = grid
        self._layout = layout
        self._is_ahead = is_ahead
        self._on_end = on_end
        self._layers = layers
        self._dtype = dtype
        self._counters = counters
        self._options = options
        self._accept = accept_of(options.lossy, dtype, options.max_error, options.loss_bound)
        self.lossy_blocks = LossyBlocks(is_alone=is_alone, is_ahead=is_ahead)
        self._staging: Staging | None = None
        self._used = 0
        self._active: list[ActiveLoad] = []
        self._abandoned: list[LayerFetch] = []
        self._lost_blocks: set[int] = set()
        self._report = Report()
        self._layer_compute_us: tuple[int, ...] = ()
        self._costs: PrefillCosts | None = None
        self.late_count = 0
        """Loads that were given up, or cut short, for being late."""
        self.waited_s = 0.0
        """How long this step's layers were waited for and copied."""
        self.load_fit = LoadFit()
        """The times of loads that no rate held back."""
        self._retired = Retired(RETIRED_MAX)
        self.is_idle = threading.Event()
        self.is_idle.set()
        self._ready_staging()

    @property
    def is_under_way(self) -> bool:
        """Whether a load has been started that is not over."""
        return bool(self._active)

    def has_room(self, jobs: Sequence[LoadJob]) -> bool:
        """Whether the buffer has room for these beside what is under way. Where nothing is, it is not asked."""
        nbytes = sum(self._layout.delivery_bytes(job.chunk_range.chunk_count) for job in jobs)
        return not self._active or self._used + nbytes <= self._options.staging_bytes

    def start(
        self,
        jobs: Sequence[LoadJob],
        layer_compute_us: int = 0,
        costs: PrefillCosts | None = None,
        since_s: float | None = None,
    ) -> None:
        """Start these loads, in a step that computes each layer in about `layer_compute_us`. A load that cannot be
        started is lost at once. With `costs` a load is waited for only while that is sooner than computing its tokens.
        Their time runs from `since_s`, by the monotonic clock, or from now.
        """
        self.waited_s = 0.0
        if not jobs:
            return
        self._layer_compute_us = (layer_compute_us,) if layer_compute_us else ()
        self._costs = costs
        self.is_idle.clear()
        deadline_s = (time.monotonic() if since_s is None else since_s) + self._options.load_timeout_s
        for job in jobs:
            try:
                if time.monotonic() > deadline_s:
                    raise TimeoutError("no time is left in this step")
                self._start(job, self._ready_staging(), deadline_s)
            except Exception as error:
                self._report.failed_loads += 1
                self._lose(job, 0, error)
                self._end(job)

    def wait_layer(self, layer_index: int) -> None:
        """Return when the layer of every load is in its blocks, or the load is given up."""
        for load in list(self._active):
            while load.next_layer <= layer_index and load in self._active:
                self._take_layer(load)

    def finish(self) -> None:
        """The step's forward pass is over: bring what is left to an end."""
        if self.is_idle.is_set():
            return
        while self._active:
            self._finish_first()
        self._settle()

    def finish_first(self) -> None:
        """Bring the oldest load to an end; when none is left the buffer is empty again."""
        if self._active:
            self._finish_first()
        if not self._active:
            self._settle()

    def _finish_first(self) -> None:
        load = self._active[0]
        while load in self._active and load.next_layer < len(self._layers):
            self._take_layer(load)
        if load not in self._active:
            return
        is_over = False
        try:
            load.fetch.wait(load.left_s())
            is_over = True
        except Exception as error:
            _log.warning("request %s: loaded, but its fetch did not end: %s", load.job.request_id, error)
        self._count(load, is_over=is_over)
        if not load.fetch.is_settled:  # a server of a cluster that was given up may still write
            self._abandoned.append(load.fetch)
        self._active.remove(load)
        self._end(load.job)

    def _settle(self) -> None:
        self._used = 0
        if self._staging is not None:
            self._staging.mark_read()
        self._retire()
        self.is_idle.set()

    def take_over(self) -> set[str]:
        """No request waits for its load alone: it runs in the step that loads."""
        return set()

    def take_lost_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not, since the last call."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_report(self) -> Report:
        """Jobs that have been started, or lost at once, since the last call, and what was wrong with them."""
        report, self._report = self._report, Report()
        return report

    def interrupt(self) -> None:
        """Have the wait for what is under way end at once, in whatever thread waits."""
        for load in list(self._active):
            load.deadline_s = 0.0
            self._retired.cancel(load.fetch)

    def close(self, timeout_s: float) -> None:
        """Give up what is under way."""
        self._abandoned += [load.fetch for load in self._active]
        self._active = []
        self._retire()
        self._retired.close(timeout_s)

    def _ready_staging(self) -> Staging:
        """The buffer, made when there is none. Raises OSError for want of memory."""
        if self._staging is None:
            if self._retired.is_full:
                raise OSError(f"{RETIRED_MAX} buffers wait for the server to cancel loads that were given up")
            self._staging = Staging(
                self._client, self._options.staging_bytes, self._layers[0].keys.device, self._options.staging
            )
        self._staging.await_read()
        return self._staging

    def _start(self, job: LoadJob, staging: Staging, deadline_s: float) -> None:
        offset, nbytes = self._used, self._layout.delivery_bytes(job.chunk_range.chunk_count)
        if offset + nbytes > staging.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit what is left of the staging buffer")
        self._used += nbytes
        began_s = time.monotonic()
        if self._accept is not None:
            self.lossy_blocks.loading(job.chunk_range.blocks)
        fetch = self._fetch(job, job.chunk_range.chunk_count, staging, offset)
        if self._layer_compute_us:
            self._counters.add(stated_loads=1)
        self._active.append(
            ActiveLoad(
                job=job,
                blocks=Blocks(job.chunk_range.blocks),
                staging=staging,
                fetch=fetch,
                offset=offset,
                deadline_s=deadline_s,
                chunk_count=job.chunk_range.chunk_count,
                good_blocks=len(job.chunk_range.blocks),
                began_s=began_s,
            )
        )

    def _fetch(self, job: LoadJob, chunk_count: int, staging: Staging, offset: int) -> LayerFetch:
        return self._client.fetch(
            job.keys[self._rank][:chunk_count],
            self._layout,
            staging.array,
            offset=offset,
            delivery=self._options.delivery,
            on_missing=OnMissing.PREFIX,
            layer_compute_us=self._layer_compute_us,
            accept=self._accept,
        )

    def _take_layer(self, load: ActiveLoad) -> None:
        began_s = time.monotonic()
        try:
            layer = self._await_layer(load)
            waited_s = time.monotonic() - began_s
            if layer is None:
                self.waited_s += waited_s
                return
            if layer.chunk_count < load.chunk_count:
                self._report.bad_chunks[load.job.job_id] = load.job.chunk_range.first_chunk + layer.chunk_count
                self._shorten(load, layer.chunk_count, "chunks are missing")
            if load.good_blocks:
                self._scatter(load, layer.data)
        except ChunkUnavailable as error:
            self._again(load, error)
            return
        except Exception as error:
            self._give_up(load, error)
            return
        if not load.good_blocks:
            self._drop(load)
        spent_s = time.monotonic() - began_s
        self.waited_s += spent_s
        if not self._is_ahead:
            self._counters.add(load_wait_s=waited_s, load_copy_s=spent_s - waited_s)
        load.next_layer += 1
        load.ready_at_s = layer.ready_at_s

    def _await_layer(self, load: ActiveLoad) -> Layer | None:
        """The next layer; None where the load was cut short meanwhile."""
        recheck_s = RECHECK_MIN_S
        while True:
            try:
                return load.fetch.wait_layer(load.next_layer, min(recheck_s, load.left_s()))
            except TimeoutError:
                if not load.left_s():
                    raise
                verdict = load.verdict(self._costs, self._grid, sum(self._layer_compute_us) / 1e6)
                if verdict.chunk_count < load.chunk_count:
                    self._cut(load, verdict.chunk_count)
                    return None
                recheck_s = verdict.recheck_s

    def _cut(self, load: ActiveLoad, chunk_count: int) -> None:
        """The load is late: fetch no more than its first chunks, and have the rest computed. Layers that came stay."""
        progress = load.progress()
        whole_s = time.monotonic() - load.began_s + progress.remaining_s
        self.load_fit.observe(self._layout.delivery_bytes(load.chunk_count), whole_s, time.monotonic())
        self.late_count += 1
        self._counters.add(late_loads=1)
        if load.is_retried:
            chunk_count = 0
        offset, nbytes = self._used, self._layout.delivery_bytes(chunk_count)
        if offset + nbytes > load.staging.nbytes:
            chunk_count = 0
        left, layers = progress.layers_left, progress.num_layers
        self._shorten(load, chunk_count, f"late, {left} of {layers} to come in about {progress.remaining_s:.3f} s")
        self._retired.cancel(load.fetch)
        load.note_forms(is_over=False)
        if not load.good_blocks:
            self._drop(load)
            return
        self._abandoned.append(load.fetch)
        try:
            load.fetch = self._fetch(load.job, chunk_count, load.staging, offset)
        except Exception as failure:
            self._give_up(load, failure)
            return
        self._used += nbytes
        load.offset, load.is_retried = offset, True

    def _scatter(self, load: ActiveLoad, data: Any) -> None:
        layer = self._layers[load.next_layer]
        heads, head_dim = layer.keys.shape[3], layer.keys.shape[4] * layer.keys.shape[5]
        chunks = load.staging.rows(data[: load.chunk_count]).view(self._dtype)
        states = chunks.view(load.chunk_count, 2, self._grid.chunk_tokens, heads, head_dim)
        load.blocks = load.blocks.first(load.good_blocks)
        for part in (0, 1):
            layer.write(load.blocks, states[:, part], load.job.chunk_range.chunk_skip, part)

    def _again(self, load: ActiveLoad, error: ChunkUnavailable) -> None:
        """A chunk turned out bad: fetch those before it once more, and recompute only from it on."""
        self._report.bad_chunks[load.job.job_id] = load.job.chunk_range.first_chunk + (error.index or 0)
        if not error.index or load.is_retried:
            self._give_up(load, error)
            return
        try:
            self._shorten(load, error.index, str(error))
            if not load.good_blocks:
                self._drop(load)
                return
            load.fetch.wait_settled(load.left_s())
            load.note_forms(is_over=False)
            load.fetch = self._fetch(load.job, load.chunk_count, load.staging, load.offset)
            load.is_retried = True
        except Exception as failure:
            self._give_up(load, failure)

    def _shorten(self, load: ActiveLoad, chunk_count: int, why: str) -> None:
        load.chunk_count = min(chunk_count, load.chunk_count)
        good = self._grid.first_lost_block(load.job.chunk_range, load.chunk_count)
        if good < load.good_blocks:
            load.good_blocks = good
            self._lose(load.job, good, why)

    def _give_up(self, load: ActiveLoad, error: Exception) -> None:
        is_late = isinstance(error, TimeoutError) and bool(load.fetch.ready_at_s())
        if is_late:
            self.late_count += 1
            self._counters.add(late_loads=1)
        elif not isinstance(error, ChunkUnavailable):
            self._report.failed_loads += 1
        self._lose(load.job, 0, error, load.good_blocks)
        self._drop(load)

    def _drop(self, load: ActiveLoad) -> None:
        """Nothing is expected of the load any more; its server may still write."""
        self._active.remove(load)
        self._abandoned.append(load.fetch)
        self._end(load.job)

    def _end(self, job: LoadJob) -> None:
        self._report.ended_loads[job.job_id] = 1
        self._on_end(job)

    def _count(self, load: ActiveLoad, *, is_over: bool) -> None:
        nbytes = self._layout.delivery_bytes(load.chunk_count)
        tokens = load.good_blocks * self._grid.block_tokens
        if not load.fetch.grant.rate_bytes_per_s and not load.is_retried:
            self.load_fit.observe(nbytes, load.ready_at_s - load.began_s, time.monotonic())
        self._counters.add(loads=1, loaded_chunks=load.chunk_count, loaded_bytes=nbytes, loaded_tokens=tokens)
        forms, blocks = load.fetch.forms, load.job.chunk_range.blocks
        first_encoded = load.note_forms(is_over=is_over) if self._accept is not None else load.chunk_count
        is_exact = first_encoded == load.chunk_count
        exact_count = len(blocks) if is_exact else self._grid.first_lost_block(load.job.chunk_range, first_encoded)
        self.lossy_blocks.loaded(blocks, exact_count)
        if forms is not None:
            encoded = forms.encoded_count
            self._counters.add(lossy_chunks=encoded, lossy_error=forms.mean_error * forms.chunk_count)

    def _lose(self, job: LoadJob, first_block: int, why: object, end_block: int | None = None) -> None:
        lost = job.chunk_range.blocks[first_block:end_block]
        self._lost_blocks.update(lost)
        if not first_block:
            self.lossy_blocks.loaded(job.chunk_range.blocks, len(job.chunk_range.blocks))
        self._counters.add(load_failures=1, lost_tokens=len(lost) * self._grid.block_tokens)
        _log.warning(
            "request %s: %d of %d blocks were not loaded and will be recomputed: %s",
            job.request_id,
            len(lost),
            len(job.chunk_range.blocks),
            why if str(why) else repr(why),
        )

    def _retire(self) -> None:
        """Where a server may still write into the buffer: have that cancelled elsewhere, and go on in another."""
        unsettled = tuple(fetch for fetch in self._abandoned if not fetch.is_settled)
        self._abandoned = []
        if not unsettled or self._staging is None:
            return
        self._retired.give(unsettled, self._staging)
        self._staging = None
