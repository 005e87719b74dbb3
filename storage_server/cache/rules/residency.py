"""Which extents are in memory, and where. Pure state: no clock, no memory.

A policy (storage_server.cache.policies, of which one also says in which form) decides what is to be
in memory; this carries its decisions out. An extent that must
go while it is read, or filled, goes afterwards. Where no span is large enough, because free space is in pieces or not
free yet, an extent that was admitted is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from descriptors.layer_forms import EXACT
from storage_server.planning.extent import Extent, aligned
from storage_server.planning.forms import Encoded, Reading, Takes
from storage_server.planning.free_space import FreeSpace

Key = tuple[str, int]
SLIDE_EXTENTS_MAX = 256
"""Free spans that one call of `slide` looks at."""


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
    encoded: Encoded | None = None
    """Its form, where its bytes are not the exact ones."""


class Residency:
    """Up to `total_bytes` of resident extents."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        """The memory."""
        self._free = FreeSpace(total_bytes)
        self._resident: dict[Key, _Resident] = {}
        self._at: dict[int, Key] = {}
        """The extents by their offsets."""
        self._forms: Counter[str] = Counter()
        self._slide_from = 0
        """The offset from which `slide` goes on."""
        self.hit_count = 0
        """How many extents were in memory when they were pinned."""
        self.missed_count = 0
        """How many extents were not in memory when they were to be pinned."""
        self.evicted_count = 0
        """How many extents were evicted for others."""

    @property
    def resident_count(self) -> int:
        """Extents in memory."""
        return self._forms.total()

    @property
    def used_bytes(self) -> int:
        """The memory in bytes that extents lie in, or are being copied into."""
        return self.total_bytes - self._free.nbytes

    def pin(self, extents: Sequence[Extent], reading: Reading | None = None) -> list[int | None]:
        """The offset of each extent, None for those not in memory in a form that the reading takes. Resident extents
        stay, in their form, until `unpin`.
        """
        offsets: list[int | None] = []
        for extent in extents:
            resident = self._resident.get(key_of(extent))
            if resident is None or not resident.is_filled or not _is_taken(resident.encoded, reading):
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

    def form(self, extent: Extent) -> Encoded | None:
        """The form of a pinned extent; None where it is exact."""
        return self._resident[key_of(extent)].encoded

    @property
    def form_counts(self) -> dict[str, int]:
        """How many extents are in memory in each form."""
        return dict(+self._forms)

    def holds(self, key: Key) -> bool:
        """Whether an extent has a span."""
        return key in self._resident

    def has(self, extent: Extent, reader: Takes | None) -> bool:
        """Whether the extent is in memory in a form that the reader takes. It is no use of the extent."""
        resident = self._resident.get(key_of(extent))
        return resident is not None and resident.is_filled and _is_taken(resident.encoded, reader)

    @contextmanager
    def held(self, key: Key) -> Iterator[None]:
        """Keep an extent where it is until the block ends, without counting a use."""
        self._resident[key].pins += 1
        try:
            yield
        finally:
            self._resident[key].pins -= 1
            self._leave_if_free(key)

    def is_read(self, key: Key) -> bool:
        """Whether somebody reads an extent, or keeps it where it is."""
        resident = self._resident.get(key)
        return resident is not None and resident.pins > 0

    def place(self, key: Key) -> tuple[int, Encoded | None] | None:
        """Where an extent lies, and its form, None for exact. None where it is not in memory, or is about to leave."""
        resident = self._resident.get(key)
        if resident is None or not resident.is_filled or resident.is_leaving:
            return None
        return resident.offset, resident.encoded

    def recode(self, key: Key, encoded: Encoded) -> bool:
        """Note that an extent has this form from now on; the caller then writes its bytes to the offset, before anybody
        else gets to run. The rest of its span is freed. False where somebody reads the extent, or it does not fit.
        """
        resident = self._resident[key]
        nbytes = aligned(encoded.nbytes)
        if resident.pins or resident.is_leaving or nbytes > resident.nbytes:
            return False
        if nbytes < resident.nbytes:
            self._free.give_back(resident.offset + nbytes, resident.nbytes - nbytes)
        self._forms[_form_of(resident.encoded)] -= 1
        self._forms[_form_of(encoded)] += 1
        resident.nbytes, resident.encoded = nbytes, encoded
        return True

    def slide(self, nbytes: int, moved_bytes_max: int) -> list[tuple[int, int, int]]:
        """Move extents together until a free span of `nbytes` has come up, or `moved_bytes_max` are moved. Returns the
        moves as offsets before and after, each lower than before, and lengths. The caller carries them out in this
        order, before anybody else gets to run. An extent that is read or filled stays where it is.
        """
        moves: list[tuple[int, int, int]] = []
        if self._free.nbytes < nbytes:
            return moves
        moved_bytes = 0
        for _ in range(SLIDE_EXTENTS_MAX):
            gap = self._free.next_span(self._slide_from)
            key = None if gap is None else self._at.get(sum(gap))
            if gap is None or key is None:  # nothing lies behind the last free span
                self._slide_from = 0
                break
            resident = self._resident[key]
            self._slide_from = gap[0]
            is_too_large = resident.nbytes > moved_bytes_max
            if gap[1] >= nbytes or (moved_bytes + resident.nbytes > moved_bytes_max and not is_too_large):
                break
            if resident.pins or not resident.is_filled or is_too_large:
                self._slide_from = resident.offset + resident.nbytes
                continue
            moves.append((resident.offset, gap[0], resident.nbytes))
            self._free.give_back(resident.offset, resident.nbytes)
            self._free.take_at(gap[0], resident.nbytes)
            del self._at[resident.offset]
            resident.offset, self._at[gap[0]] = gap[0], key
            moved_bytes += resident.nbytes
        return moves

    def evict(self, keys: Iterable[Key]) -> None:
        """Carry out that these extents go."""
        for key in keys:
            resident = self._resident.get(key)
            if resident is not None and not resident.is_leaving:
                resident.is_leaving = True
                self.evicted_count += 1
                self._leave_if_free(key)

    def admit(
        self, keys: Iterable[Key], extents: Mapping[Key, Extent], encoded_bytes: Mapping[Key, int] | None = None
    ) -> tuple[list[tuple[Extent, int]], list[Key]]:
        """Carry out that these extents come, some encoded, in so many bytes. Returns those to copy into memory now,
        each with its offset, and the keys of those that there is no span for. Call `filled` or `dropped` for each of
        the former.
        """
        coming: list[tuple[Extent, int]] = []
        refused: list[Key] = []
        no_span_for = self.total_bytes + 1
        for key in keys:
            resident = self._resident.get(key)
            if resident is not None:
                resident.is_leaving = False
                continue
            extent = extents[key]
            nbytes = aligned(extent.nbytes if encoded_bytes is None else encoded_bytes.get(key, extent.nbytes))
            offset = self._free.take(nbytes) if nbytes < no_span_for else None
            if offset is None:
                no_span_for = min(no_span_for, nbytes)  # nor is there one for others as large
                refused.append(key)
            else:
                self._resident[key] = _Resident(offset, nbytes)
                self._at[offset] = key
                coming.append((extent, offset))
        return coming, refused

    def filled(self, extent: Extent, encoded: Encoded | None = None) -> None:
        """Note that the extent's bytes are in memory, and proved; with `encoded`, in that form."""
        key = key_of(extent)
        self._resident[key].is_filled = True
        self._resident[key].encoded = encoded
        self._forms[_form_of(encoded)] += 1
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
        del self._at[gone.offset]
        if gone.is_filled:
            self._forms[_form_of(gone.encoded)] -= 1
        self._free.give_back(gone.offset, gone.nbytes)


def _form_of(encoded: Encoded | None) -> str:
    return EXACT if encoded is None else encoded.codec.value


def _is_taken(encoded: Encoded | None, reading: Takes | None) -> bool:
    return encoded is None or (reading is not None and reading.takes(encoded))
