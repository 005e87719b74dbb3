"""Records that one reader passes over, and another one, of a later release or Python, can read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from storage_server.home.directory import files as files_module
from storage_server.home.directory import merge, store
from storage_server.home.directory.rules import records
from storage_server.kernel.rules.rows import Touched
from tests.support.shared_bed import BUCKET, KEY, data_files, get, opened, put

BODY = bytes(1000)


def unreadable(monkeypatch: pytest.MonkeyPatch, *, is_so: bool) -> None:
    """Have readers pass over all records of the key "new", or not; another reader reads then."""
    named = re.compile(r"new\Z") if is_so else re.compile(r"(?!)")
    check = records.is_named

    def is_named(about: Touched) -> bool:
        return not named.match(about.key) and check(about)

    if is_so:
        monkeypatch.setattr(records, "is_named", is_named)
    else:
        monkeypatch.undo()
    monkeypatch.setattr(store, "READER", 1 if is_so else 2)


async def passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, "writer") as writer:
        await writer.objects.create_bucket(KEY, BUCKET)
        await put(writer, "new", BODY)
        await put(writer, "old", BODY)
    unreadable(monkeypatch, is_so=True)
    async with opened(tmp_path, "reader") as reader:
        assert await get(reader, "old") == BODY
        assert await get(reader, "new") is None
    unreadable(monkeypatch, is_so=False)


async def test_what_was_passed_over_shows_when_it_makes_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await passed_over(tmp_path, monkeypatch)
    async with opened(tmp_path, "reader") as reader:
        assert await get(reader, "new") == BODY
        assert reader.reader.here(merge.passed_over) == set()


async def test_a_file_is_not_deleted_that_only_a_record_names_that_was_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its writer has been silent for long."""
    await passed_over(tmp_path, monkeypatch)
    before = data_files(tmp_path)
    monkeypatch.setattr(files_module, "RETIRED_S", -1.0)
    monkeypatch.setattr(files_module, "GRACE_S", 0.0)
    async with opened(tmp_path, "reader") as reader:
        await reader.upkeep.find_retired()
        await reader.upkeep.delete_dead()
        assert data_files(tmp_path) == before
        assert await get(reader, "new") == BODY


async def test_an_index_of_a_release_that_noted_nothing_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await passed_over(tmp_path, monkeypatch)
    async with opened(tmp_path, "reader") as reader:
        await reader.committer.commit(lambda tx: tx.db.execute("DELETE FROM objects WHERE key = 'new'"))
        await reader.committer.commit(lambda tx: tx.db.execute("DELETE FROM records WHERE key = 'new'"))
        await reader.committer.commit(lambda tx: tx.db.execute("DELETE FROM meta WHERE name = 'journal_reader'"))
    async with opened(tmp_path, "reader") as reader:
        assert await get(reader, "new") == BODY


async def test_the_same_reader_reads_no_journal_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await passed_over(tmp_path, monkeypatch)
    async with opened(tmp_path, "reader") as reader:
        known = reader.reader.here(merge.positions)
    async with opened(tmp_path, "reader") as reader:
        await reader.committer.commit(lambda tx: merge.read_again(tx.db, store.READER, reader.writer))
        assert reader.reader.here(merge.positions) == known
