"""The connector's counters in vLLM's own forms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from nixl_client.connectors.vllm.published import (
    COSTS,
    COSTS_KEY,
    DEPLOYMENT_KEY,
    DEPLOYMENT_LABELS,
    PUBLISHED,
    TIER_KEY,
)
from nixl_client.connectors.vllm.rowwise import over_tier
from nixl_client.connectors.vllm.steps import Report, Step
from nixl_client.connectors.vllm_tier.rules.published import TIER_INFO, TIER_LABELS

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

_INFOS = {
    DEPLOYMENT_KEY: ("vllm:objectcache_deployment_info", DEPLOYMENT_LABELS),
    TIER_KEY: (TIER_INFO, TIER_LABELS),
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
        self._infos: dict[str, Any] = {}
        self._said: dict[tuple[str, int], tuple[str, ...]] = {}

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

    def _info(self, key: str) -> Any:
        """The metric of these labels, made when it is needed: OffloadingConnector makes the tier's itself."""
        name, labels = _INFOS[key]
        if key not in self._infos:
            self._infos[key] = self._gauge_cls(
                name=name,
                documentation="The names and the shape of the engine's chunks",
                labelnames=[*self._labelnames, *labels],
                multiprocess_mode="mostrecent",
            )
        return self._infos[key]

    def _publish(self, published: dict[str, Any], engine_idx: int) -> None:
        for key in _INFOS.keys() & published.keys():
            found = published[key]
            values = None if found is None else tuple(str(found[name]) for name in _INFOS[key][1])
            self._say(key, values, engine_idx)
        for name, amount in published[COSTS_KEY].items():
            self._costs[name][engine_idx].set(amount)

    def _say(self, key: str, values: tuple[str, ...] | None, engine_idx: int) -> None:
        """Have these labels, and no others, in this metric; None: none at all."""
        before = self._said.pop((key, engine_idx), None)
        engine, info = self.per_engine_labelvalues[engine_idx], self._info(key)
        if before is not None and before != values:  # the weights are others
            info.remove(*engine, *before)
        if values is not None:
            self._said[key, engine_idx] = values
            info.labels(*engine, *values).set(1)


__all__ = ["ObjectCachePromMetrics", "ObjectCacheStats", "StepMetadata", "WorkerReport", "is_of_rows"]
