"""`bench growth`: how costs grow with what is stored, delivered or active.

    exponent   the slope of ln(count * cost) over ln(count): of the time of one operation for each that is there. 1 says
               that the cost of one does not depend on the count. Where the work itself grows with the count (the chunks
               or layers of a delivery, the requests of an epoch), it is the slope of ln(cost).

Objects are put, read, listed and looked up in the embedded store in this process, without a network, and a cache or a
DRAM tier is full, so that one leaves for each that comes. Deliveries go through a server over shared memory. What is
read is compared.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from bench.core import options
from bench.core.experiment import Experiment, published
from bench.core.plots import Chart, Kind, draw
from bench.core.show import Column, Json, Section, table, targets
from bench.paper.scheduler.run import measure_costs
from bench.paper.tiers.blocks import BytesBody
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.messages import LookupRequest
from descriptors.objects import BucketCache, ListRequest, PutRequest, ReadRequest
from nixl_client.client import Transport
from objectcache.calibration.chunks import fetch_checked, make_chunks, store_chunks
from objectcache.calibration.content import STAMP_BYTES, VerificationError
from objectcache.calibration.samples import interleaved, progress_bar, spread
from objectcache.calibration.servers import running_server
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.order import Request
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.rules.residency import Key, Residency, key_of
from storage_server.planning.durability import Durability
from storage_server.planning.extent import ALIGNMENT_BYTES, Extent
from storage_server.service.storage import EmbeddedStorage
from storage_server.settings import StorageSettings

KEY, BUCKET = "bench", "growth"
SLICE_BYTES = max(256, STAMP_BYTES)
EXPONENT_MAX = 1.1
AT_ONCE = 128
PREFIX_CHUNKS = 64


class Part(Enum):
    """The quantity that grows."""

    OBJECTS = "objects"
    MEMORY = "memory"
    CHUNKS = "chunks"
    LAYERS = "layers"
    REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class GrowthSettings:
    """The counts to measure at: `objects` are stored, and `residents` are in memory; a delivery has `chunks`, or
    `layers`; and so many `requests` are active on one link.
    """

    parts: tuple[Part, ...] = options.choice("--parts", Part, tuple(Part))
    objects: tuple[int, ...] = options.count("--objects", (10_000, 100_000, 1_000_000), (500, 1000), least=256)
    residents: tuple[int, ...] = options.count(
        "--residents", (10_000, 100_000, 1_000_000), (500, 1000), least=PREFIX_CHUNKS
    )
    chunks: tuple[int, ...] = options.count("--chunks", (512, 4096, 32_768), (16, 64))
    layers: tuple[int, ...] = options.count("--layers", (16, 128, 1024), (4, 16))
    requests: tuple[int, ...] = options.count("--requests", (10, 100, 1000), (1, 10))
    operations: int = options.count("--operations", 512, 32, text="of each kind at each count")
    object_bytes: int = options.sized(ALIGNMENT_BYTES)
    runs: int = options.runs(5)
    seed: int = options.seed()
    folder: Path | None = options.folder()


@dataclass(slots=True)
class Costs:
    """Seconds of one operation, by operation and count. `is_per_one` is whether the work does not grow by itself."""

    found: dict[tuple[str, str, bool, int], list[float]] = field(default_factory=dict)

    def note(self, part: Part, operation: str, count: int, cost_s: float, *, is_per_one: bool = True) -> None:
        """Note one sample."""
        self.found.setdefault((part.value, operation, is_per_one, count), []).append(cost_s)

    def rows(self) -> list[dict[str, Any]]:
        """One for each operation, with its costs by count."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for (part, operation, is_per_one, count), samples_s in self.found.items():
            row = rows.setdefault(
                (part, operation), {"part": part, "operation": operation, "is_per_one": is_per_one, "costs": []}
            )
            row["costs"].append({"count": count, "cost_s": spread(samples_s), "sample_count": len(samples_s)})
        for row in rows.values():
            medians = {each["count"]: each["cost_s"].median for each in row["costs"]}
            row["exponent"] = exponent_of(medians, is_per_one=row["is_per_one"])
            row["largest_over_smallest"] = medians[max(medians)] / medians[min(medians)]
        return list(rows.values())


def exponent_of(costs_s: Mapping[int, float], *, is_per_one: bool) -> float | None:
    """The exponent of these costs by count, as above; None for a single count."""
    if len(costs_s) < 2:
        return None
    counts = np.log(np.array(list(costs_s), dtype=float))
    slope = float(np.polyfit(counts, np.log(np.array(list(costs_s.values()))), 1)[0])
    return slope + 1 if is_per_one else slope


def measure_growth(settings: GrowthSettings, origin: Mapping[str, Any]) -> Json:
    """Measure all parts; wrong bytes are the result's `problem`. Raises FAILURES."""
    costs = Costs()
    problem = None
    try:
        if Part.OBJECTS in settings.parts:
            with TemporaryDirectory(dir=settings.folder) as folder:
                asyncio.run(_objects(settings, Path(folder), costs))
        if Part.MEMORY in settings.parts:
            for count in settings.residents:
                _residents(settings, count, costs)
        _deliveries(settings, costs)
        if Part.REQUESTS in settings.parts:
            _requests(settings, costs)
    except VerificationError as error:
        problem = str(error)
    rows = costs.rows()
    return published("growth", origin, settings, problem, growth=rows, targets=targets_of(rows))


def targets_of(rows: Sequence[Json]) -> list[dict[str, Any]]:
    """That no exponent is over EXPONENT_MAX."""
    known = [row for row in rows if row["exponent"] is not None]
    if not known:
        return []
    worst = max(known, key=lambda row: row["exponent"])
    value = round(worst["exponent"], 2)
    return [
        {
            "what": "greatest exponent",
            "case": f"{worst['operation']}, {worst['part']}",
            "side": "at most",
            "limit": EXPONENT_MAX,
            "value": value,
            "is_met": value <= EXPONENT_MAX,
        }
    ]


def _name(number: int) -> str:
    return sha256(number.to_bytes(8, "little")).hexdigest()


def _body(key: str, nbytes: int) -> bytes:
    return (bytes.fromhex(key) * -(-nbytes // 32))[:nbytes]


async def _objects(settings: GrowthSettings, folder: Path, costs: Costs) -> None:
    """A bucket without a bound in a store that grows from count to count, and for each count a cache of so many."""
    stored = 0
    for count in settings.objects:
        storage, _ = await _opened(folder)
        try:
            if not stored:
                await storage.objects.create_bucket(KEY, BUCKET)
            cache = f"{BUCKET}-cache-{count}"
            await storage.objects.create_bucket(KEY, cache, BucketCache(count * settings.object_bytes))
            await _fill(storage, BUCKET, range(stored, count), settings.object_bytes)
            await _fill(storage, cache, range(count), settings.object_bytes)
            stored = count
            await storage.store.compactor.compact()
            for run in range(settings.runs):
                await _use(settings, storage, count, run, costs)
                fresh = range(count + run * settings.operations, count + (run + 1) * settings.operations)
                took_s = await _fill(storage, cache, fresh, settings.object_bytes)
                costs.note(Part.OBJECTS, "put into a full cache", count, took_s / settings.operations)
        finally:
            await storage.close()
        for _ in range(settings.runs):
            storage, took_s = await _opened(folder)
            costs.note(Part.OBJECTS, "start", count, took_s, is_per_one=False)
            await storage.close()


async def _opened(folder: Path) -> tuple[EmbeddedStorage, float]:
    """A running store, and how long its start took."""
    began_s = time.perf_counter()
    settings = StorageSettings(data_dir=folder, durability=Durability.RELAXED, shm=False, ucx=(), compact_interval_s=0)
    storage = EmbeddedStorage(settings)
    await storage.start()
    return storage, time.perf_counter() - began_s


async def _fill(storage: EmbeddedStorage, bucket: str, numbers: range, nbytes: int) -> float:
    """Put these objects, AT_ONCE at a time; the seconds that it took."""
    left = iter(numbers)

    async def put_some(advance: Callable[[int], None]) -> None:
        for number in left:
            key = _name(number)
            await storage.objects.put_object(KEY, PutRequest(bucket, key, nbytes), BytesBody(_body(key, nbytes)))
            advance(1)

    with progress_bar(len(numbers), f"objects for {bucket}") as advance:
        began_s = time.perf_counter()
        await asyncio.gather(*(put_some(advance) for _ in range(AT_ONCE)))
        return time.perf_counter() - began_s


async def _use(settings: GrowthSettings, storage: EmbeddedStorage, count: int, run: int, costs: Costs) -> None:
    """Everything that clients and upkeep do with a store. Raises VerificationError."""
    number = settings.operations
    fresh = range(count, count + number)
    costs.note(Part.OBJECTS, "put", count, await _fill(storage, BUCKET, fresh, settings.object_bytes) / number)
    began_s = time.perf_counter()
    await storage.objects.delete_objects(KEY, BUCKET, [_name(each) for each in fresh])
    costs.note(Part.OBJECTS, "delete", count, (time.perf_counter() - began_s) / number)
    asked = [_name(int(each)) for each in np.random.default_rng([settings.seed, run]).integers(0, count, number)]
    began_s = time.perf_counter()
    bodies = [await _got(storage, key) for key in asked]
    costs.note(Part.OBJECTS, "get", count, (time.perf_counter() - began_s) / number)
    for key, body in zip(asked, bodies, strict=True):
        if body != _body(key, settings.object_bytes):
            raise VerificationError(f"{key} is not what was put")
    pages = ("a page of a list", lambda: storage.objects.list_objects(KEY, ListRequest(BUCKET, after=asked[0])))
    prefix = LookupRequest(tuple(asked[:PREFIX_CHUNKS]))
    lookup = ("a lookup", lambda: storage.prefixes.lookup(KEY, BUCKET, prefix))
    scrape = ("a scrape of the metrics", lambda: storage.metrics(KEY))
    for what, call in (pages, lookup, scrape):
        began_s = time.perf_counter()
        await call()
        costs.note(Part.OBJECTS, what, count, time.perf_counter() - began_s)
    began_s = time.perf_counter()
    tally = await storage.store.compactor.compact()
    took_s = time.perf_counter() - began_s
    costs.note(Part.OBJECTS, "compaction, for a changed file", count, took_s / max(1, tally.files_looked_at))
    began_s = time.perf_counter()
    await storage.store.compactor.compact()
    costs.note(Part.OBJECTS, "compaction, nothing changed", count, time.perf_counter() - began_s)


async def _got(storage: EmbeddedStorage, key: str) -> bytes:
    async with storage.objects.open_object(KEY, ReadRequest(BUCKET, key)) as read:
        return b"".join([bytes(piece) async for piece in read.body])


def _residents(settings: GrowthSettings, count: int, costs: Costs) -> None:
    """A full memory, in which a chunk leaves for each that comes: what a DRAM tier decides, without its copies."""
    for eviction in Eviction:
        policy, residency = policy_of(eviction, count * ALIGNMENT_BYTES), Residency(count * ALIGNMENT_BYTES)
        chains = _chains()
        for _ in range(-(-count // PREFIX_CHUNKS)):
            _come(policy, residency, next(chains))
        for _ in range(settings.runs):
            some = list(itertools.islice(chains, max(1, settings.operations // PREFIX_CHUNKS)))
            began_s = time.perf_counter()
            for chain in some:
                _come(policy, residency, chain)
            took_s = time.perf_counter() - began_s
            costs.note(Part.MEMORY, f"a chunk comes, {eviction.value}", count, took_s / len(some) / PREFIX_CHUNKS)


def _chains() -> Iterator[dict[Key, Extent]]:
    """Prefixes of PREFIX_CHUNKS chunks that nobody has asked for."""
    for first in itertools.count(0, PREFIX_CHUNKS):
        extents = [Extent(f"{first + place:032x}", 0, ALIGNMENT_BYTES, b"") for place in range(PREFIX_CHUNKS)]
        yield {key_of(extent): extent for extent in extents}


def _come(policy: EvictionPolicy, residency: Residency, chain: dict[Key, Extent]) -> None:
    change = policy.request(Request(time.monotonic(), list(chain), [ALIGNMENT_BYTES] * len(chain)))
    residency.evict(cast("list[Key]", list(change.evicted)))
    coming, refused = residency.admit(cast("list[Key]", list(change.admitted)), chain)
    for extent, _ in coming:
        residency.filled(extent)
    for key in refused:
        policy.remove(key)


def _deliveries(settings: GrowthSettings, costs: Costs) -> None:
    """Fetches over shared memory of more and more chunks, and of more and more layers. Raises FAILURES."""
    grown = [(Part.CHUNKS, count, count, 4) for count in settings.chunks]
    grown += [(Part.LAYERS, count, 16, count) for count in settings.layers]
    grown = [each for each in grown if each[0] in settings.parts]
    if not grown:
        return
    with running_server(settings.folder) as server, server.client(Transport.SHM) as client:
        prefixes = [
            make_chunks(chunk_count, ChunkLayout(num_layers, 1, SLICE_BYTES), settings.seed, f"{part.value}-{count}")
            for part, count, chunk_count, num_layers in grown
        ]
        for chunks in prefixes:
            store_chunks(server, chunks)
        buffer = client.allocate_buffer(max(chunks.payload_bytes for chunks in prefixes))
        client.register_buffer(buffer)
        for run, ((part, count, *_), chunks) in interleaved(
            list(zip(grown, prefixes, strict=True)), settings.runs, "deliveries", uncounted=2
        ):
            fetched = fetch_checked(client, chunks, buffer, Delivery.LAYER_MAJOR, Transport.SHM)
            if run > 0:
                costs.note(part, f"a delivery of {part.value}", count, fetched.ended_s, is_per_one=False)


def _requests(settings: GrowthSettings, costs: Costs) -> None:
    """An epoch of the scheduler in which so many requests are active, and the turn of one payload."""
    for _ in range(settings.runs):
        for row in measure_costs(settings.requests, settings.operations, 1, settings.seed):
            plan_s, turn_s = row["plan"]["median"], row["payload"]["median"]
            costs.note(Part.REQUESTS, f"an epoch, {row['variant']}", row["active_count"], plan_s, is_per_one=False)
            costs.note(Part.REQUESTS, f"a payload's turn, {row['variant']}", row["active_count"], turn_s)


def show(result: Json) -> dict[str, Section]:
    """One line for each operation, and the target."""
    rows = [
        {**row, "at": [f"{each['cost_s']['median'] * 1e6:,.1f} at {each['count']:,}" for each in row["costs"]]}
        for row in result["growth"]
    ]
    return {
        "growth": (
            table(
                rows,
                "operation = operation",
                Column("us, by how many there are", lambda row: ", ".join(row["at"])),
                "largest over smallest = largest_over_smallest:.2",
                "exponent = exponent:.2",
            ),
            targets(result["targets"]),
        )
    }


def plot(result: Json, path: Path) -> None:
    """The cost of each operation over the count, one panel for each part."""
    rows = [
        {"part": row["part"], "operation": row["operation"], "count": each["count"], "cost_s": each["cost_s"]}
        for row in result["growth"]
        for each in row["costs"]
    ]
    draw(CHART, rows, "growth; medians, least and greatest", path)


CHART = Chart(
    Kind.LINES,
    "count",
    "cost_s",
    "us of one operation",
    "operation",
    row="part",
    across_title="how many there are",
    scale=1e6,
    is_log=True,
)
GROWTH = Experiment(
    name="growth",
    help="how the costs of operations grow with objects, residents, chunks, layers and requests",
    description="See which costs grow faster than the work. Measure each operation of the store, the memory, "
    "deliveries and the scheduler at several counts, and fit an exponent.",
    settings=GrowthSettings,
    measure=measure_growth,
    show=show,
    plot=plot,
)
