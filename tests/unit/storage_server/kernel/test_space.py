"""What a data directory takes, and waiting for room in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.units import MIB
from objectcache.adapters.caller import CALLER
from storage_server.kernel.data import bound as bound_module
from storage_server.kernel.data import room_line
from storage_server.kernel.data.arriving_bodies import LEAST_BYTES_PER_S, SLOW_S, ArrivingBody
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.data.room_line import WAITING_MAX, WAITING_PART
from storage_server.kernel.data.space import Space
from tests.support.waiting import settled, until
from tests.unit.played_time import PlayedTime


def test_space_is_counted_from_its_reservation_until_it_is_given_back(tmp_path: Path) -> None:
    told = []
    space = Space(tmp_path, 64 * MIB)
    space.freed = lambda: told.append(space.extent_bytes)
    space.take("a", 5000)
    space.take("b", 4096)
    assert (space.extent_bytes, space.kept_bytes) == (8192 + 4096, 8192 + 4096)
    space.doom([("a", 0, 5000)])
    assert (space.extent_bytes, space.kept_bytes, space.dying_bytes) == (12_288, 4096, 8192)
    space.give_back("a", 5000)
    assert (space.extent_bytes, space.kept_bytes, space.dying_bytes) == (4096, 4096, 0)
    space.give_back("a", 5000)
    space.forget("b")
    assert (space.extent_bytes, space.kept_bytes) == (0, 0)
    assert told == [4096, 4096, 0]


def test_bytes_of_a_file_that_is_named_again_are_kept(tmp_path: Path) -> None:
    space = Space(tmp_path, None)
    space.take("a", 8192)
    space.doom([("a", 0, 4096)])
    space.revive("a")
    assert (space.kept_bytes, space.dying_bytes) == (8192, 0)


def test_a_start_counts_what_the_file_system_has_allocated(tmp_path: Path) -> None:
    """A hole takes nothing; a file that is no extent counts against the bound, too."""
    folder = tmp_path / "extents" / "aa"
    folder.mkdir(parents=True)
    (tmp_path / "set-aside").mkdir()
    (tmp_path / "set-aside" / "old").write_bytes(b"x" * 12_288)
    (folder / "stranger").write_bytes(b"x" * 8192)
    (tmp_path / "index.sqlite3").write_bytes(b"x" * 4096)
    known = folder / "known"
    with known.open("wb") as file:
        file.truncate(MIB)
        file.seek(0)
        file.write(b"x" * 4096)
        file.flush()
    space = Space(tmp_path, 64 * MIB)
    space.load([known])
    assert space.extent_bytes == 4096
    assert space.used_bytes == 4096 + 12_288 + 8192 + 4096
    limit = space.extent_bytes_max
    (tmp_path / "index.sqlite3").write_bytes(b"x" * 12_288)
    space.measure()
    assert limit is not None
    assert space.extent_bytes_max == limit - 8192


class Room:
    """A bound of 100 bytes whose use can be set."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.wanted = 0
        self.bound = Bound("the room", lambda: 100, lambda: self.used_bytes)
        self.bound.wants = self._want

    def _want(self) -> None:
        self.wanted += 1

    async def store(self, nbytes: int) -> None:
        async with self.bound.reserved(nbytes):
            await asyncio.sleep(0)
            self.used_bytes += nbytes

    def free(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self.bound.notify()


async def test_room_is_given_in_the_order_in_which_it_was_asked_for() -> None:
    room = Room()
    await room.store(90)
    first, second = asyncio.create_task(room.store(50)), asyncio.create_task(room.store(15))
    await settled()
    assert (room.wanted, room.bound.waiting_bytes, room.bound.has_room(1)) == (2, 65, False)
    room.free(40)
    await first
    assert not second.done()
    room.free(30)
    await second
    assert (room.used_bytes, room.bound.reserved_bytes, room.bound.waiting_bytes) == (85, 0, 0)


async def test_small_ones_pass_a_large_one_that_waits_and_only_so_many() -> None:
    """An announced giant that never sends a byte must not keep others out, nor small ones keep a large one out."""
    room = Room()
    await room.store(70)
    large = asyncio.create_task(room.store(50))
    await settled()
    for _ in range(5):
        await room.store(10)
        room.free(10)
    last = asyncio.create_task(room.store(10))
    await settled()
    assert (large.done(), last.done()) == (False, False)
    room.free(30)
    await asyncio.gather(large, last)


async def test_those_that_fit_are_not_refused_with_one_that_does_not() -> None:
    room = Room()
    await room.store(70)
    large = asyncio.create_task(room.store(50))
    await settled()
    room.bound._line.passed_bytes = 50  # as many as may have passed it
    small = asyncio.create_task(room.store(10))
    await settled()
    assert not small.done()
    room.bound.refuse()
    with pytest.raises(ServerError, match="no room for 50"):
        await large
    await small


async def test_what_is_promised_is_not_promised_again() -> None:
    room = Room()
    async with room.bound.reserved(60):
        waiting = asyncio.create_task(room.store(60))
        await settled()
        assert not waiting.done()
    await waiting


async def test_room_that_cannot_come_is_refused_at_once() -> None:
    room = Room()
    with pytest.raises(ServerError, match="no room for 101 bytes in the room") as refused:
        await room.store(101)
    assert (refused.value.code, room.wanted) == (ErrorCode.INSUFFICIENT_STORAGE, 0)
    await room.store(100)
    room.bound.wants = None
    with pytest.raises(ServerError, match="no room for 1 bytes"):
        await room.store(1)


async def test_those_that_wait_are_refused_when_nothing_more_can_leave() -> None:
    room = Room()
    await room.store(100)
    waiting = asyncio.create_task(room.store(10))
    await settled()
    room.bound.refuse()
    with pytest.raises(ServerError, match="no room"):
        await waiting
    assert (room.bound.waiting_bytes, room.bound.reserved_bytes) == (0, 0)


async def test_nobody_waits_longer_than_patience_and_room_is_not_lost() -> None:
    played = PlayedTime()
    room = Room()
    await room.store(95)
    slow, next_one = asyncio.create_task(room.store(10)), asyncio.create_task(room.store(5))
    await played.passes(bound_module.PATIENCE_S - 0.1)
    assert not slow.done()
    await played.passes(0.2)
    assert slow.done()
    with pytest.raises(ServerError, match="no room"):
        await slow
    await next_one
    assert (room.used_bytes, room.bound.reserved_bytes) == (100, 0)


async def test_a_caller_that_is_cancelled_gives_its_turn_up() -> None:
    room = Room()
    await room.store(95)
    gone, next_one = asyncio.create_task(room.store(10)), asyncio.create_task(room.store(5))
    await settled()
    gone.cancel()
    await asyncio.wait([gone])
    await next_one
    assert (gone.cancelled() or gone.done(), room.bound.reserved_bytes, room.used_bytes) == (True, 0, 100)


async def test_a_caller_that_is_cancelled_as_room_comes_gives_the_room_back() -> None:
    room = Room()
    await room.store(95)
    gone = asyncio.create_task(room.store(10))
    await settled()
    room.used_bytes = 0
    room.bound.notify()
    gone.cancel()
    await asyncio.wait([gone])
    await settled()
    assert (room.bound.reserved_bytes, room.bound.waiting_bytes) == (0, 0)


async def test_too_many_that_wait_are_told_to_slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_line, "WAITING_MAX", 1)
    room = Room()
    await room.store(100)
    waiting = asyncio.create_task(room.store(1))
    await settled()
    with pytest.raises(ServerError) as refused:
        await room.store(1)
    assert refused.value.code is ErrorCode.SLOW_DOWN
    room.free(1)
    await waiting


class TestArrivingBody:
    """The loop's clock is played."""

    async def test_a_body_that_comes_fast_is_left_alone(self) -> None:
        body = ArrivingBody(1000.0, asyncio.timeout(None))
        for second in range(60):
            body.came(LEAST_BYTES_PER_S, 1000.0 + second)
            assert not body.is_slow(1000.5 + second)

    async def test_a_giant_must_come_within_a_minute(self) -> None:
        """A body that announced 290 MiB and sent 300 KiB/s kept the room for a quarter of an hour."""
        giant, small = (ArrivingBody(1000.0, asyncio.timeout(None), room * MIB) for room in (300, 3))
        for second in range(1, 8):
            for body in (giant, small):
                body.came(MIB, 1000.0 + second)
        assert giant.is_slow(1008.0)
        assert not small.is_slow(1008.0)
        quick = ArrivingBody(1000.0, asyncio.timeout(None), 300 * MIB)
        for second in range(1, 8):
            quick.came(6 * MIB, 1000.0 + second)
        assert not quick.is_slow(1008.0)

    async def test_what_came_long_ago_is_no_credit(self) -> None:
        """A burst at the beginning let a body drip for as long as the mean allowed."""
        body = ArrivingBody(1000.0, asyncio.timeout(None))
        async with body.limit:
            body.came(1 << 30, 1001.0)
            assert not body.is_slow(1000.0 + 2 * SLOW_S)  # within two windows the burst counts
            for second in range(2, 12):
                body.came(1, 1000.0 + second)
            assert body.is_slow(1000.0 + 3 * SLOW_S)
            body.limit.reschedule(None)

    async def test_the_servers_own_time_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop_s = [1000.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: loop_s[0])
        body = ArrivingBody(1000.0, asyncio.timeout(None))
        body.came(1, 1000.0)
        with body.busy():
            loop_s[0] += 100
            assert not body.is_slow(loop_s[0])
        monkeypatch.undo()
        assert not body.is_slow(loop_s[0] + SLOW_S - 1)
        async with body.limit:
            assert body.is_slow(loop_s[0] + SLOW_S)
            body.limit.reschedule(None)


class TestQueue:
    """Those that wait for room, by the keys that they work for."""

    @staticmethod
    def waiting(bound: Bound, by: str, nbytes: int, count: int) -> list[asyncio.Task[None]]:
        async def wait() -> None:
            CALLER.set(by)
            async with bound.reserved(nbytes):
                pass

        return [asyncio.create_task(wait()) for _ in range(count)]

    async def test_a_key_has_a_part_of_the_places_and_waits_for_no_more_than_there_is(self) -> None:
        """One key's PUTs took all places, and nobody else's were even queued."""
        bound = Bound("the directory", lambda: 1 << 30, lambda: 1 << 30)
        bound.wants = lambda: None
        greedy = self.waiting(bound, "a", 1 << 16, WAITING_MAX)
        large = self.waiting(bound, "b", 1 << 29, 5)
        other = self.waiting(bound, "c", 4096, 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(not each.done() for each in greedy) == WAITING_PART * WAITING_MAX
        assert sum(not each.done() for each in large) == 2
        assert not other[0].done()
        for refused in (greedy[-1], large[-1]):
            with pytest.raises(ServerError, match="too many wait") as told:
                await refused
            assert told.value.code is ErrorCode.SLOW_DOWN
        assert bound.waiting_bytes <= 1 << 30
        bound.refuse()
        ends = await asyncio.gather(*greedy, *large, *other, return_exceptions=True)
        assert all(isinstance(end, ServerError) for end in ends)
        assert not bound.waiting_bytes
        assert not bound.reserved_bytes

    async def test_what_is_given_back_in_pieces_has_the_queue_looked_at_once(self) -> None:
        """Two thousand pieces with a long queue stopped the loop for seconds."""
        looks: list[int] = []

        def used_bytes() -> int:
            looks.append(1)
            return 1 << 20

        bound = Bound("the directory", lambda: 1 << 20, used_bytes)
        bound.wants = lambda: None
        waiting = [each for by in "abcdefgh" for each in self.waiting(bound, by, 4096, 100)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        looks.clear()
        for _ in range(2000):
            bound.notify()
        await asyncio.sleep(0)
        assert len(looks) == 1
        looks.clear()
        bound.refuse()
        assert len(looks) == 1
        await asyncio.gather(*waiting, return_exceptions=True)

    @pytest.mark.parametrize(("is_cache", "by", "ends"), [(True, "a", True), (True, "b", False), (False, "a", False)])
    async def test_a_key_that_announces_most_of_a_cache_makes_room_for_others(
        self, is_cache: bool, by: str, ends: bool
    ) -> None:
        """However fast it sends; in a directory that evicts nothing the first one there keeps what it got."""
        bound = Bound("the cache", lambda: 100 * MIB, lambda: 90 * MIB)
        bound.wants = (lambda: None) if is_cache else None
        now_s = asyncio.get_running_loop().time()
        body = ArrivingBody(now_s, asyncio.timeout(None), 80 * MIB, by="a")
        body.came(MIB, now_s)
        CALLER.set("b" if by == "a" else "a")
        with bound.bodies.taken_by(body):
            async with body.limit:
                assert bound._end_slow(20 * MIB) is ends
                assert (body.limit.when() is not None) is ends
                body.limit.reschedule(None)

    async def test_slow_bodies_end_only_where_that_is_enough(self) -> None:
        """Any large PUT ended everybody's slower uploads, and was refused then."""
        bound = Bound("the directory", lambda: 100 * MIB, lambda: 100 * MIB)
        ended: list[str] = []
        now_s = asyncio.get_running_loop().time()

        async def arrive(name: str, room_bytes: int) -> None:
            body = ArrivingBody(now_s - 60, asyncio.timeout(None), room_bytes)
            with bound.bodies.taken_by(body):
                try:
                    async with body.limit:
                        await asyncio.Event().wait()
                except TimeoutError:
                    ended.append(name)

        bodies = [asyncio.create_task(arrive(f"{size} MiB", size * MIB)) for size in (1, 20, 5)]
        await asyncio.sleep(0)
        with pytest.raises(ServerError, match="no room"):
            async with bound.reserved(50 * MIB):
                pass
        waiter = self.waiting(bound, "a", 8 * MIB, 1)
        await until(lambda: bool(ended))
        assert ended == ["20 MiB"]
        for task in (*bodies, *waiter):
            task.cancel()
        await asyncio.wait((*bodies, *waiter))
