"""Writing the own journal anew under the next generation, where most of it may be old. Other changes go on meanwhile:
the new generation is made from a snapshot of the index, and what the journal takes after that is copied behind it.

    snapshot at 900 bytes   new: what the index shows then | bytes 900 to 1,100 of the journal | … it counts
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from descriptors.errors import ServerError
from storage_server.home.directory import merge
from storage_server.home.directory.journal import OwnJournal, Rewrite
from storage_server.home.directory.rules.records import BadRecordError, Record, framed
from storage_server.home.directory.rules.succession import Succession
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.schema import connect_current
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import Touched

GONE_KEPT_S = 86_400.0
"""For so long a deletion stays in the journal in any case: another journal that has not been read yet may have what it
deletes.
"""
MARKED_AT_ONCE = 500
TAIL_FEW = 2_000
TAIL_ROUNDS_MAX = 8
"""The tail becomes shorter from round to round, unless more is written than can be copied."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Finished:
    """A generation that counts since this transaction. All up to `end` is in the index; `taken` is still to be noted
    as of this generation.
    """

    generation: int
    end: int
    taken: list[Touched]


class Rewriting:
    """Rewrites of one journal, one at a time."""

    def __init__(self, index: Path, writer: str, journal: OwnJournal, committer: Committer, io: IoThreads) -> None:
        self._index = index
        self._writer = writer
        self._journal = journal
        self._committer = committer
        self._io = io
        self._tail: list[Touched] | None = None
        """The things that the journal has taken since the snapshot; None while nothing is written anew. A change may be
        carried out several times, so none shortens it.
        """
        self._noted_count = 0
        """How many of the tail are noted as of the new generation."""
        self._snapshot: sqlite3.Connection | None = None
        self._finished: _Finished | None = None

    def note(self, records: Iterable[Record]) -> None:
        """The journal has taken these. Called in the committer's thread."""
        if self._tail is not None:
            self._tail += [record.about for record in records]

    async def run(self) -> bool:
        """Write the journal anew; whether that worked."""
        try:
            position = await self._committer.commit(self._begin, frees=True)
            if self._snapshot is None:
                return False
            rewrite, kept = await self._io.run(partial(self._write, self._snapshot))
            try:
                succession = Succession(rewrite.generation, position, rewrite.end)
                await self._mark(rewrite, kept)
                position = await self._shorten_tail(rewrite, position)
                coming = partial(merge.note_coming, generation=rewrite.generation + 1, end=rewrite.end)
                await self._committer.commit(lambda tx: coming(tx.db), frees=True)
                finish = partial(self._finish, rewrite=rewrite, position=position, succession=succession)
                await self._committer.commit(finish, frees=True)
            finally:
                await self._io.run(partial(self._journal.give_up, rewrite))
        except (OSError, BadRecordError, ServerError) as error:
            _log.warning("the journal of the shared directory could not be written anew: %s", error)
            return False
        finally:
            self._tail = self._finished = None
            self._drop_snapshot()
        return True

    async def _shorten_tail(self, rewrite: Rewrite, position: int) -> int:
        """Copy what the journal takes meanwhile, until what is left to be copied at the end is little; how far it is
        copied.
        """
        for _ in range(TAIL_ROUNDS_MAX):
            end, taken = await self._committer.commit(self._taken, frees=True)
            await self._io.run(partial(self._copy, rewrite, position, end))
            await self._mark(rewrite, deque[merge.Named](taken))
            self._noted_count += len(taken)
            position = end
            if len(taken) <= TAIL_FEW:
                break
        return position

    def caught_up(self, tx: Transaction) -> int:
        """How much of the journal's present generation the index has, where a transaction that ended one without its
        commit had noted that. Called in the committer's thread.
        """
        if self._finished is None or self._finished.generation != self._journal.generation:
            return 0
        merge.note_rewritten(tx.db, self._writer, self._finished.generation, self._finished.taken)
        return self._finished.end

    def _begin(self, tx: Transaction) -> int:
        """How far the journal was before this transaction, and in `_snapshot` a connection that sees the index as it
        was then. None is there where the journal has something that the index has not yet.
        """
        self._drop_snapshot()
        snapshot = self._committed()
        if snapshot is not None:
            self._tail, self._noted_count, self._snapshot = [], 0, snapshot
        return self._journal.end

    def _committed(self) -> sqlite3.Connection | None:
        """A connection that sees what is committed, where that is all that the journal has."""
        connection = connect_current(self._index)
        connection.execute("BEGIN")
        if merge.positions(connection).get(self._writer) == (self._journal.generation, self._journal.end):
            return connection
        connection.close()
        return None

    def _drop_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def _write(self, snapshot: sqlite3.Connection) -> tuple[Rewrite, deque[merge.Named]]:
        """In a thread: the front of the new generation, and what it has."""
        noted = deque[merge.Named]()

        def noting() -> Iterator[Record]:
            for record in merge.kept(snapshot, self._writer, time.time() - GONE_KEPT_S):
                about = record.about
                noted.append((about.kind, about.name, about.key))
                yield record

        return self._journal.begin_rewrite(framed(noting())), noted

    def _copy(self, rewrite: Rewrite, start: int, end: int) -> None:
        self._journal.add(rewrite, self._journal.tail(start, end))

    def _taken(self, tx: Transaction) -> tuple[int, list[Touched]]:
        """How far the journal is now, and what it has taken up to there that is not noted yet."""
        return self._journal.end, (self._tail or [])[self._noted_count :]

    async def _mark(self, rewrite: Rewrite, abouts: deque[merge.Named]) -> None:
        """Note before it counts what the new generation has: a kill between the two must not make it look older. Names
        are dropped bit by bit, since no other thread runs while a list of a million is freed.
        """
        while abouts:
            part = [abouts.popleft() for _ in range(min(MARKED_AT_ONCE, len(abouts)))]
            note = partial(merge.note_rewritten, writer=self._writer, generation=rewrite.generation + 1, kept=part)
            await self._committer.commit(lambda tx: note(tx.db), frees=True)  # noqa: B023

    def _finish(self, tx: Transaction, rewrite: Rewrite, position: int, succession: Succession) -> None:
        """Make it count. Where the transaction is carried out again, this is done already."""
        if self._finished is not None:
            return
        committed = self._committed()
        if committed is None:
            raise OSError(errno.EAGAIN, "the index does not have all of the journal")
        committed.close()
        _, taken = self._taken(tx)
        self._copy(rewrite, position, self._journal.end)
        self._journal.finish_rewrite(rewrite, succession)
        self._finished = _Finished(self._journal.generation, self._journal.end, taken)
        merge.note_rewritten(tx.db, self._writer, self._journal.generation, taken)
        merge.note_position(tx.db, self._writer, self._journal.generation, self._journal.end)
