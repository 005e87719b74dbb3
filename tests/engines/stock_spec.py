"""vLLM's own tiering spec, with a worker for CPUs, which it has none for: nothing of ours tells the tier about it."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from nixl_client.connectors.vllm_tier.host_worker import HostOffloadingWorker


class StockSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """It makes vLLM's own file in /dev/shm."""

    def get_worker(self, kv_caches: Any) -> HostOffloadingWorker:
        """The worker, once."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker: Any = HostOffloadingWorker(kv_caches, self.blocks_per_chunk, region)
        worker: HostOffloadingWorker = self._worker
        return worker
