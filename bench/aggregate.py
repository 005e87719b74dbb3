"""`bench aggregate`: one descriptor GET of N chunks, over every transport in both orders, beside what it competes with.

    N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes

The same payload is stored in chunks of several sizes (more tokens, as many more bytes, fewer chunks) and fetched in
several states, each a phase with a server of its own, whose rounds are interleaved. The buffer is cleared before every
run and every fetched byte compared after it, both untimed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.aggregate_bed import Bed, Chunks, fetches, fetches_in_parts, peer_contenders, raw_limits, run_rounds, warm
from bench.child import BaselineError
from bench.content import VerificationError, make_content
from bench.jobs import BUCKET, REGION
from bench.kv_peers.running import S3_PEERS, PeerName, Peers, put_chunks
from bench.kv_peers.work import S3Target, Work
from bench.machine import describe_commit, describe_machine
from bench.peers import PeerUnavailable, running_rgw
from bench.progress import progress_bar
from bench.ratios import HTTP_PARTS
from bench.report import Report, format_bytes
from bench.samples import Measurement, State
from bench.server import BenchServer, running_server
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import GIB, MIB
from nixl_client.client import ObjectCacheClient, Transport
from storage_server.settings import StorageSettings

FILL_BATCH_BYTES = 64 * MIB
JOINT_BYTES_MAX = 5 * GIB // 4
"""Up to this payload all sizes of chunks are in one server and in the same rounds."""
DRAM_SPARE_BYTES = 256 * MIB
IN_DRAM = (State.DRAM, State.TCP)
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

    def count(self, grain: int) -> int:
        """N of such chunks, for the same payload."""
        return max(1, self.chunk_count * self.grains[0] // grain)

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout(self.grains[0]).payload_bytes(self.chunk_count)

    def phases(self) -> list[tuple[State, tuple[int, ...]]]:
        """Each state with the sizes of chunks that are measured in it together."""
        if self.payload_bytes <= JOINT_BYTES_MAX:
            return [(state, self._grains_of(state)) for state in self.states]
        return [(state, (grain,)) for state in self.states for grain in self._grains_of(state)]

    def _grains_of(self, state: State) -> tuple[int, ...]:
        return self.grains[:1] if state is State.TCP else self.grains


@dataclass
class _Found:
    """What the phases so far have come to."""

    measurements: list[Measurement] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    peak_rss_bytes: dict[str, int | None] = field(default_factory=dict)
    problem: str | None = None


def measure_aggregate(settings: AggregateSettings) -> Report:
    """Run the whole benchmark; wrong bytes end it early and are the report's `problem`.

    Raises BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError and OSError.
    """
    load = os.getloadavg()
    found = _Found()
    chunks = {grain: _make_chunks(settings, grain) for grain in settings.grains}
    try:
        for state, grains in settings.phases():
            _measure_phase(settings, state, {grain: chunks[grain] for grain in grains}, found)
    except VerificationError as error:
        found.problem = str(error)
    return Report(
        "aggregate",
        {**describe_commit(), "machine": describe_machine(), "load_average_before": list(load)},
        _described(settings),
        found.measurements,
        chunks[settings.grains[0]].layer_bytes,
        found.missing,
        found.remarks,
        found.peak_rss_bytes,
        found.problem,
    )


def _measure_phase(settings: AggregateSettings, state: State, chunks: dict[int, Chunks], found: _Found) -> None:
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
            remark += f" (server's memory then: {format_bytes(warm(bed, clients[0]))})"
            if settings.grains[0] in chunks:
                _start_peers(settings, bed, peers)
                contenders += peer_contenders(peers, settings.grains[0])
        found.measurements += run_rounds(state, contenders, peers, settings.runs)
        found.missing.update(peers.missing)
        if state is State.COLD:
            remark += f"; at most {max(bed.shares):.1%} of them stayed"
        found.remarks[phase] = remark
        found.peak_rss_bytes[phase] = bed.server.peak_rss_bytes()


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
    temporary = tempfile.TemporaryDirectory(prefix="objectcache-aggregate-", dir=settings.folder)
    folder = Path(stack.enter_context(temporary))
    server = stack.enter_context(running_server(folder, ["--dram-bytes", str(dram_bytes)]))
    for each in chunks.values():
        _fill(server, each)
    clients = [stack.enter_context(server.client(transport)) for transport in transports]
    buffer = clients[0].allocate_buffer(max(each.payload_bytes for each in chunks.values()))
    buffer.fill(0xFF)
    files = _data_files(folder) if state is State.COLD else []
    return Bed(state, server, StorageSettings(data_dir=Path()), chunks, buffer, files), clients


def _start_peers(settings: AggregateSettings, bed: Bed, peers: Peers) -> None:
    """Over TCP only Mooncake; otherwise all that are wanted, those over S3 against our gateway and Ceph RGW."""
    grain, chunks = next(iter(bed.chunks.items()))
    layout = settings.layout(grain)
    work = Work(
        tuple(chunks.keys), layout.num_layers, grain, layout.per_layer_chunk_bytes, settings.seed, settings.slices_max
    )
    if bed.state is State.TCP:
        wanted = [name for name in settings.peers if name is PeerName.MOONCAKE_TCP]
        peers.start(wanted, work, {}, settings.folder)
        return
    server = bed.server
    servers = {"ours": S3Target(server.url, server.access_key, server.secret_key, BUCKET, REGION)}
    if settings.rgw and set(settings.peers) & set(S3_PEERS) and work.payload_bytes <= JOINT_BYTES_MAX:
        try:
            rgw = peers.stack.enter_context(running_rgw(settings.folder)).target
            servers["rgw"] = S3Target(rgw.url, rgw.access_key, rgw.secret_key, BUCKET, REGION)
            put_chunks(work, servers["rgw"])
        except (PeerUnavailable, BaselineError) as error:
            servers.pop("rgw", None)
            peers.missing["rgw"] = str(error)
    peers.start(settings.peers, work, servers, settings.folder)


def _make_chunks(settings: AggregateSettings, grain: int) -> Chunks:
    """Prefix keys of seeded tokens, and content."""
    count = settings.count(grain)
    tokens = np.random.default_rng(settings.seed).integers(0, 1 << 32, count * grain, dtype=np.uint32)
    namespace = Namespace(model="bench", dtype="uint8", block_tokens=grain)
    keys = chunk_keys(namespace.text(), tokens, grain)
    return Chunks(keys, make_content(count, settings.layout(grain), settings.seed))


def _fill(server: BenchServer, chunks: Chunks) -> None:
    """Put every chunk; only a batch of them exists here at a time."""
    keys, content = chunks.keys, chunks.content
    batch = max(1, FILL_BATCH_BYTES // content.layout.chunk_bytes)
    with server.client(Transport.HTTP) as client, progress_bar(len(keys), "storing chunks") as advance:
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            client.put_chunks(some, [content.chunk(first + index) for index in range(len(some))])
            advance(len(some))


def _data_files(folder: Path) -> list[Path]:
    """The store's files of chunks; its index stays warm."""
    return sorted(folder.rglob("data/extents/*/*"))


def _described(settings: AggregateSettings) -> dict[str, Any]:
    """The settings as plain values."""
    described = asdict(settings)
    described["states"] = [state.value for state in settings.states]
    described["transports"] = [transport.value for transport in settings.transports]
    described["peers"] = [name.value for name in settings.peers]
    described["folder"] = None if settings.folder is None else str(settings.folder)
    described["payload_bytes"] = settings.payload_bytes
    described["ucx_tls"] = os.environ.get("UCX_TLS")
    return described


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
