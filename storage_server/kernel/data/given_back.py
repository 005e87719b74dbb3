"""Giving back the space of bytes that nobody reads and no index names, in a thread of its own: readers end on the event
loop, and a file system may take long over a large file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from objectcache.adapters.beneath import Beneath
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.open_files import OpenFiles
from storage_server.kernel.data.space import Space
from storage_server.kernel.rules.pins import Freed, joined

UNDELETED_AT_ONCE = 64


class GivenBack:
    """Punches holes and deletes files, which lie at `place`, are open in `files`, and count in `space`. Methods may be
    called from any thread.
    """

    def __init__(self, place: Callable[[str], Beneath], files: OpenFiles, disk: Disk, space: Space) -> None:
        self._place = place
        self._files = files
        self._disk = disk
        self._space = space
        self._thread = ThreadPoolExecutor(1, "give-back")
        self._undeleted: list[str] = []

    def add(self, freed: Freed) -> None:
        """Have files deleted and holes punched."""
        if freed.files or freed.holes:
            try:
                self._thread.submit(partial(self._carry_out, freed))
            except RuntimeError:  # closed: the files are swept at the next start
                return

    def settle(self) -> None:
        """Wait until what can be given back now is given back."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Give back what is due."""
        self._thread.shutdown()

    def _carry_out(self, freed: Freed) -> None:
        again, self._undeleted = self._undeleted[:UNDELETED_AT_ONCE], self._undeleted[UNDELETED_AT_ONCE:]
        for file_id, offset, nbytes in joined(freed.holes):
            with contextlib.suppress(OSError):
                if self._disk.punch(self._place(file_id), offset, nbytes):
                    self._space.give_back(file_id, nbytes)
                    continue
            self._space.revive(file_id, nbytes)  # it comes back when the file is deleted
        for file_id in (*freed.files, *again):
            self._files.forget(file_id)
            try:
                self._disk.unlink(self._place(file_id))
                self._space.forget(file_id)
            except OSError:
                self._space.revive(file_id)
                self._undeleted.append(file_id)  # tried again with the next that go, or swept at the next start
