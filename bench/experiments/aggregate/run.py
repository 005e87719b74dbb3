"""Settings of `bench aggregate`, its phases, and its command.

    N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes

The same payload is stored in chunks of several sizes (more tokens, as many more bytes, fewer chunks) and fetched in
several states, each a phase with a server of its own, whose rounds are interleaved. The buffer is cleared before every
run and every fetched byte compared after it, both untimed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.beds.kv_peers.running import S3_PEERS, PeerName, Peers, put_chunks
from bench.beds.kv_peers.work import S3Target, Work
from bench.beds.processes import BaselineError
from bench.beds.s3_servers import running_rgw
from bench.core.experiment import Experiment, need_nixl, plain, published
from bench.core.options import Options, ascending, each, filled, names, number, some_of
from bench.core.show import Json
from bench.experiments.aggregate.contenders import (
    Bed,
    fetches,
    fetches_in_parts,
    peer_contenders,
    raw_limits,
    run_rounds,
)
from bench.experiments.aggregate.ratios import HTTP_PARTS, Measurement, judged
from bench.experiments.aggregate.show import plot, show
from calibration.chunks import Chunks, StoredFiles, make_chunks, store_chunks, warm
from calibration.content import VerificationError
from calibration.samples import State, format_bytes
from calibration.servers import BUCKET, REGION, running_server
from descriptors.descriptor import CHUNK_TOKENS_MAX
from descriptors.layout import ChunkLayout
from descriptors.units import GIB, KIB, MIB
from nixl_client.client import ObjectCacheClient, Transport

JOINT_BYTES_MAX = 5 * GIB // 4
"""Up to this payload all sizes of chunks are in one server and in the same rounds."""
DRAM_SPARE_BYTES = 256 * MIB
IN_DRAM = (State.DRAM, State.TCP)
TRANSPORTS = (Transport.SHM, Transport.UCX, Transport.HTTP)
REMARKS = {
    State.PAGE_CACHE: "stored moments ago, the server's DRAM tier off",
    State.DRAM: "fetched until all of it was in the server's DRAM tier",
    State.TCP: "as dram, with UCX_TLS=tcp for server and client",
    State.COLD: "the DRAM tier off; before each run every file synced and dropped (POSIX_FADV_DONTNEED)",
}


@dataclass(frozen=True, slots=True)
class AggregateSettings:
    """What to measure. `chunk_count` and `per_layer_chunk_bytes` are those of the first of `grains` (G, ascending).

    `peers` run in the states DRAM and TCP on chunks of the first size; Ceph RGW is one more S3 server if `rgw`;
    those that ask for single slices get `slices_max` of them. `folder` is where the stores go for the time being.
    """

    chunk_count: int
    num_layers: int
    grains: tuple[int, ...]
    per_layer_chunk_bytes: int
    runs: int
    seed: int
    states: tuple[State, ...]
    transports: tuple[Transport, ...]
    peers: tuple[PeerName, ...]
    rgw: bool
    slices_max: int
    memcpy_bytes: int
    folder: Path | None = None

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


def _open_bed(
    settings: AggregateSettings,
    state: State,
    chunks: dict[int, Chunks],
    transports: Sequence[Transport],
    stack: ExitStack,
) -> tuple[Bed, list[ObjectCacheClient]]:
    """A filled server of its own, a client for each transport and the buffer; `stack` takes them down."""
    dram_bytes = 0
    if state in IN_DRAM:
        dram_bytes = sum(each.payload_bytes for each in chunks.values()) + DRAM_SPARE_BYTES
    stack.enter_context(_ucx_tls("tcp" if state is State.TCP else None))
    server = stack.enter_context(running_server(settings.folder, ["--dram-bytes", str(dram_bytes)]))
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
    servers = {"ours": S3Target(server.url, server.access_key, server.secret_key, BUCKET, REGION)}
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


def _declare(options: Options) -> None:
    options.shape((512, 16), (32, 4), (64 * KIB, 4 * KIB), "of the first size")
    text = "sizes of chunks, ascending, each a multiple of the first; default: 16,64,256"
    grains = (16, 64, 256)
    options.add("-G", "--chunk-tokens", type=_grains, metavar="LIST", full=grains, smoke=grains[:2], help=text)
    options.runs(5)
    options.seed()
    for name, choices in (("--transports", TRANSPORTS), ("--states", tuple(State))):
        text = f"default: {names(choices)}"
        options.add(name, type=some_of(choices), default=choices, metavar="LIST", help=text)
    text = f"none, or some of {names(tuple(PeerName))} (default: all)"
    options.add("--peers", type=_peers, default=tuple(PeerName), metavar="LIST", help=text)
    options.flag("--no-rgw", "S3 peers go against our gateway only, not Ceph RGW too")
    text = "slices for peers that ask for one at a time"
    options.add("--slices-max", type=number(1, 1 << 26), metavar="COUNT", full=4096, smoke=1024, help=text)
    options.folder()


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    need_nixl(Transport.UCX in options.transports, "--transports shm,http")
    settings = filled(
        AggregateSettings,
        options,
        grains=options.chunk_tokens,
        rgw=not (options.no_rgw or options.smoke),
        memcpy_bytes=16 * MIB if options.smoke else 256 * MIB,
    )
    return measure_aggregate(settings, origin)


def _peers(text: str) -> tuple[PeerName, ...]:
    return () if text == "none" else some_of(tuple(PeerName))(text)


def _grains(text: str) -> tuple[int, ...]:
    grains = ascending(each(number(1, CHUNK_TOKENS_MAX)))(text)
    if any(grain % grains[0] for grain in grains):
        raise argparse.ArgumentTypeError("must be multiples of the first")
    return grains


AGGREGATE = Experiment(
    name="aggregate",
    help="one request for many chunks, layer-major and chunk-major, over each transport, beside its peers",
    description="Store the same payload in chunks of several sizes in servers of its own and fetch it in one request "
    "over each transport: from the page cache, from the server's DRAM tier, over TCP, and cold. Raw limits of the "
    "machine and other software doing the same work are measured in the same rounds.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
)
