"""Figure 8: what the store's files give before anything of S3: blocks of 64 KiB to 4 MiB, cached and cold, a few in
flight in each of several threads.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.beds.memory import huge_page_memory
from bench.beds.processes import BaselineError
from bench.beds.s3_jobs import Group, ObjectContent, make_object_content, object_key
from bench.core.show import Json
from bench.paper.ladder.bed import Session, even_parts, figure
from descriptors.units import MIB
from objectcache.adapters.nixl_agent import NixlFailure, _load, is_available
from objectcache.calibration.chunks import drop_pages, resident_share, store_bodies
from objectcache.calibration.content import Bytes, VerificationError
from objectcache.calibration.samples import Cell, Task, run_rounds
from objectcache.calibration.servers import BUCKET
from storage_server.kernel.beside import FilesBeside
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import extent_place
from storage_server.kernel.index.queries import prefix
from storage_server.kernel.index.schema import connect
from storage_server.planning.extent import Extent

IN_FLIGHT_EACH = 8
"""Blocks, in each thread."""
BLOCKS_OF_TRANSFER = 4
TRANSFERS_IN_FLIGHT = IN_FLIGHT_EACH // BLOCKS_OF_TRANSFER
START_TIMEOUT_S = 60.0
OPEN_FILES_MAX = 4096
TOTAL_BYTES, TOTAL_BYTES_SMOKE = 128 * MIB, 2 * MIB
RESIDENT_SHARE_MAX = 0.01


class Reader(Enum):
    """The reader: NIXL's POSIX backend with io_uring, calls of preadv, or the store, which proves every checksum."""

    URING = "io_uring"
    PREADV = "preadv"
    STORE = "store"


class Cache(Enum):
    """Where the bytes are when reading starts. DIRECT reads with O_DIRECT and never sees the page cache."""

    CACHED = "cached"
    COLD = "cold"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Block:
    """An object in an open file, its number among the seeded objects, and the memory that it goes to."""

    fd: int
    extent: Extent
    number: int
    target: Bytes


@dataclass(frozen=True, slots=True)
class Store:
    """Where objects of one size lie, in the order of the disk, what they hold, and memory for all of them."""

    data: Path
    objects: Sequence[tuple[int, Extent]]
    content: ObjectContent
    targets: Bytes


def raw_store(session: Session) -> Json:
    """Fill a store through its server, then have its files read by everybody."""
    settings, server = session.settings, session.server
    total_bytes = TOTAL_BYTES_SMOKE if settings.is_smoke else TOTAL_BYTES
    content, target = make_object_content(max(settings.block_bytes), settings.seed), huge_page_memory(total_bytes)
    readers = [reader for reader in Reader if reader is not Reader.URING or is_available()]
    cells: list[Cell] = []
    left_out: dict[Cache, str] = {}
    for size in settings.block_bytes:
        keys = [object_key(Group.GET, size, number) for number in range(total_bytes // size)]
        store_bodies(server, keys, partial(content.window, nbytes=size), size, "figure 8: storing blocks")
        targets = target[: len(keys) * size].reshape(len(keys), size)
        store = Store(server.data, _find(server.data, keys), content, targets)
        left_out = _left_out(extent_place(server.data, store.objects[0][1].file_id).path)
        with ExitStack() as stack:
            tasks = [
                _task(stack, store, reader, cache, in_flight)
                for in_flight in settings.in_flight
                for cache in Cache
                if cache not in left_out
                for reader in readers
                if not (reader is Reader.STORE and cache is Cache.DIRECT)
            ]
            cells += run_rounds(tasks, settings.runs, f"figure 8: {size >> 10} KiB")
    notes = [
        "C=8: one thread; C=32: four threads; eight blocks in flight in each",
        "io_uring: NIXL's POSIX backend, two transfers of four blocks in flight, prepared beforehand",
        "preadv: one call for up to eight blocks that are neighbours on disk",
        "store: the store's own read, block by block, every checksum proved",
        "cold: after fdatasync and posix_fadvise(DONTNEED) of every file; mincore confirms that at most "
        f"{RESIDENT_SHARE_MAX:.0%} is still resident; what a hypervisor or disk caches is beyond our reach",
        "direct: O_DIRECT, so no page cache of this kernel is involved",
        "every block read is compared with what was put, outside the clock",
        *(f"{cache.value} was not run: {reason}" for cache, reason in left_out.items()),
        *(() if Reader.URING in readers else ("io_uring was not run: NIXL is not installed",)),
    ]
    found = {"block_bytes": settings.block_bytes, "total_bytes": total_bytes, "order": "as on disk"}
    return figure(found, notes, cells)


def _find(data: Path, keys: Sequence[str]) -> list[tuple[int, Extent]]:
    """Where the objects lie, by number, in the order of the disk."""
    with closing(connect(data / "index.sqlite3")) as index:
        found = prefix(index, BUCKET, keys, extents_max=len(keys) + 1)
    stored = []
    for number, extents in enumerate(found):
        if extents is None or len(extents) != 1:
            raise VerificationError(f"{keys[number]} is not one extent")
        stored.append((number, extents[0]))
    return sorted(stored, key=lambda one: (extent_place(data, one[1].file_id).path, one[1].offset))


def _left_out(path: Path) -> dict[Cache, str]:
    """What this file system cannot do, and why."""
    found: dict[Cache, str] = {}
    with path.open("rb") as file:
        drop_pages(file.fileno())
        if resident_share(file.fileno()) > RESIDENT_SHARE_MAX:
            found[Cache.COLD] = "the file system keeps its pages in memory"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        found[Cache.DIRECT] = f"O_DIRECT: {error.strerror}"
    return found


def _task(stack: ExitStack, store: Store, reader: Reader, cache: Cache, in_flight: int) -> Task:
    """Reading every block: a thread for each part of the blocks, all at once; the time goes from the first thread's
    start to the last one's end. `stack` ends everything.
    """
    targets, size = store.targets, store.targets.shape[1]
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if cache is Cache.DIRECT else 0)
    names = sorted({extent.file_id for _, extent in store.objects})
    files = {name: os.open(extent_place(store.data, name).path, flags) for name in names}
    for fd in files.values():
        stack.callback(os.close, fd)
    objects = zip(store.objects, targets, strict=True)
    blocks = [Block(files[extent.file_id], extent, number, target) for (number, extent), target in objects]
    parts = [blocks[part.start : part.stop] for part in even_parts(len(blocks), in_flight // IN_FLIGHT_EACH)]
    if reader is Reader.URING:
        reads = [_uring_read(part, stack) for part in parts]
    elif reader is Reader.PREADV:
        reads = [partial(_preadv, part) for part in parts]
    else:
        opened = FilesBeside(store.data, OPEN_FILES_MAX, Disk())
        stack.callback(opened.close)
        if not opened.pin(set(names)):
            raise BaselineError("a segment file is gone")
        stack.callback(opened.unpin, set(names))
        reads = [partial(_proved_read, part, opened) for part in parts]
    ready = threading.Barrier(len(parts), timeout=START_TIMEOUT_S)
    pool = stack.enter_context(ThreadPoolExecutor(len(parts)))

    def read_timed(read: Callable[[], None]) -> tuple[float, float]:
        ready.wait()
        started_s = time.monotonic()
        read()
        return started_s, time.monotonic()

    def sample() -> float:
        targets.fill(0)
        if cache is Cache.COLD:
            for fd in files.values():
                drop_pages(fd)
            if (resident := max(map(resident_share, files.values()))) > RESIDENT_SHARE_MAX:
                raise OSError(f"{resident:.1%} of a segment file stays in the page cache")
        elif cache is Cache.CACHED:
            for fd in files.values():
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            list(pool.map(read_timed, reads))
            targets.fill(0)
        times = list(pool.map(read_timed, reads))
        for block in blocks:
            if not store.content.holds(block.target, block.number, size):
                raise VerificationError(f"block {block.number} of {size} bytes: wrong bytes")
        return max(ended_s for _, ended_s in times) - min(started_s for started_s, _ in times)

    labels = {"way": reader.value, "state": cache.value, "block_bytes": size, "in_flight": in_flight}
    return Task(labels, targets.nbytes, sample)


def _preadv(blocks: Sequence[Block]) -> None:
    """One call at a time, which fills as many blocks as may be in flight where they are neighbours on disk."""
    runs: list[list[Block]] = []
    for block in blocks:
        last = runs[-1][-1] if runs and len(runs[-1]) < IN_FLIGHT_EACH else None
        if last and (last.fd, last.extent.offset + last.extent.nbytes) == (block.fd, block.extent.offset):
            runs[-1].append(block)
        else:
            runs.append([block])
    for run in runs:
        nbytes = os.preadv(run[0].fd, [block.target.data for block in run], run[0].extent.offset)
        if nbytes != sum(block.extent.nbytes for block in run):
            raise BaselineError(f"preadv read {nbytes} bytes of {len(run)} blocks of {run[0].extent.nbytes}")


def _proved_read(blocks: Sequence[Block], files: FilesBeside) -> None:
    """The store's own reads, block by block, checksums proved."""
    for block in blocks:
        files.open.read_into(block.extent, 0, block.target.data)


def _uring_read(blocks: Sequence[Block], stack: ExitStack) -> Callable[[], None]:
    """An agent for this thread and two transfers in flight, which together have as many blocks as may be. Transfers are
    prepared once, as a server would for known files.
    """
    module, name = _load(), str(uuid.uuid4())
    memory = [(block.target.ctypes.data, block.extent.nbytes, 0) for block in blocks]
    files = [(block.extent.offset, block.extent.nbytes, block.fd) for block in blocks]
    whole_memory = [(memory[0][0], sum(nbytes for _, nbytes, _ in memory), 0, "")]
    whole_files = [(0, os.fstat(fd).st_size, fd, "") for fd in {block.fd for block in blocks}]
    transfers = []
    try:
        agent = module.nixl_agent(name, module.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("POSIX", {"use_uring": "true"})
        for spans, kind in ((whole_memory, "DRAM"), (whole_files, "FILE")):
            registered = agent.register_memory(spans, kind, backends=["POSIX"])
            stack.callback(agent.deregister_memory, registered, backends=["POSIX"])
        for first in range(0, len(blocks), BLOCKS_OF_TRANSFER):
            some = slice(first, first + BLOCKS_OF_TRANSFER)
            here = agent.get_xfer_descs(np.array(memory[some], dtype=np.uint64), "DRAM")
            there = agent.get_xfer_descs(np.array(files[some], dtype=np.uint64), "FILE")
            transfers.append(agent.initialize_xfer("READ", here, there, name, backends=["POSIX"]))
            stack.callback(agent.release_xfer_handle, transfers[-1])
    except Exception as error:
        raise NixlFailure(f"NIXL's POSIX backend with io_uring: {error}") from error
    return partial(_transfer, agent, transfers)


def _transfer(agent: Any, transfers: Sequence[Any]) -> None:
    """Post every transfer, a few in flight."""
    for index, transfer in enumerate(transfers):
        if index >= TRANSFERS_IN_FLIGHT:
            _finish(agent, transfers[index - TRANSFERS_IN_FLIGHT])
        agent.transfer(transfer)
    for transfer in transfers[-TRANSFERS_IN_FLIGHT:]:
        _finish(agent, transfer)


def _finish(agent: Any, transfer: Any) -> None:
    while (status := agent.check_xfer_state(transfer)) == "PROC":
        time.sleep(0)  # other threads' turn
    if status != "DONE":
        raise NixlFailure(f"NIXL reports {status}")
