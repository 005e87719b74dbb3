"""Problems with the journals of a shared directory. The log is told of them in a few lines a minute."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Sequence

from descriptors.errors import ErrorCode, ServerError
from storage_server.home.directory.journal import NAMES_MAX, ReadJournal
from storage_server.home.directory.rules.records import PassedOver
from storage_server.home.directory.rules.unanswered import UnansweredJournals

_LATE = "it has more than others may be kept waiting for, and is read beside"
_LINES_PER_MINUTE = 10
_NUMBER = re.compile(r"\d+")
_log = logging.getLogger(__name__)


class _Lines:
    """The lines that the log is told in a minute."""

    def __init__(self) -> None:
        self._minute_s = float("-inf")
        self._count = 0

    def is_due(self, now_s: float) -> bool:
        """Whether one more may be told, which is counted."""
        if now_s - self._minute_s >= 60.0:
            self._minute_s, self._count = now_s, 0
        self._count += 1
        return self._count <= _LINES_PER_MINUTE


class _ToldProblems:
    """Which problem of which journal the log has been told: each kind once, in a few lines a minute."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._lines = _Lines()

    def is_due(self, writer: str, problem: str, now_s: float) -> bool:
        """Whether the log is to be told of it now. Problems that differ in numbers alone are of one kind."""
        kind = _NUMBER.sub("", problem)
        if self._kinds.get(writer) == kind:
            return False
        if not self._lines.is_due(now_s):
            return False
        self._kinds[writer] = kind
        return True

    def forget(self, writer: str) -> None:
        """The journal has no problem any more."""
        self._kinds.pop(writer, None)


class JournalProblems:
    """Journals that cannot be read to their ends, or are late. Used on one event loop, but for what says otherwise."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._told, self._told_records = _ToldProblems(), _ToldProblems()
        self._lines = _Lines()
        self._unanswered = UnansweredJournals()
        self._is_crowded = False
        """Whether there are more names beside the writers' folders than are looked at, so that some may be missing."""
        self.spoiled: set[str] = set()
        """Writers with records that were passed over: what these say is not known to be gone."""
        self.bad_record_count = 0
        """How many records were passed over because they make no sense."""

    @property
    def count(self) -> int:
        """How many journals have one."""
        return len(self._problems) + self._is_crowded

    @property
    def writers(self) -> set[str]:
        """Those whose journals have one."""
        return set(self._problems)

    def note(self, read: Sequence[ReadJournal], late: Collection[str]) -> None:
        """Note how reading has gone; `late` writers have a problem until they are read to their ends."""
        now_s = time.monotonic()
        for journal in read:
            self._unanswered.note(journal.writer, journal.error_number, now_s, journal.hangs_since_s)
            if journal.problem is None:
                if journal.writer not in late:
                    self._problems.pop(journal.writer, None)
                    self._told.forget(journal.writer)
                continue
            if self._told.is_due(journal.writer, journal.problem, now_s):
                _log.warning("the journal of %s can be read no further: %s", journal.writer, journal.problem)
            self._problems[journal.writer] = journal.problem

    def note_late(self, writer: str) -> None:
        """A journal has more than others may be kept waiting for."""
        if self._problems.get(writer) != _LATE:
            self._say("the journal of %s: %s", writer, _LATE)
            self._problems[writer] = _LATE

    def has_claim(self, writer: str) -> bool:
        """Whether a late journal that is read to its end may be waited for again."""
        return self._unanswered.has_claim(writer, time.monotonic())

    def note_read(self, writer: str) -> None:
        """A late journal is read to its end."""
        self._problems.pop(writer, None)
        self._say("the journal of %s is read to its end again", writer)

    def note_crowd(self, *, is_crowded: bool) -> None:
        """Note whether the folder of writers has more names than are looked at. May be called from another thread."""
        if self._is_crowded != is_crowded:
            self._is_crowded = is_crowded
            _log.warning("the folder of writers has %s than %d names", "more" if is_crowded else "fewer", NAMES_MAX)

    def note_passed_over(self, writer: str, passed_over: PassedOver) -> None:
        """Count records that were passed over, and tell of the first one. May be called from the committer's thread."""
        self.bad_record_count += passed_over.count
        if passed_over.count:
            self.spoiled.add(writer)
        if passed_over.first is not None and self._told_records.is_due(writer, passed_over.first[1], time.monotonic()):
            offset, reason = passed_over.first
            problem = (
                "the journal of %s: %d records that make no sense are passed over; the first, at offset %d, has %s"
            )
            _log.warning(problem, writer, passed_over.count, offset, reason)

    def keep(self, writers: Collection[str], late: Collection[str]) -> None:
        """Forget all others: somebody has cleared their folders up. `late` ones of them were waited for, too."""
        gone = {*late, *(writer for writer in self._problems if writer not in writers)}
        if gone:
            self._say("the folders of %d writers are gone, with their journals: %s …", len(gone), min(gone))
        for writer in gone:
            self._problems.pop(writer, None)
            self._told.forget(writer)
        self.spoiled.intersection_update(writers)
        self._unanswered.keep(writers)

    def require_answers(self) -> None:
        """Raises ServerError(SlowDown) where a journal cannot be read for a moment: it may have what is asked for."""
        writer = self._unanswered.waited_for(time.monotonic())
        if writer is not None:
            problem = f"the journal of {writer} in the shared directory does not answer: {self._problems.get(writer)}"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)

    def _say(self, line: str, *values: object) -> None:
        if self._lines.is_due(time.monotonic()):
            _log.warning(line, *values)
