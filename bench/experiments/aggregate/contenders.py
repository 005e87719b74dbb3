"""The contenders of one phase: raw limits of the machine, our fetches, and running peers; and the rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.beds.baselines import ColdRead, MemoryCopy, raw_nixl_writes, raw_socket
from bench.beds.kv_peers.running import PeerFailed, PeerRun, Peers
from bench.experiments.aggregate.ratios import (
    HTTP_PARTS,
    HTTP_PARTS_NAME,
    MEMCPY,
    RAW_COLD_READ,
    RAW_NIXL_WRITE,
    RAW_NIXL_WRITE_LAYER,
    RAW_SOCKET,
    Measurement,
    Sample,
)
from calibration.chunks import Chunks, StoredFiles, fetch_checked, register_as
from calibration.content import Bytes
from calibration.samples import State, interleaved
from calibration.servers import LocalServer
from descriptors.descriptor import Delivery
from nixl_client.client import ObjectCacheClient, Transport
from storage_server.settings import StorageSettings


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
    """A filled server in one state, and the buffer to fill. `files` are the store's, in the cold state."""

    state: State
    server: LocalServer
    chunks: Mapping[int, Chunks]
    buffer: Bytes
    files: StoredFiles

    def fetch(self, client: ObjectCacheClient, chunks: Chunks, delivery: Delivery) -> Sample:
        """One request for everything; every byte is compared."""
        self.files.drop()
        found = fetch_checked(client, chunks, self.buffer, delivery)
        return Sample(found.ended_s, found.layers_s[0] if delivery is Delivery.LAYER_MAJOR else None)


def raw_limits(bed: Bed, memcpy_bytes: int, transports: Sequence[Transport], stack: ExitStack) -> list[Contender]:
    """What the machine can do; what they hold is given back by `stack`."""
    storage = StorageSettings(data_dir=Path())
    largest = max(bed.chunks.values(), key=lambda chunks: chunks.layer_bytes)
    grain = next(iter(bed.chunks)) if len(bed.chunks) == 1 else None
    buffer = bed.buffer[: largest.payload_bytes]
    found = []

    def add(name: str, nbytes: int, run: Callable[[], float], note: str) -> None:
        found.append(Contender(name, grain, nbytes, lambda: Sample(run()), note))

    if bed.state is State.COLD:
        read = ColdRead(bed.files.files)

        def read_cold() -> float:
            bed.files.drop()
            return read.run()

        add(RAW_COLD_READ, read.nbytes, read_cold, "direct reads of the store's files, four at a time")
    if bed.state in (State.PAGE_CACHE, State.DRAM):
        copy = MemoryCopy(memcpy_bytes)
        add(MEMCPY, copy.nbytes, copy.run, "one thread")
        if Transport.HTTP in transports:
            fill = stack.enter_context(raw_socket(buffer, storage.window_bytes))
            add(RAW_SOCKET, buffer.nbytes, fill, "loopback TCP")
    if Transport.UCX in transports and bed.state is not State.COLD:
        writes = stack.enter_context(raw_nixl_writes(buffer, max(storage.window_bytes, largest.layer_bytes)))
        for name, write_bytes in (
            (RAW_NIXL_WRITE, min(storage.aggregation_bytes, largest.layer_bytes)),
            (RAW_NIXL_WRITE_LAYER, largest.layer_bytes),
        ):
            add(name, buffer.nbytes, partial(writes, write_bytes), f"writes of {write_bytes} bytes")
    return found


def fetches_in_parts(bed: Bed, client: ObjectCacheClient) -> Contender:
    """Our own over several connections of http, of the finest chunks."""
    grain, chunks = next(iter(bed.chunks.items()))
    run = partial(bed.fetch, client, chunks, Delivery.LAYER_MAJOR)
    name, note = f"{HTTP_PARTS_NAME}_layer_major", f"over {HTTP_PARTS} connections"
    return Contender(name, grain, chunks.payload_bytes, run, note)


def fetches(bed: Bed, client: ObjectCacheClient, transport: Transport) -> list[Contender]:
    """Our own, for each size of chunks; both orders but for the cold state. Registers the buffer."""
    register_as(client, bed.buffer, transport)
    deliveries = [Delivery.LAYER_MAJOR] + ([] if bed.state is State.COLD else [Delivery.CHUNK_MAJOR])
    return [
        Contender(
            f"{transport.value}_{delivery.value.replace('-', '_')}",
            grain,
            chunks.payload_bytes,
            partial(bed.fetch, client, chunks, delivery),
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
    """One round is not counted. A peer that fails loses all its samples. Raises VerificationError for wrong bytes of
    ours.
    """
    failed: set[int] = set()
    samples: dict[int, list[Sample]] = {index: [] for index in range(len(contenders))}
    for round_index, (index, contender) in interleaved(list(enumerate(contenders)), runs, state.value):
        if index in failed:
            continue
        try:
            sample = contender.run()
        except PeerFailed as error:
            assert contender.peer is not None
            peers.drop(contender.peer, str(error))
            failed.add(index)
            samples[index].clear()
            continue
        if round_index > 0:
            samples[index].append(sample)
    return [
        Measurement(each.name, state, each.chunk_tokens, each.nbytes, tuple(samples[index]), each.note)
        for index, each in enumerate(contenders)
    ]
