"""Bulk reads against a service that is played with plain sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from descriptors.errors import ServerError
from storage_server.home.fetch.bulk_reads import BulkRead, BulkReads, Into
from storage_server.settings import UpstreamSettings

Answer = Callable[[socket.socket], None]
BODY = bytes(range(256)) * 40
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxx\r\n0\r\n\r\n"


class Service:
    """Answers each request, of one connection after the other, with the next of `answers`."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.connection_count = 0
        self._bound = socket.create_server(("127.0.0.1", 0))
        self.settings = UpstreamSettings(
            f"http://127.0.0.1:{self._bound.getsockname()[1]}",
            "key",
            "secret",
            connect_timeout_s=30.0,
            read_timeout_s=30.0,
            connections_max=8,
            fetches_max=2,
            uploads_max=1,
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no further connection."""
        with suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)
        self._bound.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._bound.accept()
                self.connection_count += 1
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while b"\r\n\r\n" in connection.recv(65536):
                self.answers.pop(0)(connection)


@pytest.fixture
def service() -> Iterator[Service]:
    with closing(Service()) as running:
        yield running


@pytest.fixture
def reads(service: Service) -> Iterator[BulkReads]:
    with closing(BulkReads(service.settings)) as made:
        yield made


@pytest.fixture
def hasty(service: Service) -> Iterator[BulkReads]:
    """It gives up what is slow soon."""
    with closing(BulkReads(replace(service.settings, read_timeout_s=0.5))) as made:
        yield made


def head(length: int = len(BODY), further: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nETag: x\r\n{further}\r\n".encode()


def whole(connection: socket.socket) -> None:
    connection.sendall(head() + BODY)


def begun(reads: BulkReads, view: memoryview, steps: list[int] | None = None) -> BulkRead:
    return reads.read("/bucket/key", {}, Into(view, 1000, 4000, (steps if steps is not None else []).append))


async def test_a_body_comes_into_memory_step_by_step_and_the_connection_is_used_again(
    service: Service, reads: BulkReads
) -> None:
    service.answers = [whole, whole]
    for _ in range(2):
        view, steps = memoryview(bytearray(len(BODY))), list[int]()
        reading = begun(reads, view, steps)
        told = await reading.head
        assert (told.status, told.headers["etag"]) == (200, "x")
        await reading.body
        assert bytes(view) == BODY
        assert steps == [1000, 5000, 9000, len(BODY)]
        await reading.end()
    assert service.connection_count == 1


async def test_a_connection_that_the_service_has_closed_costs_nothing(service: Service, reads: BulkReads) -> None:
    received, closed = threading.Event(), threading.Event()

    def closing_after(connection: socket.socket) -> None:
        whole(connection)
        received.wait(60)
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    service.answers = [closing_after, whole]
    for _ in range(2):
        view = memoryview(bytearray(len(BODY)))
        await begun(reads, view).body
        assert bytes(view) == BODY
        received.set()
        assert await asyncio.to_thread(closed.wait, 60)
    assert service.connection_count == 2


@pytest.mark.parametrize(
    "leftover", [b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", b"more than was said"]
)
async def test_what_comes_on_an_idle_connection_is_no_answer(
    service: Service, reads: BulkReads, leftover: bytes
) -> None:
    received, sent = threading.Event(), threading.Event()

    def too_much(connection: socket.socket) -> None:
        whole(connection)
        received.wait(60)
        connection.sendall(leftover)
        sent.set()

    service.answers = [too_much, whole]
    for _ in range(2):
        view = memoryview(bytearray(len(BODY)))
        await begun(reads, view).body
        assert bytes(view) == BODY
        received.set()
        assert await asyncio.to_thread(sent.wait, 60)
    assert service.connection_count == 2


async def test_a_refusal_comes_with_its_document(service: Service, reads: BulkReads) -> None:
    refusal = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nwords"
    service.answers = [lambda connection: connection.sendall(refusal), whole]
    view = memoryview(bytearray(len(BODY)))
    reading = begun(reads, view)
    told = await reading.head
    await reading.body
    assert (told.status, told.document, bytes(view).strip(b"\0")) == (404, b"words", b"")
    await begun(reads, view).body
    assert service.connection_count == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: connection.sendall(head() + BODY[:5000]),
        lambda connection: connection.sendall(head(len(BODY) - 1) + BODY[:-1]),
        lambda connection: connection.sendall(head(len(BODY) + 1) + BODY + b"x"),
        lambda connection: connection.sendall(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxx\r\n0\r\n\r\n"
        ),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nETag: " + b"x" * 100_000 + b"\r\n\r\n"),
        lambda connection: connection.sendall(b"garbage\r\n\r\n"),
        lambda connection: connection.shutdown(socket.SHUT_RDWR),
        lambda connection: time.sleep(2),  # longer than the time limit of a read
    ],
    ids=["truncated", "short", "long", "chunked", "large head", "garbage", "no answer", "slow"],
)
async def test_what_is_no_whole_answer_is_an_error(
    service: Service, hasty: BulkReads, reads: BulkReads, answer: Answer
) -> None:
    """And nothing is written past the memory given."""
    service.answers = [answer, whole]
    guarded = bytearray(len(BODY) + 10)
    reading = begun(hasty, memoryview(guarded)[: len(BODY)])
    async with asyncio.timeout(30):
        with pytest.raises(ServerError):
            await reading.body
        with suppress(ServerError):
            await reading.head
        await reading.end()
    assert guarded[len(BODY) :] == bytes(10)
    view = memoryview(bytearray(len(BODY)))
    await begun(reads, view).body
    assert bytes(view) == BODY


@pytest.mark.parametrize("part", ["head", "body"])
async def test_what_drips_ends(service: Service, hasty: BulkReads, part: str) -> None:
    """Each byte comes before the time limit of a read ends; the connection and all that wait are free soon all the
    same.
    """
    ended = threading.Event()

    def dripping(connection: socket.socket) -> None:
        answer = head() + BODY
        fast = 5 if part == "head" else len(head()) + 100
        connection.sendall(answer[:fast])
        for at in range(fast, len(answer)):
            connection.sendall(answer[at : at + 1])
            if ended.wait(0.1):
                return

    service.answers = [dripping, whole]
    reading = begun(hasty, memoryview(bytearray(len(BODY))))
    async with asyncio.timeout(30):
        with pytest.raises(ServerError, match="too slowly") as failed:
            await reading.body
        assert failed.value.retryable
        with suppress(ServerError):
            await reading.head
        await reading.end()
    ended.set()
    view = memoryview(bytearray(len(BODY)))
    await begun(hasty, view).body
    assert bytes(view) == BODY


async def test_a_head_that_is_too_long_is_about_one_object(service: Service, reads: BulkReads) -> None:
    """It is no failure of the service, which would be left alone for everybody."""
    headers = "".join(f"x-amz-meta-{number}: x\r\n" for number in range(200))
    service.answers = [lambda connection: connection.sendall(head(further=headers) + BODY)]
    with pytest.raises(ServerError) as failed:
        await begun(reads, memoryview(bytearray(len(BODY)))).body
    assert not failed.value.retryable


async def test_interim_answers_without_end_end_the_connection(service: Service, reads: BulkReads) -> None:
    """http.client would pass over them for as long as they come, in a thread that takes turns with the event loop."""
    has_left = threading.Event()

    def endless(connection: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1_000)
        has_left.set()

    service.answers = [endless]
    with pytest.raises(ServerError, match="lines") as failed:
        await begun(reads, memoryview(bytearray(len(BODY)))).body
    assert failed.value.retryable
    assert await asyncio.to_thread(has_left.wait, 30)


CHUNKED_ERROR = b"HTTP/1.1 404 x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("lines", [b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 100_000, b"1\r\n \r\n" * 100_000])
async def test_an_error_whose_chunks_or_trailers_have_no_end_is_its_status(
    service: Service, reads: BulkReads, lines: bytes
) -> None:
    """Each line is a step of Python, in 64 threads, that the event loop waits for."""
    service.answers = [lambda connection: connection.sendall(CHUNKED_ERROR + lines)]
    reading = begun(reads, memoryview(bytearray(len(BODY))))
    told = await reading.head
    assert (told.status, told.document) == (404, b"")
    await reading.end()


async def test_an_error_in_chunks_is_read(service: Service, reads: BulkReads) -> None:
    service.answers = [
        lambda connection: connection.sendall(CHUNKED_ERROR + b"3\r\n<a>\r\n4\r\n</a>\r\n0\r\n\r\n"),
        whole,
    ]
    for _ in range(2):
        reading = begun(reads, memoryview(bytearray(len(BODY))))
        told = await reading.head
        assert told.document == (b"<a></a>" if told.status == 404 else b"")
        await reading.end()
    assert service.connection_count == 1


async def test_headers_are_read_as_utf_8(service: Service, reads: BulkReads) -> None:
    service.answers = [lambda connection: connection.sendall(head(further="x-amz-meta-who: J\u00fcrgen\r\n") + BODY)]
    reading = begun(reads, memoryview(bytearray(len(BODY))))
    assert (await reading.head).headers["x-amz-meta-who"] == "J\u00fcrgen"
    await reading.body


async def test_a_refusal_that_closes_its_connection_leaves_none_behind(service: Service, reads: BulkReads) -> None:
    refusal = b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    service.answers = [lambda connection: connection.sendall(refusal), whole]
    await begun(reads, memoryview(bytearray(len(BODY)))).body
    view = memoryview(bytearray(len(BODY)))
    await begun(reads, view).body
    assert (bytes(view), service.connection_count) == (BODY, 2)


@pytest.mark.slow
async def test_nothing_is_written_after_a_caller_that_was_cancelled_has_ended_it(
    service: Service, reads: BulkReads
) -> None:
    """The memory is another tenant's then. The thread is slow here, and bytes wait for it in the socket."""
    service.answers = [whole]
    view, loop, stepped = memoryview(bytearray(len(BODY))), asyncio.get_running_loop(), asyncio.Event()

    def slowly(nbytes: int) -> None:
        loop.call_soon_threadsafe(stepped.set)
        time.sleep(0.1)  # a slow thread

    reading = reads.read("/bucket/key", {}, Into(view, 1000, 1000, slowly))

    async def waiting() -> None:
        try:
            await reading.body
        finally:
            await reading.end()

    task = asyncio.create_task(waiting())
    await stepped.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    before = bytes(view)
    view[:] = bytes(len(BODY))
    await asyncio.sleep(0.3)  # longer than a step of a thread that goes on
    assert bytes(view) == bytes(len(BODY))
    assert before != bytes(len(BODY))


@pytest.mark.slow
async def test_what_has_not_connected_is_given_up_at_once(service: Service, reads: BulkReads) -> None:
    """The service's queue of connections is full, so that a connection waits for its time limit."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    with closing(full):
        others = [socket.socket() for _ in range(4)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        settings = replace(service.settings, endpoint=url, connect_timeout_s=60.0)
        with closing(BulkReads(settings)) as slow:
            reading = begun(slow, memoryview(bytearray(10)))
            await asyncio.sleep(0.1)  # its thread connects meanwhile; nobody tells of it
            async with asyncio.timeout(30):
                await reading.end()
            for each in (full, *others):  # its thread hears of that
                each.close()


async def test_what_is_broken_off_ends_at_once(service: Service) -> None:
    """Its thread has ended when `end` returns: nobody writes into the memory any more."""
    hanging = threading.Event()

    def half(connection: socket.socket) -> None:
        connection.sendall(head() + BODY[:5000])
        hanging.wait(600)

    service.answers = [half]
    with closing(BulkReads(replace(service.settings, read_timeout_s=600.0))) as patient:
        reading = begun(patient, memoryview(bytearray(len(BODY))))
        await reading.head
        async with asyncio.timeout(60):
            await reading.end()
        with pytest.raises(ServerError):
            await reading.body
    hanging.set()


async def test_a_service_that_is_not_there_is_an_error(service: Service, reads: BulkReads) -> None:
    service.close()
    reading = begun(reads, memoryview(bytearray(10)))
    with pytest.raises(ServerError):
        await reading.head
    await reading.end()
