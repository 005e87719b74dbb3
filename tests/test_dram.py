"""The DRAM tier: what comes in, what gives way, and that its bytes are the stored ones."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from storage_server.store.extents import Extent
from storage_server.tiers.residency import ALIGNMENT_BYTES, FreeSpace, Residency, key_of
from tests.support import LAYOUT, LocalStack, N, eventually, make_chunks

UNIT = ALIGNMENT_BYTES


def extent(number: int, nbytes: int = UNIT) -> Extent:
    return Extent(f"{number:032x}", 0, nbytes, b"")


class FreeSpaceMachine(RuleBasedStateMachine):
    """Whatever is taken and given back, taken spans never overlap and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeSpace(100)
        self.taken: list[tuple[int, int]] = []

    @rule(nbytes=st.integers(1, 40))
    def take(self, nbytes: int) -> None:
        offset = self.free.take(nbytes)
        if offset is not None:
            self.taken.append((offset, nbytes))
        else:
            assert self.free.nbytes < 100

    @rule(index=st.integers(0, 100))
    def give_back(self, index: int) -> None:
        if self.taken:
            self.free.give_back(*self.taken.pop(index % len(self.taken)))

    @invariant()
    def nothing_overlaps_or_is_lost(self) -> None:
        spans = sorted(self.taken)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert self.free.nbytes + sum(n for _, n in spans) == 100
        if not self.taken:
            assert self.free.take(100) == 0
            self.free.give_back(0, 100)


TestFreeSpace = FreeSpaceMachine.TestCase


def bring_in(residency: Residency, extents: list[Extent], now_s: float) -> list[int]:
    """Ask for what is not there, and fill whatever may come; the numbers of those."""
    offsets = residency.pin(extents, now_s)
    missing = [one for one, offset in zip(extents, offsets, strict=True) if offset is None]
    residency.unpin(extents, offsets)
    coming = residency.ask(missing, now_s)
    for one, _ in coming:
        residency.filled(one)
    return [int(one.file_id, 16) for one, _ in coming]


def test_the_second_ask_brings_an_extent_in() -> None:
    residency = Residency(4 * UNIT, 100)
    assert bring_in(residency, [extent(1)], 1.0) == []
    assert bring_in(residency, [extent(1), extent(2)], 2.0) == [1]
    assert residency.pin([extent(1), extent(2)], 3.0) == [0, None]


def test_a_prefix_larger_than_the_memory_keeps_its_start() -> None:
    """Going round and round a prefix of six in room for four: the first four come in and stay."""
    residency = Residency(4 * UNIT, 100)
    prefix = [extent(number) for number in range(6)]
    came = [bring_in(residency, prefix, float(turn)) for turn in range(1, 6)]
    assert came == [[], [0, 1, 2, 3], [], [], []]


def test_what_is_no_longer_used_gives_way_to_what_is() -> None:
    residency = Residency(2 * UNIT, 100)
    for now_s in (1.0, 2.0):
        bring_in(residency, [extent(1), extent(2)], now_s)
    assert bring_in(residency, [extent(3)], 3.0) == []
    assert bring_in(residency, [extent(3)], 4.0) == [3]
    assert residency.resident_count == 2


def test_what_is_read_from_never_gives_way() -> None:
    residency = Residency(2 * UNIT, 100)
    for now_s in (1.0, 2.0):
        bring_in(residency, [extent(1), extent(2)], now_s)
    both = [extent(1), extent(2)]
    offsets = residency.pin(both, 3.0)
    assert bring_in(residency, [extent(3)], 4.0) == []
    assert bring_in(residency, [extent(3)], 5.0) == []
    residency.unpin(both, offsets)
    assert bring_in(residency, [extent(3)], 6.0) == [3]


def test_what_is_still_being_read_in_is_not_there_yet() -> None:
    residency = Residency(4 * UNIT, 100)
    residency.ask([extent(1)], 1.0)
    ((coming, _),) = residency.ask([extent(1)], 2.0)
    assert residency.ask([extent(1)], 3.0) == []
    assert residency.pin([extent(1)], 3.0) == [None]
    residency.dropped(coming)
    assert residency.free_bytes == 4 * UNIT


def test_asks_are_remembered_up_to_a_bound() -> None:
    residency = Residency(4 * UNIT, 2)
    residency.ask([extent(1), extent(2), extent(3)], 1.0)
    assert [one for one, _ in residency.ask([extent(1)], 2.0)] == []
    assert [one for one, _ in residency.ask([extent(3)], 2.0)] == [extent(3)]


@given(asks=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=60), units=st.integers(1, 8))
def test_memory_is_never_promised_twice(asks: list[tuple[int, int]], units: int) -> None:
    residency = Residency(units * UNIT, 100)
    places: dict[tuple[str, int], tuple[int, int]] = {}
    for now_s, (number, size) in enumerate(asks):
        one = dataclasses.replace(extent(number * 4 + size), nbytes=size * UNIT)
        (offset,) = residency.pin([one], float(now_s))
        residency.unpin([one], [offset])
        for come, place in residency.ask([] if offset is not None else [one], float(now_s)):
            residency.filled(come)
            places[key_of(come)] = (place, come.nbytes)
        there = {key: place for key, place in places.items() if key in residency._resident}
        spans = sorted(there.values())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert residency.free_bytes == units * UNIT - sum(n for _, n in spans)


def test_deliveries_from_memory_are_the_stored_bytes(local: LocalStack, keys: list[str], transport: str) -> None:
    """The third fetch reads no file, and what was overwritten meanwhile is not served from memory."""
    chunks = make_chunks(N, LAYOUT)[1]
    _, newer = make_chunks(N, LAYOUT, seed=7)
    with local.client("chunks", transport) as client:
        buffer = client.allocate_buffer(LAYOUT.payload_bytes(N))

        def fetched() -> bytes:
            buffer[:] = 0
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
            return buffer.tobytes()

        for _ in range(2):
            assert fetched() == chunks.tobytes()
        assert eventually(lambda: local.storage.dram.resident_count == N)
        read = local.storage.store.files.lent
        local.storage.store.files.lent = None  # type: ignore[assignment,method-assign]
        assert fetched() == chunks.tobytes()
        local.storage.store.files.lent = read  # type: ignore[method-assign]
        client.put_chunks(keys[:3], list(newer[:3]))
        assert fetched() == np.concatenate([newer[:3], chunks[3:]]).tobytes()
        assert eventually(lambda: local.storage.store.files.pinned_count == 0)


def test_damaged_bytes_do_not_come_in(local: LocalStack, keys: list[str]) -> None:
    """They are proved on the way; the rest of the prefix does."""
    with local.client("chunks", "shm") as client:
        buffer = client.allocate_buffer(LAYOUT.payload_bytes(N))
        client.fetch(keys, LAYOUT, buffer).wait(30)
        local.damage("chunks", keys[4], 50_000)
        with pytest.raises(ObjectCacheError):
            client.fetch(keys, LAYOUT, buffer).wait(30)
        assert eventually(lambda: local.storage.dram.resident_count == N - 1)
        with pytest.raises(ObjectCacheError):
            client.fetch(keys, LAYOUT, buffer).wait(30)
