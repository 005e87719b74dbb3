"""LMCache on a CPU, in a process of its own: reads a JSON request a line, writes a JSON answer a line.

    python -m tests.engines.lmcache_host MODE OPTIONS        (MODE in-process or multiprocess)

Runs LMCache's own engine, or the storage manager of its server, over the connector; KV is made from a seed and compared
byte by byte with what comes back. Only answers go to standard output.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="WARNING", PYTHONHASHSEED="0")

import torch  # noqa: E402

from tests.support.waiting import eventually  # noqa: E402

LAYERS, HEADS, HEAD_DIM = 3, 2, 32
HIDDEN = HEADS * HEAD_DIM
_options: dict[str, Any] = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
CHUNK_TOKENS = _options.get("chunk_tokens", 16)
MAX_ERROR = _options.get("max_error", 0.0)
"""Loaded KV is right if its relative error against the stored KV is at most this; 0: if all bytes are the same."""
LOCAL_GIB = 0.03


def tokens_of(seed: int, count: int) -> list[int]:
    """A prompt; a shorter one of the same seed is its prefix."""
    return torch.randint(0, 1 << 15, (1024,), generator=torch.Generator().manual_seed(seed))[:count].tolist()


def kv_of(seed: int, count: int) -> torch.Tensor:
    """Its KV, [2, L, T, hidden]."""
    whole = torch.rand((2, LAYERS, 1024, HIDDEN), generator=torch.Generator().manual_seed(seed))
    return whole[:, :, :count].to(torch.bfloat16)


def is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether it is what was stored."""
    if not MAX_ERROR:
        return torch.equal(found, wanted)
    return bool((found.float() - wanted.float()).norm() <= MAX_ERROR * wanted.float().norm())


class InProcess:
    """LMCacheEngine."""

    def __init__(self, options: dict[str, Any]) -> None:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
        from lmcache.v1.metadata import LMCacheMetadata

        class HostMemory(GPUConnectorInterface):  # type: ignore[misc]
            """KV in a tensor, given with each call as `kv`."""

            def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
                kwargs["kv"][:, :, start:end].copy_(memory_obj.tensor)

            def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
                memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

            def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kw: Any) -> None:
                for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
                    self.to_gpu(chunk, start, end, **kw)

            def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kw: Any) -> None:
                for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
                    self.from_gpu(chunk, start, end, **kw)

            def get_shape(self, num_tokens: int) -> torch.Size:
                return torch.Size((2, LAYERS, num_tokens, HIDDEN))

        extra = {f"remote_storage_plugin.objectcache.{name}": value for name, value in options["plugin"].items()}
        extra["remote_storage_plugin.objectcache.module_path"] = "nixl_client.connectors.lmcache"
        extra["remote_storage_plugin.objectcache.class_name"] = "ObjectCacheAdapter"
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=True,
            max_local_cpu_size=LOCAL_GIB,
            save_unfull_chunk=True,
            remote_storage_plugins=["objectcache"],
            extra_config=extra,
            pre_caching_hash_algorithm="sha256_cbor",
            **options.get("config", {}),
        )
        metadata = LMCacheMetadata(
            model_name=options.get("model", "tiny/model"),
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_DIM),
            chunk_size=CHUNK_TOKENS,
            role="worker",
        )
        self._builder = LMCacheEngineBuilder
        self._engine = LMCacheEngineBuilder.get_or_create(
            "test", config, metadata, HostMemory(), lambda tensor, _: tensor, lambda each, _: each
        )
        self._engine.post_init()
        self._manager = self._engine.storage_manager
        self._connector = self._manager.storage_backends["RemoteBackend-objectcache"].connection.getWrappedConnector()
        self.store = self._connector.store

    def put(self, seed: int, count: int) -> None:
        """Store a prompt's KV, and wait until it is written."""
        self._engine.store(tokens_of(seed, count), kv=kv_of(seed, count))
        for future in list(self._connector._jobs._futures):
            future.exception(20)

    def forget(self) -> None:
        """Empty the local tier, which takes what nobody refers to any more."""
        until(lambda: self._engine.clear(locations=["LocalCPUBackend"]) >= 0 and self.held() == 0)

    def find(self, seed: int, count: int) -> int:
        """How many tokens are there."""
        return int(self._engine.lookup(tokens_of(seed, count)))

    def get(self, seed: int, count: int) -> tuple[int, bool]:
        """How many tokens were retrieved, and whether they are right and nothing else was touched."""
        kv = torch.zeros_like(kv_of(seed, count))
        mask = self._engine.retrieve(tokens_of(seed, count), kv=kv, req_id=f"{seed}")
        loaded = int(mask.sum())
        wanted = kv_of(seed, count)
        return loaded, is_same(kv[:, :, :loaded], wanted[:, :, :loaded]) and not kv[:, :, loaded:].any()

    def held(self) -> int:
        """Objects in LMCache's memory."""
        return int(self._manager.local_cpu_backend.memory_allocator.pin_allocator.num_active_allocations)

    def names(self, seed: int, count: int) -> list[str]:
        """The objects of a prompt."""
        keys = [key for _, _, key in self._engine.token_database.process_tokens(tokens=tokens_of(seed, count))]
        return list(self._connector._names(keys))

    def close(self) -> None:
        """End."""
        self._builder.destroy("test")


class Multiprocess:
    """The storage manager of LMCache's server, two ranks' keys in each request."""

    def __init__(self, options: dict[str, Any]) -> None:
        from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
        from lmcache.v1.distributed.config import (
            EvictionConfig,
            L1ManagerConfig,
            L1MemoryManagerConfig,
            StorageManagerConfig,
        )
        from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
        from lmcache.v1.distributed.storage_manager import StorageManager

        adapter = PluginL2AdapterConfig("nixl_client.connectors.lmcache", "ObjectCacheL2Adapter", options["plugin"])
        memory = L1MemoryManagerConfig(size_in_bytes=int(LOCAL_GIB * (1 << 30)), use_lazy=False, shm_name="")
        self._manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig(eviction_policy="LRU"),
                l2_adapter_config=L2AdaptersConfig([adapter]),
            )
        )
        self._adapter = self._manager.l2_adapters()[0][1]
        self.store = self._adapter.store
        self._model = options.get("model", "tiny/model")
        self._layout = MemoryLayoutDesc([torch.Size((2, LAYERS, CHUNK_TOKENS, HIDDEN))], [torch.bfloat16])
        self._key, self._group, self._spec = ObjectKey, GroupedObjectKeys, PrefetchTaskSpec

    def put(self, seed: int, count: int) -> None:
        """Store a prompt's KV, and wait until it is written."""
        wanted = self._given()
        for rank in (0, 1):
            keys = self._keys(seed, count, rank)
            chunks = self._manager.reserve_write(keys, self._layout)
            for index, key in enumerate(keys):
                if key in chunks:
                    chunks[key].tensor.copy_(self._chunk(seed, index, rank))
            self._manager.finish_write(list(chunks))
            wanted += len(chunks)
        until(lambda: self._given() >= wanted)
        until(self._is_idle)

    def forget(self) -> None:
        """Empty the local tier."""
        until(lambda: self._manager.clear() is None and self.held() == 0)

    def find(self, seed: int, count: int) -> int:
        """How many tokens are there."""
        return self._prefetch(seed, count)[0] * CHUNK_TOKENS

    def get(self, seed: int, count: int) -> tuple[int, bool]:
        """How many tokens were retrieved, and whether they are right."""
        found, is_right = self._prefetch(seed, count)
        return found * CHUNK_TOKENS, is_right

    def held(self) -> int:
        """Objects in LMCache's memory."""
        return int(self._manager.get_l1_usage()[0])

    def names(self, seed: int, count: int) -> list[str]:
        """The objects of a prompt."""
        from nixl_client.connectors.lmcache.l2_adapter import _by_prefix, _layout

        layout = _layout(self._layout.shapes, self._layout.dtypes)
        keys = self._keys(seed, count, 0)
        return [name for names in _by_prefix(keys, [layout] * len(keys)).values() for _, name in names]

    def close(self) -> None:
        """End."""
        self._manager.close()

    def _prefetch(self, seed: int, count: int) -> tuple[int, bool]:
        rows = [self._keys(seed, count, rank) for rank in (0, 1)]
        handle = self._manager.submit_prefetch_task(self._spec([self._group(row, 0, self._layout) for row in rows]))
        assert self._manager.wait_prefetch_status(handle, 20)
        result = self._manager.query_prefetch_status(handle)
        hits = [[index for index in range(len(rows[0])) if row.test(index)] for row in result.hit_cells]
        is_right = hits[0] == hits[1] == list(range(len(hits[0])))
        for rank, row in enumerate(rows):
            keys = [row[index] for index in hits[rank]]
            if not keys:
                continue
            with self._manager.read_prefetched_results(keys) as chunks:
                pairs = zip(hits[rank], chunks, strict=True)
                is_right &= all(is_same(chunk.tensor, self._chunk(seed, index, rank)) for index, chunk in pairs)
            self._manager.finish_read_prefetched(keys)
        return len(hits[0]), is_right

    def _keys(self, seed: int, count: int, rank: int) -> list[Any]:
        tokens = tokens_of(seed, count)
        ends = range(CHUNK_TOKENS, count + 1, CHUNK_TOKENS)
        hashes = [hashlib.sha256(repr(tokens[:end]).encode()).digest() for end in ends]
        kv_rank = self._key.ComputeKVRank(2, rank, 2, rank)
        return [self._key(each, self._model, kv_rank) for each in hashes]

    def _chunk(self, seed: int, index: int, rank: int) -> torch.Tensor:
        whole = kv_of(seed * 2 + rank, 1024)
        return whole[:, :, index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS]

    def _given(self) -> float:
        return float(self.store.counters.totals.get("given_chunks", 0))

    def _is_idle(self) -> bool:
        return not self._adapter._jobs._futures


def lose_before_load(store: Any, name: str) -> None:
    """Delete an object between the next lookup and the load."""
    load = store.load

    def lose(*arguments: Any) -> Any:
        store.load = load
        assert store.delete((name,)) == 1
        return load(*arguments)

    store.load = lose


def until(is_true: Callable[[], bool]) -> None:
    """Wait for what LMCache's own threads bring."""
    assert eventually(is_true)


def main() -> None:
    """Answer until the input ends."""
    mode, options = sys.argv[1], json.loads(sys.argv[2])
    made: Any = {"in-process": InProcess, "multiprocess": Multiprocess}[mode](options)
    answer: dict[str, Any] = {"is_ready": True}
    while True:
        OUT.write(json.dumps(answer) + "\n")
        OUT.flush()
        line = sys.stdin.readline()
        if not line:
            break
        request = json.loads(line)
        name = request.pop("do")
        match name:
            case "counters":
                value = made.store.counters.totals
            case "lose_before_load":
                value = lose_before_load(made.store, **request)
            case _:
                value = getattr(made, name)(**request)
        answer = {"value": value}
    made.close()
    OUT.write(json.dumps({"is_closed": True}) + "\n")
    OUT.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
