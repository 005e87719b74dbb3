"""Giving back the space of bytes that nobody reads and no index names, in a thread of its own: readers end on the event
loop, and a file system may take long over a large file. While one file hangs, others are given back.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from objectcache.adapters.beneath import Beneath
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.open_files import OpenFiles
from storage_server.kernel.data.replaceable_threads import (
    SPARE_THREADS,
    ReplaceableThreads,
    SlowCalls,
    SlowCallsThread,
    ThreadCall,
)
from storage_server.kernel.data.space import Space
from storage_server.kernel.rules.pins import Freed, joined
from storage_server.kernel.rules.thread_turns import SEVERAL, ThreadTurns, TurnBounds

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
        turns: ThreadTurns[ThreadCall] = ThreadTurns(TurnBounds(1, 1, 1))
        self._threads = ReplaceableThreads(1, "give-back", turns)
        self._slow = SlowCallsThread(SlowCalls(self._threads, SPARE_THREADS))
        self._undeleted = deque[str]()

    def add(self, freed: Freed) -> None:
        """Have files deleted and holes punched."""
        if freed.files or freed.holes:
            with contextlib.suppress(RuntimeError):  # closed: the files are swept at the next start
                self._submit(partial(self._carry_out, freed))

    def settle(self) -> None:
        """Wait until what can be given back now is given back."""
        self._submit(lambda: None).result.result()
        for call in self._threads.running():  # slow ones are not over when the last one is
            call.result.exception()

    def close(self) -> None:
        """Give back what is due."""
        self._threads.close()

    def _submit(self, action: Callable[[], None]) -> ThreadCall:
        call = ThreadCall(SEVERAL, action)
        self._threads.submit(call)
        self._slow.watch()
        return call

    def _carry_out(self, freed: Freed) -> None:
        again = list(self._some_undeleted())
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

    def _some_undeleted(self) -> Iterator[str]:
        with contextlib.suppress(IndexError):
            for _ in range(UNDELETED_AT_ONCE):
                yield self._undeleted.popleft()
