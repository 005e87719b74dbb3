"""The clock of a file system leaps years ahead, and comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from objectcache.adapters.beneath import Beneath
from storage_server.home.directory.files import BEATS_KEPT, SHOWN, SharedFiles
from storage_server.home.directory.rules.clock import AHEAD_S, SHOWN_STEP_S, TIME_S_MAX, ClockError, StampClock
from storage_server.home.directory.rules.records import STAMP_MAX
from storage_server.home.directory.store import SharedDirectory
from storage_server.kernel.data.disk import Disk
from tests.support.shared_bed import BUCKET, KEY, get, opened, put

TEN_YEARS_S = 10 * 365 * AHEAD_S


class FileClock:
    """The clock of a file system, `ahead_s` ahead of the host's. A file that is touched keeps its time."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.touched: dict[Path, float] = {}

    def touch(self, place: Beneath) -> float:
        place.path.touch()
        self.touched[place.path] = now_s = time.time() + self.ahead_s
        return now_s


@pytest.fixture
def file_clock(monkeypatch: pytest.MonkeyPatch) -> FileClock:
    clock = FileClock()
    monkeypatch.setattr(Beneath, "touch", lambda place: clock.touch(place))

    def shown_s(files: SharedFiles, writer: str) -> float:
        return clock.touched.get((files._writers / writer / SHOWN).path, 0.0)

    monkeypatch.setattr(SharedFiles, "shown_s", shown_s)
    return clock


def leap(clock: FileClock, ahead_s: float, *servers: SharedDirectory, beats: int = 1) -> None:
    """So far is the clock ahead from now on, and these servers have noticed."""
    clock.ahead_s = ahead_s
    for server in servers:
        for _ in range(beats):
            server._beat()


async def test_changes_go_on_behind_those_of_a_leap(tmp_path: Path, file_clock: FileClock) -> None:
    """Stamps of years to come were given, which nobody could give a later one for."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "key", b"before")
        leap(file_clock, TEN_YEARS_S, one, other)
        await put(one, "key", b"meanwhile")
        await other.following.read_journals()
        await put(other, "other", b"meanwhile")
        leap(file_clock, 0.0, one, other, beats=BEATS_KEPT)
        await put(one, "key", b"after")
        await put(one, "other", b"after")
        for server in (one, other):
            await server.following.read_journals()
            assert [await get(server, key) for key in ("key", "other")] == [b"after", b"after"]
            assert server.unread_count == 0


async def test_a_server_that_joins_after_a_leap_reads_all_and_writes(tmp_path: Path, file_clock: FileClock) -> None:
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        leap(file_clock, TEN_YEARS_S, one)
        await put(one, "key", b"meanwhile")
        leap(file_clock, 0.0, one, beats=BEATS_KEPT)
        async with opened(tmp_path, "b") as late:
            assert late.unread_count == 0
            assert await get(late, "key") == b"meanwhile"
            await put(late, "key", b"after")
        await one.following.read_journals()
        assert await get(one, "key") == b"after"


async def test_a_server_goes_on_after_a_leap_and_a_restart(tmp_path: Path, file_clock: FileClock) -> None:
    """Also where somebody has cleared the file up that keeps the time."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        leap(file_clock, TEN_YEARS_S, one)
        await put(one, "key", b"meanwhile")
    file_clock.ahead_s = 0.0
    file_clock.touched.clear()
    async with opened(tmp_path, "a") as one:
        await put(one, "key", b"after")
        assert await get(one, "key") == b"after"


async def test_a_leap_of_one_servers_own_clock_is_believed_by_all(tmp_path: Path, file_clock: FileClock) -> None:
    """On some file systems the times of files are those of the client."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        leap(file_clock, TEN_YEARS_S, one)
        await put(one, "key", b"meanwhile")
        file_clock.ahead_s = 0.0
        await other.following.read_journals()
        assert await get(other, "key") == b"meanwhile"
        await put(other, "key", b"after")
        await one.following.read_journals()
        assert await get(one, "key") == b"after"


async def test_a_time_that_leaps_back_before_it_is_kept_does_not_count(
    tmp_path: Path, file_clock: FileClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would know why such stamps were given."""

    def touch(place: Beneath) -> float:
        file_clock.ahead_s = TEN_YEARS_S if place.name != SHOWN else 0.0
        return file_clock.touch(place)

    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        monkeypatch.setattr(Beneath, "touch", touch)
        one._beat()
        assert one.files.now_s() < time.time() + AHEAD_S
        assert one.files.is_beating()


async def test_a_time_that_the_file_system_has_not_shown_is_not_believed(tmp_path: Path, file_clock: FileClock) -> None:
    """A neighbour may write any stamp, and cannot set the time of a file."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await other.following.read_journals()
        other._clock.observe(int((time.time() + TEN_YEARS_S) * 1e6))
        other._clock.note_shown(time.time() + TEN_YEARS_S)
        await put(other, "key", b"of the future")
        await one.following.read_journals()
        assert one.unread_count == 1
        assert await get(one, "key") is None
        await put(one, "key", b"now")


async def test_a_restart_takes_no_later_stamps_than_others(tmp_path: Path, file_clock: FileClock) -> None:
    """A neighbour stepped stamps up by half a day at each restart of a server, whose changes nobody else read then."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        one._clock.observe(int((time.time() + AHEAD_S - 60.0) * 1e6))  # as a neighbour's record may be
        await put(one, "key", b"ahead")
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        assert one._clock.latest < int((time.time() + AHEAD_S + 60.0) * 1e6)
        await put(one, "key", b"after")
        await other.following.read_journals()
        assert await get(other, "key") == b"after"


async def test_a_restart_after_a_leap_takes_no_later_stamps_than_others(tmp_path: Path, file_clock: FileClock) -> None:
    """The server that was restarted was away during the leap."""
    async with opened(tmp_path, "a") as one:
        await one.objects.create_bucket(KEY, BUCKET)
        leap(file_clock, TEN_YEARS_S, one)
        await put(one, "key", b"meanwhile")
        leap(file_clock, 0.0, one, beats=BEATS_KEPT)
        async with opened(tmp_path, "b") as late:
            assert await get(late, "key") == b"meanwhile"
        async with opened(tmp_path, "b") as late:
            assert late._clock.latest <= one._clock.latest
            await put(late, "key", b"after")
            await one.following.read_journals()
            assert await get(one, "key") == b"after"


def test_the_own_file_keeps_the_time_in_steps(tmp_path: Path, file_clock: FileClock) -> None:
    files = SharedFiles(tmp_path, "ab" * 6, 16, Disk())
    (tmp_path / "writers" / ("ab" * 6)).mkdir(parents=True)
    shown = list[float]()
    for ahead_s in (0.0, SHOWN_STEP_S / 2, 1.5 * SHOWN_STEP_S, SHOWN_STEP_S, 0.0):
        file_clock.ahead_s = ahead_s
        files.beat()
        shown.append(round((files.own_shown_s - time.time()) / SHOWN_STEP_S, 1))
    assert shown == [0.0, 0.0, 1.5, 1.5, 1.5]


@pytest.mark.parametrize("shown_s", [4e9, TIME_S_MAX, 1e18])
def test_stamps_have_room_behind_any_time_that_was_shown(shown_s: float) -> None:
    now_s = shown_s
    clock = StampClock(lambda: now_s, 0)
    clock.note_shown(shown_s)
    stamps = [clock.stamp()]
    now_s = 1e9
    stamps += [clock.stamp() for _ in range(3)]
    assert stamps == sorted(set(stamps))
    assert clock.latest < STAMP_MAX
    clock.observe(clock.latest)
    with pytest.raises(ClockError, match="has that gone back"):
        clock.stamp()
