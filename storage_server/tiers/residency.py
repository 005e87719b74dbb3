"""Which extents are in memory, and where. Pure state: no clock, no memory.

A policy (storage_server.eviction) decides what is to be in memory; this carries its decisions out. An extent that must
go while it is read, or filled, goes afterwards. Where no span is large enough, because free space is in pieces or not
free yet, an extent that was admitted is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage_server.planning.extent import Extent, aligned
from storage_server.planning.free_space import FreeSpace

Key = tuple[str, int]


def key_of(extent: Extent) -> Key:
    """The identity of an extent's bytes, unique for ever, because files are never written twice."""
    return extent.file_id, extent.offset


@dataclass(slots=True)
class _Resident:
    offset: int
    nbytes: int
    pins: int = 0
    is_filled: bool = False
    is_leaving: bool = False


class Residency:
    """Up to `total_bytes` of resident extents."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._free = FreeSpace(total_bytes)
        self._resident: dict[Key, _Resident] = {}
        self.hit_count = 0
        """How many extents were in memory when they were pinned."""
        self.missed_count = 0
        """How many extents were not in memory when they were to be pinned."""
        self.evicted_count = 0
        """How many extents were evicted for others."""

    @property
    def resident_count(self) -> int:
        """Extents in memory."""
        return sum(resident.is_filled for resident in self._resident.values())

    @property
    def free_bytes(self) -> int:
        """The memory in bytes that nobody uses."""
        return self._free.nbytes

    @property
    def used_bytes(self) -> int:
        """The memory in bytes that extents lie in, or are being copied into."""
        return self._total_bytes - self._free.nbytes

    def pin(self, extents: Sequence[Extent]) -> list[int | None]:
        """The offset of each extent, None for those not in memory. Resident extents stay until `unpin`."""
        offsets: list[int | None] = []
        for extent in extents:
            resident = self._resident.get(key_of(extent))
            if resident is None or not resident.is_filled:
                self.missed_count += 1
                offsets.append(None)
                continue
            self.hit_count += 1
            resident.pins += 1
            offsets.append(resident.offset)
        return offsets

    def unpin(self, extents: Sequence[Extent], offsets: Sequence[int | None]) -> None:
        """Undo `pin`."""
        for extent, offset in zip(extents, offsets, strict=True):
            if offset is not None:
                key = key_of(extent)
                self._resident[key].pins -= 1
                self._leave_if_free(key)

    def evict(self, keys: Iterable[Key]) -> None:
        """Carry out that these extents go."""
        for key in keys:
            resident = self._resident.get(key)
            if resident is not None and not resident.is_leaving:
                resident.is_leaving = True
                self.evicted_count += 1
                self._leave_if_free(key)

    def admit(self, keys: Iterable[Key], extents: Mapping[Key, Extent]) -> tuple[list[tuple[Extent, int]], list[Key]]:
        """Carry out that these extents come. Returns those to copy into memory now, each with its offset, and the keys
        of those that there is no span for. Call `filled` or `dropped` for each of the former.
        """
        coming: list[tuple[Extent, int]] = []
        refused: list[Key] = []
        no_span_for = self._total_bytes + 1
        for key in keys:
            resident = self._resident.get(key)
            if resident is not None:
                resident.is_leaving = False
                continue
            extent = extents[key]
            nbytes = aligned(extent.nbytes)
            offset = self._free.take(nbytes) if nbytes < no_span_for else None
            if offset is None:
                no_span_for = min(no_span_for, nbytes)  # nor is there one for others as large
                refused.append(key)
            else:
                self._resident[key] = _Resident(offset, nbytes)
                coming.append((extent, offset))
        return coming, refused

    def filled(self, extent: Extent) -> None:
        """Note that the extent's bytes are in memory, and proved."""
        key = key_of(extent)
        self._resident[key].is_filled = True
        self._leave_if_free(key)

    def dropped(self, extent: Extent) -> None:
        """Note that the extent is not copied after all, and free its span."""
        self._remove(key_of(extent))

    def _leave_if_free(self, key: Key) -> None:
        resident = self._resident[key]
        if resident.is_leaving and resident.is_filled and not resident.pins:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        gone = self._resident.pop(key)
        self._free.give_back(gone.offset, gone.nbytes)
