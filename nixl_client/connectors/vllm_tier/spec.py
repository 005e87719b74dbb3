"""`ObjectCacheTieringSpec`: vLLM's TieringOffloadingSpec with memory that storage servers on this host may fill, and
with what the tier must know of the engine. With `endpoint` beside it in `kv_connector_extra_config` nothing else is
needed.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from descriptors.units import GIB, parse_bytes
from nixl_client.connectors.vllm.engine import join_log
from nixl_client.connectors.vllm_tier.engine import card_of
from nixl_client.connectors.vllm_tier.host_worker import HostOffloadingWorker
from nixl_client.connectors.vllm_tier.options import PROMISED
from nixl_client.connectors.vllm_tier.region import OfferedRegion
from nixl_client.connectors.vllm_tier.rules.card import EngineCard

PRIMARY_BYTES = 4 * GIB
"""The primary tier of an engine that is told no `cpu_bytes_to_use`."""
MODULE = "nixl_client.connectors.vllm_tier"
_OURS = PROMISED | {"internals", "enable_kv_events"}
_log = logging.getLogger(__name__)


class ObjectCacheTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """One for each process of an engine."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Those of vLLM, and the tier's."""
        definitions: dict[str, OffloadingMetricMetadata] = super().build_metric_definitions(completed(extra_config))
        return definitions

    def __init__(self, config: OffloadingConfig) -> None:
        join_log()
        super().__init__(replace(config, extra_config=completed(dict(config.extra_config))))
        self._offered: OfferedRegion | None = None
        self._only_worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """For the scheduler."""
        if not self._manager:
            self._offer()
        manager: OffloadingManager = super().get_manager()
        if self._offered is not None and None not in self.cards():  # vLLM's workers have opened it before
            self._offered.hide()
        return manager

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """For a worker, which leaves its card."""
        self._offer()
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            worker: OffloadingWorker = super().create_worker(kv_caches)
        else:
            worker = self._host_worker(kv_caches)
        self._leave_card(kv_caches)
        return worker

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """`create_worker`, once; on CPUs, too."""
        if self._only_worker is None:
            self._only_worker = self.create_worker(kv_caches)
        return self._only_worker

    def cards(self) -> list[EngineCard | None]:
        """The cards that the workers have left."""
        if self._offered is None:
            return []
        try:
            return self._offered.cards(self.config.parallel.world_size)
        except ValueError as error:
            _log.warning("a worker has left no card that can be read: %s", error)
            return []

    def _offer(self) -> None:
        """Make the memory before vLLM would. Where that fails vLLM makes its own, which no server can fill, unless
        another user has put something in its place: vLLM would open that. Raises PermissionError then.
        """
        if self._offered is not None or not self.num_chunks:
            return
        path = Path(f"/dev/shm/vllm_offload_{self._engine_id}.mmap")
        try:
            rows_bytes = self.num_chunks * self.kv_bytes_per_chunk
            self._offered = OfferedRegion(path, rows_bytes, self.config.parallel.world_size)
        except PermissionError:
            raise
        except OSError as error:
            _log.warning("the primary tier is vLLM's own file, which no storage server may fill: %s", error)

    def _host_worker(self, kv_caches: CanonicalKVCaches) -> HostOffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        is_canonical = self.config.canonical_layout
        try:
            if is_canonical:
                self._validate_canonical_refs(kv_caches)
            return HostOffloadingWorker(kv_caches, self.blocks_per_chunk, region, is_canonical=is_canonical)
        except BaseException:
            region.cleanup()
            raise

    def _leave_card(self, kv_caches: CanonicalKVCaches) -> None:
        rank = self.config.parallel.rank
        place = 0 if self.replicated_layout else rank
        try:
            card = card_of(self.config, kv_caches, place, self.cpu_page_size_per_worker)
            if card is not None and self._offered is not None:
                self._offered.write_card(rank, card)
        except Exception as error:  # the engine runs, and the tier does without
            _log.warning("no card is left for the tier: %s", error)


def completed(extra_config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what was left out: the tier itself, and the size of the primary tier."""
    found = dict(extra_config)
    size = found.setdefault("cpu_bytes_to_use", PRIMARY_BYTES)
    if isinstance(size, str):
        found["cpu_bytes_to_use"] = parse_bytes(size)
    if not found.get("secondary_tiers"):
        ours = {name: found[name] for name in _OURS if name in found}
        found["secondary_tiers"] = [{"type": "ObjectCacheTier", "module_path": MODULE, **ours}]
    return found
