"""The free parts of a range of memory. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeSpace:
    """The free spans among `total_bytes`. Offsets and lengths are in bytes. Each call takes a few binary searches."""

    def __init__(self, total_bytes: int) -> None:
        self._by_offset = [(0, total_bytes)] if total_bytes else []
        self._by_length = [(length, offset) for offset, length in self._by_offset]
        self.nbytes = total_bytes
        """The free bytes in all."""

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` from the shortest span that is long enough, so that long ones stay whole; None where no span
        is.
        """
        index = bisect_left(self._by_length, (nbytes, 0))
        if index == len(self._by_length):
            return None
        length, offset = self._by_length[index]
        self._remove(offset, length)
        if length > nbytes:
            self._insert(offset + nbytes, length - nbytes)
        self.nbytes -= nbytes
        return offset

    def take_at(self, offset: int, nbytes: int) -> None:
        """Take bytes at this offset, all of which are free."""
        start, length = self._by_offset[bisect_left(self._by_offset, (offset + 1, 0)) - 1]
        self._remove(start, length)
        if start < offset:
            self._insert(start, offset - start)
        if start + length > offset + nbytes:
            self._insert(offset + nbytes, start + length - offset - nbytes)
        self.nbytes -= nbytes

    def next_span(self, offset: int) -> tuple[int, int] | None:
        """Offset and length of the first free span that begins at this offset or later."""
        index = bisect_left(self._by_offset, (offset, 0))
        return self._by_offset[index] if index < len(self._by_offset) else None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free what `take` gave; it is joined with free neighbours."""
        self.nbytes += nbytes
        index = bisect_left(self._by_offset, (offset, 0))
        if index < len(self._by_offset) and self._by_offset[index][0] == offset + nbytes:
            after, length = self._by_offset[index]
            self._remove(after, length)
            nbytes += length
        if index and sum(self._by_offset[index - 1]) == offset:
            before, length = self._by_offset[index - 1]
            self._remove(before, length)
            offset, nbytes = before, length + nbytes
        self._insert(offset, nbytes)

    def _insert(self, offset: int, length: int) -> None:
        insort(self._by_offset, (offset, length))
        insort(self._by_length, (length, offset))

    def _remove(self, offset: int, length: int) -> None:
        del self._by_offset[bisect_left(self._by_offset, (offset, length))]
        del self._by_length[bisect_left(self._by_length, (length, offset))]
