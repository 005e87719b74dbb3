"""Reading the other writers' journals into the index."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from storage_server.shared_files import merge
from storage_server.shared_files.journal import ReadJournal
from storage_server.shared_files.records import WRITER, Record
from storage_server.store.data.io_threads import IoThreads
from storage_server.store.index.committer import Committer
from storage_server.store.index.transaction import Transaction
from storage_server.upstream.service import OnChanged, Shown

UNKNOWN_UPLOAD_POLLS_MAX = 16
_log = logging.getLogger(__name__)


class Following:
    """Follows the journals beneath `root` other than that of `writer`. `on_changed` is told what shows something else.
    Used on one event loop.
    """

    def __init__(
        self, root: Path, writer: str, committer: Committer, observe: Callable[[int], None], patience_s: float
    ) -> None:
        self._root = root
        self._writer = writer
        self._committer = committer
        self._observe = observe
        self._patience_s = patience_s
        self._io = IoThreads(1)
        self._positions: dict[str, tuple[int, int]] = {}
        self._problems: dict[str, str] = {}
        self._unknown_uploads: dict[str, tuple[tuple[int, int], int]] = {}
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self.on_changed: OnChanged | None = None
        self.begun_s = float("-inf")
        """When the last pass that was carried out began, by the steady clock."""

    @property
    def problem_count(self) -> int:
        """How many journals cannot be read to their ends."""
        return len(self._problems)

    def start(self, positions: dict[str, tuple[int, int]]) -> None:
        """Go on from these positions."""
        self._positions = dict(positions)

    async def close(self) -> None:
        """Stop."""
        for task in (self._running, self._next):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._io.close()

    async def run(self, poll_s: float) -> None:
        """Make a pass every `poll_s`, until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                await self.fresh()
            except ObjectCacheError as error:
                _log.warning("the journals of the shared directory: %s", error)
            except Exception:
                _log.exception("the journals of the shared directory could not be read; it is tried again")

    async def fresh(self, since_s: float | None = None) -> None:
        """On return the index has all that was in the journals when this was called, or at `since_s` by the steady
        clock. Raises ServerError, SlowDown where the directory does not answer.
        """
        if since_s is not None and self.begun_s >= since_s:
            return
        if self._next is None:
            self._next = asyncio.create_task(self._pass_behind(self._running))
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(self._next)
        except TimeoutError:
            problem = "the shared directory does not answer"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True) from None

    async def _pass_behind(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        begun_s = time.monotonic()
        while not await self._step():
            pass
        self.begun_s = begun_s

    async def _step(self) -> bool:
        """Read a piece of each journal and carry it out; whether all were read to their ends."""
        read = await self._io.run(self._read)
        found = [journal for journal in read if self._is_news(journal)]
        self._note_problems(read)
        if not found:
            return True
        is_whole = all(journal.is_whole for journal in found)

        def carry_out(tx: Transaction) -> list[tuple[ReadJournal, int, list[Shown]]]:
            return [(journal, *self._applied(tx, journal)) for journal in found]

        changed: list[Shown] = []
        for journal, position, touched in await self._committer.commit(carry_out, frees=True):
            self._positions[journal.writer] = (journal.generation, position)
            changed += touched
            is_whole = is_whole and not (journal.frames and position == journal.start)
        if changed and self.on_changed is not None:
            await self.on_changed(changed)
        return is_whole or not any(self._has_moved(journal) for journal in found)

    def _read(self) -> list[ReadJournal]:
        folders = [
            path for path in (self._root / "writers").iterdir() if WRITER.match(path.name) and path.name != self._writer
        ]
        found = []
        for folder in folders:
            try:
                found.append(ReadJournal(folder, *self._positions.get(folder.name, (0, 0))))
            except OSError as error:
                self._say(folder.name, str(error))
        return found

    def _is_news(self, journal: ReadJournal) -> bool:
        generation, position = self._positions.get(journal.writer, (0, 0))
        return bool(journal.frames) or (journal.generation, journal.start) != (max(generation, 1), position)

    def _has_moved(self, journal: ReadJournal) -> bool:
        return self._positions[journal.writer] != (journal.generation, journal.start)

    def _applied(self, tx: Transaction, journal: ReadJournal) -> tuple[int, list[Shown]]:
        """Carry the frames out; where the last one of them ends, and what shows something else."""
        position, changed = journal.start, list[Shown]()
        for end, records in journal.frames:
            self._observe(max((record.stamp for record in records), default=0))
            try:
                with tx.step():
                    changed += merge.apply(tx, journal.writer, journal.generation, records)
            except merge.UnknownUploadError:
                if not self._gives_up(journal, position):
                    break
                changed += self._without_parts(tx, journal, records)
            position = end
        if journal.is_whole and journal.problem is None and (not journal.frames or position == journal.frames[-1][0]):
            merge.forget_older(tx.db, journal.writer, journal.generation)
        merge.note_position(tx.db, journal.writer, journal.generation, position)
        return position, changed

    def _without_parts(self, tx: Transaction, journal: ReadJournal, records: Sequence[Record]) -> list[Shown]:
        others = [record for record in records if record.about.kind != "part"]
        return merge.apply(tx, journal.writer, journal.generation, others)

    def _gives_up(self, journal: ReadJournal, position: int) -> bool:
        """Whether the upload of a part was waited for long enough: its journal is lost."""
        place = journal.generation, position
        known, count = self._unknown_uploads.get(journal.writer, (place, 0))
        count = count + 1 if known == place else 1
        self._unknown_uploads[journal.writer] = place, count
        return count > UNKNOWN_UPLOAD_POLLS_MAX

    def _note_problems(self, read: Sequence[ReadJournal]) -> None:
        for journal in read:
            if journal.problem is None:
                self._problems.pop(journal.writer, None)
            else:
                self._say(journal.writer, journal.problem)

    def _say(self, writer: str, problem: str) -> None:
        if self._problems.get(writer) != problem:
            _log.warning("the journal of %s can be read no further: %s", writer, problem)
        self._problems[writer] = problem
