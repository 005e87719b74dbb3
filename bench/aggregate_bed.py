"""What the contenders of one phase share, the contenders themselves, and the rounds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.baselines import ColdRead, MemoryCopy, RawNixlWrites, RawSocket
from bench.content import Bytes, Content, VerificationError, verify_payload
from bench.kv_peers.running import PeerFailed, PeerRun, Peers
from bench.ladder.page_cache import drop, resident_share
from bench.progress import progress_bar
from bench.ratios import (
    HTTP_PARTS,
    HTTP_PARTS_NAME,
    MEMCPY,
    RAW_COLD_READ,
    RAW_NIXL_WRITE,
    RAW_NIXL_WRITE_LAYER,
    RAW_SOCKET,
)
from bench.samples import Measurement, Sample, State
from bench.server import BenchServer
from descriptors.descriptor import Delivery
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport
from storage_server.settings import StorageSettings

FETCH_TIMEOUT_S = 300.0
WARMING_FETCHES_MAX = 8
SETTLE_S = 0.5
SETTLE_POLLS_MAX = 240


@dataclass(frozen=True, slots=True)
class Chunks:
    """Stored chunks of one size: their prefix keys and bytes."""

    keys: Sequence[str]
    content: Content

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.content.layout.payload_bytes(len(self.keys))

    @property
    def layer_bytes(self) -> int:
        """N*S."""
        return self.content.layout.layer_bytes(len(self.keys))


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing to measure: `run` takes and checks one sample. `peer` is set for other software's."""

    name: str
    chunk_tokens: int | None
    nbytes: int
    run: Callable[[], Sample]
    note: str = ""
    peer: PeerRun | None = None


@dataclass(frozen=True, slots=True)
class Bed:
    """A filled server in one state, and the buffer to fill. `files` are the store's, for the cold state.

    `shares` collects how much of them was still in the page cache before each cold run.
    """

    state: State
    server: BenchServer
    storage: StorageSettings
    chunks: Mapping[int, Chunks]
    buffer: Bytes
    files: Sequence[Path] = ()
    shares: list[float] = field(default_factory=list)

    def make_cold(self) -> None:
        """Let the kernel forget the store's pages, where this is the cold state."""
        nbytes, left = 0, 0.0
        for file in self.files:
            with file.open("rb") as opened:
                drop(opened.fileno())
                size = file.stat().st_size
                nbytes += size
                left += size * resident_share(opened.fileno())
        if nbytes:
            self.shares.append(left / nbytes)


def warm(bed: Bed, client: ObjectCacheClient) -> int:
    """Fetch everything, twice and then until the server takes no more into memory; the memory it has then."""
    before, seen = -1, 0
    for fetched in range(WARMING_FETCHES_MAX):
        for chunks in bed.chunks.values():
            with client.fetch(chunks.keys, chunks.content.layout, bed.buffer, delivery=Delivery.LAYER_MAJOR) as fetch:
                fetch.wait(FETCH_TIMEOUT_S)
        seen = _settled_rss_bytes(bed.server.pid)
        if fetched >= 2 and seen - before < bed.buffer.nbytes // 64:
            break
        before = seen
    return seen


def _settled_rss_bytes(pid: int) -> int:
    """Resident memory of a process once it no longer grows."""
    seen = _rss_bytes(pid)
    for _ in range(SETTLE_POLLS_MAX):
        time.sleep(SETTLE_S)
        now = _rss_bytes(pid)
        if now - seen < MIB:
            break
        seen = now
    return seen


def _rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def raw_limits(bed: Bed, memcpy_bytes: int, transports: Sequence[Transport], stack: ExitStack) -> list[Contender]:
    """What the machine can do; what they hold is given back by `stack`."""
    largest = max(bed.chunks.values(), key=lambda chunks: chunks.layer_bytes)
    grain = next(iter(bed.chunks)) if len(bed.chunks) == 1 else None
    buffer = bed.buffer[: largest.payload_bytes]
    found = []
    if bed.state is State.COLD:
        read = ColdRead(bed.files)

        def read_cold() -> Sample:
            bed.make_cold()
            return Sample(read.run())

        found.append(
            Contender(RAW_COLD_READ, grain, read.nbytes, read_cold, "direct reads of the store's files, four at a time")
        )
    if bed.state in (State.PAGE_CACHE, State.DRAM):
        copy = MemoryCopy(memcpy_bytes)
        found.append(Contender(MEMCPY, grain, copy.nbytes, lambda: Sample(copy.run()), "one thread"))
        if Transport.HTTP in transports:
            raw = stack.enter_context(RawSocket(buffer, bed.storage.window_bytes))
            found.append(Contender(RAW_SOCKET, grain, buffer.nbytes, lambda: Sample(raw.run()), "loopback TCP"))
    if Transport.UCX in transports and bed.state is not State.COLD:
        writes = stack.enter_context(RawNixlWrites(buffer, max(bed.storage.window_bytes, largest.layer_bytes)))

        def contender(name: str, write_bytes: int) -> Contender:
            note = f"writes of {write_bytes} bytes"
            return Contender(name, grain, buffer.nbytes, lambda: Sample(writes.run(write_bytes)), note)

        found.append(contender(RAW_NIXL_WRITE, min(bed.storage.aggregation_bytes, largest.layer_bytes)))
        found.append(contender(RAW_NIXL_WRITE_LAYER, largest.layer_bytes))
    return found


def fetches_in_parts(bed: Bed, client: ObjectCacheClient) -> Contender:
    """Our own over several connections of http, of the finest chunks."""
    grain, chunks = next(iter(bed.chunks.items()))
    name = f"{HTTP_PARTS_NAME}_layer_major"
    note = f"over {HTTP_PARTS} connections"
    return Contender(name, grain, chunks.payload_bytes, _fetcher(bed, client, chunks, Delivery.LAYER_MAJOR), note)


def fetches(bed: Bed, client: ObjectCacheClient, transport: Transport) -> list[Contender]:
    """Our own, for each size of chunks; both orders but for the cold state. Registers the buffer."""
    used = client.register_buffer(bed.buffer)
    if used is not transport:
        raise VerificationError(f"{used.value} took the place of {transport.value}")
    deliveries = [Delivery.LAYER_MAJOR] + ([] if bed.state is State.COLD else [Delivery.CHUNK_MAJOR])
    return [
        Contender(
            f"{transport.value}_{delivery.value.replace('-', '_')}",
            grain,
            chunks.payload_bytes,
            _fetcher(bed, client, chunks, delivery),
        )
        for grain, chunks in bed.chunks.items()
        for delivery in deliveries
    ]


def peer_contenders(peers: Peers, grain: int) -> list[Contender]:
    """Running peers, on the chunks of that size."""

    def contender(peer: PeerRun) -> Contender:
        def run() -> Sample:
            outcome = peer.run()
            return Sample(outcome.duration_s, outcome.first_layer_s)

        capability = peer.capability
        return Contender(capability.name, grain, capability.nbytes, run, capability.note, peer)

    return [contender(peer) for peer in peers.runs]


def run_rounds(state: State, contenders: Sequence[Contender], peers: Peers, runs: int) -> list[Measurement]:
    """Each round measures everything once, so that slow minutes of the machine hit all alike; the first is not counted.

    A peer that fails loses all its samples. Raises VerificationError for wrong bytes of ours.
    """
    left = list(contenders)
    samples: dict[int, list[Sample]] = {index: [] for index in range(len(contenders))}
    with progress_bar((runs + 1) * len(contenders), state.value) as advance:
        for round_index in range(runs + 1):
            for index, contender in enumerate(contenders):
                advance(1)
                if contender not in left:
                    continue
                try:
                    sample = contender.run()
                except PeerFailed as error:
                    assert contender.peer is not None
                    peers.drop(contender.peer, str(error))
                    left.remove(contender)
                    samples[index].clear()
                    continue
                if round_index > 0:
                    samples[index].append(sample)
    return [
        Measurement(each.name, state, each.chunk_tokens, each.nbytes, tuple(samples[index]), each.note)
        for index, each in enumerate(contenders)
    ]


def _fetcher(bed: Bed, client: ObjectCacheClient, chunks: Chunks, delivery: Delivery) -> Callable[[], Sample]:
    buffer = bed.buffer[: chunks.payload_bytes]

    def run() -> Sample:
        buffer.fill(0)
        bed.make_cold()
        started_s = time.monotonic()
        with client.fetch(chunks.keys, chunks.content.layout, bed.buffer, delivery=delivery) as fetch:
            first_layer = fetch.wait_layer(0, FETCH_TIMEOUT_S)
            result = fetch.wait(FETCH_TIMEOUT_S)
            duration_s = time.monotonic() - started_s
        if result.mode.value != delivery.value or result.transferred_bytes != buffer.nbytes:
            raise VerificationError(f"{result} came of {delivery.value}, {buffer.nbytes} bytes")
        verify_payload(buffer, chunks.content, delivery)
        is_layerwise = delivery is Delivery.LAYER_MAJOR
        return Sample(duration_s, first_layer.ready_at_s - started_s if is_layerwise else None)

    return run
