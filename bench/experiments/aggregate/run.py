"""Settings of `bench aggregate`, the contenders of its phases and their rounds, and its command.

    N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes

The same payload is stored in chunks of several sizes (more tokens, as many more bytes, fewer chunks) and fetched in
several states, each a phase with a server of its own, whose rounds are interleaved. The contenders are raw limits of
the machine, our fetches, and running peers. The buffer is cleared before every run and every fetched byte compared
after it, both untimed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.beds.baselines import ColdRead, MemoryCopy, raw_nixl_writes, raw_socket
from bench.beds.kv_peers.running import S3_PEERS, PeerName, PeerRun, Peers, put_chunks
from bench.beds.kv_peers.work import Work
from bench.beds.ours import target_of
from bench.beds.processes import BaselineError
from bench.beds.s3_servers import running_rgw
from bench.core import options
from bench.core.experiment import Experiment, need_nixl, plain, published
from bench.core.options import ascending, each, number, some_of
from bench.core.rounds import sampled
from bench.core.show import Json
from bench.experiments.aggregate.ratios import (
    DIRECT,
    HTTP_PARTS,
    HTTP_PARTS_NAME,
    MAPPED,
    MEMCPY,
    PHASES,
    RAW_COLD_READ,
    RAW_NIXL_WRITE,
    RAW_NIXL_WRITE_LAYER,
    RAW_SOCKET,
    Measurement,
    Sample,
    judged,
    plot,
    show,
)
from descriptors.descriptor import CHUNK_TOKENS_MAX, Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import GIB, KIB, MIB, format_bytes
from nixl_client.client import Client, Transport
from objectcache.calibration.chunks import (
    Chunks,
    StoredFiles,
    fetch_checked,
    make_chunks,
    register_as,
    store_chunks,
    warm,
)
from objectcache.calibration.content import Bytes, VerificationError
from objectcache.calibration.samples import State
from objectcache.calibration.servers import LocalServer, running_server
from storage_server.settings import StorageSettings

FIRST_LAYERS = "objectcache_delivery_first_layer_seconds_count"
FIRST_LAYER_PHASES = "objectcache_delivery_first_layer_phase_seconds_total"


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

    def fetch(self, client: Client, chunks: Chunks, delivery: Delivery) -> Sample:
        """One request for everything; every byte is compared."""
        self.files.drop()
        before = self._phases_s(client)
        found = fetch_checked(client, chunks, self.buffer, delivery)
        if delivery is not Delivery.LAYER_MAJOR:
            return Sample(found.ended_s)
        after = self._phases_s(client)
        is_one = after[FIRST_LAYERS] - before[FIRST_LAYERS] == 1  # a fetch over several connections is several requests
        phases_s = {phase: after[phase] - before[phase] for phase in PHASES[:-1]} if is_one else {}
        return Sample(found.ended_s, found.layers_s[0], phases_s)

    @staticmethod
    def _phases_s(client: Client) -> dict[str, float]:
        """The seconds of all first layers so far in each phase, and how many first layers there were."""
        text = client.http.request("GET", "/_objectcache/metrics").body.decode()
        found: defaultdict[str, float] = defaultdict(float)
        for sample in chain.from_iterable(family.samples for family in text_string_to_metric_families(text)):
            if sample.name == FIRST_LAYER_PHASES:
                found[sample.labels["phase"]] += sample.value
            elif sample.name == FIRST_LAYERS:
                found[FIRST_LAYERS] += sample.value
        return found


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


def fetches_in_parts(bed: Bed, client: Client) -> Contender:
    """Our own over several connections of http, of the finest chunks."""
    grain, chunks = next(iter(bed.chunks.items()))
    run = partial(bed.fetch, client, chunks, Delivery.LAYER_MAJOR)
    name, note = f"{HTTP_PARTS_NAME}_layer_major", f"over {HTTP_PARTS} connections"
    return Contender(name, grain, chunks.payload_bytes, run, note)


def fetches(bed: Bed, client: Client, transport: Transport) -> list[Contender]:
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

    def failed(index: int, error: BaselineError) -> None:
        peer = contenders[index].peer
        if peer is None:
            raise error
        peers.drop(peer, str(error))

    ways = {index: lambda _, run=each.run: run() for index, each in enumerate(contenders)}
    samples = sampled(ways, runs, state.value, failed=failed)
    return [
        Measurement(each.name, state, each.chunk_tokens, each.nbytes, tuple(samples.get(index, ())), each.note)
        for index, each in enumerate(contenders)
    ]


JOINT_BYTES_MAX = 5 * GIB // 4
"""Up to this payload all sizes of chunks are in one server and in the same rounds."""
DRAM_SPARE_BYTES = 256 * MIB
IN_DRAM = (State.DRAM, State.TCP)
TRANSPORTS = (Transport.SHM, Transport.UCX, Transport.HTTP)
GRAINS_HELP = "sizes of chunks, ascending, each a multiple of the first"
SLICES_HELP = "slices for peers that ask for one at a time"
REMARKS = {
    State.PAGE_CACHE: "stored moments ago, the server's DRAM tier off",
    State.DRAM: "fetched until all of it was in the server's DRAM tier",
    State.TCP: "as dram, with UCX_TLS=tcp for server and client",
    State.COLD: "the DRAM tier off; before each run every file synced and dropped (POSIX_FADV_DONTNEED)",
}


def _peers_of(text: str) -> tuple[PeerName, ...]:
    return () if text == "none" else some_of(tuple(PeerName))(text)


def _grains(text: str) -> tuple[int, ...]:
    grains = ascending(each(number(1, CHUNK_TOKENS_MAX)))(text)
    if any(grain % grains[0] for grain in grains):
        raise argparse.ArgumentTypeError("must be multiples of the first")
    return grains


@dataclass(frozen=True, slots=True)
class AggregateSettings:
    """What to measure. `chunk_count` and `per_layer_chunk_bytes` are those of the first of `grains` (G, ascending).

    `peers` run in the states DRAM and TCP on chunks of the first size; Ceph RGW is one more S3 server if `rgw`;
    those that ask for single slices get `slices_max` of them. `folder` is where the stores go for the time being.
    """

    chunk_count: int = options.chunk_count(512, 16, "of the first size")
    num_layers: int = options.num_layers(32, 4)
    grains: tuple[int, ...] = options.setting("-G --chunk-tokens", (16, 64, 256), (16, 64), _grains, GRAINS_HELP)
    per_layer_chunk_bytes: int = options.slice_bytes(64 * KIB, 4 * KIB, "of the first size")
    runs: int = options.runs(5)
    seed: int = options.seed()
    states: tuple[State, ...] = options.choice("--states", State, tuple(State))
    transports: tuple[Transport, ...] = options.choice("--transports", TRANSPORTS, TRANSPORTS)
    peers: tuple[PeerName, ...] = options.setting("--peers", tuple(PeerName), parse=_peers_of, text="none, or some")
    rgw: bool = options.flag("--no-rgw", "S3 peers go against our gateway only, not Ceph RGW too", False, False)
    slices_max: int = options.count("--slices-max", 4096, 1024, most=1 << 26, text=SLICES_HELP)
    memcpy_bytes: int = options.sized(256 * MIB, 16 * MIB)
    folder: Path | None = options.folder()

    def layout(self, grain: int) -> ChunkLayout:
        """L, G and S of chunks of that many tokens."""
        return ChunkLayout(self.num_layers, grain, self.per_layer_chunk_bytes * grain // self.grains[0])

    def chunks(self, grain: int) -> Chunks:
        """N such chunks, for the same payload."""
        count = max(1, self.chunk_count * self.grains[0] // grain)
        return make_chunks(count, self.layout(grain), self.seed)

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout(self.grains[0]).delivery_bytes(self.chunk_count)

    def phases(self) -> list[tuple[State, tuple[int, ...]]]:
        """Each state with the sizes of chunks that are measured in it together."""
        if self.payload_bytes <= JOINT_BYTES_MAX:
            return [(state, self._grains_of(state)) for state in self.states]
        return [(state, (grain,)) for state in self.states for grain in self._grains_of(state)]

    def _grains_of(self, state: State) -> tuple[int, ...]:
        return self.grains[:1] if state is State.TCP else self.grains


@dataclass
class Found:
    """What the phases found: reasons of peers that could not run, how each phase was prepared, and the server's most
    memory in it.
    """

    measurements: list[Measurement] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    server_peak_rss_bytes: dict[str, int | None] = field(default_factory=dict)


def measure_aggregate(settings: AggregateSettings, origin: Mapping[str, Any]) -> Json:
    """Run the whole benchmark; wrong bytes end it early and are the result's `problem`. Raises FAILURES."""
    need_nixl(Transport.UCX in settings.transports, "--transports shm,http")
    origin = {**origin, "load_average_before": list(os.getloadavg())}
    described = {**plain(settings), "payload_bytes": settings.payload_bytes, "ucx_tls": os.environ.get("UCX_TLS")}
    chunks = {grain: settings.chunks(grain) for grain in settings.grains}
    found, problem = Found(), None
    try:
        for state, grains in settings.phases():
            _measure_phase(settings, state, {grain: chunks[grain] for grain in grains}, found)
    except VerificationError as error:
        problem = str(error)
    return result_of(found, described, origin, chunks[settings.grains[0]].layer_bytes, problem)


def result_of(
    found: Found, settings: Mapping[str, Any], origin: Mapping[str, Any], layer_bytes: int, problem: str | None
) -> Json:
    """The result; a layer of the payload has `layer_bytes`."""
    measured = [each for each in found.measurements if each.samples]
    return published(
        "aggregate",
        origin,
        settings,
        problem,
        remarks=found.remarks,
        **judged(measured, found.missing, layer_bytes),
        peers_missing=found.missing,
        server_peak_rss_bytes=found.server_peak_rss_bytes,
        measurements={each.key: each.json() for each in measured},
    )


def _measure_phase(settings: AggregateSettings, state: State, chunks: dict[int, Chunks], found: Found) -> None:
    if state is State.TCP and Transport.UCX not in settings.transports:
        return
    transports = (Transport.UCX,) if state is State.TCP else settings.transports
    phase = f"{state.value} {','.join(f'g{grain}' for grain in chunks)}"
    with ExitStack() as stack:
        bed, clients = _open_bed(settings, state, chunks, transports, stack)
        contenders = raw_limits(bed, settings.memcpy_bytes, transports, stack)
        for client, transport in zip(clients, transports, strict=True):
            contenders += fetches(bed, client, transport)
            if transport is Transport.HTTP and state in (State.DRAM, State.PAGE_CACHE):
                parts = stack.enter_context(bed.server.client(transport, HTTP_PARTS))
                contenders.append(fetches_in_parts(bed, parts))
        if state is State.COLD and Transport.SHM in transports:
            direct = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "direct.toml"
            direct.write_text('[storage]\ncold_reads = "direct"\n')
            other = ("--config", str(direct))
            contenders += _of_another_server(settings, state, chunks, Transport.SHM, other, DIRECT, stack)
        if state is State.DRAM and Transport.UCX in transports:
            mapped = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "mapped.toml"
            mapped.write_text("[storage]\nucx_maps_dram = true\n")
            other, first = ("--config", str(mapped)), dict([next(iter(chunks.items()))])
            contenders += _of_another_server(settings, state, first, Transport.UCX, other, MAPPED, stack)
        remark = REMARKS[state]
        peers = Peers(stack)
        if state in IN_DRAM:
            seen = warm(bed.server, clients[0], list(chunks.values()), bed.buffer)
            remark += f" (server's memory then: {format_bytes(seen)})"
            if settings.grains[0] in chunks:
                _start_peers(settings, bed, peers)
                contenders += peer_contenders(peers, settings.grains[0])
        found.measurements += run_rounds(state, contenders, peers, settings.runs)
        found.missing.update(peers.missing)
        if state is State.COLD:
            remark += f"; at most {max(bed.files.resident_shares):.1%} of them stayed"
        found.remarks[phase] = remark
        found.server_peak_rss_bytes[phase] = bed.server.peak_rss_bytes()


def _of_another_server(
    settings: AggregateSettings,
    state: State,
    chunks: dict[int, Chunks],
    transport: Transport,
    options: Sequence[str],
    name: str,
    stack: ExitStack,
) -> list[Contender]:
    """Our own from a server with other options, under that name."""
    bed, (client,) = _open_bed(settings, state, chunks, (transport,), stack, options)
    found = fetches(bed, client, transport)
    if state in IN_DRAM:
        warm(bed.server, client, list(chunks.values()), bed.buffer)
    return [replace(each, name=each.name.replace(transport.value, name)) for each in found]


def _open_bed(
    settings: AggregateSettings,
    state: State,
    chunks: dict[int, Chunks],
    transports: Sequence[Transport],
    stack: ExitStack,
    server_options: Sequence[str] = (),
) -> tuple[Bed, list[Client]]:
    """A filled server of its own, a client for each transport and the buffer; `stack` takes them down."""
    dram_bytes = 0
    if state in IN_DRAM:
        dram_bytes = sum(each.payload_bytes for each in chunks.values()) + DRAM_SPARE_BYTES
    stack.enter_context(_ucx_tls("tcp" if state is State.TCP else None))
    server = stack.enter_context(running_server(settings.folder, ["--dram-bytes", str(dram_bytes), *server_options]))
    for each_size in chunks.values():
        store_chunks(server, each_size)
    clients = [stack.enter_context(server.client(transport)) for transport in transports]
    buffer = clients[0].allocate_buffer(max(each.payload_bytes for each in chunks.values()))
    buffer.fill(0xFF)
    files = StoredFiles(server.data_files() if state is State.COLD else [])
    return Bed(state, server, chunks, buffer, files), clients


def _start_peers(settings: AggregateSettings, bed: Bed, peers: Peers) -> None:
    """Over TCP only Mooncake; otherwise all that are wanted, those over S3 against our gateway and Ceph RGW."""
    grain, chunks = next(iter(bed.chunks.items()))
    work = Work(tuple(chunks.keys), settings.layout(grain), settings.seed, settings.slices_max)
    if bed.state is State.TCP:
        wanted = [name for name in settings.peers if name is PeerName.MOONCAKE_TCP]
        peers.start(wanted, work, {}, settings.folder)
        return
    server = bed.server
    servers = {"ours": target_of(server)}
    if settings.rgw and set(settings.peers) & set(S3_PEERS) and work.payload_bytes <= JOINT_BYTES_MAX:
        try:
            servers["rgw"] = peers.stack.enter_context(running_rgw(settings.folder)).target
            put_chunks(work, servers["rgw"])
        except BaselineError as error:
            servers.pop("rgw", None)
            peers.missing["rgw"] = str(error)
    peers.start(settings.peers, work, servers, settings.folder)


@contextmanager
def _ucx_tls(value: str | None) -> Iterator[None]:
    """Set UCX_TLS for this process and those it starts, and put it back."""
    before = os.environ.get("UCX_TLS")
    if value is not None:
        os.environ["UCX_TLS"] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ["UCX_TLS"] = before
        elif value is not None:
            del os.environ["UCX_TLS"]


AGGREGATE = Experiment(
    name="aggregate",
    help="one request for many chunks, layer-major and chunk-major, over each transport, beside its peers",
    description="See how fast one request for a whole prefix is here, beside the machine's limits and other software. "
    "Store the same payload in chunks of several sizes in servers of its own and fetch it in one request "
    "over each transport: from the page cache, from the server's DRAM tier, over TCP, and cold. Raw "
    "limits of the machine and other software doing the same work are measured in the same rounds.",
    settings=AggregateSettings,
    measure=measure_aggregate,
    show=show,
    plot=plot,
)
