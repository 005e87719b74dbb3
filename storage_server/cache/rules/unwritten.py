"""The entries of a cache that are to be written down, so that a restart knows them. Pure.

A lease is written down with a spare, so that renewals within it need no writing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from storage_server.cache.rules.entry import Entry, Name

LEASE_SPARE_S = 10.0
"""Leases are written down so much longer than they are. Renewals within this time need no writing."""


class Unwritten:
    """The part of `entries`, which their owner keeps, that is not written down yet."""

    def __init__(self, entries: Mapping[Name, Entry]) -> None:
        self._entries = entries
        self._written_ends: dict[Name, float] = {}
        """Until when each leased object is leased, as far as that is written down."""
        self._leased: set[Name] = set()
        """Objects whose leases are longer than what is written down."""
        self._changed: set[Name] = set()

    @property
    def has_leases(self) -> bool:
        """Whether `leased` has anything to tell."""
        return bool(self._leased)

    def note(self, name: Name) -> None:
        """The object was used, pinned or leased."""
        self._changed.add(name)

    def note_lease(self, name: Name) -> None:
        """Have a lease written down where it is longer than what is."""
        until = self._entries[name].leased_until
        if until is not None and until > self._written_ends.get(name, -math.inf):
            self._leased.add(name)

    def note_former(self, name: Name, leased_until: float | None) -> None:
        """An object of before a restart, as it is written down, unless `note` has said that it differs."""
        if name in self._changed:
            self.note_lease(name)
        elif leased_until is not None:
            self._written_ends[name] = leased_until

    def changed(self) -> list[tuple[Name, Entry]]:
        """The objects that were used, pinned or leased since the last call, as they are to be written down."""
        names, self._changed, self._leased = self._changed, set(), set()
        return self._to_write(names)

    def leased(self) -> list[tuple[Name, Entry]]:
        """Those of `changed` whose leases are longer than what is written down."""
        names, self._leased = self._leased, set()
        self._changed -= names
        return self._to_write(names)

    def forget_written_leases(self) -> None:
        """Have all leases written down again: what is written counts by another clock."""
        self._written_ends.clear()
        for name, entry in self._entries.items():
            if entry.leased_until is not None:
                self._changed.add(name)
                self.note_lease(name)

    def not_written(self, names: Iterable[Name]) -> None:
        """Take back what `changed` or `leased` gave: these could not be written down."""
        for name in names:
            if name in self._entries:
                self._changed.add(name)
                self._written_ends.pop(name, None)
                self.note_lease(name)

    def forget(self, name: Name) -> None:
        """The object is not in the cache any more."""
        self._changed.discard(name)
        self._leased.discard(name)
        self._written_ends.pop(name, None)

    def _to_write(self, names: Iterable[Name]) -> list[tuple[Name, Entry]]:
        found = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                continue
            until = entry.leased_until
            if until is not None and until > self._written_ends.get(name, -math.inf):
                self._written_ends[name] = until + LEASE_SPARE_S
            written = None if until is None else self._written_ends[name]
            found.append((name, entry._replace(leased_until=written)))
        return found
