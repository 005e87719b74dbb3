"""LMCache's multiprocess server: an L2 adapter of type `plugin`, class `ObjectCacheL2Adapter`.

The server's controllers submit tasks and are told by an event descriptor when some are over. Keys come for several
ranks and groups of layers at once, each a prefix of its own.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from nixl_client.connectors.lmcache.chunks import ChunkSpace, joint_size, object_name
from nixl_client.connectors.lmcache.jobs import Jobs
from nixl_client.connectors.lmcache.options import LMCacheOptions
from nixl_client.connectors.lmcache.store import ChunkKind, ChunkStore

LOOKUP_THREADS = 4
_log = logging.getLogger(__name__)


class ObjectCacheL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not installed where types are checked
    """`adapter_params` are `nixl_client.connectors.lmcache.options`."""

    def __init__(self, params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._options = LMCacheOptions.of(params)
        if self._options.prefill is not None and not self._options.chunk_tokens:
            raise ValueError("chunk_tokens is needed beside the costs of computing: it is LMCache's --chunk-size")
        self.store = ChunkStore(self._options)
        self.store.warm()
        self._jobs = Jobs(self._options.store_queue_chunks)
        self._lookers = ThreadPoolExecutor(LOOKUP_THREADS, "objectcache-lookup")
        self._loaders = ThreadPoolExecutor(self._options.loads_max, "objectcache-load")
        self._lock = threading.Lock()
        self._next_task = 0
        self._layouts: dict[_Shard, dict[str, int]] = {}
        self._stores, self._lookups, self._loads = _Ended(), _Ended(), _Ended()

    def get_store_event_fd(self) -> int:
        """Readable when a store is over."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup is over."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Readable when a load is over."""
        return self._loads.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store what is missing; fails at once when too much waits already. The caller keeps the objects until then."""
        task = self._task()
        self.store.counters.add(given_chunks=len(keys))
        if not self._options.store:
            self._stores.end(task, L2StoreResult(False, 0))
            return task
        outcome = [L2StoreResult(False, 0)]

        def work() -> bool:
            outcome[0] = self._put(keys, objects)
            return True

        if self._jobs.add(len(keys), work, lambda: self._stores.end(task, outcome[0])) is None:
            self.store.counters.add(dropped_chunks=len(keys))
            self._stores.end(task, outcome[0])
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The stores that have ended since the last call."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look up, in one request; what is found is leased, which ends by itself. Where the options say what computing
        costs, each rank and group is asked about as a prefix, and only what is worth loading counts as found.
        """
        layouts = {group: _layout(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()}
        sizes = {group: _nbytes(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()}

        def work() -> Bitmap:
            found = Bitmap(len(keys))
            named = _by_prefix(keys, [layouts.get(key.object_group_id) or self._last_layout(key) for key in keys])
            prefixes = list(named.values())
            if self._options.prefill is None:
                asked = [each for names in prefixes for each in names]
                present = self.store.present([name for _, name in asked])
                hits = [index for (index, _), is_there in zip(asked, present, strict=True) if is_there]
            else:
                shard_bytes = [sizes[keys[names[0][0]].object_group_id] for names in prefixes]
                chunk = joint_size(self._options.chunk_tokens, shard_bytes)
                hits = [
                    index
                    for names in prefixes
                    for index, _ in names[: self.store.lookup([name for _, name in names], chunk)]
                ]
            for index in hits:
                found.set(index)
            if hits:
                self._notify_keys_accessed([keys[index] for index in hits])
            return found

        return self._start(self._lookers, work, self._lookups, len(keys))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which chunks were found, once; None while the lookup runs, and after the first answer."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing: leases end by themselves."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load, in one request for all chunks of one kind, those of each prefix before the first that cannot be
        loaded.
        """

        def work() -> Bitmap:
            loaded = Bitmap(len(keys))
            of_kinds = defaultdict[tuple[int, ChunkKind | None], list[tuple[str, int, str]]](list)
            for prefix, names in _by_prefix(keys, [_layout_of(each) for each in objects]).items():
                first = objects[names[0][0]]
                kind = ChunkKind.of(*_shapes_of(first), first.get_memory_format())
                of_kinds[first.get_size(), kind] += [(prefix, index, name) for index, name in names]
            for (_, kind), left in of_kinds.items():
                while left:
                    targets = [_bytes(objects[index]) for _, index, _ in left]
                    result = self.store.load([name for _, _, name in left], targets, kind)
                    for _, index, _ in left[: result.chunk_count]:
                        loaded.set(index)
                    if result.unusable is None:
                        break
                    self.store.discard(result.unusable)
                    prefix = left[result.chunk_count][0]
                    left = [each for each in left[result.chunk_count + 1 :] if each[0] != prefix]
            return loaded

        return self._start(self._loaders, work, self._loads, len(keys))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which chunks were loaded, once; None while the load runs, and after the first answer."""
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete chunks, of every layout seen here."""
        for key in keys:
            for layout, nbytes in list(self._layouts.get(_shard(key), {}).items()):
                if self.store.delete((object_name(_space(key, layout), key.chunk_hash),)):
                    self._notify_keys_deleted([key], [nbytes])

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status pages."""
        return {"is_healthy": self.store.is_answering(), "type": type(self).__name__, **self.store.counters.totals}

    def close(self) -> None:
        """Write what waits, for a time, and free everything."""
        self._jobs.close(self._options.drain_s)
        for pool in (self._lookers, self._loaders):
            pool.shutdown(cancel_futures=True)
        self.store.close()
        for ended in (self._stores, self._lookups, self._loads):
            ended.close()

    def _put(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        layouts = [_layout_of(each) for each in objects]
        for key, layout, each in zip(keys, layouts, objects, strict=True):
            known = self._layouts.setdefault(_shard(key), {})
            known.pop(layout, None)
            known[layout] = each.get_size()
        alike = defaultdict[tuple[tuple[str, str], ...], list[tuple[int, str]]](list)
        for names in _by_prefix(keys, layouts).values():
            first = names[0][0]
            alike[tuple(_space(keys[first], layouts[first]).metadata().items())] += names
        for metadata, names in alike.items():
            chunks = [_bytes(objects[index]) for index, _ in names]
            if not self.store.put([name for _, name in names], chunks, dict(metadata)):
                return L2StoreResult(False, 0)
        sizes = [each.get_size() for each in objects]
        self._notify_keys_stored(keys, sizes)
        return L2StoreResult(True, sum(sizes))

    def _last_layout(self, key: ObjectKey) -> str | None:
        """The layout of what this process stored last for the key's rank and group: a caller may not know it."""
        return next(reversed(self._layouts.get(_shard(key), {})), None)

    def _task(self) -> int:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], Bitmap], ended: _Ended, key_count: int) -> int:
        task = self._task()

        def end(future: Future[Bitmap]) -> None:
            if future.cancelled() or future.exception() is not None:
                if not future.cancelled():
                    _log.error("task %d failed", task, exc_info=future.exception())
                ended.end(task, Bitmap(key_count))
            else:
                ended.end(task, future.result())

        pool.submit(work).add_done_callback(end)
        return task


class _Ended:
    """Results of tasks that are over, and the event descriptor that says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}
        self._event: Any = create_event_notifier()

    def fileno(self) -> int:
        return int(self._event.fileno())

    def end(self, task: int, result: Any) -> None:
        with self._lock:
            self._results[task] = result
            if self._event is not None:
                self._event.notify()

    def take(self, task: int) -> Any:
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        with self._lock:
            self._event.close()
            self._event = None


_Shard = tuple[str, int, int]


def _shard(key: ObjectKey) -> _Shard:
    return key.model_name, key.kv_rank, key.object_group_id


def _layout(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """Empty where nothing is said."""
    return "" if not shapes else f"{[tuple(shape) for shape in shapes]} {[str(dtype) for dtype in dtypes]}"


def _shapes_of(chunk: MemoryObj) -> tuple[Sequence[Any], Sequence[Any]]:
    """Its shapes and dtypes, one for each group of layers; a chunk without groups has one."""
    metadata = chunk.metadata
    if metadata.shapes is None or metadata.dtypes is None:
        return [chunk.get_shape()], [chunk.get_dtype()]
    return metadata.shapes, metadata.dtypes


def _layout_of(chunk: MemoryObj) -> str:
    return _layout(*_shapes_of(chunk))


def _nbytes(shapes: Sequence[Any], dtypes: Sequence[Any]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


def _space(key: ObjectKey, layout: str) -> ChunkSpace:
    rank = f"{key.kv_rank:08x} group {key.object_group_id}"
    return ChunkSpace(
        mode="multiprocess", model=key.model_name, rank=rank, dtype="", layout=layout, tags=(("salt", key.cache_salt),)
    )


def _by_prefix(keys: Sequence[ObjectKey], layouts: Sequence[str | None]) -> dict[str, list[tuple[int, str]]]:
    """By what they have in common, the chunks' indexes and names, in order. Those of unknown layout are left out."""
    names: dict[str, list[tuple[int, str]]] = {}
    for index, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
        if layout is not None:
            prefix = _space(key, layout).prefix()
            names.setdefault(prefix, []).append((index, prefix + key.chunk_hash.hex()))
    return names


def _bytes(chunk: MemoryObj) -> memoryview:
    return memoryview(chunk.byte_array).cast("B")
