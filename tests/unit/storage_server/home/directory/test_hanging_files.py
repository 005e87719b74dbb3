"""Files of a shared directory that hang: reads of them have no end, and everything else goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import ClaimedPart, CompleteRequest, PartRequest, UploadRef, UploadRequest
from descriptors.units import MIB
from objectcache.adapters.beneath import Beneath
from storage_server.home.directory import following as following_module
from storage_server.home.directory import journal, upkeep
from storage_server.home.directory.journal import JournalPlace, ReadJournal
from storage_server.home.directory.journal_thread import JournalThread
from storage_server.home.directory.late_journals import LateJournals
from storage_server.home.directory.rules import unanswered
from storage_server.home.directory.rules.records import writer_of
from storage_server.home.directory.store import READ_THREADS_OF_WRITER, SharedDirectory
from storage_server.home.directory.upkeep import SharedUpkeep
from storage_server.kernel.data import file_threads
from storage_server.kernel.data.open_files import OpenFiles
from tests.support.chunks import BytesBody
from tests.support.shared_bed import BUCKET, KEY, Disk, get, opened, put
from tests.support.waiting import until

BODY = bytes(range(256)) * 1024


class HangingDisk(Disk):
    """Reads of the files of `writer` hang until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: str | None = None
        self.answers = threading.Event()
        self.hanging_count = 0

    def about_to(self, call: str, name: str) -> None:
        super().about_to(call, name)
        if call == "read" and writer_of(name) == self.writer:
            self.hanging_count += 1
            self.answers.wait(60)

    def read_cached(self, fd: int, view: memoryview, offset: int) -> int:
        raise BlockingIOError


async def fill(other: SharedDirectory, one: SharedDirectory) -> None:
    await one.objects.create_bucket("k", BUCKET)
    await put(other, "theirs", BODY)
    await put(one, "ours", BODY)


async def test_a_file_of_another_server_that_hangs_stops_no_read_and_no_write_of_others(tmp_path: Path) -> None:
    disk = HangingDisk()
    async with opened(tmp_path, "other") as other, opened(tmp_path, "one", disk=disk) as one:
        await fill(other, one)
        disk.writer = other.writer
        hanging = [asyncio.create_task(get(one, "theirs")) for _ in range(3 * READ_THREADS_OF_WRITER)]
        await until(lambda: disk.hanging_count == READ_THREADS_OF_WRITER)
        async with asyncio.timeout(60):
            await put(one, "new", BODY)
            assert await get(one, "ours") == BODY
        disk.answers.set()
        assert await asyncio.gather(*hanging) == [BODY] * len(hanging)


async def test_an_object_of_two_servers_holds_threads_of_the_one_that_hangs_alone(tmp_path: Path) -> None:
    """Its bytes of the other server are read in turns of their own, however the pieces lie."""
    disk = HangingDisk()
    async with opened(tmp_path, "other") as other, opened(tmp_path, "one", disk=disk) as one:
        await fill(other, one)
        ref = UploadRef(BUCKET, "both", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "both")))
        parts = [bytes(5 * MIB + 1), BODY]
        etags = [
            (await server.uploads.put_part(KEY, PartRequest(ref, number, len(part)), BytesBody(part))).etag
            for number, (server, part) in enumerate(zip((one, other), parts, strict=True), start=1)
        ]
        claimed = [ClaimedPart(number, etag) for number, etag in enumerate(etags, start=1)]
        await one.uploads.complete_upload(KEY, CompleteRequest(ref, claimed))
        disk.writer = other.writer
        hanging = [asyncio.create_task(get(one, "both")) for _ in range(READ_THREADS_OF_WRITER)]
        await until(lambda: disk.hanging_count == READ_THREADS_OF_WRITER)
        assert await get(one, "ours") == BODY
        disk.answers.set()
        assert await asyncio.gather(*hanging) == [b"".join(parts)] * len(hanging)


async def test_a_read_behind_others_that_hang_is_told_to_slow_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_threads, "HANGS_S", 0.0)
    disk = HangingDisk()
    async with opened(tmp_path, "other") as other, opened(tmp_path, "one", disk=disk) as one:
        await fill(other, one)
        disk.writer = other.writer
        hanging = [asyncio.create_task(get(one, "theirs")) for _ in range(READ_THREADS_OF_WRITER)]
        await until(lambda: disk.hanging_count == READ_THREADS_OF_WRITER)
        with pytest.raises(ServerError) as refused:
            await get(one, "theirs")
        assert (refused.value.code, refused.value.retryable) == (ErrorCode.SLOW_DOWN, True)
        disk.answers.set()
        assert await asyncio.gather(*hanging) == [BODY] * len(hanging)


async def test_a_reader_that_goes_while_it_waits_behind_reads_that_hang_is_not_kept(tmp_path: Path) -> None:
    disk = HangingDisk()
    async with opened(tmp_path, "other") as other, opened(tmp_path, "one", disk=disk) as one:
        await fill(other, one)
        disk.writer = other.writer
        hanging = [asyncio.create_task(get(one, "theirs")) for _ in range(READ_THREADS_OF_WRITER)]
        await until(lambda: disk.hanging_count == READ_THREADS_OF_WRITER)
        going = asyncio.create_task(get(one, "theirs"))
        await until(lambda: one._body_reads.has_queue)
        going.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([going])
        assert going.cancelled()
        disk.answers.set()
        assert await asyncio.gather(*hanging) == [BODY] * len(hanging)


async def test_files_of_others_that_hang_do_not_stop_the_upkeep_of_the_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else deleted files would keep their space, and the journal would grow, while a neighbour's file hangs."""
    answers, hangs, kept = threading.Event(), threading.Event(), list[None]()

    def hang(_: OpenFiles) -> None:
        hangs.set()
        answers.wait(60)

    async def shorten_journal(_: SharedUpkeep) -> None:
        kept.append(None)

    monkeypatch.setattr(upkeep, "UPKEEP_S", 0.0)
    monkeypatch.setattr(OpenFiles, "close_deleted", hang)
    monkeypatch.setattr(SharedUpkeep, "shorten_journal", shorten_journal)
    async with opened(tmp_path, "one"):
        await until(hangs.is_set)
        count = len(kept)
        await until(lambda: len(kept) > count + 2)
        answers.set()


async def test_a_journal_that_hangs_stops_nobody_when_it_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the disk cannot read. Nothing is deleted meanwhile, and what it has shows when it answers."""
    read, answers = journal.read_journal, threading.Event()

    def hang(folder: Beneath, *rest: Any) -> ReadJournal:
        if folder.name == other.writer:
            answers.wait(60)
        return read(folder, *rest)

    async with opened(tmp_path, "other") as other, opened(tmp_path, "one") as one:
        await fill(other, one)
        assert await get(one, "theirs") == BODY
        monkeypatch.setattr(following_module, "read_journal", hang)
        monkeypatch.setattr(one.following._thread, "_patience_s", 0.05)
        await put(other, "new", BODY)
        with pytest.raises(ServerError) as refused:
            await get(one, "ours")
        assert refused.value.code is ErrorCode.SLOW_DOWN
        monkeypatch.setattr(one.following._thread, "_patience_s", 60.0)  # no other journal hangs, however slow this is
        monkeypatch.setattr(unanswered, "WAITED_S", 0.0)
        assert await get(one, "ours") == BODY
        assert await get(one, "new") is None
        with pytest.raises(ServerError):
            one.following.require_whole()
        answers.set()
        await until(lambda: not (one.following._thread.hanging or one.following._late.writers))
        assert await get(one, "new") == BODY
        one.following.require_whole()


async def test_a_journal_that_answers_slowly_is_read_beside_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read when it was given up is lost. So it would be given up again and again, for ever, and all calls
    would have waited for it each time.
    """
    read, answers, read_in = journal.read_journal, threading.Event(), list[str]()

    def hang(folder: Beneath, *rest: Any) -> ReadJournal:
        if folder.name == other.writer:
            read_in.append(threading.current_thread().name)
            answers.wait(60)
        return read(folder, *rest)

    async with opened(tmp_path, "other") as other, opened(tmp_path, "one") as one:
        await fill(other, one)
        monkeypatch.setattr(following_module, "read_journal", hang)
        monkeypatch.setattr(following_module, "QUICK_PART", 0.0)
        monkeypatch.setattr(unanswered, "WAITED_S", 0.0)
        monkeypatch.setattr(one.following._thread, "_patience_s", 0.05)
        await put(other, "new", BODY)
        assert await get(one, "ours") == BODY
        monkeypatch.setattr(one.following._thread, "_patience_s", 60.0)
        answers.set()
        await until(lambda: one.objects._has(BUCKET, "new"))
        by_passes = sum(name.startswith("journals") for name in read_in)
        assert await get(one, "new") == BODY
        assert sum(name.startswith("journals") for name in read_in) == by_passes
        monkeypatch.setattr(following_module, "QUICK_PART", 1000.0)
        await until(lambda: not one.following._late.writers)


async def test_a_late_journal_that_hangs_keeps_no_other_from_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_threads, "HANGS_S", 0.0)
    answers, seen = asyncio.Event(), list[str]()

    async def read_piece(writer: str) -> ReadJournal:
        if writer == "a":
            await answers.wait()
        seen.append(writer)
        late.writers.discard(writer)
        return ReadJournal(writer, JournalPlace())

    async def tell_changes() -> None:
        pass

    late = LateJournals(read_piece, tell_changes)
    for writer in ("a", "b"):
        late.add(writer)
    await until(lambda: seen == ["b"])
    answers.set()
    await until(lambda: seen == ["b", "a"])
    await late.close()


async def test_a_server_starts_while_a_journal_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, answers = journal.read_journal, threading.Event()

    def hang(folder: Beneath, *rest: Any) -> ReadJournal:
        if folder.name == other.writer:
            answers.wait(60)
        return read(folder, *rest)

    monkeypatch.setattr(following_module, "LATE_AFTER", 0.001)
    monkeypatch.setattr(following_module, "read_journal", hang)
    async with opened(tmp_path, "other") as other, opened(tmp_path, "one") as one:
        assert other.writer in one.following._thread.hanging
        answers.set()


async def test_a_reading_that_was_given_up_reads_no_further_journal() -> None:
    thread, answers, begun = JournalThread(0.05), threading.Event(), list[str]()

    def read() -> list[str]:
        if thread.hanging:
            thread._patience_s = 60.0
        for writer in ("a", "b"):
            if writer not in thread.hanging:
                thread.begin(writer)
                begun.append(writer)
                if writer == "a":
                    answers.wait(60)
        return begun

    assert await thread.run(read) == ["a", "b"]
    assert thread.hanging.keys() == {"a"}
    answers.set()
    await until(lambda: not thread.hanging)
    assert begun == ["a", "b"]
    thread.close()
