"""LMCache's S3 adapter of the multiprocess mode. It addresses the bucket by Host alone."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from typing import ClassVar

from contract import Target
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2Adapter, S3L2AdapterConfig
from lmcache_parts import VERSION, allocate, fill, read
from suite import SMALL, Driver, main
from virtual_host import bucket_address

_WAIT_MS = 60_000


class LMCacheL2(Driver):
    version = VERSION
    small: ClassVar = {key: size for key, size in SMALL.items() if size > 0}
    lacks: ClassVar = {"range": "whole chunks only"}
    notes: ClassVar = {
        "put": "virtual-hosted: `s3://BUCKET.localhost:PORT`",
        "multipart": "the CRT's, of a 20 MiB chunk",
    }

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        settings = S3L2AdapterConfig(
            s3_endpoint=f"s3://{bucket_address(target)}",
            s3_region=target.region,
            s3_num_io_threads=1,
            s3_prefer_http2=False,
            disable_tls=True,
            aws_access_key_id=target.access_key,
            aws_secret_access_key=target.secret_key,
        )
        self._adapter = S3L2Adapter(settings)
        self._looker = S3L2Adapter(settings)

    def stored_as(self, key: str) -> str:
        return f"{key}@00000000@0@c0ffee"

    def put(self, key: str, data: bytes) -> None:
        task = self._adapter.submit_store_task([self._key(key)], [fill(allocate(len(data)), data)])
        self._wait(self._adapter.get_store_event_fd())
        done = self._adapter.pop_completed_store_tasks()[task]
        assert done.is_successful(), done

    def get(self, key: str) -> bytes:
        wanted = [self._key(key), self._key(key + "-absent")]
        task = self._looker.submit_lookup_and_lock_task(wanted, {})
        self._wait(self._looker.get_lookup_and_lock_event_fd())
        found = self._looker.query_lookup_and_lock_result(task)
        self._looker.submit_unlock(wanted)
        assert found is not None
        assert (found.test(0), found.test(1)) == (True, False), found
        size = self.small.get(key, self.large_bytes)
        into = allocate(size)
        task = self._looker.submit_load_task(wanted[:1], [into])
        self._wait(self._looker.get_load_event_fd())
        loaded = self._looker.query_load_result(task)
        assert loaded is not None
        assert loaded.test(0), f"{key!r} could not be loaded"
        return read(into)

    def list_keys(self, prefix: str) -> Iterable[str]:
        names, cursor = [], None
        while True:
            page = self._adapter.list_l2_keys(page_size=2, cursor=cursor)
            names += [self.stored_as(entry.key.model_name) for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                return [name for name in names if name.startswith(prefix)]

    multipart = put

    def delete(self, keys: list[str]) -> None:
        self._adapter.delete([self._key(key) for key in keys])

    def close(self) -> None:
        self._adapter.close()
        self._looker.close()

    def _key(self, key: str) -> ObjectKey:
        return ObjectKey(bytes.fromhex("c0ffee"), key, 0)

    def _wait(self, descriptor: int) -> None:
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        assert ready.poll(_WAIT_MS), "LMCache did not finish in time"
        os.eventfd_read(descriptor)


if __name__ == "__main__":
    main("LMCache S3L2Adapter", LMCacheL2)
