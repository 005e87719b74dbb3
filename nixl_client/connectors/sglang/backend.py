"""`ObjectCacheHiCache`: a storage back-end of SGLang's hierarchical cache. Its calls come from SGLang's storage
threads, which may wait. A page is there, or it is a miss, whatever the store does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from nixl_client.connectors.sglang.engine import engine_identity, engine_name, pool_fields, server_arguments
from nixl_client.connectors.sglang.listing import object_names
from nixl_client.connectors.sglang.options import HiCacheOptions
from nixl_client.connectors.sglang.pages import HostPages, counts_only
from nixl_client.connectors.sglang.rules.hits import HitPolicy, PoolPages, leading_count, page_hits, whole_pages
from nixl_client.connectors.sglang.traffic import PageTraffic

KV_POOL = "kv"
RATES_MAX = 1024
"""Measurements that are kept until SGLang asks for them."""
_log = logging.getLogger(__name__)


class ObjectCacheHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """The options are those of docs/guides/sglang.md. Raises ValueError for options that cannot be; a store that is not
    there keeps no engine from starting.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._config = storage_config
        options = HiCacheOptions.of(storage_config.extra_config or {})
        arguments = server_arguments()
        self._name = engine_name(arguments, storage_config.model_name)
        self._identity = engine_identity(arguments, storage_config.model_name, options.epoch)
        self._pages: dict[str, HostPages | None] = {}
        """By pool. None for the pool that only counts pages."""
        self._rates = _Rates(bool(storage_config.enable_storage_metrics))
        self.traffic = PageTraffic(options)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of KV pages, which calls without a pool's name mean."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(KV_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool by its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(_text(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Say in one line whether the store is there, in a thread of its own, since it may not be."""
        shared = ", ".join(sorted({pages.space.prefix for pages in self._pages.values() if pages is not None}))
        threading.Thread(
            target=self.traffic.introduce,
            args=(f"shared with all engines of {shared}",),
            name="objectcache-hicache-start",
            daemon=True,
        ).start()

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages of KV, from the first, are stored: one request."""
        pages = self._pages.get(KV_POOL)
        if pages is None:  # the pool only counts pages, or gives none
            return len(keys) if KV_POOL in self._pages else 0
        return self.traffic.leading(pages.space.object_names(keys)) // pages.space.part_count

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix that can be restored by the policies of all pools: one request for all of them."""
        wanted = [KV_POOL]
        transfers = {_text(each.name): each for each in pool_transfers or ()}
        wanted += [name for name in transfers if name != KV_POOL]
        names: list[str] = []
        spans: dict[str, tuple[int, int]] = {}
        for pool in wanted:
            pages = self._pages.get(pool)
            if pages is not None:
                spans[pool] = (len(names), len(names) + len(keys) * pages.space.part_count)
                names += pages.space.object_names(keys)
        present = self.traffic.present(names)

        def stored(pool: str) -> list[bool]:
            pages = self._pages.get(pool)
            if pages is None:  # the pool that only counts pages, or one that is not known
                return [pool in self._pages] * len(keys)
            return whole_pages(present[slice(*spans[pool])], pages.space.part_count)

        pools = [
            PoolPages(pool, HitPolicy(_text(transfers[pool].hit_policy)), stored(pool), len(transfers[pool].keys or ()))
            for pool in wanted[1:]
        ]
        hits = page_hits(KV_POOL, leading_count(stored(KV_POOL)), pools)
        return PoolTransferResult(hits.page_count, hits.by_pool, list(hits.restorable))

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages of KV into the host pool. For each whether it is there."""
        return self._load(KV_POOL, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store those of these pages of KV that are missing. For each whether it is stored."""
        return self._store(KV_POOL, keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of several pools. For each pool and page whether it is there."""
        return {each.name: self._load(_text(each.name), each.keys or (), each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store those of these pages that are missing, of several pools. For each pool and page whether it is
        stored.
        """
        return {each.name: self._store(_text(each.name), each.keys or (), each.host_indices) for each in transfers}

    def exists(self, key: str) -> bool:
        """Whether a page of KV is stored."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: with `interface_v1` SGLang loads by `batch_get_v1` alone."""
        return

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Nothing, as `get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not done: with `interface_v1` SGLang stores by `batch_set_v1` alone."""
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not done, as `set`."""
        return False

    def clear(self) -> None:
        """Delete the pages that this engine shares with others of its kind. Raises ObjectCacheError where the store
        does not answer, which SGLang reports.
        """
        for prefix in sorted({pages.space.prefix for pages in self._pages.values() if pages is not None}):
            for names in object_names(self.traffic.stores, prefix):
                self.traffic.delete(names)

    def get_stats(self) -> Any:
        """The pages moved since the last call, and at which rates, as SGLang's metrics have them."""
        return self._rates.take()

    def close(self) -> None:
        """May be called again, and after a failed start."""
        traffic = getattr(self, "traffic", None)
        if traffic is not None:
            traffic.close()

    def _add(self, name: str, pool: Any) -> None:
        if counts_only(pool):
            self._pages[name] = None
        elif name not in self._pages:
            fields = pool_fields(self._config, self._identity, name, pool)
            try:
                self._pages[name] = HostPages(pool, name, self._name, fields)
            except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
                _log.warning("ObjectCache IS NOT USED: the pool %s gives no pages: %s", name, error)

    def _load(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        pages = self._pages.get(pool)
        if pages is None:  # the pool that only counts pages, or one that is not known
            return [pool in self._pages] * len(keys)
        began_s = time.monotonic()
        try:
            loaded = pages.load(self.traffic, keys, indices)
        except (ValueError, RuntimeError) as error:
            _log.warning("pages of the pool %s are not loaded: %s", pool, error)
            return [False] * len(keys)
        self._rates.loaded(sum(loaded), sum(loaded) * pages.page_bytes, time.monotonic() - began_s)
        return loaded

    def _store(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        pages = self._pages.get(pool)
        if pages is None:
            return [pool in self._pages] * len(keys)
        began_s = time.monotonic()
        try:
            stored = pages.store(self.traffic, keys, indices)
        except (ValueError, RuntimeError) as error:
            _log.warning("pages of the pool %s are not stored: %s", pool, error)
            return [False] * len(keys)
        self._rates.stored(sum(stored), sum(stored) * pages.page_bytes, time.monotonic() - began_s)
        return stored


class _Rates:
    """Pages and GB/s of batches, where SGLang wants them. Safe from any thread."""

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._batches: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    def loaded(self, page_count: int, nbytes: int, seconds: float) -> None:
        """A batch was loaded."""
        self._add("prefetch", page_count, nbytes, seconds)

    def stored(self, page_count: int, nbytes: int, seconds: float) -> None:
        """A batch was stored."""
        self._add("backup", page_count, nbytes, seconds)

    def take(self) -> Any:
        """The measurements since the last call; None where SGLang wants none."""
        if not self._is_wanted:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            taken, self._batches = self._batches, {"prefetch": [], "backup": []}
        values: dict[str, list[Any]] = {}
        for kind, batches in taken.items():
            values[f"{kind}_pgs"] = [page_count for page_count, _ in batches]
            values[f"{kind}_bandwidth"] = [rate for _, rate in batches]
        return StorageMetrics(**values)

    def _add(self, kind: str, page_count: int, nbytes: int, seconds: float) -> None:
        if not self._is_wanted or not page_count:
            return
        with self._lock:
            if len(self._batches[kind]) < RATES_MAX:
                self._batches[kind].append((page_count, nbytes / max(seconds, 1e-9) / 1e9))


def _text(name: Any) -> str:
    """The value of SGLang's enumerations, which are texts themselves."""
    return str(getattr(name, "value", name))
