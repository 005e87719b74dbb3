"""Space that commits have freed, until it may be given back: files that no row names, and holes in others."""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from storage_server.kernel.rules.pins import Hole


class FreedSpace:
    """Files go to `dispose`, and holes to `punch`, `punch_delay_s` after the commit that freed them is durable: readers
    in other processes have had time to end by then. Used by one thread.
    """

    def __init__(
        self, dispose: Callable[[str], None], punch: Callable[[Sequence[Hole]], None], punch_delay_s: float
    ) -> None:
        self._dispose = dispose
        self._punch = punch
        self._punch_delay_s = punch_delay_s
        self._files: list[str] = []
        self._holes: list[Hole] = []
        self._due: deque[tuple[float, Hole]] = deque()

    @property
    def is_waiting(self) -> bool:
        """Whether holes wait for their time."""
        return bool(self._due)

    def add(self, files: Iterable[str], holes: Iterable[Hole] = ()) -> None:
        """Note what a commit has freed, which is not durable yet."""
        self._files += files
        self._holes += holes

    def note_durable(self, db: sqlite3.Connection) -> None:
        """The commits are durable: dispose of the files that have no row still; a segment may have got new ones."""
        while self._files:
            file_id = self._files[-1]
            if db.execute("SELECT 1 FROM extents WHERE file_id = ? LIMIT 1", (file_id,)).fetchone() is None:
                self._dispose(file_id)
            self._files.pop()
        due_s = time.monotonic() + self._punch_delay_s
        self._due.extend((due_s, hole) for hole in self._holes)
        self._holes.clear()

    def punch_due(self) -> None:
        """Give the holes back whose time has come."""
        now_s = time.monotonic()
        due: list[Hole] = []
        while self._due and self._due[0][0] <= now_s:
            due.append(self._due.popleft()[1])
        self._punch(due)
