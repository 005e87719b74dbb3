"""CASCADE's Table I: a file for each block against aggregated files, here our segments, written and read in process."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from bench.beds.embedded import BytesBody
from bench.beds.kv_stores.adapter import block
from bench.core.show import Json
from calibration.chunks import drop_pages
from calibration.content import Bytes, VerificationError
from calibration.samples import interleaved, spread
from descriptors.objects import PutRequest
from descriptors.units import KIB, MIB
from storage_server.settings import Dedup, StorageSettings
from storage_server.store.data.durability import Durability
from storage_server.store.embedded import EmbeddedStore

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
            "aggregated_over_per_file": {
                step: spread([ours / theirs for ours, theirs in zip(names[step], steps[PER_FILE][step], strict=True)])
                for step in names
            },
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
            found = await store.objects.resolve(BUCKET, [str(index) for index in range(len(bodies))])

            def read(index: int) -> Bytes:
                buffer = np.empty(len(bodies[index]), dtype=np.uint8)
                for extent in found[index] or ():
                    store.files.read_into(extent, 0, buffer.data)
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
