"""Pins against a model that counts readers: bytes go once, when nobody reads them and no index names them."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage_server.kernel.rules.pins import Freed, Location, PinLedger
from storage_server.planning.extent import ALIGNMENT_BYTES, Extent

FILES = ("a", "b", "c")
OFFSETS = (0, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES)
files = st.sampled_from(FILES)
some_files = st.lists(files, min_size=1, max_size=3, unique=True)
locations = st.lists(st.tuples(files, st.sampled_from(OFFSETS)), min_size=1, max_size=4, unique=True)


class Pins(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = PinLedger()
        self.ledger.load(FILES)
        self.live = set(FILES)
        self.whole: list[list[str]] = []
        self.parts: list[list[Location]] = []
        self.deleted: set[str] = set()
        self.unnamed: set[Location] = set()
        """Locations that the index names no more."""
        self.given_back: Counter[Location] = Counter()

    def readers_of(self, file_id: str, offset: int | None = None) -> int:
        whole = sum(file_id in each for each in self.whole)
        return whole + sum(any(name == file_id and offset in (None, at) for name, at in each) for each in self.parts)

    def note(self, freed: Freed) -> None:
        for file_id in freed.files:
            assert file_id not in self.live
            assert file_id not in self.deleted, "a file goes once"
            assert not self.readers_of(file_id)
            self.deleted.add(file_id)
        for file_id, offset, _ in freed.holes:
            assert not self.readers_of(file_id, offset)
            assert (file_id, offset) in self.unnamed
            self.given_back[file_id, offset] += 1

    @rule(wanted=some_files)
    def pin(self, wanted: list[str]) -> None:
        assert self.ledger.pin(wanted) == (set(wanted) <= self.live)
        if set(wanted) <= self.live:
            self.whole.append(wanted)

    @rule(wanted=locations)
    def pin_locations(self, wanted: list[Location]) -> None:
        may = {file_id for file_id, _ in wanted} <= self.live
        assert self.ledger.pin_locations(wanted) == may
        if may:
            self.parts.append(wanted)

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        ended = self.whole.pop(data.draw(st.integers(0, len(self.whole) - 1)))
        self.note(self.ledger.unpin(ended))

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def unpin_locations(self, data: st.DataObject) -> None:
        ended = self.parts.pop(data.draw(st.integers(0, len(self.parts) - 1)))
        self.note(self.ledger.unpin_locations(ended))

    @rule(gone=locations)
    def punch(self, gone: list[Location]) -> None:
        new = [location for location in gone if location not in self.unnamed]
        before = self.ledger.punch_count
        free, waiting = self.ledger.punch([(file_id, offset, ALIGNMENT_BYTES) for file_id, offset in new])
        expected = {location for location in new if location[0] in self.live}
        assert {(file_id, offset) for file_id, offset, _ in (*free, *waiting)} == expected
        self.unnamed |= expected
        self.note(Freed([], free))
        assert all(self.readers_of(file_id, offset) for file_id, offset, _ in waiting)
        assert self.ledger.is_punched([(file_id, offset) for file_id, offset, _ in free], before) == bool(free)

    @rule(file_id=files)
    def dispose(self, file_id: str) -> None:
        if file_id not in self.live:
            return
        self.live.discard(file_id)
        may_go = self.ledger.dispose(file_id)
        assert may_go == (not self.readers_of(file_id))
        if may_go:
            self.note(Freed([file_id], []))

    @invariant()
    def readers_withhold_what_they_read_and_nothing_else(self) -> None:
        assert self.ledger.pinned_count == sum(self.readers_of(file_id) > 0 for file_id in FILES)
        assert all(count == 1 for count in self.given_back.values()), "a location is given back once"
        withheld = 0
        for file_id in FILES:
            for offset in OFFSETS:
                is_doomed = file_id not in self.live and file_id not in self.deleted
                waits = (file_id, offset) in self.unnamed and not self.given_back[file_id, offset]
                withheld += is_doomed or (waits and file_id not in self.deleted)
        extents = [Extent(file_id, offset, ALIGNMENT_BYTES, b"") for file_id in FILES for offset in OFFSETS]
        assert self.ledger.withheld_bytes(extents) == withheld * ALIGNMENT_BYTES
        assert bool(withheld) <= self.ledger.withholds

    def teardown(self) -> None:
        while self.whole:
            self.note(self.ledger.unpin(self.whole.pop()))
        while self.parts:
            self.note(self.ledger.unpin_locations(self.parts.pop()))
        assert not self.ledger.withholds
        assert self.deleted == set(FILES) - self.live


TestPins = Pins.TestCase
