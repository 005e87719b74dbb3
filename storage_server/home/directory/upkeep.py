"""The upkeep of a shared directory: files that nobody needs are deleted, and the own journal is kept short."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from objectcache.adapters.beneath import Beneath
from storage_server.home.directory import merge
from storage_server.home.directory.files import SharedFiles
from storage_server.home.directory.following import Following
from storage_server.home.directory.journal import NAMES_MAX, OwnJournal, named_files
from storage_server.home.directory.rewriting import Rewriting
from storage_server.home.directory.rules.records import WRITER, WRITERS
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.index import queries
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.reserve import Reserve
from storage_server.kernel.index.transaction import Transaction

UPKEEP_S = 10.0
REWRITE_BYTES_MIN = 4 << 20
REWRITE_GROWTH = 2
"""A journal is written anew when it is so many times as long as the last time, and at least REWRITE_BYTES_MIN."""
REWRITE_PAUSE_S = 60.0
"""So long after a rewrite that failed the next one is tried."""
RETIRED_CHECK_S = 3600.0
_log = logging.getLogger(__name__)


class SharedUpkeep:
    """Deletes dead files of this server and of writers that have been silent for long, and writes the own journal anew
    when most of it is old. Used on one event loop.
    """

    def __init__(
        self,
        root: Path,
        writer: str,
        files: SharedFiles,
        journal: OwnJournal,
        rewriting: Rewriting,
        reserve: Reserve,
        following: Following,
        committer: Committer,
        reader: IndexReader,
        io: IoThreads,
        beside: IoThreads,
    ) -> None:
        """In the thread of `beside` it looks at what other servers have, which may hang."""
        self._root = root
        self._writer = writer
        self._files = files
        self._journal = journal
        self._rewriting = rewriting
        self._reserve = reserve
        self._following = following
        self._committer = committer
        self._reader = reader
        self._io = io
        self._beside = beside
        self.rewritten_bytes = 0
        """How long the journal was when it had been written anew."""
        self.rewrite_from_s = float("-inf")
        self.shortening = asyncio.Lock()
        """Held while the journal is written anew."""
        self._checked_retired_s = float("-inf")
        self._retired_from: dict[str, str] = {}
        """In which folder to go on with the files of writers that have very many."""

    async def run(self) -> None:
        """Do all of it now and then, until cancelled."""
        async with asyncio.TaskGroup() as works:
            works.create_task(self._repeat(self._keep_own))
            works.create_task(self._repeat(self._look_at_others))

    async def _keep_own(self) -> None:
        await self.delete_dead()
        await self.shorten_journal()

    async def _look_at_others(self) -> None:
        await self.find_retired()
        await self._beside.run(self._files.open.close_deleted)

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except ObjectCacheError as error:
                _log.warning("the shared directory: %s", error)
            except Exception:
                _log.exception("the shared directory; it goes on after this")
            await asyncio.sleep(UPKEEP_S)

    async def delete_dead(self) -> None:
        """Delete what has been dead for GRACE_S, if no journal that was read since then names it, the own one among
        them.
        """

        def unnamed(tx: Transaction) -> list[str]:
            try:
                self._journal.require_known()
            except OSError as error:
                raise ServerError(ErrorCode.INTERNAL_ERROR, f"no file is deleted: {error}", retryable=True) from error
            return merge.unnamed(tx.db, due)

        if not self._files.deletable(math.inf):
            return
        await self._following.read_journals()
        due = self._files.deletable(self._following.whole_s)
        if due:
            dead = await self._committer.commit(unnamed)
            await self._io.run(lambda: self._files.delete(due, dead))

    async def find_retired(self) -> None:
        """Find the dead files of writers that have been silent for long. Only files that a journal has named are
        touched: of others nobody knows what they are.
        """
        if time.monotonic() - self._checked_retired_s < RETIRED_CHECK_S:
            return
        self._checked_retired_s = time.monotonic()
        once_named = await self._beside.run(self._files_of_retired)
        if once_named:
            named = await self._reader.threaded(queries.file_ids)
            self._files.found_dead(once_named - named)

    def _files_of_retired(self) -> set[str]:
        """The files of retired writers that are there, and that their journals name: of those with very many files
        some, and the next time others.
        """
        found, self._retired_from, go_on = set[str](), {}, self._retired_from
        writers = Beneath(self._root, WRITERS)
        for writer in writers.first_names(NAMES_MAX)[0]:
            if not WRITER.match(writer) or not self._files.is_retired(writer):
                continue
            try:
                stored, folder = self._files.some_stored(writer, go_on.get(writer, ""), NAMES_MAX)
                if folder is not None:
                    self._retired_from[writer] = folder
                found |= named_files(writers / writer, stored) or set()
            except OSError as error:  # of the others is known what is known
                _log.warning("the files of the silent server %s stay: %s", writer, error)
        return found

    async def shorten_journal(self) -> None:
        """Write the journal anew where most of it may be old."""
        await self._committer.commit(lambda tx: self._reserve.keep(), frees=True)
        async with self.shortening:
            await self._shorten_if_long()

    async def _shorten_if_long(self) -> None:
        journal = self._journal
        if journal.end < max(REWRITE_BYTES_MIN, REWRITE_GROWTH * self.rewritten_bytes):
            return
        if time.monotonic() < self.rewrite_from_s:
            return
        if await self._rewriting.run():
            self.rewritten_bytes = journal.end
            await self._following.forget_older(self._writer, journal.generation)
        else:
            self.rewrite_from_s = time.monotonic() + REWRITE_PAUSE_S
