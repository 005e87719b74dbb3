"""`ObjectCacheConnector`: vLLM's calls, handed to the part they are for. Made once in the scheduler and once in each
worker. Where this engine's KV cannot be loaded layer by layer, vLLM is given a `RowwiseConnector` instead. Where it
cannot be cached, this one says so once and does nothing.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from descriptors.layout import ChunkLayout
from descriptors.units import format_bytes
from nixl_client.client import Client
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.startup import say
from nixl_client.connectors.vllm import engine
from nixl_client.connectors.vllm.blocks import PagedLayer
from nixl_client.connectors.vllm.early import check_early
from nixl_client.connectors.vllm.ledger import SchedulerLedger
from nixl_client.connectors.vllm.metrics import (
    ObjectCachePromMetrics,
    ObjectCacheStats,
    StepMetadata,
    WorkerReport,
    is_of_rows,
)
from nixl_client.connectors.vllm.naming import Deployment
from nixl_client.connectors.vllm.native import NativeDeployment, native_deployment, require_native
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.published import PUBLISHED
from nixl_client.connectors.vllm.rowwise import RowwiseConnector, over_tier
from nixl_client.connectors.vllm.scheduling import SchedulerSide
from nixl_client.connectors.vllm.steps import Step
from nixl_client.connectors.vllm.tier_options import names_tier
from nixl_client.connectors.vllm.working import IdleWorker, WorkerSide
from nixl_client.connectors.vllm_tier.start import introduce
from nixl_client.lossy import accept_of
from nixl_client.session.retries import Retries

_log = logging.getLogger(__name__)


class ObjectCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Reuses prefixes through ObjectCache. Options: `nixl_client.connectors.vllm.options`."""

    _obstacle = ""
    """The reason why nothing is cached."""

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        """The connector for the engine's KV, which vLLM tells no sooner. Raises ValueError for options that cannot
        be.
        """
        engine.join_log()
        obstacle = ""
        try:
            return _rowwise(vllm_config, role, kv_cache_config) or super().__new__(cls)
        except engine.UncacheableError as error:
            obstacle = str(error)
        made = super().__new__(cls)
        made._obstacle = obstacle
        return made

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.counters = Counters()
        options = VllmOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        self._is_ahead = engine.loads_ahead(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._ledger: SchedulerLedger | None = None
        self._worker: WorkerSide | IdleWorker | None = None
        self._client: Client | None = None
        self._setup: engine.CacheSetup | None = None
        if self._obstacle:
            if role == KVConnectorRole.SCHEDULER:
                _log.error("ObjectCache is not used: %s: not supported", self._obstacle)
            return
        self._setup = engine.cache_setup(vllm_config, kv_cache_config, options)
        if role == KVConnectorRole.SCHEDULER:
            self._init_scheduler(self._setup)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is only a miss later."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for between the pieces, but not where the options name the tier. The first call with
        options: they are checked here. Raises ValueError.
        """
        if names_tier(extra_config):
            return False
        check_early(extra_config)
        return True

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: loads and stores hold on to the engine's memory, which goes while it sleeps (vLLM 0.33 asks)."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout in which rows of all groups have the same names as the tier's; layers may lie in any."""
        layout: str | None = OffloadingConnector.get_required_kvcache_layout(vllm_config)
        return layout

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Stats of these sums, which are vLLM's own where a `RowwiseConnector` has counted."""
        if data and is_of_rows(data):
            return OffloadingConnector.build_kv_connector_stats(data)
        return ObjectCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ObjectCachePromMetrics:
        """The counters for Prometheus."""
        return ObjectCachePromMetrics(*args)

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load, in the step that needs them or ahead of it; None to ask again later."""
        if self._scheduler is None:
            return 0, False
        count = self._scheduler.match(request, num_computed_tokens)
        if count is not None and not self._kv_transfer_config.is_kv_consumer:
            count = 0
        return count, self._is_ahead and bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The offer was taken, or not."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's loads and stores."""
        if self._scheduler is None or self._setup is None:
            return StepMetadata(Step())
        state = scheduler_output.kv_connector_block_state
        for request_id in scheduler_output.num_scheduled_tokens:
            block_ids = state.get_block_ids(request_id)
            if block_ids is not None:
                self._scheduler.scheduled(request_id, block_ids[0])
        self._scheduler.given_out(engine.given_out_blocks(scheduler_output, self._setup.grid.block_tokens))
        return StepMetadata(self._scheduler.take_step(engine.step_work(scheduler_output)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must be kept until they have been read."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` for vLLM's manager of several groups, which there is one of here."""
        return self.request_finished(request, block_ids[0])

    def update_connector_output(self, connector_output: Any) -> None:
        """Take over the workers' reports: chunks that they have read, and blocks that they could not load."""
        self._evict(connector_output.invalid_block_ids)
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, WorkerReport):
            self._scheduler.report(report.report)

    def reset_cache(self) -> bool:
        """Have nothing of what is stored, as if the weights were others: they may be."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's memory."""
        if self._setup is None:
            self._worker = IdleWorker(is_ahead=self._is_ahead)
            return
        indexes = engine.layer_indexes(kv_caches)
        caches = {index: kv_caches[name] for name, index in indexes.items()}
        try:
            layers = self._layers(self._setup, [caches[index] for index in sorted(caches)])
        except engine.UnsupportedError as error:
            _log.error("ObjectCache is not used for loads and stores: %s", error)
            raise
        parallel = self._vllm_config.parallel_config
        rank, is_writer = engine.worker_rank(parallel.tensor_parallel_size), True
        if engine.is_replicated(self._setup.spec):
            rank, copy = divmod(rank, parallel.tensor_parallel_size)
            is_writer = copy == 0
        is_alone = parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1
        name = engine.model_name(self._vllm_config, self._setup.options)
        self._worker = WorkerSide(
            options=self._setup.options,
            rank=rank,
            grid=self._setup.grid,
            layer_indexes=indexes,
            layers=layers,
            counters=self.counters,
            model_name=name,
            is_alone=is_alone,
            is_ahead=self._is_ahead,
            is_writer=is_writer,
            may_be_encoded=not self._setup.options.native and not engine.is_replicated(self._setup.spec),
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the step changes any block."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.void(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called right before the forward pass, of every step."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's fetches."""
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when this layer is in its blocks."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a chunk is read in the background, once the step that computed it is known to have gone well."""

    def wait_for_save(self) -> None:
        """The forward pass is over: end loads, hand stores to the writer."""
        if self._worker is not None:
            self._worker.end_step(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks nothing reads any more, and requests that waited for their loads, which are over."""
        if self._worker is None:
            return None, None
        return self._worker.take_freed(finished_req_ids) or None, self._worker.take_over() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to recompute."""
        return set() if self._worker is None else self._worker.take_lost_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The worker's report since the last step."""
        report = None if self._worker is None else self._worker.take_report()
        return WorkerReport(report) if report is not None and not report.is_empty else None

    def get_kv_connector_stats(self) -> ObjectCacheStats | None:
        """The counts since the last step, and, beside the scheduler's, what the engine publishes."""
        taken = self.counters.take()
        if not taken:
            return None
        data: dict[str, Any] = dict(taken)
        if self._scheduler is not None:
            data[PUBLISHED] = self._scheduler.published()
        return ObjectCacheStats(data=data)

    def shutdown(self) -> None:
        """Write what waits, for a bounded time, and end."""
        began_s = time.monotonic()
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._client is not None:
            self._client.close()
        self._worker, self._scheduler, self._client = None, None, None
        _log.info("shut down in %.1f s: %s", time.monotonic() - began_s, self.counters.totals)

    def _init_scheduler(self, setup: engine.CacheSetup) -> None:
        options = setup.options
        group = self._kv_cache_config.kv_cache_groups[0]
        room_chunks = options.staging_bytes // setup.chunk_bytes
        if room_chunks < 1:
            raise ValueError(f"staging_bytes: a chunk is of {setup.chunk_bytes} bytes")
        is_storing = options.store and self._kv_transfer_config.is_kv_producer
        deployment = self._deployment(options)
        steps_max = self._vllm_config.max_concurrent_batches
        accept = None
        if not engine.is_replicated(setup.spec):  # codecs are made for keys and values
            accept = accept_of(options.lossy, group.kv_cache_spec.dtype, options.max_error, options.loss_bound)
        self._ledger = SchedulerLedger(
            deployment,
            setup.grid,
            room_chunks,
            is_storing,
            steps_max,
            tells_growth=accept is not None,
            is_ahead=self._is_ahead,
        )
        self._client = Client(
            options.endpoint,
            options.bucket,
            timeout_s=options.lookup_timeout_s,
            retries=Retries.of_engines(),
        )
        self._say(deployment)
        layer_count = len(group.layer_names)
        layout = ChunkLayout(layer_count, setup.grid.chunk_tokens, setup.chunk_bytes // layer_count)
        self._scheduler = SchedulerSide(
            client=self._client,
            options=options,
            grid=setup.grid,
            ledger=self._ledger,
            counters=self.counters,
            layout=layout,
            accept=accept,
            lora_settings=engine.lora_settings(self._vllm_config),
            is_ahead=self._is_ahead,
            shares_blocks=bool(self._vllm_config.cache_config.enable_prefix_caching),
        )

    def _layers(self, setup: engine.CacheSetup, caches: list[torch.Tensor]) -> list[PagedLayer]:
        """Raises UnsupportedError for a memory layout that is not known."""
        if setup.options.native:
            return engine.raw_layers(setup.spec, caches)
        return engine.paged_layers(self._vllm_config, setup.spec, caches)

    def _deployment(self, options: VllmOptions) -> Deployment | NativeDeployment:
        if options.native:
            return native_deployment(self._vllm_config, self._kv_cache_config, options)
        return engine.deployment(self._vllm_config, self._kv_cache_config.kv_cache_groups[0], options)

    def _say(self, deployment: Deployment | NativeDeployment) -> None:
        """Have the log say whether the store is there, and with whom this engine shares."""
        if self._client is None or self._setup is None:
            return
        if isinstance(deployment, Deployment):
            say(self._client, f"chunks of {format_bytes(self._setup.chunk_bytes)}")
        else:
            introduce(self._client, deployment.space, deployment.hashing)

    def _evict(self, lost_blocks: set[int]) -> None:
        """Take lost blocks, and those computed on top of them, out of the engine's prefix cache. vLLM puts blocks there
        when it gives them out, and leaves them there for the request to compute again: but a request may be aborted.
        """
        if lost_blocks and self._scheduler is not None and self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(self._scheduler.stale_blocks(lost_blocks))

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        return metadata.step if isinstance(metadata, StepMetadata) else Step()


def _rowwise(vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> RowwiseConnector | None:
    """The connector over the tier, where the options name the tier, and where KV cannot be loaded layer by layer; else
    None. Raises UncacheableError.
    """
    if names_tier(vllm_config.kv_transfer_config.kv_connector_extra_config):
        return RowwiseConnector(over_tier(vllm_config), role, kv_cache_config)
    try:
        engine.attention_spec(vllm_config, kv_cache_config)
        if VllmOptions.of(vllm_config.kv_transfer_config.kv_connector_extra_config).native:
            require_native(vllm_config, kv_cache_config)
    except engine.UncacheableError:
        raise
    except engine.UnsupportedError as error:
        if role == KVConnectorRole.SCHEDULER:
            _log.info("loads go through vLLM's host memory, as with the tier, not layer by layer: %s", error)
        return RowwiseConnector(over_tier(vllm_config), role, kv_cache_config)
    return None


if ObjectCacheConnector.__name__ not in KVConnectorFactory._registry:
    # MultiConnector finds the classes of its statistics by name alone
    KVConnectorFactory.register_connector(ObjectCacheConnector.__name__, __name__, ObjectCacheConnector.__name__)
