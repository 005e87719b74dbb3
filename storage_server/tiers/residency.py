"""Which extents are in memory, where, and which give way. Pure state: no clock, no memory of its own.

An extent comes in when it is asked for a second time, and drives out only what was last asked for before its own last
time: bytes that are used more often than the newcomer stay. A prefix larger than the memory therefore keeps its
leading chunks there instead of driving out each with the next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from storage_server.store.extents import Extent

ALIGNMENT_BYTES = 4096
Key = tuple[str, int]


def key_of(extent: Extent) -> Key:
    """What tells an extent's bytes from all others, for ever: files are never written twice."""
    return extent.file_id, extent.offset


class FreeSpace:
    """Spans of `total_bytes` that are free, lowest first. Offsets and lengths are in bytes."""

    def __init__(self, total_bytes: int) -> None:
        self._spans = [(0, total_bytes)] if total_bytes else []

    def take(self, nbytes: int) -> int | None:
        """The first span that is large enough; None where none is."""
        for index, (offset, length) in enumerate(self._spans):
            if length >= nbytes:
                if length == nbytes:
                    del self._spans[index]
                else:
                    self._spans[index] = (offset + nbytes, length - nbytes)
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """What `take` gave; neighbours become one span again."""
        index = bisect_left(self._spans, (offset, 0))
        if index < len(self._spans) and self._spans[index][0] == offset + nbytes:
            nbytes += self._spans.pop(index)[1]
        if index and sum(self._spans[index - 1]) == offset:
            before, length = self._spans.pop(index - 1)
            offset, nbytes = before, nbytes + length
        insort(self._spans, (offset, nbytes))

    @property
    def nbytes(self) -> int:
        """How much is free."""
        return sum(length for _, length in self._spans)


@dataclass(slots=True)
class _Resident:
    offset: int
    nbytes: int
    used_at_s: float
    pins: int = 0
    is_filled: bool = False


class Residency:
    """Up to `total_bytes` of extents, and the memory of up to `asked_max` asks. Times never go back."""

    def __init__(self, total_bytes: int, asked_max: int) -> None:
        self._total_bytes = total_bytes
        self._free = FreeSpace(total_bytes)
        self._asked_max = asked_max
        self._resident: OrderedDict[Key, _Resident] = OrderedDict()
        self._asked: OrderedDict[Key, float] = OrderedDict()

    @property
    def resident_count(self) -> int:
        """Extents in memory."""
        return sum(resident.is_filled for resident in self._resident.values())

    @property
    def free_bytes(self) -> int:
        """Memory nobody uses."""
        return self._free.nbytes

    def pin(self, extents: Sequence[Extent], now_s: float) -> list[int | None]:
        """Where each extent is (None: not in memory); those that are stay until `unpin`."""
        offsets: list[int | None] = []
        for extent in extents:
            key = key_of(extent)
            resident = self._resident.get(key)
            if resident is None or not resident.is_filled:
                offsets.append(None)
                continue
            resident.pins += 1
            resident.used_at_s = now_s
            self._resident.move_to_end(key)
            offsets.append(resident.offset)
        return offsets

    def unpin(self, extents: Sequence[Extent], offsets: Sequence[int | None]) -> None:
        """Undo `pin`."""
        for extent, offset in zip(extents, offsets, strict=True):
            if offset is not None:
                self._resident[key_of(extent)].pins -= 1

    def ask(self, extents: Sequence[Extent], now_s: float) -> list[tuple[Extent, int]]:
        """Extents that were asked for and not in memory: which of them shall come in, and where. Each must be `filled`
        or `dropped`.
        """
        coming = []
        no_room_for = self._total_bytes + 1
        for extent in extents:
            key = key_of(extent)
            if key in self._resident:
                continue
            asked_at_s = self._asked.pop(key, None)
            if asked_at_s is not None and asked_at_s < now_s and _padded(extent.nbytes) < no_room_for:
                offset = self._make_room(_padded(extent.nbytes), asked_at_s)
                if offset is not None:
                    self._resident[key] = _Resident(offset, _padded(extent.nbytes), now_s)
                    coming.append((extent, offset))
                    continue
                no_room_for = _padded(extent.nbytes)  # none for others of this request either
            self._asked[key] = now_s
            if len(self._asked) > self._asked_max:
                self._asked.popitem(last=False)
        return coming

    def filled(self, extent: Extent) -> None:
        """Its bytes are there, and proved."""
        self._resident[key_of(extent)].is_filled = True

    def dropped(self, extent: Extent) -> None:
        """It does not come after all."""
        self._remove(key_of(extent))

    def _make_room(self, nbytes: int, before_s: float) -> int | None:
        """A free span, where driving out what was last used before `before_s` makes one."""
        offset = self._free.take(nbytes)
        while offset is None:
            oldest = next(
                (key for key, resident in self._resident.items() if resident.is_filled and not resident.pins), None
            )
            if oldest is None or self._resident[oldest].used_at_s >= before_s:
                return None
            self._remove(oldest)
            offset = self._free.take(nbytes)
        return offset

    def _remove(self, key: Key) -> None:
        gone = self._resident.pop(key)
        self._free.give_back(gone.offset, gone.nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
