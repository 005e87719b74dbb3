"""The S3 load, run as a process of its own: `python -m bench.beds.s3_load SEED NBYTES_MAX`.

Each line on standard input is a `Job`, each answer an `Outcome`. The client is obstore, called from one thread for each
request in flight: the calls leave the interpreter lock, and of the native clients it cost the least processor time a
request. Bodies are kept until the clock has stopped and compared then.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore.store import S3Store

from bench.beds.kv_peers.work import S3Target
from bench.beds.processes import BaselineError, say
from bench.beds.s3_jobs import Job, Kind, ObjectContent, Outcome, make_object_content
from bench.core.lines import from_line, to_line

REQUEST_TIMEOUT_S = 300
POOL_IDLE_TIMEOUT = "30s"
"""Sooner than servers close idle connections: without retries a close must not meet a request."""
PAGE_KEYS = 1000
CHECK_IN_FLIGHT = 4
FAILURE_CHARS_MAX = 400
PRESIGNED_FOR = timedelta(hours=1)
Request = Callable[[int, int, int], None]
"""Makes one request: the number of the calling thread, the index of the request in the job, the number of its object.
"""
Received = TypeVar("Received", int, bytes)
Bodies = list[tuple[int, Any]]
"""Numbers of objects, and the memory in which they came."""


@cache
def open_store(target: S3Target, is_signed: bool = True) -> S3Store:
    """obstore's client, without retries: a request that fails must be seen. It is kept, so that connections are warm.
    Bodies are not signed where `is_signed` is false.
    """
    return S3Store(
        target.bucket,
        endpoint=target.url,
        region=target.region,
        access_key_id=target.access_key,
        secret_access_key=target.secret_key,
        virtual_hosted_style_request=False,
        unsigned_payload=not is_signed,
        client_options={"allow_http": True, "timeout": f"{REQUEST_TIMEOUT_S}s", "pool_idle_timeout": POOL_IDLE_TIMEOUT},
        retry_config={"max_retries": 0},
    )


def run_job(job: Job, content: ObjectContent) -> Outcome:
    """Do a job in this process."""
    if job.kind is Kind.LIST:
        return _list_objects(job)
    if job.kind is Kind.CHECK:
        return _check_and_delete(job, content)
    bodies: Bodies = []
    if job.kind in (Kind.RECEIVE, Kind.RAW):
        with ExitStack() as stack:
            outcome = _run_threads(job, _receiver(job, bodies, stack))
    else:
        store = open_store(job.target, job.is_signed)

        def get(_thread: int, _index: int, number: int) -> None:
            bodies.append((number, obstore.get(store, job.key(number)).bytes()))

        def put(_thread: int, _index: int, number: int) -> None:
            obstore.put(store, job.key(number), content.window(number, job.nbytes).data, use_multipart=False)

        outcome = _run_threads(job, put if job.kind is Kind.PUT else get)
    for number, body in bodies:
        if not content.holds(np.frombuffer(memoryview(body), dtype=np.uint8), number, job.nbytes):
            return replace(outcome, problem=outcome.problem or f"{job.key(number)}: wrong bytes")
    return outcome


def _list_objects(job: Job) -> Outcome:
    """List the keys of objects 0 to `population` page by page, and compare names, sizes and order."""
    store, pages, problem = open_store(job.target, job.is_signed), list[Any](), None
    cpu_s, times_s = time.process_time(), [time.monotonic()]
    deadline_s = times_s[0] + job.seconds
    try:
        for page in obstore.list(store, prefix=f"{job.group.value}/{job.nbytes}", chunk_size=PAGE_KEYS):
            pages.append(page)
            times_s.append(time.monotonic())
            if times_s[-1] > deadline_s:
                break
    except Exception as error:  # whatever the client raises is the sample's problem
        problem = _failure(job, error)
    ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    listed = [(entry["path"], entry["size"]) for page in pages for entry in page]
    for number, entry in enumerate(listed):
        if entry != (job.key(number), job.nbytes):
            problem = problem or f"entry {number} of the list is {entry[0]} of {entry[1]} bytes"
    if len(listed) != job.population and ended_s <= deadline_s:
        problem = problem or f"{len(listed)} keys listed, not {job.population}"
    latencies_s = tuple(np.diff(times_s).tolist())
    return Outcome(times_s[0], ended_s, len(pages), len(listed), latencies_s, cpu_s, problem)


def _check_and_delete(job: Job, content: ObjectContent) -> Outcome:
    """Compare `count_max` objects from number `first` on, a few at a time, and delete them in as few requests as the
    client makes of it.
    """
    store, numbers = open_store(job.target, job.is_signed), list(map(job.number, range(job.count_max)))

    def holds(number: int) -> bool:
        body = obstore.get(store, job.key(number)).bytes()
        return content.holds(np.frombuffer(memoryview(body), dtype=np.uint8), number, job.nbytes)

    started_s, cpu_s, problem = time.monotonic(), time.process_time(), None
    try:
        with ThreadPoolExecutor(CHECK_IN_FLIGHT) as pool:
            checked = zip(numbers, pool.map(holds, numbers), strict=True)
            problem = next((f"{job.key(number)}: wrong bytes" for number, is_same in checked if not is_same), None)
        obstore.delete(store, list(map(job.key, numbers)))
    except Exception as error:  # whatever the client raises is the job's problem
        problem = problem or _failure(job, error)
    return Outcome(started_s, time.monotonic(), len(numbers), len(numbers), (), time.process_time() - cpu_s, problem)


def _run_threads(job: Job, request: Request) -> Outcome:
    """One thread for each request in flight; all start together."""
    indexes, failures = count(), list[str]()
    latencies_s: list[list[float]] = [[] for _ in range(job.in_flight)]
    barrier = threading.Barrier(job.in_flight + 1)
    deadline_s = float("inf")

    def work(thread: int) -> None:
        mine_s = latencies_s[thread]
        barrier.wait()
        while not failures:
            begun_s = time.monotonic()
            if mine_s and begun_s > deadline_s:
                return
            index = next(indexes)  # only now: what was put must be an unbroken row of numbers
            if index >= job.count_max:
                return
            try:
                request(thread, index, job.number(index))
            except Exception as error:  # whatever the client raises is the sample's problem
                failures.append(_failure(job, error))
                return
            mine_s.append(time.monotonic() - begun_s)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(job.in_flight)]
    for thread in threads:
        thread.start()
    cpu_s, started_s = time.process_time(), time.monotonic()
    deadline_s = started_s + job.seconds
    barrier.wait()
    for thread in threads:
        thread.join()
    ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    every_s = tuple(latency_s for mine_s in latencies_s for latency_s in mine_s)
    return Outcome(started_s, ended_s, len(every_s), len(every_s), every_s, cpu_s, next(iter(failures), None))


def _failure(job: Job, error: Exception) -> str:
    return f"{job.kind.value}: {type(error).__name__}: {error}"[:FAILURE_CHARS_MAX]


def _receiver(job: Job, bodies: Bodies, stack: ExitStack) -> Request:
    """GETs through plain sockets, which `stack` closes, into memory that is there already, with URLs signed beforehand;
    or no HTTP at all. The receiving half is the same for both, so their ratio is what the server and HTTP cost.
    """
    slots = np.full((job.count_max, job.nbytes), 0xFF, dtype=np.uint8)
    numbers, url = list({job.number(index) for index in range(job.count_max)}), urlsplit(job.target.url)
    if job.kind is Kind.RAW:
        heads = {number: f"{job.nbytes} {number}\n".encode() for number in numbers}
    else:
        signed = obstore.sign(open_store(job.target), "GET", list(map(job.key, numbers)), PRESIGNED_FOR)
        targets = (each.removeprefix(job.target.url) for each in signed)
        gets = (f"GET {target} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode() for target in targets)
        heads = dict(zip(numbers, gets, strict=True))
    address = (url.hostname or "", url.port or 80)
    sockets = [stack.enter_context(socket.create_connection(address, REQUEST_TIMEOUT_S)) for _ in range(job.in_flight)]

    def request(thread: int, index: int, number: int) -> None:
        connection, slot = sockets[thread], slots[index].data
        connection.sendall(heads[number])
        received = 0 if job.kind is Kind.RAW else _start_of_body(connection, slot)
        while received < len(slot):
            received += _not_empty(connection.recv_into(slot[received:]))
        bodies.append((number, slots[index]))

    return request


def _start_of_body(connection: socket.socket, slot: memoryview) -> int:
    """Read the head of an answer; bytes of the body that came with it go into the slot."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += _not_empty(connection.recv(4096))
    head, _, body = head.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1] != b"200" or f"content-length: {len(slot)}".encode() not in head.lower():
        raise BaselineError(f"unexpected answer: {head[:80]!r}")
    slot[: len(body)] = body
    return len(body)


def _not_empty(received: Received) -> Received:
    if not received:
        raise BaselineError("the server closed the connection early")
    return received


def main() -> None:
    """Do jobs until standard input ends."""
    seed, nbytes_max = map(int, sys.argv[1:])
    content = make_object_content(nbytes_max, seed)
    say("ready")
    for line in sys.stdin:
        say(to_line(run_job(from_line(Job, line), content)))


if __name__ == "__main__":
    main()
