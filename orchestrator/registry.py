"""The state that several orchestrators share, in etcd. A change by one of them is followed by all; while etcd cannot be
reached, everything stays as it was.

    PREFIX/engines/NAME       the engine's settings as JSON, and whether it is draining
    PREFIX/pins/BLOCK         {"engine": NAME, "until": Unix seconds or null}
    PREFIX/quotas/TENANT      the tenant's share; the name is quoted as in a URL
    PREFIX/sessions/HASH      {"session": NAME, "engine": NAME}, with a lease

Registrations, pins and quotas are with a majority of etcd when they are answered. Sessions are written behind, about
once a second, because they only decide among equal engines.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import Any
from urllib.parse import quote, unquote

from adapters.breaker import back_off_s
from adapters.etcd import CompactedError, Etcd, EtcdError
from orchestrator.metadata import MetadataError
from orchestrator.settings import EngineSettings, engine_settings, registered

ENTRY_BYTES_MAX = 16_384
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
FLUSH_S = 1.0
SESSIONS_AT_ONCE = 50
"""Sessions that an orchestrator writes in a second; those beyond stay its own, so that nobody can fill etcd."""
SESSION_LEASE_S, SESSION_LEASE_USED_S = 1800, 600.0
"""Sessions are written with a lease that is so old at most, and again where the last time was so long ago."""
SESSIONS_KNOWN_MAX = 100_000
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
    session: Callable[[str, str], None]


class EtcdRegistry:
    """The state under a prefix of etcd. Used on one event loop."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._root = prefix.rstrip("/")
        self._engines: dict[str, tuple[EngineSettings, bool]] = {}
        self._tables: list[_Table] = []
        self._writer: asyncio.Task[None] | None = None
        self._sessions: dict[str, str] = {}
        self._written: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lease, self._leased_s = 0, 0.0

    @property
    def is_connected(self) -> bool:
        """Whether etcd says what changes."""
        return bool(self._tables) and all(table.is_connected for table in self._tables)

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
                ("sessions", lambda changed: self._follow_sessions(changed, followers.session)),
            )
        ]
        try:
            for table in self._tables:
                await table.start()
        except EtcdError as error:
            await self.close()
            raise MetadataError(f"etcd: {error}") from error
        self._writer = asyncio.create_task(self._write_sessions())

    async def close(self) -> None:
        """Listen no more."""
        tasks = [task for task in (self._writer, *(table.task for table in self._tables)) if task is not None]
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

    def note_session(self, session: str, engine: str) -> None:
        """A session is there now: written with the next ones, if the others do not know it."""
        known = self._written.get(session)
        is_known = known is not None and known[0] == engine and monotonic() - known[1] < SESSION_LEASE_USED_S
        if not is_known and (session in self._sessions or len(self._sessions) < SESSIONS_AT_ONCE):
            self._sessions[session] = engine

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
                self._engines[name] = engine_settings({**fields, "name": name}), is_draining
            except ValueError as error:
                _log.warning("the entry engines/%s of etcd is no engine: %s", name, error)
        return self._engines

    def _follow_sessions(self, changed: Mapping[str, Document | None], follow: Callable[[str, str], None]) -> None:
        for document in changed.values():
            session, engine = (None, None) if document is None else (document.get("session"), document.get("engine"))
            if isinstance(session, str) and isinstance(engine, str) and session not in self._sessions:
                self._know(session, engine)
                follow(session, engine)

    def _know(self, session: str, engine: str) -> None:
        self._written[session] = engine, monotonic()
        self._written.move_to_end(session)
        if len(self._written) > SESSIONS_KNOWN_MAX:
            self._written.popitem(last=False)

    async def _write_sessions(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            sessions, self._sessions = self._sessions, {}
            try:
                for session, engine in sessions.items():
                    if not self._lease or monotonic() - self._leased_s > SESSION_LEASE_USED_S:
                        self._lease, self._leased_s = await self._etcd.grant(SESSION_LEASE_S), monotonic()
                    value = json.dumps({"session": session, "engine": engine}).encode()
                    if len(value) <= ENTRY_BYTES_MAX:
                        name = blake2b(json.dumps(session).encode(), digest_size=16).hexdigest()  # any text can be one
                        await self._etcd.put(f"{self._root}/sessions/{name}", value, self._lease)
                        self._know(session, engine)
            except EtcdError as error:
                self._lease = 0
                _log.info("sessions are not shared now: %s", error)


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
        self.is_connected = False

    async def start(self) -> None:
        """Read all, and follow. Raises EtcdError."""
        await self._read()
        self.task = asyncio.create_task(self._watch())

    async def _read(self) -> None:
        found = await self._etcd.range(self._prefix)
        values = {entry.key.removeprefix(self._prefix): entry.value for entry in found.entries}
        gone: dict[str, Document | None] = {name: None for name in self._values if name not in values}
        changed = {name: value for name, value in values.items() if self._values.get(name) != value}
        self._values, self._revision, self.is_connected = values, found.revision, True
        self._on_change(gone | {name: self._document(name, value) for name, value in changed.items()})

    async def _watch(self) -> None:
        failures = 0
        while True:
            try:
                async for changes in self._etcd.watch(self._prefix, self._revision + 1):
                    self.is_connected, failures = True, 0
                    changed: dict[str, Document | None] = {}
                    for change in changes:
                        name = change.key.removeprefix(self._prefix)
                        changed[name] = self._set(name, change.value)
                        self._revision = max(self._revision, change.revision)
                    self._on_change(changed)
            except EtcdError as error:
                self.is_connected = False
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
