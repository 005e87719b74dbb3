"""One sample of a path: lay bytes out, move them, compare every one, clean up. Only the moving is timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.child import BaselineError
from bench.content import Bytes
from bench.jobs import BUCKET
from bench.ladder.bed import Session
from bench.ladder.blocks import Concurrency
from bench.ladder.paths import Operation, Requests, S3Path
from bench.ladder.results import Label
from bench.ladder.rounds import Task
from bench.ladder.transfers import Work, clear, make_work, place, verify
from bench.progress import progress_bar
from bench.server import BenchServer
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport

DIRECT_RANGES = f"{S3Path.DIRECT.value}, a range each"
DELETE_KEYS_MAX = 1000
FILL_BATCH_BYTES = 64 * MIB
NOTES = (
    "RDMA paths: one-sided UCX writes and reads by NIXL, without a NIC over shared memory",
    "C=8: eight client threads of one process; C=32: four times as many; each has one blocking request in flight",
    "GETs: warm, stored moments ago; PUTs: under new keys, durable when answered, deleted afterwards",
    "what was fetched is compared byte by byte in the client's memory, what was put is read back over S3TCP; both "
    "outside the clock",
)


@dataclass(frozen=True, slots=True)
class PathBed:
    """A server, our client of it, and the memory it may reach."""

    server: BenchServer
    client: ObjectCacheClient
    s3: Any
    buffer: Bytes
    seed: int
    _put_counts: Iterator[int] = field(default_factory=itertools.count)

    def work(self, layout: ChunkLayout, count: int) -> Work:
        """Objects of one shape, stored."""
        size = layout.per_layer_chunk_bytes
        work = make_work(f"get/{layout.num_layers}/{size}/", layout, count, self.buffer, self.seed)
        with self.server.client(Transport.HTTP) as client, progress_bar(count, "storing objects") as advance:
            batch = max(1, FILL_BATCH_BYTES // layout.chunk_bytes)
            for first in range(0, count, batch):
                some = work.keys[first : first + batch]
                client.put_chunks(some, [work.content.chunk(first + index) for index in range(len(some))])
                advance(len(some))
        return work

    def new_keys(self, count: int) -> list[str]:
        """Keys nothing was ever stored under."""
        number = next(self._put_counts)
        return [f"put/{number:06d}/{index:06d}" for index in range(count)]

    def delete(self, keys: Sequence[str]) -> None:
        """Make room again. Raises BaselineError."""
        for first in range(0, len(keys), DELETE_KEYS_MAX):
            named = [{"Key": key} for key in keys[first : first + DELETE_KEYS_MAX]]
            answer = self.s3.delete_objects(Bucket=BUCKET, Delete={"Objects": named, "Quiet": True})
            if answer.get("Errors"):
                raise BaselineError(f"objects were not deleted: {answer['Errors'][0]}")


@contextmanager
def path_bed(session: Session, buffer_bytes: int) -> Iterator[PathBed]:
    """A client of the shared server, whose buffer is registered with it."""
    server = session.served().server
    with server.client(Transport.UCX) as client:
        buffer = client.allocate_buffer(buffer_bytes)
        client.register_buffer(buffer)
        s3 = server.s3()
        try:
            yield PathBed(server, client, s3, buffer, session.settings.seed)
        finally:
            s3.close()


@contextmanager
def client_threads(concurrency: Sequence[Concurrency]) -> Iterator[dict[Concurrency, ThreadPoolExecutor]]:
    """As many threads for each concurrency as it has requests in flight."""
    with ExitStack() as stack:
        yield {each: stack.enter_context(ThreadPoolExecutor(each.in_flight)) for each in concurrency}


def path_task(
    bed: PathBed,
    work: Work,
    path: S3Path,
    operation: Operation,
    concurrency: Concurrency,
    threads: ThreadPoolExecutor,
    block_bytes: int,
) -> Task:
    """A task for `run_rounds`."""
    labels: dict[str, Label] = {
        "path": path.value,
        "operation": operation.value,
        "block_bytes": block_bytes,
        "in_flight": concurrency.in_flight,
    }
    requests = Requests(bed.client, work, concurrency.in_flight)
    sample = _get_sample if operation is Operation.GET else _put_sample
    return Task(labels, work.nbytes, partial(sample, bed, requests, path, threads))


def slices_task(
    bed: PathBed, work: Work, concurrency: Concurrency, threads: ThreadPoolExecutor, block_bytes: int
) -> Task:
    """Layer order out of requests for one range each, which is what S3 alone offers."""
    requests = Requests(bed.client, work, concurrency.in_flight)
    labels: dict[str, Label] = {
        "path": DIRECT_RANGES,
        "operation": Operation.GET.value,
        "block_bytes": block_bytes,
        "in_flight": concurrency.in_flight,
    }

    def run() -> float:
        clear(work)
        duration_s = requests.run(requests.slices(), threads)
        verify(work, requests.in_flight, S3Path.AGG.delivery)
        return duration_s

    return Task(labels, work.nbytes, run)


def _get_sample(bed: PathBed, requests: Requests, path: S3Path, threads: ThreadPoolExecutor) -> float:
    clear(requests.work)
    duration_s = requests.run(requests.of(path, Operation.GET, requests.work.keys), threads)
    verify(requests.work, requests.in_flight, path.delivery)
    return duration_s


def _put_sample(bed: PathBed, requests: Requests, path: S3Path, threads: ThreadPoolExecutor) -> float:
    work = requests.work
    keys = bed.new_keys(len(work.keys))
    place(work, requests.in_flight, path.delivery)
    duration_s = requests.run(requests.of(path, Operation.PUT, keys), threads)
    clear(work)
    stored = Requests(bed.client, work, requests.in_flight)
    stored.run(stored.of(S3Path.TCP, Operation.GET, keys), threads)
    verify(work, requests.in_flight, S3Path.TCP.delivery)
    bed.delete(keys)
    return duration_s
