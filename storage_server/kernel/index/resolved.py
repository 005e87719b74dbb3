"""ResolvedKeys: the extents of keys that were looked up before. An index lookup takes microseconds, and a descriptor
names thousands of keys.

Keys that a transaction changed are forgotten before anybody is answered. Extents that were read from the index before
that change are not remembered after it. Safe from any thread; used only in the process that writes the index.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

from storage_server.planning.extent import Extent

RECENT_MAX = 65_536
EXTENTS_MAX = 16
"""An object of more extents is not remembered: the collector of garbage goes through all of them, and meanwhile nothing
else runs.
"""
ENTRY_BYTES = 300
EXTENT_BYTES = 250
Key = tuple[str, str]
"""Bucket and key."""


class ResolvedKeys:
    """The extents of up to `count_max` objects in up to `bytes_max` of memory. The key that was not asked for longest
    leaves first.
    """

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._nbytes = 0
        self._lock = threading.Lock()
        self._extents: OrderedDict[Key, list[Extent]] = OrderedDict()
        self._generation = 0
        self._recent: deque[tuple[int, Key]] = deque(maxlen=RECENT_MAX)
        self._complete_since = 0

    def find(self, bucket: str, keys: Sequence[str]) -> tuple[int, list[list[Extent] | None]]:
        """The extents of each key, None where they must be looked up; and the value of `since` for `remember`."""
        with self._lock:
            found = [self._extents.get((bucket, key)) for key in keys]
            for key, extents in zip(keys, found, strict=True):
                if extents is not None:
                    self._extents.move_to_end((bucket, key))
            return self._generation, found

    def remember(self, since: int, bucket: str, looked_up: Iterable[tuple[str, list[Extent] | None]]) -> None:
        """Remember the index's answers, except for keys that have changed since `find` returned `since`."""
        with self._lock:
            if since < self._complete_since:
                return
            later = takewhile(lambda entry: entry[0] > since, reversed(self._recent))
            changed = {key for _, key in later}
            for key, extents in looked_up:
                if extents is not None and len(extents) <= EXTENTS_MAX and (bucket, key) not in changed:
                    self._drop((bucket, key))
                    self._extents[bucket, key] = extents
                    self._nbytes += entry_bytes(bucket, key, extents)
            while len(self._extents) > self._count_max or self._nbytes > self._bytes_max:
                self._drop(next(iter(self._extents)))

    def forget(self, changed: Iterable[Key]) -> None:
        """Forget keys that show other objects from now on."""
        with self._lock:
            self._generation += 1
            for key in changed:
                self._drop(key)
                if len(self._recent) == RECENT_MAX:
                    self._complete_since = self._recent[0][0]
                self._recent.append((self._generation, key))

    def forget_all(self) -> None:
        """Forget every key, because compaction has moved bytes."""
        with self._lock:
            self._generation += 1
            self._complete_since = self._generation
            self._extents.clear()
            self._nbytes = 0
            self._recent.clear()

    @property
    def nbytes(self) -> int:
        """The memory in use, in bytes, approximately."""
        return self._nbytes

    def _drop(self, name: Key) -> None:
        extents = self._extents.pop(name, None)
        if extents is not None:
            self._nbytes -= entry_bytes(*name, extents)


def entry_bytes(bucket: str, key: str, extents: Sequence[Extent]) -> int:
    """The memory that an entry takes, in bytes, approximately; its checksums grow with the object."""
    of_extents = sum(_extent_bytes(extent) for extent in extents)
    return ENTRY_BYTES + len(bucket) + len(key) + of_extents


def _extent_bytes(extent: Extent) -> int:
    return EXTENT_BYTES + len(extent.checksums) + len(extent.content_class) + len(extent.form)
