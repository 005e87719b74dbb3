"""LMCache in a process without an engine: its loop, memory and configuration. In an environment with LMCache."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
CALL_TIMEOUT_S = 280.0
_T = TypeVar("_T")


class Loop:
    """An event loop in a thread of its own, which connectors want."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def wait(self, call: Coroutine[Any, Any, _T]) -> _T:
        """What the call gives. Raises what it raises, and TimeoutError."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(CALL_TIMEOUT_S)


def backend_of(
    chunk_tokens: int, num_layers: int, head_dim: int, memory_bytes: int
) -> tuple[LMCacheEngineConfig, LocalCPUBackend]:
    """LMCache's defaults for chunks of one KV head in float16, with so much memory of its own."""
    metadata = LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=(num_layers, 2, chunk_tokens, 1, head_dim),
        chunk_size=chunk_tokens,
    )
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=chunk_tokens,
        local_cpu=False,
        max_local_cpu_size=memory_bytes / (1 << 30),
        extra_config={"save_chunk_meta": False},
    )
    return config, LocalCPUBackend(config, metadata)


def bytes_of(chunk: Any) -> Any:
    """The memory of a chunk."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * chunk.get_size()).from_address(chunk.data_ptr))
