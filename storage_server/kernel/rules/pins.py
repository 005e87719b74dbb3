"""The readers of files of extents, and what of the files may go. Pure: calls come in, and say what may be given back.

A file may go when the index names it no more and nobody has it pinned, and a location in it (a hole) when nobody reads
that location, nor the file as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from storage_server.planning.extent import Extent, aligned

PUNCHED_MAX = 65_536
"""So many locations are remembered that were given back. A reader that began before the first of them reads again."""
Location = tuple[str, int]
"""A file, and the offset of an extent in it."""
Hole = tuple[str, int, int]
"""A file, an offset in it, and how many bytes."""
_T = TypeVar("_T")


class Freed(NamedTuple):
    """The files to delete, and the holes to give back."""

    files: list[str]
    holes: list[Hole]


class PinLedger:
    """The pins of one store."""

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._pins: Counter[str] = Counter()
        """By file, whether as a whole or for locations in it."""
        self._whole: Counter[str] = Counter()
        self._locations: Counter[Location] = Counter()
        self._doomed: set[str] = set()
        """Files that go with their last reader."""
        self._waiting: dict[str, dict[int, int]] = {}
        """Holes that wait for their readers: their bytes, by file and offset."""
        self._punched: dict[Location, int] = {}
        self._forgotten_count = 0
        self.punch_count = 0
        """How many locations were given back so far."""

    @property
    def pinned_count(self) -> int:
        """Files pinned now."""
        return len(self._pins)

    def is_pinned(self, file_id: str) -> bool:
        """Whether anybody reads the file."""
        return bool(self._pins.get(file_id))

    def add(self, file_id: str) -> None:
        """Add a file that extents may name from now on."""
        self._live.add(file_id)

    def load(self, file_ids: Iterable[str]) -> None:
        """The files of a store that opens."""
        self._live = set(file_ids)

    def pin(self, file_ids: Sequence[str], *, only_live: bool = True) -> bool:
        """Keep these files, and all locations in them, until `unpin`. False, with nothing pinned, where one is gone."""
        if only_live and not self._live.issuperset(file_ids):
            return False
        self._pins.update(file_ids)
        self._whole.update(file_ids)
        return True

    def unpin(self, file_ids: Sequence[str]) -> Freed:
        """Undo `pin`."""
        _decrease(self._whole, file_ids)
        return self._released(file_ids)

    def pin_locations(self, locations: Sequence[Location]) -> bool:
        """As `pin`, for some locations; others in their files may become holes."""
        file_ids = {file_id for file_id, _ in locations}
        if not self._live.issuperset(file_ids):
            return False
        self._pins.update(file_ids)
        self._locations.update(locations)
        return True

    def unpin_locations(self, locations: Sequence[Location]) -> Freed:
        """Undo `pin_locations` of the same locations."""
        _decrease(self._locations, locations)
        return self._released({file_id for file_id, _ in locations})

    def dispose(self, file_id: str) -> bool:
        """The index names the file no more. Whether the file may go now; otherwise it goes with its last reader."""
        self._live.discard(file_id)
        if self._pins.get(file_id):
            self._doomed.add(file_id)
            return False
        return True

    def punch(self, holes: Iterable[Hole]) -> tuple[list[Hole], list[Hole]]:
        """The index names these locations no more. Returns those to give back now, and those that wait for readers.
        Of files that are gone neither.
        """
        free: list[Hole] = []
        waiting: list[Hole] = []
        for file_id, offset, nbytes in holes:
            if file_id not in self._live:
                continue
            if self._is_read(file_id, offset):
                self._waiting.setdefault(file_id, {})[offset] = nbytes
                waiting.append((file_id, offset, nbytes))
            else:
                self._note_punched(file_id, offset)
                free.append((file_id, offset, nbytes))
        return free, waiting

    @property
    def withholds(self) -> bool:
        """Whether readers keep anything that the index names no more."""
        return bool(self._doomed or self._waiting)

    def withheld_bytes(self, extents: Iterable[Extent]) -> int:
        """How many bytes of these extents the index names no more, and are there only as long as they are read."""
        return sum(
            aligned(extent.nbytes)
            for extent in extents
            if extent.file_id in self._doomed or extent.offset in self._waiting.get(extent.file_id, ())
        )

    def is_punched(self, locations: Iterable[Location], since: int) -> bool:
        """Whether any of these locations may have been given back since `punch_count` was `since`."""
        return since < self._forgotten_count or any(self._punched.get(location, 0) > since for location in locations)

    def _is_read(self, file_id: str, offset: int) -> bool:
        return file_id in self._whole or (file_id, offset) in self._locations

    def _released(self, file_ids: Iterable[str]) -> Freed:
        """Each file has a pin less."""
        freed = Freed([], [])
        for file_id in file_ids:
            self._pins[file_id] -= 1
            is_last = self._pins[file_id] <= 0
            if is_last:
                del self._pins[file_id]
                if file_id in self._doomed:
                    self._doomed.discard(file_id)
                    self._waiting.pop(file_id, None)
                    freed.files.append(file_id)
                    continue
            holes = self._waiting.get(file_id, {})
            for offset in [offset for offset in holes if not self._is_read(file_id, offset)]:
                self._note_punched(file_id, offset)
                freed.holes.append((file_id, offset, holes.pop(offset)))
            if not holes:
                self._waiting.pop(file_id, None)
        return freed

    def _note_punched(self, file_id: str, offset: int) -> None:
        self.punch_count += 1
        self._punched[file_id, offset] = self.punch_count
        if len(self._punched) > PUNCHED_MAX:
            self._forgotten_count = self._punched.pop(next(iter(self._punched)))


def joined(holes: Iterable[Hole]) -> list[Hole]:
    """The holes, aligned, with those that touch each other made one: each costs a call of the file system."""
    found: list[Hole] = []
    for file_id, offset, nbytes in sorted(holes):
        if found and found[-1][0] == file_id and offset <= found[-1][1] + found[-1][2]:
            end = max(found[-1][1] + found[-1][2], offset + aligned(nbytes))
            found[-1] = file_id, found[-1][1], end - found[-1][1]
        else:
            found.append((file_id, offset, aligned(nbytes)))
    return found


def _decrease(counts: Counter[_T], items: Iterable[_T]) -> None:
    """Count each item once less, and forget those that are counted no more."""
    for item in items:
        left = counts[item] - 1
        if left > 0:
            counts[item] = left
        else:
            del counts[item]
