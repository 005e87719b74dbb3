"""Which objects leave, and which have left lately. Pure.

A lookup reads the index, and promises a moment later what it found. An object that leaves in between must not be
promised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from storage_server.cache.rules.entry import Name

BATCHES_MAX = 256


class Departures:
    """Objects leave in batches, one after the other."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, frozenset[Name]]] = deque(maxlen=BATCHES_MAX)
        self._begun_count = 0
        self._ended_count = 0

    @property
    def ended_count(self) -> int:
        """How many batches have left. Taken before the index is read, it is the `since` of `staying_count`."""
        return self._ended_count

    def begin(self, names: Iterable[Name]) -> None:
        """These are leaving from now on."""
        self._begun_count += 1
        self._batches.append((self._begun_count, frozenset(names)))

    def end(self) -> None:
        """The last batch has left: the index shows it no more."""
        self._ended_count = self._begun_count

    def staying_count(self, bucket: str, keys: Sequence[str], matched: int, since: int) -> int:
        """How many of the first `matched` keys, which the index showed after `since`, are neither leaving nor have left
        meanwhile: those before the first that does. 0 where more batches have left since than are remembered.
        """
        return next(self._leaving(bucket, keys[:matched], since), matched)

    def leaving(self, bucket: str, keys: Sequence[str], since: int) -> list[int]:
        """The positions of all keys that are leaving, or have left meanwhile, as `staying_count` looks at them."""
        return list(self._leaving(bucket, keys, since))

    def _leaving(self, bucket: str, keys: Sequence[str], since: int) -> Iterator[int]:
        doubtful = [names for number, names in self._batches if number > since]
        if len(doubtful) < self._begun_count - since:
            yield from range(len(keys))
        elif doubtful:
            yield from (at for at, key in enumerate(keys) if any((bucket, key) in names for names in doubtful))
