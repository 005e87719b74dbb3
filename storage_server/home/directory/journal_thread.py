"""The thread that reads the journals of other writers. A journal whose file hangs keeps its thread, and nobody else."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from storage_server.kernel.data.disk import disk_error

LEAST_PATIENCE = 0.25
"""This part of the patience a journal has in any case: a machine may be slow, too."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class GivenUpError(Exception):
    """Nobody waits for this reading any more."""


@dataclass(eq=False, slots=True)
class _Reading:
    """Some journals that are read, one behind the other: the writer whose turn it is, and since when."""

    since_s: float = field(default_factory=time.monotonic)
    writer: str | None = None
    is_given_up: bool = False


class JournalThread:
    """Reads in one thread. A journal that does not answer within `patience_s` is given up with its thread, and another
    thread goes on: nobody is to read that journal until it has answered. The more journals hang, the sooner a further
    one is given up, since they may all lie on one disk. Used on one event loop, but for `begin`.
    """

    def __init__(self, patience_s: float, on_answer: Callable[[str], None] = lambda writer: None) -> None:
        """`on_answer` is told when a journal that was given up answers after all: what was read of it is lost."""
        self._patience_s = patience_s
        self._on_answer = on_answer
        self._pool = ThreadPoolExecutor(1, "journals")
        self._own = threading.local()
        self.hanging: Mapping[str, float] = {}
        """The writers whose journals do not answer, and since when. Replaced, and never changed: threads look at it."""

    def begin(self, writer: str) -> None:
        """This thread reads the journal of that writer from now on. Raises GivenUpError where nobody waits for it."""
        reading: _Reading | None = getattr(self._own, "reading", None)
        if reading is None:
            return
        if reading.is_given_up:
            raise GivenUpError
        reading.writer, reading.since_s = writer, time.monotonic()

    async def run(self, read: Callable[[], _T]) -> _T:
        """Call `read`, and return what it returns. It tells of each journal by `begin`, and passes those by that are
        `hanging`. Where one hangs now, it is called again. Raises ServerError.
        """
        while True:
            reading = _Reading()
            done = asyncio.get_running_loop().run_in_executor(self._pool, self._read, reading, read)
            if await self._answers(done, reading):
                try:
                    return done.result()
                except OSError as error:
                    raise disk_error(error, "serving the request") from error

    def close(self) -> None:
        """Finish running work, but for journals that hang."""
        self._pool.shutdown()

    def _read(self, reading: _Reading, read: Callable[[], _T]) -> _T:
        self._own.reading = reading
        reading.since_s = time.monotonic()
        return read()

    async def _answers(self, done: asyncio.Future[_T], reading: _Reading) -> bool:
        """Wait until it is done, and whether it is; else its journal hangs."""
        while not done.done():
            patience_s = self._patience_s * max(LEAST_PATIENCE, 1 / (1 + len(self.hanging)))
            left_s = reading.since_s + patience_s - time.monotonic()
            if left_s <= 0 and reading.writer is not None:
                self._give_up(done, reading, reading.writer)
                return False
            await asyncio.wait([done], timeout=left_s if left_s > 0 else patience_s)
        return True

    def _give_up(self, done: asyncio.Future[_T], reading: _Reading, writer: str) -> None:
        _log.warning("the journal of %s does not answer: it is read on when it does", writer)
        reading.is_given_up = True
        self.hanging = {**self.hanging, writer: reading.since_s}
        self._pool.shutdown(wait=False)
        self._pool = ThreadPoolExecutor(1, "journals")

        def answered(done: asyncio.Future[_T]) -> None:
            if not done.cancelled():
                done.exception()
            self.hanging = {name: since_s for name, since_s in self.hanging.items() if name != writer}
            self._on_answer(writer)

        done.add_done_callback(answered)
