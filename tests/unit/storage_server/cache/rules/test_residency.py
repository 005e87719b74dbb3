"""The DRAM tier: what comes in, and what gives way."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.rules.residency import Key, Residency, key_of
from storage_server.planning.extent import ALIGNMENT_BYTES, Extent
from storage_server.planning.forms import Encoded, Taken

UNIT = ALIGNMENT_BYTES


def extent(number: int, nbytes: int = UNIT) -> Extent:
    return Extent(f"{number:032x}", 0, nbytes, b"")


def bring_in(residency: Residency, extents: list[Extent]) -> tuple[list[int], list[int]]:
    """Admit and fill; the numbers of those that came, and of those that were refused."""
    coming, refused = residency.admit([key_of(one) for one in extents], {key_of(one): one for one in extents})
    for one, _ in coming:
        residency.filled(one)
    return [int(one.file_id, 16) for one, _ in coming], [int(file_id, 16) for file_id, _ in refused]


def evict(residency: Residency, *extents: Extent) -> None:
    residency.evict([key_of(one) for one in extents])


def test_what_was_admitted_and_filled_can_be_pinned() -> None:
    residency = Residency(4 * UNIT)
    assert bring_in(residency, [extent(1), extent(2)]) == ([1, 2], [])
    assert residency.pin([extent(1), extent(3), extent(2)]) == [0, None, UNIT]
    assert (residency.hit_count, residency.missed_count, residency.resident_count) == (2, 1, 2)


def test_looking_is_no_use() -> None:
    residency = Residency(4 * UNIT)
    bring_in(residency, [extent(1)])
    assert (residency.has(extent(1), None), residency.has(extent(2), None)) == (True, False)
    assert (residency.hit_count, residency.missed_count) == (0, 0)
    one = encoded(UNIT)
    (coming,), _ = residency.admit([key_of(extent(3))], {key_of(extent(3)): extent(3)}, {key_of(extent(3)): UNIT})
    assert not residency.has(extent(3), None)
    residency.filled(coming[0], one)
    assert not residency.has(extent(3), None)
    assert residency.has(extent(3), Taken((Codec.FP8,), Element.FLOAT16))


def test_what_is_still_being_read_in_is_not_there_yet() -> None:
    residency = Residency(4 * UNIT)
    one = extent(1)
    assert residency.admit([key_of(one)], {key_of(one): one}) == ([(one, 0)], [])
    assert residency.admit([key_of(one)], {key_of(one): one}) == ([], [])
    assert residency.pin([one]) == [None]
    residency.dropped(one)
    assert residency.used_bytes == 0


def test_what_finds_no_span_is_refused() -> None:
    """Also where the free space is in pieces."""
    residency = Residency(4 * UNIT)
    assert bring_in(residency, [extent(number) for number in range(5)]) == ([0, 1, 2, 3], [4])
    evict(residency, extent(0), extent(2))
    assert residency.used_bytes == 2 * UNIT
    assert bring_in(residency, [extent(9, 2 * UNIT), extent(8)]) == ([8], [9])


def encoded(nbytes: int) -> Encoded:
    """A form of a chunk of one layer of so many bytes, at least."""
    tokens = next(tokens for tokens in range(1, 1 << 16) if form_bytes(tokens) >= nbytes)
    return Encoded(Codec.FP8, LayerShape(tokens, 16, Element.FLOAT16), 1, 0.1, 0.1)


def form_bytes(tokens: int) -> int:
    return encoded_bytes_max(Codec.FP8, LayerShape(tokens, 16, Element.FLOAT16))


def test_a_form_that_is_larger_than_the_span_is_refused_and_one_as_large_frees_nothing() -> None:
    """Otherwise its end would lie over the next extent."""
    residency = Residency(8 * UNIT)
    first, second = extent(1, 2 * UNIT), extent(2, 2 * UNIT)
    bring_in(residency, [first, second])
    assert not residency.recode(key_of(first), encoded(2 * UNIT + 1))
    assert residency.place(key_of(first)) == (0, None)
    assert residency.recode(key_of(first), encoded(UNIT + 1))
    assert residency.used_bytes == 4 * UNIT
    assert residency.recode(key_of(first), encoded(1))
    assert residency.used_bytes == 3 * UNIT
    evict(residency, first)
    assert bring_in(residency, [extent(3, 2 * UNIT)]) == ([3], [])
    assert residency.place(key_of(extent(3))) == (0, None)


def test_what_is_read_from_goes_afterwards() -> None:
    residency = Residency(2 * UNIT)
    both = [extent(1), extent(2)]
    bring_in(residency, both)
    first, second = residency.pin(both), residency.pin(both)
    evict(residency, *both)
    assert residency.evicted_count == 2
    assert bring_in(residency, [extent(3)]) == ([], [3])
    residency.unpin(both, first)
    assert bring_in(residency, [extent(3)]) == ([], [3])
    residency.unpin(both, second)
    assert bring_in(residency, [extent(3)]) == ([3], [])


def test_what_is_admitted_again_before_it_has_gone_stays() -> None:
    residency = Residency(2 * UNIT)
    bring_in(residency, [extent(1)])
    offsets = residency.pin([extent(1)])
    evict(residency, extent(1))
    assert bring_in(residency, [extent(1)]) == ([], [])
    residency.unpin([extent(1)], offsets)
    assert residency.pin([extent(1)]) == offsets


def test_what_is_evicted_while_it_is_read_in_goes_when_it_has_come() -> None:
    residency = Residency(2 * UNIT)
    one = extent(1)
    residency.admit([key_of(one)], {key_of(one): one})
    evict(residency, one)
    assert residency.used_bytes == UNIT
    residency.filled(one)
    assert residency.used_bytes == 0
    evict(residency, one)
    assert residency.evicted_count == 1


class ResidencyMachine(RuleBasedStateMachine):
    """Whatever comes, goes and is read: spans never overlap, what is read stays where it is, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(16 * UNIT)
        self.coming: dict[Key, tuple[Extent, int]] = {}
        self.pinned: list[tuple[Extent, int]] = []
        self.places: dict[Key, tuple[int, int]] = {}

    @rule(number=st.integers(0, 9), units=st.integers(1, 5))
    def admit(self, number: int, units: int) -> None:
        one = extent(number * 8 + units, units * UNIT)
        key = key_of(one)
        coming, refused = self.residency.admit([key], {key: one})
        assert not (coming and refused)
        for come, offset in coming:
            self.coming[key] = come, offset
            self.places[key] = offset, come.nbytes

    @rule(index=st.integers(0, 100), is_good=st.booleans())
    def come(self, index: int, is_good: bool) -> None:
        if self.coming:
            one, _ = self.coming.pop(sorted(self.coming)[index % len(self.coming)])
            (self.residency.filled if is_good else self.residency.dropped)(one)

    @rule(number=st.integers(0, 9), units=st.integers(1, 5))
    def pin(self, number: int, units: int) -> None:
        one = extent(number * 8 + units, units * UNIT)
        (offset,) = self.residency.pin([one])
        if offset is not None:
            assert offset == self.places[key_of(one)][0]
            self.pinned.append((one, offset))

    @rule(index=st.integers(0, 100))
    def unpin(self, index: int) -> None:
        if self.pinned:
            one, offset = self.pinned.pop(index % len(self.pinned))
            self.residency.unpin([one], [offset])

    @rule(number=st.integers(0, 9), units=st.integers(1, 5))
    def evict(self, number: int, units: int) -> None:
        evict(self.residency, extent(number * 8 + units, units * UNIT))

    @invariant()
    def nothing_overlaps_or_is_lost(self) -> None:
        there = {key: self.places[key] for key in self.residency._resident}
        assert {key_of(one) for one, _ in self.pinned} | self.coming.keys() <= there.keys()
        spans = sorted(there.values())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert self.residency.used_bytes == sum(n for _, n in spans)
        filled = [each for each in self.residency._resident.values() if each.is_filled]
        assert self.residency.resident_count == sum(self.residency.form_counts.values()) == len(filled)

    @rule(units=st.integers(1, 9), moved_units=st.integers(0, 20))
    def slide(self, units: int, moved_units: int) -> None:
        """Each move goes down, over bytes that nobody else has at that moment."""
        for before, after, nbytes in self.residency.slide(units * UNIT, moved_units * UNIT):
            (key,) = [key for key, place in self.places.items() if place == (before, nbytes) and self._is_there(key)]
            assert after < before
            others = [place for other, place in self.places.items() if other != key and self._is_there(other)]
            assert all(after + nbytes <= start or start + length <= after for start, length in others)
            assert all(one != key for one, _ in ((key_of(one), at) for one, at in self.pinned))
            assert key not in self.coming
            self.places[key] = after, nbytes

    def _is_there(self, key: Key) -> bool:
        return self.residency.holds(key)


TestResidency = ResidencyMachine.TestCase


def test_extents_slide_together_until_there_is_room() -> None:
    """Holes between extents become one span; an extent that is read stays, and so do the ones before it."""
    residency = Residency(10 * UNIT)
    extents = {key_of(each): each for each in (extent(number, 2 * UNIT) for number in range(5))}
    coming, _ = residency.admit(extents, extents)
    for each, _ in coming:
        residency.filled(each)
    keys = list(extents)
    residency.evict([keys[0], keys[2]])
    assert residency.admit([("new", 0)], {("new", 0): Extent("new", 0, 4 * UNIT, b"")})[1] == [("new", 0)]
    moves = residency.slide(4 * UNIT, 100 * UNIT)
    assert moves
    assert all(after < before for before, after, _ in moves)
    pinned = residency.pin([extents[keys[1]], extents[keys[3]], extents[keys[4]]])
    assert None not in pinned
    taken, refused = residency.admit([("new", 0)], {("new", 0): Extent("new", 0, 4 * UNIT, b"")})
    assert not refused
    spans = sorted([(offset, 2 * UNIT) for offset in pinned if offset is not None] + [(taken[0][1], 4 * UNIT)])
    assert all(start + length <= after for (start, length), (after, _) in pairwise(spans))
    assert residency.slide(8 * UNIT, 100 * UNIT) == [], "nothing that is read moves, and there is no such room"


def test_an_extent_that_is_too_large_to_move_keeps_no_others_from_it() -> None:
    residency = Residency(16 * UNIT)
    sizes = {0: 2, 1: 6, 2: 2, 3: 2, 4: 4}
    bring_in(residency, [extent(number, units * UNIT) for number, units in sizes.items()])
    evict(residency, extent(0, 2 * UNIT), extent(2, 2 * UNIT))
    moved = [move for _ in range(3) for move in residency.slide(4 * UNIT, 3 * UNIT)]
    assert moved == [(10 * UNIT, 8 * UNIT, 2 * UNIT)], "the first gap is before an extent of six units"
