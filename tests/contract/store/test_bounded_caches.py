"""One contract, every ledger of a bounded set of chunks: the books of a bucket on disk, under each order, and the
keepers of memory, of which one encodes. Remote DRAM has no ledger of ours: its contract is test_further_tiers.py.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache import encoding_keeper, exact_keeper
from storage_server.cache.encoding_keeper import EncodingKeeper
from storage_server.cache.exact_keeper import ExactKeeper
from storage_server.cache.keeping import Keeper, TierMemory
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.cache.rules.books import Books
from storage_server.cache.rules.entry import Entry
from storage_server.cache.rules.residency import Residency
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Reading
from tests.unit.storage_server.cache.policies.streams import paths

READING = Reading(LayerShape(32, 256, Element.BFLOAT16), 1, (Codec.KIVI8, Codec.KIVI4))
CHUNK_BYTES = READING.exact_bytes
BUCKET = "cached"
VALUES = np.random.default_rng(3).standard_normal(CHUNK_BYTES // 2).astype(np.float32)


class Bounded(ABC):
    """A ledger with room for `capacity_bytes`, and what it rules over. A chunk is named by the way to it, so that its
    parent's name is its own without the last letter.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def booked_bytes(self) -> int:
        """The bytes that the ledger counts."""

    @property
    @abstractmethod
    def real_bytes(self) -> int:
        """Those of the chunks that are there."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether the chunk is there."""

    @abstractmethod
    async def use(self, keys: Sequence[str], now: float) -> None:
        """Somebody reads these chunks, and puts those that are not there; what leaves by that has left afterwards."""

    @abstractmethod
    def hold(self, key: str) -> None:
        """Keep a chunk that is there."""

    @abstractmethod
    def release(self, key: str) -> None:
        """Undo `hold`."""

    @abstractmethod
    async def remove(self, key: str) -> None:
        """The chunk is gone, for a reason of its own."""

    def close(self) -> None:  # noqa: B027 - books have none
        """End the threads."""


class Bucket(Bounded):
    """The books of a bucket on disk."""

    def __init__(self, capacity_bytes: int, eviction: Eviction) -> None:
        super().__init__(capacity_bytes)
        self._books = Books(policy_of(eviction, capacity_bytes))
        self._there: dict[str, Entry] = {}

    @property
    def booked_bytes(self) -> int:
        return self._books.used_bytes

    @property
    def real_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._there.values())

    def has(self, key: str) -> bool:
        return key in self._there

    async def use(self, keys: Sequence[str], now: float) -> None:
        self._books.use(BUCKET, keys, now)
        for number, key in enumerate(keys):
            if key not in self._there:
                entry = self._there[key] = Entry(1, CHUNK_BYTES, now, now, parent=keys[number - 1] if number else None)
                self._books.put((BUCKET, key), entry)
        for victim in self._books.leaving(self.capacity_bytes, now):
            del self._there[victim.key]

    def hold(self, key: str) -> None:
        self._put(key, self._there[key]._replace(pinned_until=math.inf))

    def release(self, key: str) -> None:
        self._put(key, self._there[key])

    def _put(self, key: str, entry: Entry) -> None:
        self._books.put((BUCKET, key), entry)

    async def remove(self, key: str) -> None:
        self._books.remove((BUCKET, key))
        self._there.pop(key, None)


class Source:
    """A ChunkSource whose chunks have the same bytes."""

    generation = 0

    def read_extent(self, one: Extent, view: memoryview, start: int = 0) -> None:
        out = np.empty(CHUNK_BYTES, dtype=np.uint8)
        from_floats(VALUES, Element.BFLOAT16, out)
        view[:] = out[start : start + len(view)].data


def extent(key: str) -> Extent:
    return Extent(key, 0, CHUNK_BYTES, b"")


class Clock:
    """The time for the keepers, which have threads: tests.unit.played_time waits for none."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


CLOCK = Clock()


@pytest.fixture(autouse=True, scope="module")
def _played_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module in (exact_keeper, encoding_keeper):
            patched.setattr(module, "time", CLOCK)
        yield


class Memory(Bounded):
    """A keeper, and the memory that it decides about."""

    def __init__(self, capacity_bytes: int, keep: Callable[[TierMemory], Keeper], reading: Reading | None) -> None:
        super().__init__(capacity_bytes)
        self._reading = reading
        self._residency = Residency(capacity_bytes)
        self._books = ThreadPoolExecutor(1)
        source: Any = Source()
        view = memoryview(bytearray(capacity_bytes))
        self._keeper = keep(TierMemory(view, self._residency, source, self._books))
        self._held: dict[str, list[int | None]] = {}

    @property
    def booked_bytes(self) -> int:
        return self._keeper.decided_bytes

    @property
    def real_bytes(self) -> int:
        return self._residency.used_bytes

    def has(self, key: str) -> bool:
        return self._residency.has(extent(key), self._reading)

    async def use(self, keys: Sequence[str], now: float) -> None:
        CLOCK.now_s = now
        coming = await self._keeper.decide({(key, 0): extent(key) for key in keys}, self._reading)
        for one, offset in coming:
            assert self._keeper.read(one, offset, [(0, one.nbytes)])
            self._residency.filled(one, self._keeper.form_of_copy(one, offset))

    def hold(self, key: str) -> None:
        self._held[key] = self._residency.pin([extent(key)], self._reading)

    def release(self, key: str) -> None:
        self._residency.unpin([extent(key)], self._held.pop(key))

    async def remove(self, key: str) -> None:
        self._residency.evict([(key, 0)])
        await self._keeper.forget([(key, 0)])

    def close(self) -> None:
        self._keeper.stop()
        self._books.shutdown()
        self._keeper.close()


FIGURES = {Codec.KIVI8: CodecFigures(1.0, 1e12), Codec.KIVI4: CodecFigures(0.99, 1e12)}
UTILITY = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)
LEDGERS: dict[str, Callable[[int], Bounded]] = {
    **{f"disk-{eviction.value}": partial(Bucket, eviction=eviction) for eviction in Eviction},
    **{
        f"memory-{eviction.value}": partial(Memory, keep=partial(ExactKeeper, eviction=eviction), reading=None)
        for eviction in Eviction
    },
    "memory-encoding": partial(Memory, keep=partial(EncodingKeeper, settings=UTILITY), reading=READING),
}
every_ledger = pytest.mark.parametrize("made", LEDGERS.values(), ids=LEDGERS)


def check(ledger: Bounded, names: set[str], held: set[str]) -> set[str]:
    """The chunks that are there, when nothing is under way."""
    there = {name for name in names if ledger.has(name)}
    assert ledger.real_bytes <= ledger.capacity_bytes
    assert ledger.booked_bytes <= ledger.capacity_bytes
    assert bool(there) is bool(ledger.real_bytes)
    assert held <= there, "what somebody holds has left"
    if not held:
        assert ledger.booked_bytes == ledger.real_bytes
    return there


def check_order(before: set[str], there: set[str]) -> None:
    """Where nothing was held: what is held stays without its parent, and leaves behind others when it is let go."""
    assert not (before - there) & {name[:-1] for name in before & there}, "a chunk has left before its children"


@every_ledger
@settings(max_examples=12)
@given(uses=st.lists(paths(), min_size=1, max_size=12), room=st.integers(0, 8))
def test_what_is_booked_is_there_within_its_room_and_children_leave_first(
    made: Callable[[int], Bounded], uses: list[tuple[str, ...]], room: int
) -> None:
    async def play() -> None:
        ledger = made(room * CHUNK_BYTES)
        names, there = set[str](), set[str]()
        try:
            for now, keys in enumerate(uses):
                await ledger.use(keys, float(now))
                names |= set(keys)
                before, there = there, check(ledger, names, set())
                check_order(before, there)
            for key in sorted(names, key=len, reverse=True):
                await ledger.remove(key)
            assert (ledger.booked_bytes, ledger.real_bytes) == (0, 0)
        finally:
            ledger.close()

    asyncio.run(play())


@every_ledger
@settings(max_examples=12)
@given(uses=st.lists(st.tuples(paths(), st.booleans(), st.booleans()), min_size=1, max_size=12), room=st.integers(2, 8))
def test_what_is_held_stays_and_takes_no_more_than_there_is(
    made: Callable[[int], Bounded], uses: list[tuple[tuple[str, ...], bool, bool]], room: int
) -> None:
    """Half of the room is held at most, as the server sees to."""

    async def play() -> None:
        ledger = made(room * CHUNK_BYTES)
        names, held = set[str](), list[str]()
        try:
            for now, (keys, is_held, is_let_go) in enumerate(uses):
                await ledger.use(keys, float(now))
                names |= set(keys)
                mine = check(ledger, names, set(held)) & set(keys) - set(held)
                for key in sorted(mine) if is_held and len(held) + len(mine) <= room // 2 else []:
                    ledger.hold(key)
                    held.append(key)
                if held and is_let_go:
                    ledger.release(held.pop(0))
                check(ledger, names, set(held))
            for key in held:
                ledger.release(key)
            for key in names:
                await ledger.remove(key)
            assert (ledger.booked_bytes, ledger.real_bytes) == (0, 0)
        finally:
            ledger.close()

    asyncio.run(play())


@every_ledger
async def test_what_everybody_reads_outlives_what_came_once(made: Callable[[int], Bounded]) -> None:
    ledger = made(4 * CHUNK_BYTES)
    try:
        for now in range(12):
            await ledger.use(["a", "ab"], float(now))
        for now in range(12, 30):
            await ledger.use([chr(ord("c") + now)], float(now))
            await ledger.use(["a", "ab"], float(now) + 0.5)
            assert ledger.has("a")
            assert ledger.has("ab")
        assert ledger.real_bytes <= ledger.capacity_bytes
    finally:
        ledger.close()


@every_ledger
async def test_a_chunk_that_has_no_room_is_not_there_and_takes_none(made: Callable[[int], Bounded]) -> None:
    ledger = made(0)
    try:
        await ledger.use(["a", "ab"], 1.0)
        assert not ledger.has("a")
        assert (ledger.booked_bytes, ledger.real_bytes) == (0, 0)
    finally:
        ledger.close()
