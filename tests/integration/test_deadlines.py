"""What waiting clients cost: nothing to others, and an end after a while."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.messages import Transports
from gateway import app
from objectcache.adapters import limited_server, slow_bodies
from tests.support.small_gateway import DictStorage, SmallGateway, answer, signed_head, small_gateway
from tests.support.waiting import eventually

HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n"
SHORT = {"body_idle_timeout_s": 0.3, "header_timeout_s": 0.3, "keepalive_timeout_s": 0.6}


def is_closed(sock: socket.socket) -> bool:
    """Whether the server ends the connection, by itself and without another byte."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture(autouse=True)
def _no_long_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is closed before all of its body has come is drained for a while first."""
    monkeypatch.setattr(limited_server, "LINGER_S", 0.3)


@pytest.fixture
def gateway() -> Iterator[SmallGateway]:
    """With limits that no client of a loaded machine passes."""
    with small_gateway() as running:
        yield running


@pytest.mark.slow
def test_a_body_that_stops_coming_is_a_request_timeout_and_stores_nothing() -> None:
    with small_gateway(**SHORT) as gateway, gateway.connect() as sock:
        sock.sendall(signed_head("PUT", "/b/new", 100) + b"only this")
        reply = answer(sock)
        assert (reply.status, reply.code, reply.headers["connection"]) == (400, "RequestTimeout", "close")
        assert is_closed(sock)
        assert ("b", "new") not in gateway.storage.stored


def test_a_half_sent_head_and_an_idle_connection_are_closed() -> None:
    reusing = signed_head("HEAD", "/b/missing", 0)
    with small_gateway(**SHORT) as gateway, gateway.connect() as reused:
        reused.sendall(reusing)
        with gateway.connect() as silent, gateway.connect() as half:
            half.sendall(HEAD)
            assert answer(reused, "HEAD").status == 404
            assert is_closed(half)
            assert is_closed(silent)
        assert is_closed(reused)


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_cut_and_one_that_is_slow_is_not() -> None:
    with (
        small_gateway(send_idle_timeout_s=2.0) as gateway,
        gateway.connect(receive_bytes=4096) as stuck,
        gateway.connect(receive_bytes=65536) as slow,
    ):
        gateway.storage.stored["b", "k"] = b"x" * (32 << 20)
        for sock in (stuck, slow):
            sock.sendall(signed_head("GET", "/b/k", 0))
        received = 0
        while piece := slow.recv(1 << 20):
            received += len(piece)
            if received >= 32 << 20:
                break
        assert received >= 32 << 20
        slow.close()
        assert eventually(lambda: gateway.server.open_count == 0)
        taken = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := stuck.recv(1 << 20):
                taken += len(piece)
        assert taken < 32 << 20


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\nA: " + b"b" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"k" * 20_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(300)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n" + b"".join(b"A%d: %s\r\n" % (n, b"b" * 15_000) for n in range(8)),
        b"not HTTP at all\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    ],
    ids=["long header", "long target", "many headers", "many long headers", "no HTTP", "TLS"],
)
def test_heads_nobody_should_send_get_a_400_as_s3_writes_it(gateway: SmallGateway, head: bytes) -> None:
    with gateway.connect() as sock:
        sock.sendall(head)
        reply = answer(sock)
        assert reply.status == 400
        assert reply.code in ("RequestHeaderSectionTooLarge", "InvalidRequest")
        assert reply.headers["x-amz-request-id"]
        assert reply.headers["x-amz-id-2"]
        assert is_closed(sock)


def test_above_the_limit_the_longest_idle_connection_gives_its_place_up() -> None:
    """Idle connections would otherwise lock everybody out."""
    with small_gateway(connections_max=3) as gateway, contextlib.ExitStack() as held:
        first, second, third = (held.enter_context(gateway.connect()) for _ in range(3))
        first.sendall(signed_head("GET", "/b/missing", 0))
        assert answer(first).code == "NoSuchKey"
        with gateway.connect() as fourth:
            fourth.sendall(signed_head("GET", "/b/missing", 0))
            assert answer(fourth).code == "NoSuchKey"
            assert is_closed(second)
            for sock in (first, third):
                sock.sendall(signed_head("GET", "/b/missing", 0))
                assert answer(sock).code == "NoSuchKey"


def test_above_the_limit_nobody_with_a_request_is_cut() -> None:
    with small_gateway(connections_max=3) as gateway, contextlib.ExitStack() as held:
        busy = [held.enter_context(gateway.connect()) for _ in range(3)]
        for sock in busy:
            sock.sendall(signed_head("PUT", "/b/key", 10))
        assert eventually(lambda: gateway.server.open_count == 3 and not gateway.server.idle)
        with gateway.connect() as fourth:
            assert is_closed(fourth)
        busy[0].close()
        assert eventually(lambda: gateway.server.open_count < 3)
        with gateway.connect() as fifth:
            fifth.sendall(signed_head("GET", "/b/missing", 0))
            assert answer(fifth).code == "NoSuchKey"


def test_above_the_limit_the_slowest_bodies_give_their_places_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One client that sends a byte now and then on each connection would otherwise keep everybody else out."""
    monkeypatch.setattr(slow_bodies, "BODY_WINDOW_S", 0.1)
    with small_gateway(connections_max=3, header_timeout_s=0.5) as gateway, contextlib.ExitStack() as held:
        slow, held_back, other = (held.enter_context(gateway.connect()) for _ in range(3))
        held_back.sendall(signed_head("PUT", "/b/held", 10, Expect="100-continue"))
        assert answer_of_leave(held_back)
        for sock in (slow, other):
            sock.sendall(signed_head("PUT", "/b/key", 10) + b"x")
        held_back.sendall(b"0123456789")
        assert answer(held_back).status == 200
        held_back.sendall(signed_head("PUT", "/b/key", 10) + b"x")
        assert eventually(lambda: gateway.server.slow.count == 3)
        with gateway.connect() as fourth:
            fourth.sendall(signed_head("GET", "/b/missing", 0))
            assert answer(fourth).code == "NoSuchKey"
        assert eventually(lambda: gateway.server.open_count == 2)
        ended = [sock for sock in (slow, held_back, other) if is_answered(sock)]
        assert [answer(sock).code for sock in ended] == ["RequestTimeout"]
        assert is_closed(ended[0])
        assert "ended 1 whose bodies come at less than 1024 bytes/s" in caplog.text
        assert "Unhandled" not in caplog.text
        for sock in {slow, held_back, other} - set(ended):
            sock.sendall(b"123456789")
            assert answer(sock).status == 200


def answer_of_leave(sock: socket.socket) -> bool:
    return sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"


def is_answered(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_the_limit_is_cut_to_what_the_host_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 1,024 files may be open, 16,384 connections cannot be."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with small_gateway() as gateway:
        assert gateway.server.connections_max == 512


@pytest.mark.parametrize("status", [200, 503])
def test_many_health_checks_at_once_ask_the_storage_side_once(
    gateway: SmallGateway, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """They need no key, and while the storage side hangs each of them would wait for an answer of its own."""
    may_answer, asked = threading.Event(), []

    async def transports(_: DictStorage, access_key: str) -> Transports:
        asked.append(access_key)
        await asyncio.get_running_loop().run_in_executor(None, may_answer.wait)
        if status == 503:
            raise ServerError(ErrorCode.SLOW_DOWN, "gone", retryable=True)
        return Transports(False, None)

    monkeypatch.setattr(DictStorage, "transports", transports)
    monkeypatch.setattr(app, "HEALTH_KEPT_S", 60.0)
    head = b"GET /_objectcache/health HTTP/1.1\r\nHost: h\r\n\r\n"
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(gateway.connect()) for _ in range(20)]
        for sock in socks:
            sock.sendall(head)
        assert eventually(lambda: gateway.server.open_count == len(socks) and not gateway.server.idle)
        socks[0].close()  # whoever came first goes away
        assert eventually(lambda: gateway.server.open_count == len(socks) - 1)
        may_answer.set()
        assert {answer(sock).status for sock in socks[1:]} == {status}
        socks[1].sendall(head)
        assert answer(socks[1]).status == status
    assert len(asked) == 1


def test_two_thousand_idle_connections_do_not_disturb_others() -> None:
    with small_gateway() as gateway, contextlib.ExitStack() as held:
        waiting = [held.enter_context(socket.socket()) for _ in range(2000)]
        for sock in waiting:
            sock.setblocking(False)
            assert sock.connect_ex(("127.0.0.1", gateway.port)) in (0, errno.EINPROGRESS)
        assert eventually(lambda: gateway.server.open_count == 2000)
        for sock in waiting[::2]:
            sock.sendall(HEAD)
        with gateway.connect() as sock:
            for index in range(20):
                sock.sendall(signed_head("PUT", f"/b/{index}", 5) + b"hello")
                assert answer(sock).status == 200
        assert len(gateway.storage.stored) == 20


@pytest.mark.slow
def test_a_refused_upload_that_waited_for_leave_is_closed_without_its_body(gateway: SmallGateway) -> None:
    """Whether the body still comes cannot be known, so nothing after it could be told apart."""
    with gateway.connect() as sock:
        sock.sendall(signed_head("PUT", "/b/k", 5, Expect="100-continue", content_md5="wrong"))
        reply = answer(sock)
        assert (reply.status, reply.code, reply.headers["connection"]) == (400, "InvalidDigest", "close")
        assert is_closed(sock)


def test_leave_to_send_is_given_once_the_request_is_worth_its_body(gateway: SmallGateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(signed_head("PUT", "/b/new", 5, Expect="100-continue"))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"hello")
        assert answer(sock).status == 200
    assert gateway.storage.stored["b", "new"] == b"hello"
