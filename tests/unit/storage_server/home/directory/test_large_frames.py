"""Frames that are larger than what is parsed at once: how writers make them, and how they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c

from descriptors.lifecycle import LifecycleRule
from objectcache.adapters.beneath import Beneath
from storage_server.home.directory.journal import JournalPlace, ReadJournal, named_files, read_journal
from storage_server.home.directory.rules import records as records_module
from storage_server.home.directory.rules.records import (
    HEAD,
    HEAD_BYTES_MAX,
    PIECE_BYTES,
    STAMP_MAX,
    BadRecordError,
    BodyRow,
    Record,
    decode,
    encode,
    framed,
)
from storage_server.kernel.rules.rows import RULES, Touched

TEXT = '{"headers":{"content-type":"text/plain"}}'
AWKWARD = 'a\\"],["object","b"],[1,[["\u20ac'
"""A key that looks like a place between two records."""


def of_many_bodies(count: int, nbytes: int = 16_384) -> Record:
    blocks = bytes(range(4)) * (nbytes // 16_384)
    bodies = [
        BodyRow(number + 1, number * nbytes, nbytes, "ab" * 16, number * nbytes, "e" * 32, 1e9, None, blocks)
        for number in range(count)
    ]
    return Record(Touched("object", "bucket", AWKWARD), 7, (count * nbytes, "etag", 1e9, TEXT), tuple(bodies))


def of_a_large_body(checksum: str | None, nbytes: int = 5 << 30) -> Record:
    row = BodyRow(3, 0, nbytes, "cd" * 16, 0, "e" * 32, 1e9, checksum, os.urandom(4) * (nbytes // 16_384))
    return Record(Touched("part", "upload", "3"), 8, (), (row,))


def small(number: int) -> Record:
    return Record(Touched("object", "bucket", f"{AWKWARD}{number}"), 9, (0, "etag", 1e9, TEXT))


def gone(number: int) -> Record:
    return Record(Touched("object", "bucket", f"{number:01000}"), 9, None)


def framed_payload(payload: bytes) -> bytes:
    return HEAD.pack(len(payload), crc32c(payload)) + payload


def written(tmp_path: Path, *frames: bytes) -> Beneath:
    folder = tmp_path / ("ab" * 6)
    folder.mkdir(exist_ok=True)
    (folder / "journal-1").write_bytes(b"".join(frames))
    return Beneath(tmp_path, folder.name)


def all_read(folder: Beneath, **options: Any) -> list[ReadJournal]:
    found, place = list[ReadJournal](), JournalPlace()
    while not found or not (found[-1].is_whole or found[-1].problem):
        found.append(read_journal(folder, place, **options))
        place = found[-1].end
    return found


def records_of(read: list[ReadJournal]) -> list[Record]:
    return [record for journal in read for _, records in journal.pieces for record in records]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of JSON were parsed at once."""
    sizes: list[int] = []

    def loads(text: bytes | str) -> Any:
        sizes.append(len(text))
        return json.loads(text)

    monkeypatch.setattr(records_module, "json", type("Json", (), {"loads": staticmethod(loads), "dumps": json.dumps}))
    return sizes


def test_a_large_change_is_written_as_frames_of_one_piece() -> None:
    """So a reader carries each of them out at once. They have all records in their order."""
    changed = [gone(number) for number in range(1000)]
    frames = list(framed(changed))
    assert len(frames) > 3
    assert all(len(frame) <= HEAD.size + PIECE_BYTES for frame in frames)
    found = decode(b"".join(frames))
    assert [record for _, records in found.frames for record in records] == changed


def of_many_rules(count: int) -> Record:
    rules = [LifecycleRule(str(number), prefix=AWKWARD, expire_days=1) for number in range(count)]
    return Record(Touched("bucket", "bucket"), 7, ("owner", 1.0, RULES.dump_json(rules).decode()))


LARGE = {
    "a bucket of a thousand rules": [of_many_rules(1000), small(1)],
    "a frame of the release before": [small(number) for number in range(8000)],
    "an object of many bodies": [small(1), of_many_bodies(10_000), small(2)],
    "a part of many checksums": [of_a_large_body(None), small(3), of_a_large_body("a" * 44)],
    "an object of many large bodies": [of_many_bodies(8, 1 << 30), small(4)],
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_frame_is_read_in_pieces(tmp_path: Path, parsed: list[int], name: str) -> None:
    """The parser lets no other thread run meanwhile: whatever a frame has, it is given a piece."""
    folder = written(tmp_path, encode([small(0)]), encode(LARGE[name]), encode([small(9)]))
    read = all_read(folder)
    assert records_of(read) == [small(0), *LARGE[name], small(9)]
    assert sum(journal.passed_over.count for journal in read) == 0
    assert max(parsed) <= (HEAD_BYTES_MAX if name == "a bucket of a thousand rules" else PIECE_BYTES + 2)
    named = {body.file_id for record in LARGE[name] for body in record.bodies}
    assert named_files(folder, named | {"0" * 32}) == named


HOSTILE = {
    "lists": b"[" + b"[]," * 600_000 + b"0]",
    "numbers": b"[" + b"1.5e10," * 300_000 + b"0]",
    "a text": b'["' + b"a" * 2_000_000 + b'"]',
    "bodies": b'[["object","b","k",7,[0,"e",1.0,"{}"],[' + b'[1,0,0,"",0,"e",1.0,null,""],' * 30_000 + b"[]]]]",
    "a body": b'[["part","b","1",7,[],[[1,0,1,"%b",0,"e",1.0,null,"' % (b"ab" * 16) + b"a" * 2_000_000 + b'"]]]]',
    "rules": b'[["bucket","b","",7,["o",1.0,"[' + b"{}," * 60_000 + b'{}]"],[]]]',
    "a large bucket of lists": b'[["bucket","b","",7,[' + b"[]," * 60_000 + b"[]],[]]]",
    "no list": b'"' + b"a" * 2_000_000 + b'"',
    "without an end": b"[" + b"[" * 2_000_000,
    "between records": b'[["object","b"' + b'],["object","b"' * 100_000 + b"]]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_large_frame_that_makes_no_sense_is_passed_over(tmp_path: Path, parsed: list[int], name: str) -> None:
    folder = written(tmp_path, framed_payload(HOSTILE[name]), encode([small(9)]))
    read = all_read(folder)
    assert records_of(read) == [small(9)]
    assert sum(journal.passed_over.count for journal in read) >= 1
    assert read[0].passed_over.first is not None
    assert read[0].passed_over.first[0] == 0
    assert max(parsed, default=0) <= (HEAD_BYTES_MAX if name == "rules" else PIECE_BYTES + 2)


def test_a_large_frame_is_read_on_where_reading_ended(tmp_path: Path) -> None:
    """A step has few of its records, and the frame is not passed before its last one."""
    expected = [small(number) for number in range(8000)]
    folder = written(tmp_path, encode(expected))
    read = all_read(folder, budget_bytes=PIECE_BYTES, rows_max=1)
    assert len(read) > 3
    assert all(journal.end.position == 0 for journal in read[:-1])
    assert [journal.end.inside for journal in read[:-1]] == sorted({journal.end.inside for journal in read[:-1]})
    assert records_of(read) == expected


def test_a_large_frame_with_a_changed_byte_is_a_problem(tmp_path: Path) -> None:
    frame = bytearray(encode([small(number) for number in range(8000)]))
    frame[-5] ^= 1
    (journal,) = all_read(written(tmp_path, bytes(frame)))
    assert journal.pieces == []
    assert journal.problem is not None
    assert "checksum" in journal.problem


def test_a_stamp_of_days_to_come_ends_a_large_frame(tmp_path: Path) -> None:
    folder = written(tmp_path, encode([small(number) for number in range(8000)]))
    assert all_read(folder, stamp_max=8)[-1].problem is not None
    assert all_read(folder, stamp_max=STAMP_MAX)[-1].problem is None


def test_a_record_that_readers_would_pass_over_is_not_written() -> None:
    text = '[{"id":"a"}]' + " " * HEAD_BYTES_MAX
    with pytest.raises(BadRecordError, match="beside its bodies"):
        encode([Record(Touched("bucket", "bucket"), 7, ("owner", 1.0, text))])
