"""The state that several orchestrators share, in etcd. A change by one of them is followed by all; while etcd cannot be
reached, everything stays as it was.

    PREFIX/engines/NAME       the engine's settings as JSON, and whether it is draining
    PREFIX/pins/BLOCK         {"engine": NAME, "until": Unix seconds or null}
    PREFIX/quotas/TENANT      the tenant's share; the name is quoted as in a URL

All of it is with a majority of etcd when it is answered. Only operators write here: no client can fill etcd. Entries
that an etcd has lost, since it was rebuilt or restored from a backup, count on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote

from objectcache.adapters.breaker import back_off_s
from objectcache.adapters.etcd import CompactedError, Etcd, EtcdError, QuietWatchError
from objectcache.adapters.etcd_updates import update
from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.orchestrator.metadata_file import MetadataError
from objectcache.orchestrator.settings import BIND, EngineSettings, engine_settings, registered

ENTRY_BYTES_MAX = 16_384
ENTRIES_MAX = 16_384
"""A kind has no more entries: 10,000 pins."""
NAME_CHARACTERS_MAX = 2048
"""An entry with a longer name below its kind does not count: names of tenants are quoted."""
TOLD_AT_ONCE = 64
"""So many entries are read without giving the event loop a turn."""
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
        self._warnings = RareWarnings(_log)

    async def start(self, followers: Followers) -> None:
        """Read everything, tell it, and tell every change from then on. Raises MetadataError where etcd does not
        answer.
        """
        await self._etcd.start()
        self._tables = [
            _Table(self._etcd, f"{self._root}/{kind}/", on_change, self._warnings)
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

    async def add(self, settings: EngineSettings) -> None:
        """Register an engine. One that is registered anew goes on draining, as another orchestrator may have been told.
        Raises MetadataError; ValueError for one whose events are not to be had by TCP.
        """
        _require_tcp(settings)

        def changed(before: bytes | None) -> bytes:
            is_draining = before is not None and _fields_of(before).get("is_draining") is True
            return json.dumps({**registered(settings), "is_draining": is_draining}).encode()

        await self._update(f"engines/{settings.label}", changed)

    async def drain(self, name: str, *, is_wanted: bool) -> None:
        """Have an engine drain, or not any more, with the settings that it has in etcd: another orchestrator may just
        have written others. Raises MetadataError, KeyError.
        """

        def changed(before: bytes | None) -> bytes:
            fields = {} if before is None else _fields_of(before)
            if not fields:
                raise KeyError(name)
            return json.dumps({**fields, "is_draining": is_wanted}).encode()

        await self._update(f"engines/{name}", changed)

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

    async def _update(self, name: str, changed: Callable[[bytes | None], bytes]) -> None:
        try:
            await update(self._etcd, f"{self._root}/{name}", changed)
        except EtcdError as error:
            raise MetadataError(f"etcd: {error}") from error

    async def _delete(self, name: str) -> None:
        """Delete an entry. One that etcd has lost is written first: nobody would be told of its end."""
        key = f"{self._root}/{name}"
        try:
            if not await self._etcd.delete(key):
                await self._etcd.put(key, b"{}")
                await self._etcd.delete(key)
        except EtcdError as error:
            raise MetadataError(f"etcd: {error}") from error

    def _taken(self, changed: Mapping[str, Document | None]) -> Engines:
        """The engines by now. An entry that cannot be read, since a later release has written it, takes no engine away
        that is known here: it has the settings of before.
        """
        self._engines = dict(self._engines)
        for name, document in changed.items():
            if document is None:
                self._engines.pop(name, None)
                continue
            fields = dict(document)
            is_draining = fields.pop("is_draining", False) is True
            try:
                settings = engine_settings({**fields, "name": name})
                if settings.label != name:
                    raise ValueError("it has another name than its key")
                _require_tcp(settings)
                self._engines[name] = settings, is_draining
            except ValueError as error:
                self._warnings.warn("the entry %.300r of etcd is no engine: %.300r", name, str(error))
                if name in self._engines:
                    self._engines[name] = self._engines[name][0], is_draining
        return self._engines


def _fields_of(value: bytes) -> dict[str, Any]:
    """The fields of an entry; none of one that is no JSON object, which anybody may have written."""
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _require_tcp(settings: EngineSettings) -> None:
    """An entry names no file: a Unix socket that is bound takes the place of the one that is there, which may be a
    storage server's. Raises ValueError.
    """
    for endpoint in (settings.events, settings.replay):
        if endpoint is not None and not endpoint.removeprefix(BIND).startswith("tcp://"):
            raise ValueError("events and replay of an engine in the registry must be tcp://HOST:PORT")


class _Table:
    """The entries of one kind, as JSON objects. `on_change` gets those that have changed, some at a time, with None for
    what is no more and for what is no JSON object. A writer to etcd chooses how many there are, and how long.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        on_change: Callable[[Mapping[str, Document | None]], None],
        warnings: RareWarnings,
    ) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._on_change = on_change
        self._warnings = warnings
        self._digests: dict[str, bytes] = {}
        """By names: of the values that were told, or do not count."""
        self._revision = self._etcd_id = 0
        self._lost: set[str] = set()
        """Entries that count on, although etcd has gone back and has them no more."""
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read all, and follow. Raises EtcdError."""
        await self._read()
        self.task = asyncio.create_task(self._watch())

    async def _read(self) -> None:
        """Read all. An etcd that was rebuilt, or restored from a backup, takes nothing away: nobody has deleted the
        entries that are missing there, and without its engines nobody would be served.
        """
        found = await self._etcd.range(self._prefix, ENTRIES_MAX)
        values: dict[str, bytes | None] = {entry.key.removeprefix(self._prefix): entry.value for entry in found.entries}
        missing = self._digests.keys() - values.keys() - self._lost
        if self._etcd_id and (found.cluster_id != self._etcd_id or found.revision < self._revision):
            self._lost |= missing
            if missing:
                problem = "etcd has gone back: %d entries under %s that it has no more count on until they are deleted"
                _log.warning(problem, len(missing), self._prefix)
            missing = set()
        self._revision, self._etcd_id = found.revision, found.cluster_id
        await self._tell(dict.fromkeys(missing) | values)

    async def _watch(self) -> None:
        """Follow until cancelled, whatever etcd answers. A watch without a change for long is begun anew."""
        failures = 0
        is_current, is_told = True, False
        while True:
            try:
                if not is_current:
                    await self._read()  # etcd may have been rebuilt, or compacted
                    is_current, is_told = True, False
                async for changes in self._etcd.watch(self._prefix, self._revision + 1, self._etcd_id):
                    failures = 0
                    self._revision = max(self._revision, *(change.revision for change in changes))
                    await self._tell({change.key.removeprefix(self._prefix): change.value for change in changes})
            except (CompactedError, QuietWatchError):
                failures = 0
            except EtcdError as error:
                if not is_told:
                    _log.warning("what is under %s stays as it was: %.300r", self._prefix, str(error))
                is_told = True
            except Exception as error:  # a change that cannot be followed must not end the others
                self._warnings.warn("what is under %s cannot be followed", self._prefix, error=error)
            is_current = False
            failures += 1
            await asyncio.sleep(back_off_s(failures, PAUSE_S_MIN, PAUSE_S_MAX))

    async def _tell(self, values: Mapping[str, bytes | None]) -> None:
        """Tell of those that have changed."""
        rest = iter(values.items())
        while some := dict(islice(rest, TOLD_AT_ONCE)):
            changed = {name: self._document(name, value) for name, value in some.items() if self._is_new(name, value)}
            if changed:
                self._on_change(changed)
            await asyncio.sleep(0)

    def _is_new(self, name: str, value: bytes | None) -> bool:
        """Note the value of an entry; whether it has changed, and counts."""
        self._lost.discard(name)
        if value is None:
            return self._digests.pop(name, None) is not None
        known = self._digests.get(name)
        if len(name) > NAME_CHARACTERS_MAX or (known is None and len(self._digests) >= ENTRIES_MAX):
            self._warnings.warn("an entry of etcd does not count, for its name or as one too many: %.300r", name)
            return False
        digest = self._digests[name] = blake2b(value, digest_size=16).digest()
        return digest != known

    def _document(self, name: str, value: bytes | None) -> Document | None:
        if value is None:
            return None
        try:
            document = json.loads(value) if len(value) <= ENTRY_BYTES_MAX else None
            if not isinstance(document, dict):
                raise ValueError("it must be a JSON object of a few KiB")
        except (ValueError, RecursionError) as error:
            self._warnings.warn("the entry %s of etcd does not count: %.300r", self._prefix + repr(name[:300]), error)
            return None
        return document
