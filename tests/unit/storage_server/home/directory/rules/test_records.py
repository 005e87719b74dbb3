"""Records and frames: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from storage_server.home.directory.rules.clock import AHEAD_S, StampClock
from storage_server.home.directory.rules.records import (
    STAMP_MAX,
    BadRecordError,
    BodyRow,
    PassedOver,
    Record,
    decode,
    encode,
    file_ids,
    records_in,
    rows_of,
    wanted_bytes,
    writer_of,
)
from storage_server.kernel.rules.rows import Touched

ATTRIBUTES = '{"headers":{"content-type":"text/plain"},"tags":{"a":"b"}}'
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
KEYS = TEXTS.filter(lambda key: key and "\0" not in key)
NAMES = st.from_regex(r"[!-~]{1,20}", fullmatch=True)
TAGS = st.from_regex(r"[!#-~]{0,40}", fullmatch=True)
TIMES = st.floats(0, 4e9)
STAMPS = st.integers(0, STAMP_MAX)
SIZES = st.integers(0, 1 << 20)


def body(number: int, offset: int, nbytes: int, *rest: Any) -> BodyRow:
    file_id, words = ("ab" * 16, bytes(4 * -(-nbytes // 16_384))) if nbytes else ("", b"")
    return BodyRow(number, offset, nbytes, file_id, *rest, words)


def bodies_of(sizes: list[int], *rest: Any) -> tuple[BodyRow, ...]:
    return tuple(body(number + 1, sum(sizes[:number]), nbytes, *rest) for number, nbytes in enumerate(sizes))


BODY_REST = (SIZES, TAGS, TIMES, st.none() | TAGS)
BODIES = st.builds(bodies_of, st.lists(SIZES, max_size=4), *BODY_REST)
ABOUT_OBJECT = st.builds(Touched, st.just("object"), NAMES, KEYS)
OBJECTS = st.builds(
    lambda about, stamp, bodies, tag, time: Record(
        about, stamp, (sum(body.nbytes for body in bodies), tag, time, ATTRIBUTES), bodies
    ),
    ABOUT_OBJECT,
    STAMPS,
    BODIES,
    TAGS,
    TIMES,
)
BUCKETS = st.builds(
    Record, st.builds(Touched, st.just("bucket"), NAMES, st.just("")), STAMPS, st.tuples(TEXTS, TIMES, st.just("[]"))
)
GONE = st.builds(Record, ABOUT_OBJECT | st.builds(Touched, st.just("upload"), NAMES, st.just("")), STAMPS, st.none())
UPLOADS = st.builds(
    Record,
    st.builds(Touched, st.just("upload"), NAMES, st.just("")),
    STAMPS,
    st.tuples(TEXTS, TEXTS, TEXTS, TIMES, st.just(ATTRIBUTES)),
)
PARTS = st.builds(
    lambda upload, stamp, body: Record(Touched("part", upload, str(body.part_number)), stamp, (), (body,)),
    NAMES,
    STAMPS,
    st.builds(body, st.integers(1, 10_000), SIZES, SIZES, *BODY_REST),
)
RECORDS = OBJECTS | BUCKETS | GONE | UPLOADS | PARTS


def framed(fields: Any) -> bytes:
    payload = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(payload).to_bytes(4, "little") + crc32c(payload).to_bytes(4, "little") + payload


@given(st.lists(st.lists(RECORDS, min_size=1, max_size=3), max_size=3), st.integers(0, 200))
def test_frames_come_back_and_a_cut_one_is_waited_for(written: list[list[Record]], cut: int) -> None:
    frames = [encode(records) for records in written]
    data = b"".join(frames)
    found = decode(data)
    assert [records for _, records in found.frames] == written
    assert [end for end, _ in found.frames] == [sum(map(len, frames[: count + 1])) for count in range(len(frames))]
    assert found.problem is None
    assert found.passed_over.count == 0
    kept = data[: max(0, len(data) - cut)]
    found = decode(kept)
    assert found.problem is None
    assert [records for _, records in found.frames] == written[: len(found.frames)]
    end = found.frames[-1][0] if found.frames else 0
    assert len(kept) - end < wanted_bytes(kept, end)


ANY_TEXT = st.text(max_size=4) | st.sampled_from(
    ["", "a\0b", "\ud800", "x" * 1025, "x" * 65_537, "9", "10001", "\u0440" * 513]
)
ANY_HEADERS = st.dictionaries(st.sampled_from(["a", "A", "", "n" * 256, "n" * 257]), ANY_TEXT, max_size=2)
ANY_TAGS = st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=1)
ANY_ATTRIBUTES = st.builds(lambda headers, tags: json.dumps({"headers": headers, "tags": tags}), ANY_HEADERS, ANY_TAGS)
ANY_NUMBER = st.integers(-1, 2) | st.sampled_from([10_001, 1 << 62, 1 << 63, True])
ANY_TIME = st.floats() | st.sampled_from([0.0, 1e300, 7])
ANY_BODY = st.builds(
    BodyRow, ANY_NUMBER, ANY_NUMBER, ANY_NUMBER, st.sampled_from(["", "ab" * 16, "no"]), ANY_NUMBER,
    TAGS | ANY_TEXT, ANY_TIME, st.none() | ANY_TEXT, st.sampled_from([b"", b"sums"]),
)  # fmt: skip
ANY_ROW = st.one_of(
    st.none(),
    st.tuples(),
    st.tuples(ANY_NUMBER, TAGS | ANY_TEXT, ANY_TIME, ANY_ATTRIBUTES | ANY_TEXT),
    st.tuples(ANY_TEXT, ANY_TIME, st.just("[]") | ANY_TEXT),
    st.tuples(ANY_TEXT, KEYS | ANY_TEXT, ANY_TEXT, ANY_TIME, ANY_ATTRIBUTES),
)
ANY_ABOUT = st.builds(
    Touched, st.sampled_from(["bucket", "object", "upload", "part"]), NAMES | ANY_TEXT, KEYS | ANY_TEXT
)
ANY_RECORDS = st.builds(
    Record, ANY_ABOUT, st.integers(-1, STAMP_MAX + 1), ANY_ROW, st.lists(ANY_BODY, max_size=2).map(tuple)
)  # fmt: skip


def comes_back(record: Record) -> bool:
    """Whether a record can be written; all that can must be read as it was."""
    try:
        frame = encode([record])
    except BadRecordError:
        return False
    found = decode(frame)
    assert [records for _, records in found.frames] == [[record]]
    assert found.passed_over.count == 0
    return True


@given(ANY_RECORDS)
def test_what_is_written_comes_back_whatever_it_says(record: Record) -> None:
    """A change that others pass over would be acknowledged, and lost."""
    comes_back(record)


@pytest.mark.parametrize(
    ("name", "key", "is_written"), [("n" * 256, "k", True), ("n" * 257, "k", False), ("n", "a\0b", False)]
)
def test_a_name_or_key_that_others_pass_over_is_not_written(name: str, key: str, is_written: bool) -> None:
    attributes = json.dumps({"headers": {name: "v"}})
    assert comes_back(Record(Touched("object", "b", key), 7, (0, "etag", 1.0, attributes))) is is_written
    upload = ("b", key, "owner", 1.0, attributes)
    assert comes_back(Record(Touched("upload", "id", ""), 7, upload)) is (is_written or key != "k")


@given(st.lists(RECORDS, min_size=1, max_size=3), st.data())
def test_a_changed_byte_is_noticed(records: list[Record], data: st.DataObject) -> None:
    frame = bytearray(encode(records))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    found = decode(bytes(frame))
    assert found.frames == []
    assert found.problem is not None or at < 4  # a wrong length may ask for more


@given(st.binary(max_size=200))
def test_garbage_is_no_frame(garbage: bytes) -> None:
    frames = decode(garbage).frames
    assert frames == [] or framed(garbage[8 : frames[0][0]]) == garbage[: frames[0][0]]


OBJECT: list[Any] = [
    "object", "b", "k", 7, [1, "etag", 1.0, "{}"], [[1, 0, 1, "ab" * 16, 0, "etag", 1.0, None, "AAAAAA=="]],
]  # fmt: skip
PART: list[Any] = ["part", "upload", "1", 7, [], OBJECT[5]]


def with_body(**changes: Any) -> list[Any]:
    """An object whose body has other values."""
    names = ["number", "offset", "nbytes", "file", "at", "etag", "modified", "checksum", "blocks"]
    return [*OBJECT[:5], [[changes.get(name, value) for name, value in zip(names, OBJECT[5][0], strict=True)]]]


@pytest.mark.parametrize(
    "fields",
    [
        b"{",
        b"[" * 100_000,
        {},
        [1],
        [[]],
        [["object", "b", "k"]],
        [["ghost", "b", "k", 7]],
        [[["object"], "b", "k", 7]],
        [["object", "b", 1, 7]],
        [["object", "\ud800", "k", 7]],
        [["object", "b c", "k", 7]],
        [["object", "b", "", 7]],
        [["object", "b", "k" * 1025, 7]],
        [["object", "b", "k", True]],
        [["object", "b", "k", -1]],
        [["object", "b", "k", STAMP_MAX + 1]],
        [["object", "b", "k", 1 << 63]],
        [["object", "b", "k", 7.0]],
        [["part", "upload", "x", 7]],
        [["part", "upload", "9" * 5000, 7]],
        [OBJECT[:4] + [[1, "etag", math.nan, "{}"], OBJECT[5]]],
        [OBJECT[:4] + [[1, "etag", 1e300, "{}"], OBJECT[5]]],
        [OBJECT[:4] + [[1, "etag", 10**400, "{}"], OBJECT[5]]],
        [OBJECT[:4] + [[1 << 64, "etag", 1.0, "{}"], OBJECT[5]]],
        [OBJECT[:4] + [[2, "etag", 1.0, "{}"], OBJECT[5]]],
        [OBJECT[:4] + [[1, "e\r\ntag", 1.0, "{}"], OBJECT[5]]],
        [OBJECT[:4] + [[1, "etag", 1.0, "no json"], OBJECT[5]]],
        [OBJECT[:4] + [[1, "etag", 1.0, "[" * 100_000], OBJECT[5]]],
        [OBJECT[:4] + [[1, "etag", 1.0, '{"checksum": 3}'], OBJECT[5]]],
        [OBJECT[:4] + [[1, "etag", 1.0], OBJECT[5]]],
        [OBJECT[:5] + [{}]],
        [OBJECT[:5] + [[[1]]]],
        [with_body(number=10_001)],
        [with_body(number=1 << 64)],
        [with_body(offset=1)],
        [with_body(nbytes=-1)],
        [with_body(file="../../../../etc/passwd")],
        [with_body(file="AB" * 16)],
        [with_body(file="")],
        [with_body(at=1 << 64)],
        [with_body(modified=1e300)],
        [with_body(checksum="\n")],
        [with_body(blocks="?")],
        [with_body(blocks="")],
        [["part", "upload", "2", 7, [], OBJECT[5]]],
        [["part", "upload", "1", 7, [], []]],
        [["bucket", "b", "", 7, ["owner", 1.0, "[]"], OBJECT[5]]],
        [["bucket", "b", "key", 7, ["owner", 1.0, "[]"], []]],
        [["upload", "id", "key", 7]],
        [["bucket", "b", "", 7, ["owner", 1.0, '[{"a": 1}]'], []]],
        [["bucket", "b", "", 7, ["owner", 1e300, "[]"], []]],
    ],
    ids=lambda fields: str(fields)[-60:],
)
def test_a_record_that_makes_no_sense_is_passed_over(fields: Any) -> None:
    """It would stop every server of the directory otherwise, and hide what was written later."""
    good = encode(decode(framed([OBJECT])).frames[0][1])
    found = decode(good + framed(fields) + good)
    assert [len(records) for _, records in found.frames] == [1, 0, 1]
    assert found.problem is None
    assert found.passed_over.count == 1
    assert found.passed_over.first is not None
    assert found.passed_over.first[0] == len(good)


@pytest.mark.parametrize("name", ["b", "b\0"], ids=["good", "bad"])
def test_reading_ends_at_a_bound_of_rows(name: str) -> None:
    """A record of thousands of empty bodies is as much work as thousands of records, also where it is passed over."""
    empty = [[number, 0, 0, "", 0, "", 1.0, None, ""] for number in range(1, 10)]
    frame = framed([["object", name, "key", 7, [0, "etag", 1.0, "{}"], empty]])
    found = decode(frame * 10, rows_max=11)
    assert len(found.frames) == 2
    assert sum(rows_of(records) for _, records in found.frames) + found.passed_over.row_count == 20
    assert found.passed_over.count == (0 if name == "b" else 2)


def test_reading_inside_a_large_frame_ends_at_a_bound_of_rows() -> None:
    empty = [[number, 0, 0, "", 0, "", 1.0, None, ""] for number in range(1, 4000)]
    good = ["object", "b", "key", 7, [0, "etag", 1.0, "{}"], empty]
    bad = [*good[:3], -1, *good[4:]]
    data = json.dumps([good, bad, good, good], separators=(",", ":")).encode()
    passed_over = PassedOver()
    records, _ = records_in(data[1:], partial(passed_over.note, 0), 5000, is_end=True)
    assert (rows_of(records), passed_over.row_count) == (4000, 4000)


def test_a_good_record_beside_a_bad_one_holds() -> None:
    found = decode(framed([OBJECT, [1], PART]))
    assert [record.about.kind for record in found.frames[0][1]] == ["object", "part"]
    assert found.passed_over.count == 1


def test_a_frame_with_a_stamp_of_days_to_come_waits_for_its_time() -> None:
    """Nothing of it is passed over: the clock of the reader may be behind. What comes before it holds."""
    early = [*OBJECT[:3], 5, *OBJECT[4:]]
    data = framed([early]) + framed([OBJECT, [1]]) + framed([early])
    found = decode(data, 6)
    assert [len(records) for _, records in found.frames] == [1]
    assert found.problem is not None
    assert found.passed_over.count == 0
    assert [len(records) for _, records in decode(data, 7).frames] == [1, 1, 1]


def test_a_file_names_its_writer() -> None:
    record = decode(framed([OBJECT])).frames[0][1][0]
    assert file_ids([record]) == {"ab" * 16}
    assert writer_of("ab" * 16) == "ab" * 6


@given(st.lists(st.integers(0, int((1000 + AHEAD_S) * 1e6) - 20) | st.none(), max_size=20))
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


@pytest.mark.parametrize(
    "attributes",
    [
        {"tags": {"objectcache-pin": [1]}},
        {"tags": ["k"]},
        {"headers": {"a": [[], []]}},
        {"headers": {"A": "upper"}},
        {"headers": {"a": "line\r\nbreak"}},
        {"headers": {f"x{number}": "" for number in range(300)}},
        {"storage_class": [1]},
        {"storage_class": "<x>"},
        {"part_count": "7"},
        {"part_count": True},
        {"upload_id": [1]},
        {"checksum": ["CRC32", ["x"], "FULL_OBJECT"]},
    ],
    ids=repr,
)
def test_attributes_that_no_answer_can_have_are_passed_over(attributes: dict[str, object]) -> None:
    """The index takes any JSON; eviction, lists and lifecycle rules would fail at it for ever."""
    good = Record(Touched("object", "bucket", "good"), 1, (0, "", 0.0, ATTRIBUTES), ())
    bad = ["object", "bucket", "bad", 2, [0, "", 0.0, json.dumps(attributes)], []]
    found = decode(encode([good]) + framed(json.dumps([bad]).encode()))
    assert [record.about.key for _, records in found.frames for record in records] == ["good"]
    assert found.passed_over.count == 1
