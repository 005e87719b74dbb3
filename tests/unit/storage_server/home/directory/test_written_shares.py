"""A server's callers have equal parts of its journal, and little is written there twice."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import PutRequest
from storage_server.home.directory import merge
from storage_server.home.directory import upkeep as upkeep_module
from storage_server.home.directory.rules import shares
from storage_server.home.directory.store import SharedDirectory
from storage_server.kernel.rules.rows import Touched
from tests.support.chunks import BytesBody
from tests.support.shared_bed import BUCKET, KEY, get, opened, put

OTHER = "OTHERKEY"


async def tag_again_and_again(shared: SharedDirectory) -> None:
    for number in range(100):
        await shared.objects.set_tags(KEY, BUCKET, "key", {"number": str(number)})


async def test_one_caller_does_not_make_what_others_write_late_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags of an object of 2,000 parts, set again and again, had other servers see another key's objects 14 s late."""
    monkeypatch.setattr(shares, "ROWS_MAX", 100)
    monkeypatch.setattr(shares, "ROWS_PER_S", 0.0)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        with pytest.raises(ServerError, match="this access key writes more") as refused:
            await tag_again_and_again(one)
        assert refused.value.code is ErrorCode.SLOW_DOWN
        assert refused.value.retryable
        await one.objects.put_object(OTHER, PutRequest(BUCKET, "theirs", 6), BytesBody(b"theirs"))
        assert await get(other, "theirs") == b"theirs"
        assert not other.unread_count
        await one.objects.delete_object(KEY, BUCKET, "key")
        assert await get(other, "key") is None


async def test_what_the_server_does_by_itself_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "ROWS_MAX", 10)
    monkeypatch.setattr(shares, "ROWS_PER_S", 0.0)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket("", BUCKET)
        for number in range(20):
            await one.objects.put_object("", PutRequest(BUCKET, f"key{number}", 4), BytesBody(b"data"))


async def test_a_journal_that_was_written_anew_is_not_written_anew_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every restart had all other servers read it again: at a million objects, for two minutes."""
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        for number in range(20):
            await put(one, f"key{number}", b"data")
        await one.upkeep.shorten_journal()
        generation = one._journal.generation
        assert generation > 1
    for _ in range(3):
        async with opened(tmp_path, "a") as one:
            await one.upkeep.shorten_journal()
            assert one._journal.generation == generation
    async with opened(tmp_path, "a") as one:
        for number in itertools.count():
            await put(one, f"more{number}", b"data")
            await one.upkeep.shorten_journal()
            if one._journal.generation > generation:
                break
        assert number > 5


def index_with_parts(path: Path, count: int) -> sqlite3.Connection:
    db = sqlite3.connect(path / "shared" / "index.sqlite3")
    row = ("upload", BUCKET, "key", 10**6, KEY, 1.0, "{}")
    db.execute("INSERT INTO uploads VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    body = (10**6, 0, 0, "", 0, "etag", 1.0, None, b"")
    columns = "version, part_number, object_offset, nbytes, file_id, file_offset, etag, modified_at, checksum, blocks"
    rows = [(body[0], number, *body[1:]) for number in range(1, count + 1)]
    db.executemany(f"INSERT INTO extents ({columns}, synced) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)", rows)
    return db


async def test_the_record_of_a_part_costs_the_same_whatever_parts_there_are(tmp_path: Path) -> None:
    """Each part of an upload read all parts before it: 10,000 parts cost 50 million rows."""
    async with opened(tmp_path, "a"):
        pass
    with closing(index_with_parts(tmp_path / "a", 2000)) as db:
        steps = list[int]()
        db.set_progress_handler(lambda: steps.append(1), 100)
        (record,) = merge.collected(db, [Touched("part", "upload", "1999")], 5)
        assert [body.part_number for body in record.bodies] == [1999]
        assert merge.written_rows(db, [Touched("part", "upload", "1999")]) == (2, 400)
        assert len(steps) < 10


async def test_the_records_of_a_journal_are_not_all_held_at_once(tmp_path: Path) -> None:
    """No other thread runs while a list of a million is freed: the event loop stood still for 0.6 s."""
    async with opened(tmp_path, "a") as one:
        writer = one.writer
    with closing(sqlite3.connect(tmp_path / "a" / "shared" / "index.sqlite3")) as db:
        rows = [("object", BUCKET, f"{number:06}", writer, 5, 1, 1, 1.0) for number in range(20_000)]
        db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        steps = list[int]()
        db.set_progress_handler(lambda: steps.append(1), 1000)
        records = merge.kept(db, writer, 0.0)
        next(records)
        first, count = len(steps), 1 + sum(1 for _ in records)
        assert count == 20_000
        assert first < len(steps) / 10


async def test_the_rows_of_an_object_are_counted_without_being_read(tmp_path: Path) -> None:
    async with opened(tmp_path, "a"):
        pass
    with closing(index_with_parts(tmp_path / "a", 300)) as db:
        db.execute("INSERT INTO objects VALUES (?, 'key', 1000000, 0, 'etag', 1.0, '{}')", (BUCKET,))
        db.execute("UPDATE extents SET blocks = 'four'")
        assert merge.written_rows(db, [Touched("object", BUCKET, "key")] * 2) == (301, 301 * 200 + 1600)
        assert merge.written_rows(db, [Touched("object", BUCKET, "gone"), Touched("bucket", BUCKET)]) == (2, 400)
