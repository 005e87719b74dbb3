"""Victims that are set aside: none is lost, whatever happens to it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from storage_server.cache.replacements import Replacements
from storage_server.cache.rules.books import Victim
from storage_server.cache.rules.entry import Entry
from storage_server.settings import CacheSettings
from tests.support.waiting import settled

CACHES = {"cached": CacheSettings("cached", ttl_s=10.0, replaces=True)}


def victim(key: str, version: int = 1, *, modified_at: float = 100.0, nbytes: int = 10) -> Victim:
    return Victim("cached", key, Entry(version, nbytes, modified_at, modified_at, is_replaceable=True))


class Bed:
    """Replacements over a played replacer, which waits for `go`."""

    def __init__(self, *, has_room: bool = True, encodes: bool = True) -> None:
        self.go = asyncio.Event()
        self.has_room, self.encodes, self.may = has_room, encodes, True
        self.put_versions: list[int] = []
        self.deleted: list[Victim] = []
        played: Any = self
        self.replacements = Replacements(played, CACHES, self.leaving, self.delete, lambda bucket: 35)

    async def encoded(self, bucket: str, key: str, version: int, max_error: float | None) -> Any:
        return version if self.encodes else None

    async def put(self, bucket: str, made: Any, may_leave: Any) -> bool:
        if not self.has_room:
            return False
        async with may_leave() as may:
            if may:
                await self.go.wait()
                self.put_versions.append(made)
        return True

    @asynccontextmanager
    async def leaving(self, victim: Victim) -> AsyncIterator[bool]:
        yield self.may

    async def delete(self, victim: Victim) -> None:
        self.deleted.append(victim)

    async def run(self) -> None:
        running = asyncio.create_task(self.replacements.run())
        await settled()
        running.cancel()
        await asyncio.wait((running,))


async def test_others_and_those_whose_time_has_come_are_not_set_aside() -> None:
    bed = Bed()
    plain = Victim("cached", "plain", Entry(1, 10, 100.0, 100.0))
    elsewhere = Victim("elsewhere", "a", Entry(1, 10, 100.0, 100.0, is_replaceable=True))
    old = victim("old", modified_at=90.0)
    assert bed.replacements.set_aside([plain, victim("a"), elsewhere, old], 100.5) == [plain, elsewhere, old]
    assert bed.replacements.nbytes == 10


async def test_no_more_is_set_aside_than_there_is_room_for() -> None:
    bed = Bed()
    victims = [victim(key) for key in "abcd"]
    assert bed.replacements.set_aside(victims, 100.0) == [victims[3]]
    assert bed.replacements.give_up(11) == victims[:2]
    assert bed.replacements.give_up(0) == []
    assert bed.replacements.give_up(100, "elsewhere") == []
    assert bed.replacements.nbytes == 10


async def test_what_is_set_aside_is_replaced() -> None:
    bed = Bed()
    bed.go.set()
    bed.replacements.set_aside([victim("a", 1), victim("b", 2)], 100.0)
    await bed.run()
    assert (bed.put_versions, bed.deleted, bed.replacements.nbytes) == ([1, 2], [], 0)


@pytest.mark.parametrize("bed_options", [{"has_room": False}, {"encodes": False}])
async def test_what_cannot_be_replaced_is_deleted(bed_options: dict[str, bool]) -> None:
    bed = Bed(**bed_options)
    bed.replacements.set_aside([victim("a")], 100.0)
    await bed.run()
    assert [each.key for each in bed.deleted] == ["a"]
    assert bed.replacements.nbytes == 0


async def test_what_may_not_leave_is_left_to_the_books() -> None:
    bed = Bed()
    bed.may = False
    bed.replacements.set_aside([victim("a")], 100.0)
    await bed.run()
    assert (bed.put_versions, bed.deleted, bed.replacements.nbytes) == ([], [], 0)


async def test_a_later_object_of_the_key_is_a_victim_of_its_own() -> None:
    """It comes while the earlier one is being put."""
    bed = Bed()
    bed.replacements.set_aside([victim("a", 1)], 100.0)
    running = asyncio.create_task(bed.replacements.run())
    await settled()
    bed.replacements.set_aside([victim("a", 2)], 100.0)
    bed.go.set()
    await settled()
    running.cancel()
    await asyncio.wait((running,))
    assert bed.put_versions == [1, 2]
    assert bed.replacements.nbytes == 0


async def test_a_victim_that_was_given_up_is_neither_put_nor_deleted() -> None:
    bed = Bed()
    bed.replacements.set_aside([victim("a")], 100.0)
    bed.may = True
    original = bed.encoded

    async def encoded(*asked: Any) -> Any:
        assert [each.key for each in bed.replacements.give_up(1)] == ["a"]
        return await original(*asked)

    bed.encoded = encoded  # type: ignore[method-assign]
    bed.go.set()
    await bed.run()
    assert (bed.put_versions, bed.deleted) == ([], [])
