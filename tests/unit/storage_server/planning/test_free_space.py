"""Free parts of memory."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage_server.planning.free_space import FreeSpace

TOTAL = 100


class FreeSpaceMachine(RuleBasedStateMachine):
    """Whatever is taken and given back, taken spans never overlap, and nothing is lost or refused for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeSpace(TOTAL)
        self.taken: list[tuple[int, int]] = []

    def free_lengths(self) -> list[int]:
        """The lengths of the parts that nobody has taken."""
        ends = [0, *(offset + nbytes for offset, nbytes in sorted(self.taken))]
        starts = [*(offset for offset, _ in sorted(self.taken)), TOTAL]
        return [start - end for start, end in zip(starts, ends, strict=True)]

    @rule(nbytes=st.integers(1, 40))
    def take(self, nbytes: int) -> None:
        lengths = self.free_lengths()
        offset = self.free.take(nbytes)
        assert (offset is not None) is (max(lengths) >= nbytes)
        if offset is not None:
            self.taken.append((offset, nbytes))

    @rule(index=st.integers(0, 100))
    def give_back(self, index: int) -> None:
        if self.taken:
            self.free.give_back(*self.taken.pop(index % len(self.taken)))

    @invariant()
    def nothing_overlaps_or_is_lost(self) -> None:
        assert min(self.free_lengths()) >= 0
        assert self.free.nbytes == sum(self.free_lengths())
        if not self.taken:
            assert self.free.take(TOTAL) == 0
            self.free.give_back(0, TOTAL)


TestFreeSpace = FreeSpaceMachine.TestCase
