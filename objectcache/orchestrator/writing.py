"""The orchestrator's state on the disk, which it takes over when it starts again: registrations at once, sessions and
blocks about once a second, behind everything else.

The index is warm after a restart: blocks come from the file, and the engine replays its events from the first batch
that was not written down.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.orchestrator.metadata import Metadata, RegisteredEngine
from objectcache.orchestrator.metadata_blocks import CacheEntry
from objectcache.orchestrator.metadata_file import DamagedMetadataError, MetadataError
from objectcache.orchestrator.restoring import restored
from objectcache.orchestrator.rules.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KnownBatch,
    name_bytes,
)
from objectcache.orchestrator.rules.policies import SESSIONS_MAX, Sessions
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import RANK_MARK, EngineSettings, engine_settings, registered

FLUSH_S = 1.0
WARM_S = 5.0
"""An engine that joins waits so long for the disk in all: its blocks there save time, and its requests must not wait
for them.
"""
FAILURES_MAX = 60
"""After so many failures in a row sessions are not kept any longer: they must not fill the memory."""
HELD_MAX = 250_000
"""Blocks of a source that wait to be written. Of one with more, nothing is known after a restart."""
HELD_ALL_MAX = 1_000_000
"""Blocks of all sources that wait because the disk is full, or hangs."""
SESSIONS = "sessions"
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Changes:
    """The changes by the batches of one source since the last flush."""

    known: KnownBatch | None = None
    is_cleared: bool = False
    added: dict[bytes, bytes] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)

    @property
    def count(self) -> int:
        """The blocks that changed."""
        return len(self.added) + len(self.removed)

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is left of the source when these are written."""
        return self.is_cleared and self.known is None and not self.added

    def go_on(self, later: _Changes) -> None:
        """Take those over that came since these could not be written. It takes as long as there are later ones: these
        may be very many, and are taken up once a second.
        """
        self.known = later.known
        if later.is_cleared:
            self.is_cleared, self.added, self.removed = True, later.added, later.removed
            return
        for block in later.removed:
            self.added.pop(block, None)
        self.added.update(later.added)
        self.removed |= later.removed


class Writing:
    """The metadata of one orchestrator. Used on its event loop, except where a method says otherwise."""

    def __init__(self, folder: Path, index: PrefixIndex, sessions: Sessions) -> None:
        """Raises MetadataError, OSError."""
        self.metadata = Metadata(folder)
        self._index = index
        self._changes: dict[str, _Changes] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        """Those that wait to be written, at most SESSIONS_MAX: clients make their names up, and a disk may hang."""
        self._flushing = asyncio.Lock()
        self._flush_began_s = 0.0
        self._written = self.metadata.blocks.sources()
        """The sources of which something may be in the file."""
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "objectcache-metadata")
        """Calls wait for each other anyway. On a disk that hangs they must not take the threads that probes need."""
        self._late: asyncio.Future[int] | None = None
        """It is done when the disk has given what the last engine that joined without its blocks has waited for."""
        self._warnings = RareWarnings(_log)
        self.failure_count = 0
        for session, engine in self.metadata.sessions():
            sessions.note(session, engine)

    def start(self) -> None:
        """Begin to write down what changes."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write down the rest, and close the file."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()
        self._thread.shutdown()
        self.metadata.close()

    def engines(self) -> list[tuple[EngineSettings, bool]]:
        """The engines that were registered, and whether each is draining. One that cannot be read here, since another
        release has written it, stays where it is.
        """
        found: list[tuple[EngineSettings, bool]] = []
        for each in self.metadata.engines():
            try:
                found.append((engine_settings(json.loads(each.settings)), each.is_draining))
            except (ValueError, RecursionError) as error:
                _log.warning("the engine %s of the metadata cannot be read: %s", each.name, error)
        return found

    async def add_engine(self, settings: EngineSettings, *, is_draining: bool = False) -> None:
        """Register an engine: on the disk when this returns. Raises MetadataError."""
        made = RegisteredEngine(settings.url, settings.label, json.dumps(registered(settings)), is_draining)
        await self._in_thread(self.metadata.add_engine, made)

    async def remove_engine(self, name: str) -> None:
        """Forget an engine, and what waits to be written of it."""
        async with self._flushing:
            for source in _of_engine(self._changes, name):
                del self._changes[source]
            self._sessions = OrderedDict(each for each in self._sessions.items() if each[1] != name)
            await self._in_thread(self.metadata.remove_engine, name)
            self._written.difference_update(_of_engine(self._written, name))

    async def drain(self, name: str, *, is_wanted: bool) -> None:
        """Note that an engine is draining, or not any more."""
        await self._in_thread(lambda: self.metadata.set_draining(name, is_draining=is_wanted))

    async def pin(self, prefix: str, engine: str | None, until: float | None) -> None:
        """Write a pin down, or forget it."""
        if engine is None:
            await self._in_thread(self.metadata.remove_pin, prefix)
        else:
            await self._in_thread(self.metadata.set_pin, prefix, engine, until)

    async def set_quota(self, tenant: str, document: Mapping[str, Any]) -> None:
        """Write a tenant's quota down."""
        await self._in_thread(self.metadata.set_quota, tenant, json.dumps(document))

    async def warm(self, engine: str) -> dict[str, KnownBatch]:
        """Fill the index with the blocks that were written down of an engine's ranks. Returns the last batch of each
        that was written down. Where the disk hangs or fails, or has so many that they take WARM_S, nothing is known,
        and the file forgets the engine's blocks: whoever comes and goes waits for the engine.
        """
        try:
            if self._late is not None and not self._late.done():
                raise TimeoutError  # engines join one after the other, and the disk has let one wait already
            async with asyncio.timeout(WARM_S):
                batches = await self._batches()
                known = [
                    name
                    for name in _of_engine(batches, engine)
                    if not (name in self._changes and self._changes[name].is_cleared)
                ]
                page_of = partial(self._in_thread, self.metadata.blocks.page)
                found = await restored(self._index, known, page_of)
        except (TimeoutError, MetadataError) as error:
            problem = str(error) or f"the disk has not given them in {WARM_S:g} s"
            self._warnings.warn("%.300r joins without the blocks that were written down: %.300r", engine, problem)
            for name in self._index.names_of(engine):
                self._index.clear(name)
            known, found = _of_engine(self._written, engine), set()
            if self._late is None or self._late.done():
                self._late = asyncio.get_running_loop().run_in_executor(self._thread, int)
        for name in known:
            if name not in found:
                self.cleared(name)
        return {name: KnownBatch(*batches[name]) for name in found}

    async def _batches(self) -> dict[str, tuple[int, float]]:
        """For each source the last batch, when all that waits is written. Raises TimeoutError, MetadataError."""
        if self._flushing.locked() and time.monotonic() - self._flush_began_s >= WARM_S:
            raise TimeoutError
        flushing = asyncio.create_task(self.flush())  # to its end: what it has taken to write is nowhere else
        await asyncio.wait((flushing,))
        flushing.result()
        return await self._in_thread(self.metadata.blocks.batches)

    def forget_others(self, engines: Collection[str]) -> None:
        """Have the file forget the blocks of all engines but these: each one that is replaced by another would leave
        its own there for good.
        """
        for source in self._written | self._changes.keys():
            if source.partition(RANK_MARK)[0] not in engines:
                self.cleared(source)

    async def _in_thread(self, work: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def note_session(self, session: str, engine: str) -> None:
        """A session is there now."""
        self._sessions[session] = engine
        self._sessions.move_to_end(session)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)

    def note_part(self, source: str, part: Event) -> None:
        """Blocks that were stored are in the index, and blocks that are removed are in it still: names that it does not
        hold are not written down. Where more changes than can be written, the file forgets the source.
        """
        changes = self._changes.setdefault(source, _Changes())
        match part:
            case BlockStored():
                for name in map(name_bytes, part.names):
                    prefix = self._index.prefix_of(source, name)
                    if prefix is not None:
                        changes.added[name] = prefix
            case BlockRemoved():
                for name in map(name_bytes, part.names):
                    if self._index.prefix_of(source, name) is not None:
                        changes.added.pop(name, None)
                        changes.removed.add(name)
            case AllBlocksCleared():
                self._changes[source] = _Changes(changes.known, is_cleared=True)
        if changes.count > HELD_MAX:
            self._changes[source] = _Changes(is_cleared=True)

    def note_batch(self, source: str, number: int, sent_at: float) -> None:
        """All parts of a batch were noted."""
        self._changes.setdefault(source, _Changes()).known = KnownBatch(number, sent_at)

    def cleared(self, source: str) -> None:
        """The index knows nothing of a source any more: it has started anew, or its events had gaps for too long."""
        self._changes[source] = _Changes(is_cleared=True)

    async def flush(self) -> None:
        """Write down what waits. Changes that cannot be written wait on."""
        async with self._flushing:
            self._flush_began_s = time.monotonic()
            changes, self._changes = self._changes, {}
            sessions, self._sessions = self._sessions, OrderedDict()
            if not changes and not sessions:
                return
            self._written |= changes.keys()  # also while it hangs: it may come into the file later
            failed = await self._in_thread(self._write, changes, sessions)
            self._written.difference_update(
                source for source, each in changes.items() if each.is_nothing and source not in failed
            )
            if not failed:
                self.failure_count = 0
                return
            self.failure_count += 1
            names = ", ".join(sorted(failed))
            _log.warning("%.300s could not be written, and is tried again: %r", names, next(iter(failed.values())))
            if SESSIONS in failed:
                later, self._sessions = self._sessions, sessions
                for session, engine in later.items():
                    self.note_session(session, engine)
                if self.failure_count >= FAILURES_MAX:
                    self._sessions.clear()
            for source in changes.keys() & failed.keys():
                kept = changes[source]
                if source in self._changes:
                    kept.go_on(self._changes[source])
                self._changes[source] = kept if kept.count <= HELD_MAX else _Changes(is_cleared=True)
            _give_up_beyond(HELD_ALL_MAX, self._changes)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            flushing = asyncio.create_task(self.flush())
            while not flushing.done():  # on a disk that hangs it may never be
                await asyncio.wait((flushing,), timeout=FLUSH_S)
                _give_up_beyond(HELD_ALL_MAX, self._changes)
            flushing.result()

    def _write(self, changes: Mapping[str, _Changes], sessions: Mapping[str, str]) -> dict[str, Exception]:
        """The changes that could not be written, with the reason. Bad changes of one engine keep nothing of others from
        the disk. Where the file cannot be written, nothing larger is tried.
        """
        failed: dict[str, Exception] = {}
        now = time.time()
        try:
            if sessions:
                self.metadata.note_sessions(sessions)
        except Exception as error:  # a full disk, for example
            failed[SESSIONS] = error
        by_count = sorted(changes, key=lambda source: changes[source].count)
        for at, source in enumerate(by_count):
            each = changes[source]
            added = [CacheEntry(source, prefix, block, used_at=now) for block, prefix in each.added.items()]
            known = None if each.known is None else (each.known.number, each.known.sent_at)
            try:
                self.metadata.blocks.note_source(source, known, added, list(each.removed), is_cleared=each.is_cleared)
            except MetadataError as error:
                if not isinstance(error, DamagedMetadataError):
                    return {**failed, **dict.fromkeys(by_count[at:], error)}
                failed[source] = error
            except Exception as error:
                failed[source] = error
        return failed


def _of_engine(sources: Iterable[str], engine: str) -> list[str]:
    """Those of these sources that are data-parallel ranks of an engine."""
    return [each for each in sources if each == engine or each.startswith(f"{engine}#")]


def _give_up_beyond(held_max: int, changes: dict[str, _Changes]) -> None:
    """Where all sources have more changes, those with most are forgotten."""
    held = sum(each.count for each in changes.values())
    for source in sorted(changes, key=lambda each: changes[each].count, reverse=True):
        if held <= held_max:
            return
        held -= changes[source].count
        changes[source] = _Changes(is_cleared=True)
