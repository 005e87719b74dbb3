"""The DRAM tier between a source and its policy: what it lends is what the source has, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
import pytest

from storage_server.cache import dram
from storage_server.cache.dram import DramTier, Lent
from storage_server.cache.exact_keeper import ExactKeeper
from storage_server.cache.policies.choice import Eviction
from storage_server.planning.extent import ALIGNMENT_BYTES, CorruptExtentError, Extent
from storage_server.planning.rows import Row
from tests.support.waiting import settled, until

UNIT = ALIGNMENT_BYTES


def extent(number: int, units: int = 1) -> Extent:
    return Extent(f"{number:032x}", 0, units * UNIT, b"")


def content(one: Extent) -> bytes:
    return bytes([int(one.file_id, 16) % 251 + 1]) * one.nbytes


class Source:
    """A ChunkSource that the tier copies from; `damaged` and `gone` extents cannot be. `may_read` lets reads go on."""

    generation = 0

    def __init__(self) -> None:
        self.damaged: set[Extent] = set()
        self.gone = False
        self.kept_count = self.begun_count = 0
        self.reads: list[Extent] = []
        self.read_bytes = 0
        self.may_read = threading.Event()
        self.may_read.set()

    def keep(self, extents: Sequence[Extent], since: int) -> Source | None:
        if self.gone:
            return None
        self.kept_count += 1
        return self

    def release(self) -> None:
        self.kept_count -= 1

    def read_extent(self, one: Extent, view: memoryview, start: int = 0) -> None:
        self.begun_count += 1
        assert self.may_read.wait(60)
        self.reads.append(one)
        self.read_bytes += len(view)
        if one in self.damaged:
            raise CorruptExtentError("damaged")
        view[:] = content(one)[start : start + len(view)]


async def use(tier: DramTier, extents: Sequence[Extent]) -> list[bool]:
    """One delivery: which extents were in memory. What was lent is right."""
    async with tier.lent(extents) as lent:
        for one, address in zip(extents, lent.addresses, strict=True):
            assert address is None or ctypes.string_at(address, one.nbytes) == content(one)
        return [address is not None for address in lent.addresses]


async def settle(tier: DramTier) -> None:
    while tier._working:
        await asyncio.wait(list(tier._working))


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def tier(source: Source) -> AsyncIterator[DramTier]:
    tier = DramTier(4 * UNIT, source, partial(ExactKeeper, eviction=Eviction.LRU))  # type: ignore[arg-type]
    yield tier
    await tier.close()
    assert source.kept_count == 0


async def test_what_was_used_is_in_memory_afterwards(tier: DramTier) -> None:
    both = [extent(1), extent(2)]
    assert await use(tier, both) == [False, False]
    await settle(tier)
    assert await use(tier, [*both, extent(3)]) == [True, True, False]
    assert (tier.residency.hit_count, tier.residency.missed_count, tier.residency.used_bytes) == (2, 3, 2 * UNIT)


async def test_a_prefix_larger_than_the_memory_keeps_its_start(tier: DramTier) -> None:
    prefix = [extent(number) for number in range(6)]
    for _ in range(3):
        found = await use(tier, prefix)
        await settle(tier)
    assert found == [True] * 4 + [False] * 2


async def test_it_rests_between_extents(tier: DramTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one holds nothing up."""
    used = []

    def rest(used_s: float, core_count: int) -> float:
        used.append((used_s, core_count))
        return 0.0

    monkeypatch.setattr("storage_server.cache.dram.pause_s", rest)
    await use(tier, [extent(number) for number in range(3)])
    await settle(tier)
    assert [core_count for _, core_count in used] == [len(os.sched_getaffinity(0))] * 2
    assert all(used_s > 0 for used_s, _ in used)


async def test_the_policy_says_what_gives_way(tier: DramTier) -> None:
    for number in (1, 2, 1, 3, 4, 5):
        await use(tier, [extent(number)])
        await settle(tier)
    assert await use(tier, [extent(number) for number in (1, 3, 4, 5)]) == [True] * 4
    assert await use(tier, [extent(2)]) == [False]
    assert tier.residency.evicted_count >= 1


async def test_an_extent_that_is_named_twice_is_lent_twice(tier: DramTier) -> None:
    """Two chunks of equal bytes may lie in one place."""
    for expected in (False, True):
        assert await use(tier, [extent(1), extent(2), extent(1)]) == [expected] * 3
        await settle(tier)


async def test_what_is_lent_stays_until_it_is_given_back(tier: DramTier) -> None:
    await use(tier, [extent(1, 4)])
    await settle(tier)
    async with tier.lent([extent(1, 4)]) as lent:
        (address,) = lent.addresses
        assert address is not None
        for number in (2, 3, 4):
            assert await use(tier, [extent(number)]) == [False]
            await settle(tier)
        assert ctypes.string_at(address, 4 * UNIT) == content(extent(1, 4))
    await settle(tier)
    await use(tier, [extent(5)])
    await settle(tier)
    assert await use(tier, [extent(5)]) == [True]


async def test_damaged_and_deleted_extents_do_not_come_in(tier: DramTier, source: Source) -> None:
    source.damaged = {extent(2)}
    await use(tier, [extent(1), extent(2)])
    await settle(tier)
    source.gone = True
    await use(tier, [extent(3)])
    await settle(tier)
    assert await use(tier, [extent(1), extent(2), extent(3)]) == [True, False, False]
    assert tier.residency.used_bytes == UNIT
    source.gone, source.damaged = False, set()
    await settle(tier)
    for _ in range(2):
        found = await use(tier, [extent(2), extent(3)])
        await settle(tier)
    assert found == [True, True]


async def test_uses_while_an_extent_is_copied_read_it_once(tier: DramTier, source: Source) -> None:
    source.may_read.clear()
    for _ in range(3):
        assert await use(tier, [extent(1)]) == [False]
    source.may_read.set()
    await settle(tier)
    assert source.reads == [extent(1)]
    assert await use(tier, [extent(1)]) == [True]


async def test_where_too_many_wait_for_the_policy_uses_are_forgotten(
    tier: DramTier, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram, "WAITING_MAX", 2)
    async with tier._deciding:
        for number in range(5):
            await use(tier, [extent(number)])
        await settled()
        assert tier._waiting_count == 2
    await settle(tier)
    assert tier.residency.resident_count == 2


async def test_closing_ends_copies_under_way(source: Source) -> None:
    tier = DramTier(4 * UNIT, source)  # type: ignore[arg-type]
    source.may_read.clear()
    await use(tier, [extent(1), extent(2)])
    await until(lambda: source.begun_count > 0)
    closing = asyncio.create_task(tier.close())
    await settled()
    source.may_read.set()
    await closing
    assert source.kept_count == 0
    assert len(source.reads) <= 1


async def test_without_memory_nothing_is_lent(source: Source) -> None:
    tier = DramTier(0, source)  # type: ignore[arg-type]
    assert await use(tier, [extent(1)]) == [False]
    await tier.close()
    assert source.reads == []


@pytest.fixture
async def landing_tier(source: Source) -> AsyncIterator[DramTier]:
    tier = DramTier(4 * UNIT, source, partial(ExactKeeper, eviction=Eviction.LRU), takes_landings=True)  # type: ignore[arg-type]
    yield tier
    await tier.close()
    assert source.kept_count == 0


async def landings_of(lent: Lent) -> list[int]:
    """The addresses, when the policy has decided."""
    assert lent.landings is not None
    await until(lent.landings.any)
    return [int(landing) for landing in lent.landings]


def land(tier: DramTier, extents: Sequence[Extent], landings: Sequence[int], start: int, nbytes: int) -> None:
    """What a gather does with these bytes of each extent."""
    rows = np.zeros((len(extents), len(Row)), dtype=np.int64)
    for row, one, landing in zip(rows, extents, landings, strict=True):
        if landing:
            row[Row.LANDING], row[Row.NBYTES] = landing + start, nbytes
            ctypes.memmove(landing + start, content(one)[start : start + nbytes], nbytes)
    tier.note_landed(rows)


async def test_what_landed_is_not_read_again(landing_tier: DramTier, source: Source) -> None:
    both = [extent(1, 2), extent(2, 2)]
    async with landing_tier.lent(both) as lent:
        landings = await landings_of(lent)
        assert all(landings)
        for start in (0, UNIT):
            land(landing_tier, both, landings, start, UNIT)
    await settle(landing_tier)
    assert source.reads == []
    assert await use(landing_tier, both) == [True, True]


async def test_what_did_not_land_is_read_behind_the_answer(landing_tier: DramTier, source: Source) -> None:
    """The policy may decide after the first layers were read; others were at hand; a delivery may have broken off."""
    both = [extent(1, 2), extent(2, 2)]
    async with landing_tier.lent(both) as lent:
        landings = await landings_of(lent)
        land(landing_tier, both, [landings[0], 0], UNIT, UNIT)
    await settle(landing_tier)
    assert source.read_bytes == 3 * UNIT
    assert await use(landing_tier, both) == [True, True]


async def test_a_place_that_was_another_extents_has_not_landed(landing_tier: DramTier, source: Source) -> None:
    first, second = extent(1, 4), extent(2, 4)
    for one in (first, second):
        async with landing_tier.lent([one]) as lent:
            landings = await landings_of(lent)
            if one is first:
                land(landing_tier, [one], landings, 0, 4 * UNIT)
        await settle(landing_tier)
    for _ in range(2):
        await use(landing_tier, [second])
        await settle(landing_tier)
    assert source.read_bytes in (4 * UNIT, 8 * UNIT)
    assert await use(landing_tier, [second]) == [True]


async def test_a_delivery_that_ends_before_the_policy_has_decided_is_counted(
    landing_tier: DramTier, source: Source
) -> None:
    async with landing_tier._deciding:
        assert await use(landing_tier, [extent(1)]) == [False]
    await settle(landing_tier)
    assert await use(landing_tier, [extent(1)]) == [True]
    assert source.reads == [extent(1)]
