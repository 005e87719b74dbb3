"""Reading the other writers' journals into the index."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from objectcache.adapters.beneath import Beneath
from storage_server.shared_files import merge
from storage_server.shared_files.clock import StampClock
from storage_server.shared_files.journal import STEP_BYTES, ReadJournal, read_journal
from storage_server.shared_files.records import WRITER, WRITERS
from storage_server.store.data.io_threads import IoThreads
from storage_server.store.index.committer import Committer, index_error
from storage_server.store.index.transaction import Transaction
from storage_server.upstream.service import OnChanged, Shown

_log = logging.getLogger(__name__)


class Following:
    """Follows the journals beneath `root` other than that of `writer`. `clock` is told of every stamp, in the
    committer's thread. Used on one event loop.
    """

    def __init__(self, root: Path, writer: str, committer: Committer, clock: StampClock, patience_s: float) -> None:
        self._root = root
        self._writer = writer
        self._committer = committer
        self._clock = clock
        self._patience_s = patience_s
        self._io = IoThreads(1)
        self._positions: dict[str, tuple[int, int]] = {}
        self._problems: dict[str, str] = {}
        self._untold: list[Shown] = []
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._outdated_s: float | None = float("-inf")
        self.on_changed: OnChanged | None = None
        """Told what shows something else, until it does not fail."""
        self.begun_s = float("-inf")
        """When the last pass that was carried out began, by the steady clock."""
        self.whole_s = float("-inf")
        """When the last pass began that read every journal to its end."""
        self._spoiled: set[str] = set()
        """Writers with records that were passed over: what these say is not known to be gone."""
        self.bad_record_count = 0
        """How many records were passed over because they make no sense."""

    @property
    def problem_count(self) -> int:
        """How many journals cannot be read to their ends."""
        return len(self._problems)

    async def start(self, positions: dict[str, tuple[int, int]]) -> None:
        """Go on from these positions, and read everything, however long it takes. Raises ServerError."""
        self._positions = dict(positions)
        await self._pass_behind(None)

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
                await self.read_journals()
            except ObjectCacheError as error:
                _log.warning("the journals of the shared directory: %s", error)

    async def read_journals(self, since_s: float | None = None) -> None:
        """On return the index has all that was in the journals when this was called, or at `since_s` by the steady
        clock. Raises ServerError, SlowDown where the directory does not answer.
        """
        if since_s is not None and self.begun_s >= since_s:
            return
        if self._next is None:
            self._next = asyncio.create_task(self._pass_behind(self._running))
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(self._next)
        except TimeoutError:
            problem = "the shared directory does not answer"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True) from None
        except ObjectCacheError:
            raise
        except Exception as error:
            _log.exception("the journals of the shared directory could not be read; it is tried again")
            raise index_error(error) from error

    async def _pass_behind(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        if self._next is not None:
            self._running, self._next = self._next, None
        begun_s = time.monotonic()
        while await self._apply_next_piece():
            pass
        if not self._problems:
            if self._outdated_s is not None and begun_s >= self._outdated_s:  # what replaces the older is read, too
                self._untold += await self._committer.commit(self._forget_outdated, frees=True)
                self._outdated_s = None
            self.whole_s = begun_s
        self.begun_s = begun_s
        await self._tell_changes()

    async def _apply_next_piece(self) -> bool:
        """Read a piece of the journals and carry it out; whether there may be more."""
        read, has_more = await self._io.run(self._read)
        self._note_problems(read)
        found = [journal for journal in read if self._is_news(journal)]
        if not found:
            return False
        for journal in found:
            self.note_bad(journal.writer, journal.bad_count, journal.first_bad)

        def carry_out(tx: Transaction) -> list[tuple[ReadJournal, int, list[Shown]]]:
            return [(journal, *self._applied(tx, journal)) for journal in found]

        for journal, position, changed in await self._committer.commit(carry_out, frees=True):
            generation, _ = self._positions.get(journal.writer, (0, 0))
            if generation not in (0, journal.generation):
                self._outdated_s = time.monotonic()
            self._positions[journal.writer] = journal.generation, position
            self._untold += changed
        return has_more or not all(journal.is_whole or journal.problem for journal in found)

    def _read(self) -> tuple[list[ReadJournal], bool]:
        """Pieces of the journals, together not much more than STEP_BYTES; and whether others were left out."""
        writers = Beneath(self._root, WRITERS)
        folders = [writers / name for name in writers.names() if WRITER.match(name) and name != self._writer]
        found, budget_bytes = list[ReadJournal](), STEP_BYTES
        for folder in folders:
            try:
                position = self._positions.get(folder.name, (0, 0))
                journal = read_journal(folder, *position, budget_bytes, self._clock.latest)
                if not (journal.is_whole or journal.frames or journal.problem):
                    journal.problem = "its newest generation is not there"
            except OSError as error:
                journal = ReadJournal(folder.name, problem=str(error))
            found.append(journal)
            budget_bytes -= journal.nbytes
            if budget_bytes <= 0:
                return found, True
        return found, False

    def _is_news(self, journal: ReadJournal) -> bool:
        if journal.frames:
            return True
        generation, position = self._positions.get(journal.writer, (0, 0))
        return journal.problem is None and (journal.generation, journal.start) != (max(generation, 1), position)

    def _applied(self, tx: Transaction, journal: ReadJournal) -> tuple[int, list[Shown]]:
        """Carry the frames out; where the last one of them ends, and what shows something else."""
        position, changed = journal.start, list[Shown]()
        for end, records in journal.frames:
            self._clock.observe(max((record.stamp for record in records), default=0))
            changed += merge.apply(tx, journal.writer, journal.generation, records, time.time())
            position = end
        merge.note_position(tx.db, journal.writer, journal.generation, position)
        return position, changed

    async def _tell_changes(self) -> None:
        """Tell what has changed. Changes that could not be told are told after the next pass."""
        untold, self._untold = self._untold, []
        if not untold or self.on_changed is None:
            return
        try:
            await self.on_changed(untold)
        except ObjectCacheError as error:
            self._untold = untold + self._untold
            _log.warning("the cache could not be told what others have changed: %s", error)

    def note_bad(self, writer: str, count: int, first: tuple[int, str] | None) -> None:
        """Count records that were passed over, and tell of the first one. May be called from the committer's thread."""
        self.bad_record_count += count
        if count:
            self._spoiled.add(writer)
        if first is not None:
            offset, reason = first
            problem = (
                "the journal of %s: %d records that make no sense are passed over; the first, at offset %d, has %s"
            )
            _log.warning(problem, writer, count, offset, reason)

    def _note_problems(self, read: list[ReadJournal]) -> None:
        for journal in read:
            if journal.problem is None:
                self._problems.pop(journal.writer, None)
                continue
            if self._problems.get(journal.writer) != journal.problem:
                _log.warning("the journal of %s can be read no further: %s", journal.writer, journal.problem)
            self._problems[journal.writer] = journal.problem

    def _forget_outdated(self, tx: Transaction) -> list[Shown]:
        changed = list[Shown]()
        for writer, generation in merge.outdated(tx.db):
            if writer not in self._spoiled:
                changed += merge.forget_older(tx, writer, generation)
        return changed
