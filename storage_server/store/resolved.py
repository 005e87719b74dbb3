"""Keys whose extents were looked up before: an index lookup costs microseconds, and a descriptor names thousands.

What a transaction changed is forgotten before anybody is answered, and what was read from the index before that
change is not remembered after it. Safe from any thread; used in the process that writes the index, and nowhere else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

from storage_server.store.extents import Extent

RECENT_MAX = 65_536
ENTRY_BYTES = 300
EXTENT_BYTES = 250
Key = tuple[str, str]
"""Bucket and key."""


class ResolvedKeys:
    """The extents of up to `count_max` objects in up to `bytes_max` of memory, the ones not asked for longest leaving
    first.
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
        """The extents of each key, None where they must be looked up; and the moment that `remember` wants."""
        with self._lock:
            found = [self._extents.get((bucket, key)) for key in keys]
            for key, extents in zip(keys, found, strict=True):
                if extents is not None:
                    self._extents.move_to_end((bucket, key))
            return self._generation, found

    def remember(self, since: int, bucket: str, looked_up: Iterable[tuple[str, list[Extent] | None]]) -> None:
        """What the index said after `find`, but for what has changed since then."""
        with self._lock:
            if since < self._complete_since:
                return
            later = takewhile(lambda entry: entry[0] > since, reversed(self._recent))
            changed = {key for _, key in later}
            for key, extents in looked_up:
                if extents is not None and (bucket, key) not in changed:
                    self._drop((bucket, key))
                    self._extents[bucket, key] = extents
                    self._nbytes += entry_bytes(bucket, key, extents)
            while len(self._extents) > self._count_max or self._nbytes > self._bytes_max:
                self._drop(next(iter(self._extents)))

    def forget(self, changed: Iterable[Key]) -> None:
        """These keys show something else from now on."""
        with self._lock:
            self._generation += 1
            for key in changed:
                self._drop(key)
                if len(self._recent) == RECENT_MAX:
                    self._complete_since = self._recent[0][0]
                self._recent.append((self._generation, key))

    def forget_all(self) -> None:
        """Bytes have moved."""
        with self._lock:
            self._generation += 1
            self._complete_since = self._generation
            self._extents.clear()
            self._nbytes = 0
            self._recent.clear()

    @property
    def nbytes(self) -> int:
        """Memory in use, about."""
        return self._nbytes

    def _drop(self, name: Key) -> None:
        extents = self._extents.pop(name, None)
        if extents is not None:
            self._nbytes -= entry_bytes(*name, extents)


def entry_bytes(bucket: str, key: str, extents: Sequence[Extent]) -> int:
    """What an entry takes, about: its checksums grow with the object."""
    return ENTRY_BYTES + len(bucket) + len(key) + sum(EXTENT_BYTES + len(extent.checksums) for extent in extents)
