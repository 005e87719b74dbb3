"""Files of extents: pinned by readers, proved when read, and deleted when nobody needs them.

    DIR/extents/<xx>/<id>    a file of one object, or a packed segment of many (storage_server.kernel.data.segments)

Only bytes that the index names count. A file is deleted when no row names it, nobody writes to it and nobody has it
pinned.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from objectcache.adapters.beneath import Beneath, UnsafeFileError
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.given_back import GivenBack
from storage_server.kernel.data.open_files import OpenFiles
from storage_server.kernel.data.space import Space
from storage_server.kernel.rules.pins import Freed, Hole, Location, PinLedger
from storage_server.planning.extent import Extent

LOOKED_AT_ONCE = 4096
FOLDER = "extents"
_FILE_ID = re.compile(r"[0-9a-f]{32}\Z")


def extent_place(directory: Path, file_id: str) -> Beneath:
    """The place of a file of extents in a data directory."""
    return Beneath(directory, f"{FOLDER}/{file_id[:2]}/{file_id}")


class ExtentFiles:
    """Pins, open descriptors and deferred deletion. Space that is given back is told to `space`. Methods may be called
    from any thread.
    """

    waits = False
    """Whether to pin a file may take long."""
    errors_are_damage = True
    """Whether bytes that the system fails to read are damaged: on a disk they are, and a network file system may answer
    the next time.
    """

    def __init__(
        self, directory: Path, open_files_max: int, disk: Disk, space: Space | None = None, direct_threads: int = 0
    ) -> None:
        self._directory = directory
        self.disk = disk
        self._space = space or Space(directory, None)
        self._lock = threading.Lock()
        self._pins = PinLedger()
        self.open = OpenFiles(
            place=self.place,
            is_pinned=self._pins.is_pinned,
            lock=self._lock,
            open_files_max=open_files_max,
            disk=disk,
            direct_threads=direct_threads,
            errors_are_damage=self.errors_are_damage,
        )
        self.given_back = GivenBack(self.place, self.open, disk, self._space)

    def place(self, file_id: str) -> Beneath:
        """Where a file lies."""
        return extent_place(self._directory, file_id)

    def new_id(self) -> str:
        """The id of a file that is about to be made."""
        return uuid.uuid4().hex

    def start(self) -> None:
        """Make the directory. Its subdirectories are made with their first files."""
        Beneath(self._directory, FOLDER).make_folder()
        self.disk.sync_directory(Beneath(self._directory))

    @property
    def punch_count(self) -> int:
        """How many locations were given back since the start."""
        return self._pins.punch_count

    @property
    def pinned_count(self) -> int:
        """Files pinned now."""
        with self._lock:
            return self._pins.pinned_count

    def add(self, file_id: str) -> None:
        """Add a file that extents may name from now on."""
        with self._lock:
            self._pins.add(file_id)

    def pin(self, file_ids: Iterable[str]) -> bool:
        """Keep these files readable, without new holes, until as many `unpin` calls. False, with nothing pinned, when a
        file is gone already.

        A file goes only after the index stopped naming it. So on False, read the index again.
        """
        with self._lock:
            return self._pins.pin(list(file_ids))

    def unpin(self, file_ids: Iterable[str]) -> None:
        """Undo `pin`. The last call for a file carries out deletions that had to wait."""
        with self._lock:
            freed = self._noted(self._pins.unpin(list(file_ids)))
        self.given_back.add(freed)

    def pin_locations(self, locations: Sequence[Location]) -> bool:
        """As `pin`, for some extents of files; other locations in the files may become holes."""
        with self._lock:
            return self._pins.pin_locations(locations)

    def unpin_locations(self, locations: Sequence[Location]) -> None:
        """Undo `pin_locations` of the same locations."""
        with self._lock:
            freed = self._noted(self._pins.unpin_locations(locations))
        self.given_back.add(freed)

    def dispose(self, file_id: str) -> None:
        """Delete a file that the index no longer names, soon or when its last reader is done."""
        with self._lock:
            if not self._pins.dispose(file_id):
                self._space.revive(file_id)
                return
            self._space.doom_file(file_id)
        self.given_back.add(Freed([file_id], []))

    def punch(self, holes: Iterable[Hole]) -> None:
        """Give back the space of bytes that the index no longer names, soon or when their last reader is done."""
        with self._lock:
            free, waiting = self._pins.punch(holes)
            for file_id, _, nbytes in waiting:
                self._space.revive(file_id, nbytes)
        self.given_back.add(Freed([], free))

    def withheld_bytes(self, extents: Sequence[Extent]) -> int:
        """How many bytes of these extents the index no longer names, and are there only as long as they are read. Reads
        begin and end meanwhile: the lock is held for a part at a time.
        """
        nbytes = 0
        for start in range(0, len(extents), LOOKED_AT_ONCE):
            with self._lock:
                if not self._pins.withholds:
                    return nbytes
                nbytes += self._pins.withheld_bytes(extents[start : start + LOOKED_AT_ONCE])
        return nbytes

    def is_punched(self, locations: Iterable[Location], since: int) -> bool:
        """Whether any of these locations may have been given back since `punch_count` was `since`."""
        if self.punch_count == since:
            return False
        with self._lock:
            return self._pins.is_punched(locations, since)

    def _noted(self, freed: Freed) -> Freed:
        """Bytes that a reader has freed count as about to come back from the moment at which no reader withholds them:
        else writers would be refused in between. The caller must hold the lock.
        """
        for file_id in freed.files:
            self._space.doom_file(file_id)
        if freed.holes:
            self._space.doom(freed.holes)
        return freed

    def count(self) -> int:
        """Files of extents in the directory."""
        return sum(1 for _ in self._stored())

    def sweep(self, live: set[str], *, set_aside: bool) -> int:
        """Take the files that the index names. A crash left the others behind: they are removed or, with `set_aside`,
        moved to the directory set-aside, for an index that may lack some files. Returns how many there were.
        """
        with self._lock:
            self._pins.load(live)
        unknown = [place for place in self._stored() if place.name not in live]
        aside = Beneath(self._directory, "set-aside")
        if set_aside and unknown:
            aside.make_folder()
        for place in unknown:
            with contextlib.suppress(FileNotFoundError):  # the committer deletes what recovery has just freed
                if set_aside:
                    place.rename(aside / place.name)
                else:
                    place.unlink()
        self._space.load([place.path for place in self._stored()])
        return len(unknown)

    def _stored(self) -> Iterator[Beneath]:
        """The files whose names have the form of ours; other files in the directory are left alone."""
        return (place for place in places_in(Beneath(self._directory, FOLDER)) if _FILE_ID.match(place.name))

    def close(self) -> None:
        """Give back what is due, and close every descriptor."""
        self.given_back.close()
        self.open.close()


def places_in(extents: Beneath) -> Iterator[Beneath]:
    """List the places in all folders of a folder of extents."""
    with contextlib.suppress(FileNotFoundError, UnsafeFileError):
        for folder in extents.names():
            with contextlib.suppress(FileNotFoundError, UnsafeFileError):
                for name in (extents / folder).names():
                    yield extents / folder / name


class PinSet:
    """The pins of one reader."""

    def __init__(self, files: ExtentFiles) -> None:
        self._files = files
        self._locations: list[list[Location]] = []

    @property
    def count(self) -> int:
        """How many locations are pinned."""
        return sum(map(len, self._locations))

    def keep(self, extents: Iterable[Extent], since: int) -> bool:
        """Pin the extents. False when one is gone, or may have been given back since the count of punches was `since`;
        the index must then be read again.
        """
        locations = list({(extent.file_id, extent.offset) for extent in extents})
        if not self._files.pin_locations(locations):
            return False
        self._locations.append(locations)
        return not self._files.is_punched(locations, since)

    def release(self) -> None:
        """Give all pins back."""
        pinned, self._locations = self._locations, []
        for locations in pinned:
            self._files.unpin_locations(locations)
