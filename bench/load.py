"""The S3 load, run as a process of its own: `python -m bench.load SEED NBYTES_MAX`, by `load_processes`.

Each line on standard input is a `Job`, each answer an `Outcome`. The client is obstore, called from one thread for each
request in flight: the calls leave the interpreter lock, and of the native clients it cost the least processor time a
request. Bodies are kept until the clock has stopped and compared then.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Sequence
from itertools import count
from typing import Protocol

import numpy as np
import obstore
from obstore.store import S3Store

from bench.jobs import BUCKET, REGION, REQUEST_TIMEOUT_S, Job, Kind, Outcome
from bench.objects import ObjectContent, make_object_content, object_key
from bench.receiver import Receiver

POOL_IDLE_TIMEOUT = "30s"
"""Sooner than servers close idle connections: without retries a close must not meet a request."""
PAGE_KEYS = 1000
FAILURE_CHARS_MAX = 400


class Worker(Protocol):
    """Carries out single requests; `request` may be called from several threads at once."""

    def request(self, index: int, number: int) -> int:
        """One request for object `number`; how many objects it concerned."""

    def problem(self) -> str | None:
        """What was wrong with the bytes that came, once the clock has stopped."""


class Getter:
    """GET whole objects through obstore."""

    def __init__(self, job: Job, store: S3Store, content: ObjectContent) -> None:
        self._job, self._store, self._content = job, store, content
        self._bodies: list[tuple[int, obstore.Bytes]] = []

    def request(self, index: int, number: int) -> int:
        body = obstore.get(self._store, object_key(self._job.group, self._job.nbytes, number)).bytes()
        self._bodies.append((number, body))
        return 1

    def problem(self) -> str | None:
        for number, body in self._bodies:
            if not self._content.holds(np.frombuffer(memoryview(body), dtype=np.uint8), number, self._job.nbytes):
                return f"{object_key(self._job.group, self._job.nbytes, number)}: wrong bytes"
        return None


class Putter:
    """PUT whole objects in one request each."""

    def __init__(self, job: Job, store: S3Store, content: ObjectContent) -> None:
        self._job, self._store, self._content = job, store, content

    def request(self, index: int, number: int) -> int:
        body = self._content.window(number, self._job.nbytes).data
        obstore.put(self._store, object_key(self._job.group, self._job.nbytes, number), body, use_multipart=False)
        return 1

    def problem(self) -> str | None:
        return None


def main(arguments: Sequence[str]) -> None:
    """Do jobs until standard input ends."""
    seed, nbytes_max = map(int, arguments)
    content = make_object_content(nbytes_max, seed)
    print("ready", flush=True)
    for line in sys.stdin:
        print(run_job(Job.from_line(line), content).to_line(), flush=True)


def run_job(job: Job, content: ObjectContent) -> Outcome:
    """Do a job in this process."""
    if job.kind is Kind.LIST:
        return list_objects(job, open_store(job))
    if job.kind is Kind.DELETE:
        return delete_objects(job, open_store(job))
    return _run_threads(job, _worker(job, content))


def list_objects(job: Job, store: S3Store) -> Outcome:
    """List the keys of objects 0 to `population` page by page, and compare names, sizes and order."""
    latencies, listed = array("d"), 0
    problem: str | None = None
    cpu_s = time.process_time()
    started_s = before_s = time.monotonic()
    pages = []
    try:
        for page in obstore.list(store, prefix=f"{job.group.value}/{job.nbytes}", chunk_size=PAGE_KEYS):
            now_s = time.monotonic()
            latencies.append(now_s - before_s)
            before_s = now_s
            pages.append(page)
            if now_s > started_s + job.seconds:
                break
    except Exception as error:  # whatever the client raises is the sample's problem
        problem = _failure(job, error)
    ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    for page in pages:
        for entry in page:
            if entry["path"] != object_key(job.group, job.nbytes, listed) or entry["size"] != job.nbytes:
                problem = problem or f"entry {listed} of the list is {entry['path']} of {entry['size']} bytes"
            listed += 1
    if listed != job.population and ended_s <= started_s + job.seconds:
        problem = problem or f"{listed} keys listed, not {job.population}"
    return Outcome(started_s, ended_s, len(pages), listed, latencies, cpu_s, problem)


def delete_objects(job: Job, store: S3Store) -> Outcome:
    """Delete `count_max` objects from number `first` on, in as few requests as the client makes of it."""
    started_s, cpu_s, problem = time.monotonic(), time.process_time(), None
    try:
        obstore.delete(store, [object_key(job.group, job.nbytes, job.number(n)) for n in range(job.count_max)])
    except Exception as error:  # whatever the client raises is the job's problem
        problem = _failure(job, error)
    return Outcome(started_s, time.monotonic(), 1, job.count_max, array("d"), time.process_time() - cpu_s, problem)


def open_store(job: Job) -> S3Store:
    """obstore's client, without retries: a request that fails must be seen."""
    return S3Store(
        BUCKET,
        endpoint=job.target.url,
        region=REGION,
        access_key_id=job.target.access_key,
        secret_access_key=job.target.secret_key,
        virtual_hosted_style_request=False,
        unsigned_payload=not job.is_signed,
        client_options={"allow_http": True, "timeout": f"{REQUEST_TIMEOUT_S}s", "pool_idle_timeout": POOL_IDLE_TIMEOUT},
        retry_config={"max_retries": 0},
    )


def _worker(job: Job, content: ObjectContent) -> Worker:
    if job.kind in (Kind.RECEIVE, Kind.RAW):
        return Receiver(job, content)
    store = _stores.setdefault((job.target.url, job.is_signed), open_store(job))
    if job.kind is Kind.PUT:
        return Putter(job, store, content)
    return Getter(job, store, content)


_stores: dict[tuple[str, bool], S3Store] = {}
"""Kept between jobs, so that connections are warm."""


def _run_threads(job: Job, worker: Worker) -> Outcome:
    """One thread for each request in flight; all start together."""
    indexes, failures = count(), list[str]()
    latencies: list[array[float]] = [array("d") for _ in range(job.in_flight)]
    items = [0] * job.in_flight
    barrier = threading.Barrier(job.in_flight + 1)
    deadline_s = float("inf")

    def work(place: int) -> None:
        barrier.wait()
        while not failures:
            begun_s = time.monotonic()
            if latencies[place] and begun_s > deadline_s:
                return
            index = next(indexes)  # only now: what was put must be an unbroken row of numbers
            if index >= job.count_max:
                return
            try:
                items[place] += worker.request(index, job.number(index))
            except Exception as error:  # whatever the client raises is the sample's problem
                failures.append(_failure(job, error))
                return
            latencies[place].append(time.monotonic() - begun_s)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(job.in_flight)]
    for thread in threads:
        thread.start()
    cpu_s, started_s = time.process_time(), time.monotonic()
    deadline_s = started_s + job.seconds
    barrier.wait()
    _join(threads)
    ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    every = array("d")
    for some in latencies:
        every.extend(some)
    problem = failures[0] if failures else worker.problem()
    return Outcome(started_s, ended_s, len(every), sum(items), every, cpu_s, problem)


def _failure(job: Job, error: Exception) -> str:
    return f"{job.kind.value}: {type(error).__name__}: {error}"[:FAILURE_CHARS_MAX]


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
