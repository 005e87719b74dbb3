"""The five S3-compatible paths (ObjectCache paper, section 4.1), as requests that can be run at once.

RDMA stands for one-sided UCX operations here: over a NIC where there is one, else shared memory or TCP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial

from bench.content import VerificationError
from bench.ladder.transfers import Work
from descriptors.descriptor import Delivery
from nixl_client.client import ObjectCacheClient
from nixl_client.objects import ObjectMoved, Path

FETCH_TIMEOUT_S = 300.0


class S3Path(Enum):
    """The first three name one object in each request, the last two many."""

    TCP = "S3TCP"
    BUFFER = "S3RDMA Buffer"
    DIRECT = "S3RDMA Direct"
    BATCH = "S3RDMA Batch"
    AGG = "S3RDMA Agg"

    @property
    def delivery(self) -> Delivery:
        """The order in which bytes lie in the client's memory."""
        return Delivery.LAYER_MAJOR if self is S3Path.AGG else Delivery.CHUNK_MAJOR


class Operation(Enum):
    """Which way the bytes go."""

    GET = "GET"
    PUT = "PUT"


ONE_OBJECT = {S3Path.TCP: Path.TCP, S3Path.BUFFER: Path.BUFFER, S3Path.DIRECT: Path.DIRECT}
Request = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests that move all of `work`, at most `in_flight` of them at once."""

    client: ObjectCacheClient
    work: Work
    in_flight: int

    def of(self, path: S3Path, operation: Operation, keys: Sequence[str]) -> list[Request]:
        """One for each object, or for each part of them where a request names many. `keys` are those of the work, or
        others to put its objects under.
        """
        if path in ONE_OBJECT:
            one = self._get_one if operation is Operation.GET else self._put_one
            return [partial(one, ONE_OBJECT[path], key, index) for index, key in enumerate(keys)]
        many = self._get_many if operation is Operation.GET else self._put_many
        return [partial(many, path.delivery, keys, part) for part in self.work.parts(self.in_flight)]

    def slices(self) -> list[Request]:
        """A GET by S3RDMA Direct for each slice, in the order a layer-major payload has them."""
        layout = self.work.layout
        return [
            partial(self._get_slice, part, layer_index, position)
            for part in self.work.parts(self.in_flight)
            for layer_index in range(layout.num_layers)
            for position in range(len(part))
        ]

    def run(self, requests: Sequence[Request], threads: ThreadPoolExecutor) -> float:
        """Seconds until all have been answered; `threads` are as many as may be in flight."""
        started_s = time.monotonic()
        for _ in threads.map(_call, requests):
            pass
        return time.monotonic() - started_s

    def _get_one(self, path: Path, key: str, index: int) -> None:
        size = self.work.layout.chunk_bytes
        moved = self.client.objects.get_object(key, self.work.buffer, offset=index * size, length=size, path=path)
        _check_moved(moved, path, size)

    def _get_slice(self, part: range, layer_index: int, position: int) -> None:
        layout = self.work.layout
        size = layout.per_layer_chunk_bytes
        first, _ = layout.layer_range(layer_index)
        start = part.start * layout.chunk_bytes + layout.layer_offset(layer_index, len(part)) + position * size
        moved = self.client.objects.get_object(
            self.work.keys[part.start + position],
            self.work.buffer,
            offset=start,
            length=size,
            path=Path.DIRECT,
            byte_range=(first, first + size - 1),
        )
        _check_moved(moved, Path.DIRECT, size)

    def _put_one(self, path: Path, key: str, index: int) -> None:
        size = self.work.layout.chunk_bytes
        moved = self.client.objects.put_object(key, self.work.buffer, offset=index * size, length=size, path=path)
        _check_moved(moved, path, size)

    def _get_many(self, delivery: Delivery, keys: Sequence[str], part: range) -> None:
        layout = self.work.layout
        offset = part.start * layout.chunk_bytes
        some = keys[part.start : part.stop]
        with self.client.fetch(some, layout, self.work.buffer, offset=offset, delivery=delivery) as fetch:
            result = fetch.wait(FETCH_TIMEOUT_S)
        if result.mode.value != delivery.value or result.transferred_bytes != layout.payload_bytes(len(part)):
            raise VerificationError(f"{result} came of {delivery.value}, {layout.payload_bytes(len(part))} bytes")

    def _put_many(self, delivery: Delivery, keys: Sequence[str], part: range) -> None:
        layout = self.work.layout
        offset = part.start * layout.chunk_bytes
        some = keys[part.start : part.stop]
        self.client.objects.put_chunks(some, layout, self.work.buffer, offset=offset, delivery=delivery)


def _check_moved(moved: ObjectMoved, path: Path, nbytes: int) -> None:
    if moved.path is not path:
        raise VerificationError(f"the server answered over {moved.path.value} what was asked for over {path.value}")
    if moved.nbytes != nbytes:
        raise VerificationError(f"{moved.nbytes} bytes were moved, {nbytes} expected")


def _call(request: Request) -> None:
    request()
