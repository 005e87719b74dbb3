"""CASCADE's Tables I, II and VI, of blocks in stores of this process and in one server.

I: a file for each block against aggregated files, here our segments, written and read in process. II: what content
addressing saves, counted and stored, beside what keys of prefixes save anyway. VI: what a content address costs, beside
the put of the same block and our own content id. In Table II

    sessions   every request names its blocks for itself, as CASCADE says that LMCache and Mooncake do
    prefixes   a block is named by all tokens up to its end, as vLLM, LMCache, SGLang and we do

Equal tokens behind equal prefixes have equal bytes here. In an engine they have them only where the same kernels ran on
the same shapes, so what is counted for `sessions` is the most that there can be.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from bench.core.rounds import paired, sampled, spreads
from bench.core.show import Json
from bench.paper.kv_stores.adapter import block
from bench.paper.tiers.replay import Stream
from descriptors.objects import BodyDigests, PutRequest
from descriptors.storage_api import Piece
from descriptors.units import KIB, MIB
from nixl_client.client import Client, Transport
from nixl_client.objects import Path as ObjectWay
from objectcache.calibration.chunks import drop_pages
from objectcache.calibration.content import Bytes, VerificationError
from objectcache.calibration.samples import interleaved, progress_bar, spread
from objectcache.calibration.servers import running_server
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.upkeep.dedup_rows import content_id
from storage_server.planning.block_checksums import BlockChecksums
from storage_server.planning.durability import Durability
from storage_server.planning.extent import ALIGNMENT_BYTES, Extent
from storage_server.settings import Dedup, StorageSettings


class BytesBody:
    """A body of bytes, without digests. Implements descriptors.storage_api.Body."""

    has_sha256 = False
    is_held_back = False

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[Piece]:
        yield self._data

    def digests(self) -> BodyDigests:
        """None."""
        return BodyDigests()


BLOCK_SIZES = (42 * KIB, 256 * KIB, MIB)
"""The paper's: 32 tokens, CASCADE's blocks, and larger ones."""
AT_ONCE = 4
BUCKET = "blocks"
PER_FILE, AGGREGATED = "per_file", "aggregated"
Steps = dict[str, float]
"""Seconds of each step."""


def measure_layout(parent: Path | None, block_count: int, runs: int, seed: int) -> Json:
    """Bytes per second of writing and reading so many blocks. Raises VerificationError, OSError."""
    ways: dict[str, Callable[[Path, Sequence[bytes], bool], Steps]] = {PER_FILE: _per_file, AGGREGATED: _aggregated}
    found: dict[str, Json] = {}
    for nbytes in BLOCK_SIZES:
        bodies = [np.concatenate(block(f"{seed}-{index}", nbytes)).tobytes() for index in range(block_count)]
        steps: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
        tasks = [(way, is_synced) for way in ways for is_synced in (False, True)]
        for round_index, (way, is_synced) in interleaved(tasks, runs, f"blocks of {nbytes // KIB} KiB"):
            with tempfile.TemporaryDirectory(prefix="objectcache-layout-", dir=parent) as folder:
                taken = ways[way](Path(folder), bodies, is_synced)
            if round_index > 0:
                for step, seconds in taken.items():
                    steps[way].setdefault(step, []).append(nbytes * block_count / seconds)
        names = steps[AGGREGATED]
        found[f"{nbytes // KIB} KiB"] = {
            "block_bytes": nbytes,
            "bytes_per_s": {way: {step: spread(rates) for step, rates in each.items()} for way, each in steps.items()},
            "aggregated_over_per_file": {step: spread(paired(names[step], steps[PER_FILE][step])) for step in names},
        }
    return {"block_count": block_count, "at_once": AT_ONCE, "sizes": found}


def _per_file(folder: Path, bodies: Sequence[bytes], is_synced: bool) -> Steps:
    """Each block is written under another name and renamed; synced, that includes its file and the folder."""

    def write(index: int) -> None:
        temporary = folder / f"{index}.new"
        with temporary.open("wb", buffering=0) as file:
            file.write(bodies[index])
            if is_synced:
                os.fsync(file.fileno())
        temporary.rename(folder / str(index))
        if is_synced:
            opened = os.open(folder, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)

    def read(index: int) -> Bytes:
        return np.fromfile(folder / str(index), dtype=np.uint8)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        written_s = _timed(lambda: list(pool.map(write, range(len(bodies)))))
        if is_synced:
            return {"write_synced": written_s}
        return {"write": written_s, **_read(read, bodies, pool, sorted(folder.iterdir()))}


def _aggregated(folder: Path, bodies: Sequence[bytes], is_synced: bool) -> Steps:
    """Each block is an object of the embedded store, with its row in the index and its checksums."""
    durability = Durability.STRICT if is_synced else Durability.RELAXED
    settings = StorageSettings(data_dir=folder / "data", durability=durability, dedup=Dedup.OFF)

    async def run() -> Steps:
        store = EmbeddedStore(settings)
        try:
            await store.start()
            await store.objects.create_bucket("bench", BUCKET)
            left = iter(range(len(bodies)))

            async def write() -> None:
                for index in left:
                    request = PutRequest(BUCKET, str(index), len(bodies[index]))
                    await store.objects.put_object("bench", request, BytesBody(bodies[index]))

            started_s = time.monotonic()
            await asyncio.gather(*(write() for _ in range(AT_ONCE)))
            written_s = time.monotonic() - started_s
            if is_synced:
                return {"write_synced": written_s}
            names = [str(index) for index in range(len(bodies))]
            found = [extents async for part in store.objects.prefixes.resolve(BUCKET, names) for extents in part]

            def read(index: int) -> Bytes:
                buffer = np.empty(len(bodies[index]), dtype=np.uint8)
                for extent in found[index] or ():
                    store.files.open.read_into(extent, 0, buffer.data)
                return buffer

            with ThreadPoolExecutor(AT_ONCE) as pool:
                files = sorted((settings.data_dir / "extents").glob("*/*"))
                return {"write": written_s, **_read(read, bodies, pool, files)}
        finally:
            store.close()
            shutil.rmtree(settings.data_dir)

    return asyncio.run(run())


def _read(
    read: Callable[[int], Bytes], bodies: Sequence[bytes], pool: ThreadPoolExecutor, files: Sequence[Path]
) -> Steps:
    """Read all blocks from the page cache, and then from the disk. Raises VerificationError."""
    steps = {}
    for step, is_cold in (("read_cached", False), ("read_cold", True)):
        if is_cold:
            for path in files:
                with path.open("rb") as file:
                    drop_pages(file.fileno())
        got: list[Bytes] = []
        steps[step] = _timed(partial(_read_all, read, len(bodies), pool, got))
        if any(each.tobytes() != body for each, body in zip(got, bodies, strict=True)):
            raise VerificationError("a block has other bytes than were written")
    return steps


def _read_all(read: Callable[[int], Bytes], count: int, pool: ThreadPoolExecutor, got: list[Bytes]) -> None:
    got.extend(pool.map(read, range(count)))


def _timed(call: Callable[[], object]) -> float:
    started_s = time.monotonic()
    call()
    return time.monotonic() - started_s


BLOCK_TOKENS = 256
OWN_TOKENS = 512
"""How many tokens each session has behind the shared prompt."""
STORED_BYTES = ALIGNMENT_BYTES
"""The bytes of a stored block: the least that a file system gives."""
PUTS_AT_ONCE = 32
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

                await asyncio.gather(*(put() for _ in range(PUTS_AT_ONCE)))
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


BLOCKS = {64: 20 * MIB, 256: 80 * MIB}
"""Tokens and bytes of a block of LLaMA-70B, of 320 KiB a token (the paper writes 82 MB)."""


def measure_hashing(parent: Path | None, runs: int, seed: int) -> Json:
    """Seconds, and parts of the time of a put."""
    with running_server(parent) as server, server.client(Transport.HTTP) as client:
        blocks = {
            f"{tokens} tokens": _measured(client, np.concatenate(block(f"{seed}-{tokens}", nbytes)), runs)
            for tokens, nbytes in BLOCKS.items()
        }
    return {"blocks": blocks}


def _measured(client: Client, body: Bytes, runs: int) -> Json:
    checksums = BlockChecksums()
    checksums.update(body.data)
    extent = Extent("f", 0, body.nbytes, checksums.packed())
    tasks: dict[str, Callable[[], object]] = {
        "put": lambda: client.objects.put_object("block", body, path=ObjectWay.TCP),
        "sha256": lambda: hashlib.sha256(body.data).digest(),
        "crc32c_blocks": lambda: BlockChecksums().update(body.data),
        "content_id": lambda: content_id("owner", extent),
    }
    ways = {name: lambda _, task=task: _timed(task) for name, task in tasks.items()}
    taken = sampled(ways, runs, f"blocks of {body.nbytes // MIB} MiB")
    return {
        "block_bytes": body.nbytes,
        "seconds": spreads(taken),
        "over_put": {name: statistics.median(paired(taken[name], taken["put"])) for name in tasks if name != "put"},
    }
