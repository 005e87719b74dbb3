"""LMCache's file system connector, a file for each block, in an environment with LMCache. BLOCK_BYTES is the size of
every block.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

from bench.beds.kv_peers.lmcache import Loop, backend_of, bytes_of
from bench.paper.kv_stores.adapter import halves
from objectcache.calibration.content import Bytes

BLOCK_TOKENS = 256
MEMORY_BYTES = 1 << 29


class LMCacheAdapter:
    """`put`, `get` and `exists` of FSConnector, with its defaults; what is got is copied out of LMCache's memory."""

    def __init__(self, folder: Path, block_bytes: str) -> None:
        self._folder = folder / "blocks"
        self._folder.mkdir(exist_ok=True)
        head_dim, odd = divmod(int(block_bytes), 2 * 2 * BLOCK_TOKENS)
        if odd:
            raise ValueError(f"blocks have multiples of {4 * BLOCK_TOKENS} bytes for LMCache")
        self._loop = Loop()
        config, backend = backend_of(BLOCK_TOKENS, 1, head_dim, MEMORY_BYTES)
        self._connector = FSConnector(self._loop.loop, backend, config, base_paths_str=str(self._folder))

    def initialize(self) -> bool:
        return self._folder.is_dir()

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        connector = self._connector
        chunk = connector.local_cpu_backend.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
        view = bytes_of(chunk)
        view[: len(key_data)] = key_data
        view[len(key_data) :] = value_data
        self._loop.wait(connector.put(_key(block_id), chunk))
        chunk.ref_count_down()
        return True

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        chunk = self._loop.wait(self._connector.get(_key(block_id)))
        if chunk is None:
            return None
        got = halves(np.array(bytes_of(chunk)))
        chunk.ref_count_down()
        return got

    def contains(self, block_id: str) -> bool:
        return bool(self._connector.exists_sync(_key(block_id)))

    def clear(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()


def _key(block_id: str) -> CacheEngineKey:
    number = int.from_bytes(hashlib.sha256(block_id.encode()).digest()[:7], "little")
    return CacheEngineKey("bench", 1, 0, number, torch.float16)
