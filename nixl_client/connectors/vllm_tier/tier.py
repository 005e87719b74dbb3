"""`ObjectCacheTier`: vLLM's secondary tier over ObjectCache. Everything here runs in the scheduler's thread and returns
at once; `traffic` has the threads that talk to the store.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Collection, Iterable
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from nixl_client.connectors.vllm.engine import join_log
from nixl_client.connectors.vllm.limits import transfer_limits
from nixl_client.connectors.vllm_tier.jobs import TierJob, TierJobEnd
from nixl_client.connectors.vllm_tier.options import HAS_ADAPTERS, TierOptions
from nixl_client.connectors.vllm_tier.rules.adapters import AdapterHashes, BlockNames, may_have_adapters
from nixl_client.connectors.vllm_tier.rules.naming import GROUP_BYTES, TierSpace, group_of
from nixl_client.connectors.vllm_tier.rules.published import TIER_INFO, TIER_LABELS
from nixl_client.connectors.vllm_tier.rules.rows import Bytes
from nixl_client.connectors.vllm_tier.rules.verdicts import Verdicts
from nixl_client.connectors.vllm_tier.spaces import forms_by_group, labels_of, space_of
from nixl_client.connectors.vllm_tier.start import introduce
from nixl_client.connectors.vllm_tier.traffic import TierTraffic
from nixl_client.transports.shared_memory import adopt

METRICS = {
    "lookups": "Questions which chunks are stored",
    "looked_up_chunks": "Chunks that were asked for",
    "found_chunks": "Chunks that were found stored",
    "lookup_failures": "Questions that failed, and were taken as misses",
    "lookup_s": "Seconds until questions were answered",
    "loads": "Loads",
    "fetches": "Requests of loads",
    "loaded_chunks": "Chunks loaded",
    "loaded_bytes": "Bytes loaded",
    "load_s": "Seconds spent in loads",
    "load_failures": "Loads that failed",
    "lost_chunks": "Chunks to be computed since they were not loaded",
    "stored_chunks": "Chunks written",
    "stored_bytes": "Bytes written",
    "stored_already_chunks": "Chunks not written since they were stored already",
    "store_failures": "Stores that failed",
    "dropped_chunks": "Chunks not written for want of time or room",
}
INFO = "The names and the shape of the engine's objects"
_PREFIX = "vllm:objectcache_tier_"
_DRAIN_TOLD_S = 10.0
_log = logging.getLogger(__name__)


class ObjectCacheTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """`options` are those of docs/guides/vllm.md. Raises ValueError for options that cannot be; a store that is not
    there keeps no engine from starting.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str = "REMOTE",
        enable_kv_events: bool = False,
        **options: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_log()
        self.locality = Locality(locality)
        self._options = TierOptions.of(options)
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        cards = [card for card in getattr(offloading_spec, "cards", list)() if card is not None]
        config = offloading_spec.config
        row_bytes = self.block_size_bytes
        self._forms = forms_by_group(config, cards, row_bytes)
        told = config.extra_config.get(HAS_ADAPTERS)
        self._has_adapters = may_have_adapters(told, [card.has_adapters for card in cards])
        self._block_names: dict[str, BlockNames] = {}
        """The requests of an engine with adapters whose adapter is known."""
        if self._has_adapters and told is None:
            _log.warning(
                "ObjectCache IS NOT USED: with LoRA%s vLLM names an adapter's KV by its path, not by its weights; use"
                " kv_connector ObjectCacheConnector, with the same options",
                "" if cards else ", which this engine may have,",
            )
        self._space = space_of(config, cards, self._forms, row_bytes, self._options.epoch)
        self.traffic = TierTraffic(
            self._options,
            self._space,
            self._forms,
            _region(getattr(offloading_spec, "_scheduler_mmap", None), primary_kv_view),
            row_bytes,
        )
        self._publish = cache(
            partial(labels_of, config, cards, self._forms, self._options.endpoint, self._options.bucket)
        )
        self._former_labels: tuple[str, ...] | None = None
        self._is_renewed = False
        self._verdicts = Verdicts(self._options.lookup_timeout_s + 1.0)
        self._live: set[str] = set()
        self._outdated: set[str] = set()
        """The requests that run, and those of them whose KV may be of other weights."""
        self._store_tokens: dict[str, int] = {}
        """Requests that bound what is stored of them: only KV of so many of their first tokens."""
        self._has_answers = True
        self._is_used = None not in self._forms.values()
        hashing = cards[0].hashing if cards else ""
        threading.Thread(
            target=introduce,
            args=(self.traffic.lookups, self._space, hashing, self.traffic.warm),
            name="objectcache-tier-start",
            daemon=True,
        ).start()

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The values of TIER_LABELS, None where nothing is published. Known after the first step. Renewed names are
        this engine's alone, and are not published: an engine that is reset after every change of its weights would
        leave a line of metrics for each.
        """
        return None if self._is_renewed else self._publish(self._space.prefix)

    @property
    def space(self) -> TierSpace:
        """The objects of this engine, and of those that share with it."""
        return self._space

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """RETRY once, then HIT or MISS, from memory."""
        stored_as = self._stored_as(key, req_context.req_id) if self._is_used else None
        if stored_as is None:
            return LookupResult.MISS
        if self._has_answers:
            self._take_answers()
        is_stored = self._verdicts.lookup(stored_as, req_context.req_id)
        if is_stored is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_stored else LookupResult.MISS

    def name_blocks(self, request_id: str, names: BlockNames) -> None:
        """From now on the blocks of this request have these names, in an engine with adapters; without a call nothing
        of it is stored, nor loaded.
        """
        if self._has_adapters:
            self._block_names[request_id] = names

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load these chunks into their slots, group by group in the order of the prompt, from which the store learns
        which chunk needs which.
        """
        job = self._job(job_metadata, is_load=True)
        if job is None:
            self.traffic.refuse(_unnamed(job_metadata, is_load=True))
        else:
            self.traffic.load(job)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store those of these chunks that are missing, in the order of the prompt: eviction takes the last ones first,
        and a store that fails has stored the first ones.
        """
        job = self._job(job_metadata, is_load=False)
        if job is None or not self._is_used or job_metadata.req_context.req_id in self._outdated:
            self.traffic.skip(_unnamed(job_metadata, is_load=False))
        else:
            self.traffic.store(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Each job once, when nothing touches its slots any more."""
        return [self._result(end) for end in self.traffic.book.take()]

    def has_pending_work(self) -> bool:
        """Whether an answer is to come, which the engine must step for."""
        return self._verdicts.is_waiting

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The chunks that this engine has stored."""
        if self._events is not None:
            taken, self._events = self._events, []
            yield from taken

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are stored as they come."""
        self._live.add(req_context.req_id)
        store_tokens = transfer_limits(req_context.kv_transfer_params).store_tokens
        if store_tokens is not None:
            self._store_tokens[req_context.req_id] = store_tokens
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what was known for it."""
        self._live.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)
        self._block_names.pop(req_context.req_id, None)
        self._store_tokens.pop(req_context.req_id, None)
        self._verdicts.finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask for what was looked up in this step, in one question."""
        self._take_answers()
        self._has_answers = True
        question = self._verdicts.take_question(time.monotonic())
        if question is not None:
            self.traffic.ask(question)

    def drain_jobs(self) -> None:
        """Drop stores that wait, and return when nothing touches the primary tier any more."""
        self.traffic.cancel_waiting()
        while not self.traffic.book.wait_idle(_DRAIN_TOLD_S):
            _log.warning("waiting for %d transfers to end", self.traffic.book.running_count)

    def renew(self) -> None:
        """Have nothing of what is stored, as if the weights were others, and store under names that nobody had before.
        Requests that run go on without the store. Nothing is under way: `drain_jobs` has returned.
        """
        self._former_labels, self._is_renewed = self.labels or self._former_labels, True
        self._space = self._space.renewed(uuid.uuid4().hex)
        self.traffic.rename(self._space)
        self._verdicts.renew()
        self._outdated |= self._live

    def shutdown(self) -> None:
        """May be called again, and after a failed start."""
        traffic = getattr(self, "traffic", None)
        if traffic is not None:
            traffic.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The tier's counters, and what it publishes."""
        counters = {f"{_PREFIX}{name}": OffloadingCounterMetadata(documentation=text) for name, text in METRICS.items()}
        return {**counters, TIER_INFO: OffloadingGaugeMetadata(documentation=INFO, labelnames=TIER_LABELS)}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts since the last call."""
        counts = {name: amount for name, amount in self.traffic.counters.take().items() if amount}
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, amount in counts.items():
            stats.increase_counter(f"{_PREFIX}{name}", amount)
        if self._former_labels is not None:
            stats.set_gauge(TIER_INFO, 0, self._former_labels)
        if self.labels is not None:
            stats.set_gauge(TIER_INFO, 1, self.labels)
        return stats

    def _take_answers(self) -> None:
        while True:
            try:
                self._verdicts.answered(*self.traffic.answers.get_nowait())
            except queue.Empty:
                break
        self._verdicts.expire(time.monotonic())
        self._has_answers = False

    def _stored_as(self, key: bytes, request_id: str) -> bytes | None:
        """The key by which the store has a chunk. None where its bytes are those of an adapter that is not known."""
        if not self._has_adapters:
            return key
        names = self._block_names.get(request_id)
        found = None if names is None else names(key[:-GROUP_BYTES])
        return None if found is None else found + key[-GROUP_BYTES:]

    def _job(self, job: TransferJob, *, is_load: bool) -> TierJob | None:
        """The job by the store's keys; None where one has none. vLLM bounds what is stored of a request by its
        `max_offload_tokens`, but for parts of blocks of states (0.32): here they are left out.
        """
        position = job.req_context.get_offload_key_position
        vllm_keys = sorted(job.keys, key=lambda key: (group_of(key), position(key) or 0))
        store_tokens = None if is_load else self._store_tokens.get(job.req_context.req_id)
        if store_tokens is not None:
            vllm_keys = [key for key in vllm_keys if 0 < (position(key) or 0) <= store_tokens]
        slots = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        names = self._block_names.get(job.req_context.req_id)
        if isinstance(names, AdapterHashes):
            names.check()
        named = [self._stored_as(key, job.req_context.req_id) for key in vllm_keys]
        keys = tuple(key for key in named if key is not None)
        if len(keys) < len(vllm_keys):
            return None
        return TierJob(
            job_id=job.job_id,
            keys=keys,
            slots=tuple(slots[key] for key in vllm_keys),
            vllm_keys=tuple(vllm_keys),
            is_load=is_load,
            began_s=time.monotonic(),
            content_class=self._options.content_class,
        )

    def _result(self, end: TierJobEnd) -> JobResult:
        job = end.job
        if job.is_load and not end.is_good:  # else vLLM would ask for them again and again
            self._verdicts.missed(set(job.keys) - end.done)
        if not job.is_load and self._events is not None and end.done:
            self._events.append(_stored(end.vllm_done, self.locality, self.tier_type))
        return JobResult(
            job_id=job.job_id,
            success=end.is_good,
            successful_keys=end.vllm_done if job.is_load else None,
            transfer_time=end.seconds,
            transfer_bytes=end.nbytes or None,
        )


def _unnamed(job: TransferJob, *, is_load: bool) -> TierJob:
    """A job that is not carried out, by vLLM's keys."""
    keys = tuple(job.keys)
    return TierJob(
        job_id=job.job_id,
        keys=keys,
        slots=tuple(job.chunk_ids.tolist()),
        vllm_keys=keys,
        is_load=is_load,
        began_s=time.monotonic(),
    )


def _stored(keys: Collection[bytes], locality: Locality, tier_type: str) -> OffloadingEvent:
    return OffloadingEvent(
        keys=list(keys), medium=Medium.STORAGE, removed=False, locality=locality, ownership=tier_type
    )


def _region(scheduler_mmap: Any, view: memoryview) -> Bytes:
    """The primary tier as one array: memory that servers on this host may fill where it is such."""
    if scheduler_mmap is not None:
        try:
            return adopt(scheduler_mmap.fd, scheduler_mmap.mmap_obj)[: view.nbytes]
        except ValueError as error:
            _log.info("no storage server on this host fills the primary tier: %s", error)
    return np.frombuffer(view.cast("B"), dtype=np.uint8)
