"""Records and frames: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from storage_server.shared_files.clock import StampClock
from storage_server.shared_files.records import BodyRow, Record, decode, encode, file_ids, wanted_bytes, writer_of
from storage_server.store.rows import Touched

ATTRIBUTES = '{"headers":{"content-type":"text/plain"},"tags":{"a":"b"}}'
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
TIMES = st.floats(0, 4e9)
SIZES = st.integers(0, 1 << 62)
BODIES = st.builds(
    BodyRow,
    st.integers(1, 10_000),
    SIZES,
    SIZES,
    st.sampled_from(["", "ab" * 16]),
    SIZES,
    TEXTS,
    TIMES,
    st.none() | TEXTS,
    st.binary(max_size=16),
)
ABOUT_OBJECT = st.builds(Touched, st.just("object"), TEXTS, TEXTS)
OBJECTS = st.builds(
    Record, ABOUT_OBJECT, SIZES, st.tuples(SIZES, TEXTS, TIMES, st.just(ATTRIBUTES)), st.lists(BODIES).map(tuple)
)
BUCKETS = st.builds(Record, st.builds(Touched, st.just("bucket"), TEXTS), SIZES, st.tuples(TEXTS, TIMES, st.just("[]")))
GONE = st.builds(Record, ABOUT_OBJECT | st.builds(Touched, st.just("upload"), TEXTS), SIZES, st.none())
UPLOADS = st.builds(
    Record,
    st.builds(Touched, st.just("upload"), TEXTS),
    SIZES,
    st.tuples(TEXTS, TEXTS, TEXTS, TIMES, st.just(ATTRIBUTES)),
)
PARTS = st.builds(
    lambda upload, stamp, body: Record(Touched("part", upload, str(body.part_number)), stamp, (), (body,)),
    TEXTS,
    SIZES,
    BODIES,
)
RECORDS = OBJECTS | BUCKETS | GONE | UPLOADS | PARTS


def framed(fields: Any) -> bytes:
    payload = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(payload).to_bytes(4, "little") + crc32c(payload).to_bytes(4, "little") + payload


@given(st.lists(st.lists(RECORDS, min_size=1, max_size=3), max_size=3), st.integers(0, 200))
def test_frames_come_back_and_a_cut_one_is_waited_for(written: list[list[Record]], cut: int) -> None:
    frames = [encode(records) for records in written]
    data = b"".join(frames)
    found, problem = decode(data)
    assert [records for _, records in found] == written
    assert [end for end, _ in found] == [sum(map(len, frames[: count + 1])) for count in range(len(frames))]
    assert problem is None
    kept = data[: max(0, len(data) - cut)]
    found, problem = decode(kept)
    assert problem is None
    assert [records for _, records in found] == written[: len(found)]
    end = found[-1][0] if found else 0
    assert len(kept) - end < wanted_bytes(kept, end)


@given(st.lists(RECORDS, min_size=1, max_size=3), st.data())
def test_a_changed_byte_is_noticed(records: list[Record], data: st.DataObject) -> None:
    frame = bytearray(encode(records))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    found, problem = decode(bytes(frame))
    assert found == []
    assert problem is not None or at < 4  # a wrong length may ask for more


@given(st.binary(max_size=200))
def test_garbage_is_no_frame(garbage: bytes) -> None:
    found, _ = decode(garbage)
    assert found == [] or framed(garbage[8 : found[0][0]]) == garbage[: found[0][0]]


OBJECT: list[Any] = ["object", "b", "k", 7, [1, "etag", 1.0, "{}"], [[1, 0, 1, "ab" * 16, 0, "etag", 1.0, None, ""]]]


@pytest.mark.parametrize(
    "fields",
    [
        b"{",
        {},
        [1],
        [[]],
        [["object", "b", "k"]],
        [["ghost", "b", "k", 7]],
        [[["object"], "b", "k", 7]],
        [["object", "b", 1, 7]],
        [["object", "\ud800", "k", 7]],
        [["object", "b", "k", True]],
        [["object", "b", "k", -1]],
        [["object", "b", "k", 1 << 63]],
        [["object", "b", "k", 7.0]],
        [OBJECT[:4] + [[1, "etag", math.nan, "{}"], []]],
        [OBJECT[:4] + [[1, "etag", 1.0, "no json"], []]],
        [OBJECT[:4] + [[1, "etag", 1.0, '{"checksum": 3}'], []]],
        [OBJECT[:4] + [[1, "etag", 1.0], []]],
        [OBJECT[:5] + [{}]],
        [OBJECT[:5] + [[[1]]]],
        [OBJECT[:5] + [[[1, 0, -1, "ab" * 16, 0, "etag", 1.0, None, ""]]]],
        [OBJECT[:5] + [[[1, 0, 1, "../../../../etc/passwd", 0, "etag", 1.0, None, ""]]]],
        [OBJECT[:5] + [[[1, 0, 1, "AB" * 16, 0, "etag", 1.0, None, ""]]]],
        [OBJECT[:5] + [[[1, 0, 1, "ab" * 16, 0, "etag", 1.0, None, "?"]]]],
        [["part", "upload", "2", 7, [], OBJECT[5]]],
        [["part", "upload", "2", 7, [], []]],
        [["bucket", "b", "", 7, ["owner", 1.0, "[]"], OBJECT[5]]],
        [["bucket", "b", "", 7, ["owner", 1.0, '[{"a": 1}]'], []]],
    ],
    ids=lambda fields: str(fields)[-60:],
)
def test_a_record_that_makes_no_sense_ends_what_can_be_read(fields: Any) -> None:
    good = encode(decode(framed([OBJECT]))[0][0][1])
    found, problem = decode(good + framed(fields) + good)
    assert len(found) == 1
    assert problem is not None


def test_a_file_names_its_writer() -> None:
    record = decode(framed([OBJECT]))[0][0][1][0]
    assert file_ids([record]) == {"ab" * 16}
    assert writer_of("ab" * 16) == "ab" * 6


@given(st.lists(st.integers(0, 1 << 60) | st.none(), max_size=20))
def test_stamps_grow_whatever_the_time_of_day_does(steps: list[int | None]) -> None:
    """None asks for a stamp; a number is seen elsewhere, and the time of day stands still."""
    clock = StampClock(lambda: 1000.0, 0)
    greatest = 0
    for step in steps:
        if step is None:
            stamp = clock.stamp()
            assert stamp > greatest
            assert stamp >= 1_000_000_000
            greatest = stamp
        else:
            clock.observe(step)
            greatest = max(greatest, step)
