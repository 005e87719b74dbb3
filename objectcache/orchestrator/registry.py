"""The state that several orchestrators share, in etcd. A change by one of them is followed by all; while etcd cannot be
reached, everything stays as it was.

    PREFIX/engines/NAME       the engine's settings as JSON, and whether it is draining
    PREFIX/pins/BLOCK         {"engine": NAME, "until": Unix seconds or null}
    PREFIX/quotas/TENANT      the tenant's share; the name is quoted as in a URL

All of it is with a majority of etcd when it is answered. Only operators write here: no client can fill etcd.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from objectcache.adapters.breaker import back_off_s
from objectcache.adapters.etcd import CompactedError, Etcd, EtcdError
from objectcache.orchestrator.metadata_file import MetadataError
from objectcache.orchestrator.settings import EngineSettings, engine_settings, registered

ENTRY_BYTES_MAX = 16_384
ENTRIES_MAX = 16_384
"""A kind has no more entries: 10,000 pins."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
_log = logging.getLogger(__name__)
Engines = Mapping[str, tuple[EngineSettings, bool]]
"""Settings of engines by name, and whether each is draining."""
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Followers:
    """The calls that tell of changes, each with names below the kind's prefix. All engines come at once; of the others
    those that have changed, with None for what is no more.
    """

    engines: Callable[[Engines], None]
    pins: Callable[[Mapping[str, Document | None]], None]
    quotas: Callable[[Mapping[str, Document | None]], None]


class EtcdRegistry:
    """The state under a prefix of etcd. Used on one event loop."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._root = prefix.rstrip("/")
        self._engines: dict[str, tuple[EngineSettings, bool]] = {}
        self._tables: list[_Table] = []

    async def start(self, followers: Followers) -> None:
        """Read everything, tell it, and tell every change from then on. Raises MetadataError where etcd does not
        answer.
        """
        await self._etcd.start()
        self._tables = [
            _Table(self._etcd, f"{self._root}/{kind}/", on_change)
            for kind, on_change in (
                ("engines", lambda changed: followers.engines(self._taken(changed))),
                ("pins", followers.pins),
                ("quotas", lambda changed: followers.quotas({unquote(name): each for name, each in changed.items()})),
            )
        ]
        try:
            for table in self._tables:
                await table.start()
        except EtcdError as error:
            await self.close()
            raise MetadataError(f"etcd: {error}") from error

    async def close(self) -> None:
        """Listen no more."""
        tasks = [table.task for table in self._tables if table.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._etcd.close()

    async def add(self, settings: EngineSettings, *, is_draining: bool = False) -> None:
        """Register an engine. Raises MetadataError."""
        await self._put(f"engines/{settings.label}", {**registered(settings), "is_draining": is_draining})

    async def remove(self, name: str) -> None:
        """Forget an engine. Raises MetadataError."""
        await self._delete(f"engines/{name}")

    async def pin(self, prefix: str, document: Document | None) -> None:
        """Set a pin; None: take it away. Raises MetadataError."""
        if document is None:
            await self._delete(f"pins/{prefix}")
        else:
            await self._put(f"pins/{prefix}", document)

    async def set_quota(self, tenant: str, document: Document) -> None:
        """Give a tenant another share. Raises MetadataError."""
        await self._put(f"quotas/{quote(tenant, safe='')}", document)

    async def _put(self, name: str, document: Document) -> None:
        try:
            await self._etcd.put(f"{self._root}/{name}", json.dumps(document).encode())
        except EtcdError as error:
            raise MetadataError(f"etcd: {error}") from error

    async def _delete(self, name: str) -> None:
        try:
            await self._etcd.delete(f"{self._root}/{name}")
        except EtcdError as error:
            raise MetadataError(f"etcd: {error}") from error

    def _taken(self, changed: Mapping[str, Document | None]) -> Engines:
        self._engines = dict(self._engines)
        for name, document in changed.items():
            self._engines.pop(name, None)
            if document is None:
                continue
            try:
                fields = dict(document)
                is_draining = fields.pop("is_draining", False) is True
                settings = engine_settings({**fields, "name": name})
                if settings.label != name:
                    raise ValueError("it has another name than its key")
                self._engines[name] = settings, is_draining
            except ValueError as error:
                _log.warning("the entry engines/%s of etcd is no engine: %s", name, error)
        return self._engines


class _Table:
    """The entries of one kind, as JSON objects. `on_change` gets those that have changed, with None for what is no more
    and for what is no JSON object.
    """

    def __init__(self, etcd: Etcd, prefix: str, on_change: Callable[[Mapping[str, Document | None]], None]) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._on_change = on_change
        self._values: dict[str, bytes] = {}
        self._revision = 0
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read all, and follow. Raises EtcdError."""
        await self._read()
        self.task = asyncio.create_task(self._watch())

    async def _read(self) -> None:
        found = await self._etcd.range(self._prefix, ENTRIES_MAX)
        values = {entry.key.removeprefix(self._prefix): entry.value for entry in found.entries}
        gone: dict[str, Document | None] = {name: None for name in self._values if name not in values}
        changed = {name: value for name, value in values.items() if self._values.get(name) != value}
        self._values, self._revision = values, found.revision
        self._on_change(gone | {name: self._document(name, value) for name, value in changed.items()})

    async def _watch(self) -> None:
        failures = 0
        while True:
            try:
                async for changes in self._etcd.watch(self._prefix, self._revision + 1):
                    failures = 0
                    changed: dict[str, Document | None] = {}
                    for change in changes:
                        name = change.key.removeprefix(self._prefix)
                        changed[name] = self._set(name, change.value)
                        self._revision = max(self._revision, change.revision)
                    self._on_change(changed)
            except EtcdError as error:
                failures += 1
                if not isinstance(error, CompactedError):
                    _log.warning("what is under %s stays as it was: %s", self._prefix, error)
                await asyncio.sleep(back_off_s(failures, PAUSE_S_MIN, PAUSE_S_MAX))
                try:
                    await self._read()  # etcd may have been rebuilt, or compacted
                except EtcdError:
                    continue
            except Exception:  # a change that cannot be followed must not end the others
                _log.exception("following %s", self._prefix)
                await asyncio.sleep(PAUSE_S_MAX)

    def _set(self, name: str, value: bytes | None) -> Document | None:
        if value is None:
            self._values.pop(name, None)
            return None
        self._values[name] = value
        return self._document(name, value)

    def _document(self, name: str, value: bytes) -> Document | None:
        try:
            document = json.loads(value) if len(value) <= ENTRY_BYTES_MAX else None
            if not isinstance(document, dict):
                raise ValueError("it must be a JSON object of a few KiB")
        except (ValueError, RecursionError) as error:
            _log.warning("the entry %s%s of etcd does not count: %s", self._prefix, name, error)
            return None
        return document
