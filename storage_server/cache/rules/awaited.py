"""Objects that have not come yet: the leases that wait for them, and the chunks that they will come behind. Both are
bounded in entries and in characters. Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from storage_server.cache.rules.entry import Name

EXPECTED_MAX = 65_536
EXPECTED_CHARACTERS_MAX = 16 << 20
AWAITED_MAX = 65_536
AWAITED_CHARACTERS_MAX = 16 << 20
AWAITED_FRACTION = 0.5
"""One bucket has no more than this fraction of all leases of objects that have not come."""


class ExpectedParents:
    """The chunk before each chunk that somebody has asked for, and will put soon."""

    def __init__(self) -> None:
        self._parents: OrderedDict[Name, str] = OrderedDict()
        self._characters = 0

    def add(self, bucket: str, keys: Sequence[str], matched: int) -> None:
        """Note that somebody has asked for this prefix, whose first `matched` chunks are there. The client that
        computes the others will put them soon, one by one.
        """
        for index in range(max(1, matched), len(keys)):
            name, parent = (bucket, keys[index]), keys[index - 1]
            self.take(name)
            self._parents[name] = parent
            self._characters += len(name[1]) + len(parent)
        while len(self._parents) > EXPECTED_MAX or self._characters > EXPECTED_CHARACTERS_MAX:
            self.take(next(iter(self._parents)))

    def take(self, name: Name) -> str | None:
        """The parent that the object was expected behind, which is forgotten; None where nobody has asked for it."""
        parent = self._parents.pop(name, None)
        if parent is not None:
            self._characters -= len(name[1]) + len(parent)
        return parent


class AwaitedLeases:
    """The ends of leases of objects that have not come. While objects of before a restart come back, `factor` is the
    number of times as many that are kept.
    """

    def __init__(self) -> None:
        self.factor = 1
        self._ends: dict[str, OrderedDict[str, float]] = {}
        """By bucket and key."""
        self._count = 0
        self._characters: Counter[str] = Counter()
        """In the keys of each bucket."""
        self._all_characters = 0

    def has(self, name: Name) -> bool:
        """Whether a lease waits for this object."""
        return name[1] in self._ends.get(name[0], ())

    def add(self, name: Name, until: float) -> None:
        """Lease an object when it comes. One bucket must not make the leases of others be forgotten."""
        bucket, key = name
        ends = self._ends.setdefault(bucket, OrderedDict())
        if key not in ends:
            self._count += 1
            self._characters[bucket] += len(key)
            self._all_characters += len(key)
        ends[key] = max(until, ends.pop(key, until))
        count_max, characters_max = self.factor * AWAITED_MAX, self.factor * AWAITED_CHARACTERS_MAX
        while len(ends) > AWAITED_FRACTION * count_max or self._characters[bucket] > AWAITED_FRACTION * characters_max:
            self.take((bucket, next(iter(ends))))
        while self._count > count_max or self._all_characters > characters_max:
            largest = max(self._ends, key=lambda bucket: len(self._ends[bucket]))
            self.take((largest, next(iter(self._ends[largest]))))

    def set_back(self, back_s: float) -> None:
        """Have all leases end so much earlier."""
        for ends in self._ends.values():
            for key in ends:
                ends[key] -= back_s

    def take(self, name: Name) -> float | None:
        """The end of the lease, which is forgotten; None where there is none."""
        bucket, key = name
        ends = self._ends.get(bucket)
        until = None if ends is None else ends.pop(key, None)
        if until is not None:
            self._count -= 1
            self._characters[bucket] -= len(key)
            self._all_characters -= len(key)
        if ends is not None and not ends:
            del self._ends[bucket], self._characters[bucket]
        return until
