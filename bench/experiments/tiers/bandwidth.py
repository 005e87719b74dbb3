"""CASCADE's Table IV and Figure 2: what each tier gives on this machine. Bytes of ours and of stores are compared."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.beds.baselines import MemoryCopy
from bench.beds.kv_stores.adapter import Prompt, Replay
from bench.beds.kv_stores.running import SAID, RunningStore, StoreName, start
from bench.beds.memory import huge_page_memory
from bench.beds.processes import BaselineError
from bench.core.show import Json
from bench.experiments.tiers.homes import HomeBed
from calibration.chunks import Chunks, StoredFiles, drop_pages, fetch_checked, make_chunks, store_chunks, warm
from calibration.content import Bytes, VerificationError
from calibration.samples import interleaved, spread
from calibration.servers import running_server
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from nixl_client.client import Transport

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


def measure_bandwidth(parent: Path | None, block_count: int, runs: int, seed: int) -> Json:
    """Bytes per second of reading so many blocks of 2 MiB. Raises VerificationError."""
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
        homes, not_here = HomeBed(stack, parent, block_count, LAYOUT, runs, seed).ways()
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
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for round_index, name in interleaved(list(ways), runs, "tiers"):
            seconds = ways[name]()
            if round_index > 0:
                taken[name].append((copy.nbytes if name == MEMORY_COPY else nbytes) / seconds)
    tiers = {name: {"bytes_per_s": spread(rates)} for name, rates in taken.items()}
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
