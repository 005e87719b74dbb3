"""Objects that are set aside to be encoded: the books hear of each how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from objectcache.kv_codecs.layer import Codec
from storage_server.cache import replacements
from storage_server.cache.replacements import Replacements
from storage_server.cache.rules.entry import Entry
from storage_server.cache.rules.replacing import Replacement
from storage_server.settings import CacheSettings
from tests.support.waiting import settled

CACHES = {"cached": CacheSettings("cached", ttl_s=10.0, replaces=True)}


def wanted(key: str, version: int = 1, *, nbytes: int = 10) -> Replacement:
    return Replacement("cached", key, Entry(version, nbytes, 100.0, 100.0), Codec.KIVI4, nbytes - 7)


class Bed:
    """Replacements over a played replacer, which waits for `go`."""

    def __init__(self, *, has_room: bool = True, encodes: bool = True) -> None:
        self.go = asyncio.Event()
        self.has_room, self.encodes, self.may = has_room, encodes, True
        self.put_versions: list[int] = []
        self.kept: list[tuple[str, bool]] = []
        self.want_count = 0
        played: Any = self
        self.replacements = Replacements(
            replacer=played,
            caches=CACHES,
            replacing=self.replacing,
            keep=self.keep,
            room_bytes=lambda bucket: 35,
            want=self.want,
        )

    async def encoded(self, replacement: Replacement, cache: CacheSettings) -> Any:
        return replacement.entry.version if self.encodes else None

    async def put(self, bucket: str, made: Any, may_replace: Any) -> bool:
        if not self.has_room:
            return False
        async with may_replace() as may:
            if may:
                await self.go.wait()
                self.put_versions.append(made)
        return bool(may)

    @asynccontextmanager
    async def replacing(self, replacement: Replacement) -> AsyncIterator[bool]:
        yield self.may

    async def keep(self, replacement: Replacement, *, is_refused: bool) -> None:
        self.kept.append((replacement.key, is_refused))

    def want(self) -> None:
        self.want_count += 1

    async def run(self) -> None:
        running = asyncio.create_task(self.replacements.run())
        await settled()
        running.cancel()
        await asyncio.wait((running,))


async def test_no_more_is_set_aside_than_there_is_room_for() -> None:
    bed = Bed()
    four = [wanted(key) for key in "abcd"]
    assert bed.replacements.set_aside(four) == [four[3]]
    assert bed.replacements.nbytes == 21
    assert bed.replacements.give_up(11) == four[:2]
    assert bed.replacements.give_up(0) == []
    assert bed.replacements.give_up(100, "elsewhere") == []
    assert bed.replacements.nbytes == 7


async def test_what_is_set_aside_is_replaced() -> None:
    bed = Bed()
    bed.go.set()
    bed.replacements.set_aside([wanted("a", 1), wanted("b", 2)])
    await bed.run()
    assert (bed.put_versions, bed.kept, bed.replacements.nbytes) == ([1, 2], [], 0)


@pytest.mark.parametrize(("bed_options", "is_refused"), [({"has_room": False}, False), ({"encodes": False}, True)])
async def test_what_cannot_be_replaced_is_kept_and_the_books_look_again(
    bed_options: dict[str, bool], is_refused: bool
) -> None:
    bed = Bed(**bed_options)
    bed.replacements.set_aside([wanted("a")])
    await bed.run()
    assert (bed.kept, bed.want_count, bed.replacements.nbytes) == ([("a", is_refused)], 1, 0)


async def test_what_may_not_be_replaced_is_not_put() -> None:
    bed = Bed()
    bed.may = False
    bed.replacements.set_aside([wanted("a")])
    await bed.run()
    assert (bed.put_versions, bed.kept, bed.replacements.nbytes) == ([], [("a", False)], 0)


async def test_a_later_form_of_the_key_is_wanted_in_place_of_an_earlier_one() -> None:
    """It is wanted while the earlier one is being put."""
    bed = Bed()
    bed.replacements.set_aside([wanted("a", 1)])
    running = asyncio.create_task(bed.replacements.run())
    await settled()
    bed.replacements.set_aside([wanted("a", 2)])
    assert bed.replacements.nbytes == 7
    bed.go.set()
    await settled()
    running.cancel()
    await asyncio.wait((running,))
    assert bed.put_versions == [1, 2]
    assert bed.replacements.nbytes == 0


async def test_what_was_given_up_is_not_put() -> None:
    bed = Bed()
    bed.replacements.set_aside([wanted("a")])
    original = bed.encoded

    async def encoded(*asked: Any) -> Any:
        assert [each.key for each in bed.replacements.give_up(1)] == ["a"]
        return await original(*asked)

    bed.encoded = encoded  # type: ignore[method-assign]
    bed.go.set()
    await bed.run()
    assert (bed.put_versions, bed.kept) == ([], [("a", False)])


async def test_one_that_fails_in_a_way_that_nobody_expects_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    bed.go.set()
    monkeypatch.setattr(replacements, "PAUSE_S", 0.0)
    original = bed.encoded

    async def encoded(replacement: Replacement, cache: CacheSettings) -> Any:
        if replacement.key == "a":
            raise RuntimeError("played")
        return await original(replacement, cache)

    bed.encoded = encoded  # type: ignore[method-assign]
    bed.replacements.set_aside([wanted("a", 1), wanted("b", 2)])
    await bed.run()
    assert (bed.kept, bed.put_versions, bed.replacements.nbytes) == ([("a", True)], [2], 0)


async def test_where_nothing_can_be_put_objects_are_refused_the_codec_so_that_they_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a full disk each was encoded again and again, for ever and without a pause."""
    bed = Bed(has_room=False)
    monkeypatch.setattr(replacements, "PAUSE_S", 0.0)
    for number in range(5):
        bed.replacements.set_aside([wanted(f"{number}")])
        await bed.run()
    assert bed.kept == [(f"{number}", number >= replacements.MISSES_MAX) for number in range(5)]
    bed.has_room = True
    bed.go.set()
    bed.replacements.set_aside([wanted("a")])
    await bed.run()
    bed.has_room = False
    bed.replacements.set_aside([wanted("b")])
    await bed.run()
    assert (bed.put_versions, bed.kept[-1]) == ([1], ("b", False))
