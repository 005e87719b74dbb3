"""Files of a shared directory that hang: reads of them have no end, and everything else goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.beneath import Beneath
from storage_server.home.directory import following as following_module
from storage_server.home.directory import journal
from storage_server.home.directory.journal import ReadJournal
from storage_server.home.directory.journal_thread import JournalThread
from storage_server.home.directory.rules import unanswered
from storage_server.home.directory.rules.records import writer_of
from storage_server.home.directory.store import READ_THREADS_OF_WRITER, SharedDirectory
from storage_server.kernel.data import io_threads
from tests.support.shared_bed import BUCKET, Disk, get, opened, put
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


async def test_a_read_behind_others_that_hang_is_told_to_slow_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_threads, "OWNER_WAIT_S", 0.0)
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
        await until(lambda: not one.following._thread.hanging)
        assert await get(one, "new") == BODY
        one.following.require_whole()


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
    assert thread.hanging == {"a"}
    answers.set()
    await until(lambda: not thread.hanging)
    assert begun == ["a", "b"]
    thread.close()
