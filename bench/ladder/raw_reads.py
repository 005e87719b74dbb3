"""Ways to read blocks of segment files into memory, a few in flight in each of several threads."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.nixl_agent import NixlFailure, _load
from bench.child import BaselineError
from bench.content import Bytes
from bench.ladder.blocks import Concurrency, even_parts
from storage_server.store.beside import FilesBeside
from storage_server.store.disk import Disk
from storage_server.store.extents import Extent

TRANSFERS_IN_FLIGHT = 2
START_TIMEOUT_S = 60.0
OPEN_FILES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Block:
    """A stored object: where it lies, and its number among the seeded objects."""

    path: Path
    extent: Extent
    number: int


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks of one size, in the order they lie on disk, and the memory they go to, one after the other.

    `descriptors` are open files by path.
    """

    blocks: Sequence[Block]
    block_bytes: int
    target: Bytes
    descriptors: dict[Path, int]
    concurrency: Concurrency

    def view(self, index: int) -> memoryview:
        """Where block `index` goes."""
        return self.target.data[index * self.block_bytes : (index + 1) * self.block_bytes]

    def parts(self) -> list[range]:
        """Which blocks each thread reads."""
        return even_parts(len(self.blocks), self.concurrency.threads)


ReadAll = Callable[[], float]
"""Read every block; the seconds it took."""


@contextmanager
def preadv_reads(job: Job) -> Iterator[ReadAll]:
    """One thread makes one call at a time, which fills as many blocks as may be in flight where they are neighbours."""

    def read(part: range) -> None:
        for run in _neighbours(job, part):
            first = job.blocks[run[0]]
            fd = job.descriptors[first.path]
            nbytes = os.preadv(fd, [job.view(index) for index in run], first.extent.offset)
            if nbytes != len(run) * job.block_bytes:
                raise BaselineError(f"preadv read {nbytes} bytes of {len(run)} blocks of {job.block_bytes}")

    with _threads(job, read) as run_all:
        yield run_all


@contextmanager
def proved_reads(job: Job, directory: Path) -> Iterator[ReadAll]:
    """The store's own reads, block by block, checksums proved."""
    files = FilesBeside(directory, OPEN_FILES_MAX, Disk())
    names = {block.extent.file_id for block in job.blocks}
    if not files.pin(names):
        raise BaselineError("a segment file is gone")

    def read(part: range) -> None:
        for index in part:
            files.read_into(job.blocks[index].extent, 0, job.view(index))

    try:
        with _threads(job, read) as run_all:
            yield run_all
    finally:
        files.unpin(names)
        files.close()


@contextmanager
def uring_reads(job: Job) -> Iterator[ReadAll]:
    """NIXL's POSIX backend with io_uring: each thread has an agent of its own and two transfers in flight, which
    together have as many blocks as may be. Transfers are prepared once, as a server would for known files.
    """
    agents = [_PosixAgent(job, part) for part in job.parts()]
    try:
        by_part = dict(zip(job.parts(), agents, strict=True))
        with _threads(job, lambda part: by_part[part].read()) as run_all:
            yield run_all
    finally:
        for agent in agents:
            agent.close()


class _PosixAgent:
    """NIXL with files on one side and memory on the other. Raises NixlFailure."""

    def __init__(self, job: Job, part: range) -> None:
        module = _load()
        name = str(uuid.uuid4())
        batch = max(1, job.concurrency.in_flight_each // TRANSFERS_IN_FLIGHT)
        self._transfers: list[Any] = []
        try:
            self._agent = module.nixl_agent(name, module.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend("POSIX", {"use_uring": "true"})
            memory = [(job.target.ctypes.data, job.target.nbytes, 0, "")]
            files = [(0, os.fstat(fd).st_size, fd, "") for fd in job.descriptors.values()]
            self._registered = [
                self._agent.register_memory(memory, "DRAM", backends=["POSIX"]),
                self._agent.register_memory(files, "FILE", backends=["POSIX"]),
            ]
            for first in range(part.start, part.stop, batch):
                local, remote = _rows(job, range(first, min(first + batch, part.stop)))
                here = self._agent.get_xfer_descs(local, "DRAM")
                there = self._agent.get_xfer_descs(remote, "FILE")
                self._transfers.append(self._agent.initialize_xfer("READ", here, there, name, backends=["POSIX"]))
        except Exception as error:
            raise NixlFailure(f"NIXL's POSIX backend with io_uring: {error}") from error

    def read(self) -> None:
        """Post every transfer, a few in flight."""
        in_flight: deque[Any] = deque()
        for transfer in self._transfers:
            if len(in_flight) >= TRANSFERS_IN_FLIGHT:
                self._finish(in_flight.popleft())
            self._agent.transfer(transfer)
            in_flight.append(transfer)
        while in_flight:
            self._finish(in_flight.popleft())

    def close(self) -> None:
        """Give everything back."""
        for transfer in self._transfers:
            self._agent.release_xfer_handle(transfer)
        for registered in self._registered:
            self._agent.deregister_memory(registered, backends=["POSIX"])
        del self._agent

    def _finish(self, transfer: Any) -> None:
        while (status := self._agent.check_xfer_state(transfer)) == "PROC":
            time.sleep(0)  # other threads' turn
        if status != "DONE":
            raise NixlFailure(f"NIXL reports {status}")


def _rows(job: Job, part: range) -> tuple[np.ndarray, np.ndarray]:
    """NIXL's descriptors of memory and of files: address or offset, length, device or file."""
    local = [(job.target.ctypes.data + index * job.block_bytes, job.block_bytes, 0) for index in part]
    blocks = [job.blocks[index] for index in part]
    remote = [(block.extent.offset, job.block_bytes, job.descriptors[block.path]) for block in blocks]
    return np.array(local, dtype=np.uint64), np.array(remote, dtype=np.uint64)


def _neighbours(job: Job, part: range) -> Iterator[range]:
    """Runs of blocks that lie one after the other in a file, none longer than what may be in flight."""
    first = part.start
    for index in part:
        is_last = index + 1 == part.stop
        if is_last or index + 1 - first == job.concurrency.in_flight_each or not _adjoin(job, index):
            yield range(first, index + 1)
            first = index + 1


def _adjoin(job: Job, index: int) -> bool:
    here, there = job.blocks[index], job.blocks[index + 1]
    return here.path == there.path and there.extent.offset == here.extent.offset + job.block_bytes


@contextmanager
def _threads(job: Job, read: Callable[[range], None]) -> Iterator[ReadAll]:
    """Run `read` for every part at once; the clock runs from the first thread's start to the last one's end."""
    parts = job.parts()
    ready = threading.Barrier(len(parts), timeout=START_TIMEOUT_S)

    def work(part: range) -> tuple[float, float]:
        ready.wait()
        started_s = time.monotonic()
        read(part)
        return started_s, time.monotonic()

    with ThreadPoolExecutor(len(parts)) as pool:

        def run_all() -> float:
            times = list(pool.map(work, parts))
            return max(ended_s for _, ended_s in times) - min(started_s for started_s, _ in times)

        yield run_all
