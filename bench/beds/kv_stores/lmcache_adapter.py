"""LMCache's file system connector, a file for each block, in an environment with LMCache. BLOCK_BYTES is the size of
every block.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from bench.beds.kv_stores.adapter import halves
from calibration.content import Bytes

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

BLOCK_TOKENS = 256
CALL_TIMEOUT_S = 60.0
MEMORY_GIB = 0.5
_T = TypeVar("_T")


class LMCacheAdapter:
    """`put`, `get` and `exists` of FSConnector, with its defaults; what is got is copied out of LMCache's memory."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        head_dim, odd = divmod(block_bytes, 2 * 2 * BLOCK_TOKENS)
        if odd:
            raise ValueError(f"blocks have multiples of {4 * BLOCK_TOKENS} bytes for LMCache")
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float16,
            kv_shape=(1, 2, BLOCK_TOKENS, 1, head_dim),
            chunk_size=BLOCK_TOKENS,
        )
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=BLOCK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=MEMORY_GIB,
            extra_config={"save_chunk_meta": False},
        )
        backend = LocalCPUBackend(config, metadata)
        self._connector = FSConnector(self._loop, backend, config, base_paths_str=str(folder))

    def initialize(self) -> bool:
        return self._folder.is_dir()

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        connector = self._connector
        chunk = connector.local_cpu_backend.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
        view = _bytes_of(chunk)
        view[: len(key_data)] = key_data
        view[len(key_data) :] = value_data
        self._wait(connector.put(_key(block_id), chunk))
        chunk.ref_count_down()
        return True

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        chunk = self._wait(self._connector.get(_key(block_id)))
        if chunk is None:
            return None
        got = halves(np.array(_bytes_of(chunk)))
        chunk.ref_count_down()
        return got

    def contains(self, block_id: str) -> bool:
        return bool(self._connector.exists_sync(_key(block_id)))

    def clear(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def _wait(self, call: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(CALL_TIMEOUT_S)


def _key(block_id: str) -> CacheEngineKey:
    number = int.from_bytes(hashlib.sha256(block_id.encode()).digest()[:7], "little")
    return CacheEngineKey("bench", 1, 0, number, torch.float16)


def _bytes_of(chunk: Any) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * chunk.get_size()).from_address(chunk.data_ptr))


def make(folder: Path, block_bytes: str) -> LMCacheAdapter:
    """For the worker."""
    blocks = folder / "blocks"
    blocks.mkdir(exist_ok=True)
    return LMCacheAdapter(blocks, int(block_bytes))
