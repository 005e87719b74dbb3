"""CASCADE's Table II: what content addressing saves, counted and stored, beside what keys of prefixes save anyway.

    sessions   every request names its blocks for itself, as CASCADE says that LMCache and Mooncake do
    prefixes   a block is named by all tokens up to its end, as vLLM, LMCache, SGLang and we do

Equal tokens behind equal prefixes have equal bytes here. In an engine they have them only where the same kernels ran on
the same shapes, so what is counted for `sessions` is the most that there can be.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from bench.beds.embedded import BytesBody
from bench.core.show import Json
from bench.experiments.tiers.layout import BUCKET
from bench.experiments.tiers.traces import Stream
from calibration.samples import progress_bar
from descriptors.objects import PutRequest
from storage_server.planning.extent import ALIGNMENT_BYTES
from storage_server.settings import StorageSettings
from storage_server.store.embedded import EmbeddedStore

BLOCK_TOKENS = 256
OWN_TOKENS = 512
"""Of each session, behind the shared prompt."""
STORED_BYTES = ALIGNMENT_BYTES
"""Of a block that is stored: the least that a file system gives."""
AT_ONCE = 32
Blocks = Sequence[Hashable]
"""The content of each block of one request: equal values are equal bytes."""


def sessions_of(prompt_count: int, session_count: int, prefix_tokens: int, seed: int) -> list[list[Hashable]]:
    """Each prompt in each session, in seeded order."""
    turns = [(prompt, session) for prompt in range(prompt_count) for session in range(session_count)]
    Random(seed).shuffle(turns)
    shared, own = prefix_tokens // BLOCK_TOKENS, OWN_TOKENS // BLOCK_TOKENS
    return [
        [*((prompt, at) for at in range(shared)), *((prompt, session, at) for at in range(own))]
        for prompt, session in turns
    ]


def measure_sharing(workloads: Mapping[str, Sequence[Blocks]], stored_blocks_max: int, folder: Path | None) -> Json:
    """Counts, and what a store has after it was given the blocks of the first requests under either names."""
    found: dict[str, Json] = {}
    for name, requests in workloads.items():
        total = sum(map(len, requests))
        unique = len({content for request in requests for content in request})
        some = list(_first(requests, stored_blocks_max))
        found[name] = {
            "request_count": len(requests),
            "total_blocks": total,
            "unique_blocks": unique,
            "dedup_ratio": total / unique,
            "stored": {
                "request_count": len(some),
                "sessions": asyncio.run(_stored(some, folder, f"{name}, sessions", by_prefix=False)),
                "prefixes": asyncio.run(_stored(some, folder, f"{name}, prefixes", by_prefix=True)),
            },
        }
    return {"block_tokens": BLOCK_TOKENS, "stored_block_bytes": STORED_BYTES, "workloads": found}


def blocks_of(stream: Stream) -> list[Blocks]:
    """A recorded stream's requests; its chunks have 512 tokens."""
    return [list(request.keys) for request in stream.requests]


def _first(requests: Sequence[Blocks], blocks_max: int) -> Iterator[Blocks]:
    count = 0
    for request in requests:
        count += len(request)
        if count > blocks_max:
            return
        yield request


async def _stored(requests: Sequence[Blocks], parent: Path | None, title: str, *, by_prefix: bool) -> Json:
    """Objects and bytes of a store that has been given these blocks, and its dedup ratio."""
    numbers: dict[Hashable, int] = {}
    puts: dict[str, int] = {}
    for index, request in enumerate(requests):
        for at, content in enumerate(request):
            number = numbers.setdefault(content, len(numbers))
            puts[f"prefix-{number}" if by_prefix else f"session-{index}-{at}"] = number
    with tempfile.TemporaryDirectory(prefix="objectcache-sharing-", dir=parent) as folder:
        settings = StorageSettings(data_dir=Path(folder) / "data")
        store = EmbeddedStore(settings)
        try:
            await store.start()
            await store.objects.create_bucket("bench", BUCKET)
            left = iter(puts.items())
            with progress_bar(len(puts), title) as advance:

                async def put() -> None:
                    for key, number in left:
                        body = number.to_bytes(8, "little") * (STORED_BYTES // 8)
                        await store.objects.put_object("bench", PutRequest(BUCKET, key, len(body)), BytesBody(body))
                        advance(1)

                await asyncio.gather(*(put() for _ in range(AT_ONCE)))
            await store.deduplicator.share_new(math.inf)
            await store.deduplicator.count()
            found = store.deduplicator.stored
            return {
                "object_count": len(puts),
                "named_bytes": found.named_bytes,
                "stored_bytes": found.stored_bytes,
                "dedup_ratio": found.ratio,
            }
        finally:
            store.close()
