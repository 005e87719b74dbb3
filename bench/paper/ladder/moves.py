"""The five S3-compatible paths (ObjectCache paper, section 4.1), as requests that can be run at once; with the objects
that they move, and the server that has them. Figures 9 and 11 show one object in each request and many; figure 10 shows
one request at a time, its latency split into client, gateway, storage and transfer; A8 shows aggregated layers over
payload sizes and chunk sizes.

RDMA stands for one-sided UCX operations here: over a NIC where there is one, else shared memory or TCP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from bench.beds.processes import BaselineError
from bench.core.show import Json
from bench.paper.ladder.bed import NotRun, Session, even_parts, figure, served
from bench.paper.tables import TOKEN_LAYER_BYTES
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.tracing import TIMING_HEADER, parse_timing, timing_header
from descriptors.units import KIB, MIB
from nixl_client.client import Client, Transport
from nixl_client.objects import Path
from nixl_client.session.timing import Timing, split_time
from nixl_client.transports.http import Stream
from objectcache.calibration.chunks import Chunks, check_fetch, fetch_task, make_chunks, store_chunks
from objectcache.calibration.content import Bytes, VerificationError, make_content, verify_payload
from objectcache.calibration.samples import Cell, Label, Task, progress_bar, run_rounds
from objectcache.calibration.servers import BUCKET, LocalServer

DELETE_KEYS_MAX = 1000


class S3Path(Enum):
    """The first three name one object in each request, the next two many. RANGES is no path of its own: Direct, with a
    request for each slice, which is how standard S3 gets layers in order.
    """

    TCP = "S3TCP"
    BUFFER = "S3RDMA Buffer"
    DIRECT = "S3RDMA Direct"
    BATCH = "S3RDMA Batch"
    AGG = "S3RDMA Agg"
    RANGES = "S3RDMA Direct, a range each"

    @property
    def delivery(self) -> Delivery:
        """The order in which bytes lie in the client's memory."""
        return Delivery.LAYER_MAJOR if self in (S3Path.AGG, S3Path.RANGES) else Delivery.CHUNK_MAJOR


class Operation(Enum):
    """Which way the bytes go."""

    GET = "GET"
    PUT = "PUT"


ONE_OBJECT = {S3Path.TCP: Path.TCP, S3Path.BUFFER: Path.BUFFER, S3Path.DIRECT: Path.DIRECT}
MANY_OBJECTS = (S3Path.BATCH, S3Path.AGG)
FIVE = (*ONE_OBJECT, *MANY_OBJECTS)
Request = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Work:
    """Objects to move, the buffer they move from or into, and how many requests may be in flight."""

    client: Client
    objects: Chunks
    buffer: Bytes
    in_flight: int = 1

    def parts(self) -> list[tuple[int, Chunks]]:
        """The objects that a request names together where it names many, and where they begin in the buffer."""
        size = self.objects.layout.chunk_bytes
        parts = even_parts(len(self.objects.keys), self.in_flight)
        return [(part.start * size, self.objects.part(part.start, len(part))) for part in parts]

    def clear(self) -> None:
        """Nothing of an earlier run may pass for this one's bytes."""
        self.buffer[: self.objects.payload_bytes].fill(0)

    def place(self, delivery: Delivery) -> None:
        """Lay the objects out in the buffer, ready to be put in that order."""
        for offset, part in self.parts():
            objects = np.stack([part.content.chunk(index) for index in range(len(part.keys))])
            slices = objects.reshape(len(part.keys), part.layout.num_layers, part.layout.per_layer_chunk_bytes)
            ordered = slices.transpose(1, 0, 2) if delivery is Delivery.LAYER_MAJOR else slices
            self.buffer[offset : offset + part.payload_bytes] = ordered.reshape(-1)

    def verify(self, delivery: Delivery) -> None:
        """Compare every byte that was fetched. Raises VerificationError."""
        for offset, part in self.parts():
            verify_payload(self.buffer[offset : offset + part.payload_bytes], part.content, delivery)

    def requests(self, path: S3Path, operation: Operation) -> list[Request]:
        """One for each object, slice, or part of the objects that a request names together."""
        layout, objects = self.objects.layout, self.client.objects
        if path in MANY_OBJECTS:
            move = self._put_many if operation is Operation.PUT else self._get_many
            return [partial(move, path.delivery, offset, part) for offset, part in self.parts()]
        if path is S3Path.RANGES:
            size = layout.per_layer_chunk_bytes
            ranges = [(first, first + size - 1) for first, _ in map(layout.layer_range, range(layout.num_layers))]
            return [
                partial(self._get_slice, key, offset + layout.layer_offset(layer, len(part.keys)) + place * size, span)
                for offset, part in self.parts()
                for layer, span in enumerate(ranges)
                for place, key in enumerate(part.keys)
            ]
        move_one = objects.get_object if operation is Operation.GET else objects.put_object
        size = layout.chunk_bytes
        return [
            partial(self._move_one, partial(move_one, key), ONE_OBJECT[path], place * size, size)
            for place, key in enumerate(self.objects.keys)
        ]

    def _get_slice(self, key: str, offset: int, span: tuple[int, int]) -> None:
        get = partial(self.client.objects.get_object, key, byte_range=span)
        self._move_one(get, Path.DIRECT, offset, self.objects.layout.per_layer_chunk_bytes)

    def _move_one(self, move: Callable[..., Any], path: Path, offset: int, size: int) -> None:
        moved = move(self.buffer, offset=offset, length=size, path=path)
        if moved.path is not path:
            raise VerificationError(f"the server answered over {moved.path.value} what was asked for over {path.value}")
        if moved.nbytes != size:
            raise VerificationError(f"{moved.nbytes} bytes were moved, {size} expected")

    def _put_many(self, delivery: Delivery, offset: int, part: Chunks) -> None:
        self.client.objects.put_chunks(part.keys, part.layout, self.buffer, offset=offset, delivery=delivery)

    def _get_many(self, delivery: Delivery, offset: int, part: Chunks) -> None:
        with self.client.fetch(part.keys, part.layout, self.buffer, offset=offset, delivery=delivery) as fetch:
            check_fetch(fetch, delivery, part.payload_bytes)


@dataclass(frozen=True, slots=True)
class PathBed:
    """A server, our client of it, the memory it may reach, and threads for each number of requests in flight."""

    server: LocalServer
    client: Client
    s3: Any
    buffer: Bytes
    seed: int
    stack: ExitStack
    _pools: dict[int, ThreadPoolExecutor] = field(default_factory=dict)
    _put_counts: Iterator[int] = field(default_factory=itertools.count)

    def work(self, layout: ChunkLayout, count: int) -> Work:
        """Seeded objects of one shape, stored."""
        keys = [f"get/{layout.num_layers}/{layout.per_layer_chunk_bytes}/{number:06d}" for number in range(count)]
        objects = Chunks(keys, make_content(count, layout, self.seed))
        store_chunks(self.server, objects, "storing objects")
        return Work(self.client, objects, self.buffer)

    def run(self, requests: Sequence[Request], in_flight: int) -> float:
        """Seconds until all have been answered."""
        if in_flight not in self._pools:
            self._pools[in_flight] = self.stack.enter_context(ThreadPoolExecutor(in_flight))
        started_s = time.monotonic()
        for _ in self._pools[in_flight].map(lambda request: request(), requests):
            pass
        return time.monotonic() - started_s

    def prepare(self, work: Work, path: S3Path, operation: Operation) -> Work:
        """For a GET, with the buffer cleared; or for a PUT under new keys, with the objects in the buffer."""
        if operation is Operation.GET:
            work.clear()
            return work
        work.place(path.delivery)
        number = next(self._put_counts)
        keys = [f"put/{number:06d}/{index:06d}" for index in range(len(work.objects.keys))]
        return replace(work, objects=replace(work.objects, keys=keys))

    def check(self, work: Work, path: S3Path, operation: Operation) -> None:
        """Compare what was fetched; or read back what was put over S3TCP, compare and delete it. Raises
        VerificationError, BaselineError.
        """
        if operation is Operation.GET:
            work.verify(path.delivery)
            return
        work.clear()
        self.run(work.requests(S3Path.TCP, Operation.GET), work.in_flight)
        work.verify(S3Path.TCP.delivery)
        keys = work.objects.keys
        for first in range(0, len(keys), DELETE_KEYS_MAX):
            named = [{"Key": key} for key in keys[first : first + DELETE_KEYS_MAX]]
            answer = self.s3.delete_objects(Bucket=BUCKET, Delete={"Objects": named, "Quiet": True})
            if answer.get("Errors"):
                raise BaselineError(f"objects were not deleted: {answer['Errors'][0]}")

    def task(self, work: Work, path: S3Path, operation: Operation, in_flight: int) -> Task:
        """A GET or PUT of all objects by that path. The block of the axis is an object where it has one layer, and else
        one of its slices.
        """

        def run() -> float:
            prepared = self.prepare(replace(work, in_flight=in_flight), path, operation)
            duration_s = self.run(prepared.requests(path, operation), in_flight)
            self.check(prepared, path, operation)
            return duration_s

        size = work.objects.layout.per_layer_chunk_bytes
        labels = {"path": path.value, "operation": operation.value, "block_bytes": size, "in_flight": in_flight}
        return Task(labels, work.objects.payload_bytes, run)


@contextmanager
def path_bed(session: Session, buffer_bytes: int) -> Iterator[PathBed]:
    """A client of the shared server, whose buffer is registered with it."""
    server = session.server
    with server.client(Transport.UCX) as client, closing(server.s3()) as s3, ExitStack() as stack:
        buffer = client.allocate_buffer(buffer_bytes)
        client.register_buffer(buffer)
        yield PathBed(server, client, s3, buffer, session.settings.seed, stack)


NUM_LAYERS = 4
REQUESTS_PER_RUN = 20
WARM_UP = 3
PARTS = ("client", "gateway", "storage", "transfer")
"""Parts of a request's time (ObjectCache paper, section 4.4)."""


def latency(session: Session) -> Json:
    """Every path and both operations, over object sizes. Raises NotRun where answers carry no account."""
    settings = session.settings
    sizes = (64 * KIB,) if settings.is_smoke else (64 * KIB, 512 * KIB, 4 * MIB)
    count = 2 if settings.is_smoke else settings.runs * REQUESTS_PER_RUN
    cases = [(path, operation, size) for size in sizes for operation in Operation for path in FIVE]
    cells: list[Cell] = []
    with path_bed(session, max(sizes)) as bed, progress_bar(len(cases), "figure 10") as advance:
        heads = _heads_of(bed.client)
        works = {size: bed.work(ChunkLayout(NUM_LAYERS, 1, size // NUM_LAYERS), 1) for size in sizes}
        for path, operation, size in cases:
            seen = [_one(bed, works[size], path, operation, heads) for _ in range(WARM_UP + count)]
            labels = {"path": path.value, "operation": operation.value, "block_bytes": size}
            for part in PARTS:
                samples_s = tuple(getattr(timing, f"{part}_s") for timing in seen[WARM_UP:])
                cells.append(Cell({**labels, "part": part}, 0, samples_s))
            advance(1)
    notes = [
        f"one request in flight; gateway, storage and transfer as the answer's {TIMING_HEADER} says, client the rest "
        "of the client's own time",
        "S3TCP GET: its body comes after that header, so the time between head and end of body is transfer",
        f"an object is one chunk of {NUM_LAYERS} slices; Batch and Agg name it in a descriptor",
        "every object is compared byte by byte after its request, outside the clock",
    ]
    return figure({"object_bytes": sizes, "num_layers": NUM_LAYERS, "requests": count}, notes, cells)


Heads = list[tuple[float, Mapping[str, str]]]
"""For each answer that a client got: when its head was there, and its headers."""


def _heads_of(client: Client) -> Heads:
    """The heads of a client that serves this figure alone, from now on."""
    http: Any = client.http
    sent, heads = http.sent, Heads()

    def tapped(*arguments: Any, **options: Any) -> Stream:
        answer: Stream = sent(*arguments, **options)
        heads.append((time.monotonic(), answer.headers))
        return answer

    http.sent = tapped
    return heads


def _one(bed: PathBed, work: Work, path: S3Path, operation: Operation, heads: Heads) -> Timing:
    """One request, checked, and the parts of its time. Where the payload is the answer's body, the server's account
    ends with the head, and what comes after it is transfer.
    """
    prepared = bed.prepare(work, path, operation)
    (request,) = prepared.requests(path, operation)
    heads.clear()
    started_s = time.monotonic()
    request()
    ended_s = time.monotonic()
    head_at_s, headers = heads[-1]
    bed.check(prepared, path, operation)
    check_account(headers.get(TIMING_HEADER), f"{path.value} {operation.value}")
    body_s = ended_s - head_at_s if operation is Operation.GET and path is S3Path.TCP else 0.0
    return split_time(ended_s - started_s, headers, body_s)


def check_account(text: str | None, what: str) -> None:
    """A part that is left out would be counted as the client's. Raises NotRun without an account, VerificationError for
    one that is not understood.
    """
    if text is None:
        raise NotRun(f"{what}: the answer carries no {TIMING_HEADER}")
    if timing_header(parse_timing(text)) != text:
        raise VerificationError(f"{TIMING_HEADER}: {text!r} is not understood")


PATH_NOTES = (
    "RDMA paths: one-sided UCX writes and reads by NIXL, without a NIC over shared memory",
    "C=8: eight client threads of one process; C=32: four times as many; each has one blocking request in flight",
    "GETs: warm, stored moments ago; PUTs: under new keys, durable when answered, deleted afterwards",
    "what was fetched is compared byte by byte in the client's memory, what was put is read back over S3TCP; both "
    "outside the clock",
)
SINGLE_BYTES, SINGLE_BYTES_SMOKE = 32 * MIB, 512 * KIB
"""Moved in a sample, or more where the largest concurrency needs more objects."""
OBJECTS_SMOKE_MIN = 2
SAMPLE_BYTES, SAMPLE_BYTES_SMOKE = 128 * MIB, MIB
CHUNKS_MIN, CHUNKS_MAX = 2, 128
"""Bounds what small slices cost: 32 MiB of 64 KiB slices are 512 requests for one range each."""
COMPARED = {"batch_over_direct": S3Path.BATCH, "agg_over_direct": S3Path.AGG, "ranges_over_direct": S3Path.RANGES}


def _moved(
    session: Session, name: str, counts: Mapping[ChunkLayout, int], asked: Sequence[tuple[S3Path, Operation, int]]
) -> list[Cell]:
    """So many objects of each shape, moved in every way that is asked for: path, operation, requests in flight."""
    cells: list[Cell] = []
    with path_bed(session, max(layout.delivery_bytes(count) for layout, count in counts.items())) as bed:
        for layout, count in counts.items():
            work = bed.work(layout, count)
            title = f"figure {name}: {layout.per_layer_chunk_bytes >> 10} KiB"
            cells += run_rounds([bed.task(work, *one) for one in asked], session.settings.runs, title)
    return cells


def single_objects(session: Session) -> Json:
    """GET and PUT over object sizes."""
    settings = session.settings
    sample_bytes = SINGLE_BYTES_SMOKE if settings.is_smoke else SINGLE_BYTES
    least = OBJECTS_SMOKE_MIN if settings.is_smoke else max(settings.in_flight)
    counts = {size: max(least, sample_bytes // size) for size in settings.block_bytes}
    asked = [(path, operation, each) for operation in Operation for each in settings.in_flight for path in ONE_OBJECT]
    cells = _moved(session, "9", {ChunkLayout(1, 1, size): count for size, count in counts.items()}, asked)
    return figure({"block_bytes": settings.block_bytes, "objects_in_a_sample": counts}, PATH_NOTES, cells)


def many_objects(session: Session) -> Json:
    """GET and PUT of the same chunks by every path."""
    settings = session.settings
    sample_bytes = SAMPLE_BYTES_SMOKE if settings.is_smoke else SAMPLE_BYTES
    layouts = [ChunkLayout(NUM_LAYERS, 1, size) for size in settings.block_bytes]
    counts = {layout: min(CHUNKS_MAX, max(CHUNKS_MIN, sample_bytes // layout.chunk_bytes)) for layout in layouts}
    asked = [
        (path, operation, each)
        for operation in Operation
        for each in (1, *settings.in_flight)
        for path in (MANY_OBJECTS if each == 1 else FIVE)
    ]
    asked += [(S3Path.RANGES, Operation.GET, each) for each in settings.in_flight]
    cells = _moved(session, "11", counts, asked)
    notes = [
        *PATH_NOTES,
        "C=1: one request for everything, which is what a prefix hit asks for",
        f"chunks of {NUM_LAYERS} slices; S3TCP, Buffer and Direct: a request for each chunk",
        "Batch (chunk-major) and Agg (layer-major): as many requests as may be in flight, each naming its share of "
        "the chunks, never more requests than chunks",
        "Direct, a range each: a request for each slice, which is how standard S3 gets layers in order",
    ]
    by_size = {layout.per_layer_chunk_bytes: count for layout, count in counts.items()}
    found = {"slice_bytes": settings.block_bytes, "num_layers": NUM_LAYERS, "chunks_in_a_sample": by_size}
    return figure(found, notes, cells, speedups(cells))


def speedups(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Throughput of each path over S3RDMA Direct's, the best concurrency of either (medians); None where there is no
    such request.
    """
    best: dict[tuple[Label, Label], dict[Label, float]] = {}
    for cell in cells:
        rates = best.setdefault((cell.labels["operation"], cell.labels["block_bytes"]), {})
        rates[cell.labels["path"]] = max(rates.get(cell.labels["path"], 0.0), cell.nbytes / cell.median_s())
    found = []
    for (operation, size), rates in best.items():
        over = {name: rates.get(path.value) for name, path in COMPARED.items()}
        direct = rates[S3Path.DIRECT.value]
        ratios = {name: None if rate is None else round(rate / direct, 2) for name, rate in over.items()}
        found.append({"operation": operation, "block_bytes": size, **ratios})
    return found


def aggregation(session: Session) -> Json:
    """Every payload size with every chunk size, in layer-major order. A server for each payload size, all running at
    once, so that rounds can be interleaved; those not asked idle.
    """
    settings = session.settings
    sizes: dict[str, Any] = {
        "aggregation_bytes": (512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB),
        "chunk_tokens": (16, 32, 64, 128, 256, 512),
        "num_layers": 16,
        "token_count": 2048,
    }
    if settings.is_smoke:
        sizes = {"aggregation_bytes": (512 * KIB,), "chunk_tokens": (16, 256), "num_layers": 4, "token_count": 256}
    layers, token_count = sizes["num_layers"], sizes["token_count"]
    layouts = [ChunkLayout(layers, tokens, TOKEN_LAYER_BYTES * tokens) for tokens in sizes["chunk_tokens"]]
    prefixes = [make_chunks(token_count // each.chunk_tokens, each, settings.seed) for each in layouts]
    tasks: list[Task] = []
    with ExitStack() as stack:
        for nbytes in sizes["aggregation_bytes"]:
            config = f"[internals.storage]\naggregation_bytes = {nbytes}\ndirect_payload_bytes = {nbytes}\n"
            server = served(settings, stack, config)
            for prefix in prefixes:
                store_chunks(server, prefix, f"figure A8: storing, {nbytes >> 10} KiB")
            client = stack.enter_context(server.client(settings.transport))
            buffer = client.allocate_buffer(max(prefix.payload_bytes for prefix in prefixes))
            client.register_buffer(buffer)
            for prefix in prefixes:
                shape = {"chunk_tokens": prefix.layout.chunk_tokens, "slice_bytes": prefix.layout.per_layer_chunk_bytes}
                tasks.append(fetch_task({"aggregation_bytes": nbytes, **shape}, client, prefix, buffer))
        cells = run_rounds(tasks, settings.runs, "figure A8")
    transport = settings.transport.value
    notes = [
        f"one descriptor GET of {token_count} tokens and {layers} layers, layer-major, over {transport}; "
        "warm: stored moments ago and fetched once before",
        "a slice larger than the payload is sent in pieces",
    ]
    return figure({**sizes, "transport": transport}, notes, cells)
