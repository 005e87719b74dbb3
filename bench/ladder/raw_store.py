"""Figure 8: what the store's files give before anything of S3: blocks of 64 KiB to 4 MiB, cached and cold."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np

from adapters.nixl_agent import is_available
from bench.content import Bytes, VerificationError
from bench.jobs import BUCKET
from bench.ladder import page_cache
from bench.ladder.bed import Session
from bench.ladder.blocks import Concurrency, ladder
from bench.ladder.raw_reads import Block, Job, ReadAll, preadv_reads, proved_reads, uring_reads
from bench.ladder.results import Cell, Figure, FigureName, State
from bench.ladder.rounds import Task, run_rounds
from bench.objects import Group, ObjectContent, make_object_content, object_key
from bench.progress import progress_bar
from bench.server import BenchServer
from descriptors.units import MIB
from nixl_client.client import Transport
from storage_server.store.extents import extent_path
from storage_server.store.queries import prefix
from storage_server.store.schema import connect

TITLE = "raw store: segment files below S3"
TOTAL_BYTES, TOTAL_BYTES_SMOKE = 128 * MIB, 2 * MIB
PUT_BATCH_BYTES = 64 * MIB
RESIDENT_SHARE_MAX = 0.01


class Cache(Enum):
    """Where the bytes are when reading starts. DIRECT reads with O_DIRECT and never sees the page cache."""

    CACHED = "cached"
    COLD = "cold"
    DIRECT = "direct"


class Way(Enum):
    """Who reads."""

    URING = "io_uring"
    PREADV = "preadv"
    PROVED = "store"


def raw_store(session: Session) -> Figure:
    """Fill a store through its server, then read its files in every way."""
    settings = session.settings
    steps = ladder(settings)
    total_bytes = TOTAL_BYTES_SMOKE if settings.is_smoke else TOTAL_BYTES
    content = make_object_content(max(steps.block_bytes), settings.seed)
    ways = [way for way in Way if way is not Way.URING or is_available()]
    cells: list[Cell] = []
    left_out: dict[Cache, str] = {}
    served = session.served()
    target = _memory(total_bytes)
    for block_bytes in steps.block_bytes:
        keys = _store(served.server, content, block_bytes, total_bytes // block_bytes)
        blocks = _find(served.data, keys)
        left_out = _left_out(blocks[0].path)
        with ExitStack() as stack:
            tasks = [
                _task(stack, served.data, blocks, target, content, way, cache, concurrency)
                for concurrency in steps.concurrency
                for cache in Cache
                if cache not in left_out
                for way in ways
                if not (way is Way.PROVED and cache is Cache.DIRECT)
            ]
            cells += run_rounds(tasks, settings.runs, f"figure 8: {block_bytes >> 10} KiB")
    return Figure(
        FigureName.RAW_STORE,
        TITLE,
        State.DONE,
        settings={"block_bytes": steps.block_bytes, "total_bytes": total_bytes, "order": "as on disk"},
        notes=[
            "C=8: one thread; C=32: four threads; eight blocks in flight in each",
            "io_uring: NIXL's POSIX backend, two transfers of four blocks in flight, prepared beforehand",
            "preadv: one call for up to eight blocks that are neighbours on disk",
            "store: the store's own read, block by block, every checksum proved",
            "cold: after fdatasync and posix_fadvise(DONTNEED) of every file; mincore confirms that at most "
            f"{RESIDENT_SHARE_MAX:.0%} is still resident; what a hypervisor or disk caches is beyond our reach",
            "direct: O_DIRECT, so no page cache of this kernel is involved",
            "every block read is compared with what was put, outside the clock",
            *(f"{cache.value} was not run: {reason}" for cache, reason in left_out.items()),
            *(() if Way.URING in ways else ("io_uring was not run: NIXL is not installed",)),
        ],
        cells=cells,
    )


def _store(server: BenchServer, content: ObjectContent, block_bytes: int, count: int) -> list[str]:
    """Put the objects of one size; their keys, by number."""
    keys = [object_key(Group.GET, block_bytes, number) for number in range(count)]
    batch = max(1, PUT_BATCH_BYTES // block_bytes)
    with server.client(Transport.HTTP) as client, progress_bar(count, "figure 8: storing blocks") as advance:
        for first in range(0, count, batch):
            numbers = range(first, min(first + batch, count))
            client.put_chunks([keys[number] for number in numbers], [content.window(n, block_bytes) for n in numbers])
            advance(len(numbers))
    return keys


def _find(data: Path, keys: Sequence[str]) -> list[Block]:
    """Where the objects lie, in the order of the disk."""
    with closing(connect(data / "index.sqlite3")) as index:
        found = prefix(index, BUCKET, keys)
    blocks = []
    for number, extents in enumerate(found):
        if extents is None or len(extents) != 1:
            raise VerificationError(f"{keys[number]} is not one extent")
        blocks.append(Block(extent_path(data, extents[0].file_id), extents[0], number))
    return sorted(blocks, key=lambda block: (block.path, block.extent.offset))


def _left_out(path: Path) -> dict[Cache, str]:
    """What this file system cannot do, and why."""
    found: dict[Cache, str] = {}
    fd = os.open(path, os.O_RDONLY)
    try:
        page_cache.drop(fd)
        if page_cache.resident_share(fd) > RESIDENT_SHARE_MAX:
            found[Cache.COLD] = "the file system keeps its pages in memory"
    finally:
        os.close(fd)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        found[Cache.DIRECT] = f"O_DIRECT: {error.strerror}"
    return found


def _task(
    stack: ExitStack,
    data: Path,
    blocks: Sequence[Block],
    target: Bytes,
    content: ObjectContent,
    way: Way,
    cache: Cache,
    concurrency: Concurrency,
) -> Task:
    block_bytes = blocks[0].extent.nbytes
    descriptors = stack.enter_context(_opened(blocks, os.O_DIRECT if cache is Cache.DIRECT else 0))
    job = Job(blocks, block_bytes, target[: len(blocks) * block_bytes], descriptors, concurrency)
    read_all = stack.enter_context(_reads(way, job, data))
    labels = {"way": way.value, "state": cache.value, "block_bytes": block_bytes, "in_flight": concurrency.in_flight}
    return Task(labels, job.target.nbytes, partial(_sample, job, cache, read_all, content))


def _reads(way: Way, job: Job, data: Path) -> AbstractContextManager[ReadAll]:
    if way is Way.URING:
        return uring_reads(job)
    return preadv_reads(job) if way is Way.PREADV else proved_reads(job, data)


def _sample(job: Job, cache: Cache, read_all: ReadAll, content: ObjectContent) -> float:
    job.target.fill(0)
    if cache is Cache.COLD:
        for fd in job.descriptors.values():
            page_cache.drop(fd)
        resident = max(page_cache.resident_share(fd) for fd in job.descriptors.values())
        if resident > RESIDENT_SHARE_MAX:
            raise OSError(f"{resident:.1%} of a segment file stays in the page cache")
    elif cache is Cache.CACHED:
        for fd in job.descriptors.values():
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        read_all()
        job.target.fill(0)
    duration_s = read_all()
    for index, block in enumerate(job.blocks):
        found = np.frombuffer(job.view(index), dtype=np.uint8)
        if not content.holds(found, block.number, job.block_bytes):
            raise VerificationError(f"block {block.number} of {job.block_bytes} bytes: wrong bytes")
    return duration_s


@contextmanager
def _opened(blocks: Sequence[Block], flags: int) -> Iterator[dict[Path, int]]:
    """Every file the blocks lie in, opened once."""
    descriptors: dict[Path, int] = {}
    try:
        for path in sorted({block.path for block in blocks}):
            descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        yield descriptors
    finally:
        for fd in descriptors.values():
            os.close(fd)


def _memory(nbytes: int) -> Bytes:
    """Page-aligned, as O_DIRECT needs, on huge pages where there are any, and prefaulted."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, dtype=np.uint8)
    target.fill(0)
    return target
