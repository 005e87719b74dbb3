"""`bench upstream`: prefixes that lie in another S3 service, through us, and straight from there by a native client.

Our servers stand in front of one service after the other, the native client beside them; every way is in the same
rounds.
"""

from __future__ import annotations

import importlib.util
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import obstore

from bench.beds.kv_peers.work import S3Target
from bench.beds.ours import Servers, home_table
from bench.beds.processes import BaselineError
from bench.beds.s3_load import open_store
from bench.beds.s3_servers import Peer, PeerName, running_moto, running_ours, running_rgw
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, published
from bench.core.plots import Chart, Kind, draw
from bench.core.rounds import Side, Target, paired, sampled, spreads
from bench.core.show import Json, Section, listed, table, targets
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import GIB, KIB, MIB
from nixl_client.client import Client, Transport
from objectcache.calibration.content import (
    Bytes,
    Content,
    VerificationError,
    make_content,
    verify_payload,
    verify_slices,
)
from objectcache.calibration.samples import spread
from objectcache.calibration.servers import LocalServer

FETCH_TIMEOUT_S = 120.0
WARMING_FETCHES = 4
"""Until the DRAM tier has all of a prefix that is asked for again and again."""
SETTLE_S = 0.3
WRITTEN_S = 1.5
"""Until the files of a prefix that came cold are written."""
PIECE_BYTES = 256 * KIB


COLD_RATE_MIN = 0.9
FIRST_LAYER_MAX = 2.0
ASKED_MAX = 1.2
DRAM_RATE_MIN = 0.9
"""It should be as without upstream; single rounds of either lie further apart than this."""
TARGETS = (
    ("cold rate over the native client's", COLD_RATE_MIN, "cold_over_native", Side.AT_LEAST),
    ("first layer over the native client's", FIRST_LAYER_MAX, "first_layer_over_native", Side.AT_MOST),
    ("bytes got over bytes asked for", ASKED_MAX, "asked_over_needed", Side.AT_MOST),
    ("DRAM over DRAM without upstream", DRAM_RATE_MIN, "dram_over_embedded", Side.AT_LEAST),
)
SERVICES = (PeerName.OURS, PeerName.MOTO, PeerName.RGW)
ALSO = "chunks of a second prefix; above 64, each chunk comes in several requests"
IF_INSTALLED = "those that are not installed are left out"
SAID = {PeerName.OURS: "a second ObjectCache", PeerName.MOTO: "moto", PeerName.RGW: "Ceph RGW"}


class Way(Enum):
    """How a prefix comes into the client's memory. NATIVE and NATIVE_LAYER go past us: whole chunks, and layer 0 of all
    chunks by ranges. EMBEDDED is our server without another service, from its DRAM tier.
    """

    NATIVE = "native, chunk-major"
    NATIVE_LAYER = "native, layer 0 by ranges"
    COLD = "ours, cold"
    CACHE = "ours, from the cache's files"
    DRAM = "ours, from DRAM"
    EMBEDDED = "embedded, from DRAM"


@dataclass(frozen=True, slots=True)
class Shape:
    """N chunks of one layout."""

    chunk_count: int
    layout: ChunkLayout

    @property
    def nbytes(self) -> int:
        """N*L*S."""
        return self.layout.delivery_bytes(self.chunk_count)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and bytes of one prefix."""

    keys: Sequence[str]
    content: Content


@dataclass(frozen=True, slots=True)
class Taken:
    """One sample: seconds to the first layer, and to the last byte."""

    first_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class UpstreamBenchSettings:
    """Prefixes of N chunks, and of `also_chunk_count`, with L layers of S bytes."""

    services: tuple[PeerName, ...] = options.choice("--services", SERVICES, SERVICES, SERVICES[:1], IF_INSTALLED)
    chunk_count: int = options.chunk_count(64, 4, "of a prefix")
    also_chunk_count: int = options.count("--also", 100, 6, text=ALSO)
    num_layers: int = options.num_layers(16, 4)
    per_layer_chunk_bytes: int = options.slice_bytes(128 * KIB, 64 * KIB, "of a prefix")
    runs: int = options.runs(7)
    seed: int = options.seed()
    transport: Transport = options.choice("--transport", tuple(Transport)[1:], Transport.SHM, text="of ours")
    moto_python: str = options.moto_python()
    folder: Path | None = options.folder()

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the prefixes."""
        layout = ChunkLayout(self.num_layers, 16, self.per_layer_chunk_bytes)
        return [Shape(count, layout) for count in dict.fromkeys((self.chunk_count, self.also_chunk_count))]


class Bed:
    """One service with our servers before it. `stack` ends them. Raises LocalServerError, BaselineError."""

    def __init__(self, settings: UpstreamBenchSettings, shape: Shape, target: S3Target, stack: ExitStack) -> None:
        self._shape, self._target, self._transport = shape, target, settings.transport
        self._servers = Servers(stack, settings.folder, "upstream")
        self._pool = stack.enter_context(ThreadPoolExecutor(self._shape.chunk_count))
        self._store = open_store(target, is_signed=True)
        embedded = self._servers.serve("", "--dram-bytes", str(GIB))
        self._writers = [self._client(each, Transport.HTTP) for each in (self._front(target, 0), embedded)]
        cold, dram = (self._client(self._front(target, nbytes)) for nbytes in (0, GIB))
        self._clients = {Way.COLD: cold, Way.CACHE: cold, Way.DRAM: dram, Way.EMBEDDED: self._client(embedded)}
        self._buffers = {client: client.allocate_buffer(self._shape.nbytes) for client in set(self._clients.values())}

    def _front(self, target: S3Target, dram_bytes: int) -> LocalServer:
        return self._servers.front(home_table(target), dram_bytes, 4 * self._shape.nbytes + 64 * MIB)

    def _client(self, server: LocalServer, transport: Transport | None = None) -> Client:
        return self._servers.stack.enter_context(server.client(transport or self._transport))

    def stored(self, seed: int) -> Prefix:
        """A new prefix, upstream through another server of ours, so that its chunks carry their proof; and in the
        embedded server.
        """
        content = make_content(self._shape.chunk_count, self._shape.layout, seed)
        keys = [sha256(f"{seed}/{index}".encode()).hexdigest() for index in range(self._shape.chunk_count)]
        for client in self._writers:
            client.put_chunks(keys, [content.chunk(index) for index in range(self._shape.chunk_count)])
        time.sleep(SETTLE_S)
        return Prefix(keys, content)

    def removed(self, prefix: Prefix) -> None:
        """Delete it everywhere."""
        for client in {*self._clients.values(), self._writers[0]}:
            client.delete(list(prefix.keys))

    def sample(self, way: Way, prefix: Prefix) -> Taken:
        """Take and check one sample. Raises VerificationError. The files of the cache are written behind a cold fetch,
        and none is measured before they are.
        """
        if way is Way.COLD:
            taken = self._fetched(way, prefix)
            time.sleep(WRITTEN_S)
            return taken
        if way is Way.NATIVE:
            return self._native(prefix, None)
        if way is Way.NATIVE_LAYER:
            return self._native(prefix, self._shape.layout.per_layer_chunk_bytes)
        if way in (Way.DRAM, Way.EMBEDDED):
            for _ in range(WARMING_FETCHES):
                self._fetched(way, prefix)
                time.sleep(SETTLE_S)
        return self._fetched(way, prefix)

    def _fetched(self, way: Way, prefix: Prefix) -> Taken:
        client = self._clients[way]
        buffer = self._buffers[client]
        buffer[:] = 0
        began_s = time.monotonic()
        fetch = client.fetch(list(prefix.keys), self._shape.layout, buffer, delivery=Delivery.LAYER_MAJOR)
        first = fetch.wait_layer(0, FETCH_TIMEOUT_S)
        first_s = time.monotonic() - began_s
        verify_slices(first.data, prefix.content, 0)
        fetch.wait(FETCH_TIMEOUT_S)
        whole_s = max(fetch.ready_at_s()) - began_s
        verify_payload(buffer, prefix.content, Delivery.LAYER_MAJOR)
        return Taken(min(first_s, fetch.ready_at_s()[0] - began_s), whole_s)

    def _native(self, prefix: Prefix, nbytes: int | None) -> Taken:
        """obstore from one thread for each chunk: the calls leave the interpreter lock. Bodies are compared afterwards,
        and are not copied into one buffer.
        """

        def get(key: str) -> Any:
            if nbytes is None:
                return obstore.get(self._store, key).bytes()
            return obstore.get_range(self._store, key, start=0, length=nbytes)

        began_s = time.monotonic()
        bodies = list(self._pool.map(get, prefix.keys))
        seconds = time.monotonic() - began_s
        for index, body in enumerate(bodies):
            wanted = prefix.content.chunk(index)[:nbytes]
            if not np.array_equal(np.frombuffer(memoryview(body), dtype=np.uint8), wanted):
                raise VerificationError(f"the native client's chunk {index}: wrong bytes")
        return Taken(seconds, seconds)

    def asked_over_needed(self, prefix: Prefix) -> float:
        """The bytes that a cold fetch gets from upstream, headers included, over those of the prefix."""
        with counting_relay(self._target.url) as (url, count):
            client = self._client(self._front(replace(self._target, url=url), 0))
            buffer: Bytes = client.allocate_buffer(self._shape.nbytes)
            fetch = client.fetch(list(prefix.keys), self._shape.layout, buffer, delivery=Delivery.LAYER_MAJOR)
            fetch.wait(FETCH_TIMEOUT_S)
            verify_payload(buffer, prefix.content, Delivery.LAYER_MAJOR)
            return count() / self._shape.nbytes


@contextmanager
def counting_relay(url: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """A way to a service that counts what comes back, with two threads for each connection."""
    parts = urlsplit(url)
    counts: list[int] = []
    bound = socket.create_server(("127.0.0.1", 0))

    def copied(source: socket.socket, target: socket.socket, *, is_counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if is_counted:
                    counts.append(len(data))
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def joined(here: socket.socket) -> None:
        with here, socket.create_connection((parts.hostname or "", parts.port or 80)) as there:
            back = threading.Thread(target=copied, args=(there, here), kwargs={"is_counted": True}, daemon=True)
            back.start()
            copied(here, there, is_counted=False)
            back.join()

    def accepting() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=joined, args=(bound.accept()[0],), daemon=True).start()

    threading.Thread(target=accepting, daemon=True).start()
    with bound:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", lambda: sum(counts)


def measure_upstream(settings: UpstreamBenchSettings, origin: Mapping[str, Any]) -> Json:
    """Everything, with the targets. Wrong bytes are the problem of the result; a service that is not here is named."""
    if importlib.util.find_spec("obstore") is None:
        raise WrongUse("the native client is obstore: pip install obstore")
    starts: dict[PeerName, Callable[[], AbstractContextManager[Peer]]] = {
        PeerName.OURS: partial(running_ours, settings.folder, []),
        PeerName.MOTO: partial(running_moto, settings.moto_python, settings.folder),
        PeerName.RGW: partial(running_rgw, settings.folder),
    }
    found: dict[str, Json] = {}
    absent: dict[str, str] = {}
    problem = None
    for name in settings.services:
        with ExitStack() as stack:
            try:
                peer = stack.enter_context(starts[name]())
            except BaselineError as error:
                if name is PeerName.OURS:
                    raise
                absent[SAID[name]] = str(error)
                continue
            try:
                for shape in settings.shapes:
                    case = f"{SAID[name]}, N = {shape.chunk_count}"
                    found[case] = {"version": peer.version, **_measured(settings, shape, peer, case)}
            except VerificationError as error:
                problem = f"{SAID[name]}: {error}"
                break
    made = [target.json("case", "side") for name, service in found.items() for target in _targets(name, service)]
    return published("upstream", origin, settings, problem, upstream=found, absent=absent, targets=made)


def _measured(settings: UpstreamBenchSettings, shape: Shape, peer: Peer, case: str) -> Json:
    """One service. In each round a new prefix comes from there in every way, the cold one before those it warms."""
    with ExitStack() as stack:
        return _rounds(settings, shape, Bed(settings, shape, peer.target, stack), case)


def _rounds(settings: UpstreamBenchSettings, shape: Shape, bed: Bed, case: str) -> Json:
    prefixes = dict[int, Prefix]()

    def sample(way: Way, round_index: int) -> Taken:
        if round_index not in prefixes:
            for before in prefixes.values():
                bed.removed(before)
            prefixes.clear()
            prefixes[round_index] = bed.stored(settings.seed + round_index)
        return bed.sample(way, prefixes[round_index])

    taken = sampled({way: partial(sample, way) for way in Way}, settings.runs, case)
    (prefix,) = prefixes.values()
    asked = bed.asked_over_needed(prefix)
    bed.removed(prefix)
    return {
        "ways": {way.value: _described(samples, shape.nbytes) for way, samples in taken.items()},
        "ratios": spreads(_ratios(taken)),
        "asked_over_needed": asked,
    }


def _described(samples: list[Taken], nbytes: int) -> Json:
    return {
        "first_layer_s": spread([sample.first_s for sample in samples]),
        "whole_s": spread([sample.whole_s for sample in samples]),
        "bytes_per_s": statistics.median(nbytes / sample.whole_s for sample in samples),
        "samples": [[sample.first_s, sample.whole_s] for sample in samples],
    }


def _ratios(taken: Mapping[Way, list[Taken]]) -> dict[str, list[float]]:
    """Round by round, rates and times over those of the native client and of the embedded server."""

    def rates(one: Way, other: Way) -> list[float]:
        return paired(taken[one], taken[other], lambda ours, theirs: theirs.whole_s / ours.whole_s)

    def first_over_whole(ours: Taken, theirs: Taken) -> float:
        return ours.first_s / theirs.whole_s

    return {
        "cold_over_native": rates(Way.COLD, Way.NATIVE),
        "cache_over_native": rates(Way.CACHE, Way.NATIVE),
        "dram_over_native": rates(Way.DRAM, Way.NATIVE),
        "dram_over_embedded": rates(Way.DRAM, Way.EMBEDDED),
        "first_layer_over_native": paired(taken[Way.COLD], taken[Way.NATIVE_LAYER], first_over_whole),
    }


def _targets(name: str, service: Json) -> list[Target]:
    values = {ratio: found.median for ratio, found in service["ratios"].items()}
    values["asked_over_needed"] = service["asked_over_needed"]
    return [Target(what, limit, values[ratio], side, case=name) for what, limit, ratio, side in TARGETS]


def show(result: Json) -> dict[str, Section]:
    """Times by service and way, ratios, and the targets."""
    rows = _rows(result)
    settings = result["settings"]
    counts = dict.fromkeys([settings["chunk_count"], settings.get("also_chunk_count", settings["chunk_count"])])
    slice_kib = settings["per_layer_chunk_bytes"] // KIB
    about = (
        f"N = {' and '.join(map(str, counts))}, L = {settings['num_layers']}, S = {slice_kib} "
        f"KiB, {settings['runs']} rounds, transport {settings['transport']}; medians with extremes."
    )
    return {
        "upstream": (
            about,
            table(
                rows,
                "service | way | first layer, ms = first_layer_s:ms | whole prefix, ms = whole_s:ms | "
                "GB/s = bytes_per_s:GB/s",
            ),
            *(f"Not here: {name}: {reason}." for name, reason in result["absent"].items()),
        ),
        "upstream-ratios": (
            table(
                listed(result["upstream"], "service"),
                "service | cold over native = ratios.cold_over_native:.2 | "
                "first layer over native = ratios.first_layer_over_native:.2 | "
                "cache's files over native = ratios.cache_over_native:.2 | "
                "DRAM over native = ratios.dram_over_native:.2 | "
                "DRAM over embedded DRAM = ratios.dram_over_embedded:.2 | bytes got over asked = asked_over_needed:.3",
            ),
        ),
        "upstream-targets": (targets(result["targets"]),),
    }


def _rows(result: Json) -> list[Json]:
    of = result["upstream"]
    return [{"service": name, **way} for name, service in of.items() for way in listed(service["ways"], "way")]


def plot(result: Json, path: Path) -> None:
    """The time to the first layer and to the last byte, a panel for each service."""
    rows = [
        {**row, "what": what, "value": row[field]}
        for row in _rows(result)
        for what, field in (("first layer", "first_layer_s"), ("whole prefix", "whole_s"))
    ]
    draw(CHART, rows, "upstream; a prefix from another S3 service", path)


CHART = Chart(Kind.LYING, "way", "value", "ms", "what", row="service", scale=1e3)


UPSTREAM = Experiment(
    name="upstream",
    help="prefixes in another S3 service: through us cold, from the cache, from DRAM, and by a native client",
    description="See what this server costs and gains in front of your S3 service. Stores prefixes in an S3 service. "
    "They are fetched through a server of ours that stands before it: cold, from the files of its cache, "
    "and from DRAM; and straight from the service by obstore. A second ObjectCache, moto and Ceph RGW are "
    "the services.",
    settings=UpstreamBenchSettings,
    measure=measure_upstream,
    show=show,
    plot=plot,
)
