"""What the orchestrator writes down, and takes over when it starts again: registrations at once, sessions and blocks
about once a second, behind everything else.

The index is warm after a restart: blocks come from the file, and the engine replays its events from the first batch
that was not written down.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.metadata import CacheEntry, Metadata, RegisteredEngine
from orchestrator.rules.kv_events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, block_name, name_bytes
from orchestrator.rules.policies import Sessions
from orchestrator.rules.prefix_index import PrefixIndex
from orchestrator.settings import EngineSettings, engine_settings, registered

FLUSH_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Changes:
    """What the batches of one source have changed since the last flush."""

    next_batch: int = 0
    is_cleared: bool = False
    added: dict[bytes, bytes] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)


class Writing:
    """The metadata of one orchestrator. Used on its event loop, except where a method says otherwise."""

    def __init__(self, folder: Path, index: PrefixIndex, sessions: Sessions) -> None:
        """Raises MetadataError, OSError."""
        self.metadata = Metadata(folder)
        self._index = index
        self._changes: dict[str, _Changes] = {}
        self._sessions: dict[str, str] = {}
        self._next_batches = self.metadata.next_batches()
        self._task: asyncio.Task[None] | None = None
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
        await self._flush()
        self.metadata.close()

    def engines(self) -> list[tuple[EngineSettings, bool]]:
        """The engines that were registered, and whether each is draining."""
        return [(engine_settings(json.loads(each.settings)), each.is_draining) for each in self.metadata.engines()]

    def add_engine(self, settings: EngineSettings) -> None:
        """Register an engine. Called in a thread: it returns when the registration is on the disk."""
        self.metadata.add_engine(_registered(settings, is_draining=False))

    def remove_engine(self, name: str) -> None:
        """Forget an engine. Called in a thread."""
        self.metadata.remove_engine(name)

    def drain(self, settings: EngineSettings, is_wanted: bool) -> None:
        """Note that an engine is draining, or not any more. Called in a thread."""
        self.metadata.add_engine(_registered(settings, is_draining=is_wanted))

    def pins(self) -> dict[str, str]:
        """The pins that are not over."""
        return self.metadata.pins(time.time())

    def pin(self, prefix: str, document: Mapping[str, Any] | None) -> None:
        """Write a pin down, or forget it."""
        if document is None:
            self.metadata.remove_pin(prefix)
        else:
            self.metadata.set_pin(prefix, document["engine"], document.get("until"))

    def quotas(self) -> dict[str, Any]:
        """The quotas of tenants."""
        return {tenant: json.loads(document) for tenant, document in self.metadata.quotas().items()}

    def set_quota(self, tenant: str, document: Mapping[str, Any]) -> None:
        """Write a tenant's quota down."""
        self.metadata.set_quota(tenant, json.dumps(document))

    def warm(self, engine: str) -> dict[str, int]:
        """Fill the index with the blocks that were written down of an engine's ranks. Returns the first batch of each
        that was not written down.
        """
        found = {
            name: first for name, first in self._next_batches.items() if name == engine or name.startswith(f"{engine}#")
        }
        for name in found:
            self._index.add_engine(name)
            entries = self.metadata.entries(name)
            self._index.restore(name, ((block_name(each.block), each.prefix) for each in entries))
        return found

    def note_session(self, session: str, engine: str) -> None:
        """A session is there now."""
        self._sessions[session] = engine

    def note_batch(self, source: str, number: int, batch: Batch) -> None:
        """A batch is in the index."""
        changes = self._changes.setdefault(source, _Changes())
        changes.next_batch = number + 1
        for event in batch.events:
            match event:
                case BlockStored():
                    for name in event.names:
                        prefix = self._index.prefix_of(source, name)
                        if prefix is not None:
                            changes.added[name_bytes(name)] = prefix
                case BlockRemoved():
                    for name in event.names:
                        packed = name_bytes(name)
                        changes.added.pop(packed, None)
                        changes.removed.add(packed)
                case AllBlocksCleared():
                    self._changes[source] = changes = _Changes(number + 1, is_cleared=True)

    def cleared(self, source: str, next_batch: int) -> None:
        """The index knows nothing of a source any more: it has started anew, or its events had gaps for too long."""
        self._changes[source] = _Changes(next_batch, is_cleared=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        changes, self._changes = self._changes, {}
        sessions, self._sessions = self._sessions, {}
        if not changes and not sessions:
            return
        try:
            await asyncio.to_thread(self._write, changes, sessions)
        except (sqlite3.Error, OSError) as error:  # a full disk: what is not there comes from events again
            self.failure_count += 1
            _log.warning("the metadata could not be written: %s", error)

    def _write(self, changes: Mapping[str, _Changes], sessions: Mapping[str, str]) -> None:
        if sessions:
            self.metadata.note_sessions(sessions)
        now = time.time()
        for source, each in changes.items():
            added = [CacheEntry(source, prefix, block, used_at=now) for block, prefix in each.added.items()]
            self.metadata.note_source(source, each.next_batch, added, sorted(each.removed), is_cleared=each.is_cleared)


def _registered(settings: EngineSettings, *, is_draining: bool) -> RegisteredEngine:
    return RegisteredEngine(settings.url, settings.label, json.dumps(registered(settings)), is_draining)
