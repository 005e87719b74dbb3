"""LMCache's in-process mode: `remote_storage_plugins: ["objectcache"]` loads `ObjectCacheAdapter`, which makes one
`ObjectCacheConnector` in each of LMCache's processes.

LMCache calls coroutines from its own event loop and cancels them when they take too long. Blocking calls run in threads
of ours. A thread holds references to LMCache's memory until its call has ended, also after a cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from nixl_client.connectors.lmcache.chunks import ChunkSize, ChunkSpace, object_name, partial_tokens
from nixl_client.connectors.lmcache.jobs import Jobs
from nixl_client.connectors.lmcache.options import LMCacheOptions
from nixl_client.connectors.lmcache.store import ChunkKind, ChunkStore

NAME = "objectcache"
BLOCKING_SHARE = 0.9
"""LMCache gives a load up after `blocking_timeout_secs`. This part of that time is ours."""
Keys = list[CacheEngineKey]
Chunks = list[MemoryObj]
MaybeChunks = list[MemoryObj | None]
Names = list[str]
"""Named here, since the connector has a method `list`."""
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class ObjectCacheAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache is not installed where types are checked
    """Makes connectors for the plug-ins `objectcache` and `objectcache.ANYTHING`. Their options are in `extra_config`
    under `remote_storage_plugin.NAME.`.
    """

    def __init__(self) -> None:
        super().__init__(f"plugin://{NAME}")

    def can_parse(self, url: str) -> bool:
        """Whether the plug-in's name is ours."""
        return bool(url == self.schema or url.startswith(self.schema + "."))

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises ValueError for a configuration that cannot work, which LMCache logs, going on without."""
        start = f"remote_storage_plugin.{context.plugin_name or NAME}."
        extra = context.config.extra_config or {}
        given = {name.removeprefix(start): value for name, value in extra.items() if name.startswith(start)}
        for name in ("module_path", "class_name"):
            given.pop(name, None)
        return ObjectCacheConnector(LMCacheOptions.of(given), context)


class ObjectCacheConnector(RemoteConnector):  # type: ignore[misc]
    """One process's connection."""

    def __init__(self, options: LMCacheOptions, context: ConnectorContext) -> None:
        config, self._metadata = context.config, context.metadata
        if config.use_layerwise:
            raise ValueError("use_layerwise would make an object of each layer of each chunk: it is not supported")
        if config.remote_serde not in (None, "naive"):
            raise ValueError(f"remote_serde {config.remote_serde!r} is not supported, only naive")
        if options.chunk_tokens not in (0, self._metadata.chunk_size):
            raise ValueError(f"chunk_tokens is LMCache's chunk_size, {self._metadata.chunk_size}, or not given")
        super().__init__(config, self._metadata)
        timeout_s = min(options.load_timeout_s, BLOCKING_SHARE * config.blocking_timeout_secs)
        self._options = replace(options, load_timeout_s=timeout_s)
        self._memory = context.local_cpu_backend
        self.store = ChunkStore(self._options)
        if self._metadata.role != "scheduler":
            self.store.warm()
        self._chunk_size = ChunkSize(self._metadata.chunk_size, self._full_bytes(), self._metadata.world_size)
        self._kind = ChunkKind.of(self._metadata.get_shapes(), self._metadata.get_dtypes(), self.meta_fmt)
        self._jobs = Jobs(options.store_queue_chunks)
        self._callers = ThreadPoolExecutor(options.loads_max + 2, "objectcache-lmcache")

    def support_ping(self) -> bool:
        """LMCache may ask whether the server is there."""
        return True

    async def ping(self) -> int:
        """0 when it is."""
        return 0 if await self._in_thread(self.store.is_answering) else 1

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether one chunk is stored."""
        return await self._in_thread(self.exists_sync, key)

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether one chunk is stored."""
        return self.store.lookup(self._names([key])) == 1

    def support_batched_contains(self) -> bool:
        """One request for all."""
        return True

    def batched_contains(self, keys: Keys) -> int:
        """How many chunks, from the first, are stored, and worth loading where the options say what computing costs."""
        return self.store.lookup(self._names(keys), self._chunk_size)

    def support_batched_async_contains(self) -> bool:
        """One request for all."""
        return True

    async def batched_async_contains(self, lookup_id: str, keys: Keys, pin: bool = False) -> int:
        """`batched_contains`; what is found is kept from eviction for a time, pinned or not."""
        return await self._in_thread(self.batched_contains, keys)

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """One chunk."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """One request for all."""
        return True

    async def batched_get(self, keys: Keys) -> MaybeChunks:
        """The chunks before the first that cannot be loaded, and None for the others."""
        loaded = await self._load(keys)
        return [*loaded, *[None] * (len(keys) - len(loaded))]

    def support_batched_get_non_blocking(self) -> bool:
        """One request for all."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: Keys) -> Chunks:
        """The chunks before the first that cannot be loaded."""
        return await self._load(keys)

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Store one chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Only what is missing is sent."""
        return True

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Chunks) -> None:
        """Store the chunks that are missing. Returns when they are stored, or will not be. The caller keeps its own
        references.
        """
        if not self._options.store or not keys:
            return
        self.store.counters.add(given_chunks=len(keys))
        held = [*memory_objs]
        for chunk in held:
            chunk.ref_count_up()
        names, metadata = self._names(keys), self._space(keys[0]).metadata()
        future = self._jobs.add(len(held), lambda: self._put(names, held, metadata), lambda: _release(held))
        if future is None:
            _release(held)
            self.store.counters.add(dropped_chunks=len(held))
            return
        await asyncio.shield(asyncio.wrap_future(future))

    async def list(self) -> Names:
        """Not called by LMCache; its S3 connector has none either."""
        raise NotImplementedError("list the bucket with any S3 client: lmcache/MODEL/NAMESPACE/HASH")

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete one chunk."""
        return self.store.delete(self._names([key])) == 1

    async def close(self) -> None:
        """Write what waits, for a time, and free everything."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _names(self, keys: Sequence[CacheEngineKey]) -> Names:
        return [object_name(self._space(key), key.chunk_hash) for key in keys]

    def _space(self, key: CacheEngineKey) -> ChunkSpace:
        if isinstance(key, LayerCacheEngineKey):
            raise ValueError("layers of chunks are not supported")
        return ChunkSpace(
            mode="in-process",
            model=key.model_name,
            rank=f"{key.worker_id} of {key.world_size}",
            dtype=key._dtype_str,
            layout=f"{tuple(self._metadata.kv_shape)} {self._metadata.chunk_size} {self.meta_fmt.name}",
            tags=tuple((str(name), str(value)) for name, value in key.tags or ()),
        )

    async def _load(self, keys: Keys) -> Chunks:
        future = asyncio.get_running_loop().run_in_executor(self._callers, self._load_blocking, self._names(keys))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(
                lambda done: _release([] if done.cancelled() or done.exception() else done.result())
            )
            raise

    def _load_blocking(self, names: Names) -> Chunks:
        chunks: Chunks = []
        loaded = 0
        try:
            for _ in names:
                chunk = self._memory.allocate(
                    self._metadata.get_shapes(), self._metadata.get_dtypes(), self.meta_fmt, busy_loop=False
                )
                if chunk is None:
                    _log.warning("LMCache has no memory for %d of %d chunks", len(names) - len(chunks), len(names))
                    break
                chunks.append(chunk)
            if chunks:
                result = self.store.load(names[: len(chunks)], [_bytes(chunk) for chunk in chunks], self._kind)
                loaded = result.chunk_count
                if result.unusable is not None:
                    loaded += self._load_partial(result.unusable, chunks[loaded], result.unusable == names[-1])
        finally:
            _release(chunks[loaded:])
        return chunks[:loaded]

    def _load_partial(self, name: str, chunk: MemoryObj, is_last: bool) -> int:
        """The last chunk of a prompt may be shorter than the others. A chunk that is neither full nor such a chunk is
        deleted, so that it is written again.
        """
        token_bytes = chunk.get_size() // self._metadata.chunk_size
        tokens = self.store.load_partial(name, _bytes(chunk), token_bytes) if is_last and self._has_partials else 0
        if not tokens:
            self.store.discard(name)
            return 0
        self.reshape_partial_chunk(chunk, tokens * token_bytes)
        return 1

    @property
    def _has_partials(self) -> bool:
        return bool(self._metadata.get_num_groups() == 1)

    def _put(self, names: Names, chunks: Chunks, metadata: Mapping[str, str]) -> bool:
        full_bytes = self._full_bytes()
        full = [
            (name, _bytes(chunk)) for name, chunk in zip(names, chunks, strict=True) if chunk.get_size() == full_bytes
        ]
        is_stored = not full or self.store.put([name for name, _ in full], [view for _, view in full], metadata)
        for name, chunk in zip(names, chunks, strict=True):
            if is_stored and chunk.get_size() != full_bytes and self._has_partials:
                token_bytes = full_bytes // self._metadata.chunk_size
                tokens = partial_tokens(chunk.get_size(), token_bytes, self._metadata.chunk_size)
                is_stored = tokens > 0 and self.store.put_partial(name, _bytes(chunk), tokens)
        return is_stored

    def _full_bytes(self) -> int:
        shapes, dtypes = self._metadata.get_shapes(), self._metadata.get_dtypes()
        return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))

    def _close(self) -> None:
        self._jobs.close(self._options.drain_s)
        self._callers.shutdown(cancel_futures=True)
        self.store.close()

    async def _in_thread(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._callers, call, *arguments)


def _bytes(chunk: MemoryObj) -> memoryview:
    return memoryview(chunk.byte_array).cast("B")


def _release(chunks: Sequence[MemoryObj]) -> None:
    for chunk in chunks:
        chunk.ref_count_down()
