"""Lookups of chunks that are upstream or in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from storage_server.planning.extent import Extent
from storage_server.upstream.chunks import UpstreamChunks

KEYS = [f"{number:064x}" for number in range(4)]


class Prefetched:
    """Fetches that only note what is to come."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def prefetch(self, bucket: str, keys: Sequence[str], wait_s: float) -> None:
        self.keys += keys


async def test_a_leased_chunk_that_is_just_leaving_the_cache_comes_again() -> None:
    """It was chosen to leave before the lease was given, and its lease waits for it."""

    async def resolve(bucket: str, keys: Sequence[str]) -> list[list[Extent] | None]:
        return [[Extent("file", 0, 1, bytes(4), 0)] for _ in keys]

    cache: Any = SimpleNamespace(
        objects=SimpleNamespace(resolve=resolve),
        evictor=SimpleNamespace(before_lookup=lambda: 7, note_lookup=lambda bucket, keys, matched, since, lease_s: 2),
    )
    nothing: Any = None
    fetches: Any = Prefetched()
    chunks = UpstreamChunks(nothing, cache, fetches, nothing)
    assert await chunks.matched("bucket", KEYS, 60.0) == 4
    assert fetches.keys == KEYS[2:]
    assert await chunks.matched("bucket", KEYS) == 4
    assert fetches.keys == KEYS[2:]
