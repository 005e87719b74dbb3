"""Reading the other writers' journals into the index."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from objectcache.adapters.beneath import Beneath
from objectcache.adapters.threads import let_others_run
from storage_server.home.directory import merge
from storage_server.home.directory.journal import (
    NAMES_MAX,
    STEP_BYTES,
    STEP_ROWS,
    JournalPlace,
    ReadJournal,
    read_front,
    read_journal,
)
from storage_server.home.directory.journal_problems import JournalProblems
from storage_server.home.directory.journal_thread import JournalThread
from storage_server.home.directory.late_journals import LateJournals
from storage_server.home.directory.rules.clock import StampClock
from storage_server.home.directory.rules.records import TOO_LATE, WRITER, WRITERS
from storage_server.home.directory.rules.shares import Shares
from storage_server.home.service import OnChanged, Shown
from storage_server.kernel.index.committer import Committer, index_error
from storage_server.kernel.index.transaction import Transaction

LATE_ROWS = 4_000
"""So much of a late journal is read at once, and so long as that took it is left alone then."""
IN_VAIN_BYTES_MAX = 64 << 10
"""A journal of which more was read, and nothing is new, has no claim to be waited for once its share is spent."""
FURTHER_US = 60_000_000
"""A journal with a stamp of the future is read again where such a stamp may be so many microseconds later than before.
"""
TOLD_AT_ONCE = 500
"""The event loop hears of so many changes in a few milliseconds."""
RENEWALS_WAITED_FOR = 2
"""A journal that is written anew more often in one pass, or at a start, is left behind as a late one."""
LATE_AFTER = 0.25
"""A pass that takes this part of the callers' patience leaves those behind of which there is more to read: a call waits
for two passes, and shares do not know how fast this machine is.
"""
QUICK_PART = 0.25
"""A late journal is waited for again when its end is read in this part of the time after which a read is given up. A
journal that answers later would be given up again and again, and each time all calls would have waited for it.
"""
_HANGS = "a read of it hangs"
_log = logging.getLogger(__name__)


class Following:
    """Follows the journals beneath `root` other than that of `writer`. `clock` is told of every stamp, in the
    committer's thread. `shown_s` gives the latest time that a writer has seen. Used on one event loop.
    """

    def __init__(
        self,
        root: Path,
        writer: str,
        committer: Committer,
        clock: StampClock,
        patience_s: float,
        shown_s: Callable[[str], float],
    ) -> None:
        self._root = root
        self._writer = writer
        self._committer = committer
        self._clock = clock
        self._patience_s = patience_s
        self._shown_s = shown_s
        self._thread = JournalThread(LATE_AFTER * patience_s, self._leave_behind)
        self._places: dict[str, JournalPlace] = {}
        self._shares = Shares()
        self._late = LateJournals(self._read_late, self._tell_changes)
        """Writers that have used up what is waited for, until they are read to their ends."""
        self._fronts: dict[str, tuple[JournalPlace, int]] = {}
        """For writers whose generation was begun behind its front: how far the front is read, and where it ends. It
        ends where reading was begun, behind the snapshot, since the snapshot may have an older record of a thing.
        """
        self._front_readers = LateJournals(self._read_front, self._tell_changes)
        self.problems = JournalProblems()
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
        self._listed: frozenset[str] = frozenset()
        """The writers that have a folder, as the last pass has found them."""
        self._renewals: Counter[str] = Counter()
        """How often each journal was written anew during this pass."""

    async def start(self, positions: dict[str, tuple[int, int]]) -> None:
        """Go on from these positions, and read all that is there now, however long it takes. Raises ServerError."""
        self._places = {writer: JournalPlace(*position) for writer, position in positions.items()}
        await self._pass_behind(None, is_start=True)

    async def close(self) -> None:
        """Stop."""
        for task in (self._running, self._next):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._late.close()
        await self._front_readers.close()
        self._thread.close()

    async def run(self, poll_s: float) -> None:
        """Make a pass every `poll_s`, until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                await self._read_all()
            except ObjectCacheError as error:
                _log.warning("the journals of the shared directory: %s", error)

    async def read_journals(self, since_s: float | None = None) -> None:
        """On return the index has all that was in the journals when this was called, or at `since_s` by the steady
        clock, but for those of writers that are late. Raises ServerError, SlowDown where the directory does not answer,
        or cannot read a journal for a moment.
        """
        if since_s is None or self.begun_s < since_s:
            await self._read_all()
        self.problems.require_answers()

    async def _read_all(self) -> None:
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

    def require_whole(self) -> None:
        """Raises ServerError(SlowDown) where the last pass has not read every journal to its end."""
        if self.whole_s < self.begun_s:
            problem = "a journal of the shared directory cannot be read to its end: nothing in it may be deleted unseen"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)

    async def _pass_behind(self, running: asyncio.Task[None] | None, *, is_start: bool = False) -> None:
        if running is not None:
            await asyncio.wait([running])
        if self._next is not None:
            self._running, self._next = self._next, None
        begun_s = time.monotonic()
        sizes = dict[str, tuple[int, int]]()
        self._renewals.clear()
        until_s = math.inf if is_start else begun_s + LATE_AFTER * self._patience_s
        waiting = await self._step(None, sizes, until_s)
        while waiting:
            await self._tell_changes()  # which takes as long as reading
            waiting = await self._step(waiting, sizes, until_s)
        if not self.problems.count:
            if self._outdated_s is not None and begun_s >= self._outdated_s:  # what replaces the older is read, too
                await self._forget_outdated()
                self._outdated_s = None
            self.whole_s = begun_s
        self.begun_s = begun_s
        await self._tell_changes()

    async def _step(self, waiting: list[str] | None, sizes: dict[str, tuple[int, int]], until_s: float) -> list[str]:
        """Read a piece of the journals of these writers, None for all, and carry it out; the writers that are still to
        be waited for. From `until_s` on, a writer that has more than the piece that was read is left behind. `sizes`
        has the generations and sizes that were seen first in this pass: so far it reads.
        """
        is_start = math.isinf(until_s)
        read, left_out = await self._thread.run(partial(self._read, waiting))
        if waiting is None:
            self._forget_gone()
        await self._carry_out(read)
        unread = list[str]()
        for journal in read:
            now_s, end = time.monotonic(), journal.end
            if not is_start:
                self._shares.spend(journal.writer, journal.row_count, journal.nbytes, now_s)
            generation, size = sizes.setdefault(journal.writer, (end.generation, journal.size))
            if end.generation > generation:
                generation, size = sizes[journal.writer] = end.generation, journal.size
                self._renewals[journal.writer] += 1
            if journal.is_whole or (end.generation == generation and end.position >= size):
                is_vain = journal.nbytes > IN_VAIN_BYTES_MAX and not journal.pieces
                if is_vain and not (is_start or self._shares.is_waited_for(journal.writer, now_s)):
                    self._leave_behind(journal.writer)
                continue
            is_renewed = self._renewals[journal.writer] > RENEWALS_WAITED_FOR
            if is_renewed or not (is_start or self._shares.is_waited_for(journal.writer, now_s)):
                self._leave_behind(journal.writer)
            elif journal.problem is None and journal.pieces:
                if now_s < until_s:
                    unread.append(journal.writer)
                else:
                    self._leave_behind(journal.writer)
        return left_out + unread

    def _read(self, waiting: list[str] | None) -> tuple[list[ReadJournal], list[str]]:
        """Pieces of the journals, together not much more than a step; and the writers that were left out."""
        writers = Beneath(self._root, WRITERS)
        late, hanging = self._late.writers.copy(), self._thread.hanging
        if waiting is None:
            names, are_all = writers.first_names(NAMES_MAX)
            found_writers = frozenset(filter(WRITER.match, names)) | {self._writer}
            self._listed = found_writers if are_all else found_writers | set(self._places) | self.problems.writers
            self.problems.note_crowd(is_crowded=not are_all)
            waiting = sorted(self._listed - late - {self._writer})
        found, budget_bytes, budget_rows = list[ReadJournal](), STEP_BYTES, STEP_ROWS
        for number, name in enumerate(waiting):
            if budget_bytes <= 0 or budget_rows <= 0:
                return found, waiting[number:]
            if name in hanging:
                place = self._places.get(name, JournalPlace())
                since_s = hanging[name]
                found.append(
                    ReadJournal(name, place, problem=_HANGS, error_number=errno.ETIMEDOUT, hangs_since_s=since_s)
                )
                continue
            self._thread.begin(name)
            journal = self._read_on(writers / name, budget_bytes, budget_rows)
            found.append(journal)
            budget_bytes -= journal.nbytes
            budget_rows -= journal.row_count
        return found, []

    def _read_on(self, folder: Beneath, budget_bytes: int, budget_rows: int) -> ReadJournal:
        place, latest = self._places.get(folder.name, JournalPlace()), self._clock.latest
        try:
            journal = read_journal(folder, place, budget_bytes, budget_rows, latest)
            if journal.problem is not None and journal.problem.endswith(TOO_LATE):
                self._clock.note_shown(self._shown_s(folder.name))  # its time may have been shown all the same
                if self._clock.latest > latest + FURTHER_US:
                    journal = read_journal(folder, place, budget_bytes, budget_rows, self._clock.latest)
        except OSError as error:
            return ReadJournal(folder.name, place, problem=str(error), error_number=error.errno or 0)
        if not (journal.is_whole or journal.pieces or journal.problem):
            journal.problem = "its newest generation is not there"
        return journal

    async def _carry_out(self, read: Iterable[ReadJournal]) -> None:
        """Carry out what was read."""
        read = list(read)
        self.problems.note(read, self._late.writers)
        found = [journal for journal in read if _is_news(journal, self._places.get(journal.writer, JournalPlace()))]
        if not found:
            return
        for journal in found:
            self.problems.note_passed_over(journal.writer, journal.passed_over)

        def carry_out(tx: Transaction) -> list[list[Shown]]:
            return [self._applied(tx, journal) for journal in found]

        for journal, changed in zip(found, await self._committer.commit(carry_out, frees=True), strict=True):
            generation = self._places.get(journal.writer, JournalPlace()).generation
            if generation not in (0, journal.end.generation):
                self._outdated_s = time.monotonic()
                self._fronts.pop(journal.writer, None)
                if journal.front:
                    self._fronts[journal.writer] = JournalPlace(journal.end.generation), journal.front
                    self._front_readers.add(journal.writer)
            self._places[journal.writer] = journal.end
            self._untold += changed

    def _forget_gone(self) -> None:
        """Somebody has cleared folders of writers up: nothing more comes from these, and nothing waits for them."""
        self.problems.keep(self._listed, self._late.writers - self._listed)
        self._late.writers &= self._listed
        self._places = {writer: place for writer, place in self._places.items() if writer in self._listed}
        self._fronts = {writer: front for writer, front in self._fronts.items() if writer in self._listed}
        self._shares.keep(self._listed)

    def _leave_behind(self, writer: str) -> None:
        """Nobody waits for this writer's journal until it is read to its end."""
        self.problems.note_late(writer)
        self._late.add(writer)

    async def _read_late(self, writer: str) -> ReadJournal:
        """Read a piece of a late journal, and carry it out."""
        folder, begun_s = Beneath(self._root, WRITERS) / writer, time.monotonic()
        journal = await self._late.threads.run_on((writer,), lambda: self._read_on(folder, STEP_BYTES, LATE_ROWS))
        is_quick = time.monotonic() - begun_s < QUICK_PART * LATE_AFTER * self._patience_s
        await self._carry_out([journal])
        if journal.is_whole and is_quick and self.problems.has_claim(writer):
            self._late.writers.discard(writer)
            self.problems.note_read(writer)
        return journal

    async def _read_front(self, writer: str) -> ReadJournal:
        """Read a piece of a front, and carry it out: it says what was known, and of what no record is left."""
        if writer not in self._fronts:
            self._front_readers.writers.discard(writer)
            return ReadJournal(writer, JournalPlace())
        place, front = self._fronts[writer]
        reading = partial(read_front, Beneath(self._root, WRITERS) / writer, place, front, STEP_BYTES, LATE_ROWS)
        try:
            journal = await self._front_readers.threads.run_on((writer,), lambda: reading(self._clock.latest))
        except OSError:  # a newer generation has come, or it is tried again
            return ReadJournal(writer, place)
        self.problems.note_passed_over(writer, journal.passed_over)

        def apply(tx: Transaction) -> list[Shown]:
            changed = _apply_pieces(tx, journal, self._clock)
            reached = self._places.get(writer, JournalPlace())
            if journal.is_whole and reached.generation == journal.end.generation:
                merge.note_position(tx.db, writer, reached.generation, reached.position)
            return changed

        self._untold += await self._committer.commit(apply, frees=True)
        if self._fronts.get(writer) == (place, front):
            self._fronts[writer] = journal.end, front
            if journal.is_whole:
                del self._fronts[writer]
                self._outdated_s = time.monotonic()
        return journal

    def _applied(self, tx: Transaction, journal: ReadJournal) -> list[Shown]:
        """Carry the pieces out; what shows something else now. Until its front is read, a new generation is not written
        down as begun: after a restart, and in a release before, it is found from the generation before once more.
        """
        changed = _apply_pieces(tx, journal, self._clock)
        front = self._fronts.get(journal.writer)
        if not (journal.front or (front is not None and front[0].generation == journal.end.generation)):
            merge.note_position(tx.db, journal.writer, journal.end.generation, journal.end.position)
        return changed

    async def _tell_changes(self) -> None:
        """Tell what has changed, some at a time. Changes that could not be told are told after the next pass."""
        untold, self._untold = self._untold, []
        if self.on_changed is None:
            return
        for start in range(0, len(untold), TOLD_AT_ONCE):
            await let_others_run(start)
            try:
                await self.on_changed(untold[start : start + TOLD_AT_ONCE])
            except ObjectCacheError as error:
                self._untold = untold[start:] + self._untold
                _log.warning("the cache could not be told what others have changed: %s", error)
                return

    async def _forget_outdated(self) -> None:
        for writer, generation in await self._committer.commit(lambda tx: merge.outdated(tx.db), frees=True):
            if writer not in self.problems.spoiled:
                await self.forget_older(writer, generation)

    async def forget_older(self, writer: str, generation: int) -> None:
        """Forget what only older generations of a writer's journal had, in changes that others wait for shortly."""
        is_more = True
        while is_more:
            change = partial(merge.forget_older, writer=writer, generation=generation)
            changed, is_more = await self._committer.commit(change, frees=True)
            self._untold += changed


def _is_news(journal: ReadJournal, known: JournalPlace) -> bool:
    """Whether there is anything to carry out or to write down of a journal that was known up to this place."""
    place = max(known.generation, 1), known.position
    is_elsewhere = journal.problem is None and (journal.start.generation, journal.start.position) != place
    return bool(journal.pieces) or is_elsewhere


def _apply_pieces(tx: Transaction, journal: ReadJournal, clock: StampClock) -> list[Shown]:
    changed = list[Shown]()
    if journal.passed_over.count:
        merge.note_passed_over(tx.db, journal.writer)
    for place, records in journal.pieces:
        clock.observe(max((record.stamp for record in records), default=0))
        changed += merge.apply(tx, journal.writer, place.generation, records, time.time())
    return changed
