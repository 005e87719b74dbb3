"""Request ids that were used lately, as fingerprints in slices of time. Pure.

An id takes about eleven bytes, so that the ids of half an hour find room however many requests a key's fleet makes. A
slice is forgotten as a whole, when its newest id cannot be replayed any more.

    slice 1: 12:00:00 to 12:01:07   49,152 ids, full
    slice 2: 12:01:07 to            3,000 ids so far
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from hashlib import blake2b
from typing import Final

SLOTS: Final = 1 << 16
IDS_PER_SLICE: Final = SLOTS * 3 // 4
SLICE_S: Final = 300.0
"""A slice takes no more ids after so long a time: the first ones would be remembered much longer than they need be."""
IDS_MAX: Final = 1 << 24
"""All access keys together have no more ids: 9,300 a second for half an hour, and 180 MiB."""
KEY_FRACTION: Final = 0.5
SECRET_BYTES: Final = 16


class _Slice:
    """A table of fingerprints, open addressing. 0 is a free slot."""

    __slots__ = ("count", "counts", "first_s", "newest_s", "slots")

    def __init__(self, first_s: float) -> None:
        self.slots = array("Q", bytes(8 * SLOTS))
        self.count = 0
        self.counts: Counter[str] = Counter()
        """By access key."""
        self.first_s = self.newest_s = first_s

    def has(self, fingerprint: int) -> bool:
        return self.slots[self._place(fingerprint)] == fingerprint

    def add(self, fingerprint: int, access_key: str, now_s: float) -> None:
        self.slots[self._place(fingerprint)] = fingerprint
        self.count += 1
        self.counts[access_key] += 1
        self.newest_s = max(self.newest_s, now_s)

    def _place(self, fingerprint: int) -> int:
        """Where it is, or would be."""
        slots, place = self.slots, fingerprint % SLOTS
        while slots[place] not in (0, fingerprint):
            place = (place + 1) % SLOTS
        return place


class UsedIds:
    """The ids of the last `remember_s` of all access keys. Two ids have one fingerprint by chance once in 10^12 ids;
    nobody can look for such who does not know the secret.
    """

    def __init__(self, secret: bytes, remember_s: float) -> None:
        self._secret = secret
        self._remember_s = remember_s
        self._slices: deque[_Slice] = deque()
        self._counts: Counter[str] = Counter()

    def fingerprint(self, access_key: str, request_id: str) -> int:
        """Eight bytes that stand for an id of a key; never 0."""
        text = f"{len(access_key)} {access_key} {request_id}".encode()
        return int.from_bytes(blake2b(text, digest_size=8, key=self._secret).digest(), "little") or 1

    def has(self, fingerprint: int, now_s: float) -> bool:
        """Whether it was used, as far as that is remembered."""
        self._forget(now_s)
        return any(each.has(fingerprint) for each in self._slices)

    def has_room(self, access_key: str, now_s: float) -> bool:
        """Whether another id of this key can be remembered."""
        self._forget(now_s)
        return self._counts.total() < IDS_MAX and self._counts[access_key] < KEY_FRACTION * IDS_MAX

    def add(self, fingerprint: int, access_key: str, now_s: float) -> None:
        """Remember an id that is not remembered yet."""
        newest = self._slices[-1] if self._slices else None
        if newest is None or newest.count >= IDS_PER_SLICE or now_s - newest.first_s > SLICE_S:
            newest = _Slice(now_s)
            self._slices.append(newest)
        newest.add(fingerprint, access_key, now_s)
        self._counts[access_key] += 1

    def _forget(self, now_s: float) -> None:
        while self._slices and self._slices[0].newest_s < now_s - self._remember_s:
            self._counts -= self._slices.popleft().counts
