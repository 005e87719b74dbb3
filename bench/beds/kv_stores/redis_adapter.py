"""Redis, with hiredis: two hash fields for each block. ADDRESS is `HOST:PORT`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import redis

from calibration.content import Bytes


class RedisAdapter:
    """`hset` and `hgetall` of redis-py."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._redis: Any = redis.Redis(host=host, port=int(port))

    def initialize(self) -> bool:
        return bool(self._redis.ping())

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        self._redis.hset(block_id, mapping={"keys": key_data.data, "values": value_data.data})
        return True

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        keys, values = self._redis.hmget(block_id, ["keys", "values"])
        if keys is None or values is None:
            return None
        return np.frombuffer(keys, dtype=np.uint8), np.frombuffer(values, dtype=np.uint8)

    def contains(self, block_id: str) -> bool:
        return bool(self._redis.exists(block_id))

    def clear(self) -> None:
        self._redis.flushall()


def make(folder: Path, address: str) -> RedisAdapter:
    """For the worker."""
    return RedisAdapter(address)
