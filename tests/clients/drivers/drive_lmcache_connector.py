"""LMCache's in-process S3 connector. It stores whole KV chunks of one size and addresses the bucket by Host alone."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import torch
from contract import Target
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.s3_connector import S3Connector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache_parts import VERSION, fill, read
from suite import SMALL, Driver, main
from virtual_host import bucket_address

_CHUNK_BYTES = 100 * 1024
_LARGE_LAYERS = 205
_STAGING_GIB = 0.1


class LMCacheConnector(Driver):
    version = VERSION
    small: ClassVar = dict.fromkeys((key for key in SMALL if not key.endswith("empty")), _CHUNK_BYTES)
    large_bytes = _LARGE_LAYERS * _CHUNK_BYTES
    lacks: ClassVar = {
        "range": "whole chunks only",
        "list": "`list` raises NotImplementedError in LMCache",
        "delete": "the connector has no removal",
    }
    notes: ClassVar = {
        "put": "virtual-hosted: `s3://BUCKET.localhost:PORT`",
        "multipart": "the CRT's, of a 20 MiB chunk",
    }

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._address = bucket_address(target)
        self._loop = asyncio.new_event_loop()
        sizes = (1, _LARGE_LAYERS)
        self._writers = {layers: self._connector(layers) for layers in sizes}
        self._readers = {layers: self._connector(layers) for layers in sizes}

    def stored_as(self, key: str) -> str:
        return self._key(key).to_string().replace("/", "_")

    def put(self, key: str, data: bytes) -> None:
        self._put(1, key, data)

    def get(self, key: str) -> bytes:
        layers = 1 if key in self.small else _LARGE_LAYERS
        # not the connector that stored it: that one remembers the size and asks for nothing
        connector = self._readers[layers]
        assert connector.exists_sync(self._key(key)), f"{key!r} is not found by HEAD"
        found = self._loop.run_until_complete(connector.get(self._key(key)))
        batch = self._loop.run_until_complete(connector.batched_get([self._key(key)]))
        assert found is not None, f"{key!r} could not be loaded"
        assert batch[0] is not None, f"{key!r} could not be loaded in a batch"
        assert read(batch[0]) == read(found)
        assert not connector.exists_sync(self._key(key + "-absent"))
        return read(found)

    def multipart(self, key: str, data: bytes) -> None:
        self._put(_LARGE_LAYERS, key, data)

    def _put(self, layers: int, key: str, data: bytes) -> None:
        connector = self._writers[layers]
        chunk = connector.local_cpu_backend.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
        self._loop.run_until_complete(connector.put(self._key(key), fill(chunk, data)))

    def _connector(self, layers: int) -> S3Connector:
        metadata = LMCacheMetadata(
            model_name="model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float16,
            kv_shape=(layers, 2, 16, 8, 200),
            chunk_size=16,
        )
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16, local_cpu=False, max_local_cpu_size=_STAGING_GIB, extra_config={"save_chunk_meta": False}
        )
        return S3Connector(
            f"s3://{self._address}",
            loop=self._loop,
            local_cpu_backend=LocalCPUBackend(config, metadata),
            s3_num_io_threads=1,
            s3_prefer_http2=False,
            s3_region=self.target.region,
            s3_enable_s3express=False,
            disable_tls=True,
            aws_access_key_id=self.target.access_key,
            aws_secret_access_key=self.target.secret_key,
        )

    def _key(self, key: str) -> CacheEngineKey:
        return CacheEngineKey(key, 1, 0, 0xC0FFEE, torch.float16)


if __name__ == "__main__":
    main("LMCache S3Connector", LMCacheConnector)
