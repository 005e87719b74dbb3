"""The connector's counters in vLLM's own forms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from nixl_client.connectors.vllm.published import COSTS, DEPLOYMENT_LABELS, PUBLISHED
from nixl_client.connectors.vllm.rowwise import over_tier
from nixl_client.connectors.vllm.steps import Report, Step

COUNTERS = {
    "prompt_tokens": "Tokens of requests that were admitted",
    "hbm_hit_tokens": "Tokens found in the engine's own blocks",
    "store_hit_tokens": "Tokens to be loaded from the store",
    "lookups": "Lookups",
    "lookup_failures": "Lookups that failed and were taken as misses",
    "lookup_s": "Seconds spent in lookups",
    "advised_against_tokens": "Tokens that are stored and were sooner computed",
    "loads": "Loads that ended well",
    "stated_loads": "Loads that told the server how long a layer is computed",
    "loaded_tokens": "Tokens loaded",
    "loaded_chunks": "Chunks loaded",
    "loaded_bytes": "Bytes loaded",
    "load_wait_s": "Seconds attention waited for layers",
    "load_copy_s": "Seconds spent copying layers into blocks",
    "load_failures": "Loads, or parts of loads, that failed",
    "lossy_chunks": "Chunks loaded that had come encoded with a loss",
    "lossy_error": "The errors of loaded chunks, summed",
    "lossy_unstored_chunks": "Chunks not written since their KV came with a loss, or was computed from such",
    "late_loads": "Loads that were given up, or cut short, for being late",
    "lost_tokens": "Tokens to be recomputed since they were not loaded",
    "stored_chunks": "Chunks written",
    "stored_bytes": "Bytes written",
    "stored_already_chunks": "Chunks not written since they were stored already",
    "store_failures": "Stores that failed",
    "dropped_chunks": "Chunks not written for want of time or room",
}


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A step, as vLLM carries it to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A report, as vLLM carries it to the scheduler."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both in one."""
        return WorkerReport(self.report.add(other.report))


class ObjectCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name, and what the engine publishes (`nixl_client.connectors.vllm.published`)."""

    def reset(self) -> None:
        """Nothing counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the other's sums; what was published last counts."""
        for name, amount in other.data.items():
            self.data[name] = amount if name == PUBLISHED else self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """The sums, for the log."""
        return {name: round(amount, 3) for name, amount in sorted(self.data.items()) if name != PUBLISHED}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def is_of_rows(data: Mapping[str, Any]) -> bool:
    """Whether statistics are those of vLLM's OffloadingConnector, which name the types of what they count."""
    return "types" in data


class ObjectCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter for each name, `vllm:objectcache_<name>`, and gauges of what the engine publishes; those
    of OffloadingConnector once a `RowwiseConnector` has counted, which vLLM does not tell sooner.
    """

    def __init__(self, vllm_config: Any, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self._make_rows = partial(OffloadPromMetrics, over_tier(vllm_config), *args)
        self._rows: OffloadPromMetrics | None = None
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:objectcache_{name}", documentation=text, labelnames=self._labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }
        self._costs = {
            name: create_metric_per_engine(
                self._gauge_cls(
                    name=f"vllm:objectcache_cost_{name}",
                    documentation=text,
                    labelnames=self._labelnames,
                    multiprocess_mode="mostrecent",
                ),
                self.per_engine_labelvalues,
            )
            for name, text in COSTS.items()
        }
        self._deployment = self._gauge_cls(
            name="vllm:objectcache_deployment_info",
            documentation="The names and the shape of the engine's chunks",
            labelnames=[*self._labelnames, *DEPLOYMENT_LABELS],
            multiprocess_mode="mostrecent",
        )
        self._deployments: dict[int, tuple[str, ...]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count on."""
        if is_of_rows(transfer_stats_data):
            if self._rows is None:
                self._rows = self._make_rows()
            self._rows.observe(transfer_stats_data, engine_idx)
            return
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)
        published = transfer_stats_data.get(PUBLISHED)
        if published is not None:
            self._publish(published, engine_idx)

    def _publish(self, published: dict[str, Any], engine_idx: int) -> None:
        values = tuple(str(published["deployment"][name]) for name in DEPLOYMENT_LABELS)
        before = self._deployments.get(engine_idx)
        engine = self.per_engine_labelvalues[engine_idx]
        if before is not None and before != values:  # the weights are others
            self._deployment.remove(*engine, *before)
        self._deployments[engine_idx] = values
        self._deployment.labels(*engine, *values).set(1)
        for name, amount in published["costs"].items():
            self._costs[name][engine_idx].set(amount)


__all__ = ["ObjectCachePromMetrics", "ObjectCacheStats", "StepMetadata", "WorkerReport", "is_of_rows"]
