"""The data files of a shared directory: each is written by one server, and read by all.

    DIR/writers/<writer>/extents/<xx>/<id>    a segment of up to 256 bodies, or one large body

The id begins with the writer's, and ends with xx. A server deletes only files of its own, and those of writers that
have been silent for a long while. It does so a while after no row names them, because others may be reading them.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from objectcache.adapters.beneath import Beneath, UnsafeFileError
from storage_server.home.directory.membership import FORMAT_NAME
from storage_server.home.directory.rules.clock import SHOWN_STEP_S
from storage_server.home.directory.rules.records import FILE_ID, WRITERS, writer_of
from storage_server.kernel.beside import FilesBeside
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import FOLDER, places_in

GRACE_S = 60.0
RETIRED_S = 3600.0
UNSEEN_S_MAX = RETIRED_S / 2
"""A server whose last sign of life is older changes nothing: others may soon take it for a silent one."""
BEATS_KEPT = 8
"""The time is taken from so many beats: after them a clock of the file system that was set back is followed."""
ALIVE = "alive"
"""The file whose time says when its writer was last seen."""
SHOWN = "shown"
"""The file whose time is the latest one that its writer has seen on the file system's clock, to SHOWN_STEP_S."""
STRIPES = ("-c", "16", "-S", "4m")
"""CASCADE, section III-D: files lie on 16 object storage targets, in stripes of 4 MiB."""


def _touched(place: Beneath) -> float:
    try:
        return place.touch()
    except UnsafeFileError:  # it has several names, which backups make, or is something else
        place.write(b"")
        return place.touch()


def stripe(folder: Path) -> None:
    """Have new files of a folder striped, where the file system is Lustre; elsewhere nothing happens."""
    lfs = shutil.which("lfs")
    if lfs is not None:
        subprocess.run([lfs, "setstripe", *STRIPES, str(folder)], capture_output=True, timeout=60, check=False)


class SharedFiles(FilesBeside):
    """Pins, open descriptors and deferred deletion. Methods may be called from any thread."""

    waits = True
    errors_are_damage = False

    def __init__(self, root: Path, writer: str, open_files_max: int, disk: Disk) -> None:
        super().__init__(root, open_files_max, disk)
        self._writer = writer
        self._writers = Beneath(root, WRITERS)
        self._beaten_s = float("-inf")
        self._ahead_s: tuple[float, ...] = ()
        """How far the file system's time was ahead of the steady clock at the last beats."""
        self.own_shown_s = float("-inf")
        """The time of the own file SHOWN, as it was known at the last beat."""
        self.tells_whole_seconds = False
        """Whether the file system's times have no fractions, so that servers differ by up to a second."""
        self._dead: dict[str, float] = {}
        """Files that no row names, and when that was seen, by the steady clock."""
        self._dead_lock = threading.Lock()

    def place(self, file_id: str) -> Beneath:
        """Where a file lies."""
        return self._writers / writer_of(file_id) / FOLDER / file_id[-2:] / file_id

    def is_there(self) -> bool:
        """Whether the shared directory is: its file system may be unmounted for a while."""
        try:
            return self._writers.with_name(FORMAT_NAME).exists()
        except OSError:
            return False

    def missing(self, file_ids: Iterable[str]) -> set[str]:
        """Those of the files that are not at their places, or of which nobody can tell now."""
        return {file_id for file_id in file_ids if not self._is_at_place(file_id)}

    def _is_at_place(self, file_id: str) -> bool:
        try:
            return self.place(file_id).exists()
        except OSError:
            return False

    def new_id(self) -> str:
        """The id of a file that this server is about to make."""
        return self._writer + uuid.uuid4().hex[len(self._writer) :]

    def start(self) -> None:
        """Make this server's folder, and remember its files."""
        folder = self._writers / self._writer / FOLDER
        if not folder.is_folder():
            folder.make_folder()
            stripe(folder.path)
        self.disk.sync_directory(folder.parent)
        self.disk.sync_directory(folder.parent.parent)
        for file_id in self.stored(self._writer):
            self.add(file_id)

    def stored(self, writer: str) -> list[str]:
        """The ids of a writer's files that are there."""
        names = (place.name for place in places_in(self._writers / writer / FOLDER))
        return [name for name in names if FILE_ID.match(name) and writer_of(name) == writer]

    def some_stored(self, writer: str, first: str, names_max: int) -> tuple[set[str], str | None]:
        """The ids of some files of a writer that are there, from the folder `first` on, and the folder to go on with,
        None at the end. Others may make very many names there: of each folder about `names_max` count, and of all.
        """
        extents, found = self._writers / writer / FOLDER, set[str]()
        with contextlib.suppress(FileNotFoundError, UnsafeFileError):
            folders, _ = extents.first_names(names_max)
            for folder in sorted(folder for folder in folders if folder >= first):
                if len(found) >= names_max:
                    return found, folder
                with contextlib.suppress(FileNotFoundError, UnsafeFileError):
                    names, _ = (extents / folder).first_names(names_max)
                    found.update(name for name in names if FILE_ID.match(name) and writer_of(name) == writer)
        return found, None

    def is_retired(self, writer: str) -> bool:
        """Whether a writer has been silent for RETIRED_S, by the clock of the file system: by the times at which files
        were changed, which nobody can set.
        """
        with contextlib.suppress(OSError):
            newest = (self._writers / self._writer / ALIVE).status().st_ctime
            return newest - (self._writers / writer / ALIVE).status().st_ctime > RETIRED_S
        return False

    def beat(self) -> None:
        """Show that this server is alive, and take the time from the file system. A time that has leapt back again
        before others could be shown it does not count. Raises OSError.
        """
        begun_s = time.monotonic()
        touched_s = _touched(self._writers / self._writer / ALIVE)
        ahead_s = touched_s - time.monotonic()
        self._beaten_s = begun_s
        if touched_s > self.own_shown_s + SHOWN_STEP_S:
            self._show(touched_s)
            if touched_s > self.own_shown_s + SHOWN_STEP_S:
                return
        self._ahead_s = (*self._ahead_s, ahead_s)[-BEATS_KEPT:]
        self.tells_whole_seconds = touched_s.is_integer()

    def _show(self, now_s: float) -> None:
        """Keep the present time of the file system as that of a file, where none keeps it: since nobody can set it, all
        servers believe it.
        """
        self.own_shown_s = self.shown_s(self._writer)
        if now_s > self.own_shown_s + SHOWN_STEP_S:
            self.own_shown_s = _touched(self._writers / self._writer / SHOWN)

    def shown_s(self, writer: str) -> float:
        """The latest time that the file system's clock has shown to a writer, in Unix seconds; none is 0."""
        try:
            return (self._writers / writer / SHOWN).status().st_ctime
        except OSError:
            return 0.0

    def is_beating(self) -> bool:
        """Whether the last sign of life is so young that nobody can take this server for a silent one yet."""
        return time.monotonic() - self._beaten_s < UNSEEN_S_MAX

    def now_s(self) -> float:
        """The Unix time of the file system: its time of a beat, and what has passed since. A beat that is answered late
        gives an earlier time, so the latest of a few counts. No leap of this machine's clock changes it.
        """
        now_s = time.monotonic()
        return max(self._ahead_s, default=time.time() - now_s) + now_s

    def note_dead(self, file_id: str) -> None:
        """Note that the file has lost its last row now. Files of others are found when their writers are retired."""
        if writer_of(file_id) != self._writer:
            return
        with self._dead_lock:
            self._dead[file_id] = time.monotonic()

    def found_dead(self, file_ids: Iterable[str]) -> None:
        """Note files without rows, where it is not known since when they have none: their time begins now."""
        with self._dead_lock:
            for file_id in file_ids:
                self._dead.setdefault(file_id, time.monotonic())

    def deletable(self, seen_s: float) -> list[str]:
        """The files that have had no row for GRACE_S. `delete` them, if still no row names them. All journals were last
        read to their ends at `seen_s`, by the steady clock. A record that names the file would have been seen by then:
        its writer has read the journals half of GRACE_S before it began to write, and has taken half for that.
        """
        now_s = time.monotonic()
        with self._dead_lock:
            return [
                file_id
                for file_id, since_s in self._dead.items()
                if now_s - since_s >= GRACE_S and seen_s >= since_s + GRACE_S
            ]

    def delete(self, due: Sequence[str], dead: Collection[str]) -> None:
        """Delete those of the files that are due and still dead, of this server and of retired ones. Those that are
        being read here go later.
        """
        ours = {writer: writer == self._writer or self.is_retired(writer) for writer in map(writer_of, due)}
        for file_id in due:
            with self._dead_lock:
                since_s = self._dead.get(file_id)
                if since_s is None or time.monotonic() - since_s < GRACE_S:
                    continue
                del self._dead[file_id]
            if file_id in dead and ours[writer_of(file_id)]:
                self.dispose(file_id)
