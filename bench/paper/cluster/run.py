"""`bench cluster`: one prefix from three storage servers, and from one, by the same gateway code, in the same rounds;
what the split costs; how much longer a delivery takes when a server is killed in it; a simulation of up to 256 servers;
and how fast blocks move between processes by MPI and others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from bench.beds.ours import Servers, target_of
from bench.core import options
from bench.core.experiment import Experiment, need_nixl, published
from bench.core.plots import Chart, Kind, draw
from bench.core.rounds import Side, Target, paired, sampled
from bench.core.show import Json, Section, table, targets
from bench.paper.cluster.bed import Cluster
from bench.paper.cluster.downlinks import simulated_downlinks
from bench.paper.cluster.figure_3 import Placed, figure_3
from bench.paper.cluster.table_7 import Mover, table_7
from descriptors.cluster import Member, View
from descriptors.descriptor import Delivery, Descriptor
from descriptors.descriptor_codec import encode_binary
from descriptors.layout import ChunkLayout
from descriptors.messages import DOWNLINK_MIN
from descriptors.placement import Placement
from descriptors.units import GIB, KIB
from gateway.cluster.split import descriptor_of, holdings
from nixl_client.client import Client, Transport
from objectcache.calibration.content import Bytes, Content, VerificationError, make_content, verify_payload
from objectcache.calibration.samples import spread
from objectcache.calibration.servers import BUCKET
from storage_server.home.own_keys import SETTLE_S

TRANSPORTS = (Transport.SHM, Transport.UCX, Transport.HTTP)
NAMES = ("a", "b", "c")
FETCH_S = 120.0
WARMING_FETCHES = 4
"""Until the DRAM tiers have all of the prefix."""
THREE_OVER_ONE_MIN = 0.9
SPLIT_MS_MAX = 5.0
MOVERS = [mover.value for mover in Mover]
DOWNLINK_FRACTION = 0.25
"""The link has this part of the rate that three servers reach over shm."""
DOWNLINK_OVER_MAX, DOWNLINK_OF_MIN = 1.05, 0.9
LINEAR_MIN = {64: 0.9, 256: 0.8}
REMARK = (
    "Three servers, a gateway, their home and the client share the cores of this machine: three have no more of them."
)


class Servers3(Enum):
    """How many storage servers bring the prefix."""

    ONE = "one server"
    THREE = "three servers"


@dataclass(frozen=True, slots=True)
class ClusterBenchSettings:
    """The sizes of the run. `split_chunks` is N of the split whose cost is measured. After `settle_s` the servers trust
    their caches: until then they ask the home about each chunk.
    """

    transports: tuple[Transport, ...] = options.choice("--transports", TRANSPORTS, TRANSPORTS)
    chunk_count: int = options.chunk_count(512, 12, "of the prefix")
    num_layers: int = options.num_layers(32, 4)
    chunk_tokens: int = options.sized(16)
    per_layer_chunk_bytes: int = options.slice_bytes(64 * KIB, 4 * KIB, "of a chunk")
    split_chunks: int = options.count("--split-chunks", 3584, 64, text="chunks of the split whose cost is measured")
    runs: int = options.runs(5)
    kills: int = options.count("--kills", 5, 1, least=0, text="deliveries in which a server is killed")
    simulated_servers: tuple[int, ...] = options.count(
        "--simulated-servers", (4, 16, 64, 256), (4, 8), text="servers of the simulation"
    )
    simulated_requests: int = options.count(
        "--simulated-requests", 400, 20, text="requests of the simulation for each four servers"
    )
    block_mib: tuple[int, ...] = options.count(
        "--block-mib", (1, 4, 16, 82), (1,), text="MiB of the blocks of Table VII"
    )
    seed: int = options.seed()
    dram_bytes: int = options.sized(2 * GIB, GIB)
    settle_s: float = options.sized(SETTLE_S + 5.0, 0.0)
    folder: Path | None = options.folder()

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S."""
        return ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)

    @property
    def nbytes(self) -> int:
        """W."""
        return self.layout.delivery_bytes(self.chunk_count)


@dataclass
class Prefix:
    """A stored prefix, and a client with a buffer for it."""

    client: Client
    keys: list[str]
    content: Content
    buffer: Bytes
    layout: ChunkLayout

    def fetch(self, kill: Callable[[], None] | None = None) -> float:
        """Seconds of one layer-major fetch, every byte of which is compared. `kill` is called when the first layer is
        there. Raises VerificationError.
        """
        self.buffer[:] = 0
        began_s = time.monotonic()
        fetch = self.client.fetch(self.keys, self.layout, self.buffer, delivery=Delivery.LAYER_MAJOR)
        killing = threading.Thread(target=kill or (lambda: None))
        if kill is not None:
            fetch.wait_layer(0, FETCH_S)
        killing.start()
        fetch.wait(FETCH_S)
        seconds = time.monotonic() - began_s
        killing.join()
        verify_payload(self.buffer, self.content, Delivery.LAYER_MAJOR)
        return seconds


def measure_cluster(settings: ClusterBenchSettings, origin: Mapping[str, Any]) -> Json:
    """Everything; wrong bytes are the result's `problem`. Raises FAILURES."""
    need_nixl(Transport.UCX in settings.transports, "--transports shm,http")
    content = make_content(settings.chunk_count, settings.layout, settings.seed)
    keys = [f"{settings.seed:08x}{index:056x}" for index in range(settings.chunk_count)]
    measured: dict[str, Any] = {"transports": {}, "recovery": {}, "downlink": None}
    problem = None
    with ExitStack() as stack:
        servers = Servers(stack, settings.folder, "cluster")
        home = target_of(servers.serve())
        clusters = {
            Servers3.ONE: Cluster(stack, servers.folder / "one", home, NAMES[:1], settings.dram_bytes),
            Servers3.THREE: Cluster(stack, servers.folder / "three", home, NAMES, settings.dram_bytes),
        }
        with clusters[Servers3.ONE].client(BUCKET, Transport.HTTP) as client:
            for index, key in enumerate(keys):
                client.put_chunks([key], [content.chunk(index)])
        time.sleep(settings.settle_s)
        try:
            for transport in settings.transports:
                measured["transports"][transport.value] = _rates(settings, clusters, transport, keys, content)
            if Transport.SHM in settings.transports:
                free = measured["transports"][Transport.SHM.value]["bytes_per_s"][Servers3.THREE.value].median
                measured["downlink"] = _downlink(settings, clusters[Servers3.THREE], free, keys, content)
            for transport in settings.transports if settings.kills else ():
                found = _recovery(settings, clusters[Servers3.THREE], transport, keys, content)
                measured["recovery"][transport.value] = found
        except VerificationError as error:
            problem = str(error)
    split_s = split_samples(settings.split_chunks, settings.layout, max(settings.runs, 5))
    figure = figure_3(settings.simulated_servers, settings.simulated_requests, settings.seed)
    moved = table_7(settings.block_mib, settings.runs)
    made = [*_targets(measured["transports"], spread(split_s).median * 1e3), *_simulated_targets(figure)]
    made += _downlink_targets(measured["downlink"])
    return published(
        "cluster",
        origin,
        settings,
        problem,
        remarks=[REMARK],
        three_over_one={name: found["three_over_one"] for name, found in measured["transports"].items()},
        split_ms=spread([seconds * 1e3 for seconds in split_s]),
        recovery_s={name: found["recovery_s"] for name, found in measured["recovery"].items()},
        targets=[target.json("case", "side") for target in made],
        figure_3=figure,
        downlinks=simulated_downlinks(settings.seed),
        table_7=moved,
        measurements=measured,
    )


def _prefix(
    cluster: Cluster,
    transport: Transport,
    keys: list[str],
    content: Content,
    stack: ExitStack,
    downlink_bytes_per_s: float | None = None,
) -> Prefix:
    client = stack.enter_context(cluster.client(BUCKET, transport, downlink_bytes_per_s))
    layout = content.layout
    prefix = Prefix(client, keys, content, client.allocate_buffer(layout.delivery_bytes(len(keys))), layout)
    for _ in range(WARMING_FETCHES):
        prefix.fetch()
    return prefix


def _rates(
    settings: ClusterBenchSettings,
    clusters: Mapping[Servers3, Cluster],
    transport: Transport,
    keys: list[str],
    content: Content,
) -> Json:
    """Layer-major from the DRAM tiers, by turns."""
    with ExitStack() as stack:
        prefixes = {which: _prefix(cluster, transport, keys, content, stack) for which, cluster in clusters.items()}
        ways = {which: partial(_timed, prefix) for which, prefix in prefixes.items()}
        taken = sampled(ways, settings.runs, transport.value)
    ratios = paired(taken[Servers3.ONE], taken[Servers3.THREE])
    return {
        "three_over_one": spread(ratios),
        "bytes_per_s": {
            which.value: spread([settings.nbytes / seconds for seconds in samples]) for which, samples in taken.items()
        },
        "samples_s": {which.value: samples for which, samples in taken.items()},
    }


def _downlink(
    settings: ClusterBenchSettings, cluster: Cluster, free_bytes_per_s: float, keys: list[str], content: Content
) -> Json:
    """The rate that three servers together reach over shm, where the client's downlink is a part of what they could."""
    downlink = max(DOWNLINK_FRACTION * free_bytes_per_s, DOWNLINK_MIN)
    with ExitStack() as stack:
        prefix = _prefix(cluster, Transport.SHM, keys, content, stack, downlink)
        samples_s = sampled({Transport.SHM: partial(_timed, prefix)}, settings.runs, "downlink")[Transport.SHM]
    reached = spread([settings.nbytes / seconds / downlink for seconds in samples_s])
    return {"downlink_bytes_per_s": downlink, "reached_over_downlink": reached, "samples_s": samples_s}


def _timed(prefix: Prefix, round_index: int) -> float:
    return prefix.fetch()


def _recovery(
    settings: ClusterBenchSettings, cluster: Cluster, transport: Transport, keys: list[str], content: Content
) -> Json:
    """How much longer a delivery takes in which a member is killed after the first layer, than the one before it."""
    longer_s, samples = [], []
    for index in range(settings.kills):
        victim = NAMES[index % len(NAMES)]
        with ExitStack() as stack:
            prefix = _prefix(cluster, transport, keys, content, stack)
            calm_s = prefix.fetch()
            killed_s = prefix.fetch(partial(cluster.kill, victim))
            cluster.start_again(victim)  # before the client leaves: over ucx nobody else says that it has ended
        time.sleep(settings.settle_s)
        samples.append([calm_s, killed_s])
        longer_s.append(killed_s - calm_s)
    return {"recovery_s": spread(longer_s), "samples_s": samples}


def split_samples(chunk_count: int, layout: ChunkLayout, count: int) -> list[float]:
    """Seconds that the gateway takes to find the keepers of so many chunks, and to write the descriptors of three
    portions.
    """
    keys = tuple(f"{index:064x}" for index in range(chunk_count))
    descriptor = Descriptor(keys, layout.num_layers, layout.chunk_tokens, layout.per_layer_chunk_bytes)
    placement = Placement(View("bench", 1, tuple(Member(name, f"http://{name}:1") for name in NAMES)))
    samples = []
    for _ in range(count + 1):
        began_s = time.perf_counter()
        portions = holdings(placement, BUCKET, keys)
        for index, holding in enumerate(portions):
            encode_binary(descriptor_of(descriptor, holding, index, len(portions)))
        samples.append(time.perf_counter() - began_s)
    return samples[1:]


def _targets(transports: Mapping[str, Json], split_ms: float) -> Iterator[Target]:
    for name, found in transports.items():
        what = "three servers over one, layer-major from DRAM"
        yield Target(what, THREE_OVER_ONE_MIN, found["three_over_one"], case=name)
    yield Target("cost of the split, ms", SPLIT_MS_MAX, split_ms, Side.AT_MOST)


def _downlink_targets(found: Json | None) -> Iterator[Target]:
    if found is not None:
        what, reached = "rate of three servers over the client's downlink", found["reached_over_downlink"]
        yield Target(what, DOWNLINK_OVER_MAX, reached, Side.AT_MOST, case="shm")
        yield Target(what, DOWNLINK_OF_MIN, reached, case="shm")


def _simulated_targets(rows: Sequence[Json]) -> Iterator[Target]:
    for row in rows:
        limit = LINEAR_MIN.get(row["servers"])
        if limit is not None and row["placed"] == Placed.KEEPERS.value and not row["hedged"]:
            yield Target("throughput of so many servers, of linear", limit, row["of_linear"], case=f"{row['servers']}")


def show(result: Json) -> dict[str, Section]:
    """One line for each transport, the recovery, and the targets."""
    found = result["measurements"]
    rows = [
        {
            "transport": name,
            **each,
            "one": each["bytes_per_s"][Servers3.ONE.value],
            "three": each["bytes_per_s"][Servers3.THREE.value],
            "recovery": found["recovery"].get(name, {}).get("recovery_s"),
        }
        for name, each in found["transports"].items()
    ]
    moved = [
        {"block": row["block_mib"], **{name: row["bytes_per_s"].get(name) for name in MOVERS}}
        for row in result["table_7"]["rows"]
    ]
    return {
        "cluster": (
            table(
                rows,
                "over = transport | GB/s, one server = one:GB/s | three = three:GB/s",
                "three over one = three_over_one:.2 | ms longer with a kill in it = recovery:ms",
            ),
            table([{"split": result["split_ms"]}], "ms for the split = split:.2"),
        ),
        "figure-3": (
            table(
                [{**row, "hedged": "yes" if row["hedged"] else "no"} for row in result["figure_3"]],
                "servers = servers | prefixes come = placed | hedged = hedged",
                "from DRAM = from_dram:.2 | disk = from_disk:.2 | home = from_home:.2",
                "TTFT ms, p50 = ttft_p50_s:ms | p90 = ttft_p90_s:ms | p99 = ttft_p99_s:ms",
                "of linear = of_linear:.2 | busiest over mean = imbalance:.2",
                "slowest portion over mean = straggler:.2 | extra bytes = hedged_bytes:.3",
            ),
        ),
        "downlinks": (
            table(
                result["downlinks"],
                "servers = servers | chunks = chunks | requests at once = requests",
                "time over the least, shares asked for = asked:.2 | equal shares = equal:.2",
                "most that is sent over the downlink = peak:.2",
            ),
        ),
        "table-7": (
            table(moved, "MiB in a block = block", *(f"{name}, GB/s = {name}:GB/s" for name in MOVERS)),
            *(f"{name} was not measured: {reason}." for name, reason in result["table_7"]["missing"].items()),
        ),
        "targets": (targets(result["targets"]), *result["remarks"]),
    }


CHART = Chart(Kind.BARS, "transport", "rate", "GB/s", "servers", across_title="transport")


def plot(result: Json, path: Path) -> None:
    """The rates of one server and of three."""
    rows = [
        {"transport": name, "servers": which, "rate": {key: value * 1e-9 for key, value in rate.items()}}
        for name, each in result["measurements"]["transports"].items()
        for which, rate in each["bytes_per_s"].items()
    ]
    draw(CHART, rows, "cluster; medians, least and greatest", path)


CLUSTER = Experiment(
    name="cluster",
    help="one prefix from three storage servers and from one; the cost of the split; a server killed in a delivery",
    description="See what a cluster costs and how fast it recovers. Fetch the same prefix from one storage server and "
    "from three, over each transport, and kill servers while they deliver.",
    settings=ClusterBenchSettings,
    measure=measure_cluster,
    show=show,
    plot=plot,
)
