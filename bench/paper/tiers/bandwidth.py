"""CASCADE's Table IV and Figure 2: what each tier gives on this machine. Bytes of ours and of stores are compared.

A chunk that a server has never seen comes from the home of the chunks, or from what another server has left in remote
DRAM.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.beds.baselines import MemoryCopy
from bench.beds.kv_peers.install import MOONCAKE
from bench.beds.kv_peers.running import borrowed_mooncake, running_owner
from bench.beds.memory import huge_page_memory
from bench.beds.ours import Servers, home_table, target_of
from bench.beds.processes import BaselineError
from bench.core.rounds import sampled, spreads
from bench.core.show import Json
from bench.paper.kv_stores.adapter import Prompt, Replay
from bench.paper.kv_stores.running import SAID, RunningStore, StoreName, start
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from nixl_client.client import Transport
from objectcache.calibration.chunks import (
    Chunks,
    StoredFiles,
    drop_pages,
    fetch_checked,
    make_chunks,
    store_chunks,
    warm,
)
from objectcache.calibration.content import Bytes, VerificationError
from objectcache.calibration.servers import BUCKET, LocalServer, running_server

ADMITTED_WAIT_S = 60.0
LANDING_BYTES_MIN = 256 << 20
ANOTHER = "ours, in front of a second ObjectCache, cold, over shm"
DIRECTORY = "ours, a shared directory as home, its files in the page cache, cold, over shm"
REMOTE = "ours, remote DRAM: Mooncake Store over TCP on loopback, over shm"

Ways = dict[str, Callable[[], float]]


class HomeBed:
    """Servers before homes, each with an empty cache; every sample has chunks of its own, since caches keep what they
    have seen. `stack` ends the servers.
    """

    def __init__(
        self,
        stack: ExitStack,
        parent: Path | None,
        block_count: int,
        layout: ChunkLayout,
        runs: int,
        seed: int,
        settle_s: float,
    ) -> None:
        self._servers = Servers(stack, parent, "homes")
        self._count, self._layout, self._settle_s = block_count, layout, settle_s
        self._nbytes = block_count * layout.chunk_bytes
        self._room_bytes = (runs + 2) * 2 * self._nbytes
        self._seeds = itertools.count(seed + 1_000)
        self._home = target_of(self._servers.serve())

    def ways(self) -> tuple[Ways, dict[str, str]]:
        """The seconds of a fetch, for each home; and what is not here, with the reason."""
        ways = {ANOTHER: self._cold(self._before_home(), self._before_home())}
        shared = self._servers.folder / "shared"
        shared.mkdir()
        one, other = (self._front(f'[upstream]\nendpoint = "file://{shared}"\n') for _ in range(2))
        one.make_bucket(BUCKET)
        ways[DIRECTORY] = self._cold(one, other)
        try:
            ways[REMOTE] = self._remote()
        except BaselineError as error:
            return ways, {REMOTE: str(error)}
        return ways, {}

    def _before_home(self, further: str = "", python_path: Sequence[Path] = ()) -> LocalServer:
        """With landing memory for all chunks of two samples, as one bucket may have half of it."""
        landing_bytes = max(LANDING_BYTES_MIN, 4 * self._nbytes)
        internals = f"[internals.upstream]\nlanding_bytes = {landing_bytes}\n"
        return self._front(home_table(self._home, internals + further), python_path)

    def _front(self, text: str, python_path: Sequence[Path] = ()) -> LocalServer:
        return self._servers.front(text, 0, self._room_bytes + (64 << 20), python_path)

    def _cold(self, writer: LocalServer, reader: LocalServer) -> Callable[[], float]:
        """What `writer` has just put comes to `reader`."""
        fetched = self._reader(reader)

        def run() -> float:
            chunks = self._chunks()
            store_chunks(writer, chunks)
            time.sleep(self._settle_s)
            return fetched(chunks)

        return run

    def _remote(self) -> Callable[[], float]:
        """What one server has fetched from home comes to another one. Raises BaselineError."""
        folder = self._servers.folder
        borrowed = [borrowed_mooncake(folder)]
        owner = running_owner(MOONCAKE.folder / "bin", self._room_bytes, folder)
        master, _ = self._servers.stack.enter_context(owner)
        further = f'[upstream.remote_dram]\nendpoint = "mooncake://{master}"\n'
        one, other = (self._before_home(further, borrowed) for _ in range(2))
        writer = self._before_home()
        filled, fetched = self._reader(one), self._reader(other)
        for server in (one, other):
            _awaited(server, "joined_stores", 1)

        def run() -> float:
            chunks = self._chunks()
            store_chunks(writer, chunks)
            before = metric(one, "admitted_bytes_total"), metric(other, "hit_chunks_total")
            filled(chunks)
            _awaited(one, "admitted_bytes_total", before[0] + self._nbytes)
            time.sleep(self._settle_s)
            seconds = fetched(chunks)
            if metric(other, "hit_chunks_total") - before[1] != self._count:
                raise VerificationError("not every chunk came from remote DRAM")
            return seconds

        return run

    def _reader(self, server: LocalServer) -> Callable[[Chunks], float]:
        client = self._servers.stack.enter_context(server.client(Transport.SHM))
        buffer = client.allocate_buffer(self._nbytes)
        return lambda chunks: fetch_checked(client, chunks, buffer, Delivery.LAYER_MAJOR).ended_s

    def _chunks(self) -> Chunks:
        return make_chunks(self._count, self._layout, next(self._seeds))


def metric(server: LocalServer, name: str) -> float:
    """One of remote DRAM's metrics. Raises BaselineError."""
    with server.client(Transport.HTTP) as client:
        text = client.http.request("GET", "/_objectcache/metrics").body.decode()
    for line in text.splitlines():
        if line.startswith(f"objectcache_remote_dram_{name} "):
            return float(line.split()[1])
    raise BaselineError(f"the server has no metric {name}")


def _awaited(server: LocalServer, name: str, wanted: float) -> None:
    deadline_s = time.monotonic() + ADMITTED_WAIT_S
    while metric(server, name) < wanted:
        if time.monotonic() > deadline_s:
            raise BaselineError(f"remote DRAM: {name} did not become {wanted:.0f}: it holds no such chunks")
        time.sleep(0.1)


LAYOUT = ChunkLayout(32, 16, 64 * KIB)
MEMORY_FOLDER = Path("/dev/shm")
READ_BYTES = MIB
MEMORY_COPY = "memory copy, one thread"
WITHOUT = {
    "GPU memory, NVLink, PCIe": "no GPU here",
    "remote DRAM by MPI": "one machine; several storage servers come with the cluster",
    "Lustre": "no parallel file system here; Table I compares the two layouts on this one",
}
STORES = (StoreName.FILES, StoreName.REDIS, StoreName.MOONCAKE)
PER_BLOCK = {
    StoreName.FILES: "files, one per block, page cache",
    StoreName.REDIS: "Redis on loopback, block by block",
    StoreName.MOONCAKE: "pooled DRAM: Mooncake Store, TCP on loopback, block by block",
}


def measure_bandwidth(parent: Path | None, block_count: int, runs: int, seed: int, settle_s: float) -> Json:
    """Bytes per second of reading so many blocks of 2 MiB. `settle_s` passes until the files of what has come are
    written, since writing goes on behind a fetch. Raises VerificationError.
    """
    nbytes = block_count * LAYOUT.chunk_bytes
    absent = dict(WITHOUT)
    copy = MemoryCopy(nbytes)
    ways: dict[str, Callable[[], float]] = {MEMORY_COPY: copy.run}
    with ExitStack() as stack:
        buffer = huge_page_memory(nbytes)
        if MEMORY_FOLDER.is_dir():
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-", dir=MEMORY_FOLDER)))
            source = place / "blocks"
            source.write_bytes(np.random.default_rng(seed).bytes(nbytes))
            ways["/dev/shm, mapped"] = lambda: _mapped(source, buffer)
            ways["/dev/shm, read calls"] = lambda: _read_calls(source, buffer)
        chunks = make_chunks(block_count, LAYOUT, seed)
        for title, dram_bytes, is_cold in (
            ("ours, DRAM tier over shm", 2 * nbytes, False),
            ("ours, page cache over shm", 0, False),
            ("ours, aggregated files, cold, over shm", 0, True),
        ):
            ways[title] = _ours(stack, parent, chunks, dram_bytes, is_cold=is_cold)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-tiers-", dir=parent)))
        ways["files, one per block, cold, one thread"] = _cold_files(folder, chunks)
        homes, not_here = HomeBed(stack, parent, block_count, LAYOUT, runs, seed, settle_s).ways()
        ways |= homes
        absent |= not_here
        for chosen in STORES:
            try:
                store = start(chosen, LAYOUT.chunk_bytes, 2 * nbytes, parent, stack)
            except BaselineError as error:
                absent[PER_BLOCK[chosen]] = str(error)
                continue
            ids = [f"{seed}-{index}" for index in range(block_count)]
            work = Replay([Prompt(ids), Prompt(ids)], LAYOUT.chunk_bytes)
            ways[PER_BLOCK[chosen]] = partial(_got_again, store, work)
        tasks = {name: lambda _, run=run: run() for name, run in ways.items()}
        taken = sampled(tasks, runs, "tiers")
    moved = {name: copy.nbytes if name == MEMORY_COPY else nbytes for name in taken}
    rates = {name: [moved[name] / seconds for seconds in times_s] for name, times_s in taken.items()}
    tiers = {name: {"bytes_per_s": found} for name, found in spreads(rates).items()}
    return {"block_bytes": LAYOUT.chunk_bytes, "block_count": block_count, "tiers": tiers, "absent": absent}


def _ours(
    stack: ExitStack, parent: Path | None, chunks: Chunks, dram_bytes: int, *, is_cold: bool
) -> Callable[[], float]:
    """One layer-major descriptor for all blocks."""
    server = stack.enter_context(running_server(parent, ["--dram-bytes", str(dram_bytes)]))
    store_chunks(server, chunks)
    client = stack.enter_context(server.client(Transport.SHM))
    buffer = client.allocate_buffer(chunks.payload_bytes)
    if dram_bytes:
        warm(server, client, [chunks], buffer)
    files = StoredFiles(server.data_files() if is_cold else [])

    def run() -> float:
        files.drop()
        return fetch_checked(client, chunks, buffer, Delivery.LAYER_MAJOR).ended_s

    return run


def _got_again(store: RunningStore, work: Replay) -> float:
    """The seconds that the second prompt takes, whose blocks the first one put."""
    replayed = store.replay(work)
    if replayed.problem is not None:
        raise BaselineError(f"{SAID[store.name]}: {replayed.problem}")
    return replayed.answers[1].get_s


def _cold_files(folder: Path, chunks: Chunks) -> Callable[[], float]:
    paths = [folder / str(index) for index in range(len(chunks.keys))]
    for index, path in enumerate(paths):
        path.write_bytes(chunks.content.chunk(index).tobytes())

    def run() -> float:
        for path in paths:
            with path.open("rb") as file:
                drop_pages(file.fileno())
        started_s = time.monotonic()
        got: Sequence[Bytes] = [np.fromfile(path, dtype=np.uint8) for path in paths]
        seconds = time.monotonic() - started_s
        if not all(np.array_equal(one, chunks.content.chunk(index)) for index, one in enumerate(got)):
            raise VerificationError("a file has other bytes than were written")
        return seconds

    return run


def _mapped(source: Path, buffer: Bytes) -> float:
    started_s = time.monotonic()
    np.copyto(buffer, np.memmap(source, dtype=np.uint8, mode="r"))
    return time.monotonic() - started_s


def _read_calls(source: Path, buffer: Bytes) -> float:
    view = buffer.data
    started_s = time.monotonic()
    fd = os.open(source, os.O_RDONLY)
    try:
        for start_at in range(0, len(view), READ_BYTES):
            os.preadv(fd, [view[start_at : start_at + READ_BYTES]], start_at)
    finally:
        os.close(fd)
    return time.monotonic() - started_s
