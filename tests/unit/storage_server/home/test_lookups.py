"""Lookups of chunks that are upstream or in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from objectcache.adapters.caller import CALLER
from storage_server.home import chunks as home_chunks
from storage_server.home import home_lookups
from storage_server.home.chunks import KNOWN_S, UpstreamChunks
from storage_server.home.home_lookups import CUT_OFF_S
from storage_server.home.rules.known_keys import FORGOTTEN_MAX, KnownKeys
from storage_server.planning.extent import Extent
from tests.support.waiting import until

KEYS = [f"{number:064x}" for number in range(4)]


class Prefetched:
    """Fetches that only note what is to come."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def prefetch(self, bucket: str, keys: Sequence[str], wait_s: float) -> None:
        self.keys += keys


async def test_a_leased_chunk_that_is_just_leaving_the_cache_comes_again() -> None:
    """It was chosen to leave before the lease was given, and its lease waits for it."""

    async def resolve(bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        yield [[Extent("file", 0, 1, bytes(4), 0)] for _ in keys]

    cache: Any = SimpleNamespace(
        objects=SimpleNamespace(prefixes=SimpleNamespace(resolve=resolve)),
        evictor=SimpleNamespace(before_lookup=lambda: 7, note_lookup=lambda bucket, keys, matched, since, lease_s: 2),
    )
    nothing: Any = None
    fetches: Any = Prefetched()
    chunks = UpstreamChunks(nothing, cache, fetches, nothing)
    assert await chunks.matched("bucket", KEYS, 60.0) == 4
    assert fetches.keys == KEYS[2:]
    assert await chunks.matched("bucket", KEYS) == 4
    assert fetches.keys == KEYS[2:]


class Home:
    """A home with the first `stored` of KEYS, which may stop answering."""

    def __init__(self, stored: int) -> None:
        self.stored = stored
        self.asked = 0
        self.fault: Exception | None = None
        self.hangs = False

    async def has_object(self, bucket: str, key: str, since_s: float) -> bool:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.fault is not None:
            raise self.fault
        return KEYS.index(key) < self.stored

    async def require_bucket(self, bucket: str) -> None:
        await self.has_object(bucket, KEYS[-1], 0.0)


def cached_before(home: Home, cached: int) -> UpstreamChunks:
    """The chunks of a home, with the first `cached` of KEYS in the cache."""

    async def resolve(bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        yield [[Extent("file", 0, 1, bytes(4), 0)] if KEYS.index(key) < cached else None for key in keys]

    cache: Any = SimpleNamespace(
        objects=SimpleNamespace(prefixes=SimpleNamespace(resolve=resolve)),
        evictor=SimpleNamespace(
            before_lookup=lambda: 7, note_lookup=lambda bucket, keys, matched, since, lease_s: matched
        ),
    )
    there: Any = home
    fetches: Any = Prefetched()
    forget: Any = None
    return UpstreamChunks(there, cache, fetches, forget)


@pytest.mark.parametrize("cached", [0, 2])
async def test_a_lookup_counts_what_is_cached_while_the_home_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    """And the home is left alone for a while."""
    now_s = 100.0
    monkeypatch.setattr(home_lookups, "time", SimpleNamespace(monotonic=lambda: now_s))
    home = Home(3)
    chunks = cached_before(home, cached)
    home.fault = ServerError(ErrorCode.SLOW_DOWN, "it is down", retryable=True)
    assert await chunks.matched("bucket", KEYS) == cached
    assert chunks.is_cut_off("bucket")
    asked = home.asked
    assert await chunks.matched("bucket", KEYS) == cached
    assert home.asked == asked
    home.fault = None
    now_s += CUT_OFF_S
    assert not chunks.is_cut_off("bucket")
    assert await chunks.matched("bucket", KEYS) == 3
    assert not chunks.is_cut_off("bucket")


async def test_the_home_is_asked_for_another_caller_and_in_another_bucket() -> None:
    """One tenant's bucket may be one that the home is too busy for, and its prefix may take too many requests."""
    home = Home(3)
    chunks = cached_before(home, 2)
    home.fault = ServerError(ErrorCode.SLOW_DOWN, "too many requests for this bucket", retryable=True)
    CALLER.set("first")
    assert await chunks.matched("bucket", KEYS) == 2
    assert chunks.is_cut_off("bucket")
    home.fault = None
    assert await chunks.matched("bucket", KEYS) == 2
    assert not chunks.is_cut_off("other")
    assert await chunks.matched("other", KEYS) == 3
    CALLER.set("second")
    assert not chunks.is_cut_off("bucket")
    assert await chunks.matched("bucket", KEYS) == 3


async def test_a_home_that_hangs_holds_a_lookup_up_for_a_short_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_lookups, "HOME_ANSWERS_S", 0.01)
    home = Home(3)
    home.hangs = True
    chunks = cached_before(home, 2)
    assert await chunks.matched("bucket", KEYS) == 2
    assert chunks.is_cut_off("bucket")


async def test_a_refusal_of_the_home_is_the_answer() -> None:
    home = Home(3)
    home.fault = CallerError(ErrorCode.ACCESS_DENIED, "not yours")
    with pytest.raises(CallerError, match="not yours"):
        await cached_before(home, 2).matched("bucket", KEYS)


def single_lookups(home: Home, cached: int, leaving: Sequence[int] = ()) -> UpstreamChunks:
    chunks = cached_before(home, cached)
    cache: Any = chunks._cache
    cache.evictor.note_present = lambda bucket, keys, since, lease_s: leaving
    return chunks


async def test_each_chunk_that_is_not_cached_is_asked_for_at_home_once() -> None:
    home = Home(3)
    chunks = single_lookups(home, 2)
    asked = [KEYS[3], KEYS[0], KEYS[2]]
    assert await chunks.present("bucket", asked) == ((False, True, True), True)
    assert home.asked == 2
    assert await chunks.present("bucket", [KEYS[2]]) == ((True,), True)  # it was found a moment ago
    assert home.asked == 2


Ask = Callable[[UpstreamChunks], Awaitable[int]]


async def asked_as_prefix(chunks: UpstreamChunks) -> int:
    return await chunks.matched("bucket", KEYS)


async def asked_each(chunks: UpstreamChunks) -> int:
    present, _ = await chunks.present("bucket", KEYS)
    return sum(present)


each_lookup = pytest.mark.parametrize("ask", [asked_as_prefix, asked_each])


@each_lookup
async def test_a_chunk_that_is_looked_up_all_the_time_is_asked_for_again(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups would tell of a chunk that others have deleted for as long as anybody asks."""
    now_s = 100.0
    monkeypatch.setattr(home_chunks, "time", SimpleNamespace(monotonic=lambda: now_s))
    home = Home(4)
    chunks = single_lookups(home, 0)
    assert await ask(chunks) == 4
    home.stored = 0
    now_s += KNOWN_S - 1
    assert await ask(chunks) == 4
    now_s += 1
    assert await ask(chunks) == 0


@each_lookup
async def test_an_answer_does_not_bring_a_chunk_back_that_was_forgotten_meanwhile(ask: Ask) -> None:
    """A client has deleted it while the answer was on its way."""
    home, has_object = Home(4), Home(4).has_object
    chunks = single_lookups(home, 0)

    async def deleted(bucket: str, key: str, since_s: float) -> bool:
        chunks.forget_known("bucket", KEYS)
        return await has_object(bucket, key, since_s)

    home.has_object = deleted  # type: ignore[method-assign]
    assert await ask(chunks) == 4
    home.has_object = Home(0).has_object  # type: ignore[method-assign]
    assert await ask(chunks) == 0


def test_keys_that_were_forgotten_long_ago_stay_forgotten() -> None:
    """Where more are forgotten than there is memory for, older answers are passed over for all keys."""
    known = KnownKeys(KNOWN_S)
    known.forget("bucket", ["first"], 2.0)
    known.forget("bucket", list(map(str, range(FORGOTTEN_MAX))), 3.0)
    known.add("bucket", ["first", "other"], 1.0)
    assert not known.has("bucket", "first", 4.0)
    assert not known.has("bucket", "other", 4.0)
    known.add("bucket", ["first"], 2.5)
    assert known.has("bucket", "first", 4.0)


async def test_a_leased_chunk_that_is_not_in_the_cache_begins_to_come() -> None:
    chunks = single_lookups(Home(4), 2, leaving=[1])
    fetches: Any = chunks._fetches
    assert await chunks.present("bucket", KEYS, 60.0) == ((True,) * 4, True)
    assert sorted(fetches.keys) == sorted(KEYS[1:])


async def test_a_lease_is_also_of_chunks_that_are_not_in_the_cache_yet() -> None:
    """As a prefix's lease is: each is kept from the moment when it comes."""
    chunks, leased = single_lookups(Home(3), 2), list[str]()
    cache: Any = chunks._cache

    def note_present(bucket: str, keys: Sequence[str], since: int, lease_s: float) -> Sequence[int]:
        leased.extend(keys)
        return ()

    cache.evictor.note_present = note_present
    await chunks.present("bucket", KEYS, 60.0)
    assert leased == KEYS[:3]


async def test_single_lookups_count_what_is_cached_while_the_home_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(home_lookups, "HOME_ANSWERS_S", 0.01)
    home = Home(4)
    home.hangs = True
    chunks = single_lookups(home, 2)
    assert await chunks.present("bucket", KEYS) == ((True, True, False, False), False)
    assert chunks.is_cut_off("bucket")
    asked = home.asked
    assert await chunks.present("bucket", KEYS) == ((True, True, False, False), False)
    assert home.asked == asked


async def test_one_lookup_asks_the_home_about_so_many_chunks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_lookups, "ASKED_MAX", 1)
    home = Home(4)
    assert await single_lookups(home, 2).present("bucket", KEYS) == ((True, True, True, False), False)
    assert home.asked == 1


async def test_one_callers_lookups_of_single_keys_keep_nobody_from_the_home() -> None:
    """Each one asks for many keys: a flood of them would fill the connections, and make the home look silent."""
    home, under_way, most, go_on = Home(4), 0, 0, asyncio.Event()
    has_object = home.has_object

    async def held(bucket: str, key: str, since_s: float) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            if bucket == "flood":
                await go_on.wait()
            return await has_object(bucket, key, since_s)
        finally:
            under_way -= 1

    home.has_object = held  # type: ignore[method-assign]
    chunks = single_lookups(home, 0)

    async def ask(caller: str, bucket: str) -> tuple[tuple[bool, ...], bool]:
        CALLER.set(caller)
        return await chunks.present(bucket, KEYS)

    flood = [asyncio.create_task(ask("a", "flood")) for _ in range(50)]
    await until(lambda: under_way == home_lookups.LOOKUPS_EACH_MAX * len(KEYS))
    assert await asyncio.create_task(ask("b", "bucket")) == ((True,) * 4, True)
    assert most <= home_lookups.LOOKUPS_MAX * len(KEYS)
    assert not chunks.is_cut_off("bucket")
    for task in flood:
        task.cancel()
    await asyncio.wait(flood)
    assert under_way == 0
