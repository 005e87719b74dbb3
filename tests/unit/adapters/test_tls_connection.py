"""The records of a TLS connection are given to be decrypted a few at a time."""

from __future__ import annotations

from objectcache.adapters.tls_connection import PIECE_BYTES, RECORDS_MAX, WaitingRecords


def record(nbytes: int) -> bytes:
    return b"\x17\x03\x03" + nbytes.to_bytes(2) + b"x" * nbytes


def pieces(waiting: WaitingRecords) -> list[bytes]:
    found = []
    while waiting.has_piece:
        found.append(waiting.piece())
    return found


def test_a_piece_has_few_records_however_small_they_are() -> None:
    """Eleven thousand records of one byte came in one read, and were decrypted in one pass of the loop."""
    waiting = WaitingRecords()
    waiting.add(record(18) * 1000)
    found = pieces(waiting)
    assert b"".join(found) == record(18) * 1000
    assert {len(each) for each in found[:-1]} == {RECORDS_MAX * len(record(18))}


def test_a_piece_of_large_records_has_a_bound_in_bytes() -> None:
    waiting = WaitingRecords()
    waiting.add(record(16_384) * 20)
    assert max(map(len, pieces(waiting))) < PIECE_BYTES + len(record(16_384))


def test_bytes_are_given_whole_and_in_order_in_whatever_parts_they_come() -> None:
    said = record(0) + record(300) + record(3) + record(40_000) + record(1)
    for step in (1, 2, 7, 299, 50_000):
        waiting, found = WaitingRecords(), b""
        for start in range(0, len(said), step):
            waiting.add(said[start : start + step])
            found += b"".join(pieces(waiting))
        assert found == said


def test_a_head_that_has_not_come_whole_waits() -> None:
    waiting = WaitingRecords()
    waiting.add(record(5)[:4])
    assert not waiting.has_piece
    assert waiting.piece() == b""
    waiting.add(record(5)[4:6])
    assert waiting.piece() == record(5)[:6]
