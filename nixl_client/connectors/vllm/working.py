"""A worker's side: loads into the engine's blocks, and the background writer out of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from descriptors.layout import ChunkLayout, slice_bytes
from nixl_client.client import Client
from nixl_client.connectors.compute_fit import ComputeFit
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.step_timer import StepTimer
from nixl_client.connectors.vllm.blocks import PagedLayer
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.loads import Loads
from nixl_client.connectors.vllm.loads_ahead import LoadsAhead
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.steps import LoadJob, Report, Step
from nixl_client.connectors.vllm.worker_ledger import Outbox, WorkerLedger
from nixl_client.connectors.vllm.writer import Writer
from nixl_client.lossy import Lossy
from nixl_client.session.retries import Retries

CLOSE_S = 5.0
FIT_EVERY = 8
_log = logging.getLogger(__name__)


class WorkerSide:
    """One rank's loads and stores."""

    def __init__(
        self,
        options: VllmOptions,
        rank: int,
        grid: Grid,
        layer_indexes: Mapping[str, int],
        layers: Sequence[PagedLayer],
        counters: Counters,
        model_name: str,
        *,
        is_alone: bool = True,
        is_ahead: bool = False,
        is_writer: bool = True,
        may_be_encoded: bool = True,
    ) -> None:
        """`is_ahead` has loads over before their requests run. A worker whose part another one writes is no writer."""
        if not may_be_encoded:
            options = replace(options, lossy=Lossy.OFF)
        states = layers[0].keys
        heads, head_dim = states.shape[3], states.shape[4] * states.shape[5]
        layout = ChunkLayout(
            len(layers), grid.chunk_tokens, slice_bytes(grid.chunk_tokens, heads, head_dim, states.itemsize)
        )
        self._drain_s = options.drain_s
        self._layer_indexes = layer_indexes
        self._load_client = Client(
            options.endpoint,
            options.bucket,
            transport=options.transport,
            http_connections=options.http_connections,
            timeout_s=options.load_timeout_s,
            fetch_timeout_s=options.load_timeout_s,
            downlink_bytes_per_s=options.downlink_bytes_per_s or None,
            retries=Retries.of_engines(),
        )
        self._store_client = Client(options.endpoint, options.bucket, timeout_s=options.store_timeout_s)
        loads = Loads(
            client=self._load_client,
            rank=rank,
            grid=grid,
            layout=layout,
            layers=layers,
            dtype=states.dtype,
            options=options,
            counters=counters,
            is_alone=is_alone,
            is_ahead=is_ahead,
            on_end=self._load_ended,
        )
        self._loads: Loads | LoadsAhead = LoadsAhead(loads, states.device) if is_ahead else loads
        ledger = WorkerLedger(options.store_queue_chunks, options.store_wait_s)
        self._writer = Writer(
            client=self._store_client,
            rank=rank,
            grid=grid,
            layout=layout,
            layers=layers,
            ledger=ledger,
            loads_idle=self._loads.is_idle,
            counters=counters,
            options=options,
            model_name=model_name,
            is_writer=is_writer,
            may_be_encoded=may_be_encoded,
        )
        self._awaited: frozenset[str] = frozenset()
        self._report = Report()
        self._timer = StepTimer(states.device)
        self._fit = ComputeFit()
        self._observed = 0
        self._told_late = 0

    def begin_step(self) -> None:
        """The forward pass is about to begin."""
        self._timer.begin()

    def void(self, step: Step) -> None:
        """The step is about to change blocks."""
        rewritten = None if step.is_reset else step.rewritten
        self._writer.void(rewritten)
        self._loads.lossy_blocks.begin(step.grown, rewritten)

    def start_loads(self, step: Step) -> None:
        """Start fetching. Without loads the engine calls this when the forward pass is over."""
        self._loads.start(step.loads, step.layer_compute_us, step.costs)

    def wait_layer(self, layer_name: str) -> None:
        """Return when the layer is in its blocks."""
        index = self._layer_indexes.get(layer_name)
        if index is not None:
            self._loads.wait_layer(index)

    def end_step(self, step: Step) -> None:
        """The forward pass is over."""
        self._loads.finish()
        self._timer.end(step.work, self._loads.waited_s)
        lossy = {job.job_id for job in step.stores if self._loads.lossy_blocks.covers(job)}
        self._writer.add(step.stores, lossy)
        self._awaited |= step.awaited

    def take_freed(self, finished: set[str]) -> set[str]:
        """Ended requests whose blocks nothing reads any more."""
        freed, report = self._writer.poll(self._awaited, finished)
        self._awaited = frozenset()
        self._report = self._report.add(report)
        return freed

    def take_over(self) -> set[str]:
        """Requests that waited for their loads, which are over. Blocks that they lost can be taken now."""
        return self._loads.take_over()

    def take_lost_blocks(self) -> set[int]:
        """Blocks that were not loaded."""
        return self._loads.take_lost_blocks()

    def take_report(self) -> Report:
        """Jobs that have been read, or loaded."""
        report, self._report = self._report, Report()
        return report.add(self._loads.take_report()).add(self._measured())

    def _load_ended(self, job: LoadJob) -> None:
        if isinstance(self._loads, LoadsAhead):
            self._loads.ended(job)

    def _measured(self) -> Report:
        """A report of the costs of steps and loads, where FIT_EVERY more steps have been seen, or a load was late."""
        before = self._observed // FIT_EVERY
        for work, seconds in self._timer.take():
            self._fit.observe(work, seconds)
            self._observed += 1
        if self._observed // FIT_EVERY == before and self._loads.late_count == self._told_late:
            return Report()
        self._told_late = self._loads.late_count
        return Report(costs=self._fit.costs(), load_costs=self._loads.load_fit.costs(time.monotonic()))

    def close(self) -> None:
        """Bring everything to an end; what cannot be in time is left to the process's own end."""
        closing = threading.Thread(target=self._close, name="objectcache-close", daemon=True)
        closing.start()
        closing.join(3 * self._drain_s + CLOSE_S)
        if closing.is_alive():
            _log.warning("stores or loads under way did not end in time")

    def _close(self) -> None:
        self._writer.close(self._drain_s)
        self._loads.close(self._drain_s)
        for client in (self._store_client, self._load_client):
            try:
                client.close()
            except Exception as error:
                _log.warning("a client could not be closed: %r", error)


class IdleWorker:
    """A rank whose KV cannot be cached, though the scheduler, which does not see all of it, has work for it: every load
    is lost, every store dropped. `is_ahead` says that requests wait for their loads.
    """

    def __init__(self, *, is_ahead: bool = False) -> None:
        self._is_ahead = is_ahead
        self._over: set[str] = set()
        self._ledger = WorkerLedger(queue_chunks=0, wait_s=1.0)
        self._outbox = Outbox()
        self._lost_blocks: set[int] = set()
        self._report = Report()

    def begin_step(self) -> None:
        """Nothing is measured here."""

    def void(self, step: Step) -> None:
        """Nothing reads blocks here."""

    def start_loads(self, step: Step) -> None:
        """Lose them."""
        jobs = step.loads
        self._lost_blocks.update(block for job in jobs for block in job.chunk_range.blocks)
        ended = dict.fromkeys((job.job_id for job in jobs), 1)
        self._report = self._report.add(Report({}, ended, {}, len(jobs)))
        if self._is_ahead:
            self._over.update(job.request_id for job in jobs)

    def wait_layer(self, layer_name: str) -> None:
        """Nothing comes."""

    def end_step(self, step: Step) -> None:
        """Drop the stores."""
        for job in step.stores:
            self._outbox.put(self._ledger.add(job, 0.0))
        self._outbox.put(self._ledger.await_free(step.awaited))

    def take_freed(self, finished: set[str]) -> set[str]:
        """Every request that waits for it."""
        self._ledger.forget(finished)
        freed, self._outbox.freed = self._outbox.freed, set()
        return freed

    def take_over(self) -> set[str]:
        """Requests that waited for their loads."""
        over, self._over = self._over, set()
        return over

    def take_lost_blocks(self) -> set[int]:
        """Blocks that were not loaded."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_report(self) -> Report:
        """Jobs that were dropped or lost."""
        report, self._report = self._report, Report()
        read_jobs, self._outbox.read_jobs = self._outbox.read_jobs, {}
        return report.add(Report(read_jobs))

    def close(self) -> None:
        """Nothing to end."""
