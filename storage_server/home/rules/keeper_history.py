"""The placements of late: under each of them another server may have been the keeper of keys that are ours now. Pure.

A comparison of the cache with upstream finds each change that a server made under a placement that ended at least
`settle_s` before the comparison began. So changes of the members need not stop for a comparison to count: the
placements that ended later, or that have begun meanwhile, are kept, and a key is trusted that was ours in each of them.
"""

from __future__ import annotations

from descriptors.placement import Placement

FORMER_MAX = 8
"""Each call asks each of the placements. Where members change faster, no key is trusted until they change slower."""


class KeeperHistory:
    """The placement in force, those before it that still count, and whether the cache was compared since. Times are of
    a steady clock, in seconds.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._current: Placement | None = None
        self._former: list[tuple[Placement, float]] = []
        """Different ones, with the times at which they ended, in order."""
        self._unknown_until_s = 0.0
        """Until when placements that are not known may have been in force."""
        self._is_compared = False
        self.trusted: tuple[Placement, ...] = ()
        """The placements in each of which a key must have been ours; none while no key can be trusted."""

    @property
    def settled_s(self) -> float:
        """When a comparison may begin after which no other one is needed."""
        return max([self._unknown_until_s, *(ended_s for _, ended_s in self._former)]) + self._settle_s

    def change(self, placement: Placement | None, now_s: float) -> None:
        """Take the placement that is in force from now on; None for no members."""
        before, self._current = self._current, placement
        if before is None or placement is None:
            self.lose(now_s)
            return
        if before.view.placed != placement.view.placed:
            kept = [each for each in self._former if each[0].view.placed != before.view.placed]
            self._former = [*kept, (before, now_s)]
        if len(self._former) > FORMER_MAX:
            _, ended_s = self._former.pop(0)
            self._is_compared, self._unknown_until_s = False, max(self._unknown_until_s, ended_s)
        self._show()

    def lose(self, now_s: float) -> None:
        """Note that placements up to now are not known."""
        self._former, self._is_compared, self._unknown_until_s = [], False, now_s
        self._show()

    def compared(self, began_s: float) -> bool:
        """Note a comparison that began then; whether no other one is needed."""
        if self._current is None or began_s < self._unknown_until_s + self._settle_s:
            return False
        self._is_compared = True
        self._former = [each for each in self._former if each[1] > began_s - self._settle_s]
        self._show()
        return not self._former

    def _show(self) -> None:
        former = [each for each, _ in self._former]
        self.trusted = () if self._current is None or not self._is_compared else (self._current, *former)
