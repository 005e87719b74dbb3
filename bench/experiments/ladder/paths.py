"""The five S3-compatible paths (ObjectCache paper, section 4.1), as requests that can be run at once; with the objects
that they move, and the server that has them.

RDMA stands for one-sided UCX operations here: over a NIC where there is one, else shared memory or TCP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from bench.beds.processes import BaselineError
from bench.experiments.ladder.bed import Session, even_parts
from calibration.chunks import Chunks, check_fetch, store_chunks
from calibration.content import Bytes, VerificationError, make_content, verify_payload
from calibration.samples import Task
from calibration.servers import BUCKET, LocalServer
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from nixl_client.client import ObjectCacheClient, Transport
from nixl_client.objects import Path

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

    client: ObjectCacheClient
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
    client: ObjectCacheClient
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
