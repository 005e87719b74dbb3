"""Mooncake Store over TCP, through a registered buffer, in an environment with it. MASTER is `HOST:PORT`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mooncake.store import MooncakeDistributedStore

from bench.beds.memory import huge_page_memory
from bench.paper.kv_stores.adapter import halves
from objectcache.calibration.content import Bytes

BUFFER_BYTES = 256 << 20


class MooncakeAdapter:
    """`put_from` and `get_into`; what is got is copied out of the registered buffer."""

    def __init__(self, folder: Path, master: str) -> None:
        self._store = MooncakeDistributedStore()
        self._is_ready = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
        self._buffer = huge_page_memory(BUFFER_BYTES)
        self._is_ready &= self._store.register_buffer(self._buffer.ctypes.data, self._buffer.nbytes) == 0

    def initialize(self) -> bool:
        return bool(self._is_ready)

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        nbytes = len(key_data) + len(value_data)
        self._buffer[: len(key_data)] = key_data
        self._buffer[len(key_data) : nbytes] = value_data
        return bool(self._store.put_from(block_id, self._buffer.ctypes.data, nbytes) == 0)

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        nbytes = self._store.get_into(block_id, self._buffer.ctypes.data, self._buffer.nbytes)
        return halves(np.array(self._buffer[:nbytes])) if nbytes > 0 else None

    def contains(self, block_id: str) -> bool:
        return bool(self._store.is_exist(block_id) == 1)

    def clear(self) -> None:
        self._store.remove_all(True)  # also what a get has leased a moment ago
