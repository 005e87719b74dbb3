"""How long the two sides of a connection may take, by a played clock."""

from __future__ import annotations

import pytest

from objectcache.adapters.deadlines import HEAD_BYTES_MAX, ConnectionVerdict, ConnectionWatch, Deadlines

DEADLINES = Deadlines(header_timeout_s=30.0, send_idle_timeout_s=60.0)
HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n"


def test_a_head_may_take_as_long_as_its_limit_and_no_longer() -> None:
    watch = ConnectionWatch(DEADLINES)
    assert watch.verdict(0, 1000.0) is ConnectionVerdict.KEEP
    assert watch.received(HEAD, 1000.0)
    assert watch.received(b"A: b\r\n", 1029.0)
    assert watch.verdict(0, 1029.9) is ConnectionVerdict.KEEP
    assert watch.verdict(0, 1030.0) is ConnectionVerdict.HEAD_LATE


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_whole_head_is_recognised_however_it_is_split(step: int) -> None:
    watch = ConnectionWatch(DEADLINES)
    head = HEAD + b"\r\n"
    for at in range(0, len(head), step):
        assert watch.received(head[at : at + step], 0.0)
    assert watch.verdict(0, 1000.0) is ConnectionVerdict.KEEP


def test_each_request_of_a_connection_has_its_own_limit() -> None:
    watch = ConnectionWatch(DEADLINES)
    assert watch.received(HEAD + b"\r\n", 0.0)
    watch.request_begun()
    assert watch.received(b"body", 500.0)
    assert watch.verdict(0, 1000.0) is ConnectionVerdict.KEEP
    watch.request_ended()
    assert watch.received(HEAD, 2000.0)
    assert watch.verdict(0, 2029.0) is ConnectionVerdict.KEEP
    assert watch.verdict(0, 2030.0) is ConnectionVerdict.HEAD_LATE


def test_header_bytes_are_bounded_and_body_bytes_are_not_counted() -> None:
    for step in (100, 1 << 20):
        watch = ConnectionWatch(DEADLINES)
        flood = b"A: " + b"b" * (2 * HEAD_BYTES_MAX)
        assert not all(watch.received(flood[at : at + step], 0.0) for at in range(0, len(flood), step))
    watch = ConnectionWatch(DEADLINES)
    assert watch.received(HEAD + b"\r\n" + b"x" * (10 * HEAD_BYTES_MAX), 0.0)
    assert watch.received(b"x" * (10 * HEAD_BYTES_MAX), 0.0)


def test_a_reader_is_cut_when_the_queue_has_not_shrunk_for_the_limit() -> None:
    watch = ConnectionWatch(DEADLINES)
    watch.request_begun()
    for now, unsent, verdict in (
        (0.0, 900, ConnectionVerdict.KEEP),
        (59.0, 900, ConnectionVerdict.KEEP),
        (59.5, 899, ConnectionVerdict.KEEP),
        (119.0, 899, ConnectionVerdict.KEEP),
        (119.5, 0, ConnectionVerdict.KEEP),
        (200.0, 900, ConnectionVerdict.KEEP),
        (259.9, 900, ConnectionVerdict.KEEP),
        (260.0, 900, ConnectionVerdict.SEND_STALLED),
    ):
        assert watch.verdict(unsent, now) is verdict, now
