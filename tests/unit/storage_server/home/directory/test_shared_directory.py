"""A shared directory with several servers in one process: what one has done, the others see."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descriptors.conditions import WriteCondition
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import (
    Attributes,
    ClaimedPart,
    CompleteRequest,
    CopyRequest,
    ListRequest,
    PartRequest,
    PutRequest,
    ReadRequest,
    UploadListRequest,
    UploadRef,
    UploadRequest,
)
from objectcache.adapters.beneath import Beneath
from storage_server.home.directory import files as files_module
from storage_server.home.directory import following as following_module
from storage_server.home.directory import objects as shared_objects
from storage_server.home.directory import rewriting as rewriting_module
from storage_server.home.directory import store as store_module
from storage_server.home.directory import upkeep as upkeep_module
from storage_server.home.directory.journal import OwnJournal, ReadJournal, Rewrite
from storage_server.home.directory.membership import WrongHomeError
from storage_server.home.directory.reading import Rate
from storage_server.home.directory.rules import unanswered
from storage_server.home.directory.store import SharedDirectory
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.service import Shown
from storage_server.kernel import objects as objects_module
from storage_server.kernel.index import committer as committer_module
from storage_server.kernel.index.committer import RefusedChangesError
from storage_server.kernel.index.transaction import Transaction
from storage_server.settings import StorageSettings, UpstreamSettings
from tests.support.chunks import BytesBody
from tests.support.shared_bed import BUCKET, KEY, Disk, data_files, get, journal_of, made, opened, put
from tests.support.store_bed import content
from tests.support.waiting import LIMIT_S, until

MIB = 1 << 20


STEPS = 20
"""In which servers look at each other while a grace passes: one that has not looked for half of it deletes nothing."""


class MovedClock:
    """The steady clock of servers, which the test moves ahead."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock()
    for asking in (files_module, following_module, store_module, upkeep_module):
        monkeypatch.setattr(asking, "time", clock)
    return clock


def shown(shared: SharedDirectory) -> list[Any]:
    """All that the index shows, without the numbers that each index counts by itself."""
    return shared.reader.here(
        lambda db: (
            db.execute(
                "SELECT bucket, key, objects.nbytes, objects.etag, attributes, part_number, file_id, file_offset"
                " FROM objects LEFT JOIN extents USING (version) ORDER BY bucket, key, part_number"
            ).fetchall()
            + db.execute("SELECT name, owner, lifecycle FROM buckets ORDER BY name").fetchall()
            + db.execute("SELECT upload_id, key FROM uploads ORDER BY upload_id").fetchall()
        )
    )


async def rewritten(shared: SharedDirectory) -> None:
    """Have the journal written anew, also where the server has just done so by itself."""
    async with shared.upkeep.shortening:
        shared.upkeep.rewritten_bytes, shared.upkeep.rewrite_from_s = 0, float("-inf")
    await shared.upkeep.shorten_journal()


async def test_each_server_sees_what_the_other_has_done(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        data = {f"key{number}": content(20_000 + number, number) for number in range(20)}
        for number, (key, value) in enumerate(data.items()):
            await put((one, other)[number % 2], key, value)
        for shared in (one, other):
            page = await shared.objects.list_objects(KEY, ListRequest(BUCKET))
            assert [entry.key for entry in page.objects] == sorted(data)
            assert {key: await get(shared, key) for key in data} == data
        assert shown(one) == shown(other)


OPERATIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["put", "delete", "tag", "follow"]), st.sampled_from("xyz")),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS)
def test_all_servers_come_to_show_the_same(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[int, str, str]]
) -> None:
    """Whatever they do at the same time, and whenever they read each other's journals."""

    async def carry_out(path: Path) -> None:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(opened(path, name)) for name in "abc"]
            await servers[0].objects.create_bucket(KEY, BUCKET)
            for shared in servers:
                await shared.following.read_journals()
            inner = [shared.objects._objects for shared in servers]  # past the look at the journals
            for number, (which, action, key) in enumerate(operations):
                if action == "follow":
                    await servers[which].following.read_journals()
                elif action == "put":
                    request = PutRequest(BUCKET, key, 5000)
                    await inner[which].put_object(KEY, request, BytesBody(content(5000, number)))
                elif action == "delete":
                    await inner[which].delete_object(KEY, BUCKET, key)
                elif inner[which].stored(BUCKET, key) is not None:
                    await inner[which].set_tags(KEY, BUCKET, key, {"number": str(number)})
            for shared in servers:
                await shared.following.read_journals()
            assert shown(servers[0]) == shown(servers[1]) == shown(servers[2])
            async with opened(path, "newcomer") as newcomer:
                assert shown(newcomer) == shown(servers[0])
            for key in "xyz":
                assert len({await get(shared, key) for shared in servers}) == 1

    asyncio.run(carry_out(tmp_path_factory.mktemp("shared")))


async def test_a_deletion_does_not_hit_what_it_had_not_seen(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"old")
        await other.following.read_journals()
        await put(one, "key", b"new")
        await other.objects._objects.delete_object(KEY, BUCKET, "key")  # it still sees the old one
        assert await get(one, "key") == await get(other, "key") == b"new"


async def test_parts_of_one_upload_may_come_to_any_server(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other, opened(tmp_path, "c") as third:
        await one.objects.create_bucket(KEY, BUCKET)
        upload = UploadRef(BUCKET, "key", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "key")))
        bodies = [content(5 * MIB, 1), content(5 * MIB, 2), content(1000, 3)]
        parts = [
            await shared.uploads.put_part(KEY, PartRequest(upload, number, len(body)), BytesBody(body))
            for number, (shared, body) in enumerate(zip((one, other, third), bodies, strict=True), 1)
        ]
        claimed = [ClaimedPart(part.part_number, part.etag) for part in parts]
        await third.uploads.complete_upload(KEY, CompleteRequest(upload, claimed))
        for shared in (one, other, third):
            assert await get(shared, "key") == b"".join(bodies)
            assert (await shared.uploads.list_uploads(KEY, UploadListRequest(BUCKET))).uploads == []


async def test_a_part_that_is_read_before_its_upload_waits_for_it(tmp_path: Path) -> None:
    """However often the journals are looked at meanwhile; what lies behind it is not held up."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        hidden = journal_of(tmp_path, one)
        upload = UploadRef(BUCKET, "key", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "key")))
        part = await other.uploads.put_part(KEY, PartRequest(upload, 1, 10), BytesBody(bytes(10)))
        await put(other, "behind", b"behind")
        away = hidden.rename(hidden.with_name("away"))
        async with opened(tmp_path, "c") as third:
            for _ in range(50):
                await third.following.read_journals()
            assert third.objects._objects.stored(BUCKET, "behind") is not None
            away.rename(hidden)
            await third.uploads.complete_upload(
                KEY, CompleteRequest(upload, [ClaimedPart(part.part_number, part.etag)])
            )
            assert await get(third, "key") == await get(one, "key") == bytes(10)


async def test_a_server_that_comes_back_has_all_that_was_answered(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        name = one.writer
    async with opened(tmp_path, "b") as other:
        await put(other, "other", b"more")
    async with opened(tmp_path, "a") as one:
        assert one.writer == name
        assert [await get(one, key) for key in ("key", "other")] == [b"data", b"more"]
    (tmp_path / "c").mkdir()
    async with opened(tmp_path, "c") as newcomer:
        assert [await get(newcomer, key) for key in ("key", "other")] == [b"data", b"more"]


@pytest.mark.parametrize("torn", [b"\x05", b"\x40\0\0\0\1\2\3\4half", b"\0" * 100])
async def test_a_torn_end_of_a_journal_is_passed_over(tmp_path: Path, torn: bytes) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        journal = journal_of(tmp_path, one)
    with journal.open("ab") as file:
        file.write(torn)
    async with opened(tmp_path, "b") as other:
        assert await get(other, "key") == b"data"
        async with opened(tmp_path, "a") as one:
            await put(one, "next", b"more")
            assert await get(other, "next") == b"more"


async def test_a_change_that_the_index_lost_is_carried_out_from_the_journal(tmp_path: Path) -> None:
    """The process ends between the journal and the index."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "before", b"1")
        saved = {path: path.read_bytes() for path in (tmp_path / "a" / "shared").glob("index*")}
        await put(one, "key", b"data")
        await one.objects.delete_object(KEY, BUCKET, "before")
    for path in (tmp_path / "a" / "shared").glob("index*"):
        path.unlink()
    for path, data in saved.items():
        path.write_bytes(data)
    async with opened(tmp_path, "a") as one:
        assert [await get(one, key) for key in ("before", "key")] == [None, b"data"]


@pytest.mark.parametrize(("call", "number"), [("write", errno.ENOSPC), ("sync", errno.EIO), ("write", errno.EDQUOT)])
async def test_a_journal_that_cannot_be_written_refuses_the_change(tmp_path: Path, call: str, number: int) -> None:
    disk = Disk()
    async with opened(tmp_path, "a", disk=disk) as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        disk.fail[call] = number
        with pytest.raises(ServerError):
            await put(one, "refused", b"data")
        with pytest.raises(ServerError):
            await one.objects.set_tags(KEY, BUCKET, "key", {"a": "b"})
        disk.fail.clear()
        await put(one, "key", b"newer")
        assert await get(one, "key") == await get(other, "key") == b"newer"
        assert await get(one, "refused") == await get(other, "refused")
        assert shown(one) == shown(other)


async def test_an_object_is_deleted_from_a_full_file_system(tmp_path: Path) -> None:
    disk = Disk()
    async with opened(tmp_path, "a", disk=disk) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        await rewritten(one)  # keeps the reserve

        def give_up() -> bool:
            disk.fail.clear()
            return type(one._reserve).give_up(one._reserve)

        one._reserve.give_up = give_up  # type: ignore[method-assign]
        disk.fail["write"] = errno.ENOSPC
        with pytest.raises(ServerError) as refused:
            await put(one, "more", b"data")
        assert refused.value.code is ErrorCode.INSUFFICIENT_STORAGE
        await one.objects.delete_object(KEY, BUCKET, "key")
        assert await get(one, "key") is None


async def test_a_file_is_deleted_a_while_after_nothing_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: MovedClock
) -> None:
    monkeypatch.setattr(upkeep_module, "UPKEEP_S", 0.1)
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(100_000))
        await put(one, "kept", content(100_000, 1))
        assert len(data_files(tmp_path)) == 2
        await other.following.read_journals()
        async with other.objects.open_object(KEY, ReadRequest(BUCKET, "key")) as read:
            await other.objects.delete_object(KEY, BUCKET, "key")
            await one.following.read_journals()
            assert len(data_files(tmp_path)) == 2

            def is_gone() -> bool:
                clock.ahead_s += files_module.GRACE_S / STEPS
                return len(data_files(tmp_path)) == 1

            await until(is_gone)
            assert b"".join([bytes(piece) async for piece in read.body]) == content(100_000)
        assert await get(one, "kept") == await get(other, "kept") == content(100_000, 1)


async def test_a_crash_leaves_files_that_the_next_start_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(100_000))
        folder = tmp_path / "shared" / "writers" / one.writer / "extents" / "00"
        folder.mkdir(exist_ok=True)
        leftover = folder / (one.writer + "0" * 20)
        leftover.write_bytes(b"half a body")
        foreign = folder / "README"
        foreign.write_bytes(b"not ours")
    monkeypatch.setattr(files_module, "GRACE_S", 0.2)
    monkeypatch.setattr(upkeep_module, "UPKEEP_S", 0.1)
    async with opened(tmp_path, "a") as one:
        await until(lambda: not leftover.exists())
        assert foreign.exists()
        assert await get(one, "key") == content(100_000)


async def test_dead_files_of_a_server_that_is_gone_are_deleted_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that no journal names are left alone: nobody knows what they are."""
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(100_000))
        await put(one, "kept", content(100_000, 1))
        folder = tmp_path / "shared" / "writers" / one.writer
        unknown = next((folder / "extents").iterdir()) / (one.writer + "f" * 20)
        unknown.write_bytes(b"unknown")
    monkeypatch.setattr(files_module, "RETIRED_S", 0.0)
    monkeypatch.setattr(files_module, "GRACE_S", 0.2)
    monkeypatch.setattr(upkeep_module, "UPKEEP_S", 0.1)
    monkeypatch.setattr(upkeep_module, "RETIRED_CHECK_S", 0.1)
    async with opened(tmp_path, "b") as other:
        await other.objects.delete_object(KEY, BUCKET, "key")
        await until(lambda: len(data_files(tmp_path) - {unknown}) == 1)
        assert unknown.exists()
        assert await get(other, "kept") == content(100_000, 1)
    async with opened(tmp_path, "a") as one:
        assert [await get(one, key) for key in ("key", "kept")] == [None, content(100_000, 1)]


async def test_a_silent_writer_with_a_link_for_a_journal_hides_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "RETIRED_S", 0.0)
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(100_000))
        folder = tmp_path / "shared" / "writers" / one.writer
    for number in (0, 1):
        hostile = folder.with_name(f"{number:012}")
        hostile.mkdir(mode=0o700)
        (hostile / "journal-1").symlink_to("/etc/passwd")
        (hostile / "alive").touch(mode=0o600)
    async with opened(tmp_path, "b") as other:
        assert other.upkeep._files_of_retired() == {path.name for path in data_files(tmp_path)}


async def test_very_many_files_of_a_silent_writer_are_looked_at_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make names there, and all of them were held in memory at once."""
    monkeypatch.setattr(files_module, "RETIRED_S", 0.0)
    most = 4
    monkeypatch.setattr(upkeep_module, "NAMES_MAX", most)
    looked_at, named_files = list[set[str]](), upkeep_module.named_files

    def noted(folder: Beneath, stored: set[str]) -> set[str] | None:
        looked_at.append(stored)
        return named_files(folder, stored)

    monkeypatch.setattr(upkeep_module, "named_files", noted)
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one:
        ids = (f"{one.writer}{number:018x}{number % 3:02x}" for number in itertools.count())
        monkeypatch.setattr(one.files, "new_id", lambda: next(ids))
        await one.objects.create_bucket(KEY, BUCKET)
        for number in range(6):
            await put(one, f"{number}", content(100_000, number))
        named = {path.name for path in data_files(tmp_path)}
        for number in range(100):
            path = one.files.place(f"{one.writer}{number:018x}03").path
            path.parent.mkdir(exist_ok=True)
            path.touch()
    other = made(tmp_path, "b")
    other.files.beat()
    found = [other.upkeep._files_of_retired() for _ in range(4)]
    await other.close()
    assert found[0] | found[1] == named
    assert found[2:] == found[:2]
    assert all(len(stored) < 2 * most for stored in looked_at)


async def test_a_journal_is_written_anew_when_most_of_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 4000)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "gone", b"gone")
        await other.following.read_journals()
        for number in range(40):
            await put(one, "key", content(1000, number))
        await put(one, "kept", b"kept")
        await one.objects.delete_object(KEY, BUCKET, "gone")
        before = journal_of(tmp_path, one)
        await rewritten(one)
        after = journal_of(tmp_path, one)
        assert after.name == "journal-2" != before.name
        assert after.stat().st_size < 4000
        await put(one, "behind", b"behind")
        expected = {"key": content(1000, 39), "kept": b"kept", "behind": b"behind", "gone": None}
        async with opened(tmp_path, "c") as newcomer:
            for shared in (one, other, newcomer):
                assert {key: await get(shared, key) for key in expected} == expected
            assert shown(one) == shown(other) == shown(newcomer)
    async with opened(tmp_path, "a") as one:
        assert {key: await get(one, key) for key in expected} == expected


async def test_a_journal_is_written_anew_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow file system each removal of a name held all calls up, also of a name that was not there any more."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "played")

    removed, unlink = list[tuple[str, bool]](), Beneath.unlink

    def noted(place: Beneath) -> None:
        removed.append((place.name, threading.current_thread() is threading.main_thread()))
        unlink(place)

    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        monkeypatch.setattr(Beneath, "unlink", noted)
        assert await one._rewriting.run()
        assert removed == [("journal-2.new", False), ("journal-1", False)]
        monkeypatch.setattr(OwnJournal, "finish_rewrite", fail)
        assert not await one._rewriting.run()
        assert removed[2:] == [("journal-3.new", False)] * 2


async def test_a_journal_that_is_damaged_in_the_middle_keeps_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner has all of it, and heals it when it writes the journal anew."""
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "first", b"1")
        await other.following.read_journals()
        journal = journal_of(tmp_path, one)
        at = journal.stat().st_size
        await put(one, "second", b"2")
        await put(one, "third", b"3")
        with journal.open("r+b") as file:
            file.seek(at + 20)
            file.write(b"\0\0\0")
        assert [await get(other, key) for key in ("first", "second", "third")] == [b"1", None, None]
        assert "can be read no further" in caplog.text
        assert other.unread_count == 1
        await rewritten(one)
        assert [await get(other, key) for key in ("first", "second", "third")] == [b"1", b"2", b"3"]
        assert other.unread_count == 0


@pytest.mark.parametrize("harm", ["damaged", "gone"])
async def test_a_chunk_whose_bytes_are_lost_counts_as_absent_until_it_is_put_again(tmp_path: Path, harm: str) -> None:
    key = "5a" * 32
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, key, content(100_000))
        assert await other.objects.has_object(BUCKET, key, time.monotonic())
        (path,) = data_files(tmp_path)
        if harm == "gone":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.seek(50_000)
                file.write(b"harm")
        with pytest.raises((ServerError, CallerError)):
            await whole_into(other, key, 100_000)
        await until(lambda: other.objects._objects.is_damaged(BUCKET, key))
        assert not await other.objects.has_object(BUCKET, key, time.monotonic())
        assert await get(other, key) is None
        if harm == "gone":
            with pytest.raises(ServerError):  # what goes into a file that was deleted is not stored
                await put(one, key, content(100_000))
        await put(one, key, content(100_000))
        assert await other.objects.has_object(BUCKET, key, time.monotonic())
        assert await get(other, key) == content(100_000)


async def whole_into(shared: SharedDirectory, key: str, nbytes: int) -> bytes:
    memory = bytearray(nbytes)
    into = Into(memoryview(memory), 16_384, 65_536, lambda at: None)
    async with shared.objects.open_into(ReadRequest(BUCKET, key), into) as (head, proof, body):
        assert head.info.nbytes == nbytes
        assert proof is not None
        await body
    return bytes(memory)


async def test_a_chunk_comes_straight_into_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(300_000))
        assert await whole_into(other, "key", 300_000) == content(300_000)


def test_reads_keep_to_their_rate() -> None:
    now_s = 0.0
    rate = Rate(1000.0, lambda: now_s)
    waits = [rate.wait_s(100) for _ in range(5)]
    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])
    now_s = 100.0
    assert rate.wait_s(5000) == 0.0
    assert rate.wait_s(1) == pytest.approx(4.9)
    assert Rate(None).wait_s(1 << 40) == 0.0


async def graced(clock: MovedClock, *servers: SharedDirectory, graces: float = 1.8) -> None:
    """So long that everything that is dead is deleted."""
    for shared in (*servers, *servers):  # behind two changes, what was dead before them has been noted as dead
        await shared.committer.commit(lambda _: None)
    for _ in range(round(graces * STEPS)):
        for shared in servers:
            await shared.following.read_journals()
            await shared.upkeep.delete_dead()
        clock.ahead_s += files_module.GRACE_S / STEPS


async def emptied(tmp_path: Path, clock: MovedClock, *servers: SharedDirectory) -> None:
    """Until no data file is left."""
    async with asyncio.timeout(LIMIT_S):
        while data_files(tmp_path):
            await graced(clock, *servers, graces=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["copy", "tag", "complete"])
async def test_bytes_that_are_named_again_while_they_are_deleted_stay(
    tmp_path: Path, clock: MovedClock, action: str
) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        data = content(50_000)
        await put(one, "neighbour", b"in the same file")
        if action == "complete":
            ref = UploadRef(BUCKET, "key", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "key")))
            part = await one.uploads.put_part(KEY, PartRequest(ref, 1, len(data)), BytesBody(data))
            await other.following.read_journals()
            await one.uploads._uploads.abort_upload(KEY, ref)
            request = CompleteRequest(ref, [ClaimedPart(part.part_number, part.etag)])
            await other.uploads._uploads.complete_upload(KEY, request)
        else:
            await put(one, "key", data)
            await other.following.read_journals()
            await one.objects._objects.delete_object(KEY, BUCKET, "key")
            other._clock.observe(one._clock.stamp())  # two servers' times may differ by as much as a beat takes
            if action == "copy":
                source = CopyRequest(ReadRequest(BUCKET, "key"), BUCKET, "copy")
                await other.objects._objects.copy_object(KEY, source)
            else:
                await other.objects._objects.set_tags(KEY, BUCKET, "key", {"a": "b"})
        await graced(clock, one, other)
        for shared in (one, other):
            assert await get(shared, "copy" if action == "copy" else "key") == data
        assert shown(one) == shown(other)


async def test_what_was_deleted_while_a_server_was_away_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the deletion is in no journal any more."""
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    monkeypatch.setattr(rewriting_module, "GONE_KEPT_S", -1.0)
    async with opened(tmp_path, "b") as other:
        await other.following.read_journals()
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "kept", b"kept")
        await put(one, "gone", b"gone")
        async with opened(tmp_path, "b") as other:
            assert await get(other, "gone") == b"gone"
        await one.objects.delete_object(KEY, BUCKET, "gone")
        await rewritten(one)
        assert b"gone" not in journal_of(tmp_path, one).read_bytes()
        async with opened(tmp_path, "b") as other:
            assert [await get(other, key) for key in ("kept", "gone")] == [b"kept", None]
            assert shown(one) == shown(other)


async def test_a_deletion_stays_in_the_journal_for_a_day_however_old_its_object_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        monkeypatch.setattr(one._clock, "_now_s", lambda: time.time() - 10 * 86_400)
        one._clock._last = 0
        await put(one, "old", b"old")
        await one.objects.delete_object(KEY, BUCKET, "old")
        await rewritten(one)
        assert b'"old"' in journal_of(tmp_path, one).read_bytes()


@pytest.mark.parametrize("call", ["sync_directory", "sync"])
async def test_a_rewrite_that_fails_does_not_split_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    disk = Disk()
    async with opened(tmp_path, "a", disk=disk) as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        disk.fail[call] = errno.EIO
        await rewritten(one)
        disk.fail.clear()
        await other.following.read_journals()
        await put(one, "acknowledged", b"more")
        for shared in (one, other):
            assert [await get(shared, key) for key in ("key", "acknowledged")] == [b"data", b"more"]
    async with opened(tmp_path, "a") as one, opened(tmp_path, "c") as newcomer:
        for shared in (one, newcomer):
            assert [await get(shared, key) for key in ("key", "acknowledged")] == [b"data", b"more"]


async def test_parts_whose_upload_is_forgotten_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    monkeypatch.setattr(rewriting_module, "GONE_KEPT_S", -1.0)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        ref = UploadRef(BUCKET, "key", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "key")))
        await other.uploads.put_part(KEY, PartRequest(ref, 1, 10), BytesBody(bytes(10)))
        await one.uploads.abort_upload(KEY, ref)
        await put(other, "behind", b"behind")
        await rewritten(one)
        async with opened(tmp_path, "c") as newcomer:
            assert await get(newcomer, "behind") == b"behind"
            await other.following.read_journals()
            await rewritten(other)
            await newcomer.following.read_journals()
            await until(lambda: not newcomer.following._fronts)
            await newcomer.following.read_journals()
            count = newcomer.reader.here(lambda db: db.execute("SELECT count(*) FROM extents").fetchone())
            assert count == (1,)


@pytest.mark.slow
async def test_no_file_goes_while_a_journal_cannot_be_read(tmp_path: Path, clock: MovedClock) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(50_000))
        await other.following.read_journals()
        journal = journal_of(tmp_path, other)
        at = journal.stat().st_size
        await put(other, "unread", b"unread")
        await other.objects.copy_object(KEY, CopyRequest(ReadRequest(BUCKET, "key"), BUCKET, "copy"))
        with journal.open("r+b") as file:
            file.seek(at + 20)
            file.write(b"\0\0\0")
        await one.objects.delete_object(KEY, BUCKET, "key")
        await graced(clock, one, other)
        assert one.unread_count == 1
        assert await get(other, "copy") == content(50_000)


async def test_a_put_behind_another_holds_though_its_servers_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        monkeypatch.setattr(other._clock, "_now_s", lambda: time.time() - 3600.0)
        for number in range(3):
            await put(one, "key", b"first")
            await put(other, "key", b"second %d" % number)
            assert await get(one, "key") == await get(other, "key") == b"second %d" % number
            await one.objects.delete_object(KEY, BUCKET, "key")
            await put(other, "key", b"again")
            assert await get(one, "key") == b"again"


async def test_a_server_that_lost_its_index_has_all_of_its_journal(tmp_path: Path) -> None:
    """Parts of uploads that others tell of, too."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await other.objects.create_bucket(KEY, BUCKET)
        ref = UploadRef(BUCKET, "key", await other.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "key")))
        part, *_ = await asyncio.gather(
            one.uploads.put_part(KEY, PartRequest(ref, 1, 10), BytesBody(bytes(10))),
            *(put(one, f"o{number}", b"data") for number in range(5)),
        )
    for path in (tmp_path / "a" / "shared").glob("index*"):
        path.unlink()
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        assert [await get(one, f"o{number}") for number in range(5)] == [b"data"] * 5
        claimed = [ClaimedPart(part.part_number, part.etag)]
        await other.uploads.complete_upload(KEY, CompleteRequest(ref, claimed))
        assert await get(one, "key") == bytes(10)


async def test_an_object_that_no_record_can_hold_is_refused_and_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts may be copies, which take no space: nothing else keeps them small."""
    monkeypatch.setattr("storage_server.home.directory.store.OBJECT_BYTES_MAX", 20)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        ref = UploadRef(BUCKET, "key", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "key")))
        part = await one.uploads.put_part(KEY, PartRequest(ref, 1, 21), BytesBody(bytes(21)))
        claimed = [ClaimedPart(part.part_number, part.etag)]
        completing = one.uploads.complete_upload(KEY, CompleteRequest(ref, claimed))
        refused, written = await asyncio.gather(completing, put(one, "other", b"data"), return_exceptions=True)
        assert isinstance(refused, CallerError)
        assert refused.code is ErrorCode.ENTITY_TOO_LARGE
        assert not isinstance(written, BaseException)
        assert await get(one, "other") == b"data"


@pytest.mark.slow
async def test_a_file_that_was_named_again_has_its_whole_grace_again(tmp_path: Path, clock: MovedClock) -> None:
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(50_000))
        await other.following.read_journals()
        await one.objects._objects.delete_object(KEY, BUCKET, "key")
        await other.objects._objects.set_tags(KEY, BUCKET, "key", {"a": "b"})
        await graced(clock, one, other, graces=1.3)
        await one.objects.delete_object(KEY, BUCKET, "key")
        await one.upkeep.delete_dead()
        assert len(data_files(tmp_path)) == 1
        await emptied(tmp_path, clock, one, other)


async def test_a_file_goes_when_the_journals_were_read_a_whole_grace_after_its_death(
    tmp_path: Path, clock: MovedClock
) -> None:
    """Another server may name it up to half of that after it has read the journals, and takes up to half for that."""
    async with opened(tmp_path, "a") as one:
        file_id = one.files.new_id()
        one.files.note_dead(file_id)
        dead_s = one.files._dead[file_id]
        clock.ahead_s += 2 * files_module.GRACE_S
        for graces in (0.5, 0.99):
            assert one.files.deletable(dead_s + graces * files_module.GRACE_S) == []
        assert one.files.deletable(dead_s + files_module.GRACE_S) == [file_id]


async def test_a_frame_whose_sync_failed_is_written_again(tmp_path: Path) -> None:
    """A failed sync may have dropped it, and it would be a hole before what is written next."""
    disk = Disk()
    async with opened(tmp_path, "a", disk=disk) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = journal_of(tmp_path, one)
        sync, dropped = disk.sync, list[int]()

        def drop(fd: int) -> None:
            name = Path(f"/proc/self/fd/{fd}").readlink()
            if name == journal and not dropped:
                dropped.append(journal.stat().st_size)
                raise OSError(errno.EIO, "dropped")
            sync(fd)

        disk.sync = drop  # type: ignore[method-assign]
        written: list[tuple[str, int]] = []
        write = disk.write

        def note(fd: int, view: memoryview, offset: int) -> int:
            written.append((Path(f"/proc/self/fd/{fd}").readlink().name, offset))
            return write(fd, view, offset)

        disk.write = note  # type: ignore[method-assign]
        with pytest.raises(ServerError):
            await put(one, "refused", b"data")
        offsets = [offset for name, offset in written if name == journal.name]
        assert len(offsets) == 2
        assert offsets[0] == offsets[1]


async def test_zeros_with_bytes_behind_them_are_a_problem(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await other.following.read_journals()
        journal = journal_of(tmp_path, one)
        at = journal.stat().st_size
        await put(one, "lost", b"1")
        middle = journal.stat().st_size
        await put(one, "acknowledged", b"2")
        with journal.open("r+b") as file:
            file.seek(at)
            file.write(bytes(middle - at))
        await other.following.read_journals()
        assert other.unread_count == 1


async def test_a_bucket_of_the_same_name_begins_empty(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await other.following.read_journals()
        await one.objects.delete_bucket(KEY, BUCKET)
        await other.objects._objects.put_object(KEY, PutRequest(BUCKET, "secret", 5), BytesBody(b"alice"))
        await one.objects.create_bucket("MALLORY", BUCKET)
        for shared in (one, other):
            page = await shared.objects.list_objects("MALLORY", ListRequest(BUCKET))
            assert page.objects == []


async def test_an_old_journal_that_could_not_be_deleted_misleads_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    disk = Disk()
    async with opened(tmp_path, "a", disk=disk) as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        await other.following.read_journals()
        first = journal_of(tmp_path, one)
        left = first.read_bytes()
        for _ in range(2):
            await rewritten(one)
            one.upkeep.rewritten_bytes = 0
        first.write_bytes(left)
        assert one._journal.generation == 3
        await put(one, "acknowledged", b"more")
        assert [await get(other, key) for key in ("key", "acknowledged")] == [b"data", b"more"]
        await rewritten(one)
        assert not first.exists()


async def test_the_cache_is_told_until_it_has_heard(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        told: list[str] = []

        async def tell(shown: Sequence[Shown]) -> None:
            told.append("failed" if not told else ",".join(each.key for each in shown))
            if told == ["failed"]:
                raise ServerError(ErrorCode.INTERNAL_ERROR, "not now")

        other.on_changed(tell)
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "x", b"1")
        await other.following.read_journals()
        await put(one, "y", b"1")
        await other.following.read_journals()
        assert told == ["failed", "x,y"]


@pytest.mark.slow
async def test_a_read_on_the_server_that_wrote_the_file_goes_on(tmp_path: Path, clock: MovedClock) -> None:
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        data = content(3_000_000)
        await put(one, "key", data)
        async with one.objects.open_object(KEY, ReadRequest(BUCKET, "key")) as read:
            await one.objects.delete_object(KEY, BUCKET, "key")
            await graced(clock, one)
            assert b"".join([bytes(piece) async for piece in read.body]) == data
        await emptied(tmp_path, clock, one)


async def test_many_records_are_read_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_module, "STEP_BYTES", 2000)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        for number in range(20):
            await put(one, f"one{number}", b"1")
            await put(other, f"other{number}", b"2")
        await one.following.read_journals()
        async with opened(tmp_path, "c") as third:
            assert shown(third) == shown(one)


async def test_the_wrong_directory_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.rename(elsewhere)
    with pytest.raises(WrongHomeError, match="mounted"):
        made(tmp_path, "a")
    shared.rmdir()
    settings = UpstreamSettings(f"file://{shared}")
    with pytest.raises(WrongHomeError, match="mounted"):
        SharedDirectory(settings, StorageSettings(data_dir=tmp_path / "b"), tmp_path / "b" / "shared")
    shared.mkdir()
    (shared / "thesis.tex").write_text("mine")
    (tmp_path / "b").mkdir()
    with pytest.raises(WrongHomeError, match="other files"):
        made(tmp_path, "b")
    assert [path.name for path in shared.iterdir()] == ["thesis.tex"]


async def test_two_servers_that_share_a_data_directory_do_not_spoil_the_journal(tmp_path: Path) -> None:
    """As copies of one virtual machine would: the second write is refused."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = journal_of(tmp_path, one)
        with journal.open("ab") as file:
            file.write(b"another server's frame")
        with pytest.raises(ServerError):
            await put(one, "key", b"data")


async def test_lifecycle_rules_that_no_record_can_have_are_refused(tmp_path: Path) -> None:
    """Before anything else is refused with them: a transaction has changes of several callers."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        few = [LifecycleRule(str(number), prefix="p", expire_days=1) for number in range(1000)]
        await one.objects.set_lifecycle(KEY, BUCKET, few)
        assert await other.objects.get_lifecycle(KEY, BUCKET) == few
        with pytest.raises(CallerError) as refused:
            await one.objects.set_lifecycle(KEY, BUCKET, [LifecycleRule("1", prefix="p" * 300_000, expire_days=1)])
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT


async def test_conditions_see_what_others_have_done(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        with pytest.raises(CallerError) as refused:
            await put(other, "key", b"other", condition=WriteCondition(if_absent=True))
        assert refused.value.code is ErrorCode.PRECONDITION_FAILED


async def test_a_directory_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        monkeypatch.setattr(one.following, "_patience_s", 0.2)  # from now on: a loaded machine is slower at the start
        read = one.following._read

        may_end = threading.Event()

        def hang(waiting: list[str] | None) -> Any:
            may_end.wait(60)
            return read(waiting)

        monkeypatch.setattr(one.following, "_read", hang)
        with pytest.raises(ServerError) as refused:
            await get(one, "key")
        assert refused.value.code is ErrorCode.SLOW_DOWN
        may_end.set()


def test_an_index_of_hand_made_rows_is_private(tmp_path: Path) -> None:
    """Other users of the host and of the file system can read nothing."""

    async def check() -> None:
        async with opened(tmp_path, "a") as one:
            await one.objects.create_bucket(KEY, BUCKET)
            await put(one, "key", content(100_000))
            for path in (*(tmp_path / "shared").rglob("*"), *(tmp_path / "a" / "shared").rglob("*")):
                if path.is_file() and path.name != "format.json":
                    assert path.stat().st_mode & 0o077 == 0, path
            with sqlite3.connect(tmp_path / "a" / "shared" / "index.sqlite3") as db:
                assert db.execute("SELECT count(*) FROM objects").fetchone() == (1,)
            assert json.loads((tmp_path / "shared" / "format.json").read_text())["format"] == 1

    asyncio.run(check())


@contextmanager
def gone_while_written(
    shared: SharedDirectory, file: Path, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Meanwhile each write of the journal takes so long that its owner deletes the file."""
    append = shared._journal.append

    def slow(frames: Sequence[bytes]) -> None:
        append(frames)
        file.unlink(missing_ok=True)
        clock.ahead_s += files_module.GRACE_S

    with monkeypatch.context() as patched:
        patched.setattr(shared._journal, "append", slow)
        yield


async def in_one_transaction(shared: SharedDirectory, *works: Coroutine[Any, Any, Any]) -> list[Any]:
    """Hold the committer until all these have asked it for a change; what each returned, or raised."""
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(tx: Transaction) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(LIMIT_S)

    holding = asyncio.create_task(shared.committer.commit(hold))
    await begun.wait()
    tasks = [asyncio.create_task(work) for work in works]
    await until(lambda: shared.committer._pending_count == 1 + len(tasks))
    go_on.set()
    await holding
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_change_that_is_refused_takes_no_others_with_it(tmp_path: Path, clock: MovedClock) -> None:
    """A neighbour whose journal cannot be read made every write fail, as soon as anybody copied or tagged."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(other, "theirs", b"theirs")
        await one.following.read_journals()
        clock.ahead_s += files_module.GRACE_S
        inner = one.objects._objects
        puts = [
            inner.put_object(KEY, PutRequest(BUCKET, f"key{number}", 4), BytesBody(b"data")) for number in range(10)
        ]
        tag = inner.set_tags(KEY, BUCKET, "theirs", {"a": "b"})
        *infos, refused = await in_one_transaction(one, *puts, tag)
        assert [info.nbytes for info in infos] == [4] * 10
        assert isinstance(refused, ServerError)
        assert refused.code is ErrorCode.SLOW_DOWN
        for shared in (one, other):
            assert [await get(shared, f"key{number}") for number in range(10)] == [b"data"] * 10
        assert shown(one) == shown(other)


async def test_records_that_are_taken_back_leave_what_was_there(
    tmp_path: Path, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that takes longer than files are kept for, beside a tag of another server's object, deleted all that was
    written over in the same transaction.
    """
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(other, "theirs", b"theirs")
        for key in ("over", "gone"):
            await put(one, key, b"old")
        await one.following.read_journals()
        (their_file,) = [path for path in data_files(tmp_path) if other.writer in str(path)]
        inner = one.objects._objects
        with gone_while_written(one, their_file, clock, monkeypatch):
            over = inner.put_object(KEY, PutRequest(BUCKET, "over", 3), BytesBody(b"new"))
            tag = inner.set_tags(KEY, BUCKET, "theirs", {"a": "b"})
            info, gone, refused = await in_one_transaction(one, over, inner.delete_object(KEY, BUCKET, "gone"), tag)
        assert (info.nbytes, gone) == (3, None)
        assert isinstance(refused, ServerError)
        assert refused.code is ErrorCode.SLOW_DOWN
        for shared in (one, other):
            assert [await get(shared, key) for key in ("over", "gone")] == [b"new", None]
            stored = shared.objects._objects.stored(BUCKET, "theirs")
            assert stored is not None
            assert not stored.info.attributes.tags


async def test_parts_come_back_with_the_upload_that_comes_back(
    tmp_path: Path, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(other, "theirs", b"theirs")
        ref = UploadRef(BUCKET, "key", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "key")))
        part = await one.uploads.put_part(KEY, PartRequest(ref, 1, 5), BytesBody(b"parts"))
        kept = UploadRef(BUCKET, "kept", await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "kept")))
        await one.uploads.put_part(KEY, PartRequest(kept, 7, 4), BytesBody(b"kept"))
        await one.following.read_journals()
        (their_file,) = [path for path in data_files(tmp_path) if other.writer in str(path)]
        with gone_while_written(one, their_file, clock, monkeypatch):
            complete = one.uploads._uploads.complete_upload(KEY, CompleteRequest(ref, [ClaimedPart(1, part.etag)]))
            tag = one.objects._objects.set_tags(KEY, BUCKET, "theirs", {"a": "b"})
            info, refused = await in_one_transaction(one, complete, tag)
        assert info.nbytes == 5
        assert isinstance(refused, ServerError)
        for shared in (one, other):
            assert await get(shared, "key") == b"parts"
            page = await shared.uploads.list_parts(KEY, kept, 0, 100)
            assert [(each.part_number, each.nbytes) for each in page.parts] == [(7, 4)]


async def test_a_change_that_is_alone_and_taken_back_has_not_happened(
    tmp_path: Path, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(other, "theirs", b"theirs")
        await put(one, "copy", b"old")
        await one.following.read_journals()
        (their_file,) = [path for path in data_files(tmp_path) if other.writer in str(path)]
        with gone_while_written(one, their_file, clock, monkeypatch):
            source = CopyRequest(ReadRequest(BUCKET, "theirs"), BUCKET, "copy")
            with pytest.raises(ServerError, match="too slowly"):
                await one.objects._objects.copy_object(KEY, source)
        for shared in (one, other):
            assert await get(shared, "copy") == b"old"
    async with opened(tmp_path, "a") as one, opened(tmp_path, "c") as newcomer:
        for shared in (one, newcomer):
            assert await get(shared, "copy") == b"old"


class _UndoneError(Exception):
    pass


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is carried out, undone, and carried out again, as after a transaction that was refused."""
    once = committer_module._carry_out_one

    def carry_out(tx: Transaction, job: Any, journal: Any) -> int:
        with suppress(Exception), tx.step():
            job.change(tx)
            raise _UndoneError
        return once(tx, job, journal)

    monkeypatch.setattr(committer_module, "_carry_out_one", carry_out)


@pytest.mark.parametrize("is_twice", [False, True], ids=["once", "twice"])
async def test_what_is_written_while_the_journal_is_written_anew_is_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, is_twice: bool
) -> None:
    """The committer waited for the rewrite: 16 s for 100,000 objects."""
    if is_twice:
        request.getfixturevalue("twice")
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        for key in ("stays", "over", "gone"):
            await put(one, key, b"old")
        loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        begin = one._journal.begin_rewrite

        def held(frames: Iterable[bytes]) -> Rewrite:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait(LIMIT_S)
            return begin(frames)

        async with one.upkeep.shortening:  # the server does so by itself, too
            before = one._journal.generation
            monkeypatch.setattr(one._journal, "begin_rewrite", held)
        shortening = asyncio.create_task(rewritten(one))
        await begun.wait()
        await put(one, "over", b"new")
        await put(one, "more", b"more")
        await one.objects.delete_object(KEY, BUCKET, "gone")
        assert await get(other, "over") == b"new"
        go_on.set()
        await shortening
        assert one._journal.generation > before
        await put(one, "after", b"after")
        expected = [b"old", b"new", None, b"more", b"after"]
        keys = ["stays", "over", "gone", "more", "after"]
        async with opened(tmp_path, "c") as newcomer:
            for shared in (one, other, newcomer):
                assert [await get(shared, key) for key in keys] == expected
                assert shown(shared) == shown(one)
        query = f"SELECT count(*) FROM records WHERE generation <= {before}"
        assert one.reader.here(lambda db: db.execute(query).fetchone()) == (0,)
    async with opened(tmp_path, "a") as one:
        assert [await get(one, key) for key in keys] == expected


async def test_a_rewrite_whose_transaction_is_refused_is_read_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(other, "theirs", b"theirs")
        await put(one, "key", b"data")
        await one.following.read_journals()
        append, read, starts = one.append_to_journal, one._journal.read, list[int]()

        def refused(tx: Transaction) -> None:
            if one._rewriting._finished is not None and not starts:
                raise RefusedChangesError(ErrorCode.SLOW_DOWN, "refused", retryable=True)
            append(tx)

        def refused_once(batch: list[Any]) -> list[str]:
            try:
                return transact(batch)
            except RefusedChangesError:
                return transact(batch)

        def noted(position: int) -> Iterator[ReadJournal]:
            starts.append(position)
            return read(position)

        transact = one.committer._transact
        with monkeypatch.context() as patched:
            patched.setattr(one, "append_to_journal", refused)
            patched.setattr(one.committer, "_transact", refused_once)
            patched.setattr(one._journal, "read", noted)
            await rewritten(one)
        assert starts == [one._journal.end]
        assert one._journal.generation == 2
        await other.following.read_journals()
        await one.following.read_journals()
        await put(one, "after", b"after")
        for shared in (one, other):
            assert [await get(shared, key) for key in ("key", "theirs", "after")] == [b"data", b"theirs", b"after"]


async def test_a_file_that_another_server_has_deleted_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its space would not come back as long as this server is idle."""
    for module in (files_module, store_module):
        monkeypatch.setattr(module, "GRACE_S", 0.2)
    monkeypatch.setattr(upkeep_module, "UPKEEP_S", 0.1)
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        for key in ("gone", "kept"):
            await put(one, key, content(100_000))
        for key in ("gone", "kept"):
            assert await get(other, key) == content(100_000)
        assert other.files.open.count == 2
        await one.objects.delete_object(KEY, BUCKET, "gone")
        await until(lambda: len(data_files(tmp_path)) == 1)
        await until(lambda: other.files.open.count == 1)
        assert await get(other, "kept") == content(100_000)


async def test_dead_files_of_servers_that_live_are_theirs_to_delete(tmp_path: Path) -> None:
    """They were kept in memory for ever, and looked at on the event loop every ten seconds."""
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(100_000))
        await other.objects.delete_object(KEY, BUCKET, "key")
        await one.following.read_journals()
        assert other.files.deletable(math.inf) == []
        assert other.files._dead == {}
        await until(lambda: len(one.files._dead) == 1)


@pytest.mark.parametrize(
    "torn", [b"\xff", (100).to_bytes(4, "little") + bytes(20), bytes(100)], ids=["a byte", "half a frame", "zeros"]
)
async def test_a_first_frame_that_is_torn_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    """The power failed in the first append: every later start was refused."""
    async with opened(tmp_path, "a") as one:
        journal = journal_of(tmp_path, one)
    assert journal.stat().st_size == 0
    journal.write_bytes(torn)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
    async with opened(tmp_path, "a") as one:
        assert await get(one, "key") == b"data"


async def test_without_an_index_nothing_is_cut_off_a_journal(tmp_path: Path) -> None:
    """One flipped bit of a length, and all objects behind it would be gone."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        for number in range(20):
            await put(one, f"key-{number}", content(1000, number))
        journal = journal_of(tmp_path, one)
    good = journal.read_bytes()
    at = 0
    for _ in range(5):  # a frame has its length, a checksum, and so many bytes
        at += 8 + int.from_bytes(good[at : at + 4], "little")
    damaged = bytearray(good)
    damaged[at + 2] ^= 0x40
    for name in (tmp_path / "a").rglob("index.sqlite3*"):
        name.unlink()
    journal.write_bytes(damaged)
    with pytest.raises(OSError, match="damaged"):
        async with opened(tmp_path, "a"):
            raise AssertionError
    assert journal.read_bytes() == bytes(damaged)
    journal.write_bytes(good)
    async with opened(tmp_path, "a") as one:
        assert await get(one, "key-19") == content(1000, 19)


async def test_a_record_that_took_too_long_names_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hangs is taken for a silent one, whose dead files others delete."""
    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"before")
        before = data_files(tmp_path)
        append = OwnJournal.append

        def append_late(journal: OwnJournal, frames: Sequence[bytes]) -> None:
            append(journal, frames)
            for path in data_files(tmp_path) - before:
                path.unlink()

        monkeypatch.setattr(OwnJournal, "append", append_late)
        monkeypatch.setattr(store_module, "GRACE_S", 0.0)
        with pytest.raises(ServerError):
            await put(one, "key", content(100_000))
        monkeypatch.undo()
        assert await get(one, "key") == b"before"
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        assert [await get(each, "key") for each in (one, other)] == [b"before", b"before"]


async def test_a_bucket_is_made_anew_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that were put while another server deleted the bucket are left in it."""
    monkeypatch.setattr(objects_module, "REMOVED_AT_ONCE", 2)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        for number in range(5):
            await put(one, f"key-{number}", b"left")
        await one.committer.commit(lambda tx: tx.db.execute("DELETE FROM buckets"))
        await one.objects.create_bucket(KEY, BUCKET)
        assert [await get(one, f"key-{number}") for number in range(5)] == [None] * 5
        with pytest.raises(CallerError):
            await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key-0", b"new")
        assert await get(one, "key-0") == b"new"


async def test_large_objects_have_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made on the event loop, of eight bytes for each block."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", content(100_000))
        for most, has_proof in ((100_000, True), (99_999, False)):
            monkeypatch.setattr(shared_objects, "PROVED_BYTES_MAX", most)
            async with one.objects.open_range(ReadRequest(BUCKET, "key")) as (_, proof, body):
                assert (proof is not None) == has_proof
                assert b"".join([bytes(piece) async for piece in body]) == content(100_000)


async def test_what_no_record_can_have_is_refused_before_it_is_stored(tmp_path: Path) -> None:
    """Other servers would pass over the record, and go on to show what was there before."""
    long = {"x-amz-meta-" + "n" * 246: "v"}
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        attributes = Attributes(headers=long)
        source = ReadRequest(BUCKET, "key")
        for refused, field in (
            (put(one, "other", b"data", attributes=attributes), *long),
            (put(one, "a\0b", b"data"), "key"),
            (one.uploads.create_upload(KEY, UploadRequest(BUCKET, "other", KEY, attributes)), *long),
            (one.objects.copy_object(KEY, CopyRequest(source, BUCKET, "a\0b")), "key"),
            (one.objects.copy_object(KEY, CopyRequest(source, BUCKET, "other", attributes)), *long),
            (one.objects.set_tags(KEY, BUCKET, "key", {"a": "b\n"}), "x-amz-tagging"),
        ):
            with pytest.raises(CallerError) as caught:
                await refused
            assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, field)
        page = await one.objects.list_objects(KEY, ListRequest(BUCKET))
        assert [entry.key for entry in page.objects] == ["key"]


async def test_an_object_that_no_record_can_have_can_still_be_deleted(tmp_path: Path) -> None:
    """Releases before have stored such objects."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")

        def rename(tx: Transaction) -> None:
            tx.db.execute("UPDATE objects SET key = ?", ("a\0b",))
            tx.db.execute("UPDATE records SET key = ? WHERE kind = 'object'", ("a\0b",))

        await one.committer.commit(rename)
        await one.objects.delete_object(KEY, BUCKET, "a\0b")
        assert (await one.objects.list_objects(KEY, ListRequest(BUCKET))).objects == []


@pytest.mark.parametrize("nbytes", [100, 9000])
async def test_a_folder_that_somebody_has_cleared_up_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Scratch file systems are cleared of empty folders."""
    async with opened(tmp_path, "a", segment_body_bytes_max=8192) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"x" * 9000)
        (first,) = data_files(tmp_path)
        shutil.rmtree(first.parent.parent)
        other = first.name[:12] + uuid.uuid4().hex[:18] + first.name[-2:]
        monkeypatch.setattr(one.files, "new_id", lambda: other)
        await put(one, "other", b"y" * nbytes)
        assert await get(one, "other") == b"y" * nbytes


@pytest.mark.parametrize("has_remains", [False, True])
async def test_writes_go_on_when_the_file_system_is_mounted_again(tmp_path: Path, has_remains: bool) -> None:
    """A segment that was made beneath the mount point meanwhile is where nobody looks."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        mounted, away = tmp_path / "shared", tmp_path / "away"
        mounted.rename(away)
        mounted.mkdir()
        if has_remains:
            (mounted / "writers" / one.writer).mkdir(parents=True)
        chunk = f"{7:064x}"
        with pytest.raises(ServerError):
            await put(one, chunk, b"data")
        assert has_remains or not any(mounted.iterdir())
        mounted.rename(tmp_path / "remains")
        away.rename(mounted)
        with suppress(ServerError):
            await put(one, "first", b"data")
        await put(one, "second", b"data")
        assert await get(one, "second") == b"data"
        assert await get(one, chunk) is None


@pytest.mark.parametrize("error", [None, errno.EIO])
async def test_a_change_of_an_object_whose_file_is_gone_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    """One tenant could otherwise make the writes of all others fail, which share the transaction."""
    async with opened(tmp_path, "a", segment_body_bytes_max=8192) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "gone", b"x" * 9000)
        (gone,) = data_files(tmp_path)
        if error is None:
            gone.unlink()
        else:
            status = Beneath.status

            def failing(place: Beneath) -> os.stat_result:
                if place.name == gone.name:
                    raise OSError(error, "the file cannot be looked at")
                return status(place)

            monkeypatch.setattr(Beneath, "status", failing)
        tags = one.objects._objects.set_tags(KEY, BUCKET, "gone", {"a": "b"})
        puts = [put(one, f"{number:064x}", b"data") for number in range(8)]
        failure, *others = await in_one_transaction(one, tags, *puts)
        assert isinstance(failure, ServerError)
        assert "has not the file" in str(failure)
        assert others == [None] * 8


@pytest.mark.parametrize("nbytes", [100, 3 * MIB])
@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
async def test_a_read_that_fails_once_hides_nothing(tmp_path: Path, nbytes: int, error: int) -> None:
    """A network file system may answer the next time, and a chunk that counts as damaged stays hidden."""
    disk, chunk = Disk(), f"{7:064x}"
    async with opened(tmp_path, "a", disk=disk) as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, chunk, content(nbytes))
        disk.fail["read"] = error
        with pytest.raises(ServerError) as caught:
            await get(one, chunk)
        assert caught.value.retryable
        with pytest.raises(ServerError) as caught:
            await whole_into(one, chunk, nbytes)
        assert caught.value.retryable
        disk.fail.clear()
        assert await one.objects.has_object(BUCKET, chunk, time.monotonic())
        assert await get(one, chunk) == content(nbytes)
        assert await whole_into(one, chunk, nbytes) == content(nbytes)


@pytest.mark.parametrize("ahead_days", [40, -40])
async def test_what_expires_goes_by_the_time_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_days: int
) -> None:
    """One server whose clock is wrong would delete the objects of all, or have others delete its own."""
    day_s = 86_400.0
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await one.objects.set_lifecycle(KEY, BUCKET, [LifecycleRule("1", expire_days=30, abort_days=30)])
        await put(one, "before", b"data")
        there_s, host_s = one.files.now_s(), time.time
        monkeypatch.setattr(time, "time", lambda: host_s() + ahead_days * day_s)
        await put(one, "meanwhile", b"data")
        await one.uploads.create_upload(KEY, UploadRequest(KEY, BUCKET, "upload"))
        rounds, carry_out = [], one.lifecycle.carry_out

        async def counted(*arguments: Any) -> tuple[int, int]:
            done = await carry_out(*arguments)
            rounds.append(done)
            return done

        monkeypatch.setattr(one.lifecycle, "carry_out", counted)
        running = asyncio.create_task(one.lifecycle.run(0.0, day_s))
        await until(lambda: bool(rounds))
        running.cancel()
        assert rounds[0] == (0, 0)
        page = await one.objects.list_objects(KEY, ListRequest(BUCKET))
        uploads = await one.uploads.list_uploads(KEY, UploadListRequest(BUCKET))
        times = [entry.modified_at for entry in page.objects] + [entry.initiated_at for entry in uploads.uploads]
        assert times == pytest.approx([there_s] * 3, abs=3600.0)


async def test_a_beat_that_is_answered_late_takes_no_time_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: MovedClock
) -> None:
    """The server's stamps would be behind those of all others, and hold nowhere."""
    touch = Beneath.touch

    def slow(place: Beneath) -> float:
        touched_s = touch(place)
        clock.ahead_s += 3.0
        return touched_s

    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        with monkeypatch.context() as patched:
            patched.setattr(Beneath, "touch", slow)
            other.files.beat()
        assert other.files.now_s() == pytest.approx(one.files.now_s(), abs=1.0)


@pytest.mark.parametrize("is_known", [False, True])
async def test_of_two_puts_of_a_chunk_the_later_one_holds_though_its_server_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Also where the file system's time has whole seconds; a new chunk is put without a look at the journals."""
    touch, chunk = Beneath.touch, f"{7:064x}"
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        monkeypatch.setattr(Beneath, "touch", lambda place: touch(place) // 1 - 5 + is_known / 2)
        async with opened(tmp_path, "b") as behind:
            if is_known:
                await put(one, chunk, b"first")
                await behind.following.read_journals()
            await put(one, chunk, b"old")
            await put(behind, chunk, b"new")
            for shared in (one, behind):
                await shared.following.read_journals()
            assert [await get(shared, chunk) for shared in (one, behind)] == [b"new", b"new"]


async def test_a_server_without_a_sign_of_life_changes_nothing_until_it_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: MovedClock
) -> None:
    """Others delete files of a silent server, so what it acknowledged could be lost."""

    def failing(place: Beneath) -> float:
        raise OSError(errno.EPERM, "it has 2 names")

    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        with monkeypatch.context() as patched:
            patched.setattr(Beneath, "touch", failing)
            clock.ahead_s += files_module.UNSEEN_S_MAX
            with pytest.raises(ServerError, match="sign of life") as refused:
                await put(one, "key", b"data")
            assert refused.value.retryable
        one.files.beat()
        await put(one, "key", b"data")
        assert await get(one, "key") == b"data"


async def test_a_copy_of_a_servers_data_directory_deletes_nothing_of_its_origin(
    tmp_path: Path, clock: MovedClock
) -> None:
    """Beside its origin it does not know what that has written since."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    halfway, go_on, data = asyncio.Event(), asyncio.Event(), content(3 * MIB)

    class SlowBody(BytesBody):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in super().__aiter__():
                yield piece
                halfway.set()
                await go_on.wait()

    async with opened(tmp_path, "a", segment_body_bytes_max=0) as one:
        request = PutRequest(BUCKET, "key", len(data))
        arriving = asyncio.create_task(one.objects.put_object(KEY, request, SlowBody(data)))
        await halfway.wait()
        async with opened(tmp_path, "copy") as copied:
            assert copied.writer == one.writer
            go_on.set()
            await arriving
            clock.ahead_s += files_module.GRACE_S
            await copied.following.read_journals()
            clock.ahead_s += files_module.GRACE_S
            with pytest.raises(ServerError, match="another server writes this journal"):
                await copied.upkeep.delete_dead()
        assert await get(one, "key") == data


async def test_a_backup_of_hard_links_stops_no_server(tmp_path: Path) -> None:
    """`cp -al` gives each file a second name, and what has several names is not written to."""
    shared, backup = tmp_path / "shared", tmp_path / "backup"
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        shutil.copytree(shared, backup, copy_function=os.link)
        one.files.beat()
        await put(one, "meanwhile", b"data")
        journal = journal_of(tmp_path, one)
    kept = (backup / journal.relative_to(shared)).read_bytes()
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await put(one, "later", b"data")
        for key in ("key", "meanwhile", "later"):
            assert [await get(shared, key) for shared in (one, other)] == [b"data"] * 2
    assert (backup / journal.relative_to(shared)).read_bytes() == kept


async def test_a_journal_that_does_not_answer_for_a_moment_is_not_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told old bytes, and no condition holds against what cannot be seen; after a while others go on."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"old")
        assert await get(other, "key") == b"old"
        read, fails = following_module.read_journal, True

        def fail(*arguments: Any) -> ReadJournal:
            if fails:
                raise OSError(errno.EIO, "played")
            return read(*arguments)

        await put(one, "key", b"new")
        monkeypatch.setattr(following_module, "read_journal", fail)
        new = PutRequest(BUCKET, "new", 1, condition=WriteCondition(if_absent=True))
        for call in (
            lambda: get(other, "key"),
            lambda: other.objects.put_object(KEY, new, BytesBody(b"x")),
            lambda: other.objects.delete_bucket(KEY, BUCKET),
        ):
            with pytest.raises(ServerError) as failed:
                await call()
            assert failed.value.code is ErrorCode.SLOW_DOWN
            assert "does not answer" in failed.value.message
        monkeypatch.setattr(unanswered, "WAITED_S", 0.0)
        assert await get(other, "key") == b"old"
        with pytest.raises(ServerError, match="cannot be read to its end"):
            await other.objects.delete_bucket(KEY, BUCKET)
        fails = False
        assert await get(other, "key") == b"new"


async def test_folders_of_writers_that_come_and_go_leave_few_lines_and_no_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, "a") as one:
        for turn in range(15):
            for number in range(20):
                folder = tmp_path / "shared" / "writers" / f"{turn:04x}{number:08x}"
                folder.mkdir(mode=0o700)
                (folder / "journal-1").mkdir()
            await one.following.read_journals()
            for path in (tmp_path / "shared" / "writers").glob(f"{turn:04x}*"):
                shutil.rmtree(path)
            await one.following.read_journals()
        assert one.unread_count == 0
        lines = [record for record in caplog.records if record.levelname == "WARNING"]
        assert 0 < len(lines) <= 2 * 10
