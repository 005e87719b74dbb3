"""Whoever may write to a shared directory may harm what is in it, but no server, and no file of a server's host."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from awscrt.checksums import crc32c

from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import ListRequest
from objectcache.adapters.beneath import Beneath, UnsafeFileError
from storage_server.home.directory import following as following_module
from storage_server.home.directory import journal as journal_module
from storage_server.home.directory import journal_problems
from storage_server.home.directory.journal import ReadJournal, named_files
from storage_server.home.directory.membership import WrongHomeError
from storage_server.home.directory.rules import shares as shares_module
from storage_server.home.directory.rules.clock import AHEAD_S
from storage_server.home.service import Shown
from tests.support.shared_bed import BUCKET, KEY, data_files, get, journal_of, made, opened, put
from tests.support.store_bed import content
from tests.support.waiting import LIMIT_S, until

NEIGHBOUR = "0123456789ab"
SECRET = b"root:x:0:0:root:/root:/bin/bash\n" * 2000


@pytest.fixture
def host_file(tmp_path: Path) -> Path:
    """A file of the host that has nothing to do with the directory."""
    path = tmp_path / "host_file"
    path.write_bytes(SECRET)
    return path


def state(path: Path) -> tuple[bytes, int]:
    return path.read_bytes(), path.stat().st_mtime_ns


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + crc32c(payload).to_bytes(4, "little") + payload


def neighbours_journal(tmp_path: Path, *frames: Any) -> Path:
    """The journal of a writer that is no server."""
    folder = tmp_path / "shared" / "writers" / NEIGHBOUR
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "journal-1"
    journal.write_bytes(
        b"".join(framed(each if isinstance(each, bytes) else json.dumps(each).encode()) for each in frames)
    )
    return journal


def in_place_of(path: Path, host_file: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(host_file)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()


KINDS = pytest.mark.parametrize("kind", ["link", "fifo", "folder"])


@KINDS
async def test_no_file_of_the_host_is_read_in_place_of_a_data_file(tmp_path: Path, host_file: Path, kind: str) -> None:
    """The checksums would refuse its bytes; who makes the index as well could make them fit. A FIFO would never end."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", SECRET)
        (path,) = data_files(tmp_path)
        before = state(host_file)
        in_place_of(path, host_file, kind)
        with suppress(ServerError):
            assert await get(other, "key") is None
        await put(other, "other", b"data")
        assert await get(other, "other") == b"data"
    assert state(host_file) == before


async def test_no_folder_of_data_files_may_be_a_link(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", SECRET)
        (path,) = data_files(tmp_path)
        path.rename(host / path.name)
        path.parent.rmdir()
        path.parent.symlink_to(host)
        with suppress(ServerError):
            assert await get(other, "key") is None
        one.files.dispose(path.name)
    assert [each.name for each in host.iterdir()] == [path.name]


@KINDS
async def test_a_journal_is_never_opened_through_a_link(tmp_path: Path, host_file: Path, kind: str) -> None:
    """Its torn end would be cut off, and records appended, to a file of the host."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = journal_of(tmp_path, one)
    before = state(host_file)
    in_place_of(journal, host_file, kind)
    shared = made(tmp_path, "a")
    with pytest.raises(UnsafeFileError, match="journal-1"):
        await shared.start()
    await shared.close()
    assert state(host_file) == before


@KINDS
@pytest.mark.parametrize("name", ["alive", "reserve"])
async def test_no_other_file_of_a_server_is_opened_through_a_link(
    tmp_path: Path, host_file: Path, kind: str, name: str
) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        path = tmp_path / "shared" / "writers" / one.writer / name
    before = state(host_file)
    in_place_of(path, host_file, kind)
    shared = made(tmp_path, "a")
    with suppress(OSError):
        await shared.start()
    await shared.close()
    assert state(host_file) == before


@KINDS
def test_the_mark_of_the_directory_is_no_link(tmp_path: Path, host_file: Path, kind: str) -> None:
    (tmp_path / "shared").mkdir()
    in_place_of(tmp_path / "shared" / "format.json", host_file, kind)
    with pytest.raises((WrongHomeError, OSError)):
        made(tmp_path, "a")
    assert host_file.read_bytes() == SECRET


@KINDS
async def test_a_neighbours_journal_that_is_no_file_stops_nobody(tmp_path: Path, host_file: Path, kind: str) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = neighbours_journal(tmp_path)
        in_place_of(journal, host_file, kind)
        await put(one, "key", b"data")
        await one.following.read_journals()
        assert await get(one, "key") == b"data"
        assert one.unread_count == 1


def object_record(key: str, stamp: int, nbytes: int = 0, modified_at: float = 1e9) -> list[Any]:
    return ["object", BUCKET, key, stamp, [nbytes, "etag", modified_at, "{}"], []]


BAD = {
    "a number beyond 64 bits": [object_record("bad", 7, nbytes=1 << 80)],
    "a stamp beyond all years": [object_record("bad", 1 << 62)],
    "a part whose number is a word": [["part", "upload", "word", 7]],
    "a part whose number has no end": [["part", "upload", "9" * 10_000, 7]],
    "a time without a text": [object_record("bad", 7, modified_at=1e300)],
    "JSON without a bottom": b"[" * 200_000,
    "no JSON": b"\xff{",
    "attributes without a bottom": [["object", BUCKET, "bad", 7, [0, "etag", 1.0, "[" * 200_000], []]],
}


@pytest.mark.parametrize("name", BAD)
async def test_a_record_that_makes_no_sense_stops_nobody(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted, told with its journal and its offset, and what is written behind it holds."""
    good = [object_record("good", 8)]
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = neighbours_journal(tmp_path, good, BAD[name], [object_record("behind", 9)])
        await put(one, "key", b"data")
        await one.following.read_journals()
        page = await one.objects.list_objects(KEY, ListRequest(BUCKET))
        assert [entry.key for entry in page.objects] == ["behind", "good", "key"]
        assert one.bad_record_count == 1
        assert one.unread_count == 0
        assert f"the journal of {NEIGHBOUR}" in caplog.text
        assert f"at offset {len(framed(json.dumps(good).encode()))}" in caplog.text
        with journal.open("ab") as file:
            file.write(framed(json.dumps([object_record("later", 10)]).encode()))
        await one.following.read_journals()
        assert await get(one, "later") == b""
    async with opened(tmp_path, "a") as again:
        assert await get(again, "key") == b"data"


async def test_records_that_make_no_sense_fill_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A neighbour who wrote one each second had a line with each pass."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = neighbours_journal(tmp_path, BAD["a time without a text"])
        for _ in range(3):
            await one.following.read_journals()
            with journal.open("ab") as file:
                file.write(framed(json.dumps(BAD["a time without a text"]).encode()))
        await one.following.read_journals()
        assert one.bad_record_count == 4
        assert caplog.text.count("make no sense") == 1


async def test_a_stamp_of_years_to_come_hides_nothing(tmp_path: Path) -> None:
    """Otherwise no later change of the key would hold, and no server could give a later stamp any more."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        neighbours_journal(tmp_path, [object_record("key", 1 << 62)], [object_record("new", 1 << 62)])
        await put(one, "key", b"later")
        for shared in (one, other):
            assert await get(shared, "key") == b"later"
            assert await get(shared, "new") is None
            assert shared.bad_record_count == 2
            assert shared._clock.stamp() < (shared.files.now_s() + AHEAD_S) * 1e6


async def test_a_record_of_days_to_come_is_read_when_its_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose clock was behind would otherwise never show it, and delete the files that it names."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        stamp = int((one.files.now_s() + 30 * 86_400) * 1e6)
        neighbours_journal(tmp_path, [object_record("early", 7)], [object_record("late", stamp)])
        await one.following.read_journals()
        assert await get(one, "early") == b""
        assert await get(one, "late") is None
        assert (one.unread_count, one.bad_record_count) == (1, 0)
        now_s = one.files.now_s
        monkeypatch.setattr(one.files, "now_s", lambda: now_s() + 30 * 86_400)
        monkeypatch.setattr(one._clock, "_now_s", one.files.now_s)
        await one.following.read_journals()
        assert await get(one, "late") == b""
        assert one.unread_count == 0


async def test_no_stamp_is_given_that_others_would_not_take_over(tmp_path: Path) -> None:
    """The file system's clock was days ahead, and has been set right."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        one._clock.observe(int((one.files.now_s() + 3 * 86_400) * 1e6))
        with pytest.raises(ServerError, match="clock"):
            await put(one, "key", b"data")


async def test_files_of_a_silent_writer_stay_where_its_records_make_no_sense_here(tmp_path: Path) -> None:
    folder = Beneath(tmp_path / "shared", f"writers/{NEIGHBOUR}")
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        neighbours_journal(tmp_path, [object_record("good", 8)])
        assert named_files(folder, {"ab" * 16}) == set()
        neighbours_journal(tmp_path, [object_record("good", 8)], [["object", BUCKET, "of a later release", 9, {}]])
        assert named_files(folder, set()) is None


async def test_servers_take_the_time_from_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose clock is years behind would pass over what all others write, and one years ahead would hide it."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        for time_s in (0.0, 4e9):
            monkeypatch.setattr("time.time", lambda time_s=time_s: time_s)
            async with opened(tmp_path, f"at {time_s}") as other:
                monkeypatch.undo()
                await put(other, "key", content(100))
                assert await get(one, "key") == content(100)
                await put(one, "key", b"later")
                assert await get(other, "key") == b"later"
                assert one.bad_record_count == other.bad_record_count == 0


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that has written 60 rows has used its share up, and a step reads about 20."""
    monkeypatch.setattr(shares_module, "ROWS_MAX", 60)
    monkeypatch.setattr(shares_module, "ROWS_PER_S", 0.0)
    monkeypatch.setattr(following_module, "STEP_ROWS", 20)
    monkeypatch.setattr(following_module, "LATE_ROWS", 20)


def flood(tmp_path: Path, frames: int = 40) -> Path:
    """A neighbour's journal with ten records in each frame."""
    records = [[object_record(f"n{frame:03}.{number}", 8) for number in range(10)] for frame in range(frames)]
    return neighbours_journal(tmp_path, *records)


@pytest.mark.usefixtures("small_shares")
async def test_a_writer_of_more_than_can_be_read_keeps_only_its_own_records_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All calls of all servers would wait for it otherwise, for as long as it writes. What others have answered is seen
    as before.
    """
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        may_go_on, read_piece = asyncio.Event(), one.following._late._read_piece

        async def held(writer: str) -> ReadJournal:
            await may_go_on.wait()
            return await read_piece(writer)

        monkeypatch.setattr(one.following._late, "_read_piece", held)
        flood(tmp_path)
        for number in range(5):
            await put(other, "key", b"%d" % number)
            assert await get(one, "key") == b"%d" % number
        page = await one.objects.list_objects(KEY, ListRequest(BUCKET))
        assert 1 < len(page.objects) < 101
        assert one.unread_count == 1
        assert caplog.text.count(f"the journal of {NEIGHBOUR}") == 2  # of both servers
        before_s = one.following.whole_s
        await one.following.read_journals()
        assert one.following.whole_s == before_s  # no file is deleted meanwhile
        may_go_on.set()
        await until(lambda: one.unread_count == 0)
        page = await one.objects.list_objects(KEY, ListRequest(BUCKET))
        assert len(page.objects) == 401
        assert one.following.whole_s > before_s


@pytest.mark.usefixtures("small_shares")
async def test_a_start_reads_all_that_is_there(tmp_path: Path) -> None:
    """A server that has not read its neighbours would answer that nothing is there."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        flood(tmp_path)
        async with opened(tmp_path, "b") as newcomer:
            assert newcomer.unread_count == 0
            page = await newcomer.objects.list_objects(KEY, ListRequest(BUCKET))
            assert len(page.objects) == 400


@pytest.mark.parametrize("is_start", [True, False])
async def test_a_call_waits_for_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_start: bool
) -> None:
    """A journal that grows faster than it is read would be read for ever."""
    monkeypatch.setattr(following_module, "STEP_ROWS", 20)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = flood(tmp_path)
        frame = framed(json.dumps([object_record("more", 9)]).encode()) * 20
        read, steps = one.following._carry_out, 0

        async def grows(found: Any) -> None:
            nonlocal steps
            steps += 1
            with journal.open("ab") as file:
                file.write(frame)
            await read(found)

        monkeypatch.setattr(one.following, "_carry_out", grows)
        async with asyncio.timeout(LIMIT_S):
            await one.following._pass_behind(None, is_start=is_start)
        assert 20 <= steps < 30
        page = one.reader.here(lambda db: db.execute("SELECT count(*) FROM objects").fetchone())
        assert page[0] >= 400


async def test_a_pass_that_takes_long_leaves_behind_what_it_has_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers within their shares wrote more than a slow machine reads: all calls waited for them, and in vain."""
    monkeypatch.setattr(following_module, "STEP_ROWS", 20)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        now_s, steps, may_go_on = time.monotonic(), 0, asyncio.Event()
        carry_out, read_piece = one.following._carry_out, one.following._late._read_piece

        async def slow(found: Any) -> None:
            nonlocal now_s, steps
            now_s, steps = now_s + one._settings.read_timeout_s / 8, steps + 1
            await carry_out(found)

        async def held(writer: str) -> ReadJournal:
            await may_go_on.wait()
            return await read_piece(writer)

        monkeypatch.setattr(following_module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now_s))
        monkeypatch.setattr(one.following, "_carry_out", slow)
        monkeypatch.setattr(one.following._late, "_read_piece", held)
        flood(tmp_path)
        await one.following.read_journals()
        assert (steps, one.unread_count) == (2, 1)
        may_go_on.set()
        await until(lambda: one.unread_count == 0)
        page = await one.objects.list_objects(KEY, ListRequest(BUCKET))
        assert len(page.objects) == 400


async def test_a_large_change_of_others_is_told_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop would stop while a cache forgets a whole journal's keys. What could not be told is told later."""
    monkeypatch.setattr(following_module, "TOLD_AT_ONCE", 30)
    told: list[int] = []
    fails = True

    async def tell(changed: list[Shown]) -> None:
        if fails and len(told) == 1:
            raise ServerError(ErrorCode.SLOW_DOWN, "not now", retryable=True)
        told.append(len(changed))

    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        one.on_changed(tell)
        flood(tmp_path, frames=10)
        await one.following.read_journals()
        assert told == [30]
        fails = False
        await one.following.read_journals()
        assert told == [30, 30, 30, 10]


@pytest.mark.parametrize("name", ["reserve", "journal-2"])
async def test_a_hard_link_to_a_file_of_the_host_is_not_written_to(tmp_path: Path, host_file: Path, name: str) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        folder = tmp_path / "shared" / "writers" / one.writer
    (folder / name).unlink(missing_ok=True)
    os.link(host_file, folder / name)
    before = state(host_file)
    with suppress(OSError, ServerError):
        async with opened(tmp_path, "a") as one:
            await put(one, "key", content(100_000))
    assert state(host_file) == before


@pytest.mark.parametrize("kind", ["second name", "link", "fifo"])
async def test_nothing_in_place_of_a_sign_of_life_is_kept(tmp_path: Path, host_file: Path, kind: str) -> None:
    """A copy of a long file with a second name would fill the disk, and a server that gives no sign may not write."""
    one = made(tmp_path, "a")
    alive = tmp_path / "shared" / "writers" / one.writer / "alive"
    if kind == "second name":
        alive.touch()
        os.truncate(alive, 1 << 24)
        os.link(alive, tmp_path / "second")
    else:
        in_place_of(alive, host_file, kind)
    before = state(host_file)
    one.files.beat()
    await one.close()
    assert one.files.is_beating()
    assert (alive.is_symlink(), alive.is_file(), alive.stat().st_size) == (False, True, 0)
    assert state(host_file) == before


async def test_a_folder_that_was_cleared_up_is_waited_for_no_more(tmp_path: Path) -> None:
    """Its problem outlived it: tags of others' files failed, and no file was deleted, until every server restarted."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = neighbours_journal(tmp_path, [])
        journal.write_bytes(b"garbage" * 100)
        await one.following.read_journals()
        assert one.unread_count == 1
        before_s = one.following.whole_s
        journal.unlink()
        journal.parent.rmdir()
        await one.following.read_journals()
        assert one.unread_count == 0
        assert one.following.whole_s > before_s


async def test_a_folder_that_was_cleared_up_leaves_nothing_behind_and_may_come_again(tmp_path: Path) -> None:
    """Nobody knows what the records that were passed over say, so nothing older is forgotten while they are there."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        for count in (1, 2):
            journal = neighbours_journal(tmp_path, [object_record("good", 8)], BAD["no JSON"])
            await one.following.read_journals()
            assert one.following.problems.spoiled == {NEIGHBOUR}
            assert one.bad_record_count == count
            shutil.rmtree(journal.parent)
            await one.following.read_journals()
            assert one.following.problems.spoiled == set()
            assert NEIGHBOUR not in one.following._places
        assert await get(one, "good") == b""


async def test_a_start_does_not_wait_for_a_journal_that_is_always_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, "b"):
        pass
    journal = neighbours_journal(tmp_path, *([[]] * 200))
    read_journal = following_module.read_journal

    def read_and_renew(folder: Beneath, *rest: Any) -> Any:
        found = read_journal(folder, *rest)
        if folder.name == NEIGHBOUR:
            newest = max(journal.parent.glob("journal-*"), key=lambda path: int(path.name[8:]))
            newest.rename(newest.with_name(f"journal-{int(newest.name[8:]) + 1}"))
        return found

    monkeypatch.setattr(following_module, "STEP_BYTES", 100)
    monkeypatch.setattr(following_module, "read_journal", read_and_renew)
    async with asyncio.timeout(LIMIT_S):
        async with opened(tmp_path, "a") as one:
            await one.objects.create_bucket(KEY, BUCKET)
            assert one.unread_count == 1


async def test_of_a_folder_with_very_many_names_few_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pass would list them all while nothing else of the server runs. Known servers are still followed."""
    for module in (following_module, journal_problems):
        monkeypatch.setattr(module, "NAMES_MAX", 3)
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(other, "key", b"data")
        await one.following.read_journals()
        folder = tmp_path / "shared" / "writers"
        for number in range(3):
            (folder / f"{number:040}").touch()
        looked_at: list[int] = []
        first_names = Beneath.first_names

        def counted(place: Beneath, most: int) -> tuple[list[str], bool]:
            found = first_names(place, most)
            if place.name == folder.name:
                looked_at.append(len(found[0]))
            return found

        monkeypatch.setattr(Beneath, "first_names", counted)
        await put(other, "later", b"later")
        whole_s = one.following.whole_s
        assert await get(one, "later") == b"later"
        assert max(looked_at) <= 3
        assert "the folder of writers has more than 3 names" in caplog.text
        assert one.unread_count == 1
        assert one.following.whole_s == whole_s  # there may be servers that were not found
        for path in folder.glob("0*"):
            if path.is_file():
                path.unlink()
        await one.following.read_journals()
        assert one.unread_count == 0
        assert one.following.whole_s > whole_s


async def test_a_neighbours_folder_with_very_many_names_is_a_problem_of_that_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "NAMES_MAX", 3)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        journal = neighbours_journal(tmp_path, [object_record("good", 8)])
        for number in range(3):
            (journal.parent / f"{number:040}").touch()
        await put(one, "key", b"data")
        await one.following.read_journals()
        assert one.unread_count == 1
        assert await get(one, "key") == b"data"


async def test_a_problem_that_lasts_is_told_once_and_many_are_told_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stamp of days to come is some seconds less ahead at each look, and there may be thousands of journals."""
    now_s = 1e6
    for module in (following_module, journal_problems):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now_s))
    told = re.compile(r"the journal of (\d+) can be read no further: a stamp .* s later than any may be now")
    most = 10
    async with opened(tmp_path, "a") as one:
        late = [object_record("key", int((time.time() + 30 * AHEAD_S) * 1e6))]
        for number in range(most + 2):
            folder = tmp_path / "shared" / "writers" / f"{number:012}"
            folder.mkdir()
            (folder / "journal-1").write_bytes(framed(json.dumps(late).encode()))
        for minute in range(3):
            for shown_s in range(2):
                monkeypatch.setattr(one.files, "_ahead_s", (one.files._ahead_s[0] + 100 * minute + shown_s,))
                await one.following.read_journals()
            assert len(told.findall(caplog.text)) == min(most * (minute + 1), most + 2)
            now_s += 60.0
        assert len(set(told.findall(caplog.text))) == most + 2
        assert one.unread_count == most + 2


async def test_journals_of_zeros_are_neither_read_again_and_again_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A hole of any size takes no disk: it counts as nothing. Zeros on the disk use up the share of their writer."""
    monkeypatch.setattr(journal_module, "STEP_BYTES", 1 << 20)
    read_bytes: dict[str, int] = {}
    read_journal = following_module.read_journal

    def counted(folder: Beneath, *arguments: Any) -> ReadJournal:
        found = read_journal(folder, *arguments)
        read_bytes[folder.name] = read_bytes.get(folder.name, 0) + found.nbytes
        return found

    monkeypatch.setattr(following_module, "read_journal", counted)
    monkeypatch.setattr(shares_module, "BYTES_MAX", 1 << 20)
    monkeypatch.setattr(shares_module, "BYTES_PER_S", 1.0)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        sizes = {"0" * 12: (1 << 40, 0), "1" * 12: (1 << 19, 1 << 19), "2" * 12: (3 << 20, 3 << 20)}
        for name, (size, written) in sizes.items():
            folder = tmp_path / "shared" / "writers" / name
            folder.mkdir(mode=0o700)
            with (folder / "journal-1").open("wb") as file:
                file.write(bytes(written))
                file.truncate(size)
        for _ in range(6):
            await one.following.read_journals()
        assert read_bytes["0" * 12] == 0
        assert read_bytes["2" * 12] <= 6 * 4096
        assert one.unread_count >= 1
        assert f"the journal of {'1' * 12}: it has more than others may be kept waiting for" in caplog.text
        await put(one, "key", b"data")
        assert await get(one, "key") == b"data"


@pytest.mark.parametrize("step", ["crc32c", "records_in"])
async def test_a_journal_that_is_shortened_while_it_is_read_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """Its writer alone can do that, and could hold all calls up with it. The file system has answered."""
    monkeypatch.setattr(following_module, "STEP_ROWS", 20)
    done = getattr(journal_module, step)

    def shortened(*values: Any, **named: Any) -> Any:
        os.truncate(journal, 200)
        return done(*values, **named)

    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        monkeypatch.setattr(journal_module, step, shortened)
        journal = neighbours_journal(tmp_path, [object_record(f"{number:01000}", 8) for number in range(5_000)])
        await one.following.read_journals()
        await put(one, "key", b"data")
        assert await get(one, "key") == b"data"
        assert "the journal has become shorter" in caplog.text


@pytest.mark.parametrize("name", ["journal-0", "journal-2", "journal-1.new", "succession-9", "many"])
async def test_a_server_starts_whatever_names_a_neighbour_makes_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A folder of the name of an old journal, or too many names, had the server end at its start."""
    monkeypatch.setattr(journal_module, "NAMES_MAX", 20)
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"data")
        own = tmp_path / "shared" / "writers" / one.writer
    for each in [f"name-{number}" for number in range(20)] if name == "many" else [name]:
        (own / each).mkdir()
    async with opened(tmp_path, "a") as again:
        assert await get(again, "key") == b"data"
        await put(again, "other", b"more")
